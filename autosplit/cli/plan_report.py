"""Print a plan's report in the terminal, short or full. `plan.rows` writes its texts."""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autosplit.cli.check_report import check_lines, dependence_line
from autosplit.cli.pasted_code import UNSAVED, Origin, paste_lines
from autosplit.cli.tables import add_row, bullet_table, pairs_table, plain_table, print_plain
from autosplit.devices.catalog import UNMEASURED_RATES
from autosplit.plan.plan import Plan
from autosplit.plan.rows import PlanRows, rows_of
from autosplit.text import counted_text, printable, shares_text

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

MOST_REASONS = 2
"""Largest number of reasons in the short report. At 80 columns, a limit takes one line, and the time costs take two."""

MOST_NOTE_LINES = 3
"""Largest number of lines of notes in the short report at 80 columns.

With this number, two devices and three lines of reasons, the report has 24 lines.
"""

REMARKS = (UNMEASURED_RATES,)
"""Kinds of notes that only the full report shows, because they require no action."""

_ONLY_FULL = ("gpu0_bsz", "rates", "found with")
"""Numbers that only the full report shows."""


def print_plan(plan: Plan, console: Console, *, origin: Origin | None = None, details: bool = False) -> None:
    """Print a plan's report."""
    report = full_report if details else short_report
    print_plain(report(plan, origin or UNSAVED), console)


def short_report(plan: Plan, origin: Origin) -> Group:
    """Build the short report: devices, numbers, gain, reasons, notes that require action, and the next command."""
    from rich.console import Group

    rows = rows_of(plan)
    numbers = {name: text for name, text in rows.numbers.items() if name not in _ONLY_FULL}
    if "split" in numbers:
        numbers["split"] = f"{shares_text(rows.layout.split)}, {numbers.pop('batch_size')} samples per forward"
    return Group(
        *_status(plan, rows),
        _device_table(rows),
        _numbers_table(numbers, rows),
        *_section("why", [*rows.unused, *rows.reasons[:MOST_REASONS], *rows.limits]),
        *_section("notes", _notes_to_act_on(plan, rows), "bold yellow"),
        *_pasted("", _next_lines(plan, origin)),
    )


def full_report(plan: Plan, origin: Origin) -> Group:
    """Build the full report: the short report, plus the other strategy, all reasons and notes, and lines to paste."""
    from rich.console import Group

    rows = rows_of(plan)
    return Group(
        *_status(plan, rows),
        _device_table(rows),
        _numbers_table(rows.numbers, rows),
        *_section(*rows.other),
        *_section("explained", [*rows.unused, *rows.explained, *rows.limits]),
        *_section("notes", [*check_lines(plan.checks), *map(str, rows.notes), *rows.remarks], "bold yellow"),
        *_pasted("on the machine that has the GPUs" if plan.simulated else "to use it", paste_lines(plan, origin)),
    )


def _status(plan: Plan, rows: PlanRows) -> Iterator[Text]:
    from rich.text import Text

    if plan.simulated:
        yield Text("simulated: predicted for GPUs that this machine does not have", "yellow")
    if rows.equal:
        yield Text(rows.equal)
    if not plan.complete:
        yield Text("interrupted: the best plan so far", "yellow")


def _numbers_table(numbers: Mapping[str, str], rows: PlanRows) -> Table:
    styles = {"strategy": "bold green"} | ({} if rows.layout.shares_processor else {"gain": "green"})
    strategy = [("strategy", rows.strategy)] if rows.strategy else []
    return pairs_table([*numbers.items(), *strategy], styles)


def _section(heading: str, lines: Sequence[str], style: str = "bold") -> Iterator[RenderableType]:
    from rich.text import Text

    if lines:
        yield Text(f"\n{heading}", style)
        yield bullet_table(lines)


def _pasted(heading: str, lines: Sequence[str]) -> Iterator[Text]:
    from rich.text import Text

    yield Text(f"\n{heading}\n" if heading else "", "bold")
    for line in lines:
        yield Text(printable(line, longest=None), no_wrap=True, overflow="ignore")


def _notes_to_act_on(plan: Plan, rows: PlanRows) -> list[str]:
    is_cut = sum(map(bool, rows.layout.split)) > 1 or rows.layout.accumulation_steps > 1
    depends = dependence_line(plan.checks) if is_cut else ""
    notes = [*([depends] if depends else []), *(note.text for note in rows.notes if note.kind not in REMARKS)]
    ends = list(itertools.accumulate(len(textwrap.wrap(note, 78)) for note in notes))
    if not ends or ends[-1] <= MOST_NOTE_LINES:
        return notes
    shown = max(1, sum(end < MOST_NOTE_LINES for end in ends))
    return [
        *notes[:shown],
        *([f"{counted_text(len(notes) - shown, 'more note')}: add --details"] if shown < len(notes) else []),
    ]


def _next_lines(plan: Plan, origin: Origin) -> tuple[str, ...]:
    """Return the next command, and the command for details. For a plan that is not saved, return the lines to paste."""
    if origin.saved_as is None:
        lines = paste_lines(plan, origin)
        return (f"next  {lines[0]}",) if plan.simulated else lines
    show = f"python -m autosplit show {shlex.quote(origin.saved_as)}"
    following = paste_lines(plan, origin)[0] if plan.simulated else f"{show} --code  # the lines to paste"
    return (f"next  {following}", f"more  {show} --details")


def _device_table(rows: PlanRows) -> Table:
    table = plain_table(*rows.columns, figures={*rows.columns} - {"device", "ceiling"})
    for row in rows.devices:
        add_row(table, *row)
    return table
