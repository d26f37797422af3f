"""Access every kind of torch accelerator through one interface.

torch gives each back end a module with functions of the same names (``torch.cuda``, ``torch.xpu``, ``torch.npu``, and
the module of any back end that is registered as PrivateUse1). `backend` returns this module. Code for CUDA only (NVML,
architectures, the check of peer copies) is behind ``kind == "cuda"``. Importing this module does not load torch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError, shown

if TYPE_CHECKING:
    import torch
    from torch import nn

PROCESSORS = frozenset({"cpu", "sim", "meta"})
"""Kinds of devices that use this machine's memory, or no memory."""


def is_accelerator(kind: str) -> bool:
    """Return whether a device kind is an accelerator: it has its own memory and runs kernels asynchronously.

    Args:
        kind: The kind of a `Device`, or the type of a ``torch.device``.
    """
    return kind not in PROCESSORS


def accelerator_kind() -> str | None:
    """Return torch's name of the accelerator that this process can use (``"cuda"``, ``"xpu"``), or None."""
    import torch

    from autosplit.torch_versions import available_accelerator

    if torch.cuda.is_available():
        return "cuda"
    found = available_accelerator()
    return None if found is None else found.type


def accelerator_in_use() -> Any:
    """Return the back end of an accelerator that this process already uses, or None.

    This function must not initialise anything. Even a query for available GPUs would disable CUDA in forked processes.
    """
    import torch

    from autosplit.torch_versions import built_accelerator

    if torch.cuda.is_initialized():
        return torch.cuda
    built_for = built_accelerator()
    found = None if built_for is None else backend(built_for.type)
    return found if found is not None and found.is_initialized() else None


def backend(kind: str) -> Any:
    """Return the module of a back end, with ``torch.cuda``'s functions for memory, devices and streams."""
    import torch

    return _mps(torch.mps) if kind == "mps" else torch.get_device_module(kind)


@contextmanager
def bounded(module: Any, device: torch.device, most_bytes: int) -> Iterator[None]:
    """Limit a device's allocator temporarily to `most_bytes` or the user's own limit, whichever is smaller."""
    own = _own_share(module, device)
    share = most_bytes / module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(min(own, share), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(own, device)


def own_limit_bytes(module: Any, device: torch.device) -> int:
    """Return the user's own limit for a device's allocator, or the device's whole memory without a limit."""
    return int(_own_share(module, device) * module.get_device_properties(device).total_memory)


def _own_share(module: Any, device: torch.device) -> float:
    # Before a limit is set, CUDA's cudaMallocAsync allocator reports a fraction far above 1.
    return min(1.0, float(module.get_per_process_memory_fraction(device)))


def checked_module(module: Any) -> nn.Module:
    """Return a module unchanged. Raise InputError if it is not a module."""
    if isinstance(module, type):
        raise InputError(f"model is the class {module.__name__}. Expected an instance. Pass {module.__name__}(...).")
    if not hasattr(module, "named_parameters"):
        raise InputError(
            f"model is {shown(module)}. Expected an nn.Module. Pass the model that was tuned. If you tuned several "
            "models, pass each model separately."
        )
    found: nn.Module = module
    return found


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to its training device, and return it.

    A few back ends replace its parameters, as torch does if configured in `torch.__future__`.

    Raises:
        InputError: The argument is not a module. Or its parameters were replaced while an optimizer, or another object,
            still refers to the old parameters.
    """
    before = dict(checked_module(module).named_parameters())
    module.to(device)
    after = dict(module.named_parameters())
    old = {name: weakref.ref(parameter) for name, parameter in before.items() if parameter is not after[name]}
    del before
    if any(parameter() is not None for parameter in old.values()):
        gc.collect()
    held = next((name for name, parameter in old.items() if parameter() is not None), None)
    if held is not None:
        raise InputError(
            f"The {type(module).__name__} got new parameters when it moved to {device}, and something still uses the "
            f"old {held!r}. An optimizer with the old parameters would not train the model. Wrap the model first, "
            "then create the optimizer."
        )
    return module


def _mps(mps: Any) -> Any:
    """Return Metal's module with the function names of the other back ends: one device with a caching pool.

    Its allocator reports no peak. The memory that it reserves shrinks only when its cache is emptied. So after a step
    that began with an empty cache, the reserved memory is the peak.
    """
    reserved, total = mps.driver_allocated_memory, mps.recommended_max_memory
    return SimpleNamespace(
        is_available=mps.is_available,
        is_initialized=mps.is_available,
        device_count=mps.device_count,
        current_device=lambda: 0,
        set_device=lambda _device: None,
        device=lambda _device: nullcontext(),
        synchronize=lambda _device=None: mps.synchronize(),
        empty_cache=mps.empty_cache,
        mem_get_info=lambda _device=None: (total() - reserved(), total()),
        get_device_properties=lambda _device=None: SimpleNamespace(
            name="Apple GPU", total_memory=total(), is_integrated=True
        ),
        memory_stats=lambda _device=None: {},
        memory_allocated=lambda _device=None: mps.current_allocated_memory(),
        memory_reserved=lambda _device=None: reserved(),
        max_memory_allocated=lambda _device=None: reserved(),
        max_memory_reserved=lambda _device=None: reserved(),
        reset_peak_memory_stats=lambda _device=None: None,
        get_per_process_memory_fraction=lambda _device=None: 1.0,
        set_per_process_memory_fraction=lambda share, _device=None: mps.set_per_process_memory_fraction(share),
    )
