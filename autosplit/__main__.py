"""`python -m autosplit`: the command line."""

from autosplit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
