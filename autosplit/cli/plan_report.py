"""Print a plan: its devices, numbers, reasons and next commands, as a short or full report."""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autosplit.cli.check_report import check_lines, dependence_line
from autosplit.cli.pasted_code import UNSAVED, Origin, paste_lines
from autosplit.cli.tables import (
    add_row,
    bullet_table,
    memory_text,
    pairs_table,
    plain_table,
    print_plain,
    rates_text,
    shares_text,
    short_name,
)
from autosplit.devices.catalog import SIMULATED_ERRORS, UNMEASURED_RATES
from autosplit.plan.explanation import BINDING_SHARE, loader_target
from autosplit.plan.plan import Plan
from autosplit.plan.record import RankSettings, shares_processor
from autosplit.plan.strategy import recommended_plan, recommends_ddp
from autosplit.solve.split import even_split
from autosplit.text import bound_text, counted_text, listed, ms_text, printable, rate_text, tuple_text

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from autosplit.plan.explanation import Explanation
    from autosplit.solve.trial import Trial

MOST_REASONS = 2
"""Largest number of reasons in the short report. At 80 columns, a limit takes one line, and the time costs take two."""

MOST_NOTE_LINES = 3
"""Largest number of lines of notes in the short report at 80 columns.

With this number, two devices and three lines of reasons, the report has 24 lines.
"""

EQUAL_DEVICES = (
    "The devices are equal, so the split gains nothing. The plan has the largest useful batch and the accumulation "
    "steps."
)
"""The first sentence about a plan if `are_equal` holds."""

REMARKS = (UNMEASURED_RATES,)
"""Kinds of notes that only the full report shows, because they require no action."""

_LIMITS = {"memory": " (memory)", "max_batch_size": "+", "kernel": " (a kernel's limit)", "time": " (time)"}


def print_plan(plan: Plan, console: Console, *, origin: Origin | None = None, details: bool = False) -> None:
    """Print a plan's report."""
    report = full_report if details else short_report
    print_plain(report(plan, origin or UNSAVED), console)


def short_report(plan: Plan, origin: Origin) -> Group:
    """Build the short report: devices, numbers, gain, reasons, notes that require action, and the next command."""
    from rich.console import Group

    both, plan = plan, recommended_plan(plan)
    explanation = plan.explain()
    return Group(
        *_status(plan),
        _device_table(plan),
        pairs_table([*_short_numbers(plan), *strategies(both)], _styles(plan)),
        *_section("why", [*unused_lines(plan), *explanation.reasons()[:MOST_REASONS], *limit_lines(plan)]),
        *_section("notes", _notes_to_act_on(plan), "bold yellow"),
        *_pasted("", _next_lines(both, origin)),
    )


def full_report(plan: Plan, origin: Origin) -> Group:
    """Build the full report: the short report, plus the other strategy, all reasons and notes, and lines to paste."""
    from rich.console import Group

    both, plan = plan, recommended_plan(plan)
    explanation = plan.explain()
    notes = [*check_lines(plan.checks), *map(str, plan.notes), *(SIMULATED_ERRORS if plan.simulated else ())]
    other = (
        ("BalancedDataParallel", [_balanced_line(both)])
        if both is not plan
        else (ddp_heading(explanation), ddp_lines(plan))
    )
    return Group(
        *_status(plan),
        _device_table(plan),
        pairs_table([*all_numbers(plan, both.trials), *strategies(both)], _styles(plan)),
        *_section(*other),
        *_section("explained", [*unused_lines(plan), *explained_lines(explanation), *limit_lines(plan)]),
        *_section("notes", notes, "bold yellow"),
        *_pasted("on the machine that has the GPUs" if plan.simulated else "to use it", paste_lines(both, origin)),
    )


def _status(plan: Plan) -> Iterator[Text]:
    from rich.text import Text

    if plan.simulated:
        yield Text("simulated: predicted for GPUs that this machine does not have", "yellow")
    if are_equal(plan):
        yield Text(EQUAL_DEVICES)
    if not plan.complete:
        yield Text("interrupted: the best plan so far", "yellow")


def are_equal(plan: Plan) -> bool:
    """Return whether the plan has several devices of one kind, with an even split."""
    kinds = {(device.name, device.capacity_bytes) for device in plan.devices}
    is_even = plan.split == even_split(plan.batch_size, len(plan.split))
    return len(plan.devices) > 1 and len(kinds) == 1 and is_even


def _styles(plan: Plan) -> dict[str, str]:
    gain = {} if shares_processor(plan) else {"gain": "green"}
    return {**gain, "strategy": "bold green"}


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


def strategies(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the recommended strategy, with the throughput of the other one. `plan` is the plan as it was found."""
    if plan.fastest is None:
        return
    ratio = plan.ddp.samples_per_s / plan.samples_per_s
    if recommends_ddp(plan):
        compared = f"{ratio:.2f} times BalancedDataParallel, {rate_text(plan.samples_per_s)}"
        yield "strategy", f"DDP (autosplit launch): {compared}"
        return
    known = "" if plan.ddp.measured else " (predicted)"
    compared = "as fast as DDP, in one process" if abs(ratio - 1) <= BINDING_SHARE else f"{1 / ratio:.2f} times DDP"
    yield "strategy", f"BalancedDataParallel (plan.wrap): {compared}, {rate_text(plan.ddp.samples_per_s)}{known}"


def _gain_over_equal_ranks(plan: Plan) -> str:
    even = plan.ddp.even_samples_per_s
    return "" if even is None else f", {plan.ddp.samples_per_s / even:.2f} times equal ranks"


def _balanced_line(plan: Plan) -> str:
    forwards = counted_text(plan.accumulation_steps, "forward")
    return f"split {shares_text(plan.split)}, {forwards}, {rate_text(plan.samples_per_s)}, {_gain_text(plan)}"


def unused_lines(plan: Plan) -> list[str]:
    """Return a sentence for each reason why devices get no samples."""
    unused = [device for device in plan.devices if not device.share]
    full = [device.label for device in unused if not device.ceiling.batch_size]
    slow = [device.label for device in unused if device.ceiling.batch_size]
    lines = [f"{listed(full, 4)} has too little memory for the model and one sample."] if full else []
    if slow:
        verb = "gets" if len(slow) == 1 else "get"
        line = f"{listed(slow, 4)} {verb} no samples, because copying the model there takes longer than it saves."
        line += "" if plan.ddp.ranks else " A larger effective batch may use more devices."
        lines.append(line + " DDP uses all devices." * (plan.ddp.samples_per_s > plan.samples_per_s))
    return lines


def limit_lines(plan: Plan) -> list[str]:
    """Return a sentence for each kind of ceiling that memory does not limit."""
    limits = {device.ceiling.limited_by for device in plan.devices}
    lines = {
        "max_batch_size": "A ceiling with + is the largest batch that was tried. A larger batch may fit.",
        "time": (
            "A ceiling with (time) is not limited by memory. A larger batch would be no faster, or too slow to measure."
        ),
    }
    return [line for limit, line in lines.items() if limit in limits]


def _notes_to_act_on(plan: Plan) -> list[str]:
    is_cut = sum(map(bool, plan.split)) > 1 or plan.accumulation_steps > 1
    depends = dependence_line(plan.checks) if is_cut else ""
    notes = [*([depends] if depends else []), *(note.text for note in plan.notes if note.kind not in REMARKS)]
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


def _device_table(plan: Plan) -> Table:
    headings = device_columns(plan)
    table = plain_table(*headings, figures={*headings} - {"device", "ceiling"})
    names, figures = [device.name for device in plan.devices], [cells[1:] for cells in device_cells(plan)]
    for _, alike in itertools.groupby(range(len(names)), lambda place: (names[place], figures[place])):
        first, *others = alike
        add_row(table, _device_text(plan, first, (others or [first])[-1]), *figures[first])
    return table


def _device_text(plan: Plan, first: int, last: int) -> str:
    labels = [device.label for device in plan.devices]
    if len({*labels}) < len(labels):
        labels = [f"rank {rank}" for rank in range(len(labels))]
    text = labels[first] if first == last else f"{labels[first]} to {labels[last].rpartition(':')[2]}"
    return text if plan.devices[first].kind == "cpu" else f"{text} {short_name(plan.devices[first].name)}"


def device_columns(plan: Plan) -> tuple[str, ...]:
    """Return the headings of the table of devices. For a single device there is no column for the split."""
    several = len(plan.devices) > 1
    batch = ("batch",) if several else ()
    return ("device", *batch, f"memory at this {'split' if several else 'batch'}", "ceiling", "compute")


def device_cells(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each device's row."""
    several = len(plan.devices) > 1
    for place, (device, ceiling) in enumerate(zip(plan.devices, plan.ceilings, strict=True)):
        not_run = "" if plan.simulated or device.ceiling.confirmed else ", not run"
        yield (
            _device_text(plan, place, place),
            *([f"{device.share:,}"] if several else []),
            memory_text(device.peak_bytes, device.capacity_bytes),
            f"{ceiling:,}{_LIMITS[device.ceiling.limited_by]}{not_run}",
            ms_text(device.busy_s),
        )


def _numbers(plan: Plan) -> list[tuple[str, str]]:
    several = len(plan.devices) > 1
    rows = [("split", tuple_text(plan.split))] if several else []
    rows.append(("batch_size", f"{plan.batch_size}"))
    last = plan.effective_batch_size - (plan.accumulation_steps - 1) * plan.batch_size
    shorter = "" if last == plan.batch_size else f" (the last of {counted_text(last, 'sample')})"
    rows.append(("accumulation_steps", f"{plan.accumulation_steps}{shorter}"))
    rows.append(("effective batch", f"{counted_text(plan.effective_batch_size, 'sample')} per optimizer step"))
    if plan.effective_batch_sizes is None:
        own = plan.sample_batch_size or "your own"
        rows.append(("", f"autosplit chose this. To keep {own}, set effective_batch_size"))
    rows.append(("throughput", f"{rate_text(plan.samples_per_s)}{_origin_text(plan)}"))
    if plan.checkpointed:
        names = plan.checkpointed
        to = f" to {names[-1]}" if len(names) > 1 else ""
        rows.append(("checkpointed", f"{counted_text(len(names), 'layer')}: {names[0]}{to}"))
    if plan.loader_settings is not None and plan.loader_samples_per_s is not None:
        workers = plan.loader_settings.num_workers
        speed = f"{rate_text(plan.loader_samples_per_s)} with {counted_text(workers, 'worker')}"
        target = loader_target(plan.samples_per_s, plan.lengths)
        rows.append(("loader", f"{speed}: {bound_text(plan.loader_samples_per_s, target)}"))
    if plan.lengths is not None:
        like, gain = plan.lengths.samples_per_s, plan.lengths.samples_per_s / plan.lengths.fixed_samples_per_s
        rows.append(("by length", f"{rate_text(like)}, {gain:.2f} times batches of one size (predicted)"))
    if several:
        rows.append(("gain", _gain_text(plan)))
    return rows


def _short_numbers(plan: Plan) -> Iterable[tuple[str, str]]:
    numbers = dict(_numbers(plan))
    if "split" in numbers:
        numbers["split"] = f"{shares_text(plan.split)}, {numbers.pop('batch_size')} samples per forward"
    return numbers.items()


def all_numbers(plan: Plan, trials: Sequence[Trial] = ()) -> list[tuple[str, str]]:
    """Return the numbers of the full report, with `gpu0_bsz` and the effort of the search."""
    rows = _numbers(plan)
    if len(plan.devices) > 1 and plan.region is not None:
        rows.append(("gpu0_bsz", f"{plan.gpu0_bsz}"))
    known = [(device.label, device.rates) for device in plan.devices if device.rates]
    if known:
        rows.append(("rates", rates_text(*zip(*known, strict=True))))
    if trials or plan.trials:
        rows.append(("found with", _effort_text(plan, trials or plan.trials)))
    return rows


def _origin_text(plan: Plan) -> str:
    """Return whether the plan's throughput was simulated or predicted. If it was measured, return nothing."""
    is_predicted = plan.region is None and len(plan.ddp.ranks) > 1 and not plan.ddp.measured
    return " (simulated)" if plan.simulated else " (predicted)" if is_predicted else ""


def _gain_text(plan: Plan) -> str:
    """Compare the plan with the even split and with the fastest device alone."""
    if shares_processor(plan):
        return "none is reported, because these devices share one CPU"
    alone = max(plan.explain().alone, key=lambda one: one.samples_per_s, default=None)
    over = "" if alone is None else f", {alone.gain:.2f} times {alone.devices[0]} alone"
    return f"{_gain_over_even(plan)}{over}"


def _gain_over_even(plan: Plan) -> str:
    even = even_split(plan.batch_size, len(plan.split))
    if plan.split == even:
        return "none over the even split, which is the fastest"
    if plan.even_samples_per_s is None and plan.region is None and plan.ddp.even_samples_per_s is not None:
        gain = plan.samples_per_s / plan.ddp.even_samples_per_s
        return f"{gain:.2f} times equal ranks{'' if plan.simulated else ' (predicted)'}"
    if plan.even_samples_per_s is not None:
        return f"{plan.samples_per_s / plan.even_samples_per_s:.2f} times the even split {shares_text(even)}"
    pairs = zip(plan.devices, even, plan.ceilings, strict=True)
    over = [f"{device.label} fits {most}" for device, share, most in pairs if share > most]
    if over:
        return f"the even split {shares_text(even)} does not fit: {', '.join(over)}"
    return f"the even split {shares_text(even)} was not run"


def _effort_text(plan: Plan, trials: Sequence[Trial]) -> str:
    failed = sum(trial.failure is not None for trial in trials)
    text = counted_text(len(trials), "trial") + (f" ({failed} failed)" if failed else "")
    if plan.simulated and not plan.real_steps:
        return f"{text}, no real step"
    return f"{text}, {counted_text(plan.real_steps, 'real step')}, {plan.real_ooms} out of memory"


def ddp_lines(plan: Plan) -> list[str]:
    """Return a line for each group of equal ranks. For a single device, return no lines."""
    if len(plan.devices) == 1:
        return []
    if not plan.ddp.ranks:
        return [plan.ddp.reason] if plan.ddp.reason else []
    lines = [
        _ranks_text(list(ranks))
        for _, ranks in itertools.groupby(plan.ddp.ranks, lambda rank: (rank.batch_size, rank.accumulation_steps))
    ]
    effective = plan.ddp.effective_batch_size
    same = effective in (0, plan.effective_batch_size)
    other = "" if same else f", {counted_text(effective, 'sample')} per optimizer step"
    return [*lines, f"together {rate_text(plan.ddp.samples_per_s)}{other}{_gain_over_equal_ranks(plan)}"]


def ddp_heading(explanation: Explanation) -> str:
    """Return the heading of DDP's numbers. If BalancedDataParallel is also possible, add which strategy is faster."""
    heading = f"DDP, {'measured' if explanation.ddp_measured else 'predicted'}"
    compared = explanation.comparison().removeprefix("DDP is ")
    return f"{heading}: {compared}" if compared else heading


def explained_lines(explanation: Explanation) -> list[str]:
    """Return the reasons, without those that are elsewhere in the report or have no effect."""
    left_out = {"bounds", "ddp"}
    if explanation.shares_processor or explanation.even_measured is not None:
        left_out.add("even")  # the row "gain" already has it
    if explanation.more_memory is not None and not explanation.more_memory.pays:
        left_out.add("memory")
    others = (text for subject, text in explanation.sentences().items() if subject not in left_out)
    return [*explanation.reasons(), *others]


def _ranks_text(ranks: Sequence[RankSettings]) -> str:
    first, last = ranks[0], ranks[-1]
    who = f"rank {first.rank} ({first.device})"
    if last is not first:
        who = f"ranks {first.rank} to {last.rank} ({first.device} to {last.device})"
    return f"{who}: batch_size {first.batch_size}, accumulation_steps {first.accumulation_steps}"


def request_text(request: Mapping[str, Any]) -> str:
    """Return the arguments of a request without devices, name and defaults: ``effective_batch_size 256:512``."""
    texts = []
    for name, value in request.items():
        if name not in ("devices", "name") and value is not None and (name, value) != ("strategy", "auto"):
            texts.append(f"{name} {':'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return ", ".join(texts)
