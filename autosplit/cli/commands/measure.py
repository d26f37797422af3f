"""Run ``autosplit measure``: run or simulate an optimizer step of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.cli.output import CommandResult, Manner, progress, speaks
from autosplit.cli.tables import add_row, pairs_table, plain_table, print_bullets, print_plain
from autosplit.cli.workload_arguments import checked_arguments, users_errors
from autosplit.plan.measured_step import MeasuredStep
from autosplit.text import memory_text, ms_text, rate_text, rates_text, short_bytes_text, short_name, tuple_text

_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "untraced")


def measure(
    manner: Manner, *, spec: str, model_options: Mapping[str, Any], **keywords: Any
) -> CommandResult[MeasuredStep] | int:
    """Measure a configuration, in several processes for DDP."""
    asked = checked_arguments(spec, model_options, keywords)
    if asked.num_processes > 1:
        from autosplit.cli.torchrun_job import run_together

        return run_together(manner.words, asked.num_processes)
    from autosplit.tuning import measure as measuring

    with progress(manner) as report:
        source = asked.source()
        with users_errors(spec):
            found = measuring.measure(source, **{**asked.keywords, "isolate": asked.isolate}, progress=report)
    if asked.is_rank and not speaks():
        return 0
    return CommandResult(found, lambda console: _print(found, console))


def _print(found: MeasuredStep, console: Console) -> None:
    if found.simulated:
        print_plain(Text("simulated: predicted for GPUs that this machine does not have", "yellow"), console)
    print_plain(_memory_table(found), console)
    several = len(found.split) > 1
    spread = "" if found.spread_s == 0 else f", give or take {ms_text(found.spread_s)}"
    rows = [
        *([("split", tuple_text(found.split)), ("strategy", found.strategy)] if several else []),
        ("batch_size", f"{sum(found.split)}"),
        ("accumulation_steps", f"{found.accumulation_steps}"),
        ("throughput", f"{rate_text(found.samples_per_s)} ({found.how})"),
        ("optimizer step", f"{ms_text(found.step_s)}{spread}, {ms_text(found.update_s)} for the update"),
        *([("GPU rates", rates_text(found.devices, found.rates))] if found.rates else []),
        *([("faster with", found.faster_with)] if found.bound_by else []),
    ]
    print_plain(pairs_table(rows), console)
    print_bullets(map(str, found.notes), console)


def _memory_table(found: MeasuredStep) -> Table:
    share = ("batch",) if len(found.split) > 1 else ()
    table = plain_table("device", *share, "memory", "made of", figures=(*share, "memory"))
    table.columns[-2].no_wrap = True  # the last column wraps instead
    for index, label in enumerate(found.devices):
        parts, name = found.memory[index], short_name(found.device_names[index])
        sizes = [] if parts is None else [(getattr(parts, f"{part}_bytes"), part) for part in _PARTS]
        sizes.sort(reverse=True)
        add_row(
            table,
            label if name == "cpu" else f"{label} {name}",
            *([f"{found.split[index]:,}"] if share else []),
            memory_text(found.peak_bytes[index], found.capacity_bytes[index]),
            ", ".join(f"{part} {short_bytes_text(nbytes)}" for nbytes, part in sizes if nbytes) or "-",
        )
    return table
