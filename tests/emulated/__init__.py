"""Emulated accelerators: several devices in the host's memory, for tests that need GPUs.

``EMULATED_DEVICES`` is the number of devices. `switch_on` makes this process and its children load them with torch,
like any out-of-tree back end. Their kind is ``emu``, their module ``torch.emu``, their collective back end ``eccl``.
Within `called_npu`, their kind is ``npu``, because other libraries know that name.

These settings belong to the devices, by global number, and hold in every process that shares the file
``EMULATED_MEMORY``. (``EMU_VISIBLE_DEVICES`` changes the numbers in a process, like CUDA's variable.)

* `set_memory`: a device's size. Environment: ``EMULATED_BYTES``, by default 2 GiB each. * `set_context_bytes`: memory
of a context on each device (``EMULATED_CONTEXT_BYTES``, by default 32 MiB). * ``EMULATED_INTEGRATED=1``: the devices
report that they use the host's memory. * `contexts`: the processes with a context
on each device. `reserved`: their other memory.

A call returns when its work is done. Only a copy to the host with ``non_blocking=True`` is late: it arrives when the
program waits for its device, stream or event. Before that, the host reads zeros.

Faults apply to this process: `fail_allocation`, `fail_kernel`, `hang_kernel`, `copies_arrive_as_zeros`. `mend` removes
them, including a sticky error, which on a real GPU needs a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from .build import NoCompiler, built_library

__all__ = [
    "NoCompiler",
    "built_library",
    "called_npu",
    "contexts",
    "copies_arrive_as_zeros",
    "fail_allocation",
    "fail_kernel",
    "hang_kernel",
    "library",
    "load",
    "mend",
    "reserved",
    "set_context_bytes",
    "set_memory",
    "switch_on",
    "wanted",
    "without_cache",
    "workspaces",
]

MOST = 16
KIND = os.environ.get("EMULATED_KIND", "emu")
"""Name of the devices' kind in this process."""

library: ctypes.CDLL | None = None
"""The C library, once loaded."""


def wanted() -> bool:
    """Return whether this process should have emulated devices."""
    return os.environ.get("EMULATED_DEVICES", "0") not in {"", "0"}


def switch_on() -> None:
    """Load the devices in this process and in its children. Call it before torch is imported."""
    site = str(Path(__file__).parent / "site")
    sys.path.append(site)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([site, *([before] if before else [])])
    if "EMULATED_MEMORY" not in os.environ:
        file, path = tempfile.mkstemp(prefix="emulated-memory-")
        os.close(file)
        os.environ["EMULATED_MEMORY"] = path
        atexit.register(Path(path).unlink, missing_ok=True)


@contextmanager
def called_npu():
    """In a block, child processes call the devices ``npu`` and can import ``torch_npu``."""
    path = str(Path(__file__).parent / "npu")
    before = os.environ["PYTHONPATH"]
    os.environ |= {"EMULATED_KIND": "npu", "PYTHONPATH": os.pathsep.join([path, before])}
    sys.path.append(path)  # multiprocessing passes it to its processes
    try:
        yield
    finally:
        sys.path.remove(path)
        os.environ["PYTHONPATH"] = before
        del os.environ["EMULATED_KIND"]


def load() -> None:
    """Give torch the devices; called once in a process, by torch itself where `switch_on` was called before.

    Raises:
        NoCompiler: If the library is not built yet, and can't be.
    """
    global library  # noqa: PLW0603 - a process has one
    import torch

    path = built_library()
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    for name in ("emu_total", "emu_context_bytes", "emu_current_seed"):
        getattr(library, name).restype = ctypes.c_uint64
    library.emu_fraction.restype = ctypes.c_double
    library.emu_random_state.restype = ctypes.c_int64
    from . import group, torch_emu

    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, torch_emu)
    torch.utils.generate_methods_for_privateuse1_backend()
    group.register()


def _c() -> ctypes.CDLL:
    assert library is not None, "the emulated devices are not loaded: set EMULATED_DEVICES"
    return library


def set_memory(device: int, size_bytes: int) -> None:
    """Set the size of a device, for every process."""
    _c().emu_set_total(device, ctypes.c_uint64(size_bytes))


@contextmanager
def memory(*sizes_bytes: int):
    """Give the first devices these sizes for a while."""
    before = [_c().emu_total(device) for device in range(len(sizes_bytes))]
    for device, size_bytes in enumerate(sizes_bytes):
        set_memory(device, size_bytes)
    try:
        yield
    finally:
        for device, size_bytes in enumerate(before):
            set_memory(device, size_bytes)


def set_context_bytes(size_bytes: int) -> None:
    """Set the memory of a context on each device, for every process and for existing contexts."""
    _c().emu_set_context_bytes(ctypes.c_uint64(size_bytes))


def _processes() -> dict[int, tuple[int, list[int]]]:
    found, number = {}, 0
    bits, held = ctypes.c_uint32(), (ctypes.c_uint64 * MOST)()
    while pid := _c().emu_process(number, ctypes.byref(bits), held):
        if pid > 0:
            found[pid] = (bits.value, list(held))
        number += 1
        if number >= 64:
            break
    return found


def contexts() -> dict[int, tuple[int, ...]]:
    """Return the devices on which each living process has a context, by its id."""
    found = {
        pid: tuple(device for device in range(MOST) if bits >> device & 1) for pid, (bits, _) in _processes().items()
    }
    return {pid: devices for pid, devices in found.items() if devices}


def reserved() -> dict[int, tuple[int, ...]]:
    """Return the bytes that each living process has reserved on each of the visible devices' numbers, by its id."""
    return {pid: tuple(held) for pid, (_, held) in _processes().items()}


def fail_allocation(device: int, number: int = 1) -> None:
    """Make the number-th following allocation on a device run out of memory, whatever is free."""
    _c().emu_fail_allocation(device, ctypes.c_int64(number))


def fail_kernel(device: int, number: int = 1) -> None:
    """Make the number-th following kernel on a device fail. Then every call fails, as on a GPU."""
    _c().emu_fail_kernel(device, ctypes.c_int64(number))


def hang_kernel(device: int, number: int = 1) -> None:
    """Make the number-th following kernel on a device hang forever."""
    _c().emu_hang_kernel(device, ctypes.c_int64(number))


def copies_arrive_as_zeros(wrong: bool = True) -> None:
    """Make copies between two devices arrive as zeros, as with broken peer access."""
    _c().emu_zeros(int(wrong))


@contextmanager
def without_cache():
    """Make this process's allocator cache nothing and round to 512 bytes, so reserved memory is allocated memory.

    Enter it before the first allocation that counts. Cached memory stays cached.
    """
    _c().emu_cache(0)
    try:
        yield
    finally:
        _c().emu_cache(1)


def workspaces(share: float, *, benchmark: bool = False) -> None:
    """Give each convolution a temporary workspace.

    Args:
        share: Size as a share of its result. 0 for none.
        benchmark: Whether a convolution of new shapes first tries workspaces of two and four times that, as with
            ``torch.backends.cudnn.benchmark``. Tried workspaces stay reserved. Those that do not fit are skipped.
    """
    _c().emu_workspaces(ctypes.c_double(share), int(benchmark))


def mend() -> None:
    """Remove all faults, including a sticky error."""
    _c().emu_mend()
