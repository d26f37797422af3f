"""The separate process for real steps: how it ends, and what it leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest
from errands import Errand, OnlyHere, die, hang, refuse
from events import until
from folders import ROOT, TESTS
from raised import raises

from autosplit.errors import InputError, UserCodeError
from autosplit.runtime.child_process import Child, ChildLostError

POSIX = pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals and forks are POSIX's")
FROM_HERE = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def child():
    child = Child(Errand)
    yield child
    child.close()


@pytest.fixture
def make():
    made = []

    def of(function):
        made.append(Child(function))
        return made[-1]

    yield of
    for child in made:
        child.close()


def is_there(pid):
    """Return whether a process lives. A zombie does not live."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Calls


def test_what_is_larger_than_a_pipe_is_sent_too(make):
    content = os.urandom(3 * 2**20)
    assert make(partial(Errand, content)).call("has") == content


@pytest.mark.parametrize("kind", ["typed", "awkward", "foreign"])
def test_what_is_raised_arrives_with_its_cause(child, kind):
    expected = {"typed": UserCodeError, "awkward": RuntimeError, "foreign": ValueError}[kind]
    with pytest.raises(expected) as caught:
        child.call("fail", kind)
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    if kind == "typed":
        assert (str(caught.value), caught.value.frames) == ("a message", ("a frame", "another"))
    if kind == "awkward":
        assert str(caught.value) == "AwkwardError: 1 and 2"
    if kind == "foreign":  # an unexpected exception, so its traceback is useful
        assert "in fail" in str(caught.value.__cause__.__cause__)
    assert child.call("add", 1, 1) == 2


def test_an_interrupt_and_an_exit_arrive_as_they_are(child):
    with pytest.raises(KeyboardInterrupt):
        child.call("fail", "interrupted")
    with pytest.raises(SystemExit) as caught:
        child.call("exit_politely", 3)
    assert caught.value.code == 3


def test_what_can_not_be_sent_back_is_an_error(child):
    with pytest.raises(TypeError, match="pickle"):
        child.call("unsendable")
    assert child.call("add", 1, 1) == 2


def test_stdout_is_not_written_to(child, capfd):
    assert child.call("talk") == "answer"
    child.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["garbage", "garbage", "more"]


# Deaths


DEATHS = {
    "was killed by SIGKILL, as the system's out-of-memory killer does": ("signal", signal.SIGKILL),
    "was killed by SIGSEGV, a segmentation fault": ("signal", signal.SIGSEGV),
    "was killed by SIGTERM": ("signal", signal.SIGTERM),
    "exited with code 7": ("exit", 7),
    "exited with code 0": ("exit", 0),
    "was of no more use": ("lose",),
}


@POSIX
@pytest.mark.parametrize("cause", DEATHS)
def test_a_death_is_told_and_the_next_call_has_another_process(child, cause):
    before = child.call("pids")[0]
    with pytest.raises(ChildLostError) as caught:
        child.call(*DEATHS[cause])
    assert (caught.value.cause, caught.value.hung) == (cause, False)
    assert child.pid is None
    assert not is_there(before)
    assert child.call("pids")[0] != before


@POSIX
@pytest.mark.parametrize("errand", ["hang", "hang_deaf"])
def test_a_call_that_hangs_is_ended(child, errand):
    pid = child.call("pids")[0]
    with pytest.raises(ChildLostError, match=r"did not answer within 0\.3 s") as caught:
        child.call(errand, limit_s=0.3)
    assert caught.value.hung
    assert not is_there(pid)


@POSIX
@pytest.mark.parametrize(
    ("errand", "cause"),
    [("scribble", "sent unreadable data"), ("close_all", "exited with code"), ("fork_and_die", "SIGKILL")],
)
def test_a_spoiled_pipe_is_a_death(child, errand, cause):
    child.call("pids")
    with pytest.raises(ChildLostError, match=cause) as caught:
        child.call(errand, limit_s=200)
    assert not caught.value.hung, "it was seen at once, not by the limit"
    assert child.call("add", 1, 1) == 2


# The start


def test_what_can_not_be_loaded_there_is_refused(make):
    with raises(InputError):
        make(partial(Errand, OnlyHere())).call("has")


def test_what_is_raised_at_the_start_arrives(make):
    child = make(refuse)
    for _ in range(2):
        with pytest.raises(UserCodeError, match="it can't be built") as caught:
            child.get_ready()
        assert caught.value.frames == ("its frame",)


@POSIX
def test_a_death_at_the_start_is_told(make):
    with pytest.raises(ChildLostError, match="SIGKILL"):
        make(die).get_ready()


def test_a_start_that_hangs_is_ended(make):
    child = make(hang)
    child.start()
    pid = child.pid
    with pytest.raises(ChildLostError, match=r"did not answer within 0\.5 s"):
        child.get_ready(0.5)
    assert not is_there(pid)


# The end


def test_a_process_that_waits_stops_by_itself(tmp_path):
    child, path = Child(Errand), tmp_path / "closed"
    child.call("told_when_closed", str(path))
    child.close()
    assert path.read_text() == "closed"
    child.close()


@POSIX
def test_nothing_is_left_behind():
    def once(*call):
        child = Child(partial(Errand, b"x" * 10_000))
        try:
            child.call(*call, limit_s=0.2)
        except (ChildLostError, ValueError):
            pass
        finally:
            child.close()

    def held():
        return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0

    once("add", 1, 2)  # multiprocessing's tracker of resources starts with the first, and stays
    before, threads = held(), threading.active_count()
    for call in [("add", 1, 2), ("exit", 3), ("hang",), ("fail", "foreign"), ("close_all",)]:
        once(*call)
    unused = Child(Errand)
    unused.start()
    unused.close()
    assert held() == before
    assert threading.active_count() == threads
    assert multiprocessing.active_children() == []


@POSIX
def test_what_it_started_ends_with_it(child):
    pid = child.call("fork")
    assert is_there(pid)
    child.close()
    until(lambda: not is_there(pid))


@POSIX
def test_ctrl_c_ends_it(child, tmp_path):
    pid, hangs = child.call("pids")[0], tmp_path / "hangs"

    def press():
        until(hangs.exists)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        child.call("hang_after", str(hangs))
    presses.join()
    assert not is_there(pid)
    assert child.call("add", 1, 1) == 2


@POSIX
def test_ctrl_c_just_after_a_call_was_sent_ends_it(child, tmp_path, monkeypatch):
    """The process finished the call and returned its result for the next call."""
    pid, send = child.call("pids")[0], child._send

    def send_and_press(data):
        send(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_send", send_and_press)
    with pytest.raises(KeyboardInterrupt):
        child.call("hang_after", str(tmp_path / "hangs"))
    monkeypatch.undo()
    assert not is_there(pid)
    assert child.call("add", 1, 1) == 2


@POSIX
def test_it_ends_when_its_parent_is_killed():
    code = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from errands import Errand
        from autosplit.runtime.child_process import Child
        if __name__ == "__main__":
            child = Child(Errand)
            print(child.call("pids")[0], flush=True)
            child.call("hang")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=FROM_HERE) as parent:
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()
    until(lambda: not is_there(pid))


def test_a_script_without_a_guard_runs_once(tmp_path):
    """Its main module ran again in the other process, and tried to start a third process there."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom errands import Errand\n"
        "from autosplit.runtime.child_process import Child\nprint('noise')\nprint(Child(Errand).call('add', 1, 2))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=FROM_HERE)
    assert (done.stdout, done.stderr) == ("noise\n3\n", "")


def test_a_process_that_can_not_be_ended_is_not_waited_for(child, monkeypatch):
    """A process that hangs in a driver survives SIGKILL. Joining it waited forever."""
    child.get_ready()
    process = child._process
    waited = []

    def join(timeout=None):
        waited.append(timeout)

    with monkeypatch.context() as driver:
        driver.setattr(process, "join", join)
        driver.setattr(process, "kill", lambda: None)
        driver.setattr(os, "killpg", lambda group, signal: None)
        child.end()
    assert waited
    assert None not in waited
    assert process.is_alive()
    process.kill()
    process.join()
