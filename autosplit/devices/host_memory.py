"""Read how much of this machine's memory a process may still use."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HOST_SHARE = Fraction(80, 100)
"""Fraction of the host's available memory that training may use, on a CPU and on GPUs that use the host's memory.

The rest is for the loader, other programs and the file cache. A host without free memory stops responding. A DGX Spark
stops without an out-of-memory error (github.com/NVIDIA/open-gpu-kernel-modules, issue 1358).
"""

FILLED_SHARE = 0.5
"""Approximate fraction of capacity that steps fill to find a ceiling on a GPU that uses the host's memory.

On emulated devices with 51 and 160 MiB, no step of seven searches ran out of memory, and every ceiling ran, even with
3% more samples. With 75%, two steps ran out of memory, because the allocator reserved more than they used.
"""

# Used if neither /proc nor sysconf reports the memory (Windows). Small to be safe. `cpu:SIZE` overrides it.
_UNKNOWN_HOST_BYTES = 4 * 2**30


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use: the kernel's value, limited by the process's cgroups.

    Without /proc, use psutil if it is installed.
    """
    free_bytes = _cgroup_bytes(root)
    if match := re.search(r"^MemAvailable:\s+([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE):
        free_bytes.append(int(match[1]) * 1024)
    if not free_bytes and root == Path("/") and find_spec("psutil") is not None:
        return int(import_module("psutil").virtual_memory().available)
    return max(0, min(free_bytes)) if free_bytes else _sysconf_bytes()


def _cgroup_bytes(root: Path) -> list[int]:
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mounts = ("sys/fs/cgroup/memory",) if controllers else ("sys/fs/cgroup", "sys/fs/cgroup/unified")
        own = Path(path.strip("/"))
        for mount in mounts:
            left.extend(
                n_bytes
                for level in (own, *own.parents)
                if (n_bytes := _cgroup_level_bytes(root / mount / level, v1=bool(controllers))) is not None
            )
    return left


def _cgroup_level_bytes(folder: Path, *, v1: bool) -> int | None:
    limit = _read(folder / ("memory.limit_in_bytes" if v1 else "memory.max")).strip()
    used = _read(folder / ("memory.usage_in_bytes" if v1 else "memory.current")).strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    cache = re.search(
        rf"^{'total_inactive_file' if v1 else 'inactive_file'} ([0-9]+)", _read(folder / "memory.stat"), re.MULTILINE
    )
    return int(limit) - max(0, int(used) - (int(cache[1]) if cache else 0))


def _sysconf_bytes() -> int:
    """Return available memory without /proc: free pages, or half of all pages, or `_UNKNOWN_HOST_BYTES`."""
    for name, share in (("SC_AVPHYS_PAGES", 1.0), ("SC_PHYS_PAGES", 0.5)):
        try:
            pages = os.sysconf(name)
            page_bytes = os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
        if pages > 0 and page_bytes > 0:
            return int(pages * page_bytes * share)
    return _UNKNOWN_HOST_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
