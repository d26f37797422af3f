"""Accelerators: every kind of device that torch computes on beside the processor, by one road.

torch gives each back end a module with functions of the same names (``torch.cuda``, ``torch.xpu``, ``torch.npu``, and
that of any other that registers itself as PrivateUse1); `backend` returns it. What CUDA alone has (NVML,
architectures, peer copies that arrive as zeros) stands behind ``kind == "cuda"``. Importing this module does not load
torch.
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
"""The kinds of devices whose memory is this machine's own, or none."""


def is_accelerator(kind: str) -> bool:
    """Tell whether a kind of device is an accelerator's: it has memory of its own, kernels run late, and it can fail.

    Args:
        kind: That of a `Device`, or the type of a ``torch.device``.
    """
    return kind not in PROCESSORS


def accelerator_kind() -> str | None:
    """Return the kind of accelerator that this process sees, in torch's word (``"cuda"``, ``"xpu"``); None without."""
    import torch

    from autosplit.torch_versions import available_accelerator

    if torch.cuda.is_available():
        return "cuda"
    found = available_accelerator()
    return None if found is None else found.type


def accelerator_in_use() -> Any:
    """Return the back end of the accelerator that this process has begun to use; None where it uses none.

    It begins nothing itself: to ask whether a GPU is there would be enough to forbid CUDA to forked processes.
    """
    import torch

    from autosplit.torch_versions import built_accelerator

    if torch.cuda.is_initialized():
        return torch.cuda
    built_for = built_accelerator()
    found = None if built_for is None else backend(built_for.type)
    return found if found is not None and found.is_initialized() else None


def backend(kind: str) -> Any:
    """Return the module of a back end, with the functions that ``torch.cuda`` has for memory, devices and streams."""
    import torch

    return _mps(torch.mps) if kind == "mps" else torch.get_device_module(kind)


@contextmanager
def bounded(module: Any, device: torch.device, most_bytes: int) -> Iterator[None]:
    """Let the allocator of a device of a back end hold no more than this, or than the user's own limit, for a while."""
    own = _own_share(module, device)
    share = most_bytes / module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(min(own, share), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(own, device)


def own_limit_bytes(module: Any, device: torch.device) -> int:
    """Return what the user lets the allocator of a device of a back end hold; without a limit, all of it."""
    return int(_own_share(module, device) * module.get_device_properties(device).total_memory)


def _own_share(module: Any, device: torch.device) -> float:
    # CUDA's other allocator (cudaMallocAsync) has no limit until it is set one, and then tells a share far above all.
    return min(1.0, float(module.get_per_process_memory_fraction(device)))


def checked_module(module: Any) -> nn.Module:
    """Return a module; raise InputError of anything else."""
    if isinstance(module, type) or not hasattr(module, "named_parameters"):
        raise InputError(
            f"model is {shown(module)}; expected an nn.Module; pass the model that was tuned for, of several each by "
            "itself",
            code="model-type",
        )
    found: nn.Module = module
    return found


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to where it is trained, and return it.

    A few back ends give it new parameters, and so does torch where it is told to (`torch.__future__`).

    Raises:
        InputError: It is no module; or it has new parameters, and something holds the old ones, which an optimizer
            would train.
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
            f"moving the {type(module).__name__} to {device} gave it new parameters, and the old {held!r} is still in "
            "use; expected an optimizer of the new ones, it would train what nothing uses; wrap the model first, then "
            "make the optimizer",
            code="model-moved-after-optimizer",
        )
    return module


def _mps(mps: Any) -> Any:
    """Return Metal's module under the names of the other back ends: one device, whose pool keeps what it had.

    Its allocator knows no peak. What it holds of the driver falls only when its cache is emptied, so after a step that
    began with an empty cache it is the peak.
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
        get_device_properties=lambda _device=None: SimpleNamespace(name="Apple GPU", total_memory=total()),
        memory_stats=lambda _device=None: {},
        memory_allocated=lambda _device=None: mps.current_allocated_memory(),
        memory_reserved=lambda _device=None: reserved(),
        max_memory_allocated=lambda _device=None: reserved(),
        max_memory_reserved=lambda _device=None: reserved(),
        reset_peak_memory_stats=lambda _device=None: None,
        get_per_process_memory_fraction=lambda _device=None: 1.0,
        set_per_process_memory_fraction=lambda share, _device=None: mps.set_per_process_memory_fraction(share),
    )
