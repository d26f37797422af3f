"""Tune for samples of different lengths: a plan for the longest, and the batch sizes that fit at shorter lengths.

For each length, find the largest batch whose step needs no more memory than the plan's own step at the longest length.
The memory of a batch is predicted. On accelerators, it is the line through the memory of two real steps. On real
devices, a step of the batch then runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from autosplit.errors import UserCodeError, ends_tracebacks
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced, with_notes
from autosplit.probe.request import Request
from autosplit.profiles.key import ProfileKey
from autosplit.runtime.prepare import Source, workload_source
from autosplit.runtime.protocol import StepShape
from autosplit.solve.length_plan import LengthPoint, scaled
from autosplit.solve.memory import largest_fitting
from autosplit.tools.padded_length import checked_lengths, lengths_to_tune, predicted_lengths
from autosplit.tools.sequence_length import at_length
from autosplit.tuning.keywords import refuse_unknown
from autosplit.tuning.process import Process, Processes, drive
from autosplit.tuning.progress import Progress, never_falling, progress_listener
from autosplit.tuning.run import TRIAL_BUDGET_S
from autosplit.tuning.tune import (
    Tuning,
    TuningInterrupted,
    process_for,
    quiet,
    request_for,
    tune,
    users_code_named,
    with_warnings,
)
from autosplit.workload.workload import Workload

STEP_DOWN = 0.05
"""Fraction of the batch that is removed after a step that ran out of memory."""

MOST_SEARCHES = 3
"""Largest number of searches for a batch. A search is repeated if a step differs from its prediction."""

BATCHNORM_NOTE = Note(
    "lengths-not-measured",
    "autosplit did not measure the lengths. The model's BatchNorms need at least 2 samples, but batches of similar "
    "length may have 1. Leave lengths out.",
)

LENGTHS_INTERRUPTED_NOTE = Note(
    "interrupted", "Tuning was interrupted before the shorter sequence lengths were measured. Tune again."
)


@ends_tracebacks
def tune_lengths(
    model_or_workload: nn.Module | Workload | Callable[[], Workload],
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    lengths: Any,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    loss_reduction: str | None = None,
    precision: str | None = None,
    devices: Any = None,
    strategy: str = "auto",
    isolate: bool = False,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Plan:
    """Tune for a dataset whose samples differ in length.

        plan = autosplit.tune_lengths(model, batch, loss_fn, lengths=[len(sample) for sample in dataset])
        sampler = plan.token_sampler(lengths, shuffle=True)

    The sample batch gets samples of the greatest length (cropped or repeated, or made by the workload's
    ``make_batch(n, length=length)``). The plan is for this length. Then shorter samples are measured. So
    `Plan.token_sampler` can group samples of similar length, with as many samples per batch as fit.

    Args:
        model_or_workload: See `autosplit.tune` for this and all other arguments that are not listed here.
        lengths: Length of each sample of the dataset: a list, an array or a tensor.
        **options: The other arguments of `autosplit.tune`.

    Returns:
        The plan for the greatest length, with the measured lengths in `lengths`.

    Raises:
        InputError: The lengths are not whole numbers of 1 or more, or the sample batch has no dimension of a length.
        TuningInterrupted: Ctrl-C was pressed. The exception has the best plan so far.
    """
    refuse_unknown(tune_lengths, options, tune)
    numbers = checked_lengths(lengths)
    tried = lengths_to_tune(numbers)
    request = request_for(devices, strategy, **{"n_trials": 24, "profile": "auto", **options})
    described: dict[str, Any] = {"loss_fn": loss_fn, "compute_loss": compute_loss, "optimizer": optimizer}
    described |= {"loss_reduction": loss_reduction, "precision": precision}

    def source_of(number: int) -> Source:
        source = workload_source(model_or_workload, sample_batch, described)
        return (
            at_length(source, tried[number]) if isinstance(source, Workload) else partial(_built, source, tried[number])
        )

    with process_for(request, source_of, isolate=isolate) as process, progress_listener(progress) as listener:
        listen = never_falling(listener or quiet)
        plan = drive(process, lambda processes: _tuned(Tuning(processes, process.job.request, listen), numbers))
    return with_warnings(plan)


def _built(build: Callable[[], Workload], length: int) -> Workload:
    built = build()
    # The caller raises for a function that returns something other than a Workload.
    return at_length(built, length) if isinstance(built, Workload) else built


def _tuned(tuning: Tuning, lengths: Sequence[int]) -> Plan:
    """Tune for samples of the greatest length, as 50% of the progress. Then measure shorter samples."""

    def longest(part: Progress) -> None:
        if part.stage != "done":
            tuning.progress(replace(part, fraction=part.fraction / 2))

    def shorter(part: Progress) -> None:
        tuning.progress(replace(part, fraction=0.5 + part.fraction / 2))

    request = tuning.request
    try:
        timed = replace(request, deadline=request.deadline.part(2))
        plan = replace(tuning, request=timed, progress=longest).plan()
    except UserCodeError as error:
        raise UserCodeError(
            f"{error}; its samples had the longest of the lengths, {max(lengths)}. If the model takes no samples of "
            "this length, cut them. If another dimension was used as the length, pass make_batch(n, length=...)",
            error.frames,
        ) from error
    try:
        with users_code_named():
            found = _with_lengths(plan, lengths, request, tuning.processes, shorter)
    except KeyboardInterrupt:
        raise TuningInterrupted(with_notes(plan, LENGTHS_INTERRUPTED_NOTE)) from None
    shorter(Progress("done", "done", 1.0))
    return found


def _with_lengths(
    plan: Plan,
    lengths: Sequence[int],
    request: Request,
    processes: Processes,
    listen: Callable[[Progress], None],
) -> Plan:
    """Add measurements for samples of different lengths to a plan, and save them in its profile.

    Args:
        lengths: The length of each sample. Lengths that the plan's profile already contains are not measured again.
    """
    least = max(layout.least_batch for layout in plan.layouts)
    if least > 1:
        return with_notes(replaced(plan, lengths=None), last=[BATCHNORM_NOTE])
    tried = lengths_to_tune(lengths)
    known = () if plan.lengths is None else plan.lengths.points
    notes: tuple[Note, ...] = ()
    if [point.length for point in known[: len(tried)]] != [*tried]:
        known, notes = _points(plan, tried, request, processes, listen)
    effective = plan.effective_batch_size if plan.effective_batch_sizes is not None else None
    found = predicted_lengths(known, lengths, plan.split, effective)
    return with_notes(plan if found == plan.lengths else processes.amended(plan, lengths=found), last=notes)


def _points(
    plan: Plan,
    tried: Sequence[int],
    request: Request,
    processes: Processes,
    listen: Callable[[Progress], None],
) -> tuple[tuple[LengthPoint, ...], tuple[Note, ...]]:
    points = [LengthPoint(tried[0], 1.0, plan.samples_per_s, plan.samples_per_s)]
    notes: list[Note] = []
    full: list[tuple[tuple[int, ...], ...]] = []
    samples, longest_rate = plan.batch_size, 1.0
    key = ProfileKey(processes.job.machine, {}, {})
    for number, length in enumerate(tried):
        most = _most(plan, tried[0] / length)

        def part_listener(part: Progress, number: int = number, length: int = length) -> None:
            message = f"samples of length {length}, {number + 1} of {len(tried)}: {part.message}"
            listen(replace(part, stage="lengths", message=message, fraction=(number + part.fraction) / len(tried)))

        part_listener(Progress("lengths", "building the model", 0.0))
        processes.ask(Process.build, number)
        try:
            # Also search beyond the effective batch size, because `max_tokens` limits tokens per device.
            processes.prepare(replace(request, max_batch_size=most, effective_batch_sizes=None), key)
            processes.own.prober.report = lambda text, to=part_listener: to(Progress("lengths", text, 0.5))  # type: ignore[misc]
            found = _looked_at(plan, processes, full, samples, most, is_first=not number)
        except UserCodeError as error:
            if processes.job.has_peers:
                raise
            found = f"{error}. If another dimension was used as the length, pass make_batch(n, length=...)"
        else:
            notes += processes.crash_notes()
        if isinstance(found, str):
            text = f"autosplit did not measure samples of length {length} and below, because {found}."
            notes.append(Note("lengths-not-measured", text))
            break
        samples, rate, own_rate = found
        if number:
            scale = plan.samples_per_s / longest_rate
            points.append(LengthPoint(length, times_of(plan, samples), scale * rate, scale * own_rate))
        else:
            longest_rate, full = rate, processes.ask(_full, plan)
    return tuple(points), tuple(dict.fromkeys(notes))


def _looked_at(
    plan: Plan,
    processes: Processes,
    full: Sequence[Sequence[Sequence[int]]],
    least: int,
    most: int,
    *,
    is_first: bool,
) -> tuple[int, float, float] | str:
    """Return the largest batch of a length, and two throughputs. If nothing was measured, return the reason.

    The first throughput is for the largest batch, and the second is for the plan's batch size.

    Args:
        full: For each rank, the peaks of the plan's steps at the longest length.
        least: Batch size that is known to fit: the result of the next longer length.
        is_first: Whether this is the longest length, at which the plan's own batch runs.
    """
    own = plan.batch_size
    if not is_first and any(processes.ask(_out_of_time)):
        return "the time limit ended"
    own_rate = _rate(plan, processes, own)
    if own_rate is None:
        return f"a step of {own} of them ran out of memory"
    samples = own if is_first else min(processes.ask(_most_within, plan, full, least, most))
    while (rate := _rate(plan, processes, samples)) is None:
        if samples <= least:
            return f"a step of {least} of them ran out of memory"
        samples = max(least, min(samples - 1, int(samples * (1 - STEP_DOWN))))
    return samples, rate, own_rate


def _rate(plan: Plan, processes: Processes, samples: int) -> float | None:
    seconds = processes.ask(_seconds, plan, samples)
    timed = [one for one in seconds if one is not None]
    return times_of(plan, samples) * plan.batch_size / max(timed) if len(timed) == len(seconds) else None


def _most(plan: Plan, shorter: float) -> int:
    """Return an upper bound of the batch size: memory shrinks at most with the square of the length."""
    most = int(plan.batch_size * shorter**2) + 1
    return most if plan.max_batch_size is None else min(most, max(plan.max_batch_size, plan.batch_size))


def times_of(plan: Plan, n: int) -> float:
    """Return the factor from the plan's batch to a batch of n, after rounding each device to whole samples."""
    shares = {samples for layout in plan.layouts for samples in layout.split} - {0}
    return min(share * n // plan.batch_size / share for share in shares)


# Functions that each rank runs: the plan's steps on its devices, with more samples than the plan has


def _is_split(process: Process) -> bool:
    return not process.job.has_peers and process.job.request.strategy != "ddp"


def _ranks(process: Process, plan: Plan, n: int) -> tuple[int, ...]:
    """Return the batch sizes of the DDP ranks that this process measures. Empty for a single device."""
    ranks = () if plan.ddp is None else plan.ddp.split
    if process.job.has_peers:
        ranks = (ranks[process.peers.rank],)
    elif len(ranks) < 2:
        ranks = ()
    return scaled(ranks, times_of(plan, n))


def _splits(plan: Plan, n: int) -> tuple[tuple[int, ...], ...]:
    return (scaled(plan.split, times_of(plan, n)),) * min(2, plan.accumulation_steps)


def _shapes(process: Process, plan: Plan, n: int) -> Iterator[StepShape]:
    if _is_split(process):
        yield StepShape(_splits(plan, n))
    accumulates = plan.accumulation_steps > 1
    for index, share in enumerate(_ranks(process, plan, n)):
        if share:
            yield process.prober.shapes(index, "rank", (), accumulates)(share)


def _peaks(process: Process, plan: Plan, n: int) -> tuple[tuple[int, ...], ...]:
    prober = process.prober
    peaks = prober.peaks if prober.evidence == "steps" else prober.predicted
    return tuple(map(peaks, _shapes(process, plan, n)))


def _full(process: Process, plan: Plan) -> tuple[tuple[int, ...], ...]:
    return _peaks(process, plan, plan.batch_size)


def _out_of_time(process: Process) -> bool:
    return process.prober.out_of_time


def _most_within(process: Process, plan: Plan, full: Sequence[Sequence[Sequence[int]]], least: int, most: int) -> int:
    """Return the largest batch of this length whose steps stay within `full`, the peaks of the longest length."""
    prober = process.prober
    if prober.facts.largest_batch is not None:
        most = max(least, min(most, prober.facts.largest_batch))

    def load(n: int) -> float:
        pairs = zip(_peaks(process, plan, n), full[process.peers.rank], strict=True)
        return max(peak / bound for peaks, bounds in pairs for peak, bound in zip(peaks, bounds, strict=True) if bound)

    if prober.evidence == "steps":
        try:
            return largest_fitting(_line(load, least), 1.0, least=least, most=most, start=least + 1)
        except OutOfMemoryError:
            return least
    found = least
    for _ in range(MOST_SEARCHES):
        found = largest_fitting(load, 1.0, least=least, most=most, start=least + 1)
        if all([prober.prediction_holds(shape) for shape in _shapes(process, plan, found)]):  # noqa: C419  # check every shape
            break
    return found


def _line(load: Callable[[int], float], least: int) -> Callable[[int], float]:
    """Return the line through the loads of two steps: of `least` samples, and of half of them."""
    first, second = (least // 2, least) if least > 1 else (1, 2)
    begin, end = load(first), load(second)
    slope = max(0.0, end - begin) / (second - first)
    return lambda n: end + slope * (n - second)


def _seconds(process: Process, plan: Plan, n: int) -> float | None:
    try:
        if _is_split(process):
            splits = _splits(plan, n)
            return process.prober.step(splits, budget_s=TRIAL_BUDGET_S).seconds / len(splits)
        taking_part = [(index, share) for index, share in enumerate(_ranks(process, plan, n)) if share]
        return max(process.prober.rank_seconds(*one, budget_s=TRIAL_BUDGET_S) for one in taking_part)
    except OutOfMemoryError:
        return None
