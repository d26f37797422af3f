"""Compare the search with an exhaustive search on simulated machines, and measure what the search costs.

    python benchmarks/search.py [--quick] [--models NAME ...] [--machines NAME ...] [--jobs 2]
                                [--output benchmarks/results/search.json]

The exhaustive search uses the event simulator and never the tuner's formulas. For each machine, model and effective
batch size, it tries every batch size with its accumulation steps, every number of samples on device 0, and every number
of other GPUs of each kind. The rest of the batch is assigned greedily: each next sample goes to the GPU that finishes
it first by the traced times. From the best splits, single samples are then moved between GPUs while that helps.

Splits are ruled out only by proof. A simulated step is a network of events that wait for each other. Its time is the
longest path, so the sum of durations along any path is a lower bound. The bound is a GPU's own work over all
micro-steps, the copies over its link, and the optimizer. A claim checks that no simulated step is below its bound. The
simulator's peaks bound the samples of each GPU.

The tuner composes steps from a few traces, and so does this script. A claim compares random composed steps with the
same steps traced completely on all GPUs.
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
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.protocol import Measurement, StepShape
from autosplit.sim import prepare, simulated
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.op_cost import Move, Work
from autosplit.sim.replay import WholeStep
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Event, Trace, Tracer, make_tracer
from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.split import even_split, micro_batch_sizes, proportional_split
from autosplit.solve.step_time import TimeCurve, overlapped_seconds

FIRST_REGRET = 0.01
"""Limit of the median regret after one trial."""
LATER_REGRET = 0.003
"""Limit of the median regret after `LATER` trials."""
WORST_REGRET = 0.03
"""Limit of the worst regret after `LATER` trials."""
NOISY_REGRET = 0.02
"""Limit of the median regret with `NOISE`."""
COMPOSED_ERROR = 0.01
"""Limit of the difference between a composed and a completely traced step."""
SOLVER_S = 1.0
SOLVER_GROWTH = 2.6
"""Limit of the growth if devices and samples double."""
OVERHEAD = 0.05
"""Limit of the share of a real tuning's wall time that is not in steps or traces."""

LATER = 12
TRIALS = 24
FIRST = 5
"""Trials of the tuner that a warm sampler starts with."""
NOISE = 0.03
POINTS = 30
"""Points that are compared on each machine."""
NEAR, STARTS = 0.02, 12
"""Single samples are moved in at most `STARTS` splits, each within `NEAR` of the best time."""
MIB = 2**20
ROUNDING = 1e-9
"""Difference between sums of the same durations in different orders."""

Split = tuple[int, ...]
Splits = tuple[Split, ...]


# Models with few layers and large samples


class Inverted(nn.Module):
    """A block of EfficientNet: expansion, depthwise convolution, squeeze and excitation, projection."""

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
        """Return features of the block's output width."""
        y = self.depthwise(self.widen(x))
        out: Tensor = self.narrow(y * self.squeeze(y).sigmoid())
        return x + out if self.adds else out


def efficient() -> Workload:
    """A small EfficientNet. Memory bandwidth limits its depthwise convolutions."""
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
    """A GPT whose logits, gathered on device 0, are as large as its activations."""
    tokens = torch.randint(0, 4096, (architectures.SAMPLES, 512))
    model = Decoder(768, 2, 512, 4096)
    batch = (tokens, tokens.roll(-1, 1))
    return Workload(model, batch, loss_fn=architectures.token_loss, optimizer=torch.optim.AdamW)


class WithLoss(nn.Module):
    """An encoder that returns its loss, so only a number is gathered."""

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
    """Return an encoder that computes its loss itself."""
    batch = (torch.randint(0, 1024, (architectures.SAMPLES, 384)), torch.randint(0, 10, (architectures.SAMPLES,)))
    return Workload(WithLoss(512, 2), batch, optimizer=torch.optim.AdamW)


class Windows(nn.Module):
    """An LSTM over the independent windows of a sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each sample."""
        outputs, _ = self.layer(x.flatten(0, 1))
        logits: Tensor = self.head(outputs[:, -1].unflatten(0, x.shape[:2]).mean(1))
        return logits


def lstm() -> Workload:
    """Return an LSTM over 64 windows of 6 time steps per sample."""
    batch = (torch.randn(architectures.SAMPLES, 64, 6, 768), torch.randint(0, 10, (architectures.SAMPLES,)))
    return Workload(Windows(768), batch, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW)


def mlp() -> Workload:
    """Return an MLP over 256 tokens per sample."""
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


# Machines


@dataclass(frozen=True)
class Machine:
    """Simulated GPUs, and the samples of an optimizer step.

    Attributes:
        cards: Number and name of the GPUs, device 0's kind first, and their memory: a multiple of the even
            share of the optimizer step, or None for all of the GPU's memory.
        num_samples: The effective batch size.
    """

    cards: tuple[tuple[int, str, float | None], ...]
    num_samples: int = 48

    def spec(self, traces: AffineTraces) -> str:
        """Return the device spec for a model. Tight memory depends on the memory per sample of the model."""
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
"""The machine of a user who went from 2,000 to 2,500 images/s with handwritten batch sizes (timm, pull request 580)."""

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
"""Machines on which Optuna's samplers are compared. Their random trials take long to simulate."""

QUICK_MODELS = ("lstm", "mlp")
QUICK_MACHINES = ("2xRTX3090", REPORTED)


# The judge: simulated times and a lower bound


class _AsOne(SimulatedWorker):
    """Traces every step completely, on all GPUs."""

    def measure(self, shape: StepShape, *, budget_s: float = 0.0) -> Measurement:
        """Return the time and the peaks of a step."""
        with mock.patch.object(simulated, "source_of", WholeStep):
            return super().measure(shape, budget_s=budget_s)


@dataclass
class Judge:
    """Computes the time of steps on a machine, and a lower bound.

    Attributes:
        traces: The traces, shared by all machines.
        devices: The GPUs.
        num_samples: The effective batch size.
        simulated: Times of the simulated steps.
        bounds_broken: Steps that took less than their bound.
    """

    traces: AffineTraces
    devices: tuple[Device, ...]
    num_samples: int
    simulated: dict[Splits, float] = field(default_factory=dict)
    bounds_broken: int = 0

    def __post_init__(self) -> None:
        capacities = tuple(device.capacity_bytes for device in self.devices)
        self.worker = SimulatedWorker(self.devices, capacities, self.traces)
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
        """Return the simulated time of an optimizer step, or infinity if it does not fit."""
        if splits not in self.simulated:
            try:
                self.simulated[splits] = self.worker.measure(StepShape(splits)).seconds
            except OutOfMemoryError:
                self.simulated[splits] = math.inf
            self.bounds_broken += self.path_seconds(splits) > self.simulated[splits] * (1 + ROUNDING)
        return self.simulated[splits]

    def rate(self, split: Split) -> float:
        """Return the samples/s of a split, or 0 if it does not fit."""
        return self.num_samples / self.seconds(self.splits_of(split))

    def splits_of(self, split: Split) -> Splits:
        """Return the micro-steps of a split. The last micro-step splits the remaining samples in proportion."""
        batch_size = sum(split)
        *full, last = micro_batch_sizes(self.num_samples, batch_size)
        return (*((split,) * len(full)), split if last == batch_size else proportional_split(last, split))

    # The bound

    def path_seconds(self, splits: Splits) -> float:
        """Return a lower bound of a step: a GPU's work, and the copies of parameters and gradients over its link.

        All links work at once. Device 0 is an end of each link and waits for the slowest.
        """
        copies_s = [self._copies_s[index] if share else 0.0 for index, share in enumerate(splits[0])]
        copies_s[0] = max(copies_s)
        worked_s = [
            sum(self.work(index, split[index]) for split in splits) - self.added_s[index] if share else 0.0
            for index, share in enumerate(splits[0])
        ]
        return max(map(operator.add, worked_s, copies_s)) + self.update_s

    def work(self, index: int, samples: int) -> float:
        """Return the seconds that a GPU works in an accumulating micro-step, without waiting."""
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
        """Return the most samples that fit on a GPU by the simulator's peaks, at most those of the optimizer step."""
        capacity_bytes = self.devices[index].capacity_bytes
        role = min(index, 1)
        low, high = 0, self.num_samples
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._part(index, middle, accumulates=accumulates).peak_bytes[role] <= capacity_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _copy_seconds(self, index: int) -> float:
        """Return the time of a replica's parameters and gradients on its link. It is the same in every step."""
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
    """The best split, and the cost of finding it.

    Attributes:
        split: Samples per device.
        rate: Samples/s.
        considered: Number of splits considered.
        ruled_out: Number of splits that the bound ruled out.
        simulated: Number of splits simulated.
        moved: Whether moving single samples improved the result.
    """

    split: Split
    rate: float
    considered: int
    ruled_out: int
    simulated: int
    moved: bool


def divisions(judge: Judge, accumulates: bool) -> Iterator[list[Split]]:
    """Yield greedy splits of 1, 2, ... samples for each choice of GPUs besides device 0.

    Only the number of equal GPUs matters. Outputs are gathered in order and the last GPU is waited for last, so it gets
    the odd sample.
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
    """Yield every batch size, every number of samples on device 0, and every choice of other GPUs."""
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
    """Find the fastest split that fits.

    Args:
        judge: The judge of the machine.
        known: Splits to start with. A fast first split rules out more.
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
    """Move single samples between GPUs while the simulated time improves."""
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
    """Yield the splits that differ by one sample moved to another GPU."""
    for source, target in itertools.permutations(range(len(split)), 2):
        if split[source]:
            yield tuple(n - (i == source) + (i == target) for i, n in enumerate(split))


# Tuner


@contextmanager
def shared_traces(traces: AffineTraces) -> Iterator[None]:
    """Use the shared traces in every tuning, so each step is traced once."""
    with (
        mock.patch.object(prepare, "make_tracer", return_value=(traces.tracer, None)),
        mock.patch.object(prepare, "AffineTraces", return_value=traces),
    ):
        yield


def tuned(traces: AffineTraces, spec: str, num_samples: int) -> Plan:
    """Tune with the public function."""
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
    """Add noise of `NOISE` to every measured time, and report it as the measurement's noise."""
    generator = random.Random(seed)  # noqa: S311 (not for security)
    exact = SimulatedWorker.measure

    def measure(self: SimulatedWorker, shape: StepShape, *, budget_s: float = 0.0) -> Measurement:
        measured = exact(self, shape, budget_s=budget_s)
        seconds = measured.seconds * max(0.5, 1 + generator.gauss(0, NOISE))
        return replace(measured, seconds=seconds, error_s=NOISE * seconds)

    with mock.patch.object(SimulatedWorker, "measure", measure):
        yield


def best_after(rates: Sequence[float | None], best: float, count: int) -> float:
    """Return the regret of the best of the first trials, as a share."""
    return 1 - max((rate or 0.0 for rate in rates[:count]), default=0.0) / best


# Settings without the tuner


def by_hand(judge: Judge) -> float:
    """Return the rate of the largest power of two that fits on all GPUs, with the accumulation steps that it needs.

    It uses BalancedDataParallel, which keeps replicas and is faster than nn.DataParallel.
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
    """Return the best rates of an even split, in nn.DataParallel and in BalancedDataParallel.

    Tries accumulation steps from the fewest that fit, while one more may still be faster.
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
    """Return the time in nn.DataParallel, which copies parameters and reduces gradients in each micro-step."""
    if not math.isfinite(judge.seconds(splits)):  # device 0 holds the gradients of earlier micro-steps
        return math.inf
    total_s = 0.0
    for split, repeats in ((splits[0], len(splits) - 1), (splits[-1], 1)):
        if repeats:
            try:
                step = judge.worker.measure(StepShape((split,)))
            except OutOfMemoryError:
                return math.inf
            total_s += repeats * (step.seconds - step.update_s)
    return total_s + step.update_s + (len(splits) - 1) * judge.added_s[0]


def sum_of_best(judge: Judge) -> float:
    """Return the sum of the best rates of the single GPUs. No split is faster."""
    total = 0.0
    for index in range(len(judge.devices)):
        sizes = range(1, judge.caps[False][index] + 1)
        total += max((n / (judge.work(index, n) - judge.added_s[index]) for n in sizes), default=0.0)
    return total


def equal_ranks_rate(plan: Plan, num_samples: int) -> float | None:
    """Predict DDP with equal batch sizes, from the model and curves that predict the plan's DDP."""
    if plan.ddp is None or plan.ddp.cost is None:
        return None
    count, ceiling, cost = len(plan.ddp.seats), min(plan.ddp.ceilings), plan.ddp.cost
    step_time = cost.step_time
    best = 0.0
    for steps in range(1, num_samples // count + 1):
        share = -(-num_samples // (steps * count))
        if share > ceiling:
            continue
        slowest = [curve(share) for curve in step_time.curves]
        # As in the plan's DDP, the last micro-step is shorter by the missing samples.
        amount = num_samples / (share * count)
        hidden_s = 2 / 3 * max(slowest) * (amount - (math.ceil(amount) - 1))
        seconds = overlapped_seconds(
            [time_s * amount for time_s in slowest], cost.all_reduce_s, step_time.update_s, hidden_s
        )
        best = max(best, num_samples / seconds)
    return best or None


# Optuna's samplers, with the same space and number of trials


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def samplers() -> dict[str, Callable[[int], Any]]:
    """Return the installed samplers by name, as functions of a seed."""
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
    """The search space of a sampler: accumulation steps, and positions of batch size and split within their bounds.

    Args:
        judge: The judge of the machine.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        caps = judge.caps[True]
        self.fewest = -(-judge.num_samples // min(judge.num_samples, max(1, sum(caps))))
        self.most = min(judge.num_samples, self.fewest + max(3, self.fewest))

    def batch_bounds(self, steps: int) -> tuple[int, int]:
        """Return the smallest and largest batch size for a number of micro-steps that may fit."""
        total, caps = self.judge.num_samples, self.judge.caps[steps > 1]
        least = -(-total // steps)
        most = total if steps == 1 else -(-total // (steps - 1)) - 1
        return least, max(least, min(most, sum(caps)))

    def share_bounds(self, batch_size: int, steps: int) -> tuple[int, int]:
        """Return the fewest and most samples for device 0."""
        own, *others = self.judge.caps[steps > 1]
        least = max(0, batch_size - sum(others))
        return least, max(least, min(own, batch_size))

    def split_of(self, steps: int, batch_at: float, share_at: float) -> Split:
        """Return the split at a point. The other GPUs get the rest by their times."""
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
        """Return the parameters of a point."""
        least, most = self.batch_bounds(steps)
        lowest, highest = self.share_bounds(batch_size, steps)
        batch_at = (batch_size - least + 0.5) / (most - least + 1)
        share_at = (share - lowest + 0.5) / (highest - lowest + 1)
        return {"steps": steps, "batch": min(1.0, max(0.0, batch_at)), "share": min(1.0, max(0.0, share_at))}

    def run(self, sampler: Any, count: int, first: Sequence[dict[str, Any]] = ()) -> tuple[list[float], float]:
        """Search with a sampler. Repeated suggestions cost no trial.

        Returns:
            The rate of each trial, or 0 if it fails, and the sampler's seconds for each trial.
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


# One model on one machine


def cross_checked(judge: Judge, count: int, seed: int) -> dict[str, Any]:
    """Compare random composed steps that fit with the same steps traced completely."""
    generator = random.Random(seed)  # noqa: S311 (not for security)
    whole = _AsOne(judge.devices, judge.worker.capacities_bytes, judge.traces.tracer)
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
    """Return the relative error of the plan's fitted model at a split.

    It is no claim. It shows the cause of a broken claim.
    """
    if plan.main.cost is None:
        return None
    splits = judge.splits_of(split)
    return round(plan.main.cost.step_time.seconds(splits) / judge.seconds(splits) - 1, 5)


def _ratio(one: float, other: float | None) -> float | None:
    return round(one / other, 4) if other else None


def model_rows(model: str, machines: Sequence[str], points: int) -> list[dict[str, Any]]:
    """Measure a model on all machines with the same traces."""
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
    """Return one line about a model on a machine."""
    regret = row["regret"]
    shown = ", ".join(f"{name} {value:.2%}" for name, value in regret.items())
    return (
        f"{row['model']} on {row['machine']}: {tuple(row['split'])} x{row['accumulation_steps']}, best "
        f"{tuple(row['best']['split'])}; regret {shown}; by hand {row['by_hand']:.1%}; gain {row['gain']}; "
        f"composed off by {row['composed']['most']:.3%}; {row['seconds']} s"
    )


# Solver


def random_curve(generator: random.Random) -> TimeCurve:
    """Return a realistic time curve of a GPU: a few points, a fixed part, and a nearly constant slope."""
    fixed_s, sample_s = generator.uniform(0.001, 0.02), generator.uniform(0.0005, 0.004)
    sizes = (1, 8, 32, 96, 200, 400)
    return TimeCurve.of([(n, fixed_s + sample_s * n * generator.uniform(0.97, 1.03)) for n in sizes])


def solver_figures() -> dict[str, Any]:
    """Time the solver with 250 samples per device and a growing number of devices. Return the best of five runs.

    The CPU time of this thread counts, so other load on the machine has little effect.
    """
    seconds = dict.fromkeys((1250, 2500, 5000, 10_000), math.inf)
    for round_ in range(5):
        for count in seconds:
            generator = random.Random(round_)  # noqa: S311 (not for security)
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
            claim("growth of the solver's time if devices and samples double, maximum", max(growth), SOLVER_GROWTH),
        ],
    }


# Overhead of the search


class _Stopwatch:
    """Adds up the time in some functions. Nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with timing."""

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
    """Tune the character GPT with real steps on the CPU, and return where the time went."""
    import char_gpt

    torch.set_num_threads(1)
    workload = char_gpt.workload()
    watch = _Stopwatch()
    with (
        mock.patch.object(CpuWorker, "measure", watch.around("steps", CpuWorker.measure)),
        mock.patch.object(CpuWorker, "peaks", watch.around("steps", CpuWorker.peaks)),
        # Includes torch's imports for the first fake tensor, 1.1 s for any trace.
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
    """Measure the overhead in a new process, so tuning also imports Optuna."""
    command = [sys.executable, str(Path(__file__)), "--overhead"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 (runs this file)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    text = "share of a real tuning's wall time outside of steps and traces"
    return {**figures, "claims": [claim(text, figures["share"], OVERHEAD)]}


# Command line


def claim(text: str, figure: float, limit: float) -> dict[str, Any]:
    """Return a claim with its figure, its limit, and whether it holds."""
    return {"claim": text, "figure": round(figure, 5), "limit": limit, "holds": figure <= limit}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims about the rows."""
    regrets = {name: [row["regret"][name] for row in rows] for name in rows[0]["regret"]}
    later = regrets[f"after_{LATER}"]
    rivals = [rival[f"after_{TRIALS}"] for row in rows for rival in row["rivals"].values()]
    everyone = [*later, *regrets["of_the_plan"], *regrets["with_noise"], *rivals]
    return [
        claim("regret after one trial, median", statistics.median(regrets["after_1"]), FIRST_REGRET),
        claim(f"regret after {LATER} trials, median", statistics.median(later), LATER_REGRET),
        claim(f"regret after {LATER} trials, worst", max(later), WORST_REGRET),
        claim(f"regret with {NOISE:.0%} noise, median", statistics.median(regrets["with_noise"]), NOISY_REGRET),
        claim("largest gain of any method over exhaustive search", max(0.0, -min(everyone)), 1e-5),
        claim("simulated steps below their lower bound", sum(row["bounds_broken"] for row in rows), 0),
        claim(
            "difference of composed from completely traced steps, maximum",
            max(row["composed"]["most"] for row in rows),
            COMPOSED_ERROR,
        ),
    ]


def sampler_medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the regret of each sampler and of the tuner, over the cases in which all samplers ran."""
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
    """Return each machine's median gains over the models, and its worst regret."""
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
    """Measure all models on all machines, each model in a separate process."""
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
    """Measure, write the results, and print the claims. Return 1 if a claim is broken."""
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
