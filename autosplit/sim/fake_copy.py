"""Copy a model into fake tensors, which have shapes and a device, but no values and no memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.sim.build_small import restored_settings
from autosplit.torch_versions import FakeTensor, FakeTensorMode, is_wrapper_subclass, new_fake
from autosplit.workload.models import Models
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload, modules_of


def fake_mode() -> FakeTensorMode:
    """Return a new fake mode that converts real tensors in a model's attributes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def built_without_memory(build: Callable[[], Any], mode: FakeTensorMode) -> Any:
    """Call a function so that its tensors allocate no memory.

    Try fake tensors, then the meta device. With fake tensors, torch cannot convert a module's dtype in place
    (`model.half()`). Meta tensors cannot be copied.

    Raises:
        Exception: The function raised with both. This is its error with fake tensors.
    """
    try:
        with restored_settings(), mode:
            return build()
    except Exception as error:  # noqa: BLE001  # fake tensors do not support it, or the user's code failed
        failure = error
    try:
        with restored_settings(), torch.device("meta"):
            return build()
    except Exception:  # noqa: BLE001  # report the first failure
        raise failure from None


def mode_of(workload: Workload) -> FakeTensorMode | None:
    """Return the fake mode of a workload's tensors, or None if they are real."""
    tensors = [*(p for module in modules_of(workload) for p in module.parameters()), *tensors_of(workload.sample_batch)]
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


def fake_into(
    memo: dict[int, Any],
    models: Models,
    optimizers: Sequence[torch.optim.Optimizer],
    mode: FakeTensorMode,
    device: torch.device,
) -> None:
    """Put fakes of all tensors into deepcopy's memo, so that deepcopy uses them as the copies."""
    tensors = [t for module in models.modules for t in (*module.parameters(), *module.buffers())]
    # Keep one-element tensors in attributes real, because the model may read their values. Assume that it does not
    # read larger tensors, such as an average of its weights.
    tensors += [t for t in _tensors_aside(models) if t.is_floating_point() and t.numel() != 1]
    state = [(optimizer, [*tensors_of(list(optimizer.state.values()))]) for optimizer in optimizers]
    tensors += [tensor for _, held in state for tensor in held]
    for tensor in tensors:
        memo[id(tensor)] = fake_like(tensor, mode, device)
    for optimizer, held in state:
        settings = [value for group in optimizer.param_groups for value in group.values() if isinstance(value, Tensor)]
        for tensor in (*held, *settings):
            if tensor.dim() == 0 and not tensor.is_meta and not isinstance(tensor, FakeTensor):
                memo[id(tensor)] = fake_scalar(tensor, mode)


def _tensors_aside(models: Models) -> Iterator[Tensor]:
    """Yield tensors in modules' attributes, lists, dicts and hidden modules, which deepcopy also visits."""
    todo: list[Any] = [part for module in models.modules for part in module.modules()]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            todo += value
        elif not isinstance(value, (type, ModuleType, FunctionType)):
            todo += getattr(value, "__dict__", {}).values()


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make a fake of a tensor on the given device."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device == device:
        return tensor
    if is_wrapper_subclass(tensor):
        raise NotImplementedError(f"a {type(tensor).__name__} wraps other tensors, which have no fake copies")
    if tensor.layout != torch.strided:
        return _fake_sparse(tensor, mode, device)
    fake = new_fake(tensor.shape, tensor.stride(), tensor.dtype, device, mode)
    with mode:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _fake_sparse(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make a fake sparse tensor with the same number of values, which torch's fakes lack."""
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(f"a {tensor.layout} tensor has no fake copy with values")
    indices, values = (
        fake_like(part, mode, device) for part in (tensor.detach()._indices(), tensor.detach()._values())
    )
    with mode:
        return torch.sparse_coo_tensor(
            indices, values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
        )


def fake_scalar(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Make a fake with a known value, because optimizers read step counts and learning rates from tensors."""
    number = tensor.item()
    with mode:
        return torch.tensor(number, dtype=tensor.dtype)


@contextmanager
def masks_of_real_tensors(sample_batch: Any) -> Iterator[None]:
    """Make transformers skip its search for packed sequences in fake tensors, unless the sample batch has some.

    The search reads `position_ids` (`masking_utils.find_packed_sequence_indices`). Because fake tensors have no values,
    it would always build a mask of (batch, 1, length, length), which rules out flash attention.
    """
    module = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    given = sample_batch.get("position_ids") if isinstance(sample_batch, Mapping) else None
    if module is None or find is None or (isinstance(given, Tensor) and find(given) is not None):
        yield
        return
    module.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]  # noqa: ARG005
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find  # type: ignore[attr-defined]
