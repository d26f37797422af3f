"""However `autosplit launch` or torchrun ends, its ranks end, too. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ddp_jobs import make_plan
from events import until
from marks import for_release

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes like this")]

TRAIN = """
import os, time
from pathlib import Path
parent = os.getppid()
started = Path(f"starting{os.environ['RANK']}")
started.write_text(str(os.getpid()))
started.rename(f"started{os.environ['RANK']}")
while Path("late").exists() and os.getppid() == parent:
    time.sleep(0.01)
import autosplit
with autosplit.ddp.setup("plan.json") as ctx:
    Path(f"joined{ctx.rank}").touch()
    time.sleep(1000)
"""
LAUNCHERS = {
    "autosplit launch": ("-m", "autosplit", "launch", "--plan", "plan.json", "train.py"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"),
}


def runs(pid: int) -> bool:
    """Return whether a process runs. A killed process stays without a command line until its parent waits for it."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def launched(by: str, folder: Path) -> Iterator[tuple[int, list[int]]]:
    """Start a job of two ranks. Yield the ids of the launcher and of its ranks, when both ranks run the script."""
    make_plan((2, 2)).save(folder / "plan.json")
    (folder / "train.py").write_text(TRAIN)
    started = [folder / f"started{rank}" for rank in (0, 1)]
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, *LAUNCHERS[by]], cwd=folder, start_new_session=True, stdout=output, stderr=output
        )
    try:
        until(lambda: all(path.exists() for path in started) or launcher.poll() is not None)
        assert launcher.poll() is None, (folder / "output").read_text()
        yield launcher.pid, [int(path.read_text()) for path in started]
    finally:
        for pid in (launcher.pid, *(int(path.read_text()) for path in started if path.exists())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


@pytest.mark.parametrize(
    ("by", "how"),
    [
        ("autosplit launch", "SIGKILL"),
        ("autosplit launch", "SIGINT"),
        ("torchrun", "SIGTERM"),
        ("torchrun", "SIGHUP"),
        for_release("autosplit launch", "SIGTERM"),
        for_release("autosplit launch", "SIGHUP"),
        for_release("torchrun", "SIGKILL"),
        for_release("torchrun", "SIGINT"),
    ],
)
def test_ranks_end_when_their_launcher_is_ended(by, how, tmp_path):
    """After a SIGKILL of the launcher, the ranks trained on and kept their GPUs."""
    with launched(by, tmp_path) as (launcher, ranks):
        until(lambda: all((tmp_path / f"joined{rank}").exists() for rank in (0, 1)))
        os.kill(launcher, signal.Signals[how])
        until(lambda: not any(map(runs, ranks)))


def test_ranks_end_when_their_launcher_was_killed_before_they_joined(tmp_path):
    """The ranks waited for the launcher's store until its time-out."""
    (tmp_path / "late").touch()
    with launched("autosplit launch", tmp_path) as (launcher, ranks):
        os.kill(launcher, signal.SIGKILL)
        until(lambda: not any(map(runs, ranks)), limit_s=100)
        assert not [*tmp_path.glob("joined*")]
        assert f"process {launcher} started this rank and has ended" in (tmp_path / "output").read_text()
