"""Write a command's answer to stdout, and everything else (errors, notes, progress, the log) to stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from autosplit.cli.terminal import DUMB, clean_stdout, console_for, progress_bar, sent_nowhere, width_of
from autosplit.errors import AutosplitError, InputError
from autosplit.text import ascii_json, printable, printable_json, without_passwords

if TYPE_CHECKING:
    from rich.console import Console

    from autosplit.cli.pasted_code import Origin
    from autosplit.plan.plan import Plan
    from autosplit.tuning.progress import Progress

T = TypeVar("T")

EXIT_MISFIT = 3
EXIT_INTERRUPTED = 4


@dataclass(frozen=True)
class Manner:
    """A command's output flags. `options` explains them.

    Attributes:
        words: The command line.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    details: bool = False
    code: bool = False
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one_of in (("json", "details", "code"), ("quiet", "verbose")):
            given = [f"--{name}" for name in one_of if getattr(self, name)]
            if len(given) > 1:
                raise InputError(f"{' and '.join(given)} are given together. Choose one of them.")


class Problem(NamedTuple):
    """An error that a command prints in addition to its answer."""

    message: str
    exit_code: int


@dataclass(frozen=True)
class CommandResult(Generic[T]):
    """A command's answer.

    Attributes:
        value: The value that ``--json`` prints. docs/json-schema.json describes its type.
        report: The answer without ``--json``: a text, or a function that prints to a console.
        problems: Errors that are printed after the answer, and interruptions, which are printed before the answer. The
            exit code of the last is the command's.
    """

    value: T
    report: str | Callable[[Console], object] = ""
    problems: Sequence[Problem] = ()


@dataclass(frozen=True)
class Place:
    """A path.

    Attributes:
        path: The folder of all profiles, the file of the named profile, or the page that `report` wrote.
    """

    path: str


def speaks() -> bool:
    """Return whether this process prints: the only process, or the first rank of its machine."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


# ----------------------------------------------------------------------------------------------------------- stderr


def failed(message: str, exit_code: int, frames: tuple[str, ...] = ()) -> int:
    """Print an error, followed by the user's frames. Return the exit code."""
    text, *code = message.split("\n    ")  # indented lines are code and are not wrapped
    first, *rest = _fitted(f"error: {_harmless(' '.join(text.split()))}")
    rest += [f"    {_harmless(line)}" for line in code]
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in DUMB:
        first = f"\x1b[1;31merror:\x1b[0m{first.removeprefix('error:')}"
    lines = [first, *rest, *(f"  {_harmless(frame)}" for frame in frames)]
    if speaks():
        _write(lines)
    return exit_code


def note(message: str, manner: Manner) -> None:
    """Print a note to stderr, unless the output is quiet."""
    if speaks() and not manner.quiet:
        _write(_fitted(_harmless(message)))


def _write(lines: list[str]) -> None:
    try:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        sent_nowhere(sys.stderr)


def _harmless(text: str) -> str:
    return printable(without_passwords(text))


def _fitted(line: str) -> list[str]:
    """Wrap a line to the width of stderr's terminal. Do not break words such as paths, so that they can be copied."""
    if not sys.stderr.isatty():
        return [line]
    import textwrap

    width = max(20, width_of(sys.stderr))
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def progress(manner: Manner) -> Iterator[Callable[[Progress], None]]:
    """Draw a progress bar, write one line per stage, or write nothing. Redirect stdout to stderr meanwhile."""
    drawn = progress_bar() if speaks() and not manner.quiet else nullcontext(lambda _progress: None)
    with clean_stdout(), drawn as report:
        yield report


class _Lines(logging.Handler):
    """Write a line for each log record. Records below a warning get the seconds since the start."""

    def __init__(self) -> None:
        super().__init__()
        rank = os.environ.get("RANK")
        self._prefix = "" if rank in (None, "0") else f"rank {rank}: "
        self._began_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        line = self._prefix + printable(without_passwords(" ".join(record.getMessage().split())))
        if record.levelno < logging.WARNING:
            line = f"{time.monotonic() - self._began_s:7.2f} s  {line}"
        # Read sys.stderr now, because a progress bar replaces it to keep lines from disturbing the bar.
        sys.stderr.write(f"{line}\n")


@contextmanager
def logged(manner: Manner) -> Iterator[None]:
    """Write the log of ``autosplit`` to stderr: warnings, everything with ``--verbose``, or nothing with ``--quiet``.

    The handlers that the user's code adds to other loggers do not get these lines.
    """
    log = logging.getLogger("autosplit")
    level, propagate = log.level, log.propagate
    handler = _Lines()
    log.addHandler(handler)
    log.setLevel(logging.ERROR if manner.quiet else logging.DEBUG if manner.verbose else logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


# ----------------------------------------------------------------------------------------------------------- stdout


def finish(answer: CommandResult[Any] | int, manner: Manner) -> int:
    """Print a command's answer and its problems, and return the exit code.

    A command that has printed everything itself returns its exit code as the answer.
    """
    if isinstance(answer, int):
        return answer
    after = [problem for problem in answer.problems if problem.exit_code != EXIT_INTERRUPTED]
    print_problems([problem for problem in answer.problems if problem not in after])
    if manner.json:
        write_json(json_text(answer.value))
    elif isinstance(answer.report, str):
        sys.stdout.write(answer.report)
    else:
        answer.report(console_for(sys.stdout))
    sys.stdout.flush()
    print_problems(after)
    return answer.problems[-1].exit_code if answer.problems else 0


def print_problems(problems: Sequence[Problem]) -> int:
    """Print errors, and return the exit code of the last."""
    return [0, *(failed(*problem) for problem in problems)][-1]


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Append an error of autosplit to the problems of an answer, so that it is printed after the answer."""
    try:
        yield
    except AutosplitError as error:
        problems.append(Problem(str(error), error.exit_code))


def report_of_plan(plan: Plan, origin: Origin, manner: Manner) -> str | Callable[[Console], object]:
    """Return a plan's report, or its lines to paste."""
    if manner.code:
        from autosplit.cli.pasted_code import paste_lines

        lines = [*(["# on the machine that has these GPUs"] if plan.simulated else []), *paste_lines(plan, origin)]
        return "".join(f"{printable(line, longest=None)}\n" for line in lines)
    from autosplit.cli.plan_report import print_plan

    return lambda console: print_plan(plan, console, origin=origin, details=manner.details)


def write_json(text: str) -> None:
    """Write JSON to stdout. If the encoding lacks some characters, escape them as JSON does."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = ascii_json(text)
    sys.stdout.write(text + "\n")


def json_text(answer: Any) -> str:
    """Return an answer, a plan or a dataclass, as JSON text with the names of its attributes as keys."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8 has lone surrogates
        import json

        text = json.dumps(msgspec.to_builtins(answer), indent=2, ensure_ascii=False)
    return printable_json(text)
