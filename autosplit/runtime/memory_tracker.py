"""Track every storage of a training step per device, and raise an error when a device is full.

The tracker sees dispatched ops, below autograd. So it counts tensors that a backward saves or recomputes exactly while
they live. The rules:

* Parameters, buffers, inputs and optimizer state are adopted explicitly. Any other storage from before the step is host
  memory. It is charged when an op uses it together with a placed tensor, because a real device would need both.
* An op's outputs are on the device of its inputs. Only `transfer` moves tensors. Tensors made without placed inputs
  (`torch.zeros` in a forward) are provisional. They are charged when an op uses them with a placed, non-scalar tensor.
* A sparse tensor is tracked as its indices and values.
* If a model draws random numbers to decide which layers to skip, `draws` replaces them.
* With `kernels`, an operator's temporary blocks on a GPU are charged and immediately released. The workspaces of
  libraries are charged for the whole step (`kernel_memory`).
* A dispatch mode does not affect worker threads, so the devices of a tracked step run one after another.

Block sizes are rounded up to 512 bytes, as in CUDA's caching allocator (torch c10/cuda/CUDACachingAllocator.cpp,
kMinBlockSize).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from autosplit.devices.transfer import (
    ACTIVE,
    HOST,
    TRANSFER_INTO_OP,
    TRANSFER_OP,
    Placement,
)
from autosplit.oom import OutOfMemoryError
from autosplit.rng import ExtremeDraws
from autosplit.runtime.data_dependent import DataDependent, replace_drawn
from autosplit.runtime.fake_results import FakeResults, KnownCall
from autosplit.runtime.gpu_kernels import GpuKernels
from autosplit.runtime.kernel_memory import NO_LIMITS, WITH_INNER_MEMORY, temporary_blocks, workspaces
from autosplit.runtime.op_cost import running_part
from autosplit.runtime.real_outputs import as_real
from autosplit.runtime.tensor_parts import dense_parts, key_of, tensors_among
from autosplit.torch_versions import FakeTensor, TorchDispatchMode, storage_key, without_torch_functions

BLOCK_BYTES = 512

NUMBER_BYTES = 16
"""Size of the largest scalar, complex128."""

_DEVICE = torch.ops.prim.device.default
_PROVISIONAL = -2

Kind = Literal["parameters", "gradients", "optimizer", "gathered", "activations", "left"]
"""The purpose of a storage. ``"left"`` marks storages that remain from an earlier step."""

_ARRIVALS = frozenset(getattr(torch.ops.aten, name).default for name in ("detach", "copy_", "clone"))
"""Ops that give a parameter its first gradient: autograd's tensor itself (detach), or a copy of it."""

_KINDS: dict[str, Kind] = {"parameter": "parameters", "buffer": "parameters", "gradient": "gradients"}
"""The kind of storage for each purpose of a transfer."""


class Entry(NamedTuple):
    """A storage that was allocated or freed on a device.

    Attributes:
        nbytes: Size before rounding. Negative for a freed storage.
        limits: Bounds of the size in bytes, equal for all batch sizes (`kernel_memory.Block`).
    """

    kind: Kind
    device: int
    nbytes: int
    limits: tuple[float, float] = NO_LIMITS


Left = Sequence[weakref.ref[torch.UntypedStorage]]
"""Weak references to storages that remain allocated after a step."""


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


@dataclass
class _Place:
    device: int
    kind: Kind = field(default="activations", kw_only=True)
    limits: tuple[float, float] = field(default=NO_LIMITS, kw_only=True)


@dataclass
class _Held(_Place):
    """A live storage: its rounded and exact sizes, and a reference that calls the tracker when it is freed."""

    nbytes: int
    exact_bytes: int
    storage: weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True)
class Arrival:
    """The first gradient of a parameter.

    Attributes:
        at: Number of account entries before the gradient.
        is_copy: Whether autograd copied its tensor, which is used elsewhere or has a different memory layout.
    """

    at: int
    parameter: _Held
    gradient: _Held
    nbytes: int
    is_copy: bool


class Arrivals:
    """Recognise the ops that give a parameter its first gradient. One object must see all ops of a step in order."""

    def __init__(self) -> None:
        self._detached: int | None = None

    def parameter_of(self, func: Any) -> Tensor | None:
        """Return the parameter whose first gradient this op creates, or None for any other op."""
        node: Any = torch._C._current_autograd_node() if func in _ARRIVALS else None
        found: Tensor | None = None
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            found = node.variable
        # torch 2.6 to 2.8 dispatches each of these detaches twice.
        detached = id(found) if found is not None and func is torch.ops.aten.detach.default else None
        is_repeated, self._detached = detached is not None and detached == self._detached, detached
        return None if is_repeated else found


class Tracker(TorchDispatchMode, Placement):
    """Count the bytes on each device during a step. Raise OutOfMemoryError if a device exceeds its capacity.

    Args:
        labels: Device names for error messages, in the order of the step.
        capacities: Maximum bytes of each device, or None for no limit.
        draws: Replaces random numbers that decide which layers run. None keeps the model's random numbers.
        accounts: Record each allocated or freed storage, as `peak_account` and `entries` require.
        kernels: A GPU. If given, also charge the memory that its kernels and libraries use.
        data_dependent: Runs ops that need values of fake tensors. None runs all ops as usual.
        fake_results: Outputs of earlier ops on fake tensors. None runs all ops.

    Attributes:
        peak_bytes: Maximum bytes per device since `__enter__` or `reset_peak`.
        arrivals: First gradients of parameters, in order. Empty without `accounts`.

    Raises:
        OutOfMemoryError: An op's output does not fit. The error names the device.
    """

    def __init__(
        self,
        labels: Sequence[str],
        capacities: Sequence[int | None],
        *,
        observer: Observer | None = None,
        draws: ExtremeDraws | None = None,
        accounts: bool = False,
        kernels: GpuKernels | None = None,
        data_dependent: DataDependent | None = None,
        fake_results: FakeResults | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert len(labels) == len(capacities), (labels, capacities)
        self.labels = tuple(labels)
        self.capacities = tuple(capacities)
        self.live_bytes = [0] * len(labels)
        self.peak_bytes = [0] * len(labels)
        self._observer = observer
        self._draws = draws
        self._run = (data_dependent or DataDependent()).run
        self._fake_results = fake_results
        self._held: dict[int, _Held] = {}
        self._token: Token[Placement | None] | None = None
        # A tensor becomes a gradient only when it is on its parameter. So `peak_account` determines the kinds at the
        # end, from all storages allocated and freed before the peak.
        self._account: list[tuple[_Place, int, int, int]] | None = [] if accounts else None
        self.arrivals: list[Arrival] = []
        self._arrivals = Arrivals()
        self._entries_at_peak = [0] * len(labels)
        self._kernels = kernels
        self._workspaces: dict[tuple[int, str, str], int] = {}

    @property
    def num_devices(self) -> int:
        """Number of devices of the step."""
        return len(self.labels)

    def __enter__(self) -> Tracker:
        self._token = ACTIVE.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        assert self._token is not None
        ACTIVE.reset(self._token)
        self._token = None
        self._held.clear()  # with the references, so that a storage that the user keeps does not call this tracker

    def reset_peak(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak_bytes = list(self.live_bytes)
        self._entries_at_peak = [len(self._account or ())] * len(self.labels)

    def classify(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor's storage. Ignore tensors that are not tracked."""
        for part in dense_parts(tensor):
            held = self._held.get(key_of(part))
            if held is not None:
                held.kind = kind

    def peak_account(self, device: int) -> dict[Kind, int]:
        """Return the bytes on a device at its peak by kind of storage. Their sum is the peak."""
        found: dict[Kind, int] = {}
        for held, place, nbytes, _ in self.account[: self._entries_at_peak[device]]:
            if place == device:
                found[held.kind] = found.get(held.kind, 0) + nbytes
        for kind, place, nbytes, _ in self.workspaces():
            if place == device:
                found[kind] = found.get(kind, 0) + rounded(nbytes)
        return found

    def repeatable(self, act: Callable[[], None]) -> Callable[[Tracker], None] | None:
        """Call `act`, and return a function that charges the same storages to another tracker.

        Return None if `act` changed gradients or parameters, whose lifetime depends on the rest of the step.
        """
        begin, begin_workspaces = len(self.account), len(self._workspaces)
        act()
        account, workspaces = self.account[begin:], [*self._workspaces.items()][begin_workspaces:]

        def repeat(tracker: Tracker) -> None:
            for key, nbytes in workspaces:
                tracker._keep_workspace(key, nbytes)
            for held, _, nbytes, exact_bytes in account:
                tracker._charge(held, nbytes, exact_bytes)

        return None if any(held.kind in ("gradients", "parameters") for held, *_ in account) else repeat

    @property
    def account(self) -> list[tuple[_Place, int, int, int]]:
        """Allocated and freed blocks, in order: block, device, rounded bytes and exact bytes."""
        assert self._account is not None, "the tracker keeps no accounts"
        return self._account

    def entries(self) -> tuple[Entry, ...]:
        """Return the allocated and freed storages, in order, without `workspaces`."""
        return tuple(Entry(one.kind, device, exact, one.limits) for one, device, _, exact in self.account)

    def workspaces(self) -> tuple[Entry, ...]:
        """Return the workspaces of libraries, which exist during the whole step."""
        return tuple(Entry("activations", device, nbytes) for (device, *_), nbytes in self._workspaces.items())

    def adopt(self, tensor: Tensor, device: int) -> None:
        """Charge an existing tensor to a device. A tensor that already has a device stays there."""
        for part in dense_parts(tensor):
            self._hold(part.untyped_storage(), device)

    def adopt_left(self, left: Left, device: int) -> None:
        """Charge the live storages of an earlier step to a device."""
        for reference in left:
            storage = reference()
            if storage is not None:
                self._hold(storage, device)
                self._held[storage_key(storage)].kind = "left"

    def left_on(self, device: int) -> Left:
        """Return a device's storages other than parameters, gradients, optimizer state and scalars (such as losses)."""
        held = (one for one in self._held.values() if one.device == device and one.kind in ("activations", "left"))
        return [
            one.storage for one in held if (storage := one.storage()) is not None and storage.nbytes() > NUMBER_BYTES
        ]

    def device_of(self, tensor: Tensor) -> int:
        """Return the index of a tensor's device, or `HOST`."""
        held = self._held_of(tensor)
        return held.device if held is not None and held.device >= 0 else HOST

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # fast path: two of three dispatches
            return args[0].device
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is TRANSFER_OP:
            return self._transfer(func, args)
        if func is TRANSFER_INTO_OP:
            return self._transfer_into(func, args)
        with without_torch_functions():
            inputs = list(tensors_among((*args, *kwargs.values())))
            held = [self._held_of(tensor) for tensor in inputs]
            device, by_scalar = _device_of_inputs(inputs, held)
        outputs, known = self._outputs_of(func, args, kwargs, inputs)
        if device < 0 and self._draws is not None:
            replace_drawn(self._draws, func, args, outputs)
        with without_torch_functions():
            if device >= 0 and not by_scalar:
                for tensor, record in zip(inputs, held, strict=True):
                    if (record is None or record.device == _PROVISIONAL) and tensor.dim() > 0:
                        self.adopt(tensor, device)
            self._follow(inputs, tensors_among((outputs,)), device)
            self._note_arrival(func, outputs)
            self._charge_inside(func, args, outputs, device)
            if self._observer is not None and device >= 0:
                self._observer.on_op(device, func, args, kwargs, outputs, known)
        return outputs

    def _outputs_of(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> tuple[Any, KnownCall | None]:
        results = self._fake_results
        key, known, outputs = (None, None, None) if results is None else results.repeated(func, args, kwargs, inputs)
        if known is None:
            outputs = as_real(func, args, self._run(func, args, kwargs), like_gpu=self._kernels is not None)
            if results is not None and key is not None:
                results.note(key, args, inputs, outputs)
        return outputs, known

    def _charge_inside(self, func: Any, args: Sequence[Any], outputs: Any, device: int) -> None:
        """Charge an operator's temporary blocks, and the library workspaces that it is the first to use."""
        kernels = self._kernels
        if kernels is None or device < 0 or func not in WITH_INNER_MEMORY:
            return
        for library, nbytes in workspaces(func, args, kernels).items():
            self._keep_workspace((device, library, running_part()), nbytes)
        charged: list[tuple[_Place, int, int]] = []
        try:
            for block in temporary_blocks(func, args, outputs, kernels):
                charged.append((_Place(device, limits=block.limits), rounded(block.limited_bytes), block.nbytes))
                self._charge(*charged[-1])
        finally:
            for place, nbytes, exact_bytes in charged:
                self._uncharge(place, nbytes, exact_bytes)

    def _keep_workspace(self, key: tuple[int, str, str], nbytes: int) -> None:
        """Charge a library's workspace to a device for the whole step, because only a process's first step lacks it.

        Args:
            key: The device, the library and the part of the step: autograd's thread has a separate workspace.
        """
        if key in self._workspaces or not nbytes:
            return
        device, *_ = key
        self._workspaces[key] = nbytes
        nbytes = rounded(nbytes)
        self.live_bytes[device] += nbytes
        self.peak_bytes[device] += nbytes
        self._check(device, nbytes, self.peak_bytes[device])

    def _note_arrival(self, func: Any, gradient: Tensor) -> None:
        variable = None if self._account is None else self._arrivals.parameter_of(func)
        if self._account is None or variable is None:
            return
        parameter, held = self._held_of(variable), self._held_of(gradient)
        if parameter is not None and held is not None:
            nbytes, is_copy = gradient.numel() * gradient.element_size(), func is not torch.ops.aten.detach.default
            self.arrivals.append(Arrival(len(self._account), parameter, held, nbytes, is_copy))

    def _held_of(self, tensor: Tensor) -> _Held | None:
        for part in dense_parts(tensor):
            return self._held.get(key_of(part))
        return None

    def _transfer(self, func: Any, args: Sequence[Any]) -> Tensor:
        _, source, destination, purpose = args
        copy: Tensor = self._outputs_of(func, args, {}, [args[0]])[0]
        if destination != HOST:
            self.adopt(copy, destination)
        if purpose in _KINDS:
            self.classify(copy, _KINDS[purpose])
        if purpose == "gradient":
            self.classify(args[0], "gradients")
        if self._observer is not None:
            nbytes = sum(part.untyped_storage().nbytes() for part in dense_parts(copy))
            self._observer.on_transfer(source, destination, nbytes, purpose)
        return copy

    def _transfer_into(self, func: Any, args: Sequence[Any]) -> None:
        block, tensor, source, destination, purpose = args
        func(*args)
        if purpose == "output":
            self.classify(block, "gathered")
        if self._observer is not None:
            self._observer.on_transfer(source, destination, tensor.numel() * tensor.element_size(), purpose)

    def _follow(self, inputs: list[Tensor], outputs: Iterable[Tensor], device: int) -> None:
        """Charge an op's new outputs. An output that shares an input's storage is not new."""
        input_keys: set[int] | None = None
        for output in outputs:
            for part in dense_parts(output):
                key = key_of(part)
                if key in self._held:
                    self._regrow(part)
                    continue
                if input_keys is None:
                    input_keys = {key_of(piece) for tensor in inputs for piece in dense_parts(tensor)}
                if key not in input_keys:
                    self._hold(part.untyped_storage(), device)

    def _regrow(self, tensor: Tensor) -> None:
        held = self._held[key_of(tensor)]
        exact_bytes = tensor.untyped_storage().nbytes()
        nbytes = rounded(exact_bytes)
        if nbytes != held.nbytes:
            grown, grown_exactly = nbytes - held.nbytes, exact_bytes - held.exact_bytes
            held.nbytes, held.exact_bytes = nbytes, exact_bytes
            if held.device >= 0:
                self._charge(held, grown, grown_exactly)

    def _hold(self, storage: torch.UntypedStorage, device: int) -> None:
        key = storage_key(storage)
        held = self._held.get(key)
        if held is not None:
            if held.device == _PROVISIONAL and device >= 0:
                held.device = device
                self._charge(held, held.nbytes, held.exact_bytes)
            return
        exact_bytes = storage.nbytes()
        nbytes = rounded(exact_bytes)
        released = weakref.ref(storage, lambda _: self._release(key))
        held = self._held[key] = _Held(device, nbytes, exact_bytes, released)
        if device >= 0:
            self._charge(held, nbytes, exact_bytes)

    def _charge(self, place: _Place, nbytes: int, exact_bytes: int) -> None:
        device = place.device
        # Charge before the check. If the check raises, the finalizer of the storage still releases the charge.
        self.live_bytes[device] += nbytes
        live_bytes = self.live_bytes[device]
        if self._account is not None:
            self._account.append((place, device, nbytes, exact_bytes))
        self._check(device, nbytes, live_bytes)
        if live_bytes > self.peak_bytes[device]:
            self.peak_bytes[device] = live_bytes
            self._entries_at_peak[device] = len(self._account or ())

    def _check(self, device: int, nbytes: int, held_bytes: int) -> None:
        capacity_bytes = self.capacities[device]
        if capacity_bytes is None or held_bytes <= capacity_bytes:
            return
        raise OutOfMemoryError(
            f"{self.labels[device]} is out of memory. It requested {nbytes} bytes, and {held_bytes - nbytes} of "
            f"the {capacity_bytes} allowed bytes are in use. Give it fewer samples or a larger budget.",
            device=self.labels[device],
            device_index=device,
            requested_bytes=nbytes,
            live_bytes=held_bytes - nbytes,
            capacity_bytes=capacity_bytes,
        )

    def _uncharge(self, place: _Place, nbytes: int, exact_bytes: int) -> None:
        self.live_bytes[place.device] -= nbytes
        if self._account is not None:
            self._account.append((place, place.device, -nbytes, -exact_bytes))

    def _release(self, key: int) -> None:
        held = self._held.pop(key, None)  # None if an interrupt came before the record was made
        if held is not None and held.device >= 0:
            self._uncharge(held, held.nbytes, held.exact_bytes)


def _device_of_inputs(inputs: list[Tensor], held: list[_Held | None]) -> tuple[int, bool]:
    scalar_device = _PROVISIONAL
    for tensor, record in zip(inputs, held, strict=True):
        if record is not None and record.device >= 0:
            if tensor.dim() > 0:
                return record.device, False
            scalar_device = record.device
    return scalar_device, True


def rounded(nbytes: int) -> int:
    """Round a size up to a multiple of `BLOCK_BYTES`."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
