"""How far from the best split the search ends, by exhaustive search on simulated machines; and what it costs.

    python benchmarks/search.py [--quick] [--models NAME ...] [--machines NAME ...] [--jobs 2]
                                [--output benchmarks/results/search.json]

On each machine, for each model, at a fixed effective batch, everything that fits is searched by the event simulator,
never by the tuner's formulas: every batch size with the accumulation steps that it takes, every share of device 0,
every choice of how many of the other cards of each kind take part. The rest of the batch goes to these by the times
that their traces take there, each next sample to the card that finishes it first; then single samples are moved
between any two cards, from the best few, for as long as the simulator says that it helps.

What is left out is left out by proof. A simulated step is a network of events that wait for one another: its time is a
sum of durations along some path, the longest. So it is no less than the sum along any path: a card's own work over all
micro-steps, the copies of parameters and gradients over its link, and the optimizer, one after another. This bound is
held against each step that is simulated, and a claim says that it was never above it. The samples that a card may get
are bounded by the simulator's peaks.

Steps are told by laws of a few traces, as the tuner has them; so random ones are held against the same steps followed
whole, over all their cards, and a claim says how far they are off.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import multiprocessing
import operator
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from startup import processor
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import architectures

from autosplit import Plan, Workload, parse_devices, tune
from autosplit.devices.device import Device
from autosplit.oom import OutOfMemoryError
from autosplit.runtime import prepare, simulated
from autosplit.runtime.affine_traces import AffineTraces
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.op_cost import Move, Work
from autosplit.runtime.protocol import Measurement, StepShape
from autosplit.runtime.simulated import SimulatedRuntime, _Whole
from autosplit.runtime.tracer import Event, Trace, Tracer, make_tracer
from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.split import even_split, micro_batch_sizes, proportional_split
from autosplit.solve.step_time import TimeCurve, overlapped_seconds

FIRST_REGRET = 0.01
"""The most after one trial, in the median."""
LATER_REGRET = 0.003
"""The most after `LATER` trials, in the median."""
WORST_REGRET = 0.03
"""The most after `LATER` trials, anywhere."""
NOISY_REGRET = 0.02
"""The most with `NOISE`, in the median."""
COMPOSED_ERROR = 0.01
"""The most that a composed step is off a whole one."""
SOLVER_S = 1.0
SOLVER_GROWTH = 2.6
"""The most, for twice as many devices and samples."""
OVERHEAD = 0.05
"""The most of a real tuning's wall time that is neither in steps nor in traces."""

LATER = 12
TRIALS = 24
FIRST = 5
"""Trials of the tuner that a sampler begins with when it is warm."""
NOISE = 0.03
POINTS = 30
"""Points that are cross-checked on each machine."""
NEAR, STARTS = 0.02, 12
"""Single samples are moved from so many splits, as far as they take no more than this over the best."""
MIB = 2**20
ROUNDING = 1e-9
"""Sums of the same durations in another order."""

Split = tuple[int, ...]
Splits = tuple[Split, ...]


# The models: few layers, heavy samples


class Inverted(nn.Module):
    """A block of EfficientNet: wider, a depthwise convolution, squeeze and excitation, narrow again."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        wide = expansion * inputs
        self.adds = inputs == outputs and stride == 1
        self.widen = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 16, 1), nn.SiLU(), nn.Conv2d(wide // 16, wide, 1)
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features as it was made for."""
        y = self.depthwise(self.widen(x))
        out: Tensor = self.narrow(y * self.squeeze(y).sigmoid())
        return x + out if self.adds else out


def efficient() -> Workload:
    """An EfficientNet in small: its depthwise convolutions are bound by memory, not by arithmetic."""
    shapes = ((32, 24, 3, 2), (24, 48, 5, 2), (48, 192, 3, 2))
    blocks = [Inverted(*shape) for shape in shapes]
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU())
    model = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 1000))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Workload(model, architectures.images(224), loss_fn=F.cross_entropy, optimizer=optimizer)


class Decoder(nn.Module):
    """Causal blocks between an embedding and a head as wide as the vocabulary."""

    def __init__(self, width: int, depth: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(architectures.Block(width, width // 64) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each token."""
        logits: Tensor = self.head(self.blocks(self.embedding(x) + self.places))
        return logits


def gpt() -> Workload:
    """A GPT whose logits, gathered on device 0, weigh as much as its activations."""
    tokens = torch.randint(0, 4096, (architectures.SAMPLES, 512))
    model = Decoder(768, 2, 512, 4096)
    batch = (tokens, tokens.roll(-1, 1))
    return Workload(model, batch, loss_fn=architectures.token_loss, optimizer=torch.optim.AdamW)


class WithLoss(nn.Module):
    """An encoder that returns its loss: nothing is gathered but a number."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, width)
        layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(self.head(self.layers(self.embedding(x)).mean(1)), y)


def encoder() -> Workload:
    """An encoder with its loss inside."""
    batch = (torch.randint(0, 1024, (architectures.SAMPLES, 384)), torch.randint(0, 10, (architectures.SAMPLES,)))
    return Workload(WithLoss(512, 2), batch, optimizer=torch.optim.AdamW)


class Windows(nn.Module):
    """An LSTM over the windows of a sample, which are independent of each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each sample."""
        outputs, _ = self.layer(x.flatten(0, 1))
        logits: Tensor = self.head(outputs[:, -1].unflatten(0, x.shape[:2]).mean(1))
        return logits


def lstm() -> Workload:
    """An LSTM over 64 windows of 6 time steps a sample."""
    batch = (torch.randn(architectures.SAMPLES, 64, 6, 768), torch.randint(0, 10, (architectures.SAMPLES,)))
    return Workload(Windows(768), batch, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW)


def mlp() -> Workload:
    """An MLP over 256 tokens a sample."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 256))
    batch = (torch.randn(4, 256, 1024), torch.randn(4, 256, 256))
    return Workload(model, batch, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW)


MODELS: dict[str, Callable[[], Workload]] = {
    "efficient": efficient,
    "gpt": gpt,
    "encoder": encoder,
    "lstm": lstm,
    "mlp": mlp,
}


# The machines


@dataclass(frozen=True)
class Machine:
    """Cards that are not there, and the samples of an optimizer step on them.

    Attributes:
        cards: How many of which card, device 0's first, and how much each holds: so many times its even share of the
            optimizer step, or all that its memory holds (None).
        num_samples: The effective batch size.
    """

    cards: tuple[tuple[int, str, float | None], ...]
    num_samples: int = 48

    def spec(self, traces: AffineTraces) -> str:
        """Return the device spec, for a model; with tight memory it depends on what a sample of it takes."""
        count = sum(number for number, _, _ in self.cards)
        parts = []
        for number, card, room in self.cards:
            memory = ""
            if room is not None:
                samples = max(1, round(room * self.num_samples / count))
                needed = traces.trace(StepShape(((samples,),), accumulates=True)).peak_bytes[0]
                most = parse_devices(f"sim:{card}")[0].capacity_bytes // MIB
                memory = f"@{min(most, math.ceil(needed / MIB))}MiB"
            parts.append(f"{number}x{card}{memory}")
        return "sim:" + "+".join(parts)


REPORTED = "2xRTX-A6000+2xRTX2080Ti"
"""Of a user, who went from 2,000 to 2,500 images/s by setting batch sizes by hand (timm, pull request 580)."""

MACHINES = {
    "2xRTX3090": Machine(((2, "RTX3090", None),)),
    "RTX4090+RTX3060": Machine(((1, "RTX4090", None), (1, "RTX3060", None))),
    "3xRTX3090 tight": Machine(((3, "RTX3090", 0.6),)),
    REPORTED: Machine(((2, "RTX-A6000", None), (2, "RTX2080Ti", None))),
    "4xV100-16GB tight": Machine(((4, "V100-16GB", 0.7),)),
    "T4+3xP100 tight": Machine(((1, "T4", 1.2), (3, "P100", 0.6))),
    "2xA100-40GB+2xV100-32GB": Machine(((2, "A100-40GB", None), (2, "V100-32GB", None))),
    "4xRTX3090+2xGTX1080Ti tight": Machine(((4, "RTX3090", 1.0), (2, "GTX1080Ti", 0.5))),
    "8xA100-40GB": Machine(((8, "A100-40GB", None),), 64),
    "4xH100-80GB+4xA100-80GB tight": Machine(((4, "H100-80GB", 0.8), (4, "A100-80GB", 0.5)), 64),
}

SAMPLED = (REPORTED, "4xV100-16GB tight", "T4+3xP100 tight")
"""On these Optuna's samplers are compared: what they try at random has to be followed, and that takes long."""

QUICK_MODELS = ("lstm", "mlp")
QUICK_MACHINES = ("2xRTX3090", REPORTED)


# The judge: times by the event simulator, and a bound below them


class _AsOne(SimulatedRuntime):
    """Follows every step whole, over all its cards."""

    def measure(self, shape: StepShape, *, budget_s: float = 0.0) -> Measurement:
        """Return the time and the peaks of a step."""
        with mock.patch.object(simulated, "_source_of", _Whole):
            return super().measure(shape, budget_s=budget_s)


@dataclass
class Judge:
    """Tells how long steps take on a machine, and how long at least.

    Attributes:
        traces: Kept for all machines.
        devices: The cards.
        num_samples: The effective batch size.
        simulated: Steps that were simulated, and what they took.
        bounds_broken: Steps whose bound was above what they took.
    """

    traces: AffineTraces
    devices: tuple[Device, ...]
    num_samples: int
    simulated: dict[Splits, float] = field(default_factory=dict)
    bounds_broken: int = 0

    def __post_init__(self) -> None:
        capacities = tuple(device.capacity_bytes for device in self.devices)
        self.runtime = SimulatedRuntime(self.devices, capacities, self.traces)
        self._work: dict[tuple[int, int], float] = {}
        self.added_s = [
            sum(cost.seconds(_spec(device)) for cost in self.traces.accumulation_costs()) for device in self.devices
        ]
        alone = self.traces.trace(StepShape(((1,),), accumulates=True))
        self.update_s = _work_seconds(alone.update, 0, self.devices[0])
        self.caps = {
            accumulates: tuple(self._cap(index, accumulates) for index in range(len(self.devices)))
            for accumulates in (False, True)
        }
        self._copies_s = [0.0, *(self._copy_seconds(index) for index in range(1, len(self.devices)))]

    # Times

    def seconds(self, splits: Splits) -> float:
        """Return the simulated time of an optimizer step; infinite where it does not fit."""
        if splits not in self.simulated:
            try:
                self.simulated[splits] = self.runtime.measure(StepShape(splits)).seconds
            except OutOfMemoryError:
                self.simulated[splits] = math.inf
            self.bounds_broken += self.path_seconds(splits) > self.simulated[splits] * (1 + ROUNDING)
        return self.simulated[splits]

    def rate(self, split: Split) -> float:
        """Return the samples/s of a split; 0 where it does not fit."""
        return self.num_samples / self.seconds(self.splits_of(split))

    def splits_of(self, split: Split) -> Splits:
        """Return the micro-steps of a split; the last shares what is left in proportion."""
        batch_size = sum(split)
        *full, last = micro_batch_sizes(self.num_samples, batch_size)
        return (*((split,) * len(full)), split if last == batch_size else proportional_split(last, split))

    # The bound

    def path_seconds(self, splits: Splits) -> float:
        """Bound a step from below: a card's work in a row, with the copies of parameters and gradients over its link.

        All links are used at once; device 0, at an end of each, waits for the slowest.
        """
        copies_s = [self._copies_s[index] if share else 0.0 for index, share in enumerate(splits[0])]
        copies_s[0] = max(copies_s)
        worked_s = [
            sum(self.work(index, split[index]) for split in splits) - self.added_s[index] if share else 0.0
            for index, share in enumerate(splits[0])
        ]
        return max(map(operator.add, worked_s, copies_s)) + self.update_s

    def work(self, index: int, samples: int) -> float:
        """Return the seconds a card works in a micro-step that adds to earlier gradients, without what it waits for."""
        key = (index, samples)
        if samples and key not in self._work:
            trace = self._part(index, samples, accumulates=True)
            self._work[key] = _work_seconds(trace.micro, min(index, 1), self.devices[index])
        return self._work.get(key, 0.0)

    def _part(self, index: int, samples: int, *, accumulates: bool) -> Trace:
        if index == 0:
            return self.traces.trace(StepShape(((samples,),), accumulates=accumulates))
        return self.traces.trace(StepShape(((0, samples),), accumulates=accumulates))

    def _cap(self, index: int, accumulates: bool) -> int:
        """Return the most samples that a card holds, by the simulator's peaks; none over the optimizer step's."""
        capacity_bytes = self.devices[index].capacity_bytes
        role = min(index, 1)
        low, high = 0, self.num_samples
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._part(index, middle, accumulates=accumulates).peak_bytes[role] <= capacity_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _copy_seconds(self, index: int) -> float:
        """Return the time of a replica's parameters and gradients on its link: they are the same in any step."""
        trace = self._part(index, 1, accumulates=True)
        link = min(_spec(device).link_bytes_per_s for device in (self.devices[0], self.devices[index]))
        moves = [e for e in (*trace.broadcast, *trace.reduce) if isinstance(e, Move)]
        return sum(move.nbytes for move in moves if move.purpose in ("parameter", "gradient")) / link


def _spec(device: Device) -> Any:
    assert device.spec is not None, device
    return device.spec


def _work_seconds(events: Sequence[Event], role: int, device: Device) -> float:
    return sum(e.seconds(_spec(device)) for e in events if isinstance(e, Work) and e.device == role)


# Exhaustive search


@dataclass(frozen=True)
class Best:
    """The best there is, and what it took to know.

    Attributes:
        split: Samples per device.
        rate: Samples/s.
        considered: Splits that were looked at.
        ruled_out: How many the bound ruled out.
        simulated: How many were simulated.
        moved: Whether moving single samples improved on the best of the grid.
    """

    split: Split
    rate: float
    considered: int
    ruled_out: int
    simulated: int
    moved: bool


def divisions(judge: Judge, accumulates: bool) -> Iterator[list[Split]]:
    """Yield, for each choice of cards beside device 0, how these share 1, 2, ... samples: by their times, greedily.

    Of cards that are alike so many take part; which of them makes no difference to the simulator but for their order.
    Outputs are gathered in that order, and the last card's are waited for last: it gets the odd sample.
    """
    caps = judge.caps[accumulates]
    kinds: dict[tuple[str, int], list[int]] = {}
    for index, device in enumerate(judge.devices[1:], 1):
        kinds.setdefault((device.name, device.capacity_bytes), []).append(index)
    for counts in itertools.product(*(range(len(members) + 1) for members in kinds.values())):
        chosen = [i for members, count in zip(kinds.values(), counts, strict=True) for i in members[:count]]
        if not chosen or min(caps[index] for index in chosen) < 1:
            continue
        shares = [int(index in chosen) for index in range(len(judge.devices))]
        found = [tuple(shares[1:])]
        while sum(shares) < judge.num_samples:
            room = [index for index in chosen if shares[index] < caps[index]]
            if not room:
                break
            shares[min(room, key=lambda i: (judge.work(i, shares[i] + 1), shares[i], -i))] += 1
            found.append(tuple(shares[1:]))
        yield found


def grid(judge: Judge) -> Iterator[Split]:
    """Yield every batch size, every share of device 0 of it, and every choice of other cards for the rest."""
    total, others = judge.num_samples, len(judge.devices) - 1
    for accumulates in (False, True):
        most = judge.caps[accumulates][0]
        batches = range(1, total) if accumulates else (total,)
        yield from ((size, *(0,) * others) for size in batches if size <= most)
        for found in divisions(judge, accumulates):
            for rest in found:
                used = sum(rest)
                owns = range(min(most, total - used - 1) + 1) if accumulates else (total - used,)
                yield from ((own, *rest) for own in owns if 0 <= own <= most)


def exhaustive(judge: Judge, known: Sequence[Split] = ()) -> Best:
    """Find the fastest split of all that fit.

    Args:
        judge: Of the machine.
        known: Splits to begin with: the faster the first, the more is ruled out.
    """
    best_s = min((judge.seconds(judge.splits_of(split)) for split in known), default=math.inf)
    before = len(judge.simulated)
    bounded = sorted((judge.path_seconds(judge.splits_of(split)), split) for split in set(grid(judge)))
    top: list[tuple[float, Split]] = [(judge.seconds(judge.splits_of(split)), split) for split in known]
    ruled_out = 0
    for position, (path_s, split) in enumerate(bounded):
        if path_s > best_s:
            ruled_out = len(bounded) - position
            break
        top.append((judge.seconds(judge.splits_of(split)), split))
        best_s = min(best_s, top[-1][0])
    top = sorted(set(top))
    near = [split for seconds, split in top[:STARTS] if seconds <= (1 + NEAR) * best_s]
    moved_s, split = min(improved(judge, split) for split in near)
    simulated = len(judge.simulated) - before
    moved = moved_s < top[0][0]
    return Best(split, judge.num_samples / moved_s, len(bounded), ruled_out, simulated, moved)


def improved(judge: Judge, split: Split) -> tuple[float, Split]:
    """Move single samples between cards, as long as the simulator says that it helps."""
    best_s = judge.seconds(judge.splits_of(split))
    while True:
        for nearby in moves(split):
            splits = judge.splits_of(nearby)
            if judge.path_seconds(splits) < best_s:
                seconds = judge.seconds(splits)
                if seconds < best_s * (1 - ROUNDING):
                    best_s, split = seconds, nearby
                    break
        else:
            return best_s, split


def moves(split: Split) -> Iterator[Split]:
    """Yield a split with one sample on another card."""
    for source, target in itertools.permutations(range(len(split)), 2):
        if split[source]:
            yield tuple(n - (i == source) + (i == target) for i, n in enumerate(split))


# The tuner


@contextmanager
def shared_traces(traces: AffineTraces) -> Iterator[None]:
    """Let every tuning ask kept traces, so that no step is followed twice."""
    with (
        mock.patch.object(prepare, "make_tracer", return_value=(traces.tracer, None)),
        mock.patch.object(prepare, "AffineTraces", return_value=traces),
    ):
        yield


def tuned(traces: AffineTraces, spec: str, num_samples: int) -> Plan:
    """Tune as a user does."""
    with shared_traces(traces):
        return tune(
            traces.tracer.workload,
            devices=spec,
            effective_batch_size=num_samples,
            n_trials=TRIALS,
            profile="off",
            seed=0,
        )


@contextmanager
def noise(seed: int) -> Iterator[None]:
    """Let every measured time be off by `NOISE`, and say so."""
    generator = random.Random(seed)  # noqa: S311 (it guards nothing)
    exact = SimulatedRuntime.measure

    def measure(self: SimulatedRuntime, shape: StepShape, *, budget_s: float = 0.0) -> Measurement:
        measured = exact(self, shape, budget_s=budget_s)
        seconds = measured.seconds * max(0.5, 1 + generator.gauss(0, NOISE))
        return replace(measured, seconds=seconds, error_s=NOISE * seconds)

    with mock.patch.object(SimulatedRuntime, "measure", measure):
        yield


def best_after(rates: Sequence[float | None], best: float, count: int) -> float:
    """Return the regret of the best of the first trials, as a share."""
    return 1 - max((rate or 0.0 for rate in rates[:count]), default=0.0) / best


# What a user has without it


def by_hand(judge: Judge) -> float:
    """Return the rate of the largest power of two that fits on all cards, in as many accumulation steps as it takes.

    In BalancedDataParallel, to its favour: replicas are kept.
    """
    count = len(judge.devices)
    size = 1 << (judge.num_samples // count).bit_length()
    while size:
        if size * count <= judge.num_samples:
            rate = judge.rate((size,) * count)
            if rate > 0:
                return rate
        size //= 2
    return 0.0


def even_rates(judge: Judge) -> tuple[float, float]:
    """Return the best rates of an even split: in nn.DataParallel, and in BalancedDataParallel, which keeps replicas.

    Over all accumulation steps from the fewest that fit, as long as one more may still be faster.
    """
    count = len(judge.devices)
    theirs = ours = 0.0
    fitting = 0
    for steps in range(1, judge.num_samples // count + 1):
        size = -(-judge.num_samples // steps)
        splits = tuple(even_split(micro, count) for micro in micro_batch_sizes(judge.num_samples, size))
        seconds = judge.seconds(splits)
        theirs_s = data_parallel_seconds(judge, splits)
        ours, theirs = max(ours, judge.num_samples / seconds), max(theirs, judge.num_samples / theirs_s)
        fitting += math.isfinite(seconds)
        if fitting == 3:
            break
    return theirs, ours


def data_parallel_seconds(judge: Judge, splits: Splits) -> float:
    """Return what nn.DataParallel takes: it copies parameters and reduces gradients in each micro-step."""
    if not math.isfinite(judge.seconds(splits)):  # device 0 holds the gradients of earlier micro-steps
        return math.inf
    total_s = 0.0
    for split, repeats in ((splits[0], len(splits) - 1), (splits[-1], 1)):
        if repeats:
            try:
                step = judge.runtime.measure(StepShape((split,)))
            except OutOfMemoryError:
                return math.inf
            total_s += repeats * (step.seconds - step.update_s)
    return total_s + step.update_s + (len(splits) - 1) * judge.added_s[0]


def sum_of_best(judge: Judge) -> float:
    """Return the sum of the cards' own best rates, each by itself: nothing is faster."""
    total = 0.0
    for index in range(len(judge.devices)):
        sizes = range(1, judge.caps[False][index] + 1)
        total += max((n / (judge.work(index, n) - judge.added_s[index]) for n in sizes), default=0.0)
    return total


def equal_ranks_rate(plan: Plan, num_samples: int) -> float | None:
    """Predict DDP with equal shares, by the model and the curves that the plan's own answer for DDP is from."""
    if plan.fit is None or not plan.ddp.ranks:
        return None
    count = len(plan.ddp.ranks)
    ceiling = min(rank.ceiling.batch_size for rank in plan.ddp.ranks)
    step_time = plan.fit.step_time
    best = 0.0
    for steps in range(1, num_samples // count + 1):
        share = -(-num_samples // (steps * count))
        if share > ceiling:
            continue
        slowest = [curve(share) for curve in step_time.curves]
        # The last micro-step is the shorter by what it lacks, as in the plan's own answer.
        amount = num_samples / (share * count)
        hidden_s = 2 / 3 * max(slowest) * (amount - (math.ceil(amount) - 1))
        seconds = overlapped_seconds(
            [time_s * amount for time_s in slowest], plan.fit.all_reduce_s, step_time.update_s, hidden_s
        )
        best = max(best, num_samples / seconds)
    return best or None


# Optuna's samplers, in the same space with the same trials


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def samplers() -> dict[str, Callable[[int], Any]]:
    """Return the samplers that are installed, by name, each as a function of a seed."""
    import optuna

    found: dict[str, Callable[[int], Any]] = {
        "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
    }
    if _installed("scipy"):
        found["gp"] = lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=4)
        found["qmc"] = lambda seed: optuna.samplers.QMCSampler(seed=seed)
    if _installed("cmaes"):
        found["cma_es"] = lambda seed: optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=4)
    return found


class Sampled:
    """The search space as a sampler sees it: accumulation steps, and where in their bounds batch and share are.

    Args:
        judge: Of the machine.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        caps = judge.caps[True]
        self.fewest = -(-judge.num_samples // min(judge.num_samples, max(1, sum(caps))))
        self.most = min(judge.num_samples, self.fewest + max(3, self.fewest))

    def batch_bounds(self, steps: int) -> tuple[int, int]:
        """Return the least and the largest batch that make the optimizer step in so many micro-steps, and may fit."""
        total, caps = self.judge.num_samples, self.judge.caps[steps > 1]
        least = -(-total // steps)
        most = total if steps == 1 else -(-total // (steps - 1)) - 1
        return least, max(least, min(most, sum(caps)))

    def share_bounds(self, batch_size: int, steps: int) -> tuple[int, int]:
        """Return the least and the most that device 0 may get."""
        own, *others = self.judge.caps[steps > 1]
        least = max(0, batch_size - sum(others))
        return least, max(least, min(own, batch_size))

    def split_of(self, steps: int, batch_at: float, share_at: float) -> Split:
        """Return the split at a place in the space; the rest goes to the other cards by their times."""
        least, most = self.batch_bounds(steps)
        batch_size = min(most, least + int(batch_at * (most - least + 1)))
        lowest, highest = self.share_bounds(batch_size, steps)
        share = min(highest, lowest + int(share_at * (highest - lowest + 1)))
        caps = self.judge.caps[steps > 1]
        times = [partial(self.judge.work, index) for index in range(1, len(caps))]
        if batch_size - share > sum(caps[1:]) or share > caps[0]:
            return ()
        return (share, *fastest_split(batch_size - share, times, caps[1:]))

    def place_of(self, steps: int, batch_size: int, share: int) -> dict[str, Any]:
        """Return the parameters of a configuration."""
        least, most = self.batch_bounds(steps)
        lowest, highest = self.share_bounds(batch_size, steps)
        batch_at = (batch_size - least + 0.5) / (most - least + 1)
        share_at = (share - lowest + 0.5) / (highest - lowest + 1)
        return {"steps": steps, "batch": min(1.0, max(0.0, batch_at)), "share": min(1.0, max(0.0, share_at))}

    def run(self, sampler: Any, count: int, first: Sequence[dict[str, Any]] = ()) -> tuple[list[float], float]:
        """Search with a sampler; what it suggests again costs no trial.

        Returns:
            The rate of each trial, 0 for one that fails; and the seconds that the sampler took for each.
        """
        import optuna

        study = optuna.create_study(direction="maximize", sampler=sampler)
        for parameters in first:
            study.enqueue_trial(parameters)
        seen: dict[Split, float] = {}
        asked_s = 0.0
        for _ in range(3 * count):
            start = time.perf_counter()
            trial = study.ask()
            steps = trial.suggest_int("steps", self.fewest, self.most)
            split = self.split_of(steps, trial.suggest_float("batch", 0, 1), trial.suggest_float("share", 0, 1))
            asked_s += time.perf_counter() - start
            if split not in seen:
                seen[split] = self.judge.rate(split) if split else 0.0
            if seen[split]:
                study.tell(trial, seen[split])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            if len(seen) == count:
                break
        return list(seen.values()), asked_s / len(study.trials)


def sampled(judge: Judge, plan: Plan, best: float, seed: int) -> dict[str, Any]:
    """Search with each sampler, cold and warm."""
    space = Sampled(judge)
    trials = plan.trials[:FIRST]
    starts: dict[str, list[dict[str, Any]]] = {
        "cold": [],
        "warm": [space.place_of(trial.accumulation_steps, trial.batch_size, trial.gpu0_bsz) for trial in trials],
    }
    table = {}
    for (name, make), (temperature, start) in itertools.product(samplers().items(), starts.items()):
        rates, asked_s = space.run(make(seed), TRIALS, start)
        table[f"{name} {temperature}"] = {
            f"after_{LATER}": round(best_after(rates, best, LATER), 5),
            f"after_{TRIALS}": round(best_after(rates, best, TRIALS), 5),
            "sampler_s_per_trial": round(asked_s, 5),
        }
    return table


# A model on a machine


def cross_checked(judge: Judge, count: int, seed: int) -> dict[str, Any]:
    """Hold random steps that fit, composed from what traces tell, against the same steps followed whole."""
    generator = random.Random(seed)  # noqa: S311 (it guards nothing)
    whole = _AsOne(judge.devices, judge.runtime.capacities_bytes, judge.traces.tracer)
    space = Sampled(judge)
    errors: list[float] = []
    splits_seen: set[Split] = set()
    for _ in range(50 * count):
        split = space.split_of(generator.randint(space.fewest, space.most), generator.random(), generator.random())
        if not split or split in splits_seen or not judge.rate(split):
            continue
        splits_seen.add(split)
        splits = judge.splits_of(split)
        errors.append(abs(judge.seconds(splits) / whole.measure(StepShape(splits)).seconds - 1))
        if len(errors) == count:
            break
    return {"points": len(errors), "most": round(max(errors), 6), "median": round(statistics.median(errors), 6)}


def case(model: str, traces: AffineTraces, name: str, points: int) -> dict[str, Any]:
    """Measure a model on a machine."""
    machine = MACHINES[name]
    spec = machine.spec(traces)
    seed = zlib.crc32(f"{model} {name}".encode())
    start = time.perf_counter()
    plan = tuned(traces, spec, machine.num_samples)
    judge = Judge(traces, parse_devices(spec), machine.num_samples)
    best = exhaustive(judge, [plan.split])
    with noise(seed):
        noisy = tuned(traces, spec, machine.num_samples)
    rates = [trial.samples_per_s for trial in plan.trials]
    theirs, ours_even = even_rates(judge)
    hand = by_hand(judge)
    equal = equal_ranks_rate(plan, machine.num_samples)
    row = {
        "model": model,
        "machine": name,
        "devices": spec,
        "effective_batch_size": machine.num_samples,
        "samples_per_s": round(plan.samples_per_s, 2),
        "split": list(plan.split),
        "accumulation_steps": plan.accumulation_steps,
        "trials": len(plan.trials),
        "failed_trials": sum(rate is None for rate in rates),
        "best": {**vars(best), "split": list(best.split), "rate": round(best.rate, 2)},
        "regret": {
            "after_1": round(best_after(rates, best.rate, 1), 5),
            f"after_{LATER}": round(best_after(rates, best.rate, LATER), 5),
            "of_the_plan": round(1 - judge.rate(plan.split) / best.rate, 5),
            "with_noise": round(1 - judge.rate(noisy.split) / best.rate, 5),
        },
        "noisy_split": list(noisy.split),
        "noisy_trials": len(noisy.trials),
        "model_off_by": {
            "at_the_plan": model_error(judge, plan, plan.split),
            "at_the_best": model_error(judge, plan, best.split),
        },
        "by_hand": round(1 - hand / best.rate, 5),
        "rivals": sampled(judge, plan, best.rate, seed % 2**31) if name in SAMPLED else {},
        "gain": {
            "over_data_parallel": _ratio(plan.samples_per_s, theirs),
            "over_our_even_split": _ratio(plan.samples_per_s, ours_even),
            "over_equal_ranks_in_ddp_predicted": _ratio(plan.ddp.samples_per_s, equal),
            "of_the_bound": _ratio(plan.samples_per_s, sum_of_best(judge)),
        },
        "composed": cross_checked(judge, points, seed),
        "bounds_broken": judge.bounds_broken,
        "steps_followed": traces.tracer.runs,
    }
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def model_error(judge: Judge, plan: Plan, split: Split) -> float | None:
    """Return how far the plan's fitted model is off the simulator at a split: where the search is led astray, and why.

    This judges nothing; it says where to look when a claim is broken.
    """
    if plan.fit is None:
        return None
    splits = judge.splits_of(split)
    return round(plan.fit.step_time.seconds(splits) / judge.seconds(splits) - 1, 5)


def _ratio(one: float, other: float | None) -> float | None:
    return round(one / other, 4) if other else None


def model_rows(model: str, machines: Sequence[str], points: int) -> list[dict[str, Any]]:
    """Measure a model on all machines, with the same traces."""
    import optuna

    torch.set_num_threads(1)
    torch.manual_seed(0)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore")
    tracer, why_real = make_tracer(MODELS[model](), like_gpu=True)
    assert why_real is None, why_real
    traces, rows = AffineTraces(tracer), []
    for name in machines:
        rows.append(case(model, traces, name, points))
        print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Say in a line how a model on a machine went."""
    regret = row["regret"]
    shown = ", ".join(f"{name} {value:.2%}" for name, value in regret.items())
    return (
        f"{row['model']} on {row['machine']}: {tuple(row['split'])} x{row['accumulation_steps']}, best "
        f"{tuple(row['best']['split'])}; regret {shown}; by hand {row['by_hand']:.1%}; gain {row['gain']}; "
        f"composed off by {row['composed']['most']:.3%}; {row['seconds']} s"
    )


# The solver


def random_curve(generator: random.Random) -> TimeCurve:
    """Return a card's times as they are measured: a few points, a fixed part, and a slope that is nearly one."""
    fixed_s, sample_s = generator.uniform(0.001, 0.02), generator.uniform(0.0005, 0.004)
    sizes = (1, 8, 32, 96, 200, 400)
    return TimeCurve.of([(n, fixed_s + sample_s * n * generator.uniform(0.97, 1.03)) for n in sizes])


def solver_figures() -> dict[str, Any]:
    """Time the fastest split of 250 samples a device, for more and more devices, in turn: the best of five.

    What counts is the processor's time of this one thread, so that what else the machine does counts little.
    """
    seconds = dict.fromkeys((1250, 2500, 5000, 10_000), math.inf)
    for round_ in range(5):
        for count in seconds:
            generator = random.Random(round_)  # noqa: S311 (it guards nothing)
            curves = [random_curve(generator) for _ in range(count)]
            caps = [generator.randint(200, 600) for _ in range(count)]
            start = time.process_time()
            split = fastest_split(250 * count, curves, caps)
            seconds[count] = min(seconds[count], time.process_time() - start)
            assert sum(split) == 250 * count
    growth = [seconds[2 * count] / seconds[count] for count in list(seconds)[:-1]]
    return {
        "seconds": {str(count): round(value, 4) for count, value in seconds.items()},
        "growth_when_doubled": [round(ratio, 3) for ratio in growth],
        "claims": [
            claim("seconds for 2.5 million samples over 10,000 devices", seconds[10_000], SOLVER_S),
            claim("growth of the solver's time when devices and samples double, at most", max(growth), SOLVER_GROWTH),
        ],
    }


# What the search itself costs


class _Stopwatch:
    """Adds up the time in some functions, that of one inside another once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


def overhead_here() -> dict[str, Any]:
    """Tune the char GPT on the processor, for real, and tell where the time went."""
    import char_gpt

    torch.set_num_threads(1)
    workload = char_gpt.workload()
    watch = _Stopwatch()
    with (
        mock.patch.object(CpuRuntime, "measure", watch.around("steps", CpuRuntime.measure)),
        mock.patch.object(CpuRuntime, "peaks", watch.around("steps", CpuRuntime.peaks)),
        # With what torch imports for its first fake tensor: 1.1 s, whatever is traced.
        mock.patch.object(Tracer, "__init__", watch.around("traces", Tracer.__init__)),
        mock.patch.object(Tracer, "trace", watch.around("traces", Tracer.trace)),
        mock.patch.object(Tracer, "trace_resized", watch.around("traces", Tracer.trace_resized)),
    ):
        start = time.perf_counter()
        plan = tune(workload, devices=CPU_DEVICES, effective_batch_size=96, n_trials=TRIALS, profile="off")
        wall_s = time.perf_counter() - start
    rest_s = wall_s - sum(watch.seconds.values())
    return {
        "devices": CPU_DEVICES,
        "trials": len(plan.trials),
        "wall_s": round(wall_s, 3),
        **{f"{name}_s": round(seconds, 3) for name, seconds in watch.seconds.items()},
        "rest_s": round(rest_s, 3),
        "share": round(rest_s / wall_s, 5),
    }


CPU_DEVICES = "cpu:256MiB,cpu:192MiB"


def overhead_figures() -> dict[str, Any]:
    """Do so in a new process, in which Optuna is imported by the tuning."""
    command = [sys.executable, str(Path(__file__)), "--overhead"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 (it is this file)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    said = "share of a real tuning's wall time that is neither in steps nor in traces"
    return {**figures, "claims": [claim(said, figures["share"], OVERHEAD)]}


# All of it


def claim(said: str, figure: float, limit: float) -> dict[str, Any]:
    """Return a claim with its figure and its limit, and whether it holds."""
    return {"claim": said, "figure": round(figure, 5), "limit": limit, "holds": figure <= limit}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold the rows against what is claimed of them."""
    regrets = {name: [row["regret"][name] for row in rows] for name in rows[0]["regret"]}
    later = regrets[f"after_{LATER}"]
    rivals = [rival[f"after_{TRIALS}"] for row in rows for rival in row["rivals"].values()]
    everyone = [*later, *regrets["of_the_plan"], *regrets["with_noise"], *rivals]
    return [
        claim("regret after one trial, median", statistics.median(regrets["after_1"]), FIRST_REGRET),
        claim(f"regret after {LATER} trials, median", statistics.median(later), LATER_REGRET),
        claim(f"regret after {LATER} trials, worst", max(later), WORST_REGRET),
        claim(f"regret with {NOISE:.0%} noise, median", statistics.median(regrets["with_noise"]), NOISY_REGRET),
        claim("by how much anyone beat exhaustive search", max(0.0, -min(everyone)), 1e-5),
        claim("steps of the exhaustive search below their bound", sum(row["bounds_broken"] for row in rows), 0),
        claim("composed steps off whole ones, at most", max(row["composed"]["most"] for row in rows), COMPOSED_ERROR),
    ]


def sampler_medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each sampler's regret over the cases in which all of them ran, beside the tuner's own."""
    compared = [row for row in rows if row["rivals"]]
    table = {}
    for name in compared[0]["rivals"] if compared else ():
        found = [row["rivals"][name] for row in compared]
        table[name] = {
            f"{kind}_{column}": round(function([row[column] for row in found]), 5)
            for column in (f"after_{LATER}", f"after_{TRIALS}")
            for kind, function in (("median", statistics.median), ("mean", statistics.fmean), ("worst", max))
        }
        table[name]["sampler_s_per_trial"] = round(statistics.median(row["sampler_s_per_trial"] for row in found), 5)
    return table


def by_machine(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each machine's median gains over its models, and the worst regret there."""
    table = {}
    for name in dict.fromkeys(row["machine"] for row in rows):
        found = [row for row in rows if row["machine"] == name]
        known = {
            gain: [row["gain"][gain] for row in found if row["gain"][gain] is not None] for gain in found[0]["gain"]
        }
        table[name] = {gain: round(statistics.median(values), 4) for gain, values in known.items() if values}
        table[name]["worst_regret"] = max(row["regret"]["of_the_plan"] for row in found)
    return table


def searched(models: Sequence[str], machines: Sequence[str], jobs: int) -> dict[str, Any]:
    """Measure all models on all machines, each model in a process of its own."""
    points = -(-POINTS // len(models))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        rows = [
            row for found in pool.map(model_rows, models, *map(itertools.repeat, (machines, points))) for row in found
        ]
    return {"claims": claims(rows), "machines": by_machine(rows), "samplers": sampler_medians(rows), "rows": rows}


def measured(models: Sequence[str], machines: Sequence[str], jobs: int) -> dict[str, Any]:
    """Measure everything, with the machine, the versions and the date."""
    start = time.perf_counter()
    parts = {
        "solver": solver_figures(),
        "overhead": overhead_figures(),
        "search": searched(models, machines, jobs),
    }
    names = ("torch", "optuna", *(name for name in ("scipy", "cmaes") if _installed(name)))
    return {
        **parts,
        "trials": TRIALS,
        "noise": NOISE,
        "wall_s": round(time.perf_counter() - start, 1),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure, write the figures, print what holds; 1 where a claim is broken."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models on two machines")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=min(len(MODELS), os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--overhead", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "search.json")
    arguments = parser.parse_args()
    if arguments.overhead:
        print(json.dumps(overhead_here()))
        return 0
    models = arguments.models or (QUICK_MODELS if arguments.quick else list(MODELS))
    machines = arguments.machines or (QUICK_MACHINES if arguments.quick else list(MACHINES))
    figures = measured(models, machines, arguments.jobs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    held = []
    for part in ("solver", "overhead", "search"):
        for entry in figures[part]["claims"]:
            held.append(entry["holds"])
            verdict = "" if entry["holds"] else ": BROKEN"
            print(f"{part}: {entry['claim']}: {entry['figure']}, limit {entry['limit']}{verdict}")
    for table in ("machines", "samplers"):
        for name, row in figures["search"][table].items():
            print(f"{name}: {row}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
