"""Write a command's answer to stdout, alone; errors, notes, progress and the log to stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from autosplit.cli.terminal import console_for, progress_bar, sent_nowhere, stdout_kept_clean, width_of
from autosplit.errors import InputError
from autosplit.text import ascii_json, printable, printable_json, without_passwords

if TYPE_CHECKING:
    from rich.console import Console

    from autosplit.cli.pasted_code import Origin
    from autosplit.plan.plan import Plan
    from autosplit.tuning.progress import Progress

EXIT_INTERRUPTED = 4


@dataclass(frozen=True)
class Manner:
    """How a command says what it has to say, by its flags: `main` has what each of them does."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    details: bool = False
    code: bool = False

    def __post_init__(self) -> None:
        given = [flag for flag in self.flags() if flag not in ("--quiet", "--verbose")]
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(given)} are given together; expected one of them at most; choose one",
                code="output-flags-together",
            )
        if self.quiet and self.verbose:
            raise InputError(
                "--quiet and --verbose are both given; expected one of them at most; leave one out",
                code="quiet-and-verbose",
            )

    def flags(self) -> list[str]:
        """Return it as it was given on the command line."""
        return [f"--{one.name.removeprefix('as_')}" for one in fields(self) if getattr(self, one.name)]


def speaks() -> bool:
    """Tell whether this process is the one of its machine that prints: of a job's ranks the first."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


# ----------------------------------------------------------------------------------------------------------- stderr


def failed(message: str, exit_code: int, frames: tuple[str, ...] = ()) -> int:
    """Say what went wrong, with the user's own frames below, and return the exit code as it was given."""
    lines = [*_fitted(f"error: {_harmless(' '.join(message.split()))}"), *(f"  {_harmless(frame)}" for frame in frames)]
    if speaks():
        _tell(lines)
    return exit_code


def note(message: str, manner: Manner) -> None:
    """Say what is to be known beside the answer, unless it is to be quiet."""
    if speaks() and not manner.quiet:
        _tell(_fitted(_harmless(message)))


def _tell(lines: list[str]) -> None:
    """Write lines to stderr; one that takes none has no part in how the command ends."""
    try:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        sent_nowhere(sys.stderr)


def _harmless(text: str) -> str:
    return printable(without_passwords(text))


def _fitted(line: str) -> list[str]:
    """Break a line for the terminal that stderr is; paths, and what else is one word, stay whole to be copied."""
    if not sys.stderr.isatty():
        return [line]
    import textwrap

    width = max(20, width_of(sys.stderr))
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def progress(manner: Manner) -> Iterator[Callable[[Progress], None]]:
    """Keep stdout for the answer while something runs; draw a bar of it, or write a line a stage, or be quiet."""
    drawn = progress_bar() if speaks() and not manner.quiet else nullcontext(lambda _progress: None)
    with stdout_kept_clean(), drawn as tell:
        yield tell


class _Lines(logging.Handler):
    """Writes a line for each record, with the seconds since it was made where it is no warning."""

    def __init__(self) -> None:
        super().__init__()
        rank = os.environ.get("RANK")
        self._whose = "" if rank in (None, "0") else f"rank {rank}: "
        self._began_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        said = self._whose + printable(without_passwords(" ".join(record.getMessage().split())))
        if record.levelno < logging.WARNING:
            said = f"{time.monotonic() - self._began_s:7.2f} s  {said}"
        # To what stderr is now: a bar that is being drawn has put something there that keeps out of its way.
        sys.stderr.write(f"{said}\n")


@contextmanager
def logged(manner: Manner) -> Iterator[None]:
    """Write what is logged under ``autosplit`` to stderr: warnings; all with ``--verbose``, nothing with ``--quiet``.

    Whatever handlers the user's code gives to other loggers, these lines come once.
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


def print_plan(plan: Plan, origin: Origin, manner: Manner) -> None:
    """Print a plan: for reading, as JSON, or the lines to paste."""
    if manner.as_json:
        write_json(printable_json(plan.to_json()))
        return
    if manner.code:
        from autosplit.cli.pasted_code import paste_lines

        lines = paste_lines(plan, origin)
        if plan.simulated:
            lines = ("# on the machine that has these cards", *lines)
        sys.stdout.write("".join(f"{printable(line, longest=None)}\n" for line in lines))
    else:
        from autosplit.cli import plan_report

        plan_report.print_plan(plan, console_for(sys.stdout), origin=origin, details=manner.details)


def print_answer(answer: Any, manner: Manner, show: Callable[[Console], object]) -> None:
    """Print an answer: as JSON, or as `show` prints it for reading."""
    if manner.as_json:
        print_json(answer)
    else:
        show(console_for(sys.stdout))


def print_json(answer: Any) -> None:
    """Print an answer, one of `cli.json_types` or a plan, as JSON with its attributes' names as keys."""
    write_json(json_text(answer))


def write_json(text: str) -> None:
    """Write JSON to stdout, whose encoding may lack some of its characters: they are escaped in JSON's own way."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = ascii_json(text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json_text(answer: Any) -> str:
    """Return an answer as `print_json` prints it."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    except UnicodeEncodeError:  # the name of a file that is not UTF-8: Python has its bytes as lone surrogates
        import json

        text = json.dumps(msgspec.to_builtins(answer), indent=2, ensure_ascii=False)
    return printable_json(text)
