"""The tuning lock: one process at a time, messages that name the holder, and no wait for dead processes."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
import time
import warnings
from pathlib import Path

import pytest

from autosplit.notes import Note
from autosplit.profiles.tuning_lock import LEAST_WAIT_S, WAIT_LIMIT_S, Turn, wait_limit_s

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "profiles" / "aa.tuning.lock"


def turn(lock: Path, told: list[str] | None = None, *, limit_s: float = 30.0) -> Turn:
    return Turn(lock, limit_s=limit_s, tell=(told if told is not None else []).append)


class Holder:
    """A process that keeps the lock until it is released or killed."""

    def __init__(self, lock: Path) -> None:
        ready, self._end = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with turn(lock) as own:
                own.wait()
                os.write(ready[1], b"x")
                os.read(self._end[0], 1)
            os._exit(0)
        os.read(ready[0], 1)

    def end(self) -> None:
        os.write(self._end[1], b"x")
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_free_turn_comes_at_once(lock):
    told: list[str] = []
    with turn(lock, told) as own:
        assert own.wait()
        assert own.held
        assert (own.waited_s, own.trouble, own.gave_up, own.notes, told) == (0.0, None, None, (), [])
    with turn(lock) as again:
        assert again.wait()
        assert again.held


@pytest.mark.parametrize("how", ["end", "kill"])
def test_it_comes_when_the_holder_goes_however_that_is(lock, how):
    holder = Holder(lock)
    told: list[str] = []
    with turn(lock, told) as own:
        assert not own.wait(for_s=0.3)
        assert not own.held
        (said,) = told
        assert said.startswith(f"Process {holder.pid} has been tuning the same workload since ")
        assert said.endswith(". Waiting for its plan, at most 30 s")
        getattr(holder, how)()
        assert own.wait()
        assert own.held
        assert own.waited_s > 0
        assert own.notes[0].kind == "waited"
    assert len(told) == 1


def test_after_the_limit_nobody_waits_any_longer(lock):
    holder = Holder(lock)
    with turn(lock, limit_s=0.2) as own:
        assert own.wait()
        assert not own.held
        assert own.gave_up is not None
        assert f"Process {holder.pid} " in own.gave_up
        assert own.gave_up.endswith("This process stopped waiting at its time limit, and tuned the workload itself.")
        assert own.notes == (Note("gave-up-waiting", own.gave_up),)
    holder.end()


def test_ctrl_c_ends_it_at_once_and_leaves_the_holder_alone(lock):
    """Pressed after the process reports that it waits. A fixed delay is too short on a busy machine."""
    holder, told = Holder(lock), []

    def press() -> None:
        while not told:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt), turn(lock, told) as own:
        own.wait()
    pressing.join()
    assert os.waitpid(holder.pid, os.WNOHANG) == (0, 0)
    holder.end()


def test_threads_of_one_process_take_turns_and_one_does_not_wait_for_itself(lock):
    at_once, most = 0, 0
    told: list[str] = []
    held = threading.Event()

    def work() -> None:
        nonlocal at_once, most
        with turn(lock, told) as own:
            assert own.wait()
            assert own.held
            with turn(lock) as inner:
                assert inner.wait()
                assert inner.trouble == "this thread is already tuning the same workload"
            at_once += 1
            most = max(most, at_once)
            held.set()
            while len(told) < 2:  # the first thread continues when both others wait for it
                time.sleep(0.01)
            at_once -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    threads[0].start()
    held.wait()  # its name is in the file now
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert told
    assert all("Another thread of this process" in said for said in told)


def test_without_a_folder_to_write_to_nobody_waits(tmp_path):
    (tmp_path / "profiles").write_text("a file where a folder should be")
    with turn(tmp_path / "profiles" / "aa.tuning.lock") as own:
        assert own.wait()
        assert (own.held, own.trouble) == (False, "File exists")


def test_a_folder_in_the_locks_place_is_named(lock):
    lock.mkdir(parents=True)
    with turn(lock) as own:
        assert own.wait()
        assert (own.held, own.trouble) == (False, f"{lock} can't be locked (Is a directory)")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EROFS, errno.ENOSPC])
def test_without_locks_nobody_waits_and_nothing_warns(lock, monkeypatch, code):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # filelock's own, of falling back to another kind of lock
        with turn(lock) as own:
            assert own.wait()
            assert (own.held, own.trouble) == (False, f"{lock} can't be locked ({os.strerror(code)})")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"pid": "x"}', b"\xff" * 600, b"[" * 512, b'{"pid": 1, "host": "a\\u001bb", "since_s": 1e300}'],
)
def test_what_the_file_says_of_its_holder_is_not_believed(lock, content):
    holder = Holder(lock)
    lock.write_bytes(content)
    told: list[str] = []
    with turn(lock, told) as own:
        own.wait(for_s=0.25)
    holder.kill()
    assert told[0].isprintable()
    assert "tuning the same workload" in told[0]


def test_the_limit_follows_the_time_limit():
    assert wait_limit_s(None) == WAIT_LIMIT_S
    assert wait_limit_s(1.0) == LEAST_WAIT_S
    assert wait_limit_s(100.0) == 200.0


def test_the_lock_is_the_owners_alone(lock):
    with turn(lock) as own:
        own.wait()
        assert lock.stat().st_mode & 0o077 == 0
    with turn(lock) as again:
        assert again.wait()
        assert again.held


def test_the_folder_is_its_owners_alone(tmp_path):
    with Turn(tmp_path / "cache" / "profiles" / "key.tuning.lock", limit_s=1, tell=print) as turn:
        assert turn.wait()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", tmp_path / "cache/profiles")] == [
        0o700
    ] * 2
