"""Train with FSDP2 under a plan: shard a model's parameters over the ranks.

          shard                           forward, backward               last micro-batch
rank 0    [p0 ..] of rank 0's weights     all-gather p0 p1 | n0 W/N       reduce-scatter gradients, keep p0's
rank 1    [.. p1] of rank 0's weights     all-gather p0 p1 | n1 W/N       reduce-scatter gradients, keep p1's

All ranks must run every forward and every backward, even with weight 0. Both contain collectives, so otherwise the
other ranks would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from autosplit.ddp.device import exchange_device, gathered_objects
from autosplit.ddp.rank_models import refuse_options
from autosplit.ddp.sharded_tensors import holds_shards
from autosplit.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Layers = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
"""The modules that are sharded one by one: a class, a tuple of classes, or a function that returns True for them."""

_NOT_TAKEN = ("module", "dp_mesh_dims")
"""Arguments of fully_shard that users may not pass. With `dp_mesh_dims`, some ranks would share their samples."""


def shard(
    model: nn.Module,
    *,
    device: torch.device,
    layers: Layers | None = None,
    shard_size: int | None = None,
    options: Mapping[str, Any],
) -> nn.Module:
    """Shard a model's parameters over groups of `shard_size` ranks, or all ranks, in place. See `Context.shard`."""
    from torch.distributed.fsdp import fully_shard

    refuse_options(options, fully_shard, _NOT_TAKEN)
    chosen = _suitable(model, layers)
    _compare(model)
    _take_from_rank_0(model, device)
    if "mesh" not in options:
        options = {"mesh": _mesh(device.type, shard_size), **options}
    if options["mesh"].size() != dist.get_world_size():
        raise InputError(
            f"mesh has {options['mesh'].size()} ranks. Expected all {dist.get_world_size()}, because each rank has "
            "samples of the step. Leave mesh out, or pass a mesh of all ranks.",
        )
    for part in (*chosen, model):
        fully_shard(part, **options)
    return model


def _mesh(kind: str, shard_size: int | None) -> DeviceMesh:
    """Return a mesh of all ranks, or a 2-D mesh: FSDP2 shards over its rows and replicates over its columns."""
    from torch.distributed.device_mesh import DeviceMesh

    assert dist.group.WORLD is not None, "the context has a group"
    if shard_size in (None, dist.get_world_size()):
        return DeviceMesh.from_group(dist.group.WORLD, kind)
    rows = torch.arange(dist.get_world_size()).view(-1, shard_size)
    return DeviceMesh(kind, rows, mesh_dim_names=("replicate", "shard"))


def groups_of(model: nn.Module, layers: Layers | None) -> list[list[nn.Parameter]]:
    """Return the parameters that FSDP2 gathers together: those of the root, then those of each layer.

    Raises:
        InputError: FSDP2 can't shard the model in this way, see `Context.shard`.
    """
    groups: list[list[nn.Parameter]] = []
    for part in (*_suitable(model, layers), model):  # inner layers first
        taken = {parameter for group in groups for parameter in group}
        groups.insert(0, [parameter for parameter in part.parameters() if parameter not in taken])
    return groups


def _suitable(model: nn.Module, layers: Layers | None) -> list[nn.Module]:
    _refuse_model(model)
    chosen = _chosen(model, layers)
    _refuse_ties(model, chosen)
    return chosen


def _refuse_model(model: nn.Module) -> None:
    wrapped = [name for name, part in model.named_modules() if isinstance(part, DistributedDataParallel)]
    shared = [name for name, part in model.named_modules() if holds_shards(part)]
    lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
    scalars = [name for name, tensor in model.named_parameters() if name not in lazy and not tensor.dim()]
    for names, says in (
        (lazy, "has lazy parameters, which have no shape until the model has run once:"),
        (wrapped, "is wrapped in DistributedDataParallel at"),
        (shared, "is already sharded at"),
        (scalars, "has parameters without a dimension, which can't be sharded:"),
    ):
        if names:
            raise InputError(
                f"The model {says} {names[0] or 'itself'}. Expected a plain model whose parameters have at least "
                "one dimension. Call ctx.shard once, with the plain model.",
            )


def _chosen(model: nn.Module, layers: Layers | None) -> list[nn.Module]:
    if layers is None:
        return []
    is_class = isinstance(layers, type) or (isinstance(layers, tuple) and all(isinstance(one, type) for one in layers))
    if not is_class and (not callable(layers) or isinstance(layers, nn.Module)):
        raise InputError(
            f"layers is {layers!r:.80}. Expected a class of modules, a tuple of classes, or a function that returns "
            "True for some modules. Pass the class itself, not its name or an instance.",
        )
    is_one = (lambda part: isinstance(part, cast("type", layers))) if is_class else cast("Any", layers)
    chosen = [part for part in model.modules() if part is not model and is_one(part)]
    if not chosen:
        kinds = sorted({type(part).__name__ for part in model.modules() if part is not model})
        raise InputError(
            f"layers={layers!r} selects no module of the model. Expected a class, a tuple of classes, or a function "
            f"that returns True for some modules. The model has {', '.join(kinds) or 'no modules inside'}.",
        )
    return chosen[::-1]


def _refuse_ties(model: nn.Module, chosen: Iterable[nn.Module]) -> None:
    """Raise InputError if two groups share a parameter. Each group would shard its own copy and untie it."""
    alone = {path: part for path, part in model.named_modules(remove_duplicate=False) if part in set(chosen)}
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        path = max((path for path in alone if name.startswith(f"{path}.")), key=len, default="")
        owner = alone.get(path, model)
        known, group = owners.setdefault(tensor, (name, owner))
        if group is not owner:
            raise InputError(
                f"{name} is the same parameter as {known}, but they are in different layers. Expected each "
                "parameter in one layer. Exclude both modules from layers, so the parameter is sharded with the "
                "rest of the model.",
            )


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _compare(model: nn.Module) -> None:
    own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors_of(model).items()]
    everyones = gathered_objects(own)
    others = [str(rank) for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if others:
        raise InputError(
            f"The model of rank {', '.join(others)} differs from rank 0's. Expected the same names, shapes and "
            "dtypes. Build the same model on all ranks.",
        )


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's tensors one at a time, because the whole model need not fit on a device."""
    if dist.get_world_size() == 1:
        return
    at = exchange_device(device)
    for tensor in _tensors_of(model).values():
        if tensor.is_meta or not tensor.numel():
            continue  # tensors on the meta device have no values yet
        sent = tensor.detach().to(at).contiguous()
        # Send bytes, because a backend need not support every dtype.
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if dist.get_rank():
            with torch.no_grad():
                tensor.copy_(sent)
