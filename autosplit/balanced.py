"""`BalancedDataParallel`: nn.DataParallel with a share of its own for each device.

It takes plain integers and never tunes itself. On CUDA it stands on torch's own scatter, replicate,
parallel_apply and gather; on CPU devices its chunks run in turn, through the one module outside a placement,
through a replica per device inside one (so that each device's copies are accounted where they are).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosplit.batches import (
    batch_size_of,
    chunk,
    leaves_of,
    map_tensors,
    unmarked,
)
from autosplit.errors import DeviceError, InputError, WorkloadError
from autosplit.gathering import Gathering, Link, PlacedLink
from autosplit.oom import OutOfMemoryError
from autosplit.replicas import copy_buffers, kept_buffers, replicate_placed, with_autocast
from autosplit.split import cap_split, even_split, proportional_split, split_from_gpu0
from autosplit.transfer import Placement, active_placement, adopt_module, transfer

__all__ = ["BalancedDataParallel", "Reduce", "data_parallel"]

Reduce = Literal["samples", "tokens", "sum"] | Callable[[Any], float]
"""How scalar outputs are combined; a callable returns a replica's weight from its ``(args, kwargs)``."""

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out by default."""


class BalancedDataParallel(nn.DataParallel[nn.Module]):
    """Data parallelism in one process, with `gpu0_bsz` samples on the first device.

    A batch of ``sum(split)`` samples is split exactly as `split` says, another one in proportion to it, by
    largest remainder. With `gpu0_bsz` alone, the first device takes ``min(gpu0_bsz, batch)`` and the others the
    rest, evenly. A device whose share is 0 is not called. Outputs are concatenated on the output device; a
    scalar output (a loss) is combined by `reduce`, an integer one (a count) is summed.

    Args:
        gpu0_bsz: Samples per forward on the first device; None takes `split[0]`.
        module: The module; its parameters must be on the first device at the first forward.
        device_ids: CUDA devices, or ``["cpu", "cpu"]`` to try it anywhere. Default: every visible GPU; without
            any, the wrapper passes its inputs through, as its parent does.
        output_device: Where outputs are gathered. Default: the first device.
        dim: The batch dimension.
        split: Samples per device in one forward.
        ceilings: The most samples each device may get in one forward.
        reduce: ``"samples"`` (the default) weights scalar outputs by samples, which is exact where each is a
            mean over them; ``"tokens"`` by the labels that are not -100; ``"sum"`` adds them up; a callable
            returns each replica's weight from its ``(args, kwargs)``.

    Raises:
        InputError: Numbers that disagree with each other, or a compiled module.
        DeviceError: Devices that can't be used together.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        split: Sequence[int] | None = None,
        ceilings: Sequence[int] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        # Not nn.DataParallel's own: it warns of unlike GPUs, which are what this class is for, and drops its
        # arguments where there is no GPU.
        nn.Module.__init__(self)
        _refuse_compiled(module)
        devices = _devices_from(device_ids)
        self.module = module
        self.dim = dim
        ids: list[Any] = [device.index if device.type == "cuda" else device for device in devices]
        self.device_ids = ids
        self.devices = devices
        if devices:
            self.output_device = _output_device(output_device, devices[0])
            self.src_device_obj = devices[0]
        self.reduce: Reduce = _checked_reduce(reduce)
        self.ceilings = _checked_sizes("ceilings", ceilings, len(devices))
        self._split: tuple[int, ...] | None = None
        self._gpu0_bsz: int | None = None
        self._set_shares(gpu0_bsz, split)

    @property
    def split(self) -> tuple[int, ...] | None:
        """Samples per device in one full forward; None where only `gpu0_bsz` was given."""
        return self._split

    @split.setter
    def split(self, value: Sequence[int] | None) -> None:
        self._set_shares(None if value is not None else self._gpu0_bsz, value)

    @property
    def gpu0_bsz(self) -> int | None:
        """Samples per forward on the first device; set, it takes the place of `split`."""
        return self._gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int) -> None:
        self._set_shares(value, None)

    def _set_shares(self, gpu0_bsz: int | None, split: Sequence[int] | None) -> None:
        if gpu0_bsz is not None and (isinstance(gpu0_bsz, bool) or not isinstance(gpu0_bsz, int) or gpu0_bsz < 0):
            raise InputError(f"gpu0_bsz is {gpu0_bsz!r}; expected a number of samples, 0 or more")
        sizes = _checked_sizes("split", split, len(self.devices))
        if sizes is not None and not any(sizes):
            raise InputError(f"split is {sizes}; expected at least one sample on one device")
        if sizes is not None and gpu0_bsz is not None and sizes and sizes[0] != gpu0_bsz:
            raise InputError(f"gpu0_bsz is {gpu0_bsz} and split[0] is {sizes[0]}; expected the same; leave one out")
        if sizes is not None and self.ceilings is not None:
            for index, (size, ceiling) in enumerate(zip(sizes, self.ceilings, strict=True)):
                if size > ceiling:
                    raise InputError(
                        f"split[{index}] is {size}, above that device's ceiling of {ceiling}; "
                        "lower the share, or raise the ceiling if the device really holds it"
                    )
        self._split = sizes
        self._gpu0_bsz = sizes[0] if sizes else gpu0_bsz

    def split_of(self, batch_size: int) -> tuple[int, ...]:
        """Return the samples each device gets of a batch.

        Args:
            batch_size: Samples in the batch.

        Returns:
            One size per device; they add up to `batch_size`.

        Raises:
            InputError: The ceilings do not hold the batch.
        """
        if self._split is not None:
            return proportional_split(batch_size, self._split, self.ceilings)
        if self._gpu0_bsz is None:
            sizes = even_split(batch_size, len(self.devices))
        else:
            sizes = split_from_gpu0(batch_size, self._gpu0_bsz, len(self.devices))
        return sizes if self.ceilings is None else cap_split(sizes, self.ceilings)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the batch, each device on its share.

        Args:
            *inputs: The module's positional arguments: tensors, or nested containers of them.
            **kwargs: Its keyword arguments.

        Returns:
            What the module returns, gathered on the output device.

        Raises:
            WorkloadError: The arguments disagree on the batch size, or outputs that can't be put together.
            DeviceError: The module is not on the first device.
            OutOfMemoryError: A device ran out of memory; it is named, with the samples it held.
        """
        if not self.devices:
            args, named = unmarked((inputs, kwargs))
            return self.module(*args, **named)
        self._check_module_device()
        call = (inputs, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.dim() > self.dim for leaf in leaves_of(call)):
            batch_size = batch_size_of(call, self.dim)
            sizes = self.split_of(batch_size)
        else:  # nothing to split: the first device runs the call as it is
            batch_size, sizes = 1, (1, *(0 for _ in self.devices[1:]))
        active = [index for index, size in enumerate(sizes) if size]
        chunks = chunk(call, tuple(sizes[index] for index in active), self.dim, batch_size)
        weights = self._weights(chunks, [sizes[index] for index in active])
        if self.devices[0].type == "cuda":
            outputs = self._run_on_gpus(active, chunks)
        elif (placement := active_placement()) is not None:
            outputs = self._run_placed(placement, active, chunks)
            return Gathering(self.dim, weights, PlacedLink(tuple(active))).join(outputs)
        else:
            outputs = self._run_in_turn(chunks)
        return Gathering(self.dim, weights, Link(torch.device(self.output_device))).join(outputs)

    def _check_module_device(self) -> None:
        home = self.devices[0]
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != home:
                raise DeviceError(
                    f"{name} is on {tensor.device}; expected the first device, {home}; call .to('{home}') on the model"
                )

    def _weights(self, chunks: list[Any], sizes: list[int]) -> list[float]:
        """Return what each replica's scalar outputs count for."""
        if self.reduce == "sum":
            return [1.0] * len(chunks)
        if self.reduce == "samples":
            amounts = [float(size) for size in sizes]
        elif self.reduce == "tokens":
            amounts = [_count_labels(kwargs) for _, kwargs in chunks]
        else:
            assert callable(self.reduce)
            return [float(self.reduce(call)) for call in chunks]
        total = sum(amounts)
        return [amount / total if total else 0.0 for amount in amounts]

    def _run_in_turn(self, chunks: list[Any]) -> list[Any]:
        """Run the chunks through the one module; buffers keep what the first of them leaves, as on GPUs."""
        if len(chunks) > 1:
            # As on GPUs each replica gets a copy: a module that changes its input in place must not reach the others'.
            chunks = [map_tensors(torch.clone, call) for call in chunks]
        outputs = [self.module(*chunks[0][0], **chunks[0][1])]
        for args, kwargs in chunks[1:]:
            with kept_buffers(self.module):
                outputs.append(self.module(*args, **kwargs))
        return outputs

    def _run_placed(self, placement: Placement, active: list[int], chunks: list[Any]) -> list[Any]:
        """Scatter all, replicate, run all: on devices that are there for the placement only."""
        adopt_module(placement, self.module, 0)
        placed = [
            map_tensors(partial(_moved, placement, index), call) for index, call in zip(active, chunks, strict=True)
        ]
        if active == [0]:
            return [self.module(*placed[0][0], **placed[0][1])]
        replicas = replicate_placed(self.module, active)
        outputs = [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, placed, strict=True)]
        if active[0] != 0:
            copy_buffers(replicas[0], self.module, lambda tensor: transfer(tensor, active[0], 0, "buffer"))
        return outputs

    def _run_on_gpus(self, active: list[int], chunks: list[Any]) -> list[Any]:
        devices = [self.devices[index] for index in active]
        moved = [map_tensors(partial(_sent, device), call) for device, call in zip(devices, chunks, strict=True)]
        if active == [0]:
            args, kwargs = moved[0]
            return [self.module(*args, **kwargs)]
        # torch broadcasts from the first device of the list, so it is there even when it gets no samples.
        indices = [0, *(index for index in active if index != 0)]
        replicas = nn.parallel.replicate(
            self.module, [self.devices[index] for index in indices], detach=not torch.is_grad_enabled()
        )
        replicas = replicas if active[0] == 0 else replicas[1:]
        try:
            outputs = nn.parallel.parallel_apply(
                [with_autocast(replica) for replica in replicas],  # type: ignore[misc]  # it only calls them
                [args for args, _ in moved],
                [kwargs for _, kwargs in moved],
                devices,
            )
        except torch.OutOfMemoryError as error:
            message = str(error)
        else:
            if active[0] != 0:
                copy_buffers(replicas[0], self.module, lambda tensor: tensor.to(self.devices[0]))
            return list(outputs)
        # Raised outside the except block: its traceback would pin the replica's tensors.
        raise _named_oom(message, devices, chunks, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    gpu0_bsz: int | None = None,
    device_ids: Sequence[int | str | torch.device] | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    split: Sequence[int] | None = None,
    ceilings: Sequence[int] | None = None,
    reduce: Reduce | None = None,
) -> Any:
    """Run a module once on a batch, each device on its share: the functional form of `BalancedDataParallel`.

    Args:
        module: The module.
        inputs: A tensor, or a tuple of positional arguments.
        gpu0_bsz: See `BalancedDataParallel`, as for all that follow.
        device_ids: Devices.
        output_device: Where outputs are gathered.
        dim: The batch dimension.
        module_kwargs: Keyword arguments of the module.
        split: Samples per device.
        ceilings: The most samples each device may get.
        reduce: How scalar outputs are combined.

    Returns:
        What the module returns, gathered.
    """
    wrapper = BalancedDataParallel(
        gpu0_bsz, module, device_ids, output_device, dim, split=split, ceilings=ceilings, reduce=reduce
    )
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return wrapper(*args, **(module_kwargs or {}))


# Checking arguments


def _refuse_compiled(module: nn.Module) -> None:
    # Replicating an OptimizedModule empties the original's parameters; a module compiled in place would run
    # every replica with the first device's weights.
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise InputError(
            f"the module is a compiled {type(module).__name__}; expected an eager one; "
            "wrap the eager module and compile the wrapper: torch.compile(BalancedDataParallel(...))"
        )


def _devices_from(device_ids: Sequence[int | str | torch.device] | None) -> tuple[torch.device, ...]:
    if device_ids is None:
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    devices = tuple(torch.device("cuda", item) if isinstance(item, int) else torch.device(item) for item in device_ids)
    kinds = {device.type for device in devices}
    if len(kinds) > 1 or not kinds <= {"cuda", "cpu"}:
        raise DeviceError(f"device_ids are {[str(d) for d in devices]}; expected all of them cuda, or all of them cpu")
    if kinds == {"cuda"} and torch.cuda.device_count() == 0:
        return ()  # as nn.DataParallel: without any usable GPU, a pass-through
    return tuple(_indexed(device) for device in devices)


def _output_device(given: int | str | torch.device | None, first: torch.device) -> Any:
    # Any: nn.DataParallel declares an index where it keeps whatever it was given.
    if given is None:
        return first
    return _indexed(torch.device("cuda", given) if isinstance(given, int) else torch.device(given))


def _indexed(device: torch.device) -> torch.device:
    """Name a device as its tensors do: `cuda` with an index, `cpu` without one."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _checked_sizes(name: str, sizes: Sequence[int] | None, num_devices: int) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    checked = tuple(sizes)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in checked):
        raise InputError(f"{name} is {checked}; expected a number of samples, 0 or more, for each device")
    if num_devices and len(checked) != num_devices:
        raise InputError(
            f"{name} has {len(checked)} entries, {checked}; expected one for each of {num_devices} devices"
        )
    return checked


def _checked_reduce(reduce: Reduce | None) -> Reduce:
    if reduce is None:
        return "samples"
    if reduce not in ("samples", "tokens", "sum") and not callable(reduce):
        raise InputError(f"reduce is {reduce!r}; expected 'samples', 'tokens', 'sum' or a callable")
    return reduce


def _count_labels(kwargs: Mapping[str, Any]) -> float:
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor):
        raise WorkloadError(
            f"reduce='tokens' and the call has no tensor named labels among {sorted(kwargs)}; "
            "pass labels= to the module, or a callable as reduce="
        )
    return float((labels != IGNORED_LABEL).sum())


def _named_oom(message: str, devices: list[torch.device], chunks: list[Any], dim: int) -> OutOfMemoryError:
    for position, device in enumerate(devices):
        if f"in replica {position} on device" in message:
            samples = batch_size_of(chunks[position], dim)
            return OutOfMemoryError(
                f"{device} is out of memory with {samples} samples of the batch; give it fewer. {message}",
                device=str(device),
                device_index=position,
            )
    return OutOfMemoryError(message)


def _sent(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _moved(placement: Placement, device: int, tensor: Tensor) -> Tensor:
    source = placement.device_of(tensor)
    return tensor if source == device else transfer(tensor, source, device, "input")
