"""Recognise tensors and modules that FSDP2 shards over the ranks, gather their values, and clear their gradients."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from autosplit.torch_versions import fsdp_groups, reset_fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def begin_step(shared: Any) -> None:
    """Clear the gradients that an unfinished step left in FSDP2.

    FSDP2 accumulates gradients on its unsharded parameters until the last micro-batch. `zero_grad` does not clear
    these, so the next step would add to them.
    """
    reset_fsdp(shared)
    for part in filter(_is_sharded_module, shared.modules()):
        for record in (record for group in fsdp_groups(part) for record in group.fsdp_params):
            record.unsharded_accumulated_grad = None
            unsharded = getattr(record, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def is_shard(value: object) -> bool:
    """Return whether a value is a DTensor (sharded over the ranks)."""
    module = sys.modules.get("torch.distributed.tensor")  # if it is not imported yet, there are no DTensors
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a module is sharded, even while its parameters are gathered for a forward."""
    return any(map(holds_shards, model.modules()))


def whole(shared: Tensor, *, keep: bool) -> Tensor | None:
    """Gather a sharded tensor. All ranks must call this in the same order.

    Args:
        keep: If true, return the whole tensor in CPU memory. Otherwise return None.
    """
    mesh_type = cast("DTensor", shared).device_mesh.device_type
    tensor = shared.detach()
    if tensor.device.type != mesh_type:  # an offloaded tensor is in CPU memory, which NCCL cannot send
        tensor = tensor.to(mesh_type)
    found = cast("DTensor", tensor).full_tensor()
    return found.cpu() if keep else None


def room_for(shared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in CPU memory with the sharding of another tensor."""
    return torch.empty_like(shared.detach(), dtype=dtype, device="cpu")


def part_of(full: Tensor, shared: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, in CPU memory, with the sharding of `shared`."""
    part = cast("DTensor", room_for(shared, full.dtype))
    for chunk in part.__create_chunk_list__():
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            # A rank after the last part has an empty part, whose offset may be beyond the end.
            full = full.narrow(dim, min(begin, full.size(dim)), size)
    part.to_local().copy_(full)
    return part


def _is_sharded_module(part: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported yet, no module is sharded
    return fsdp is not None and isinstance(part, fsdp.FSDPModule)


def holds_shards(part: nn.Module) -> bool:
    """Return whether a module itself, without the modules inside, is sharded or has a sharded tensor."""
    own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return _is_sharded_module(part) or any(map(is_shard, own))
