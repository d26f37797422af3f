"""Run ``autosplit compare``: tune a workload for several machines and compare the plans."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.cli.exit_code import end_with_parent
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed, print_answer, progress
from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.cli.workload_arguments import isolates, one_of_several, sendable, tuned_quietly
from autosplit.errors import InputError
from autosplit.extras.compare import ComparedMachine, Comparison
from autosplit.plan.plan import Plan
from autosplit.text import counted_text, printable, rate_text, size_text

EXIT_MISFIT = 3

NARROW = 100
"""Width in columns below which a machine's plan is printed under its name."""


def compare(
    manner: Manner,
    *,
    spec: str | None = None,
    models: str | None = None,
    devices: Sequence[str] = (),
    price: Sequence[tuple[str, float]] = (),
    model_options: Mapping[str, Any],
    **keywords: Any,
) -> int:
    """Tune for each machine in turn, and print one table. The time limit applies to all machines together."""
    if (spec is None) == (models is None):
        raise InputError(
            "autosplit compare needs a workload or --models FILE, and not both. Name one of them.",
            code="compare-spec-or-models",
        )
    end_with_parent()
    if one_of_several():
        raise InputError(
            "autosplit compare was started in a job of several processes, but it tunes for one machine at a time. Run "
            "it without torchrun.",
            code="compare-one-process",
        )
    if models is not None:
        from autosplit.cli.commands.compare_models import compare_models

        return compare_models(manner, models, devices=devices, price=price, model_options=model_options, **keywords)
    for name in ("format", "output"):
        if name in keywords:
            raise InputError(f"--{name} needs --models FILE. Leave it out.", code="compare-format-without-models")
    assert spec is not None
    return _compare_one(manner, spec, devices, price, model_options, keywords)


def _compare_one(
    manner: Manner,
    spec: str,
    devices: Sequence[str],
    price: Sequence[tuple[str, float]],
    model_options: Mapping[str, Any],
    keywords: dict[str, Any],
) -> int:
    from autosplit.extras import compare as comparing
    from autosplit.extras.workload_spec import workload_of_spec

    machines = comparing.asked_machines(devices, price, keywords)
    time_limit_s = keywords.pop("time_limit_s", None)
    interrupted = False
    with progress(manner) as report:
        workload: Any = workload_of_spec(spec, **model_options)

        def tune_one(devices: str, timed: Mapping[str, Any]) -> Plan:
            isolated = isolates(keywords.get("isolate"), devices)
            source = sendable(spec, workload) if isolated else workload
            return tuned_quietly(spec, source, devices=devices, **{**keywords, **timed, "isolate": isolated})

        try:
            comparison = comparing.compared(machines, tune_one, time_limit_s=time_limit_s, progress=report)
        except comparing.ComparisonInterrupted as interrupt:
            if interrupt.comparison is None:
                raise
            comparison, interrupted = interrupt.comparison, True
    if interrupted:
        failed("Interrupted: the finished machines are shown. Run the command again for all of them.", EXIT_INTERRUPTED)
    print_answer(comparison.to_dict(), manner, lambda console: print_comparison(comparison, console))
    if interrupted:
        return EXIT_INTERRUPTED
    if comparison.best is None:
        return failed(
            f"The workload fits none of {len(machines)} machines. The table shows what each of them lacks.", EXIT_MISFIT
        )
    return 0


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table of machines with their plans and costs, followed by notes on the accuracy."""
    predicted = [machine.predicted for machine in comparison.machines]
    if any(predicted):
        which = "predicted" if all(predicted) else "some are predicted"
        print_plain(Text(f"{which}: for GPUs that this machine does not have", "yellow"), console)
    if len(comparison.machines) > 1:
        priced = comparison.sorted_by == "cost_per_million_samples"
        print_plain(Text(f"sorted by {'the cost of 1M samples' if priced else 'samples/s'}"), console)
    print_plain(_comparison_table(comparison, narrow=console.width < NARROW), console)
    left = [f"not compared: {', '.join(comparison.not_compared)}"] if comparison.not_compared else []
    print_bullets([*left, *comparison.notes], console)


def _comparison_table(comparison: Comparison, *, narrow: bool) -> Table:
    priced = comparison.sorted_by == "cost_per_million_samples"
    several = len({one.plan.precision for one in comparison.machines if one.plan is not None}) > 1
    figures = ["samples/s", "headroom", *(["cost of 1M"] if priced else [])]
    if narrow:
        table = plain_table("machine and plan", *figures, figures=figures)
    else:
        figures[2:2] = ["price/h"] if priced else []
        table = plain_table("machine", "plan", *figures, "how", figures=figures)
    for machine in comparison.machines:
        how = "predicted" if machine.predicted else "measured"
        plan = _machine_plan_texts(machine, with_precision=several)
        costs = [_money_text(machine.cost_per_million_samples)] if priced else []
        prices = [_money_text(machine.price_per_hour)] if priced else []
        rate, headroom = machine.samples_per_s, machine.headroom_bytes
        numbers = ["-" if rate is None else rate_text(rate).removesuffix(" samples/s")]
        numbers.append("-" if headroom is None else size_text(headroom))
        if narrow:
            lines = [machine.devices, *plan[:-1], f"{plan[-1]} ({how})"]
            add_row(table, Text("\n  ".join(map(printable, lines))), *numbers, *costs)
        else:
            add_row(table, machine.devices, ", ".join(plan), *numbers, *prices, *costs, how)
    return table


def _machine_plan_texts(machine: ComparedMachine, *, with_precision: bool) -> list[str]:
    """Return a machine's plan as texts, such as ``(12, 24) = 36`` and ``3 steps``, or the reason why nothing fits."""
    plan, misfit = machine.plan, machine.misfit
    if plan is not None:
        batch = f"batch {plan.batch_size}"
        if len(plan.split) > 1:
            batch = f"({_runs_text(plan.split)}) = {plan.batch_size}"
        steps = counted_text(plan.accumulation_steps, "step")
        return [batch, f"{steps}, {plan.precision}" if with_precision else steps]
    assert misfit is not None, machine
    if misfit.device is None or not misfit.needed_bytes:
        return [f"does not fit: {misfit.reason}"]
    needed, held = size_text(misfit.needed_bytes), size_text(misfit.capacity_bytes)
    return [f"does not fit: {misfit.device} needs {needed}, has {held}"]


def _runs_text(split: Sequence[int]) -> str:
    """Format a split with its runs counted: ``12, 7x35``."""
    runs = [(share, len(list(alike))) for share, alike in itertools.groupby(split)]
    return ", ".join(f"{count}x{share}" if count > 2 else ", ".join([f"{share}"] * count) for share, count in runs)


def _money_text(amount: float | None) -> str:
    """Format money without a currency: two decimals, or three significant digits below 1."""
    if amount is None:
        return "-"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.3g}"
