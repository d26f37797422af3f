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
All ranks run the same optimizer steps, so they count the same windows. The store has the times long before rank 0 reads
them. So no rank waits for another:

    step W                            step 1.5 W
    every rank writes its mean times  rank 0 reads the times of all ranks, and warns if a rank is slow
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.rendezvous import store_of_group
from autosplit.errors import SlowRankWarning, warn_user
from autosplit.notes import Note
from autosplit.parallel.step_listener import StepListener
from autosplit.plan.plan import Plan
from autosplit.plan.record import add_note_to_file
from autosplit.plan.torchrun import required_ranks
from autosplit.solve.split import micro_batch_sizes, short_split
from autosplit.text import ms_text, percent_text, printable

WINDOW = 200
"""Optimizer steps between two comparisons of the ranks. See Note [Windows]."""

LEAST_WAIT = 0.1
"""Fraction of a step that the ranks wait for the slowest rank, above which rank 0 warns."""

_CONTEXTS = itertools.count()


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
    """Measure this rank's own time. On rank 0, warn of a slow rank.

    Attributes:
        store: The ranks' store, None before it is looked up, or False without a store. Set it to None when the process
            group ends, because a reference keeps the store's thread alive.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
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

    def end_step(self, plan: Plan, effective_batch_size: int) -> None:
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
            self._exchange(plan, effective_batch_size)
        except RuntimeError:  # the store has ended
            self.store = False

    # Exchange. See Note [Windows]

    def _has_store(self) -> bool:
        """Return whether the ranks have a store. Groups of MPI have none."""
        if self.store is None:
            store = store_of_group()
            self.store = False if store is None else dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]
        return bool(self.store)

    def _exchange(self, plan: Plan, effective_batch_size: int) -> None:
        window, place = divmod(self._steps, WINDOW)
        if window and place == 0:
            self._publish(window)
        elif window and place == WINDOW // 2 and self._rank == 0:
            self._judge(window, plan, effective_batch_size)

    def _publish(self, window: int) -> None:
        means = [sum(column) / len(self._times) for column in zip(*self._times, strict=True)]
        self._times.clear()
        key = f"times/{self._rank}"
        self.store.set(key, json.dumps([window, *means]))
        self.store.check([key])  # set() may return before the store has the value. check() waits until it has.

    def _judge(self, window: int, plan: Plan, effective_batch_size: int) -> None:
        keys = [f"times/{rank}" for rank in range(self._world_size)]
        times = [json.loads(self.store.get(key)) for key in keys] if self.store.check(keys) else []
        if times and all(len(one) == 4 and one[0] == window for one in times):
            own_s, loaded_s, step_s = (list(column) for column in list(zip(*times, strict=True))[1:])
            text = _complaint(plan, effective_batch_size, own_s, loaded_s, max(step_s))
            if text is not None:
                self._warn(plan, f"{text} {_advice(own_s, loaded_s)}")

    def _warn(self, plan: Plan, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            add_note_to_file(plan, Note("slow-rank", text))
            warn_user(text, SlowRankWarning)


def _complaint(
    plan: Plan, effective_batch_size: int, own_s: list[float], loaded_s: list[float], step_s: float
) -> str | None:
    """Describe the slow rank, or return None if the other ranks hardly wait, or wait as long as planned."""
    slow = own_s.index(max(own_s))
    planned = planned_s(plan, effective_batch_size)
    others_s = _mean_without(own_s, slow)
    waits = (own_s[slow] - others_s) / step_s
    layout = required_ranks(plan)
    waits_by_plan = 0.0 if layout.cost is None else (planned[slow] - _mean_without(planned, slow)) / max(planned)
    if waits - max(0.0, waits_by_plan) <= LEAST_WAIT:
        return None
    device, size = layout.devices[slow], layout.split[slow]
    by_plan = "" if layout.cost is None else f" The plan expected {ms_text(planned[slow])} for rank {slow}."
    return (
        f"Rank {slow} ({device.label}, {printable(device.name)}, {size} samples per forward) is slow: its own part of "
        f"an optimizer step takes {ms_text(own_s[slow])}, {ms_text(loaded_s[slow])} of it for the first batch. The "
        f"other ranks take {ms_text(others_s)} on average, and wait for {percent_text(waits)} of each step.{by_plan}"
    )


def planned_s(plan: Plan, effective_batch_size: int) -> list[float]:
    """Predict the compute time of each rank in an optimizer step, from the cost model. 0 without a cost model."""
    layout = required_ranks(plan)
    if layout.cost is None:
        return [0.0] * len(layout.seats)
    sizes = layout.split
    counted = Counter(short_split(size, sizes) for size in micro_batch_sizes(effective_batch_size, sum(sizes)))
    return layout.cost.rank_compute_seconds(counted, layout.least_batch)


def _mean_without(values: list[float], index: int) -> float:
    return (sum(values) - values[index]) / (len(values) - 1)


def _advice(own_s: list[float], loaded_s: list[float]) -> str:
    slow = own_s.index(max(own_s))
    if loaded_s[slow] - _mean_without(loaded_s, slow) > (own_s[slow] - _mean_without(own_s, slow)) / 2:
        return "Give its data loader more workers, or faster storage."
    return "Look for another program, or a limit of power or temperature, on this device. If it stays slow, tune again."
