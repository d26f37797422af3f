"""Track every storage of a training step per device, and raise an error when a device is full.

The tracker sees dispatched ops, below autograd. So it counts tensors that a backward saves or recomputes exactly while
they live. The rules:

* Parameters, buffers, inputs and optimizer state are adopted explicitly. Any other storage from before the step is host
  memory. It is charged when an op uses it together with a placed tensor, because a real device would need both.
* An op's outputs are on the device of its inputs. Only `transfer` moves tensors. Tensors made without placed inputs
  (`torch.zeros` in a forward) are provisional. They are charged when an op uses them with a placed, non-scalar tensor.
* A sparse tensor is tracked as its indices and values.
* If a model draws random numbers to decide which layers to skip, `draws` replaces them.
* A dispatch mode does not affect worker threads, so the devices of a tracked step run one after another.

Block sizes are rounded up to 512 bytes, as in CUDA's caching allocator (torch c10/cuda/CUDACachingAllocator.cpp,
kMinBlockSize).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
from autosplit.rng import ExtremeDraws, number_for
from autosplit.runtime.tensor_parts import dense_parts, key_of, tensors_among
from autosplit.torch_versions import TorchDispatchMode, storage_key, without_torch_functions

BLOCK_BYTES = 512

NUMBER_BYTES = 16
"""Size of the largest scalar, complex128."""

_PROVISIONAL = -2

Kind = Literal["parameters", "gradients", "optimizer", "gathered", "activations", "left"]
"""The purpose of a storage. ``"left"`` marks storages that remain from an earlier step."""

_KINDS: dict[str, Kind] = {"parameter": "parameters", "buffer": "parameters", "gradient": "gradients"}
"""The kind of storage for each purpose of a transfer."""


class Entry(NamedTuple):
    """A storage that was allocated or freed on a device.

    Attributes:
        nbytes: Size before rounding. Negative for a freed storage.
    """

    kind: Kind
    device: int
    nbytes: int


Left = Sequence[weakref.ref[torch.UntypedStorage]]
"""Weak references to storages that remain allocated after a step."""


@dataclass
class Place:
    """The device and the purpose of a block of memory."""

    device: int
    kind: Kind = field(default="activations", kw_only=True)


@dataclass
class Held(Place):
    """A live storage: its rounded and exact sizes, and a reference that calls the tracker when it is freed."""

    nbytes: int
    exact_bytes: int
    storage: weakref.ref[torch.UntypedStorage]


class Tracker(TorchDispatchMode, Placement):
    """Count the bytes on each device during a step. Raise OutOfMemoryError if a device exceeds its capacity.

    Args:
        labels: Device names for error messages, in the order of the step.
        capacities: Maximum bytes of each device, or None for no limit.
        draws: Replaces random numbers that decide which layers run. None keeps the model's random numbers.
        accounts: Record each allocated or freed storage, as `entries` requires.

    Attributes:
        peak_bytes: Maximum bytes per device since `__enter__`.

    Raises:
        OutOfMemoryError: An op's output does not fit. The error names the device.
    """

    def __init__(
        self,
        labels: Sequence[str],
        capacities: Sequence[int | None],
        *,
        draws: ExtremeDraws | None = None,
        accounts: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert len(labels) == len(capacities), (labels, capacities)
        self.labels = tuple(labels)
        self.capacities = tuple(capacities)
        self.live_bytes = [0] * len(labels)
        self.peak_bytes = [0] * len(labels)
        self._draws = draws
        self._held: dict[int, Held] = {}
        self._token: Token[Placement | None] | None = None
        # A tensor becomes a gradient only when it is on its parameter. So `entries` determines the kinds at the end,
        # from all storages allocated and freed before the peak.
        self._account: list[tuple[Place, int, int, int]] | None = [] if accounts else None

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
        # Drop the weak references. Otherwise storages that outlive the step would call `_release` when they are freed.
        self._held.clear()

    def classify(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor's storage. Ignore tensors that are not tracked."""
        for part in dense_parts(tensor):
            held = self._held.get(key_of(part))
            if held is not None:
                held.kind = kind

    @property
    def account(self) -> list[tuple[Place, int, int, int]]:
        """Allocated and freed blocks, in order: block, device, rounded bytes and exact bytes."""
        assert self._account is not None, "the tracker keeps no accounts"
        return self._account

    def entries(self) -> tuple[Entry, ...]:
        """Return the allocated and freed storages, in order."""
        return tuple(Entry(place.kind, device, exact_bytes) for place, device, _, exact_bytes in self.account)

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
        outputs = self._outputs_of(func, args, kwargs, inputs)
        if (
            device < 0
            and self._draws is not None
            and (number := number_for(self._draws, func, args, outputs)) is not None
        ):
            self._put_number(outputs, number)
        with without_torch_functions():
            if device >= 0 and not by_scalar:
                for tensor, record in zip(inputs, held, strict=True):
                    if (record is None or record.device == _PROVISIONAL) and tensor.dim() > 0:
                        self.adopt(tensor, device)
            self._record(inputs, tensors_among((outputs,)), device)
            self._has_run(func, args, kwargs, outputs, device)
        return outputs

    # Overridden for traces of fake tensors

    def _outputs_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:  # noqa: ARG002
        """Run an op, and return its outputs."""
        return func(*args, **kwargs)

    def _put_number(self, drawn: Tensor, number: float) -> None:
        """Replace random numbers."""
        drawn.fill_(number)

    def _has_run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any, device: int) -> None:
        """Handle an op that ran on a device, or on the host."""

    def _has_moved(self, source: int, destination: int, nbytes: int, purpose: str) -> None:
        """Handle a copy of a tensor from one device to another."""

    def _held_of(self, tensor: Tensor) -> Held | None:
        for part in dense_parts(tensor):
            return self._held.get(key_of(part))
        return None

    def _transfer(self, func: Any, args: Sequence[Any]) -> Tensor:
        _, source, destination, purpose = args
        copy: Tensor = self._outputs_of(func, args, {}, [args[0]])
        if destination != HOST:
            self.adopt(copy, destination)
        if purpose in _KINDS:
            self.classify(copy, _KINDS[purpose])
        if purpose == "gradient":
            self.classify(args[0], "gradients")
        self._has_moved(
            source, destination, sum(part.untyped_storage().nbytes() for part in dense_parts(copy)), purpose
        )
        return copy

    def _transfer_into(self, func: Any, args: Sequence[Any]) -> None:
        block, tensor, source, destination, purpose = args
        func(*args)
        if purpose == "output":
            self.classify(block, "gathered")
        self._has_moved(source, destination, tensor.numel() * tensor.element_size(), purpose)

    def _record(self, inputs: list[Tensor], outputs: Iterable[Tensor], device: int) -> None:
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
        held = self._held[key] = Held(device, nbytes, exact_bytes, released)
        if device >= 0:
            self._charge(held, nbytes, exact_bytes)

    def _charge(self, place: Place, nbytes: int, exact_bytes: int) -> None:
        device = place.device
        # Charge before the check. If the check raises, the finalizer of the storage still releases the charge.
        self.live_bytes[device] += nbytes
        live_bytes = self.live_bytes[device]
        if self._account is not None:
            self._account.append((place, device, nbytes, exact_bytes))
        self._check(device, nbytes, live_bytes)
        self.peak_bytes[device] = max(self.peak_bytes[device], live_bytes)

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

    def _uncharge(self, place: Place, nbytes: int, exact_bytes: int) -> None:
        self.live_bytes[place.device] -= nbytes
        if self._account is not None:
            self._account.append((place, place.device, -nbytes, -exact_bytes))

    def _release(self, key: int) -> None:
        held = self._held.pop(key, None)  # None if an interrupt came before the record was made
        if held is not None and held.device >= 0:
            self._uncharge(held, held.nbytes, held.exact_bytes)


def _device_of_inputs(inputs: list[Tensor], held: list[Held | None]) -> tuple[int, bool]:
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
