"""Define autosplit's errors, and warn users. Each message gives the value, the expected value and the next step."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AutosplitError(Exception):
    """Base class of all errors that autosplit raises on purpose.

    Args:
        message: The value, the expected value and the next step.
        code: A name for the kind of error. Default: the `code` of the class.

    Attributes:
        code: A stable name for the kind of error, such as ``"does-not-fit"``. docs/troubleshooting.md lists them.
        exit_code: Exit code of the command line (2 bad input, 3 does not fit, 5 the user's own code raised).
    """

    code = "error"
    exit_code = 2

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InputError(AutosplitError, ValueError):
    """An argument is invalid: a batch below 1, a negative reserve, a missing file."""

    code = "input"


class ArgumentError(InputError, TypeError):
    """A function does not have this keyword. The message suggests the closest keyword."""

    code = "argument"


class DeviceError(InputError, RuntimeError):
    """A device is unknown, absent or unsuitable. The error is a RuntimeError, like nn.DataParallel's device errors."""

    code = "device"


class WorkloadError(InputError):
    """A model, batch, loss or optimizer can't make a training step."""

    code = "workload"


class NotFiniteError(WorkloadError):
    """The gradient of the sample batch is NaN or infinite."""


class PlanError(InputError):
    """A plan can't be read, or can't be used here."""

    code = "plan"


class ProfileError(PlanError):
    """A profile is stale, from another setup, truncated or of an unknown version. It is reported and ignored."""

    code = "profile"


class CheckpointError(InputError):
    """A checkpoint can't be written, is truncated, or belongs to another model."""

    code = "checkpoint"


class SlowRankWarning(UserWarning):
    """The other ranks wait for one rank in every optimizer step."""


class UserCodeError(AutosplitError):
    """The user's own code raised. `__cause__` is the original exception.

    Attributes:
        frames: The user's own frames, innermost last, as ``"file:line in function: source"``.
    """

    code = "user-code"
    exit_code = 5

    def __init__(self, message: str, frames: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.frames = frames


class RankFailedError(AutosplitError):
    """Another rank of the job failed, so this rank stops. `__cause__` is the exception that this rank raised, if any.

    Attributes:
        rank: The failed rank, or None if unknown.
        cause: The reason on one line: an exception's type and message, or how the process ended.
        frames: The user's own frames on that rank, if the user's code failed and the frames are known.
    """

    code = "rank-failed"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        cause: str = "",
        exit_code: int = 1,
        frames: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
        self.exit_code = exit_code
        self.frames = frames


def shown(value: object) -> str:
    """Quote a user's value for a message, on one short line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-12:]}"


OWN_FOLDER = str(Path(__file__).parent) + os.sep
"""The package's folder. Frames of its files are not the user's."""

_FOREIGN_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_installed(path: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, in any environment."""
    return path.startswith(_FOREIGN_FOLDERS) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def user_frames(trace: TracebackType | None) -> tuple[str, ...]:
    """Return the user's own frames of a traceback, without those of autosplit, installed packages and Python.

    Returns:
        ``"file:line in function: source"`` for each frame, innermost last.
    """
    frames = []
    while trace is not None:
        path, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if _is_users(path):
            source = linecache.getline(path, line).strip()
            frames.append(f"{path}:{line} in {trace.tb_frame.f_code.co_name}: {source}")
        trace = trace.tb_next
    return tuple(frames)


def ends_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function, so that tracebacks of autosplit's errors end at its call.

    The causes of an error keep the user's own frames. With ``AUTOSPLIT_DEBUG=1``, tracebacks have all frames.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except AutosplitError as error:
            if os.environ.get("AUTOSPLIT_DEBUG") == "1":
                raise
            for link in [*causes_of(error, contexts=True)][1:]:
                link.__traceback__ = _users_part(link.__traceback__)
            raise error.with_traceback(None) from error.__cause__

    return call


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and show the innermost line of the user's own code.

    In a thread of autosplit there is no such line, so the warning shows the line of the caller.
    """
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    place = next((frame for frame in frames if _is_users(frame.f_code.co_filename)), frames[1])
    warnings.warn_explicit(
        message,
        category,
        place.f_code.co_filename,
        place.f_lineno,
        place.f_globals.get("__name__", "<string>"),  # without a module, Python drops the warning
        place.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_users(path: str) -> bool:
    return not path.startswith((OWN_FOLDER, "<frozen")) and not is_installed(path)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _users_part(trace.tb_next)
    if not _is_users(trace.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if there is no message.

    torch raises the error of a replica or of a loader's worker again, with its traceback and message as the message
    (torch/_utils.py, ExceptionWrapper). Then return the first line of the original message.
    """
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("Caught ") and lines[1].startswith("Original Traceback"):
        before = f"{lines[0].split()[1]}: "  # the class of the original error
        original = [line.partition(before)[2] for line in lines if not line.startswith(" ") and before in line]
        place = lines[0].rstrip(".").split(" ", 2)[2]  # "in replica 1 on device 1"
        lines = [f"{place}: {original[-1]}"] if original else lines
    return lines[0] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message. For a UserCodeError, use its cause."""
    shown = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
    return f"{type(shown).__name__}: {first_line(shown)}" if str(shown).strip() else type(shown).__name__


def causes_of(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an exception and its causes. With `contexts`, also yield exceptions that were being handled."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if contexts else None)


_BROKEN_OFF = re.compile(
    # gloo raises plain RuntimeErrors, and so does an aborted NCCL group (last pattern). Other errors are DistErrors.
    r"gloo/transport|Connection (?:closed|reset) by peer|Broken pipe|NCCL (?:communicator|error|operation)"
)


def is_broken_off(error: BaseException) -> bool:
    """Return whether a collective failed, because another rank ended or did not join it in time."""
    from torch.distributed import DistError

    return any(
        isinstance(link, DistError) or (isinstance(link, RuntimeError) and _BROKEN_OFF.search(str(link)))
        for link in causes_of(error, contexts=True)
    )


def advise(error: BaseException, advice: str) -> None:
    """Attach advice to an exception of the user's code, for its traceback and for `from_user_code`."""
    if not hasattr(error, "autosplit_advice"):
        error.autosplit_advice = advice  # type: ignore[attr-defined]
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"autosplit: {advice}")


_ABSENT_DEVICE = ("not compiled with CUDA", "No CUDA GPUs are available", "Found no NVIDIA driver")


def _absent_device_advice(error: BaseException) -> str:
    if not any(text in str(error) for text in _ABSENT_DEVICE):
        return ""
    frames = user_frames(error.__traceback__)
    place, _, source = frames[-1].partition(": ") if frames else ("the code", "", "a call of .cuda()")
    return (
        f"{place} calls CUDA ({source}), but this step runs on the CPU; create tensors with device=x.device, on the "
        "device of the inputs, instead of .cuda() or device='cuda'"
    )


def _layer_text(trace: TracebackType | None) -> str:
    """Name the innermost layer or loss in a traceback. torch's layers have no frames in the user's code."""
    layers: list[Any] = []
    while trace is not None:
        layer = trace.tb_frame.f_locals.get("self")
        if hasattr(type(layer), "named_modules"):  # detects modules without importing torch
            layers.append(layer)
        trace = trace.tb_next
    if not layers:
        return ""
    name = next((name for name, layer in layers[0].named_modules() if layer is layers[-1]), "")
    name = f"{name}.".removeprefix("module.").rstrip(".")  # a wrapper adds this prefix to the user's names
    kind = type(layers[-1])
    if not name and not kind.__module__.startswith("torch."):
        return ""  # the user's own model has a frame already
    return f" (in {f'layer {name}, ' if name else ''}a {kind.__name__})"


@contextmanager
def users_errors(what: str) -> Iterator[None]:
    """Convert exceptions of the user's code to UserCodeError with the user's frames. Keep autosplit's own errors."""
    try:
        yield
    except AutosplitError:
        raise
    except SyntaxError as error:
        wrapped = from_user_code(error, what)
        # If the compiler can't parse a file, the traceback has no frame for the file.
        at = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
        raise UserCodeError(str(wrapped), (*wrapped.frames, at)) from error
    except (Exception, SystemExit) as error:
        raise from_user_code(error, what) from error


_SIDE_OUTPUT = (
    "the loss may use a tensor that the model or a forward hook stored. The devices run replicas of the model, so "
    "that tensor is from an earlier forward. Return it from forward(), and compute the loss from the outputs"
)

_FOREIGN_TENSOR = (
    "a replica used a tensor of another device. Register tensors that the model stores as buffers, create tensors with "
    "device=x.device, or train with DDP (strategy='ddp')"
)


def _replica_advice(error: BaseException) -> str:
    if "backward through the graph a second time" in str(error):
        return _SIDE_OUTPUT
    is_foreign = "in replica" in str(error) and "tensors to be on the same device" in str(error)
    return _FOREIGN_TENSOR if is_foreign else ""


def from_user_code(error: BaseException, what: str) -> UserCodeError:
    """Return an error that shows where the user's own code raised an exception.

    Args:
        error: The exception. It becomes the cause.
        what: The code that was running, as the subject of the message.
    """
    advice = (
        getattr(error, "autosplit_advice", None)
        or _absent_device_advice(error)
        or _replica_advice(error)
        or "fix it and run again"
    )
    message = f"{what} raised {one_line(error)}{_layer_text(error.__traceback__)}; {advice}"
    wrapped = UserCodeError(message, user_frames(error.__traceback__))
    wrapped.__cause__ = error
    return wrapped
