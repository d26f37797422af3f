"""Refuse quantised weights and optimizers of few bits whose kernels can't be followed on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.errors import WorkloadError
from autosplit.torch_versions import is_wrapper_subclass
from autosplit.workload.workload import Workload

LAYERS = frozenset({"auto_gptq", "awq", "bitsandbytes", "gptqmodel", "hqq"})
"""Packages whose layers hold packed weights, and kernels for them that run on GPUs alone."""

OPTIMIZERS = frozenset({"bitsandbytes", "torchao"})
"""Packages whose optimizers hold states of few bits, which kernels of theirs update."""


def refuse_quantized(workload: Workload) -> None:
    """Refuse what neither fake tensors nor the processor can run as a GPU does, by its name.

    Frozen parameters, adapters beside them and states that torch's own ops update are followed like all else.

    Raises:
        WorkloadError: A layer or an optimizer of such a package, or a weight that is a tensor around other tensors.
    """
    for module in workload.modules:
        for name, part in module.named_modules():
            if _package(type(part)) in LAYERS:
                _refuse(f"layer {name or 'model'} is {_name(type(part))}, with quantised weights")
        for name, parameter in module.named_parameters():
            if is_wrapper_subclass(parameter):
                _refuse(f"parameter {name} is a {type(parameter).__name__}, which holds other tensors")
    for kind in _optimizer_classes(workload):
        if _package(kind) in OPTIMIZERS:
            _refuse(f"the optimizer is {_name(kind)}, which has kernels of its own")


def _refuse(what: str) -> None:
    raise WorkloadError(
        f"{what}: on simulated cards and the processor its memory can't be told; expected plain tensors, which torch's "
        "own ops update; plan with the plain kind, or tune on the card (--devices cuda)",
        code="quantized-parameter",
    )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _name(kind: type) -> str:
    return f"{_package(kind)}'s {kind.__qualname__}"


def _optimizer_classes(workload: Workload) -> Iterator[type]:
    """Yield the classes of a workload's optimizers; a factory's is known by what it makes of a single number."""
    for given in workload.optimizers.items:
        made: Any = given.func if isinstance(given, partial) else given
        if not isinstance(made, (type, torch.optim.Optimizer)) and callable(made):
            try:
                made = given([nn.Parameter(torch.zeros(1))])
            except Exception:  # noqa: BLE001, S112  # one that needs the model's own parameters; what is wrong shows later
                continue
        yield made if isinstance(made, type) else type(made)
