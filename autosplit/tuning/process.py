"""Run a tuning in one or several processes. Rank 0, or the only process, drives all of them.

rank 0        send function f | collect results | send g | collect results | ... | end: return the plan
other ranks   run f           | send result     | run g  | send result     | ... |      return the same plan
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from autosplit.accelerators import backend, bounded, is_accelerator
from autosplit.devices.device import Device
from autosplit.errors import AutosplitError, InputError, UserCodeError, WorkloadError
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.layout import DdpOptions
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced
from autosplit.probe.prober import Prober
from autosplit.probe.request import Deadline, Request
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey, workload_of
from autosplit.rng import preserved_rng
from autosplit.runtime.encoded_error import decoded, encoded
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import Built, Prepared, Source, build, prepare
from autosplit.runtime.protocol import Measurement
from autosplit.tuning.peers import Failure, Interrupts, Peers
from autosplit.workload.fingerprint import digest_of
from autosplit.workload.workload import Workload, modules_of

if TYPE_CHECKING:  # Import types only, so that tuning in one process does not load torch.distributed.
    from autosplit.ddp.rendezvous import Place
    from autosplit.tuning.rank_steps import RankSteps

T = TypeVar("T")

_CODE = ("model_tree", "model_factory", "loss_fn", "compute_loss", "step", "make_batch")
"""Parts of a workload's description that are digests of code, and of the values that the code refers to."""


@dataclass(frozen=True)
class Job:
    """The processes that tune together, from the point of view of one process.

    Attributes:
        place: Rank and machine of this process. None for a process that tunes without other ranks.
        peers: The connection to the other ranks.
        capacities_bytes: Memory that training may use on each device of this process.
        request: The request, with the devices of all ranks in the order of the ranks.
        machine: The machine of the whole job, as `key.machine_of` returns it. For several machines, it also has
            ``ranks_per_machine``.
        backend: Back end of the process group that reduces gradients.
    """

    place: Place | None
    peers: Peers
    devices: tuple[Device, ...]
    capacities_bytes: tuple[int, ...]
    request: Request
    machine: dict[str, Any]
    backend: str = "gloo"

    @property
    def has_peers(self) -> bool:
        """Whether other processes tune together with this one."""
        return self.peers.world_size > 1

    @property
    def device(self) -> torch.device:
        """The torch device of this rank."""
        return torch_device(self.devices[0])


def alone(request: Request, machine: dict[str, Any]) -> Job:
    """Return the job of a single process that tunes all devices."""
    peers = Peers(0, 1, None, Interrupts())
    return Job(None, peers, request.devices, request.capacities_bytes, request, machine)


class Process(AbstractContextManager["Process"]):
    """Build and measure the workload in one process, on this process's own devices.

    Args:
        source_of: Function that makes the source of a workload from its number. `tune` has one, number 0.

    Attributes:
        built: The current workload, after `build`.
        prepared: The workload and its worker, after `prepare`.
        prober: Measures this process's devices, after `prepare`.
        steps: Runs steps of all ranks together, after `begin_steps`. None before.
    """

    built: Built
    prepared: Prepared
    prober: Prober
    steps: RankSteps | None = None

    def __init__(self, job: Job, source_of: Callable[[int], Source], *, isolate: bool = False) -> None:
        self.job, self.peers = job, job.peers
        self._source_of, self._isolate = source_of, isolate
        self._closing, self._probing = ExitStack(), ExitStack()

    def __exit__(self, *_: object) -> None:
        """Restore the model, end the process of isolated steps, and free the memory."""
        self._closing.close()

    @property
    def workload(self) -> Workload:
        """The workload that is measured."""
        return self.prepared.workload

    # Called by the driver, in this order

    def build(self, number: int = 0) -> None:
        """Build a workload. The previous one is closed."""
        source = self._source_of(number)
        self._closing.close()
        self.steps = None
        for name in ("built", "prepared", "prober"):  # Free the previous copy before the next copy is made.
            self.__dict__.pop(name, None)
        self._closing.enter_context(preserved_rng())
        self.built = build(source, self.job.devices)
        self._closing.enter_context(untouched(self.built.workload))

    def description(self) -> dict[str, Any]:
        """Describe the workload that was built."""
        return workload_of(self.built.workload)

    def prepare(
        self, largest_batch: int, remaining_s: float | None = None, described: Any = None
    ) -> tuple[tuple[Note, ...], tuple[int, ...]]:
        """Prepare to measure this process's devices.

        Args:
            described: See `runtime.prepare.prepare`.

        Returns:
            Notes on the workload, and the memory that training may use on each device.
        """
        job = self.job
        if job.has_peers:
            refuse_waiting(self.built.workload)
        deadline_s = Deadline(remaining_s).end_s
        self._probing = self._closing.enter_context(ExitStack())
        self.prepared = prepare(
            self.built,
            job.devices,
            job.capacities_bytes,
            self._probing,
            largest_batch=largest_batch,
            isolate=self._isolate,
            deadline_s=deadline_s,
            described=described,
        )
        worker = self.prepared.worker
        ranks = self.peers.world_size if job.has_peers else 0
        self.prober = Prober(worker, self.workload, largest_batch, num_ranks=ranks, deadline_s=deadline_s)
        # The run and the prober refer to each other. Break this cycle. Otherwise the copy stays in memory after the
        # tuning, because torch refers to a part of the cycle in a way that the garbage collector can't follow.
        self._closing.callback(setattr, self.prober, "report", str)
        capacities_bytes = worker.capacities_bytes
        return (*self.prober.notes(), *self.prepared.notes), capacities_bytes

    def begin_steps(self, options: DdpOptions) -> None:
        """Prepare steps of all ranks together, which replace the measurements of single devices."""
        from autosplit.tuning.rank_steps import RankSteps

        job, worker = self.job, self.prober.worker
        if is_accelerator(job.request.kind):
            self._probing.close()  # free the GPU's memory before all ranks step together
            # From now on, the allocator may hold at most this rank's capacity, or the user's own limit.
            most_bytes = worker.capacities_bytes[0]
            self._closing.enter_context(bounded(backend(job.request.kind), job.device, most_bytes))
        self.steps = RankSteps(
            self.workload, worker, job.device, self.peers, backend=job.backend, options=options.keywords()
        )
        self._closing.callback(self.steps.close)

    def step(self, splits: Sequence[Sequence[int]], budget_s: float) -> tuple[list[int], Measurement] | Failure:
        """Run this rank's part of a step of all ranks. Return the ranks' peaks and the time, or a failure."""
        assert self.steps is not None, "`begin_steps` sets it"
        return self.steps.measured([split[self.peers.rank] for split in splits], budget_s=budget_s)

    def counted(self) -> tuple[int, int]:
        """Return the numbers of real steps and of out-of-memory errors so far."""
        together = (0, 0) if self.steps is None else (self.steps.steps, self.steps.ooms)
        return self.prober.steps + together[0], self.prober.ooms + together[1]

    def crash_notes(self) -> tuple[Note, ...]:
        """Return notes on isolated processes that died."""
        return self.prepared.worker.notes

    def store(self, key: ProfileKey, plan: Plan) -> tuple[Path | None, tuple[Note, ...]]:
        """Save a plan as a profile. Only the first rank of each machine saves it."""
        return profiles.stored(key, plan) if self._is_first_of_machine else (None, ())

    def amend(self, plan: Plan, changes: dict[str, Any]) -> None:
        """Apply changes to the saved profile of a plan."""
        if self._is_first_of_machine and plan.path is not None:
            profiles.amend(plan.path.stem, plan, changes)

    @property
    def _is_first_of_machine(self) -> bool:
        return self.job.place is None or not self.job.place.local_rank


class Processes:
    """Call functions in all processes of a job, from the process that drives the tuning.

    Attributes:
        own: The process that drives, which is rank 0 or the only process.
    """

    def __init__(self, own: Process) -> None:
        self.own, self.job, self._peers = own, own.job, own.peers

    def ask(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call a function in every process at the same time, and return the results in the order of the ranks.

        In a job of several ranks, the function must be importable. Its arguments and results must be picklable.

        Raises:
            Exception: The function raised on rank 0.
            RankFailedError: The function raised on another rank.
            DoesNotFitError: The workload does not fit on a rank's device.
            KeyboardInterrupt: Ctrl-C was pressed on any rank.
        """
        if not self.job.has_peers:
            return [function(self.own, *args)]
        self._peers.ordered((function, args))
        if self._peers.take_interrupt():
            raise KeyboardInterrupt
        return self._peers.answers(partial(function, self.own, *args))

    @property
    def all_stopped(self) -> bool:
        """Whether all processes know of Ctrl-C and expect the next order."""
        return not self.job.has_peers or self._peers.stopped

    def prepare(self, request: Request, key: ProfileKey) -> tuple[Request, tuple[Note, ...]]:
        """Prepare the workload on all ranks.

        Returns:
            The request, with the memory that is free after the isolated processes have started, and notes.
        """
        found = self.ask(Process.prepare, request.largest_batch, request.deadline.remaining_s, key.workload)
        first = found[0][0]
        others = [
            Note(note.kind, f"rank {rank}: {note}")
            for rank, (notes, _) in enumerate(found[1:], 1)
            for note in notes
            if note not in first
        ]
        if not self.job.has_peers:
            request = replace(request, capacities_bytes=found[0][1])
        return request, (*first, *others)

    def step(self, splits: tuple[tuple[int, ...], ...], *, budget_s: float, copies_s: float = 0.0) -> Measurement:
        """Run an optimizer step on all devices: on those of this process, or on all ranks together.

        Args:
            copies_s: See `Prober.step`.

        Raises:
            OutOfMemoryError: A device ran out of memory. The error names it.
        """
        if not self.job.has_peers:
            return self.own.prober.step(splits, budget_s=budget_s, copies_s=copies_s)
        found = self.ask(Process.step, splits, budget_s)[0]
        if isinstance(found, Failure):
            raise OutOfMemoryError(f"rank {found.rank}: {found.message}", device_index=found.rank)
        peaks, measured = found
        return replace(measured, peak_bytes=tuple(peaks))

    def counted(self) -> tuple[int, int]:
        """Return the numbers of real steps and of out-of-memory errors of all processes."""
        steps, ooms = zip(*self.ask(Process.counted), strict=True)
        joint = 0 if self.own.steps is None else self.own.steps.ooms  # each rank counted the same errors
        return sum(steps), sum(ooms) - joint * (len(ooms) - 1)

    def crash_notes(self) -> tuple[Note, ...]:
        """Return notes on isolated processes that died on any rank."""
        return tuple(dict.fromkeys(itertools.chain(*self.ask(Process.crash_notes))))

    def amended(self, plan: Plan, **changes: Any) -> Plan:
        """Return a plan with changes. Also apply the changes to its profiles on all machines."""
        if self.job.request.profile != "off":
            self.ask(Process.amend, plan, changes)
        return replaced(plan, **changes)

    def end_for(self, error: BaseException) -> _End:
        """Return the message that ends the tuning on the other ranks after rank 0 raised an error."""
        is_ours = isinstance(error, (AutosplitError, KeyboardInterrupt)) and not isinstance(error, UserCodeError)
        return _End(error=encoded(error if is_ours else self._peers.failure(error).as_error()))


@dataclass(frozen=True)
class _End:
    """The last message of rank 0.

    Attributes:
        value: The result, which every rank returns.
        error: An encoded exception. A rank raises it, unless the last order raised an error on this rank.
    """

    value: Any = None
    error: Any = None


def drive(process: Process, run: Callable[[Processes], T]) -> T:
    """Run a tuning on rank 0, and run its orders on the other ranks. Every rank returns or raises the same."""
    peers = process.peers
    if peers.rank > 0:
        return _serve(process)  # type: ignore[no-any-return]  # rank 0 returned it
    processes = Processes(process)
    try:
        value = run(processes)
    except (Exception, KeyboardInterrupt) as error:
        # After Ctrl-C between two messages, or the loss of a rank, the other ranks expect no last message.
        if process.job.has_peers and not peers.is_cut_off(error):
            _leave(peers, processes.end_for(error))
        raise
    if process.job.has_peers:
        _leave(peers, _End(value))
    return value


def _leave(peers: Peers, end: _End) -> None:
    peers.ordered(end)
    peers.part()


def _serve(process: Process) -> Any:
    """Run rank 0's orders until rank 0 ends the tuning."""
    peers = process.peers
    raised: Exception | None = None
    while True:
        order = peers.ordered(None)
        if isinstance(order, _End):
            peers.part()
            if order.error is not None:
                raise raised or decoded(*order.error)
            return order.value
        raised = None
        if peers.take_interrupt():
            continue  # rank 0 raises KeyboardInterrupt for all ranks
        function, args = order
        try:
            peers.answers(partial(function, process, *args))
        except Exception as error:  # noqa: BLE001  # rank 0 gets the failure, and ends the tuning or continues
            raised = error


def equal_on_all_ranks(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks' descriptions of the workload into one. Raise InputError if they differ.

    Only the digests of code may differ, because code may refer to a rank's own values, such as its number. They are
    combined into one digest.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in described for name in one):  # a rank may have an optional entry
        values = [one.get(name) for one in described]
        if name in _CODE and None not in values and any(value != values[0] for value in values):
            found[name] = digest_of(values)
        else:
            refuse_differing(f"the workload's {name}", values)
            found[name] = values[0]
    return found


def refuse_waiting(workload: Workload) -> None:
    """Raise WorkloadError if the model's forward waits for other ranks, because ranks are measured separately."""
    for part in (part for one in modules_of(workload) for part in one.modules()):
        if isinstance(part, nn.SyncBatchNorm) or type(part).__name__.startswith("FSDP"):
            raise WorkloadError(
                f"The model has a {type(part).__name__}, whose forward waits for all ranks, but each rank measures "
                "its device alone. Tune the plain model, and convert or shard the model in training "
                "(ctx.wrap(model, sync_batchnorm=True), ctx.shard(model)).",
            )


def torch_device(device: Device) -> torch.device:
    """Convert a `Device` to a torch device. All CPU budgets share one torch device."""
    return torch.device(device.kind, device.index) if is_accelerator(device.kind) else torch.device("cpu")


def refuse_differing(name: str, values: Sequence[Any]) -> None:
    """Raise InputError if a value differs between ranks."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise InputError(
            f"{name} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}. Expected the same on all "
            "ranks. Start all ranks with the same command line and the same installation.",
        )
