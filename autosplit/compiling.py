"""Modules that torch compiled: told apart, taken back to their eager form, and compiled again as they were.

A compiled module can be neither replicated nor followed op by op: its memory and time are predicted in its eager form.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["compiled_like", "eager_of", "has_compiled_parts", "is_compiled", "with_eager_parts"]


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module itself is compiled: the whole, in place, or its own ``forward``."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    forward = vars(module).get("forward")
    return isinstance(_eager(module), nn.Module) or in_place or hasattr(forward, "_torchdynamo_orig_callable")


def has_compiled_parts(module: nn.Module) -> bool:
    """Tell whether a module or a part of it is compiled."""
    return any(is_compiled(part) for part in module.modules())


def eager_of(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile(module)`` was given; any other module as it is."""
    inner = _eager(module)
    return inner if isinstance(inner, nn.Module) else module


def with_eager_parts(module: nn.Module) -> nn.Module:
    """Put the eager form of each compiled part in its place.

    Args:
        module: A copy: it is changed. One compiled in place is eager already where it was copied.
    """
    module = eager_of(module)
    for part in module.modules():
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = eager_of(child)
    return module


def compiled_like(original: nn.Module, module: nn.Module) -> nn.Module:
    """Compile a module as another one was.

    Args:
        original: Compiled, by ``torch.compile(module)`` with its options or ``module.compile()``.
        module: Eager.
    """
    if not isinstance(_eager(original), nn.Module):
        module.compile()
        return module
    optimized: Any = type(original)
    compiled: nn.Module = optimized(module, vars(original)["dynamo_ctx"])
    return compiled


def _eager(module: nn.Module) -> Any:
    # Not getattr: a compiled module hands on what it does not know to the eager one, and so may others.
    return module._modules.get("_orig_mod")
