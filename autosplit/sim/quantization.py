"""Reject quantised weights and low-bit optimizers, because their kernels cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.errors import WorkloadError
from autosplit.torch_versions import is_wrapper_subclass
from autosplit.workload.workload import Workload, modules_of, optimizers_of

LAYERS = frozenset({"auto_gptq", "awq", "bitsandbytes", "gptqmodel", "hqq"})
"""Packages with layers that contain packed weights. Their kernels run only on GPUs."""

OPTIMIZERS = frozenset({"bitsandbytes", "torchao"})
"""Packages with optimizers that store low-bit state. Their own kernels update it."""


def refuse_quantized(workload: Workload) -> None:
    """Reject quantised layers, parameters and optimizers that fake tensors cannot run.

    Frozen parameters, adapters and optimizer states that torch's own ops update are supported.

    Raises:
        WorkloadError: A layer or optimizer has its own kernels, as bitsandbytes has, or a parameter wraps other
            tensors.
    """
    for module in modules_of(workload):
        for name, part in module.named_modules():
            if _package(type(part)) in LAYERS:
                _refuse(f"Layer {name or 'model'} is {_name(type(part))}, with quantised weights")
        for name, parameter in module.named_parameters():
            if is_wrapper_subclass(parameter):
                _refuse(f"Parameter {name} is a {type(parameter).__name__}, which wraps other tensors")
    for kind in _optimizer_classes(workload):
        if _package(kind) in OPTIMIZERS:
            _refuse(f"The optimizer is {_name(kind)}, which has its own kernels")


def _refuse(what: str) -> None:
    raise WorkloadError(
        f"{what}. autosplit can't predict its memory on simulated GPUs. Expected plain tensors and torch's own ops. "
        "For bitsandbytes in NF4, plan with Nf4Linear and named_optimizer (docs/lora.md). Or tune on the GPU "
        "(--devices cuda).",
    )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _name(kind: type) -> str:
    return f"{_package(kind)}'s {kind.__qualname__}"


def _optimizer_classes(workload: Workload) -> Iterator[type]:
    """Yield the classes of the workload's optimizers. A factory is called with one small parameter."""
    for given in optimizers_of(workload).items:
        made: Any = given.func if isinstance(given, partial) else given
        if not isinstance(made, (type, torch.optim.Optimizer)) and callable(made):
            try:
                made = given([nn.Parameter(torch.zeros(1))])
            except Exception:  # noqa: BLE001, S112  # it may need the model's parameters, and a real error appears later
                continue
        yield made if isinstance(made, type) else type(made)
