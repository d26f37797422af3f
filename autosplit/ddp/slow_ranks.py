"""Find slow ranks: measure each rank's own time of a step, and compare the ranks without another collective.

Note [Own time]
~~~~~~~~~~~~~~~
All ranks leave the all-reduce in the last backward together. So the time of a backward does not show which rank is
slow. A rank's own time begins when it asks for the first batch of an optimizer step. It ends when its last backward has
computed all gradients, before it waits for the gradients of other ranks:

    rank 0   | load | forward | backward | wait          | update |
    rank 1   | load | forward       | backward           | update |
             begin                       end of rank 0   end of rank 1

DDP waits in a callback at the end of the backward. Autograd runs the oldest callback first. The callback that records
the end is added when the backward begins, so it runs before DDP's.

Note [Windows]
~~~~~~~~~~~~~~
All ranks run the same optimizer steps, so they count the same windows. The store has the times long before a rank reads
them, and the split long before the ranks switch. So no rank waits for another:

    step W        step 1.5 W                            step 1.75 W
    every rank    rank 0 reads the times of all ranks,  every rank reads the split,
    writes its    warns if a rank is slow, and          and loads the next step
    mean times    writes the split to switch to         with it
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.rebalance import planned_s, solved_again, with_split
from autosplit.ddp.rendezvous import store_of_group
from autosplit.errors import InputError, warn_user
from autosplit.notes import Note
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.step_listener import StepListener
from autosplit.plan.plan import Plan
from autosplit.plan.record import add_note_to_file
from autosplit.text import ms_text, percent_text, printable, tuple_text

WINDOW = 200
"""Optimizer steps between two comparisons of the ranks. See Note [Windows]."""

LEAST_WAIT = 0.1
"""Fraction of a step that the ranks wait for the slowest rank, above which rank 0 warns."""

_CONTEXTS = itertools.count()


class SlowRankWarning(UserWarning):
    """The other ranks wait for one rank in every optimizer step."""


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class _DeviceClock:
    """Measure with events on the device's stream. The host does not wait for the device."""

    def __init__(self, kind: str) -> None:
        self._module = backend(kind)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None


class SlowRanks(StepListener):
    """Measure this rank's own time. On rank 0, warn of a slow rank and solve the split again.

    Attributes:
        agreed: The plan for the next step, if the ranks have agreed on another split. Otherwise None.
        keeps_batch: Whether another split must have the same samples per forward.
        store: The ranks' store, None before it is looked up, or False without a store. Set it to None when the process
            group ends, because a reference keeps the store's thread alive.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.agreed: Plan | None = None
        self.keeps_batch = False
        self._rank, self._world_size = rank, world_size
        self._clock: Any = _DeviceClock(device.type) if is_accelerator(device.type) else _HostClock()
        self.store: Any = None
        self._prefix = f"autosplit/times/{next(_CONTEXTS)}"
        self._has_warned = False
        self._steps = 0
        self._loaded_s: float | None = None
        self._open: deque[tuple[Any, Any, float, float]] = deque()
        self._times: list[tuple[float, float, float]] = []

    def begin_loop(self) -> None:
        """Do not measure the next step, because loader workers start and kernels are loaded during it."""
        self._is_first = True

    # Measure. See Note [Own time]

    def begin_step(self) -> None:
        """Start to measure a step, before its first batch is drawn."""
        self._loaded_s = self._end = None
        if self._world_size > 1:
            self._begun_s, self._begin = time.perf_counter(), self._clock.mark()

    def draw(self, is_last: bool) -> None:
        """Record the time that the step's first batch took to load."""
        if self._loaded_s is None:
            self._loaded_s = time.perf_counter() - self._begun_s
        self._is_last = is_last

    def begin_backward(self, loss: Tensor) -> None:
        """Add the callback that records the end of the last backward."""
        if self._is_last and loss.requires_grad:
            queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001  # as FSDP2 does
            loss.register_hook(lambda _: queue(self._record_end))

    def _record_end(self) -> None:
        self._end = self._clock.mark()

    def end_step(self, plan: Plan, effective_batch_size: int, *, rebalances: bool) -> None:
        """Add a step to the window, and do what Note [Windows] lists for it."""
        if self._world_size == 1 or not self._has_store():
            return
        if self._end is not None and not self._is_first:
            self._open.append((self._begin, self._end, self._loaded_s, time.perf_counter() - self._begun_s))
        while self._open and (own_s := self._clock.seconds(*self._open[0][:2])) is not None:
            self._times.append((own_s, *self._open.popleft()[2:]))
        self._is_first = False
        self._steps += 1
        try:
            self._exchange(plan, effective_batch_size, rebalances=rebalances)
        except RuntimeError:
            if rebalances:  # without the store, the ranks could switch at different steps
                raise
            self.store = False

    # Switch

    def switching(
        self,
        made: Iterator[OptimizerStep],
        sampler: ScheduledBatchSampler,
        follow: Callable[[Plan], None],
        begin: Callable[[], Iterator[OptimizerStep]],
    ) -> Iterator[OptimizerStep]:
        """Yield the steps of an epoch, and switch to another split when the ranks have agreed on one.

        The batches that the loader's workers loaded in advance for the old split are dropped. The sampler continues
        after the finished step, as from a checkpoint. So each sample of the epoch is still used once.

        Args:
            follow: Gives the context another plan.
            begin: Begins to iterate over the loader at the position of the sampler.
        """
        is_done = False
        while not is_done:
            is_done = True
            for step in made:
                yield step
                plan, self.agreed = self.agreed, None
                if plan is None or not _accepts(sampler, plan):
                    continue
                self._open.clear()
                self._times.clear()
                follow(plan)
                if step.index + 1 < len(sampler.schedule):
                    step.check_finished()
                    made.close()  # type: ignore[attr-defined]
                    sampler.settle()
                    sampler.resume(sampler.samples_consumed)
                    made, is_done, self._is_first = begin(), False, True
                    break

    # Exchange. See Note [Windows]

    def _has_store(self) -> bool:
        """Return whether the ranks have a store. Groups of MPI have none."""
        if self.store is None:
            store = store_of_group()
            self.store = False if store is None else dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]
        return bool(self.store)

    def _exchange(self, plan: Plan, effective_batch_size: int, *, rebalances: bool) -> None:
        window, place = divmod(self._steps, WINDOW)
        if window and place == 0:
            self._tell(window)
        elif window and place == WINDOW // 2 and self._rank == 0:
            self._judge(window, plan, effective_batch_size, rebalances=rebalances)
        elif window and place == 3 * WINDOW // 4 and rebalances:
            self._switch(window, plan)

    def _tell(self, window: int) -> None:
        means = [sum(column) / len(self._times) for column in zip(*self._times, strict=True)]
        self._times.clear()
        key = f"times/{self._rank}"
        self.store.set(key, json.dumps([window, *means]))
        self.store.check([key])  # set() may return before the store has the value. check() waits until it has.

    def _judge(self, window: int, plan: Plan, effective_batch_size: int, *, rebalances: bool) -> None:
        keys = [f"times/{rank}" for rank in range(self._world_size)]
        told = [json.loads(self.store.get(key)) for key in keys] if self.store.check(keys) else []
        decision = None
        if told and all(len(one) == 4 and one[0] == window for one in told):
            self.store.delete_key(f"split/{window - 1}")  # every rank has read it before it wrote its times
            own_s, loaded_s, step_s = (list(column) for column in list(zip(*told, strict=True))[1:])
            text = _complaint(plan, effective_batch_size, own_s, loaded_s, max(step_s))
            solved = None
            if text is not None and rebalances:
                keeps = self.keeps_batch
                solved = solved_again(plan, effective_batch_size, own_s, max(step_s), keeps_batch=keeps)
            if solved is not None:
                decision = [solved.split, solved.accumulation_steps, solved.samples_per_s, text]
            elif text is not None:
                self._warn(plan, f"{text} {_advice(own_s, loaded_s, rebalances=rebalances)}")
        self.store.set(f"split/{window}", json.dumps(decision))

    def _switch(self, window: int, plan: Plan) -> None:
        decision = json.loads(self.store.get(f"split/{window}"))
        if decision is None:
            return
        *solution, text = decision
        self.agreed = with_split(plan, *solution)
        if self._rank == 0:
            before = tuple_text([rank.batch_size for rank in plan.ddp.ranks])
            self._has_warned = False
            self._warn(plan, f"{text} The split of the ranks changes from {before} to {tuple_text(solution[0])}.")

    def _warn(self, plan: Plan, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            add_note_to_file(plan, Note("slow-rank", text))
            warn_user(text, SlowRankWarning)


def _accepts(sampler: ScheduledBatchSampler, plan: Plan) -> bool:
    before, split = sampler.rank_slice, tuple(rank.batch_size for rank in plan.ddp.ranks)
    sampler.follow(RankSlice(before.rank, split))
    try:
        sampler.refuse_single_samples(split, plan.ddp.least_batch)
    except InputError:
        sampler.follow(before)
        return False
    return True


def _complaint(
    plan: Plan, effective_batch_size: int, own_s: list[float], loaded_s: list[float], step_s: float
) -> str | None:
    """Describe the slow rank, or return None if the other ranks hardly wait, or wait as long as planned."""
    slow = own_s.index(max(own_s))
    planned = planned_s(plan, effective_batch_size)
    others_s = _mean_without(own_s, slow)
    waits = (own_s[slow] - others_s) / step_s
    waits_by_plan = 0.0 if plan.fit is None else (planned[slow] - _mean_without(planned, slow)) / max(planned)
    if waits - max(0.0, waits_by_plan) <= LEAST_WAIT:
        return None
    device, size = plan.devices[slow], plan.ddp.ranks[slow].batch_size
    by_plan = "" if plan.fit is None else f" The plan expected {ms_text(planned[slow])} for rank {slow}."
    return (
        f"Rank {slow} ({device.label}, {printable(device.name)}, {size} samples per forward) is slow: its own part of "
        f"an optimizer step takes {ms_text(own_s[slow])}, {ms_text(loaded_s[slow])} of it for the first batch. The "
        f"other ranks take {ms_text(others_s)} on average, and wait for {percent_text(waits)} of each step.{by_plan}"
    )


def _mean_without(values: list[float], index: int) -> float:
    return (sum(values) - values[index]) / (len(values) - 1)


def _advice(own_s: list[float], loaded_s: list[float], *, rebalances: bool) -> str:
    slow = own_s.index(max(own_s))
    if loaded_s[slow] - _mean_without(loaded_s, slow) > (own_s[slow] - _mean_without(own_s, slow)) / 2:
        return "Give its data loader more workers, or faster storage."
    remedy = "No other split within the ceilings is faster." if rebalances else "Or pass rebalance='auto' to ctx.steps."
    return f"Look for another program, or a limit of power or temperature, on this device. {remedy}"
