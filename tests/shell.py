"""Run `python -m autosplit` in a process that is forked after torch was imported, which saves seconds."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from ranks import starting


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str


def autosplit(*arguments: str, folder: Path, limit_s: float = 100.0) -> Ran:
    """Run a command line in a folder.

    Args:
        *arguments: The words after `autosplit`.
        folder: The working directory. The output is written to two files next to it.
        limit_s: The command is killed after this time.

    Returns:
        The exit code and the printed text.

    Raises:
        TimeoutError: The command did not end in time.
    """
    streams = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    process = starting().Process(target=_run, args=(arguments, dict(os.environ), str(folder), *map(str, streams)))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"autosplit {' '.join(arguments)} did not end: {streams[1].read_text()}")
    out, err = (stream.read_text(encoding="utf-8") for stream in streams)
    return Ran(process.exitcode, out, err)


def _run(arguments: tuple[str, ...], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        with open(path, "wb") as stream:  # noqa: PTH123 - a descriptor is wanted
            os.dup2(stream.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["autosplit", *arguments]
    runpy.run_module("autosplit", run_name="__main__", alter_sys=True)
