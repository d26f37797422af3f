"""Detect modules that torch compiled, return their eager form, and compile them again with the same options.

Memory and time are predicted for the eager form, because a compiled module can be neither replicated nor traced.
TorchScript modules have no eager form, so they are not supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class CompiledTimes:
    """Published times of compiled training steps, divided by the times of the same steps in eager mode.

    Attributes:
        pairs: Number of published pairs. A pair has the same model, GPU and batch.
    """

    pairs: int
    least: float
    median: float
    most: float


COMPILED_TIMES = {
    "transformer": CompiledTimes(pairs=14, least=0.54, median=0.76, most=1.27),
    "CNN": CompiledTimes(pairs=10, least=0.63, median=0.81, most=1.14),
}
"""The pairs of benchmarks/compiled.csv by kind of model, in bfloat16 and float16."""


FUSED_SHARE = 0.27
"""Fraction of their eager time that kernels without products take after torch.compile fuses them, for transformers.

Steps of four models with torch 2.5 or later give 0.10 to 0.30, and the step times are then within 8%
(``benchmarks/results/published_compiled.json``).
"""


def fused_share_of(modules: Iterable[nn.Module]) -> float:
    """Return the time of fused kernels as a fraction of their eager time: `FUSED_SHARE`, or 1 if not simulated.

    Compiled models are simulated unless most parameters are in convolutions. Published convolutional networks gain too
    little and too irregularly for one fraction (`COMPILED_TIMES`).
    """
    modules = list(modules)
    has_fusion = any(map(has_compiled_parts, modules)) and not _is_convolutional(modules)
    return FUSED_SHARE if has_fusion else 1.0


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module itself is compiled: by ``torch.compile``, in place, or through its ``forward``."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    forward = vars(module).get("forward")
    return isinstance(_eager(module), nn.Module) or in_place or hasattr(forward, "_torchdynamo_orig_callable")


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether a module or one of its submodules is compiled."""
    return any(is_compiled(part) for part in module.modules())


def scripted_part(module: nn.Module) -> str | None:
    """Describe the first TorchScript module inside a module, or return None.

    TorchScript keeps its tensors in C++. So a copy's tensors can't be replaced or trained.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"{f'its part {name}' if name else 'it'} is TorchScript (a {type(part).__name__})"
    return None


def eager_of(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)``. Return any other module unchanged."""
    inner = _eager(module)
    return inner if isinstance(inner, nn.Module) else module


def with_eager_parts(module: nn.Module) -> nn.Module:
    """Replace each compiled part of a copied module with its eager form, in place."""
    module = eager_of(module)
    for part in module.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            # torch drops this attribute in a copy, but a class with its own `__getstate__` may keep it.
            part._compiled_call_impl = None
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = eager_of(child)
    return module


def compiled_times_note(modules: Iterable[nn.Module]) -> str:
    """Return sentences on the predicted time and memory of a compiled model on simulated GPUs."""
    kind = "CNN" if _is_convolutional(list(modules)) else "transformer"
    times = COMPILED_TIMES[kind]
    published = (
        f"In {times.pairs} published pairs, compiled {kind}s in 16 bits took {times.least:.2f} to {times.most:.2f} of "
        f"the eager time (median {times.median:.2f})"
    )
    if kind == "CNN":
        return (
            "autosplit does not simulate torch.compile for CNNs, so it predicts memory and time of eager steps. "
            f"{published}"
        )
    return (
        "autosplit assumes that torch.compile fuses all kernels except matrix products, and that fused kernels "
        f"take {FUSED_SHARE:.0%} of their eager time. The predicted memory is that of an eager step. A compiled "
        f"step needs less. {published}"
    )


def _is_convolutional(modules: list[nn.Module]) -> bool:
    parts = [part for module in modules for part in module.modules()]
    own = [(part, sum(p.numel() for p in part.parameters(recurse=False))) for part in parts]
    in_convolutions = sum(count for part, count in own if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    return 2 * in_convolutions > sum(count for _, count in own)


def _eager(module: nn.Module) -> Any:
    # Do not use getattr, because compiled modules and other wrappers forward unknown attributes to their inner module.
    return None if isinstance(module, torch.jit.ScriptModule) else module._modules.get("_orig_mod")
