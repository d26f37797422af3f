"""Run ``autosplit loader``: find the fastest settings of a DataLoader."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from autosplit.cli.output import CommandResult, Manner
from autosplit.cli.tables import add_row, pairs_table, plain_table, print_bullets, print_plain
from autosplit.cli.terminal import clean_stdout
from autosplit.cli.workload_arguments import users_errors
from autosplit.text import ms_text, rate_text
from autosplit.tools.loader_result import MeasuredLoader


def loader(_manner: Manner, *, spec: str, **keywords: Any) -> CommandResult[MeasuredLoader]:
    """Measure the DataLoader of a file."""
    from autosplit.tools.loader_speed import measure_loader
    from autosplit.workload.from_file import load_loader

    with clean_stdout(), users_errors(spec):
        found = measure_loader(load_loader(spec), **keywords)
    return CommandResult(found, lambda console: _print(found, console))


def _print(found: MeasuredLoader, console: Console) -> None:
    figures = ("workers", "ahead", "samples/s", "give or take", "first batch")
    table = plain_table("workers", "ahead", "pinned", "samples/s", "give or take", "first batch", figures=figures)
    for one in found.tried:
        add_row(
            table,
            f"{one.settings.num_workers}",
            f"{one.settings.prefetch_factor or '-'}",
            "yes" if one.settings.pin_memory else "no",
            rate_text(one.samples_per_s),
            f"{100 * one.error_share:.1f}%",
            ms_text(one.start_s),
        )
    print_plain(table, console)
    settings = ", ".join(f"{name}={value}" for name, value in found.settings.to_dict().items())
    rows = [("fastest", f"{rate_text(found.samples_per_s)} with {settings}")]
    if found.present_samples_per_s is not None:
        times = found.samples_per_s / found.present_samples_per_s
        rows.append(
            ("at present", f"{rate_text(found.present_samples_per_s)} (the fastest is {times:.2f} times as fast)")
        )
    print_plain(pairs_table(rows), console)
    print_bullets(map(str, found.notes), console)
