"""Run calls that may crash, exit or hang in a child process. If the child ends, only one result is lost.

The spawned child runs one call at a time, over a pipe. Process pools (concurrent.futures, loky, pebble) do not report
why a worker died, or at which call.
"""

from __future__ import annotations

import ast
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from autosplit.errors import AutosplitError, InputError, one_line
from autosplit.runtime.encoded_error import decoded, encoded

T = TypeVar("T")

UNHURRIED_S = 600.0
"""Default time limit of a call: NCCL's timeout for a rank that hangs."""

_CLOSING_S = 5.0
"""Maximum time in seconds between a request to stop and the end of the process."""

_LOOK_S = 1.0
"""Time in seconds between checks of a silent process. Its forked children keep its pipes open after it dies."""

_SENT_AT_ONCE_BYTES = 4096
"""Number of bytes that every pipe accepts while its reader is still starting."""

_SIGNALS = {
    "SIGKILL": "as the system's out-of-memory killer does",
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "because memory was not available, often in /dev/shm",
    "SIGABRT": "because native code aborted",
    "SIGILL": "because this CPU lacks an instruction",
    "SIGFPE": "because of arithmetic in native code",
}
"""The usual cause of each signal, for error messages."""


class ChildLostError(AutosplitError):
    """A process ended, or was killed, without a result.

    Attributes:
        cause: The reason, as the end of a sentence: ``"was killed by SIGKILL, ..."``.
        hung: Whether the process was killed because it exceeded the time limit.
    """

    code = "process-lost"

    def __init__(self, cause: str, *, hung: bool = False) -> None:
        super().__init__(f"the process {cause}")
        self.cause = cause
        self.hung = hung


class LostCauseError(Exception):
    """Raised in a process that must be replaced. The message becomes the `cause` of `ChildLostError`."""


class Child:
    """An object in a spawned process, whose methods are called from this process.

    Args:
        make: A picklable function that makes the object in the spawned process.

    Raises:
        InputError: `make` cannot be pickled, or needs a script that would start over in the spawned process.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._waiting: bytes | None
        self._waiting, of_main = _pickled(make)
        self._needs_main = bool(of_main)
        if self._needs_main and not _main_can_be_imported():
            raise InputError(
                f"isolate=True, but {of_main[0]} is defined in the main script, which another process can't import "
                "without running it again. Move it to a module, or call autosplit below "
                "`if __name__ == '__main__':`, or leave isolate out.",
            )
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is no process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if there is none. Return before it finishes loading."""
        if self._process is not None:
            return
        self._waiting = self._waiting or _pickled(self._make)[0]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # Not a daemon, because a workload may have a DataLoader with workers. By default, a spawned process would also
        # spawn these workers, which then cannot import the user's file. So pass on our start method.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        process = context.Process(target=_serve, args=(theirs, method), name="autosplit-isolated", daemon=False)
        try:
            with _undisturbed(), nullcontext() if self._needs_main else main_left_out():
                process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise AutosplitError(
                    f"No process could be started ({one_line(error)}). End other processes, or leave isolate out "
                    "(--no-isolate).",
                ) from error
            raise
        finally:
            theirs.close()
        self._process, self._pipe, self._is_ready = process, ours, False
        if len(self._waiting) <= _SENT_AT_ONCE_BYTES:
            self._hand_over()

    def get_ready(self, limit_s: float = UNHURRIED_S) -> None:
        """Wait until the object is made. Start a process if there is none. Kill the process after the time limit.

        Raises:
            ChildLostError: The process ended, or was killed, before it made the object.
        """
        self.start()
        if self._is_ready:
            return
        try:
            if self._waiting is not None:
                self._hand_over()
            self._result(limit_s)
        except BaseException:
            self.end()  # a process without an object cannot be used
            raise
        self._is_ready = True

    def call(self, name: str, *args: Any, limit_s: float = UNHURRIED_S) -> Any:
        """Call a method of the object with picklable arguments. Raise its exceptions here.

        The process is killed if the call takes longer than `limit_s`.

        Raises:
            ChildLostError: The process ended, or was killed, without a result.
        """
        data = pickle.dumps((name, args))
        self.get_ready()
        return self._result(limit_s, data)

    def close(self) -> None:
        """Stop the process. If it is busy with a call, kill it."""
        if self._process is not None and self._pipe is not None and self._is_ready:
            with suppress(OSError):
                self._pipe.send_bytes(b"")
                _exitcode(self._process, _CLOSING_S)
        self.end()

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return
        if process.pid is not None and hasattr(os, "killpg"):
            # The process leads its own process group, and starts no process before it creates the group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(_CLOSING_S)
        if process.exitcode is not None:  # a process that hangs in a driver cannot be killed, so do not wait for it
            process.close()
        pipe.close()

    def _hand_over(self) -> None:
        """Send `make` once. It may be as large as a model, so delete it here."""
        assert self._waiting is not None
        sent, self._waiting = self._waiting, None
        self._send(sent)

    def _send(self, data: bytes) -> None:
        assert self._pipe is not None
        with suppress(OSError):  # if the reader is gone, `_answer` detects it
            self._pipe.send_bytes(data)

    def _result(self, limit_s: float, data: bytes | None = None) -> Any:
        try:
            if data is not None:
                self._send(data)
            kind, value = self._answer(limit_s)
        except BaseException:
            # The process is lost, or still runs the call: Ctrl-C may come as soon as the call is sent.
            self.end()
            raise
        if kind == "raised":
            raise decoded(*value)
        return value

    def _answer(self, limit_s: float) -> tuple[str, Any]:
        assert self._pipe is not None
        assert self._process is not None
        deadline_s = time.monotonic() + limit_s
        while not self._pipe.poll():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ChildLostError(f"did not answer within {limit_s:.3g} s and was stopped", hung=True)
            if self._process.exitcode is not None and not self._pipe.poll():  # a result may have come in the meantime
                raise ChildLostError(self._end_text())
            wait([self._pipe, self._process.sentinel], min(left_s, _LOOK_S))
        try:
            kind, value = pickle.loads(self._pipe.recv_bytes())  # noqa: S301  # by the process that we started
        except (EOFError, OSError):
            raise ChildLostError(self._end_text()) from None
        except Exception as error:
            raise ChildLostError(f"sent unreadable data ({one_line(error)}) and was stopped") from error
        if kind == "lost":
            raise ChildLostError(value)
        return kind, value

    def _end_text(self) -> str:
        assert self._process is not None
        code = _exitcode(self._process, _LOOK_S)
        if code is None:
            return "closed its pipe and was stopped"
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            return f"was killed by signal {-code}"
        return f"was killed by {name}" + (f", {_SIGNALS[name]}" if name in _SIGNALS else "")


def _exitcode(process: BaseProcess, limit_s: float) -> int | None:
    """Wait for a process to end. `join` would also wait for its forked processes."""
    deadline_s = time.monotonic() + limit_s
    while process.exitcode is None and time.monotonic() < deadline_s:
        wait([process.sentinel], 0.02)
    return process.exitcode


class _Pickler(pickle.Pickler):
    """The plain pickler. multiprocessing's pickler would move a live model's tensors to shared memory.

    Attributes:
        of_main: Classes and functions of the main script that were pickled. Loading them needs the script.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: list[str] = []

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, (type, FunctionType)) and item.__module__ in ("__main__", "__mp_main__"):
            self.of_main.append(item.__qualname__)
        return NotImplemented


def _pickled(what: Any) -> tuple[bytes, list[str]]:
    """Return the pickled bytes, and the names of the main script that loading them needs."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(what)
        return file.getvalue(), pickler.of_main
    except Exception as error:  # noqa: BLE001  # pickling runs the objects' code, which may raise anything
        raise InputError(
            f"isolate=True, but the workload can't be pickled ({one_line(error)}). Expected a workload of importable "
            "functions and classes. Define them in a module, or leave isolate out.",
        ) from None


def _main_can_be_imported() -> bool:
    """Return whether the main script can be imported without repeating what it does now.

    multiprocessing imports its file. The line that runs now must be below `if __name__ == "__main__":`.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if name.endswith("__main__"):  # multiprocessing never imports the main module of `python -m package`
        return False
    try:
        tree = ast.parse(Path(main.__file__ or "").read_bytes())
    except (AttributeError, OSError, SyntaxError, ValueError):  # a notebook, `python -c`, or a script from stdin
        return False
    guards = [one for one in tree.body if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    lines = [
        line
        for frame, line in traceback.walk_stack(None)
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)
    ]
    return bool(guards) and all(
        any(guard.lineno <= line <= (guard.end_lineno or 0) for guard in guards) for line in lines
    )


@contextmanager
def main_left_out() -> Iterator[None]:
    """Start processes that do not import the main script, which would run again without a guard."""
    main = vars(sys.modules["__main__"])
    saved: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None  # multiprocessing reads both names, and imports nothing if they are missing
    try:
        yield
    finally:
        main.update(saved)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block Ctrl-C and redirect stdout to stderr, because a new process first runs the user's main module."""
    saved = None
    with suppress(OSError):  # stdout may be closed
        saved = os.dup(1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if hasattr(signal, "pthread_sigmask") else None
    try:
        if saved is not None:
            with suppress(OSError):
                os.dup2(2, 1)
        yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---------------------------------------------------------------------------------------------- in the other process


def _serve(pipe: Connection, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)
    _settle_in()
    served: Any = None
    answer: tuple[str, Any] = ("returned", None)
    with suppress(EOFError):  # the parent has gone
        while answer[0] != "lost" and (request := pipe.recv_bytes()):
            answer = ("returned", None)
            try:
                if served is None:
                    served = _unpickled(request)()
                else:
                    name, args = pickle.loads(request)  # noqa: S301  # from the parent process
                    answer = ("returned", getattr(served, name)(*args))
            except LostCauseError as error:
                answer = ("lost", str(error))
            except BaseException as error:  # noqa: BLE001  # also SystemExit, which the parent raises
                answer = ("raised", encoded(error))
            if not _sent(pipe, answer) or served is None:
                break
    if served is not None and answer[0] != "lost" and hasattr(served, "close"):
        served.close()


def _settle_in() -> None:
    """Separate this process from its parent: stdout, Ctrl-C and the out-of-memory killer. End when the parent ends."""
    with suppress(OSError):
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    if hasattr(os, "setpgid"):
        with suppress(OSError):
            os.setpgid(0, 0)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with suppress(OSError):  # Linux: the out-of-memory killer ends this process before its parent
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            wait([parent.sentinel])
            os._exit(1)  # immediately, even during a step that hangs

        threading.Thread(target=end_with_parent, daemon=True).start()


def _unpickled(data: bytes) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301  # from the parent process
    except (AutosplitError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001  # importing the user's modules may raise anything
        raise InputError(
            f"isolate=True, but the workload can't be loaded in another process ({one_line(error)}). Expected a "
            "workload of importable functions and classes. Define them in a module, or leave isolate out.",
        ) from None


def _sent(pipe: Connection, answer: tuple[str, Any]) -> bool:
    try:
        data = pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001  # pickling a result runs its own code
        data = pickle.dumps(("raised", encoded(error)))
    try:
        pipe.send_bytes(data)
    except OSError:
        return False
    return True
