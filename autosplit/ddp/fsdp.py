"""FSDP2 under a plan: the ranks share a model's parameters out, and its gradient is that of the whole batch.

          share out                       forward, backward               last micro-batch
rank 0    [p0 ..] of rank 0's weights     p0 p1 come together | n0 W/N    gradients meet, each keeps its part
rank 1    [.. p1] of rank 0's weights     p0 p1 come together | n1 W/N    gradients meet, each keeps its part

The ranks come together in every forward and every backward, also in those that count for nothing: one that left any of
them out would hang the others.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.device import exchange_device
from autosplit.errors import InputError
from autosplit.torch_versions import fsdp_groups, reset_fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Layers = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
"""Which modules are shared out one by one: those of a class, of one of several, or those that a function says."""

_NOT_TAKEN = ("module", "dp_mesh_dims")
"""Of fully_shard's options: the model itself, and meshes on which not every rank has samples of its own."""


def shard(
    model: nn.Module, *, device: torch.device, layers: Layers | None = None, options: Mapping[str, Any]
) -> nn.Module:
    """Share a model's parameters out over all ranks, in place; as `Context.shard`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    refuse_options(options, fully_shard, _NOT_TAKEN)
    _refuse_model(model)
    chosen = _chosen(model, layers)
    _refuse_ties(model, chosen)
    _compare(model)
    _take_from_rank_0(model, device)
    assert dist.group.WORLD is not None, "the context has a group"
    options = {"mesh": DeviceMesh.from_group(dist.group.WORLD, device.type), **options}
    if options["mesh"].size() != dist.get_world_size():
        raise InputError(
            f"mesh has {options['mesh'].size()} ranks; expected all {dist.get_world_size()}, because each of them has "
            "samples of the step; leave mesh out, or make one of all ranks",
            code="mesh-size",
        )
    for part in (*chosen, model):
        fully_shard(part, **options)
    return model


def refuse_options(options: Iterable[str], call: Callable[..., Any], not_taken: Collection[str]) -> None:
    """Refuse options that a call of this torch does not have, and those that are not the user's to give."""
    known = [name for name in inspect.signature(call).parameters if name not in not_taken]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)} is given; expected options that {call.__name__} of torch {torch.__version__} has: "
            f"{', '.join(known)}; leave it out",
            code="fsdp-option-unknown",
        )


def begin_step(shared: Any) -> None:
    """Clear the gradients that an unfinished step left in FSDP2.

    Before the last micro-batch FSDP2 keeps gradients on its unsharded parameters, and `zero_grad` does not clear those.
    The next step would add to them.
    """
    reset_fsdp(shared)
    for part in filter(_is_sharded_module, shared.modules()):
        for record in (record for group in fsdp_groups(part) for record in group.fsdp_params):
            record.unsharded_accumulated_grad = None
            unsharded = getattr(record, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def is_shard(value: object) -> bool:
    """Tell whether a value is a rank's part of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # as long as nobody has loaded it, there is none
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ranks share a module's tensors out, also while these have come together for a forward."""
    return any(map(_holds_shards, model.modules()))


def whole(shared: Tensor, *, keep: bool) -> Tensor | None:
    """Bring a tensor together of which this rank has a part; all ranks call it, in the same order.

    Nothing is left on a rank that does not `keep` it, in host memory.
    """
    mesh_type = cast("DTensor", shared).device_mesh.device_type
    tensor = shared.detach()
    if tensor.device.type != mesh_type:  # kept in host memory, where NCCL sends nothing from
        tensor = tensor.to(mesh_type)
    found = cast("DTensor", tensor).full_tensor()
    return found.cpu() if keep else None


def room_for(shared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in host memory that is shared out as another is."""
    return torch.empty_like(shared.detach(), dtype=dtype, device="cpu")


def part_of(full: Tensor, shared: Tensor) -> Tensor:
    """Cut this rank's part out of a whole tensor, in host memory; `shared` is shared out as the part is to be."""
    part = cast("DTensor", room_for(shared, full.dtype))
    for chunk in part.__create_chunk_list__():
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            # A rank beyond the last part has none of it, and begins at its end.
            full = full.narrow(dim, min(begin, full.size(dim)), size)
    part.to_local().copy_(full)
    return part


def _refuse_model(model: nn.Module) -> None:
    wrapped = [name for name, part in model.named_modules() if isinstance(part, DistributedDataParallel)]
    shared = [name for name, part in model.named_modules() if _holds_shards(part)]
    scalars = [name for name, tensor in model.named_parameters() if not tensor.dim()]
    for names, says in (
        (wrapped, "is wrapped in DistributedDataParallel at"),
        (shared, "is shared out already at"),
        (scalars, "has parameters without a dimension, which can't be shared out:"),
    ):
        if names:
            raise InputError(
                f"the model {says} {names[0] or 'itself'}; expected a plain one, whose parameters have one dimension "
                "or more; share the plain model out, once",
                code="fsdp-model",
            )


def _chosen(model: nn.Module, layers: Layers | None) -> list[nn.Module]:
    """List the modules that are shared out by themselves, the inner ones first."""
    if layers is None:
        return []
    is_class = isinstance(layers, type | tuple)
    is_one = (lambda part: isinstance(part, cast("type", layers))) if is_class else cast("Any", layers)
    chosen = [part for part in model.modules() if part is not model and is_one(part)]
    if not chosen:
        kinds = sorted({type(part).__name__ for part in model.modules() if part is not model})
        raise InputError(
            f"layers is {layers!r}, and no module of the model is meant by it; expected a class, a tuple of classes, "
            f"or a function that is true of some; the model has {', '.join(kinds) or 'no modules inside'}",
            code="fsdp-layers",
        )
    return chosen[::-1]


def _refuse_ties(model: nn.Module, chosen: Iterable[nn.Module]) -> None:
    """Refuse a parameter of two groups: each would share out its own, and they would be one no longer."""
    alone = {path: part for path, part in model.named_modules(remove_duplicate=False) if part in set(chosen)}
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        path = max((path for path in alone if name.startswith(f"{path}.")), key=len, default="")
        owner = alone.get(path, model)
        known, group = owners.setdefault(tensor, (name, owner))
        if group is not owner:
            raise InputError(
                f"{name} is the same parameter as {known}, and they are in different layers; expected one "
                "parameter in one of them; let layers leave both out, so that they stay with the model itself",
                code="fsdp-tied-parameters",
            )


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _compare(model: nn.Module) -> None:
    """Make sure that all ranks have the same model, or they would wait for what the others never send."""
    own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors_of(model).items()]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    others = [str(rank) for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if others:
        raise InputError(
            f"the model of rank {', '.join(others)} is not that of rank 0; expected the same names, shapes and dtypes; "
            "build one model on all ranks",
            code="ranks-models-differ",
        )


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Send rank 0's weights and buffers, one at a time: the whole model need not fit on a device."""
    if dist.get_world_size() == 1:
        return
    at = exchange_device(device)
    for tensor in _tensors_of(model).values():
        if tensor.is_meta or not tensor.numel():
            continue  # what is on the meta device has no values yet
        sent = tensor.detach().to(at).contiguous()
        # As bytes: a backend need not know every dtype.
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if dist.get_rank():
            with torch.no_grad():
                tensor.copy_(sent)


def _is_sharded_module(part: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nobody has sharded a module
    return fsdp is not None and isinstance(part, fsdp.FSDPModule)


def _holds_shards(part: nn.Module) -> bool:
    """Tell whether a module's own tensors are shared out, those of the modules inside left aside."""
    own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return _is_sharded_module(part) or any(map(is_shard, own))
