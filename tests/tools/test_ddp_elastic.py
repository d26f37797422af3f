"""Elastic jobs: torchrun starts the ranks again with other devices, and the plan is solved again for them.

If network namespaces can be made, the two machines of a job have separate networks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic_training import EPOCHS, in_one_process, make_plan
from folders import ROOT, TESTS
from machines import Machines, missing
from raised import raises
from ranks import free_port

from autosplit.ddp.rendezvous import Place
from autosplit.devices.accelerator import Visible
from autosplit.errors import DeviceError
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_devices
from autosplit.tools import other_devices
from autosplit.tools.other_devices import own_device

PATIENCE_S = 400
"""How long to wait for an event. torchrun notices a lost machine after some seconds, on an idle machine."""


@contextmanager
def machine(folder: Path, port: int, on: Machines | None, *, hosts: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun's agent as on one machine of an elastic job. Kill it and its rank at the end.

    Args:
        on: The two machines. None runs both agents in the network of this process.
    """
    options = f"is_host={hosts},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    own = None if on is None else on.a if hosts else on.b
    host, address = ("localhost", "127.0.0.1") if on is None or own is None else (on.a.address, own.address)
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-conf", options]
    command += ["--local-addr", address, "--max-restarts", "20", "--monitor-interval", "0.2"]
    command += [str(TESTS / "elastic_training.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    environment["AUTOSPLIT_CACHE_DIR"] = str(folder / "cache")
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise a machine cannot join again (docs/ddp.md)
    with (folder / f"log{hosts}").open("ab") as log:
        agent = subprocess.Popen(
            command if own is None else own.entered(*command),
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield agent
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        for line in (folder / "pids").read_text().splitlines() if (folder / "pids").exists() else ():
            owner, pid = map(int, line.split())  # torchrun starts each rank in its own session
            if owner == agent.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        agent.wait()


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines | None]:
    """Make two machines with separate networks. Yield None if this process may not make them."""
    if missing() is not None:
        yield None
        return
    with Machines(folder / "machines") as made:
        yield made


def wait_for(folder: Path, agent: subprocess.Popen[bytes], happened: Callable[[list[str]], bool]) -> None:
    """Wait until the lines of rank 0's events fulfil a condition."""
    end_s = time.monotonic() + PATIENCE_S
    while not happened(events(folder)):
        waits = time.monotonic() < end_s and agent.poll() is None
        assert waits, (events(folder), *(path.read_text()[-3000:] for path in folder.glob("log*")))
        time.sleep(0.1)


def events(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def may_train_until(folder: Path, step: int) -> None:
    (folder / "new").write_text(str(step))
    (folder / "new").replace(folder / "limit")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "has_plan",
    [
        pytest.param(True, id="a plan for both"),
        # The job of tests/integrations/test_integrations_ray.py makes a plan for one worker, too.
        pytest.param(False, id="tuned at each start", marks=pytest.mark.release),
    ],
)
def test_a_machine_that_leaves_and_comes_back_changes_no_weight(has_plan: bool, tmp_path: Path) -> None:
    """Train with two machines, kill one, go on with one, and go on with two again. No sample is lost or repeated."""
    if has_plan:
        make_plan().save(tmp_path / "plan.json")
    may_train_until(tmp_path, 0)
    port = free_port()
    with two_machines(tmp_path) as both, machine(tmp_path, port, both, hosts=True) as first:
        with machine(tmp_path, port, both, hosts=False):
            wait_for(tmp_path, first, lambda lines: "started 2 0" in lines)
            may_train_until(tmp_path, 4)
            wait_for(tmp_path, first, lambda lines: "done 2 4" in lines)
        may_train_until(tmp_path, 7)
        wait_for(tmp_path, first, lambda lines: "done 1 7" in lines)
        with machine(tmp_path, port, both, hosts=False):
            wait_for(tmp_path, first, lambda lines: "started 2 7" in lines)
            may_train_until(tmp_path, 10**6)
            assert first.wait(timeout=PATIENCE_S) == 0
    trained = torch.load(tmp_path / "weights.pt")
    for name, value in in_one_process().items():
        torch.testing.assert_close(trained[name], value, atol=1e-9, rtol=0)
    steps = [int(line.split()[2]) for line in events(tmp_path) if line.startswith("done")]
    assert sorted(set(steps)) == list(range(1, EPOCHS * 5 + 1))
    sizes = {tuple(map(int, line.split()[1:])) for line in events(tmp_path) if line.startswith("sizes")}
    if has_plan:
        assert sizes == {(9, 3), (12,)}
    else:
        assert {len(split) for split in sizes} == {1, 2}
        assert set((tmp_path / "tuned").read_text().split()) == {"1", "2"}


class TestOwnDevice:
    """A rank of an elastic job takes the GPU of its local rank, and reports its name and UUID."""

    GPUS = (Visible("Fast", "GPU-1"), Visible("Slow", "GPU-2"))

    def gpu_plan(self) -> Plan:
        return with_devices(make_plan(), lambda n, one: replace(one, kind="cuda", label=f"cuda:{n}"))

    @pytest.mark.parametrize(("local_rank", "seen", "index"), [(None, GPUS, 1), (1, GPUS[1:], 0)])
    def test_the_gpu_of_the_local_rank(self, local_rank, seen, index, monkeypatch):
        monkeypatch.setattr(other_devices, "visible_devices", lambda _kind: seen)
        own = own_device(self.gpu_plan(), Place(1, 2, local_rank))
        assert (own.label, own.name, own.uuid) == (f"cuda:{index}", "Slow", "GPU-2")

    def test_a_process_without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(other_devices, "visible_devices", lambda _kind: self.GPUS)
        with raises(DeviceError):
            own_device(self.gpu_plan(), Place(2, 3, 2))
