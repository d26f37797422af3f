"""Start the command line, for `python -m autosplit` and the script `autosplit`.

Importing the command line takes a moment. Ctrl-C during this time is handled here.
"""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run this process's command line, and exit."""
    try:
        from autosplit.cli.main import run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from autosplit.cli.exit_code import reported
        from autosplit.cli.output import EXIT_INTERRUPTED, failed

        failed("The command was interrupted before it began. Run it again.", EXIT_INTERRUPTED)
        raise SystemExit(reported(EXIT_INTERRUPTED)) from None


if __name__ == "__main__":
    main()
