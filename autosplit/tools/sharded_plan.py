"""Solve a plan's DDP ranks again for a model that FSDP2 shards. See Note [Memory of a sharded model].

Note [Memory of a sharded model]

A shard group has N ranks. P, G and O are the bytes of all parameters, gradients and optimizer state. Each rank holds
1/N of them, with the first dimension of each parameter rounded up to a multiple of N (`FSDPParam` in torch's
distributed/fsdp/_fully_shard/_fsdp_param.py). p and g are the parameters and gradients of the largest layer, and p_r
and g_r those of the root group, which has all other parameters. While the activations are largest, these tensors also
exist (`FSDPParamGroup` in _fsdp_param_group.py of torch 2.13):

    p_r        the root's parameters, which stay gathered until the backward (`FSDPState._lazy_init`)
    p          the parameters of the layer that runs
    p          the buffer of another layer's all-gather (`wait_for_unshard`, and `pre_backward`, which prefetches)
    g_r + g    the gradients of the root, and of the layer that runs
    g          the input of the previous layer's reduce-scatter, which `post_backward` frees one layer later

    one forward per step         (P + G + O) / N + p_r + 2 p + g_r + 2 g
    several forwards per step    (P + G + O) / N + p_r + 2 p + G + g

With several forwards, FSDP2 keeps whole gradients until the last backward (`set_requires_gradient_sync`). With
``reshard_after_forward=False``, all layers stay gathered and none is prefetched: P replaces p_r + 2 p. If the layers
are small, another moment may need more: the root's all-gather (2 p_r + p), the reduce-scatter of its gradients (2 g_r),
or the update, where torch's foreach optimizers have temporary tensors of G / N.

On emulated GPUs with a caching allocator, each of two ranks needed 0.83 to 1.00 of the prediction in fourteen cases.

With mixed precision, FSDP2 gathers and reduces in `param_dtype`. P, p and the gradients above are in this dtype. Only
the shards keep the dtype of the model's parameters.

Note [Communication of a sharded model]

A ring all-reduce is a reduce-scatter and an all-gather, and each takes half of its time. Each forward gathers all
parameters, and each backward gathers the layers again. These all-gathers overlap with the computation, so a forward and
backward takes at least their time. In the last backward, the gradients are also reduce-scattered, and then all-reduced
between the shard groups. The step waits for the part that this backward does not hide. Its share of the all-gathers is
`BACKWARD_SHARE`, so a step without computation takes the sum of all collectives. All links count as equally fast.

The optimizer updates 1/N of the parameters. Its kernels only move memory, so the update takes 1/N of its time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autosplit.errors import InputError, PlanError
from autosplit.notes import Note
from autosplit.plan.layout import Layout, seated
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_notes
from autosplit.plan.solve_again import LINE_ERROR, solved
from autosplit.plan.torchrun import required_ranks
from autosplit.solve.change import with_ceilings
from autosplit.solve.memory import Ceiling, largest_size, samples_within
from autosplit.solve.problem import Problem, Solution
from autosplit.solve.step_time import BACKWARD_SHARE, Cost, TimeCurve
from autosplit.solve.trial import LEAST_DIFFERENCE
from autosplit.text import counted_text, ms_text, rate_text, size_text

Activations = Callable[[int, int], int]
"""Bytes of a forward and backward of some samples on a rank, without parameters and gradients: ``(rank, samples)``."""


def sharded_plan(
    plan: Plan,
    groups: Sequence[Sequence[Tensor]],
    activations: Activations,
    *,
    shard_size: int | None = None,
    reshards: bool = True,
    param_dtype: torch.dtype | None = None,
    gaps: float = 0.0,
) -> Plan:
    """Return the plan for sharded `groups` of parameters, from a plan for ranks with whole models. See `tune_sharded`.

    Args:
        plan: A plan that was measured or simulated with parameters in `param_dtype`.
        groups: The parameters of the root, then those of each layer, in the dtype of the shards.
        reshards: `reshard_after_forward` of FSDP2.
        gaps: Fraction of the memory that the allocator loses in gaps between tensors.
    """
    ranks = required_ranks(plan)
    count = len(ranks.seats)
    sizes = shard_sizes(count, shard_size)
    cost, optimizer_bytes = _measured(plan)
    model = _Sharded(groups, [[_gathered(one, param_dtype) for one in group] for group in groups], optimizer_bytes)
    variants = [
        _Variant(plan, ranks, cost, model, activations, 1 - gaps, size, reshards, several)
        for size in sizes
        for several in (False, True)
    ]
    solved = [(one, one.problem.solve()) for one in variants]
    found = [(one, solution) for one, solution in solved if solution is not None]
    if not found:
        one, several = (
            size_text(min(variant.least_bytes for variant in variants if variant.several is several))
            for several in (False, True)
        )
        raise PlanError(
            f"{ranks.effective_batch_size} samples per optimizer step do not fit {count} ranks. With its smallest "
            f"batch, a rank needs {one} in a step of one forward, and {several} in a step of several, which keeps "
            f"whole gradients. Tensors may use {size_text(min(variants[0].room_bytes))} of the smallest rank. "
            "Pass layers with fewer parameters each, or tune for larger devices or a smaller effective batch.",
        )
    enough = (1 - LEAST_DIFFERENCE) * max(solution.samples_per_s for _, solution in found)
    fast = [pair for pair in found if pair[1].samples_per_s >= enough]
    chosen, solution = min(fast, key=lambda pair: (pair[0].size, pair[1].accumulation_steps))
    return with_notes(chosen.planned(solution), last=[chosen.note(solution), chosen.unequal_note(solution)])


def shard_sizes(ranks: int, wanted: int | None) -> list[int]:
    """Return the numbers of ranks per shard group to try: `wanted`, or by default all that divide `ranks`.

    Raises:
        InputError: `wanted` is no such number.
        PlanError: There is a single rank.
    """
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0]
    if not sizes:
        raise PlanError(
            "There is a single rank. Expected several, because FSDP2 shards a model over several devices. Pass more "
            "devices, such as devices='sim:2xRTX3090'.",
        )
    if wanted is None:
        return sizes
    if type(wanted) is not int or wanted not in sizes:
        raise InputError(
            f"shard_size is {wanted!r:.80}. Expected one of {sizes}: a divisor of the number of ranks, {ranks}. Leave "
            "shard_size out to try them all.",
        )
    return [wanted]


def state_bytes(parameters: Iterable[Tensor], ranks: int = 1) -> tuple[int, int]:
    """Return one rank's bytes of parameters and of gradients. `ranks` ranks shard each parameter."""
    sizes = [
        (-(-one.shape[0] // ranks) * (one.numel() // one.shape[0]) * one.element_size(), one.requires_grad)
        for one in parameters
        if one.numel()
    ]
    return sum(nbytes for nbytes, _ in sizes), sum(nbytes for nbytes, trains in sizes if trains)


def gathered_bytes(groups: Sequence[Sequence[Tensor]], ranks: int, *, reshards: bool, several: bool) -> int:
    """Return a rank's bytes of gathered tensors. See Note [Memory of a sharded model].

    Args:
        groups: The parameters of the root, then those of each layer.
        ranks: Ranks per shard group.
        reshards: `reshard_after_forward` of FSDP2.
        several: Whether an optimizer step has several forwards.
    """
    padded = [(ranks * held, ranks * trained) for held, trained in (state_bytes(group, ranks) for group in groups)]
    (root, root_grads), layers = padded[0], padded[1:]
    largest, largest_grads = (max([0, *(sizes[kind] for sizes in layers)]) for kind in (0, 1))
    every, every_grads = (sum(sizes[kind] for sizes in padded) for kind in (0, 1))
    held = root + largest if reshards else every
    waiting = every_grads if several else 0
    forward = max(held, 2 * root) + largest + waiting
    backward = held + (largest if reshards else 0) + largest_grads + (waiting or root_grads + largest_grads)
    return max(forward, backward, 2 * root_grads, every_grads // ranks)


def _gathered(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a gathered parameter on the meta device. FSDP2 casts only floating-point parameters."""
    dtype = dtype if parameter.is_floating_point() else None
    return torch.empty_like(parameter, dtype=dtype, device="meta", requires_grad=parameter.requires_grad)


@dataclass(frozen=True)
class _Sharded:
    """The model's groups of parameters, in the dtype of the shards and in the dtype that FSDP2 gathers.

    Attributes:
        optimizer_bytes: Bytes of the optimizer state of all parameters, in the dtype that FSDP2 gathers.
    """

    groups: Sequence[Sequence[Tensor]]
    gathered: Sequence[Sequence[Tensor]]
    optimizer_bytes: int

    @functools.cached_property
    def whole_bytes(self) -> tuple[int, int]:
        """Bytes of all gathered parameters, and of their gradients."""
        return state_bytes(itertools.chain(*self.gathered))

    @functools.cached_property
    def root_bytes(self) -> int:
        """Bytes of the gathered parameters of the root."""
        return state_bytes(self.gathered[0])[0]


@dataclass(frozen=True)
class _Variant:
    """A choice of the shard groups, and of one or several forwards per optimizer step.

    Attributes:
        ranks: The layout of ranks with the whole model.
        whole: The cost model of these ranks.
        usable: Fraction of a rank's memory that tensors can use.
    """

    before: Plan
    ranks: Layout
    whole: Cost
    model: _Sharded
    activations: Activations
    usable: float
    size: int
    reshards: bool
    several: bool

    @functools.cached_property
    def shards(self) -> tuple[int, int]:
        """Bytes of one rank's shards of parameters and of gradients."""
        return state_bytes(itertools.chain(*self.model.groups), self.size)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shards of parameters, gradients and optimizer state."""
        return sum(self.shards) + self.model.optimizer_bytes * self.shards[1] // max(1, self.model.whole_bytes[1])

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one rank's shards and gathered tensors."""
        gathered = gathered_bytes(self.model.gathered, self.size, reshards=self.reshards, several=self.several)
        return self.shard_bytes + gathered

    @property
    def least_bytes(self) -> int:
        """Bytes of a rank with the smallest batch."""
        return self.fixed_bytes + self.activations(0, self.ranks.least_batch)

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem of the ranks with a sharded model."""
        plan, ranks, effective = self.before, self.ranks, self.ranks.effective_batch_size
        predicted = [functools.partial(self._peak_bytes, rank) for rank in range(len(ranks.seats))]
        return Problem.of(
            self._cost,
            tuple(
                _moved(seat.ceiling, peak_bytes, room_bytes, ranks.least_batch, effective)
                for seat, peak_bytes, room_bytes in zip(ranks.seats, predicted, self.room_bytes, strict=True)
            ),
            None,
            effective_batch_sizes=(effective, effective),
            max_batch_size=plan.max_batch_size,
            accumulates=self.several and plan.accumulates,
            least_batch=ranks.least_batch,
        )

    @property
    def room_bytes(self) -> list[int]:
        """Bytes that tensors can use on each rank."""
        return [int((1 - LINE_ERROR) * self.usable * one.ceiling.capacity_bytes) for one in self.ranks.seats]

    def _peak_bytes(self, rank: int, samples: int) -> int:
        return self.fixed_bytes + self.activations(rank, samples)

    @functools.cached_property
    def seconds(self) -> tuple[float, float]:
        """Time in seconds of the all-gathers of a forward and backward, and of the reductions of a step."""
        count = len(self.ranks.seats)
        nbytes, trained = self.model.whole_bytes
        # A ring all-reduce of n ranks sends (n - 1) / n of the gradients twice.
        once_s = self.whole.all_reduce_s * count / (2 * (count - 1))
        within, others = (self.size - 1) / self.size, count // self.size
        again = nbytes - self.model.root_bytes if self.reshards else 0
        gather_s = once_s * within * (nbytes + again) / max(1, trained)
        return gather_s, once_s * (within + 2 * (others - 1) / others / self.size)

    @property
    def _cost(self) -> Cost:
        gather_s, reduce_s = self.seconds
        time = self.whole.among(range(len(self.ranks.seats))).step_time
        curves = tuple(_at_least(curve, gather_s, self.ranks.effective_batch_size) for curve in time.curves)
        update_s = time.update_s * self.shards[1] / max(1, self.model.whole_bytes[1])
        return Cost(replace(time, curves=curves, update_s=update_s), reduce_s + BACKWARD_SHARE * gather_s)

    def planned(self, solution: Solution) -> Plan:
        """Return the plan of a solution."""
        cost, ceilings = self._cost, self.problem.ceilings
        peaks = [ceiling.bytes_at(samples) for ceiling, samples in zip(ceilings, solution.split, strict=True)]
        layout = solved(self.ranks, solution, seated(self.ranks, solution.split, ceilings, peaks, cost))
        layout = replace(layout, cost=cost, shard_size=self.size)
        return replace(self.before, layouts=(layout,), trials=(), what_ifs=None, lengths=None)

    def note(self, solution: Solution) -> Note:
        """Return the note on memory and communication."""
        gather_s, reduce_s = self.seconds
        seats = self.ranks.seats
        groups = counted_text(len(seats) // self.size, "shard group")
        whole_fits = all(seat.peak_bytes <= seat.ceiling.capacity_bytes for seat in seats)
        whole = (
            f"Ranks with whole models train {rate_text(self.ranks.samples_per_s)}."
            if whole_fits
            else "The whole model does not fit."
        )
        text = (
            f"Predicted for FSDP2 with {groups} of {self.size} ranks: {size_text(self.fixed_bytes)} per rank without "
            f"activations, and {rate_text(solution.samples_per_s)}. {whole} Predicted from DDP's all-reduce of "
            f"{ms_text(self.whole.all_reduce_s)}, the all-gathers of a forward and backward take {ms_text(gather_s)} "
            f"and the reductions of a step {ms_text(reduce_s)}."
        )
        return Note("sharded", text)

    def unequal_note(self, solution: Solution) -> Note:
        """Return the note on the gain of unequal shards over all ranks. torch 2.13 has no unequal shards."""
        most, rate = sum(ceiling.batch_size for ceiling in self.problem.ceilings), solution.samples_per_s
        found = [(rate, most)]
        for several in (False, True):
            every = replace(self, size=len(self.ranks.seats), several=several)
            ceilings = unequal_ceilings(every.problem, every.shard_bytes, every.room_bytes)
            answer = with_ceilings(every.problem, ceilings).solve()
            if answer is not None:
                found.append((answer.samples_per_s, sum(ceilings)))
        best_rate, best_most = max(found)
        text = (
            f"Unequal shards, which torch {torch.__version__.partition('+')[0]} does not have, would allow "
            f"{best_most} samples per forward and {rate_text(best_rate)} instead of {most} and {rate_text(rate)} "
            "(predicted)."
        )
        return Note("unequal-shards", text)


def unequal_ceilings(problem: Problem, shard_bytes: int, room_bytes: Sequence[int]) -> list[int]:
    """Return the ranks' ceilings if a rank with free memory holds a part of the other ranks' shards.

    All ranks together must have memory for their samples and for all shards. Find the longest step time for which the
    memory suffices, if each rank takes all samples that it can train in that time.

    Args:
        problem: The problem of the ranks with equal shards.
        shard_bytes: Bytes of each rank's equal shard.
        room_bytes: Bytes that tensors can use on each rank.
    """
    curves, ceilings = problem.step_time.curves, problem.ceilings
    # Bytes for samples if the rank holds no shard.
    rooms = [room - one.fixed_bytes + shard_bytes for room, one in zip(room_bytes, ceilings, strict=True)]
    bounds = [
        samples_within(
            room,
            ceiling.bytes_per_sample,
            problem.region.max_batch_size if ceiling.limited_by == "memory" else ceiling.batch_size,
        )
        for ceiling, room in zip(ceilings, rooms, strict=True)
    ]

    def within(seconds: float) -> list[int]:
        return [curve.most_within(seconds, 0, most) for curve, most in zip(curves, bounds, strict=True)]

    def fits(split: Sequence[int]) -> bool:
        used = sum(ceiling.bytes_per_sample * n for ceiling, n in zip(ceilings, split, strict=True))
        return sum(rooms) - used >= len(rooms) * shard_bytes

    low_s, high_s = 0.0, max(curve(most) for curve, most in zip(curves, bounds, strict=True))
    if fits(within(high_s)):
        return within(high_s)
    for _ in range(60):  # more halvings than a float has digits
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if fits(within(middle_s)) else (low_s, middle_s)
    return within(low_s)


def _at_least(curve: TimeCurve, seconds: float, most: int) -> TimeCurve:
    """Return a curve with a minimum time. Up to `most` samples, it equals the larger of both."""
    reached = curve.most_within(seconds, 1, most)
    sizes = {*(samples for samples, _ in curve.points), reached, min(reached + 1, most), most}
    return TimeCurve(tuple((samples, max(seconds, curve(samples))) for samples in sorted(sizes)))


def _measured(plan: Plan) -> tuple[Cost, int]:
    ranks, memory = required_ranks(plan), plan.main.seats[0].memory
    lacks = "no time model" if ranks.cost is None else "no parts of device 0's memory" if memory is None else None
    if ranks.shard_size is not None:
        lacks = "a sharded model already"
    if lacks is not None or ranks.cost is None or memory is None:
        raise PlanError(
            f"The plan has {lacks}. Expected several DDP ranks with an unsharded model, and the measured times and "
            "memory parts of a plan from tune(). Tune again for several devices, and pass that plan.",
        )
    return ranks.cost, memory.optimizer_bytes


def _moved(ceiling: Ceiling, peak_bytes: Callable[[int], int], room_bytes: int, least: int, most: int) -> Ceiling:
    """Return the ceiling with a sharded model. Only a ceiling that memory limits can grow, up to `most`."""
    bound = most if ceiling.limited_by == "memory" else ceiling.batch_size
    size = largest_size(bound, lambda samples: peak_bytes(max(samples, least)) <= room_bytes)
    size = size if size >= least else 0
    at = max(size, least)
    half = max(least, at // 2)
    slope = (peak_bytes(at) - peak_bytes(half)) / (at - half) if at > half else 0.0
    return replace(
        ceiling,
        batch_size=size,
        limited_by="memory" if size < bound else ceiling.limited_by,
        fixed_bytes=int(peak_bytes(at) - slope * at),
        bytes_per_sample=math.ceil(slope),
        peak_bytes=peak_bytes(at) if size else 0,
        points=tuple((n, peak_bytes(n), False) for n in sorted({half, at})),
        confirmed=False,
    )
