"""Run a command of the command line, and turn its errors into one line and an exit code.

Exit codes: 0 done, 2 bad input, 3 does not fit, 4 interrupted (the best plan so far is shown and saved), 5 the user's
own code raised. The answer goes to stdout and everything else to stderr. `parser` has the commands and their options.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from autosplit.cli.exit_code import exit_at_second_ctrl_c, reported
from autosplit.cli.output import EXIT_INTERRUPTED, failed
from autosplit.cli.parser import parse
from autosplit.cli.terminal import restored_terminal, sent_nowhere, show_stopping, streams_made_fit
from autosplit.errors import AutosplitError, InputError, shown

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EAGAIN)
"""Errors of a stdout that can't be written: its disk is full, its terminal is gone, or it is read-only."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Errors that the user can fix are printed as one line on stderr. Other errors are bugs of autosplit and are raised.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _run(words)
        sys.stdout.flush()  # raise errors of stdout now instead of when the process ends
        return code
    except AutosplitError as error:
        return failed(str(error), error.exit_code, getattr(error, "frames", ()))
    except KeyboardInterrupt:
        return failed("The command was interrupted before it had a result. Run it again.", EXIT_INTERRUPTED)
    except BrokenPipeError:
        sent_nowhere(sys.stdout)  # The reader, such as `head`, closed the pipe.
        return 0
    except OSError as error:
        if (message := _message_for_user(error)) is None:
            raise
        return failed(message, InputError.exit_code)


def _run(words: list[str]) -> int:
    try:
        run_command = parse(words)
    except SystemExit:  # argparse has printed the help
        return 0
    return run_command()


def _message_for_user(error: OSError) -> str | None:
    if error.errno == errno.ENAMETOOLONG:
        return f"{shown(error.filename)} is longer than a file name can be. Correct the name."
    if error.filename is None and error.errno in UNWRITABLE:  # errors from files have a filename, so this is stdout
        sent_nowhere(sys.stdout)
        return f"autosplit can't write to stdout ({error.strerror}). Redirect stdout to a file."
    with contextlib.suppress(FileNotFoundError):
        if error.errno != errno.ENOENT or Path.cwd():
            return None
    return "The working directory no longer exists. Change to another directory with cd."


def run() -> NoReturn:
    """Run the command line of this process and exit. A second Ctrl-C exits at once, with the same exit code."""
    streams_made_fit()
    if sys.argv[1:2] in (["show"], ["profiles"]):
        gc.disable()  # collecting garbage would take a tenth of these short commands' time
    # A rank may get one Ctrl-C twice: from the terminal and from torchrun.
    exit_at_second_ctrl_c(_left, first=show_stopping, apart_s=1.0 if os.environ.get("RANK") else 0.0)
    try:
        code = main()
    except KeyboardInterrupt:  # during the message about the first Ctrl-C
        code = EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(reported(code))


def _left() -> int:
    exit_code = reported(EXIT_INTERRUPTED)
    restored_terminal()
    return exit_code
