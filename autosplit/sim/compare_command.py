"""Run ``autosplit compare``: tune a workload for several machines and compare the plans."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.cli.output import EXIT_INTERRUPTED, EXIT_MISFIT, CommandResult, Manner, Problem, progress
from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.cli.workload_arguments import (
    is_one_of_several,
    isolates,
    sendable,
    tuned_quietly,
    users_errors,
    workload_of_spec,
)
from autosplit.errors import InputError
from autosplit.launcher import end_with_launcher
from autosplit.plan.plan import Plan
from autosplit.sim.cluster import Cluster, is_cluster
from autosplit.sim.compare import AskedMachine, ComparedMachine, Comparison
from autosplit.sim.comparison_types import Compared, ComparedModels
from autosplit.solve.split import whole_number
from autosplit.text import counted_text, printable, rate_text, size_text

if TYPE_CHECKING:
    from autosplit.sim.cluster_prediction import ClusterScaling

NARROW = 100
"""Width in columns below which a machine's plan is printed under its name."""

BAR = 12
"""Width in columns of the longest bar of samples/s."""


def compare(
    manner: Manner,
    *,
    spec: str | None = None,
    models: str | None = None,
    devices: Sequence[str] = (),
    price: Sequence[tuple[str, float]] = (),
    samples: int | None = None,
    model_options: Mapping[str, Any],
    **keywords: Any,
) -> CommandResult[Compared] | CommandResult[ComparedModels] | int:
    """Tune for each machine in turn, and compare the plans. The time limit applies to all machines together."""
    if (spec is None) == (models is None):
        raise InputError("autosplit compare needs either a workload or --models FILE. Name one of them.")
    end_with_launcher()
    if is_one_of_several():
        raise InputError(
            "autosplit compare was started in a job of several processes, but it needs only one process. Run it "
            "without torchrun."
        )
    if samples is not None:
        whole_number("--samples", samples, minimum=1)
    if models is not None:
        if samples is not None or any(map(is_cluster, devices)):
            raise InputError("--models can't be combined with clusters or --samples. Compare one workload instead.")
        from autosplit.sim.compare_models_command import compare_models

        return compare_models(manner, models, devices=devices, price=price, model_options=model_options, **keywords)
    for name in ("format", "output"):
        if {name, f"{name}_"} & keywords.keys():
            raise InputError(f"--{name} needs --models FILE. Add --models FILE, or leave --{name} out.")
    assert spec is not None
    return _compare_one(manner, spec, devices, price, samples, model_options, keywords)


def _compare_one(
    manner: Manner,
    spec: str,
    devices: Sequence[str],
    price: Sequence[tuple[str, float]],
    samples: int | None,
    model_options: Mapping[str, Any],
    keywords: dict[str, Any],
) -> CommandResult[Compared] | int:
    from autosplit.sim import compare as comparing

    machines = comparing.asked_machines(devices, price, keywords)
    time_limit_s = keywords.pop("time_limit_s", None)
    interrupted = False
    with progress(manner) as report:
        workload: Any = workload_of_spec(spec, **model_options)

        def tune_one(machine: AskedMachine, timed: Mapping[str, Any]) -> Plan | ClusterScaling:
            if isinstance(machine.spec, Cluster):
                from autosplit.sim.cluster_prediction import predict_cluster

                with users_errors(spec):
                    return predict_cluster(workload, cluster=machine.spec, **{**keywords, **timed})
            isolated = isolates(keywords.get("isolate"), machine.devices)
            source = sendable(spec, workload, isolate=isolated)
            return tuned_quietly(spec, source, devices=machine.spec, **{**keywords, **timed, "isolate": isolated})

        try:
            comparison = comparing.compared(machines, tune_one, time_limit_s=time_limit_s, progress=report)
        except comparing.ComparisonInterrupted as interrupt:
            if interrupt.comparison is None:
                raise
            comparison, interrupted = interrupt.comparison, True
    comparison = comparison.for_samples(samples)
    problems = []
    if interrupted:
        text = "The comparison was interrupted, so only the finished machines are shown. Run the command again for all"
        problems = [Problem(f"{text} machines.", EXIT_INTERRUPTED)]
    elif comparison.best is None:
        text = f"The workload fits none of the {len(machines)} machines. The table shows the memory that each machine"
        problems = [Problem(f"{text} lacks.", EXIT_MISFIT)]
    return CommandResult(comparison.for_json(), lambda console: print_comparison(comparison, console), problems)


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
    for machine in comparison.machines:
        if machine.cluster is not None:
            print_plain(Text(f"\nscaling of {machine.devices}"), console)
            print_plain(_scaling_table(machine.cluster, machine.price_per_hour), console)
    left = [f"not compared: {', '.join(comparison.not_compared)}"] if comparison.not_compared else []
    if comparison.samples is not None:
        compute = [(machine.devices, machine.compute_for(comparison.samples)) for machine in comparison.machines]
        left += [f"{comparison.samples:,} samples on {name}: {request}" for name, request in compute if request]
    print_bullets([*left, *comparison.notes], console)


def _scaling_table(scaling: ClusterScaling, price_per_hour: float | None) -> Table:
    priced = price_per_hour is not None
    figures = ("nodes", "GPUs", "samples/s", *(["cost of 1M"] if priced else []), "efficiency")
    table = plain_table(*figures, "limited by", "batch per GPU", "", figures=figures)
    table.columns[-1].no_wrap = True
    most = max(one.samples_per_s for one in scaling.predictions)
    for one in scaling.predictions:
        # The price is for the whole cluster, so divide it equally among the GPUs.
        price = (price_per_hour or 0.0) * one.ranks / scaling.whole.ranks
        costs = [_money_text(price / 3600 * 1e6 / one.samples_per_s)] if priced else []
        batches = ", ".join(f"{share.gpu} {share.batch_size}" for share in one.shares)
        steps = f" x {one.accumulation_steps}" if one.accumulation_steps > 1 else ""
        rate = rate_text(one.samples_per_s).removesuffix(" samples/s")
        bar = "#" * max(1, round(BAR * one.samples_per_s / most))
        numbers = (f"{one.nodes:,}", f"{one.ranks:,}", rate, *costs, f"{one.efficiency:.0%}")
        add_row(table, *numbers, one.limited_by, f"{batches}{steps}", bar)
    return table


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
    plan, misfit = machine.plan, machine.misfit
    if machine.cluster is not None:
        whole = machine.cluster.whole
        return [f"{whole.ranks} ranks", counted_text(whole.accumulation_steps, "step")]
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
    runs = [(share, len(list(alike))) for share, alike in itertools.groupby(split)]
    return ", ".join(f"{count}x{share}" if count > 2 else ", ".join([f"{share}"] * count) for share, count in runs)


def _money_text(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.3g}"
