"""Restore the live tensors that a workload's functions use outside the model copy.

A loss function may read the live model's parameters (a penalty), its own weights or a teacher model. A backward of the
copy would leave gradients on them, some of them fake, and change their buffers. A loss with a memory bank or a running
mean also changes its own attributes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.runtime.interrupts import held_interrupts
from autosplit.torch_versions import FakeTensor
from autosplit.workload.fingerprint import named_by
from autosplit.workload.workload import Workload, modules_of

MOST_LOOKED_AT = 10_000
"""Maximum number of values that the search visits. A function may refer to a list of a million samples."""


@contextmanager
def untouched(workload: Workload) -> Iterator[None]:
    """Restore the gradients of the live model, and the gradients and buffers of what the workload's functions use.

    Also restore the attributes of modules and other objects that have tensors. Items of lists stay changed.

    Gradients are removed during the step, because a backward adds to them in place.
    """
    reached = list(_reached(workload))
    modules = [one for one in reached if isinstance(one, nn.Module)]
    tensors: list[Tensor] = [p for module in (*modules_of(workload), *modules) for p in module.parameters()]
    tensors += [one for one in reached if isinstance(one, Tensor) and one.is_leaf]
    gradients = {id(tensor): (tensor, tensor.grad) for tensor in tensors if tensor.requires_grad}
    attributes = [(attributes_dict, dict(attributes_dict)) for attributes_dict in _attributes(reached)]
    moving = [buffer for module in modules for buffer in module.buffers() if not buffer.requires_grad]
    moving += [
        value
        for _, before in attributes
        for value in before.values()
        if isinstance(value, Tensor) and not value.requires_grad
    ]
    unique = {id(one): one for one in moving if not one.is_meta and not isinstance(one, FakeTensor)}.values()
    buffers = [(one, one.clone()) for one in unique]
    for tensor, gradient in gradients.values():
        if gradient is not None:
            tensor.grad = None
    try:
        yield
    finally:
        with held_interrupts(), torch.no_grad():
            for attributes_dict, values in attributes:
                attributes_dict.clear()
                attributes_dict.update(values)
            for tensor, gradient in gradients.values():
                if tensor.grad is not gradient:
                    tensor.grad = gradient
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def saved_values(workload: Workload) -> list[Tensor]:
    """Return copies of the tensors that the workload's functions keep in buffers and other attributes."""
    reached = list(_reached(workload))
    buffers = [buffer for one in reached if isinstance(one, nn.Module) for buffer in one.buffers()]
    values = [value for attributes_dict in _attributes(reached) for value in attributes_dict.values()]
    return [value.detach().clone() for value in (*buffers, *values) if isinstance(value, Tensor)]


def _attributes(reached: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the attributes of each object that has tensors, and the buffers of each module."""
    parts = {id(part): part for one in reached for part in (one.modules() if isinstance(one, nn.Module) else (one,))}
    for part in parts.values():
        attributes = {} if isinstance(part, (Tensor, type)) else getattr(part, "__dict__", {})
        buffers = attributes.get("_buffers")
        if not isinstance(buffers, dict):  # TorchScript keeps buffers in C++, in an object without `clear`
            buffers = {}
        if any(isinstance(value, Tensor) for value in (*attributes.values(), *buffers.values())):
            yield attributes
        if buffers:
            yield buffers


def _reached(workload: Workload) -> Iterator[Any]:
    functions = (workload.loss_fn, workload.compute_loss, workload.step, workload.evaluate, workload.make_batch)
    todo: deque[Any] = deque(functions)  # breadth first, so direct references come before nested references
    seen: set[int] = set()
    while todo and len(seen) < MOST_LOOKED_AT:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (nn.Module, Tensor)):
            yield value
        elif isinstance(value, functools.partial):
            todo += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            todo += (value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values())
            yield value.__self__
        elif isinstance(value, FunctionType):
            todo += named_by(value)
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (tuple, list, set)):
            todo += value
        elif not isinstance(value, type) and callable(value):
            yield value
            todo += getattr(value, "__dict__", {}).values()
