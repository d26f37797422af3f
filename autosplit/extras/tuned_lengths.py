"""Measure how many shorter samples fit in place of the longest samples, and their throughput, at a few lengths.

For each length, traces give the largest batch whose step holds no more than the plan's own step holds at the longest
length. On real devices a step of that size then runs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from autosplit.errors import UserCodeError
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.probe.prober import Prober
from autosplit.rng import kept_rng
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import Source, build
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import largest_fitting
from autosplit.solve.padded_length import LengthPoint, foretold, lengths_to_tune, scaled
from autosplit.tuning.job import Job, refuse_differing
from autosplit.tuning.open_session import losses_of, open_session
from autosplit.tuning.progress import Progress
from autosplit.tuning.recall import amended
from autosplit.tuning.session import TRIAL_BUDGET_S

STEP_DOWN = 0.05
"""Fraction by which the batch shrinks after a step that ran out of memory."""

MOST_FOLLOWED = 3
"""Most searches for the largest batch. Each repeats if the traced step differs from its prediction."""

BATCHNORM_NOTE = Note(
    "lengths-not-measured",
    "lengths were not measured: the model's BatchNorms need 2 samples or more, and batches of similar length may have "
    "1; leave lengths out",
)

UNTRACED_NOTE = Note(
    "lengths-not-traced",
    "the memory of other lengths cannot be predicted without running them, so batches of shorter samples have as many "
    "samples as those of the longest",
)


def with_lengths(
    plan: Plan,
    lengths: Sequence[int],
    source_of: Callable[[int], Source],
    job: Job,
    tell: Callable[[Progress], None],
    *,
    isolate: bool,
) -> Plan:
    """Add measurements for samples of different lengths to a plan, and save them in its profile.

    Args:
        lengths: The length of each sample. Lengths that the plan's profile contains already are not measured again.
    """
    digest = hashlib.sha256(repr(list(lengths)).encode()).hexdigest()[:16]
    digests = job.peers.gathered(digest)
    job.peers.each_run(lambda: refuse_differing("the digest of lengths", digests))
    least = max(plan.ddp.least_batch, 1 if plan.region is None else plan.region.least_share)
    if least > 1:
        return replace(plan, lengths=None).kept_at(plan.path).with_notes(last=[BATCHNORM_NOTE])
    tried = lengths_to_tune(lengths)
    known = () if plan.lengths is None else plan.lengths.points
    notes: tuple[Note, ...] = ()
    if [point.length for point in known[: len(tried)]] != [*tried]:
        known, notes = _points(plan, tried, source_of, job, tell, isolate=isolate)
    effective = plan.effective_batch_size if plan.effective_batch_sizes is not None else None
    found = foretold(known, lengths, plan.split, effective)
    return (plan if found == plan.lengths else amended(plan, job, lengths=found)).with_notes(last=notes)


def _points(
    plan: Plan,
    tried: Sequence[int],
    source_of: Callable[[int], Source],
    job: Job,
    tell: Callable[[Progress], None],
    *,
    isolate: bool,
) -> tuple[tuple[LengthPoint, ...], tuple[Note, ...]]:
    points = [LengthPoint(tried[0], 1.0, plan.samples_per_s, plan.samples_per_s)]
    notes: list[Note] = []
    full: tuple[tuple[int, ...], ...] = ()
    samples, longest_rate = plan.batch_size, 1.0
    for number, length in enumerate(tried):
        most = _most(plan, tried[0] / length)
        # Search beyond the effective batch size too, because `max_tokens` limits tokens per device.
        sizes: Any = {"max_batch_size": most, "effective_batch_sizes": None}
        limited = replace(job, own=replace(job.own, **sizes), whole=replace(job.whole, **sizes))

        def told(part: Progress, number: int = number, length: int = length) -> None:
            message = f"samples of length {length}, {number + 1} of {len(tried)}: {part.message}"
            tell(replace(part, stage="lengths", message=message, fraction=(number + part.fraction) / len(tried)))

        told(Progress("lengths", "building the model", 0.0))
        with kept_rng(), ExitStack() as closing:
            built = job.peers.each_run(functools.partial(build, source_of(length), job.own.devices))
            closing.enter_context(untouched(built.workload))
            try:
                session = open_session(limited, built, closing, told, isolate=isolate)
                steps = _Steps(plan, limited, session.prober)
                found = _looked_at(steps, full, samples, most, is_first=not number)
            except UserCodeError as error:
                if job.several:
                    raise
                found = f"{error}; where another dimension was taken for the length pass make_batch(n, length=...)"
            else:
                notes += losses_of(job, session.followed.isolated)
            if isinstance(found, str):
                text = f"samples of length {length} and below were not measured: {found}"
                notes.append(Note("lengths-not-measured", text))
                break
            samples, rate, own_rate = found
            if number:
                scale = plan.samples_per_s / longest_rate
                points.append(LengthPoint(length, steps.times_of(samples), scale * rate, scale * own_rate))
            else:
                longest_rate, full = rate, steps.full()
            if not steps.prober.has_traces:
                notes.append(UNTRACED_NOTE)
    return tuple(points), tuple(dict.fromkeys(notes))


def _looked_at(
    steps: _Steps, full: Sequence[Sequence[int]], least: int, most: int, *, is_first: bool
) -> tuple[int, float, float] | str:
    """Return how many samples of a length fit, their samples/s and those of the plan's batch, or why none was measured.

    Args:
        least: Batch size that is known to fit: the result of the next longer length.
        is_first: Whether this is the longest length, at which the plan's own batch runs.
    """
    peers, own = steps.job.peers, steps.plan.batch_size
    if not is_first and any(peers.all_run(lambda: steps.prober.out_of_time)):
        return "the time limit was over"
    own_rate = _rate(steps, own)
    if own_rate is None:
        return f"a step of {own} of them ran out of memory"
    samples = own if is_first else min(peers.all_run(lambda: steps.most_within(full, least, most)))
    while (rate := _rate(steps, samples)) is None:
        if samples <= least:
            return f"a step of {least} of them ran out of memory"
        samples = max(least, min(samples - 1, int(samples * (1 - STEP_DOWN))))
    return samples, rate, own_rate


def _rate(steps: _Steps, samples: int) -> float | None:
    """Run a step on all ranks, and return its samples/s, or None if a rank runs out of memory."""
    seconds = steps.job.peers.all_run(lambda: steps.seconds(samples))
    timed = [one for one in seconds if one is not None]
    return steps.times_of(samples) * steps.plan.batch_size / max(timed) if len(timed) == len(seconds) else None


def _most(plan: Plan, shorter: float) -> int:
    """Return an upper bound of the batch size: memory shrinks at most with the square of the length."""
    most = int(plan.batch_size * shorter**2) + 1
    return most if plan.max_batch_size is None else min(most, max(plan.max_batch_size, plan.batch_size))


@dataclass(frozen=True)
class _Steps:
    """The plan's steps on its devices, with more samples than the plan has."""

    plan: Plan
    job: Job
    prober: Prober

    def times_of(self, n: int) -> float:
        """Return the factor from the plan's batch to a batch of n, after rounding each device to whole samples."""
        shares = {*self.plan.split, *(rank.batch_size for rank in self.plan.ddp.ranks)} - {0}
        return min(share * n // self.plan.batch_size / share for share in shares)

    def _scaled(self, shares: Sequence[int], n: int) -> tuple[int, ...]:
        return scaled(shares, self.times_of(n))

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The batch sizes of the DDP ranks that this process measures. Empty for a lone device, which is no rank."""
        ranks = tuple(rank.batch_size for rank in self.plan.ddp.ranks)
        if self.job.several:
            return (ranks[self.job.peers.rank],)
        return ranks if len(ranks) > 1 else ()

    @property
    def _is_split(self) -> bool:
        return not self.job.several and self.job.whole.strategy != "ddp"

    def _splits(self, n: int) -> tuple[tuple[int, ...], ...]:
        return (self._scaled(self.plan.split, n),) * min(2, self.plan.accumulation_steps)

    def _shapes(self, n: int) -> Iterator[StepShape]:
        if self._is_split:
            yield StepShape(self._splits(n))
        accumulates = self.plan.accumulation_steps > 1
        for index, share in enumerate(self._scaled(self._ranks, n)):
            if share:
                yield self.prober.shapes(index, "rank", (), accumulates)(share)

    def full(self) -> tuple[tuple[int, ...], ...]:
        """Return the traced peaks of each of the plan's steps, by device. Empty without traces."""
        return self._peaks(self.plan.batch_size) if self.prober.has_traces else ()

    def _peaks(self, n: int) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.prober.traced, self._shapes(n)))

    def most_within(self, full: Sequence[Sequence[int]], least: int, most: int) -> int:
        """Return the most samples with which no step holds more than `full`, or `least` without traces."""
        if not self.prober.has_traces:
            return least
        most = max(least, min(most, self.prober.largest_traced))

        def load(n: int) -> float:
            pairs = zip(self._peaks(n), full, strict=True)
            return max(
                peak / bound for peaks, bounds in pairs for peak, bound in zip(peaks, bounds, strict=True) if bound
            )

        found = least
        for _ in range(MOST_FOLLOWED):
            found = largest_fitting(load, 1.0, least=least, most=most, start=least + 1)
            if all([self.prober.foretold(shape) for shape in self._shapes(found)]):  # noqa: C419  # trace every shape
                break
        return found

    def seconds(self, n: int) -> float | None:
        """Run a step of n samples, and return the time of a forward and backward, or None if it runs out of memory."""
        try:
            if self._is_split:
                splits = self._splits(n)
                return self.prober.step(splits, budget_s=TRIAL_BUDGET_S).seconds / len(splits)
            shares = self._scaled(self._ranks, n)
            taking_part = [(index, share) for index, share in enumerate(shares) if share]
            return max(self.prober.rank_seconds(*one, budget_s=TRIAL_BUDGET_S) for one in taking_part)
        except OutOfMemoryError:
            return None
