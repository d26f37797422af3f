"""Collect the states of a checkpoint's parts, such as models and optimizers, and verify that a state fits a part.

Note [States of torch]
torch.distributed.checkpoint.state_dict is not used. `set_state_dict` changes the optimizer before it finds an error,
raises TypeError for LBFGS, and keeps the `module.` of nn.DataParallel and BalancedDataParallel in the names.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.sharded_tensors import is_shard, is_sharded
from autosplit.errors import CheckpointError, one_line
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.state_dict import is_extra, matching_state_dict, plain_state_dict
from autosplit.text import listed

_SHOWN = 5
"""The number of names that an error message lists at most."""
_NEWER_OPTIONS = frozenset(("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"))
"""Options that newer torch versions added to several optimizers. Older states lack them."""


def state_of(name: str, part: Any) -> Any:
    """Return the state of a part, or a plain value unchanged."""
    if isinstance(part, DistributedDataParallel):
        part = part.module  # saved under the names of the plain model
    try:
        if isinstance(part, nn.Module):
            return plain_state_dict(part)
        return part.state_dict() if hasattr(part, "state_dict") else part
    except Exception as error:
        raise CheckpointError(f"{name!r} returned no state ({one_line(error)}). Leave {name}= out") from error


def has_shards(part: Any) -> bool:
    """Return whether a model, an optimizer or a value has sharded tensors."""
    if isinstance(part, nn.Module):
        return is_sharded(part)
    if isinstance(part, torch.optim.Optimizer):
        part = [group["params"] for group in part.param_groups]
    return any(is_shard(tensor) for _, tensor in tensors_in(part))


def is_loadable(name: str, part: Any) -> bool:
    """Return whether a part has a `load_state_dict`. Raise CheckpointError if it has only a `state_dict`."""
    if hasattr(part, "state_dict") and not hasattr(part, "load_state_dict"):
        raise CheckpointError(
            f"{name!r} is a {type(part).__name__} with state_dict() and without load_state_dict(). Expected both "
            f"methods. Leave {name}= out, and load its state from the returned dict",
        )
    return hasattr(part, "load_state_dict")


def is_verified(part: Any) -> bool:
    """Return whether `fitting` verifies everything that this kind of part loads, so loading can't fail."""
    return isinstance(part, nn.Module | torch.optim.Optimizer | ScheduledBatchSampler)


def fitting(name: str, part: Any, found: Mapping[str, Any]) -> Any:
    """Return a part's state from a checkpoint, under the part's names. Raise CheckpointError if it does not fit."""
    if name not in found:
        raise CheckpointError(
            f"It contains {', '.join(map(repr, found)) or 'nothing'}. Expected {name!r}, too. Leave {name}= out, or "
            "load the file that contains it",
        )
    state = found[name]
    difference = None
    if isinstance(part, nn.Module):
        state = matching_state_dict(part, state)
        difference = _model_difference(part, state)
    elif isinstance(part, torch.optim.Optimizer):
        difference = _optimizer_difference(part, state)
    elif isinstance(part, ScheduledBatchSampler):
        part.check_state_dict(state)
    elif isinstance(part, torch.amp.GradScaler | torch.optim.lr_scheduler.LRScheduler):
        # A scheduler loads any dict and fails at the next step. Private names differ between versions of torch.
        lacks = [key for key in part.state_dict() if not key.startswith("_") and key not in state]
        kind = ("an enabled " if isinstance(part, torch.amp.GradScaler) else "a ") + type(part).__name__
        difference = f"not the state of {kind}. It lacks {', '.join(lacks)}" if lacks else None
    if difference is not None:
        raise CheckpointError(
            f"{name!r} is {difference}. Create {name} with the settings of the saved one, or leave {name}= out",
        )
    return state


def _model_difference(module: nn.Module, state: Mapping[str, Any]) -> str | None:
    own = module.state_dict(keep_vars=True)
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    given = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    wrong = [key for key in shapes if key in given and shapes[key] != given[key]]
    differences = {
        "lacks": [key for key in own if key not in state],
        "has unknown": [key for key in state if key not in own],
        "has with a different shape": [f"{key} {tuple(given[key])} for {tuple(shapes[key])}" for key in wrong],
        "has something other than a tensor at": [
            key for key in shapes if key in state and key not in given and not is_extra(key)
        ],
    }
    found = [f"It {says} {listed(keys, _SHOWN)}" for says, keys in differences.items() if keys]
    return f"the state of another model. {found[0]}" if found else None


def _optimizer_difference(optimizer: torch.optim.Optimizer, state: Any) -> str | None:
    """Describe why a state does not fit an optimizer, as the end of an error message. None if it fits."""
    if not _is_optimizer_state(state):
        return f"a {type(state).__name__} without an optimizer's state and param_groups"
    saved, groups = state["state"], state["param_groups"]
    own, theirs = ([len(group.get("params", ())) for group in some] for some in (optimizer.param_groups, groups))
    if own != theirs:
        return f"the state of another optimizer. Its groups have {theirs} parameters. Expected {own}"
    for number, (group, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        found = [f"lacks {key}" for key in optimizer.defaults if key not in {*group, *_NEWER_OPTIONS}]
        for key, parameter in zip(group.get("params", ()), ours["params"], strict=True):
            if not found:  # report only the first difference
                found = _tensor_differences(optimizer, group, key, parameter, saved.get(key, {}))
        if found:
            needed = type(optimizer).__name__
            return f"the state of another optimizer. Its group {number} {found[0]}. Expected the state of a {needed}"
    return None


def _is_optimizer_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list | tuple) and all(isinstance(group, Mapping) for group in groups)


def _tensor_differences(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], key: Any, parameter: Tensor, saved: Mapping[str, Any]
) -> list[str]:
    """Compare a parameter's state with the state that torch's optimizer creates in a step with the group's options.

    A state with other names loads, but fails at the next step. LBFGS and optimizers of other packages are not compared.
    """
    kind: Any = next((kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")), None)
    if not saved or kind in (torch.optim.Optimizer, torch.optim.LBFGS):
        return []
    sample = nn.Parameter(torch.zeros([2 + dim for dim in range(parameter.dim())]))
    sample.grad = torch.zeros_like(sample)
    made = kind([sample])
    made.param_groups[0].update({key: value for key, value in group.items() if key in made.defaults})
    made.param_groups[0].update(dict.fromkeys(("fused", "capturable"), False))  # these need a GPU
    made.step()
    state = made.state[sample]
    if kind is type(optimizer) and {*state} != {*saved}:  # a class of the user may add other tensors
        lacks, has = sorted({*state} - {*saved}), sorted({*saved} - {*state})
        return [*(f"lacks {name}" for name in lacks), *(f"has {name}" for name in has)]
    return [
        f"does not fit: {name} of parameter {key} has the shape {tuple(value.shape)}"
        for name, value in saved.items()
        if isinstance(value, Tensor) and value.shape != parameter.shape
        if getattr(state.get(name), "shape", None) == sample.shape
    ]


def placed(part: Any, state: Any, place: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
    """Copy a state and replace each tensor with the result of `place`.

    Its arguments are the tensor, and the part's sharded tensor or None.
    """
    own: dict[tuple[Any, ...], Any] = {}
    if isinstance(part, nn.Module):
        own = {(name,): tensor for name, tensor in part.state_dict(keep_vars=True).items()}
    elif isinstance(part, torch.optim.Optimizer):
        parameters = [tensor for group in part.param_groups for tensor in group["params"]]
        own = {("state", index): tensor for index, tensor in enumerate(parameters)}

    def at(path: tuple[Any, ...], value: Tensor) -> Tensor:
        tensor: Any = own.get(path[:1], own.get(path[:2]))
        return place(value, tensor if is_shard(tensor) and tensor.shape == value.shape else None)

    return with_tensors(state, at)


def with_tensors(value: Any, change: Callable[[tuple[Any, ...], Tensor], Any], place: tuple[Any, ...] = ()) -> Any:
    """Copy a state and replace each tensor with the result of `change`, whose arguments are the keys and the tensor."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, dict):
        made = copy.copy(value)  # this keeps the attribute with the layers' versions
        for key, item in value.items():
            made[key] = with_tensors(item, change, (*place, key))
        return made
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, change, (*place, index)) for index, item in enumerate(value))
    return value


def tensors_in(value: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Return the tensors of a state with their keys."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []
    with_tensors(value, lambda place, tensor: found.append((place, tensor)))
    return found


def digest_of(state: Any) -> str:
    """Return a digest of the values in a state, which does not depend on the file format."""

    def summary(_: object, value: Tensor) -> str:
        dense = value.detach() if value.is_nested or value.layout == torch.strided else value.detach().to_dense()
        pieces = () if value.is_meta else dense.unbind() if value.is_nested else (dense.resolve_conj(),)
        flat = [piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data for piece in pieces]
        return f"{value.dtype} {'' if value.is_nested else tuple(value.shape)} {[zlib.crc32(one) for one in flat]}"

    return hashlib.sha256(repr(with_tensors(state, summary)).encode()).hexdigest()
