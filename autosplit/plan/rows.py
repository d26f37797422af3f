"""Write the rows of a plan's report once: its devices, numbers, reasons and notes. The terminal and pages lay them out.

A report leads with the recommended layout. The other strategy gets one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.notes import Note
from autosplit.plan.compute_explanation import explanation_of
from autosplit.plan.explanation import BINDING_SHARE, Explanation, loader_target
from autosplit.plan.layout import Layout, Seat
from autosplit.plan.record import PlanRecord
from autosplit.solve.split import even_split
from autosplit.text import (
    bound_text,
    counted_text,
    listed,
    memory_text,
    ms_text,
    rate_text,
    rates_text,
    shares_text,
    short_name,
    tuple_text,
)

EQUAL_DEVICES = (
    "The devices are equal, so the split gains nothing. The plan has the largest useful batch and the accumulation "
    "steps."
)
"""The first sentence about a plan for equal devices with an even split."""

_Figure = TypeVar("_Figure")

_LIMITS = {"memory": " (memory)", "max_batch_size": "+", "kernel": " (a kernel's limit)", "time": " (time)"}


@dataclass(frozen=True)
class PlanRows:
    """The texts of a plan's report.

    Attributes:
        layout: The recommended layout.
        equal: `EQUAL_DEVICES`, or an empty string.
        columns: Headings of the table of devices. A single device has no column for the split.
        devices: The cells of each row of the table. Consecutive devices with equal cells have one row.
        numbers: The numbers of the layout by name.
        strategy: The recommended strategy, compared with the other. Empty if there is no choice.
        other: Heading and lines of the other strategy.
        unused: A sentence for each reason why devices get no samples.
        reasons: Sentences on what limits the plan, the most important first.
        explained: The reasons, and the other sentences of the explanation that are not in `numbers`.
        limits: A sentence for each kind of ceiling that memory does not limit.
        notes: The plan's notes that are about the recommended layout.
        remarks: Sentences on the errors of simulated GPUs.
    """

    layout: Layout
    explanation: Explanation
    equal: str
    columns: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]
    numbers: Mapping[str, str]
    strategy: str
    other: tuple[str, tuple[str, ...]]
    unused: tuple[str, ...]
    reasons: tuple[str, ...]
    explained: tuple[str, ...]
    limits: tuple[str, ...]
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]


def rows_of(plan: PlanRecord) -> PlanRows:
    """Write the rows of a plan's report."""
    layout = plan.recommended
    explanation = explanation_of(plan, layout)
    columns, devices = _device_rows(plan, layout)
    return PlanRows(
        layout=layout,
        explanation=explanation,
        equal=EQUAL_DEVICES if _are_equal(layout) else "",
        columns=columns,
        devices=devices,
        numbers=dict(_numbers(plan, layout, explanation)),
        strategy=_strategy(plan),
        other=_other(plan, explanation),
        unused=tuple(_unused(plan, layout)),
        reasons=explanation.reasons(),
        explained=tuple(explained_lines(explanation)),
        limits=tuple(_limits(layout)),
        notes=tuple(note for note in plan.notes if layout is plan.main or note.kind != "device-idle"),
        remarks=SIMULATED_ERRORS if plan.simulated else (),
    )


def _are_equal(layout: Layout) -> bool:
    """Return whether there are several devices of one kind, with an even split."""
    kinds = {(device.name, device.capacity_bytes) for device in layout.devices}
    is_even = layout.split == even_split(layout.batch_size, len(layout.split))
    return len(layout.seats) > 1 and len(kinds) == 1 and is_even


# Devices


def runs_of(layout: Layout, figures: Iterable[_Figure]) -> Iterator[tuple[str, int, _Figure]]:
    """Yield a name for each run of consecutive devices of one model with equal figures, its length, and these figures.

    The name is ``"sim:0 RTX3090"`` or ``"sim:0 to 3 RTX3090"``.
    """
    labels = [device.label for device in layout.devices]
    if len({*labels}) < len(labels):  # several machines may have the same labels
        labels = [f"rank {rank}" for rank in range(len(labels))]
    pairs = enumerate(zip(layout.devices, figures, strict=True))
    for (_, figure), run in itertools.groupby(pairs, lambda pair: (pair[1][0].name, pair[1][1])):
        places = [place for place, _ in run]
        first, last, device = labels[places[0]], labels[places[-1]], layout.devices[places[0]]
        text = first if len(places) == 1 else f"{first} to {last.rpartition(':')[2]}"
        yield text if device.kind == "cpu" else f"{text} {short_name(device.name)}", len(places), figure


def _device_rows(plan: PlanRecord, layout: Layout) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    several = len(layout.seats) > 1
    batch = ("batch",) if several else ()
    columns = ("device", *batch, f"memory at this {'split' if several else 'batch'}", "ceiling", "compute")

    def figures(seat: Seat) -> tuple[str, ...]:
        not_run = "" if plan.simulated or seat.ceiling.confirmed else ", not run"
        return (
            *([f"{seat.samples:,}"] if several else []),
            memory_text(seat.peak_bytes, seat.device.capacity_bytes),
            f"{seat.ceiling.batch_size:,}{_LIMITS[seat.ceiling.limited_by]}{not_run}",
            ms_text(seat.busy_s),
        )

    return columns, tuple((name, *cells) for name, _, cells in runs_of(layout, map(figures, layout.seats)))


def _unused(plan: PlanRecord, layout: Layout) -> Iterator[str]:
    unused = [seat for seat in layout.seats if not seat.samples]
    full = [seat.device.label for seat in unused if not seat.ceiling.batch_size]
    slow = [seat.device.label for seat in unused if seat.ceiling.batch_size]
    if full:
        yield f"{listed(full, 4)} has too little memory for the model and one sample."
    if slow:
        verb = "gets" if len(slow) == 1 else "get"
        line = f"{listed(slow, 4)} {verb} no samples, because copying the model there takes longer than it saves."
        if plan.ddp is None:
            line += " A larger effective batch may use more devices."
        elif plan.ddp.samples_per_s > layout.samples_per_s:
            line += " DDP uses all devices."
        yield line


def _limits(layout: Layout) -> Iterator[str]:
    limits = {seat.ceiling.limited_by for seat in layout.seats}
    if "max_batch_size" in limits:
        yield "A ceiling with + is the largest batch that was tried. A larger batch may fit."
    if "time" in limits:
        slow = "A larger batch would be no faster, or too slow to measure."
        yield f"A ceiling with (time) is not limited by memory. {slow}"


# Numbers


def _numbers(plan: PlanRecord, layout: Layout, explanation: Explanation) -> Iterator[tuple[str, str]]:
    several = len(layout.seats) > 1
    if several:
        yield "split", tuple_text(layout.split)
    yield "batch_size", f"{layout.batch_size}"
    last = layout.effective_batch_size - (layout.accumulation_steps - 1) * layout.batch_size
    shorter = "" if last == layout.batch_size else f" (the last of {counted_text(last, 'sample')})"
    yield "accumulation_steps", f"{layout.accumulation_steps}{shorter}"
    yield "effective batch", f"{counted_text(layout.effective_batch_size, 'sample')} per optimizer step"
    if plan.effective_batch_sizes is None:
        own = plan.sample_batch_size or "your own"
        yield "", f"autosplit chose this. To keep {own}, set effective_batch_size"
    origin = " (simulated)" if plan.simulated else "" if layout.measured else " (predicted)"
    yield "throughput", f"{rate_text(layout.samples_per_s)}{origin}"
    if plan.checkpointed:
        names = plan.checkpointed
        to = f" to {names[-1]}" if len(names) > 1 else ""
        yield "checkpointed", f"{counted_text(len(names), 'layer')}: {names[0]}{to}"
    if plan.loader_settings is not None and plan.loader_samples_per_s is not None:
        workers = plan.loader_settings.num_workers
        speed = f"{rate_text(plan.loader_samples_per_s)} with {counted_text(workers, 'worker')}"
        target = loader_target(layout.samples_per_s, plan.lengths)
        yield "loader", f"{speed}: {bound_text(plan.loader_samples_per_s, target)}"
    if plan.lengths is not None:
        rate, gain = plan.lengths.samples_per_s, plan.lengths.samples_per_s / plan.lengths.fixed_samples_per_s
        yield "by length", f"{rate_text(rate)}, {gain:.2f} times batches of one size (predicted)"
    if several:
        yield "gain", _gain_text(plan, layout, explanation)
        if layout.strategy == "balanced":
            yield "gpu0_bsz", f"{layout.split[0]}"
    known = [(device.label, device.rates) for device in layout.devices if device.rates]
    if known:
        yield "rates", rates_text(*zip(*known, strict=True))
    if plan.trials:
        yield "found with", _effort_text(plan)


def _gain_text(plan: PlanRecord, layout: Layout, explanation: Explanation) -> str:
    """Compare the layout with the even split and with the fastest device alone."""
    if layout.shares_processor:
        return "none is reported, because these devices share one CPU"
    alone = max(explanation.alone, key=lambda one: one.samples_per_s, default=None)
    over = "" if alone is None else f", {alone.gain:.2f} times {alone.devices[0]} alone"
    return f"{_gain_over_even(plan, layout)}{over}"


def _gain_over_even(plan: PlanRecord, layout: Layout) -> str:
    even, even_rate = even_split(layout.batch_size, len(layout.split)), layout.even_samples_per_s
    if layout.split == even:
        return "none over the even split, which is the fastest"
    if even_rate is not None:
        gain = f"{layout.samples_per_s / even_rate:.2f} times"
        if layout.measured:
            return f"{gain} the even split {shares_text(even)}"
        return f"{gain} equal ranks{'' if plan.simulated else ' (predicted)'}"
    pairs = zip(layout.devices, even, layout.ceilings, strict=True)
    over = [f"{device.label} fits {most}" for device, samples, most in pairs if samples > most]
    if over:
        return f"the even split {shares_text(even)} does not fit: {', '.join(over)}"
    return f"the even split {shares_text(even)} was not run"


def _effort_text(plan: PlanRecord) -> str:
    failed = sum(trial.failure is not None for trial in plan.trials)
    text = counted_text(len(plan.trials), "trial") + (f" ({failed} failed)" if failed else "")
    if plan.simulated and not plan.real_steps:
        return f"{text}, no real step"
    return f"{text}, {counted_text(plan.real_steps, 'real step')}, {plan.real_ooms} out of memory"


# Strategies


def _strategy(plan: PlanRecord) -> str:
    if plan.fastest is None or plan.ddp is None:
        return ""
    main, ddp = plan.main, plan.ddp
    ratio = ddp.samples_per_s / main.samples_per_s
    if plan.recommended is ddp:
        return f"DDP (autosplit launch): {ratio:.2f} times BalancedDataParallel, {rate_text(main.samples_per_s)}"
    known = "" if ddp.measured else " (predicted)"
    compared = "as fast as DDP, in one process" if abs(ratio - 1) <= BINDING_SHARE else f"{1 / ratio:.2f} times DDP"
    return f"BalancedDataParallel (plan.wrap): {compared}, {rate_text(ddp.samples_per_s)}{known}"


def _other(plan: PlanRecord, explanation: Explanation) -> tuple[str, tuple[str, ...]]:
    """Return the heading and the lines of the strategy that is not recommended."""
    if plan.recommended is not plan.main:
        main = plan.main
        forwards, gain = counted_text(main.accumulation_steps, "forward"), _gain_over_even(plan, main)
        line = f"split {shares_text(main.split)}, {forwards}, {rate_text(main.samples_per_s)}, {gain}"
        return "BalancedDataParallel", (line,)
    known = "measured" if plan.ddp is not None and plan.ddp.measured else "predicted"
    compared = explanation.comparison().removeprefix("DDP is ")
    return f"DDP, {known}{f': {compared}' if compared else ''}", tuple(_rank_lines(plan))


def _rank_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield a line for each run of equal ranks, then the throughput. Without DDP, yield the reason, if any."""
    ddp = plan.ddp
    if len(plan.devices) == 1:
        return
    if ddp is None:
        if plan.why_no_ddp:
            yield plan.why_no_ddp
        return
    numbered = enumerate(ddp.seats)
    for _, ranks in itertools.groupby(numbered, lambda pair: pair[1].samples):
        yield _ranks_text([*ranks], ddp.accumulation_steps)
    same = ddp.effective_batch_size == plan.effective_batch_size
    other = "" if same else f", {counted_text(ddp.effective_batch_size, 'sample')} per optimizer step"
    even = ddp.even_samples_per_s
    gain = "" if even is None else f", {ddp.samples_per_s / even:.2f} times equal ranks"
    yield f"together {rate_text(ddp.samples_per_s)}{other}{gain}"


def _ranks_text(ranks: Sequence[tuple[int, Seat]], steps: int) -> str:
    (first, seat), (last, other) = ranks[0], ranks[-1]
    who = f"rank {first} ({seat.device.label})"
    if last != first:
        who = f"ranks {first} to {last} ({seat.device.label} to {other.device.label})"
    return f"{who}: batch_size {seat.samples}, accumulation_steps {steps}"


# Reasons


def explained_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the reasons, without those that are elsewhere in the report or have no effect."""
    left_out = {"bounds", "ddp"}
    if explanation.shares_processor or explanation.even_measured is not None:
        left_out.add("even")  # the row "gain" already has it
    if explanation.more_memory is not None and not explanation.more_memory.pays:
        left_out.add("memory")
    yield from explanation.reasons()
    yield from (text for subject, text in explanation.sentences().items() if subject not in left_out)
