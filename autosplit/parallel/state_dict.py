"""Rename a state dict so that it loads into a module that is wrapped or compiled differently."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autosplit.errors import InputError, shown

_WRAPPED = "module"
"""Name of the module inside nn.DataParallel, DistributedDataParallel and BalancedDataParallel."""
_COMPILED = "_orig_mod"
"""Name of the module inside a compiled module. No layer has this name, but a layer named `module` is common."""


def matching_state_dict(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of a state dict so that it loads into a module.

    Wrappers add ``module.`` to the names, and torch.compile adds ``_orig_mod.``. This function adds or removes these
    parts. A layer that is called `module` keeps its name::

        wrapper.load_state_dict(autosplit.matching_state_dict(wrapper, torch.load(path, weights_only=True)))

    Args:
        state: The state dict of the same model, wrapped or compiled in any way.

    Returns:
        A new dict with the same tensors. Entries that the module lacks are kept, and `load_state_dict` reports them.

    Raises:
        InputError: `state` is not a state dict, for example a whole checkpoint.
    """
    _check(module, state)
    wanted = {_bare(name) for name in module.state_dict(keep_vars=True)}
    shift = _best_shift(wanted, {_bare(name) for name in state})
    # A wrapper and its inner layer have the same bare path. The inner layer comes later and has the tensors.
    places = {_bare(path): path for path, _ in module.named_modules(remove_duplicate=False)}
    renamed = {name: _compiled(_shifted(_bare(name), shift), places) for name in state}
    often = Counter(renamed.values())
    twins = [name for name, new in renamed.items() if often[new] > 1]
    if twins:
        raise InputError(
            f"The state dict names one tensor several times: {shown(twins)}. Expected each tensor once. Remove the "
            "names that come from another state dict.",
        )

    def layer(path: str) -> str:
        moved = _shifted(_bare(path), shift)
        return places[moved] if moved in places else _compiled(moved, places)

    return _with_names(state, renamed, layer)


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict without the ``_orig_mod.`` that torch.compile adds to names."""
    state = module.state_dict()
    return _with_names(state, {name: _bare(name) for name in state}, _bare)


def _with_names(state: Mapping[str, Any], names: Mapping[str, str], layer: Callable[[str], str]) -> dict[str, Any]:
    result: OrderedDict[str, Any] = OrderedDict((names[name], value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # Set an attribute, as Module.state_dict does. If a wrapper and its inner layer get the same name, the layer's
        # metadata wins, because it comes later.
        moved = OrderedDict((layer(path), known) for path, known in metadata.items())
        result._metadata = moved  # type: ignore[attr-defined]  # noqa: SLF001
    return result


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _depth(name: str) -> int:
    parts = name.split(".")
    return next((index for index, part in enumerate(parts) if part != _WRAPPED), len(parts))


def _shifted(name: str, shift: int) -> str:
    """Add ``module.`` to a name `shift` times. If `shift` is negative, remove up to that many."""
    if shift >= 0:
        return ".".join([_WRAPPED] * shift + ([name] if name else []))
    return ".".join(name.split(".")[-shift:]) if _depth(name) >= -shift else name


def _best_shift(wanted: set[str], given: set[str]) -> int:
    """Return how many more wrappers the module has than the state: the smallest shift with the most equal names."""
    out, into = (max((_depth(name) for name in names), default=0) for names in (given, wanted))

    def meeting(shift: int) -> tuple[int, int]:
        moved = {_shifted(name, shift) for name in given}
        return len(moved & wanted) if len(moved) == len(given) else -1, -abs(shift)

    return max(range(-out, into + 1), key=meeting)


def _compiled(name: str, places: Mapping[str, str]) -> str:
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        place = places.get(".".join(parts[:end]))
        if place is not None:
            return ".".join([*([place] if place else []), *parts[end:]])
    raise AssertionError("the module itself has the path ''")


def _check(module: nn.Module, state: Mapping[str, Any]) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"module is a {type(module).__name__}. Expected an nn.Module. Pass the module first, then the state dict.",
        )
    if isinstance(state, nn.Module):
        raise InputError(
            f"state is a module, a {type(state).__name__}. Expected its state dict. Pass the result of its "
            "state_dict().",
        )
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InputError(
            f"state is {shown(state)}. Expected a state dict with names and tensors. Pass the result of "
            "model.state_dict().",
        )
    inside = [name for name, value in state.items() if _is_nested_state(name, value)]
    if inside:
        raise InputError(
            f"state has the keys {shown(list(state))}. Expected names of parameters. This is a whole checkpoint, so "
            f"pass the state dict in it, state[{inside[0]!r}].",
        )
    if state and not any(isinstance(value, Tensor) or is_extra(name) for name, value in state.items()):
        raise InputError(
            f"state has the keys {shown(list(state))} and no tensor. Expected names of parameters with their "
            "tensors. Pass the result of model.state_dict().",
        )


def is_extra(name: str) -> bool:
    """Return whether a name is the extra state of a layer, which may have any type."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_nested_state(name: str, value: Any) -> bool:
    if is_extra(name) or not isinstance(value, Mapping):
        return False
    return any(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items())
