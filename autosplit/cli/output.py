"""Write a command's answer to stdout, and everything else (errors, notes, progress, the log) to stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from autosplit.cli.terminal import DUMB, console_for, progress_bar, sent_nowhere, stdout_kept_clean, width_of
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
    """A command's output flags. `parser` explains them."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    details: bool = False
    code: bool = False

    def __post_init__(self) -> None:
        given = [flag for flag in self.flags() if flag not in ("--quiet", "--verbose")]
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(given)} are given together. Choose one of them.",
            )
        if self.quiet and self.verbose:
            raise InputError(
                "--quiet and --verbose are both given. Leave one of them out.",
            )

    def flags(self) -> list[str]:
        """Return the flags as on the command line."""
        return [f"--{one.name.removeprefix('as_')}" for one in fields(self) if getattr(self, one.name)]


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
    with stdout_kept_clean(), drawn as report:
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


def print_plan(plan: Plan, origin: Origin, manner: Manner) -> None:
    """Print a plan as a report, as JSON, or as lines to paste."""
    if manner.as_json:
        write_json(printable_json(plan.to_json()))
        return
    if manner.code:
        from autosplit.cli.pasted_code import paste_lines

        lines = paste_lines(plan, origin)
        if plan.simulated:
            lines = ("# on the machine that has these GPUs", *lines)
        sys.stdout.write("".join(f"{printable(line, longest=None)}\n" for line in lines))
    else:
        from autosplit.cli import plan_report

        plan_report.print_plan(plan, console_for(sys.stdout), origin=origin, details=manner.details)


def print_answer(answer: Any, manner: Manner, show: Callable[[Console], object]) -> None:
    """Print an answer as JSON, or as a report by `show`."""
    if manner.as_json:
        print_json(answer)
    else:
        show(console_for(sys.stdout))


def print_json(answer: Any) -> None:
    """Print an answer, one of `cli.json_types` or a plan, as JSON with its attributes' names as keys."""
    write_json(json_text(answer))


def write_json(text: str) -> None:
    """Write JSON to stdout. If the encoding lacks some characters, escape them as JSON does."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = ascii_json(text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json_text(answer: Any) -> str:
    """Return an answer as JSON text."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8 has lone surrogates
        import json

        text = json.dumps(msgspec.to_builtins(answer), indent=2, ensure_ascii=False)
    return printable_json(text)
