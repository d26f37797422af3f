"""A state dict under the names that a module has, whatever it was wrapped in when it was saved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autosplit.errors import InputError, shown

_WRAPPED = "module"
"""Name of the module inside nn.DataParallel, DistributedDataParallel and BalancedDataParallel."""
_COMPILED = "_orig_mod"
"""Name of the module inside torch.compile's. Nobody gives a layer this name, while `module` is quite usual."""


def matching_state_dict(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename what a state dict holds so that it loads into a module.

    A plain module, one in nn.DataParallel, DistributedDataParallel or BalancedDataParallel, and a compiled one, in
    any nesting, differ in the ``module.`` and ``_orig_mod.`` of their names. Which of these to add or remove is
    judged by the names that the module itself has, so a layer that is called `module` keeps its name::

        wrapper.load_state_dict(autosplit.matching_state_dict(wrapper, torch.load(path, weights_only=True)))

    Args:
        module: What the state is for.
        state: The state dict of the same model, wrapped in the same or in other things.

    Returns:
        A new dict with the very same tensors. Names that the module lacks are in it, too: `load_state_dict` reports
        them, and those that are missing, or lets them pass with ``strict=False``.

    Raises:
        InputError: Something that is no state dict, such as a whole checkpoint.
    """
    _check(module, state)
    wanted = {_bare(name) for name in module.state_dict(keep_vars=True)}
    shift = _best_shift(wanted, {_bare(name) for name in state})
    # Of two layers with one bare path the inner one, which comes later, has the tensors.
    places = {_bare(path): path for path, _ in module.named_modules(remove_duplicate=False)}
    renamed = {name: _compiled(_shifted(_bare(name), shift), places) for name in state}
    often = Counter(renamed.values())
    twins = [name for name, new in renamed.items() if often[new] > 1]
    if twins:
        raise InputError(
            f"the state dict has {shown(twins)}, which are names of one tensor; expected each tensor once; "
            "take out the names that are left from another state",
            code="state-dict-tied",
        )

    def layer(path: str) -> str:
        moved = _shifted(_bare(path), shift)
        return places[moved] if moved in places else _compiled(moved, places)

    return _with_names(state, renamed, layer)


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict under the names that it has before it, or a part of it, is compiled."""
    state = module.state_dict()
    return _with_names(state, {name: _bare(name) for name in state}, _bare)


def _with_names(state: Mapping[str, Any], names: Mapping[str, str], layer: Callable[[str], str]) -> dict[str, Any]:
    """Rename the tensors of a state, and the layers whose versions it tells: what an older torch saved is known so."""
    result: OrderedDict[str, Any] = OrderedDict((names[name], value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # An attribute, as Module.state_dict leaves it. A wrapper comes before what is in it, which takes its place.
        moved = OrderedDict((layer(path), known) for path, known in metadata.items())
        result._metadata = moved  # type: ignore[attr-defined]  # noqa: SLF001
    return result


def _bare(name: str) -> str:
    """Return a name without what torch.compile put into it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _depth(name: str) -> int:
    """Count the wrappers that a name begins with, or layers called as they are."""
    parts = name.split(".")
    return next((index for index, part in enumerate(parts) if part != _WRAPPED), len(parts))


def _shifted(name: str, shift: int) -> str:
    """Put a name into that many more wrappers, or take it out; one that is in fewer of them stays."""
    if shift >= 0:
        return ".".join([_WRAPPED] * shift + ([name] if name else []))
    return ".".join(name.split(".")[-shift:]) if _depth(name) >= -shift else name


def _best_shift(wanted: set[str], given: set[str]) -> int:
    """Return how many more wrappers the module is in than the state was: where most names meet, the least change."""
    out, into = (max((_depth(name) for name in names), default=0) for names in (given, wanted))

    def meeting(shift: int) -> tuple[int, int]:
        moved = {_shifted(name, shift) for name in given}
        return len(moved & wanted) if len(moved) == len(given) else -1, -abs(shift)

    return max(range(-out, into + 1), key=meeting)


def _compiled(name: str, places: Mapping[str, str]) -> str:
    """Put into a name what torch.compile put into those of the layer that it belongs to."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        place = places.get(".".join(parts[:end]))
        if place is not None:
            return ".".join([*([place] if place else []), *parts[end:]])
    raise AssertionError("the module itself has the path ''")


def _check(module: nn.Module, state: Mapping[str, Any]) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"module is a {type(module).__name__}; expected an nn.Module; pass the module first, then the state dict",
            code="module-type",
        )
    if isinstance(state, nn.Module):
        raise InputError(
            f"state is a module, a {type(state).__name__}; expected its state dict; pass what its state_dict() returns",
            code="state-is-module",
        )
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InputError(
            f"state is {shown(state)}; expected a state dict, names to tensors; pass what model.state_dict() returned",
            code="state-type",
        )
    inside = [name for name, value in state.items() if _is_nested_state(name, value)]
    if inside:
        raise InputError(
            f"state has the keys {shown(list(state))}; expected names of parameters; it is a whole checkpoint: "
            f"pass state[{inside[0]!r}], the state dict in it",
            code="state-is-checkpoint",
        )
    if state and not any(isinstance(value, Tensor) or is_extra(name) for name, value in state.items()):
        raise InputError(
            f"state has the keys {shown(list(state))} and no tensor; expected names of parameters with their tensors; "
            "pass what model.state_dict() returned",
            code="state-without-tensors",
        )


def is_extra(name: str) -> bool:
    """Tell whether a name is a layer's own extra state, which may be anything."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_nested_state(name: str, value: Any) -> bool:
    if is_extra(name) or not isinstance(value, Mapping):
        return False
    return any(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items())
