"""`python -m autosplit`: the command line."""

from autosplit.cli import run

if __name__ == "__main__":
    run()
