"""Real processes with gloo, for tests of several ranks.

Starting processes costs seconds, so one job runs all scenarios of a table, each in its own group. Every rank writes the
scenario's results. Tables are at module level, because the processes import them by name.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from events import until
from filelock import FileLock
from torch import distributed as dist


@functools.cache
def starting(*preload: str) -> Any:
    """Start the server that forks the ranks. It imports the shared modules, so ranks start at once.

    Args:
        *preload: Further modules to import. No effect if the server already runs.
    """
    context = torch.multiprocessing.get_context("forkserver")
    # DDP imports `torch._dynamo`, and sharding imports `torch.distributed.fsdp`.
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "preloaded", "ddp_jobs", *preload])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(sys.path)
        )  # python 3.11 and earlier do not pass sys.path to the server
        forkserver.ensure_running()
    return context


@functools.cache
def for_workers(*preload: str) -> Any:
    """Return a multiprocessing context for the workers of a rank's loaders.

    A worker that is forked from a rank with gloo's threads may hang: a lock that another thread holds stays locked. So
    a server without threads forks the workers.

    Args:
        *preload: Modules that the server imports once for all workers.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", *preload])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def run_ranks(
    module: str,
    table: str,
    world_size: int,
    folder: Path,
    *,
    limit_s: float,
    spawned: bool = False,
    preload: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Run the scenarios of a table in several processes.

    Args:
        module: The test module with the table.
        table: The name of the table: scenarios without arguments, by name.
        world_size: Number of processes.
        folder: Output folder.
        limit_s: Then the processes are killed, and their output so far counts.
        spawned: Start the processes without a server, so they share no memory. This takes seconds more.
        preload: Slow modules that a server imports once before it forks the processes.

    Returns:
        For each rank, the result of every scenario, or the traceback of the first failure.
    """
    context = torch.multiprocessing.get_context("spawn") if spawned else starting(*preload)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_run_rank, args=(rank, world_size, store.port, module, table, str(folder)))
        for rank in range(world_size)
    ]
    deadline_s = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            _end(process)
    return [torch.load(path) if path.exists() else {} for path in (folder / f"{r}.pt" for r in range(world_size))]


def run_ranks_once(
    factory: pytest.TempPathFactory,
    module: str,
    table: str,
    world_size: int,
    *,
    limit_s: float,
    preload: tuple[str, ...] = (),
) -> Any:
    """Run the scenarios of a table once per test session, and return what they found."""

    def run(folder: Path) -> None:
        found = run_ranks(module, table, world_size, folder, limit_s=limit_s, preload=preload)
        torch.save(found, folder / "results.pt")

    return torch.load(once(factory, f"{module}.{table}", run) / "results.pt", weights_only=False)


def once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], object]) -> Path:
    """Run a function with a new folder once per test session, whichever worker comes first, and return the folder.

    pytest-xdist moves tests between its workers, so each worker may need the results. The others wait at a lock.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run(folder)
            (folder / "done").touch()
    return folder


def job_of(module: str, table: str, world_size: int, *, limit_s: float = 250) -> Any:
    """Return a fixture with the results of a table's scenarios, which run once per test session."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = run_ranks_once(tmp_path_factory, module, table, world_size, limit_s=limit_s)
        return found

    return ranks


def found_by(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    """Return each rank's results of a scenario. If a rank failed, show its traceback."""
    if not all(name in found and not _has_failed(found[name]) for found in ranks):
        tracebacks = [value for found in ranks for value in found.values() if _has_failed(value)]
        assert not tracebacks, tracebacks[0]
        pytest.fail(f"{name!r} did not end; the last that ended on each rank: {[[*found][-1:] for found in ranks]}")
    return [found[name] for found in ranks]


def _has_failed(value: object) -> bool:
    return isinstance(value, str) and "Traceback" in value


def _end(process: Any) -> None:
    """End a rank and the processes that it started. A loader's workers sometimes outlive it."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _run_rank(rank: int, world_size: int, port: int, module: str, table: str, folder: str) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "AUTOSPLIT_CACHE_DIR": str(Path(folder) / "cache")}
    # As under torchrun: the ranks use one store, which the parent keeps during the whole job.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    __import__(module)
    path = Path(folder) / f"{rank}.pt"
    found = {}
    for name, scenario in getattr(sys.modules[module], table).items():
        try:
            found[name] = scenario()
        except Exception:  # noqa: BLE001 - the test that reads it shows it, whatever it is
            found[name] = traceback.format_exc()
        torch.save(found, path.with_suffix(".part"))  # write after each scenario, in case a later scenario hangs
        path.with_suffix(".part").replace(path)
        if _has_failed(found[name]):
            return  # end the others, which would wait forever or lose step
    # With torch 2.6, a rank that is still in its last group dies if another rank's process has ended.
    path.with_suffix(".ended").touch()
    ended = [Path(folder) / f"{other}.ended" for other in range(world_size)]
    with suppress(AssertionError):  # another rank has failed, and its results say so
        until(lambda: all(one.exists() for one in ended), limit_s=20)


def free_port() -> int:
    """Return a port that rank 0 can listen at. Linux gives the connections of other tests ports from 32768 on."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with closing(socket.socket()) as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
