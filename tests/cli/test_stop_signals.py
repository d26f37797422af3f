"""SIGTERM and SIGHUP stop a tuning like Ctrl-C: Slurm's preemption lost the best plan so far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from marks import for_release

from autosplit.cli.stop_signals import stop_like_ctrl_c
from autosplit.plan.plan import Plan
from autosplit.profiles.store import profile_paths
from autosplit.runtime.interrupts import held_interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")

NAMES = ("SIGTERM", "SIGHUP")


@pytest.fixture(params=NAMES)
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a signal that has the system's handler."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    number = getattr(signal, request.param)
    before = signal.signal(number, signal.SIG_DFL)
    yield number
    signal.signal(number, before)


def test_a_signal_is_a_keyboard_interrupt_within(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), stop_like_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_it_waits_where_ctrl_c_waits(number: signal.Signals) -> None:
    """A KeyboardInterrupt within the callbacks of torch's dispatcher would end the process."""
    reached = []

    def signalled() -> None:
        with stop_like_ctrl_c(), held_interrupts():
            signal.raise_signal(number)
            reached.append(1)

    with pytest.raises(KeyboardInterrupt):
        signalled()
    assert reached


def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with stop_like_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_IGN


def test_torchrun_ends_its_processes_as_before(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stop_like_ctrl_c():
        assert signal.getsignal(number) == signal.SIG_DFL


WORK = """
import logging, time, torch, autosplit
class Net(torch.nn.Linear):
    waits = False
    def forward(self, x):
        while Net.waits:  # until the signal
            time.sleep(0.05)
        return super().forward(x)
class Waits(logging.Handler):
    def emit(self, record):
        Net.waits = Net.waits or record.getMessage().startswith("trial 0")
logging.getLogger("autosplit.solve.optuna_search").addHandler(Waits())
workload = autosplit.Workload(Net(3, 1), torch.randn(4, 3))
"""
"""After the first trial, the second one waits for the signal."""
FLAGS = ["--devices", "cpu:8MiB,cpu:4MiB", "--effective-batch-size", "64", "--no-isolate", "--verbose"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", *(for_release(name) for name in NAMES if name != "SIGTERM")])
def test_the_command_keeps_the_best_plan(tmp_path: Path, name: str) -> None:
    opened = pytest.importorskip("terminals", reason="there are no pseudo-terminals on this system").opened
    (tmp_path / "work.py").write_text(WORK)
    best = tmp_path / "best.json"
    words = [sys.executable, "-m", "autosplit", "tune", str(tmp_path / "work.py"), *FLAGS, "--output", str(best)]
    terminal = opened(words, columns=60)
    terminal.wait_for(r"steps, [\d,]+/s")  # there is a plan to keep
    terminal.process.send_signal(getattr(signal, name))
    assert terminal.end() == 4
    assert "The search was interrupted. The best plan so far" in terminal.text
    assert not Plan.load(best).complete
    assert len(profile_paths()) == 1


JOB = """
import time, torch, autosplit
def loss(model, batch):
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        open("reached", "w").close()
    return model(batch).square().mean()
workload = autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3), compute_loss=loss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's files in memory")
def test_a_killed_job_of_ranks_leaves_no_folder(tmp_path: Path) -> None:
    """Four of five kills left a folder with the exit code of rank 0."""
    (tmp_path / "work.py").write_text(JOB)
    (tmp_path / "tmp").mkdir()
    devices = ["--devices", "cpu:8MiB,cpu:4MiB", "--strategy", "ddp", "--n-trials", "500"]
    command = [sys.executable, "-m", "autosplit", "tune", "work.py", *devices, "--effective-batch-size", "64"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **streams) as started:
        until = time.monotonic() + 300
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < until
            assert started.poll() is None, started.stderr.read()
            time.sleep(0.1)
        assert [*(tmp_path / "tmp").glob("torchelastic*")] == []
        started.kill()
        started.communicate(timeout=200)  # until the ranks, which hold the pipe, have ended
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.is_dir() and any(path.iterdir())] == []
