"""Run ``autosplit report``: write a plan as an HTML page."""

from __future__ import annotations

import sys

from autosplit.cli.named_plan import named_or_newest
from autosplit.cli.output import CommandResult, Manner, Place, note
from autosplit.errors import InputError


def report(
    manner: Manner, *, which: str | None = None, output: str = "report.html", force: bool = False
) -> CommandResult[Place] | int:
    """Write a plan's page to a file or to stdout."""
    from autosplit.tools.report_page import check_page, page_of, write_page

    to_stdout = output == "-"
    if to_stdout and manner.json:
        raise InputError("-o - and --json both print to stdout. Leave one of them out.")
    if not to_stdout:
        check_page(output, force=force)
    _, plan = named_or_newest(which, manner)
    if to_stdout:
        sys.stdout.buffer.write(page_of(plan).encode())
        sys.stdout.buffer.flush()
        return 0
    write_page(plan, output, force=force)
    if not manner.json:
        note(f"wrote {output}", manner)
    return CommandResult(Place(output))
