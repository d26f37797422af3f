"""Run a module on the chunks of a batch, each chunk on its device.

On GPUs, torch's `parallel_apply` runs one replica per GPU in parallel. On CPU devices, the chunks run one after
another. Inside a placement (`autosplit.devices.transfer`), each CPU device has a replica, to charge its copies to the
device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.devices.transfer import Placement, adopt_module, transfer
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.parallel.persistent_replicas import PersistentReplicas
from autosplit.parallel.replicate import BufferCopies, carried, copy_buffers, moving_buffers, replicate
from autosplit.parallel.tensor_copies import Copies, GpuCopies
from autosplit.workload.batch import placed_on
from autosplit.workload.tree import map_tensors


def run_in_sequence(module: nn.Module, chunks: list[Any]) -> list[Any]:
    """Run the chunks one after another through the module. Only the first chunk updates its buffers."""
    if len(chunks) > 1:
        # On GPUs each replica gets a copy. Clone here, too, because a module may change its input in place.
        chunks = [map_tensors(torch.clone, call) for call in chunks]
    slots = moving_buffers(module) if len(chunks) > 1 else []
    copies = [BufferCopies(slots) for _ in chunks[1:]]  # copy before the first chunk updates the buffers
    outputs = [module(*chunks[0][0], **chunks[0][1])]
    for (args, kwargs), own in zip(chunks[1:], copies, strict=True):
        with own:
            outputs.append(module(*args, **kwargs))
    return outputs


def run_placed(
    module: nn.Module, placement: Placement, active: list[int], chunks: list[Any], lasting: PersistentReplicas | None
) -> list[Any]:
    """Scatter the chunks, replicate the module, and run the replicas in a placement."""
    adopt_module(placement, module, 0)
    placed = [placed_on(index, call) for index, call in zip(active, chunks, strict=True)]
    if active == [0]:
        return [module(*placed[0][0], **placed[0][1])]
    replicas = replicate(module, active, Copies()) if lasting is None else lasting.replicas(module, active)
    outputs = [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, placed, strict=True)]
    if active[0] != 0:
        copy_buffers(replicas[0], module, lambda tensor: transfer(tensor, active[0], 0, "buffer"))
    return outputs


def run_on_gpus(
    module: nn.Module,
    devices: Sequence[torch.device],
    active: list[int],
    chunks: list[Any],
    lasting: PersistentReplicas | None,
    shares: Sequence[int],
) -> list[Any]:
    """Scatter all chunks, replicate the module, and run all replicas at the same time.

    Raises:
        OutOfMemoryError: A GPU ran out of memory. The error names the GPU and its samples.
    """
    try:
        return _outputs_of_gpus(module, devices, active, chunks, lasting)
    except RuntimeError as error:
        if not is_oom(error):
            raise
        message = str(error)
    # Raise outside the except block, because the first error's traceback would keep the replica's tensors in memory.
    raise _named_oom(message, devices, active, shares)


def _outputs_of_gpus(
    module: nn.Module,
    devices: Sequence[torch.device],
    active: list[int],
    chunks: list[Any],
    lasting: PersistentReplicas | None,
) -> list[Any]:
    own = [devices[index] for index in active]
    moved = [map_tensors(partial(_sent, device), call) for device, call in zip(own, chunks, strict=True)]
    if active == [0]:
        args, kwargs = moved[0]
        return [module(*args, **kwargs)]
    replicas = (
        replicate(module, active, GpuCopies(tuple(devices))) if lasting is None else lasting.replicas(module, active)
    )
    outputs = nn.parallel.parallel_apply(
        [carried(replica, device) for replica, device in zip(replicas, own, strict=True)],  # type: ignore[misc]  # it only calls them
        [args for args, _ in moved],
        [kwargs for _, kwargs in moved],
        [device.index for device in own],  # torch accepts torch.device objects only for CUDA, so pass indices
    )
    if active[0] != 0:
        copy_buffers(replicas[0], module, lambda tensor: tensor.to(devices[0]))
    return list(outputs)


def _sent(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _named_oom(
    message: str, devices: Sequence[torch.device], active: list[int], shares: Sequence[int]
) -> OutOfMemoryError:
    index = _failed_device(message, devices, active)
    if index is None:
        return OutOfMemoryError(message)
    samples = shares[active.index(index)] if index in active else 0
    return OutOfMemoryError(
        f"{devices[index]} is out of memory with {samples} samples of the batch. Give it fewer. {message}",
        device=str(devices[index]),
        device_index=index,
    )


def _failed_device(message: str, devices: Sequence[torch.device], active: list[int]) -> int | None:
    for position, index in enumerate(active):
        if f"in replica {position} on device" in message:
            return index
    found = re.search(r"GPU (\d+)", message)
    ordinals = [device.index for device in devices]
    return ordinals.index(int(found[1])) if found and int(found[1]) in ordinals else None
