"""Print what was measured of one configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosplit.cli.tables import (
    add_row,
    bullet_table,
    memory_text,
    pairs_table,
    plain_table,
    print_plain,
    rates_text,
    short_bytes_text,
    short_name,
    tuple_text,
)
from autosplit.text import ms_text, rate_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autosplit.plan.measured_step import MeasuredStep
    from autosplit.solve.memory import MemoryParts

__all__ = ["print_measured"]

_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "untraced")


def print_measured(found: MeasuredStep, console: Console) -> None:
    """Print a step: each device's memory and what it is of, the time, what bounds it, and the notes."""
    from rich.text import Text

    if found.simulated:
        print_plain(Text("simulated: predicted for cards that are not here", "yellow"), console)
    print_plain(_memory_table(found), console)
    several = len(found.split) > 1
    spread = "" if found.spread_s == 0 else f", give or take {ms_text(found.spread_s)}"
    rows = [
        *([("split", tuple_text(found.split)), ("strategy", found.strategy)] if several else []),
        ("batch_size", f"{sum(found.split)}"),
        ("accumulation_steps", f"{found.accumulation_steps}"),
        ("throughput", f"{rate_text(found.samples_per_s)} ({found.how})"),
        ("optimizer step", f"{ms_text(found.step_s)}{spread}; {ms_text(found.update_s)} of it the update"),
        *([("card rates", rates_text(found.devices, found.rates))] if found.rates else []),
        *([("faster with", found.faster_with)] if found.bound_by else []),
    ]
    print_plain(pairs_table(rows), console)
    if found.notes:
        print_plain(bullet_table(found.notes), console)


def _memory_table(found: MeasuredStep) -> Table:
    """Return a row for each device, with the parts of its memory, the largest first."""
    share = ("share",) if len(found.split) > 1 else ()
    table = plain_table("device", *share, "memory", "made of", figures=(*share, "memory"))
    table.columns[-2].no_wrap = True  # what it is made of gives way
    for index, label in enumerate(found.devices):
        parts, name = found.memory[index], short_name(found.device_names[index])
        add_row(
            table,
            label if name == "cpu" else f"{label} {name}",
            *([f"{found.split[index]:,}"] if share else []),
            memory_text(found.peak_bytes[index], found.capacity_bytes[index]),
            "-" if parts is None else _parts_text(parts),
        )
    return table


def _parts_text(parts: MemoryParts) -> str:
    """Write ``activations 218 MiB, optimizer 6 MiB``."""
    sizes = sorted(((getattr(parts, f"{part}_bytes"), part) for part in _PARTS), reverse=True)
    return ", ".join(f"{part} {short_bytes_text(nbytes)}" for nbytes, part in sizes if nbytes)
