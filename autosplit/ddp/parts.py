"""What a checkpoint keeps of models, optimizers and the like, and whether what it holds is theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.sharding import is_shard, is_sharded
from autosplit.errors import CheckpointError
from autosplit.schedule import ScheduledBatchSampler
from autosplit.states import matching_state_dict

__all__ = ["fitting", "is_shared_out", "placed", "state_of", "tensors_in", "with_tensors"]

_SHOWN = 5
"""Of names that do not fit, so many are told."""


def state_of(part: Any) -> Any:
    """Return what is kept of a part."""
    if isinstance(part, DistributedDataParallel):
        part = part.module  # named as a plain model's, for whoever loads it
    return part.state_dict() if hasattr(part, "state_dict") else part


def is_shared_out(part: Any) -> bool:
    """Tell whether a rank alone can't say what is in a model, an optimizer, or a plain value."""
    if isinstance(part, nn.Module):
        return is_sharded(part)
    if isinstance(part, torch.optim.Optimizer):
        return any(is_shard(tensor) for group in part.param_groups for tensor in group["params"])
    return any(is_shard(tensor) for _, tensor in tensors_in(part))


def fitting(name: str, part: Any, found: Mapping[str, Any]) -> Any:
    """Return the state of a part, under the part's own names.

    Args:
        name: What the part is called in the checkpoint.
        part: What is loaded.
        found: What the checkpoint holds, by name.

    Raises:
        AutosplitError: It does not fit.
    """
    if name not in found:
        raise CheckpointError(
            f"it holds {', '.join(map(repr, found)) or 'nothing'}; expected {name!r} as well; leave {name}= out, or "
            "load the file that has it"
        )
    state = found[name]
    if isinstance(part, nn.Module):
        state = matching_state_dict(part, state)
        _require_fit(name, part, state)
    elif isinstance(part, torch.optim.Optimizer):
        _require_groups(name, part, state)
    elif isinstance(part, ScheduledBatchSampler):
        part.check_state_dict(state)
    return state


def _require_fit(name: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    own = module.state_dict(keep_vars=True)
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    given = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    wrong = [key for key in shapes if key in given and shapes[key] != given[key]]
    for says, keys in (
        ("lacks", [key for key in own if key not in state]),
        ("has in addition", [key for key in state if key not in own]),
        ("has in another shape", [f"{key} {tuple(given[key])} for {tuple(shapes[key])}" for key in wrong]),
    ):
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            raise CheckpointError(
                f"{name!r} is of another model: it {says} {', '.join(keys[:_SHOWN])}{more}; expected the very names "
                "and shapes; build the model as it was when it was saved"
            )


def _require_groups(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups] if isinstance(groups, list) else None
    if own != theirs:
        raise CheckpointError(
            f"{name!r} is of another optimizer: its groups hold {theirs} parameters; expected {own}; make the "
            "optimizer of the same parameters as when it was saved"
        )


# Tensors within states


def placed(part: Any, state: Any, place: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
    """Put each tensor of a state where the part has it.

    Args:
        part: A model, an optimizer, or something else with a state.
        state: A state that fits.
        place: Makes of a tensor what is loaded, given the shared-out tensor of the part that it belongs to, or None.
    """
    if isinstance(part, nn.Module):
        tensors = part.state_dict(keep_vars=True)
        return with_tensors(state, lambda path, value: place(value, _shard_like(tensors.get(path[0]), value)))
    if isinstance(part, torch.optim.Optimizer):
        parameters = [tensor for group in part.param_groups for tensor in group["params"]]

        def with_parameter(path: tuple[Any, ...], value: Tensor) -> Tensor:
            of_parameter = path[0] == "state" and isinstance(path[1], int) and path[1] < len(parameters)
            return place(value, _shard_like(parameters[path[1]], value) if of_parameter else None)

        return with_tensors(state, with_parameter)
    return with_tensors(state, lambda _, value: place(value, None))


def _shard_like(own: Any, value: Tensor) -> Tensor | None:
    return own if is_shard(own) and own.shape == value.shape else None


def with_tensors(value: Any, change: Callable[[tuple[Any, ...], Tensor], Any], place: tuple[Any, ...] = ()) -> Any:
    """Copy a state, with other tensors in it.

    Args:
        value: Dicts, lists and tuples of tensors and other things.
        change: Returns what stands for a tensor, given the keys that lead to it.
        place: The keys that lead to `value`.
    """
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, dict):
        made = value.copy()
        vars_of = getattr(value, "__dict__", None)  # a module's state dict says there what versions its layers have
        if vars_of:
            made.__dict__.update(vars_of)
        for key, item in value.items():
            made[key] = with_tensors(item, change, (*place, key))
        return made
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, change, (*place, index)) for index, item in enumerate(value))
    return value


def tensors_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Go through the tensors of a state, each with the keys that lead to it."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []
    with_tensors(value, lambda place, tensor: found.append((place, tensor)))
    return iter(found)
