"""Collect the states of a checkpoint's parts, such as models and optimizers, and verify that a state fits a part."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.sharded_tensors import is_shard, is_sharded
from autosplit.errors import CheckpointError
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.state_dict import is_extra, matching_state_dict, plain_state_dict
from autosplit.text import listed

_SHOWN = 5
"""The number of names that an error message lists at most."""
_NEWER = frozenset(("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"))
"""Options that newer torch versions added to several optimizers. Older states lack them."""
_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg", "acc_delta"),
    *("grad_avg", "ax", "prev", "step_size"),
}
"""State tensors of torch's optimizers that have the shape of their parameter."""


def state_of(part: Any) -> Any:
    """Return the state of a part, or a plain value unchanged."""
    if isinstance(part, DistributedDataParallel):
        part = part.module  # saved under the names of the plain model
    if isinstance(part, nn.Module):
        return plain_state_dict(part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def is_shared_out(part: Any) -> bool:
    """Return whether a model, an optimizer or a value has sharded tensors."""
    if isinstance(part, nn.Module):
        return is_sharded(part)
    if isinstance(part, torch.optim.Optimizer):
        return any(is_shard(tensor) for group in part.param_groups for tensor in group["params"])
    return any(is_shard(tensor) for _, tensor in tensors_in(part))


def is_loadable(name: str, part: Any) -> bool:
    """Return whether a state can be loaded into a part.

    Raises:
        CheckpointError: The part has a state, but no `load_state_dict`.
    """
    if hasattr(part, "load_state_dict"):
        return True
    if hasattr(part, "state_dict"):
        raise CheckpointError(
            f"{name!r} is a {type(part).__name__} with state_dict() and without load_state_dict(). Expected both "
            f"methods. Leave {name}= out, and load its state from the returned dict. No rank was changed.",
            code="checkpoint-part-not-loadable",
        )
    return False


def is_verified(part: Any) -> bool:
    """Return whether `fitting` verifies everything that this kind of part loads, so loading can't fail."""
    return isinstance(part, nn.Module | torch.optim.Optimizer | ScheduledBatchSampler | torch.amp.GradScaler)


def fitting(name: str, part: Any, found: Mapping[str, Any]) -> Any:
    """Return a part's state from a checkpoint, under the part's names. Raise CheckpointError if it does not fit."""
    if name not in found:
        raise CheckpointError(
            f"It contains {', '.join(map(repr, found)) or 'nothing'}. Expected {name!r}, too. Leave {name}= out, or "
            "load the file that contains it",
            code="checkpoint-part-missing",
        )
    state = found[name]
    if isinstance(part, nn.Module):
        state = matching_state_dict(part, state)
        _require_fit(name, part, state)
    elif isinstance(part, torch.optim.Optimizer):
        _require_groups(name, part, state)
        _require_moments(name, part, state)
    elif isinstance(part, ScheduledBatchSampler):
        part.check_state_dict(state)
    elif isinstance(part, torch.amp.GradScaler):
        _require_scale(name, part, state)
    elif isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        _require_scheduler(name, part, state)
    return state


def _require_fit(name: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    own = module.state_dict(keep_vars=True)
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    given = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    wrong = [key for key in shapes if key in given and shapes[key] != given[key]]
    for says, keys in (
        ("lacks", [key for key in own if key not in state]),
        ("has unknown", [key for key in state if key not in own]),
        ("has with a different shape", [f"{key} {tuple(given[key])} for {tuple(shapes[key])}" for key in wrong]),
        (
            "has something other than a tensor at",
            [key for key in shapes if key in state and key not in given and not is_extra(key)],
        ),
    ):
        if keys:
            raise CheckpointError(
                f"{name!r} is the state of another model. It {says} {listed(keys, _SHOWN)}. Expected the model's "
                "names and shapes. Build the model as it was when it was saved",
                code="checkpoint-other-model",
            )


def _require_groups(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = None if groups is None else [len(group["params"]) for group in groups]
    if groups is None or own != theirs:
        raise CheckpointError(
            f"{name!r} is the state of another optimizer. Its groups have {theirs} parameters. Expected {own}. "
            "Create the optimizer with the same parameters as when it was saved",
            code="checkpoint-optimizer-groups",
        )
    foreign = _foreign_options(optimizer)
    for number, group in enumerate(groups):
        found = [f"lacks {key}" for key in optimizer.defaults if key not in {*group, *_NEWER}]
        found += [f"has {key}" for key in group if key in foreign]
        found += _other_state(optimizer, group, state["state"])
        if found:
            raise CheckpointError(
                f"{name!r} is the state of another optimizer. Its group {number} {found[0]}. Expected the state of "
                f"a {type(optimizer).__name__}. Create an optimizer of the class that was saved, or leave {name}= "
                "out",
                code="checkpoint-optimizer-class",
            )


def _foreign_options(optimizer: torch.optim.Optimizer) -> set[str]:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return set()
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    options = {key for kind in kinds for key in inspect.signature(kind).parameters}
    return options - {*inspect.signature(type(optimizer)).parameters, *_NEWER}


def _other_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], states: Mapping[Any, Any]) -> list[str]:
    """Return how a group's state differs from the state that the optimizer's class creates with the group's options.

    A state with other names loads, but fails at the next step. Optimizers of other packages and LBFGS are not compared.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind is torch.optim.LBFGS:
        return []
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    make: Any = kind
    sample = make([parameter])
    sample.param_groups[0].update({key: value for key, value in group.items() if key in sample.defaults})
    sample.param_groups[0].update(dict.fromkeys(("fused", "capturable"), False))  # these need a GPU
    sample.step()
    made = set(sample.state[parameter])
    for key in group["params"]:
        saved = set(states.get(key, {}))
        if saved and saved != made:
            return [f"lacks {name}" for name in sorted(made - saved)] + [f"has {name}" for name in sorted(saved - made)]
    return []


def _require_moments(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    kinds = set(type(optimizer).__mro__) - {torch.optim.Optimizer}
    if not any(kind.__module__.startswith("torch.optim.") for kind in kinds):
        return  # other packages may use these names for other tensors
    keys = chain.from_iterable(group["params"] for group in state["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(keys, own, strict=True):
        for what, value in state["state"].get(key, {}).items():
            if what in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{name!r} is the state of another optimizer. {what} of parameter {key} has the shape "
                    f"{tuple(value.shape)}, and {type(optimizer).__name__} needs {tuple(parameter.shape)}. Create "
                    "the optimizer with the same parameters as when it was saved",
                    code="checkpoint-optimizer-state",
                )


def _require_scale(name: str, scaler: torch.amp.GradScaler, state: Any) -> None:
    lacks = [key for key in scaler.state_dict() if key not in state] if scaler.is_enabled() else []
    if lacks:
        raise CheckpointError(
            f"{name!r} is not the state of an enabled GradScaler. It lacks {', '.join(lacks)}. Leave {name}= out, "
            "or load the file that has it",
            code="checkpoint-scaler",
        )


def _require_scheduler(name: str, scheduler: torch.optim.lr_scheduler.LRScheduler, state: Any) -> None:
    """Compare public names, because LRScheduler.load_state_dict accepts any dict and fails at the next step."""
    own = {key: value for key, value in scheduler.state_dict().items() if not key.startswith("_")}
    lacks = [key for key in own if key not in state]
    rates, theirs = len(own.get("base_lrs", ())), len(state.get("base_lrs", ())) if not lacks else 0
    if lacks or rates != theirs:
        found = f"it lacks {', '.join(lacks)}" if lacks else f"it has {theirs} base_lrs, and the scheduler {rates}"
        raise CheckpointError(
            f"{name!r} is the state of another scheduler: {found}. Expected the state of a "
            f"{type(scheduler).__name__}. Create a scheduler of the class that was saved, or leave {name}= out",
            code="checkpoint-scheduler",
        )


def placed(part: Any, state: Any, place: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
    """Copy a state and replace each tensor with the result of `place`.

    Its arguments are the tensor, and the part's sharded tensor or None.
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
