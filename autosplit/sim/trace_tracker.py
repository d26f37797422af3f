"""Track a traced step: replace values that fake tensors lack, and charge the memory inside of a GPU's kernels.

An operator's temporary blocks on a GPU are charged and immediately released. The workspaces of libraries are charged
for the whole step (`kernel_memory`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from autosplit.rng import ExtremeDraws
from autosplit.runtime.memory_tracker import Held, Kind, Place, Tracker, rounded
from autosplit.sim.data_dependent import DataDependent
from autosplit.sim.fake_results import FakeResults, KnownCall
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.kernel_memory import NO_LIMITS, WITH_INNER_MEMORY, temporary_blocks, workspaces
from autosplit.sim.op_cost import running_part
from autosplit.sim.real_outputs import as_real
from autosplit.torch_versions import FakeTensor, unset_fake_temporarily

_DEVICE = torch.ops.prim.device.default

_ARRIVALS = frozenset(getattr(torch.ops.aten, name).default for name in ("detach", "copy_", "clone"))
"""Ops that give a parameter its first gradient: autograd's tensor itself (detach), or a copy of it."""


Stage = Literal["", "before", "kept", "step", "update"]
"""Before the forward (parameters, optimizer state), in forward and backward, or in the optimizer's update.

Gradients of earlier micro-steps are ``"kept"``: the first backward creates them, and the next forward finds them.
"""


class BoundedEntry(NamedTuple):
    """A storage that was allocated or freed on a device.

    Attributes:
        nbytes: Size before rounding. Negative for a freed storage.
        limits: Bounds of the size in bytes, equal for all batch sizes (`kernel_memory.Block`).
        block: Number of the storage. The entry that frees a storage has the number of the entry that allocated it.
        stage: The part of the step in which the entry is.
    """

    kind: Kind
    device: int
    nbytes: int
    limits: tuple[float, float] = NO_LIMITS
    block: int = -1
    stage: Stage = ""


@dataclass
class _InnerBlock(Place):
    limits: tuple[float, float] = field(default=NO_LIMITS, kw_only=True)


def limits_of(place: Place) -> tuple[float, float]:
    """Return the bounds of a block's size in bytes."""
    return place.limits if isinstance(place, _InnerBlock) else NO_LIMITS


class Observer(Protocol):
    """Receive the ops and transfers of a tracked step, in order. The simulator's observer records them."""

    def on_op(
        self,
        device: int,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Any,
        known: KnownCall | None,
    ) -> None:
        """Handle an op that ran on a device, or whose outputs were known."""

    def on_transfer(self, source: int, destination: int, nbytes: int, purpose: str) -> None:
        """Handle a copy of a tensor from one device to another."""


@dataclass(frozen=True)
class Arrival:
    """The first gradient of a parameter.

    Attributes:
        at: Number of account entries before the gradient.
        is_copy: Whether autograd copied its tensor, which is used elsewhere or has a different memory layout.
    """

    at: int
    parameter: Held
    gradient: Held
    nbytes: int
    is_copy: bool


class Arrivals:
    """Recognise the ops that give a parameter its first gradient. One object must see all ops of a step in order."""

    def __init__(self) -> None:
        self._detached: int | None = None

    def parameter_of(self, func: Any) -> Tensor | None:
        """Return the parameter whose first gradient this op creates, or None for any other op."""
        node: Any = torch._C._current_autograd_node() if func in _ARRIVALS else None  # noqa: SLF001  # checked at import
        found: Tensor | None = None
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            found = node.variable
        # torch 2.6 to 2.8 dispatches each of these detaches twice.
        detached = id(found) if found is not None and func is torch.ops.aten.detach.default else None
        is_repeated, self._detached = detached is not None and detached == self._detached, detached
        return None if is_repeated else found


class TraceTracker(Tracker):
    """Count the bytes on each simulated device during a traced step. It has no capacities, and keeps accounts.

    Args:
        observer: Receives ops and transfers.
        kernels: A GPU. If given, also charge the memory that its kernels and libraries use.
        data_dependent: Runs ops that need values of fake tensors. None runs all ops as usual.
        fake_results: Outputs of earlier ops on fake tensors. None runs all ops.

    Attributes:
        arrivals: First gradients of parameters, in order.
    """

    def __init__(
        self,
        num_devices: int,
        *,
        observer: Observer | None = None,
        draws: ExtremeDraws | None = None,
        kernels: GpuKernels | None = None,
        data_dependent: DataDependent | None = None,
        fake_results: FakeResults | None = None,
    ) -> None:
        labels = [f"device {index}" for index in range(num_devices)]
        super().__init__(labels, [None] * num_devices, draws=draws, accounts=True)
        self._observer = observer
        self._run = (data_dependent or DataDependent()).run
        self._fake_results = fake_results
        self._known: KnownCall | None = None
        self.arrivals: list[Arrival] = []
        self._arrivals = Arrivals()
        self._kernels = kernels
        self._workspaces: dict[tuple[int, str, str], int] = {}

    def peak_account(self, device: int) -> dict[Kind, int]:
        """Return the bytes on a device at its peak by kind of storage. Their sum is the peak."""
        held, most, found = 0, 0, dict[Kind, int]()
        at_peak: dict[Kind, int] = {}
        for place, index, nbytes, _ in self.account:
            if index == device:
                found[place.kind] = found.get(place.kind, 0) + nbytes
                held += nbytes
                if held > most:
                    most, at_peak = held, dict(found)
        for entry in self.workspaces():
            if entry.device == device:
                at_peak[entry.kind] = at_peak.get(entry.kind, 0) + rounded(entry.nbytes)
        return at_peak

    def bounded_entries(self) -> tuple[BoundedEntry, ...]:
        """Return the allocated and freed storages, in order, without `workspaces`."""
        numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
        return tuple(
            BoundedEntry(one.kind, device, exact, limits_of(one), numbers[id(one)])
            for one, device, _, exact in self.account
        )

    def workspaces(self) -> tuple[BoundedEntry, ...]:
        """Return the workspaces of libraries, which exist during the whole step."""
        return tuple(
            BoundedEntry("activations", device, nbytes, block=-2 - index, stage="before")
            for index, ((device, *_), nbytes) in enumerate(self._workspaces.items())
        )

    def repeatable(self, act: Callable[[], None]) -> Callable[[TraceTracker], None] | None:
        """Call `act`, and return a function that charges the same storages to another tracker.

        Return None if `act` changed gradients or parameters, whose lifetime depends on the rest of the step.
        """
        begin, begin_workspaces = len(self.account), len(self._workspaces)
        act()
        account, saved = self.account[begin:], [*self._workspaces.items()][begin_workspaces:]

        def repeat(tracker: TraceTracker) -> None:
            for key, nbytes in saved:
                tracker._keep_workspace(key, nbytes)
            for held, _, nbytes, exact_bytes in account:
                tracker._charge(held, nbytes, exact_bytes)

        return None if any(held.kind in ("gradients", "parameters") for held, *_ in account) else repeat

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # fast path: two of three dispatches
            return args[0].device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _outputs_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        results = self._fake_results
        key, known, outputs = (None, None, None) if results is None else results.repeated(func, args, kwargs, inputs)
        if known is None:
            outputs = as_real(func, args, self._run(func, args, kwargs), like_gpu=self._kernels is not None)
            if results is not None and key is not None:
                results.note(key, args, inputs, outputs)
        self._known = known
        return outputs

    def _put_number(self, drawn: Tensor, number: float) -> None:
        if not isinstance(drawn, FakeTensor):
            drawn.fill_(number)
        elif drawn.numel() == 1:  # its constant is what `item()` returns
            with unset_fake_temporarily():
                drawn.constant = torch.full(drawn.shape, number, dtype=drawn.dtype)

    def _has_run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any, device: int) -> None:
        self._note_arrival(func, outputs)
        self._charge_inside(func, args, outputs, device)
        if self._observer is not None and device >= 0:
            self._observer.on_op(device, func, args, kwargs, outputs, self._known)

    def _has_moved(self, source: int, destination: int, nbytes: int, purpose: str) -> None:
        if self._observer is not None:
            self._observer.on_transfer(source, destination, nbytes, purpose)

    def _charge_inside(self, func: Any, args: Sequence[Any], outputs: Any, device: int) -> None:
        """Charge an operator's temporary blocks, and the library workspaces that it is the first to use."""
        kernels = self._kernels
        if kernels is None or device < 0 or func not in WITH_INNER_MEMORY:
            return
        for library, nbytes in workspaces(func, args, kernels).items():
            thread = "forward" if running_part() == "forward" else "backward"
            self._keep_workspace((device, library, thread), nbytes)
        charged: list[tuple[Place, int, int]] = []
        try:
            for block in temporary_blocks(func, args, outputs, kernels):
                charged.append((_InnerBlock(device, limits=block.limits), rounded(block.limited_bytes), block.nbytes))
                self._charge(*charged[-1])
                if block.is_alone:
                    self._uncharge(*charged.pop())
        finally:
            for place, nbytes, exact_bytes in charged:
                self._uncharge(place, nbytes, exact_bytes)

    def _keep_workspace(self, key: tuple[int, str, str], nbytes: int) -> None:
        """Charge a library's workspace to a device for the whole step, because only a process's first step lacks it.

        Args:
            key: The device, the library and the thread: autograd's thread has a separate workspace.
        """
        if key in self._workspaces or not nbytes:
            return
        device, *_ = key
        self._workspaces[key] = nbytes
        self.live_bytes[device] += rounded(nbytes)
        self.peak_bytes[device] += rounded(nbytes)

    def _note_arrival(self, func: Any, gradient: Tensor) -> None:
        variable = self._arrivals.parameter_of(func)
        if variable is None:
            return
        parameter, held = self._held_of(variable), self._held_of(gradient)
        if parameter is not None and held is not None:
            nbytes, is_copy = gradient.numel() * gradient.element_size(), func is not torch.ops.aten.detach.default
            self.arrivals.append(Arrival(len(self.account), parameter, held, nbytes, is_copy))
