"""Run ``autosplit init``: write a workload file for a model."""

from __future__ import annotations

import shlex
import sys

from autosplit.cli.output import Manner, print_json, progress


def init(
    manner: Manner,
    *,
    spec: str,
    shape: tuple[int, ...] | None = None,
    output: str | None = None,
    force: bool = False,
) -> int:
    """Write a workload file, and print the guessed sample batch and the next command."""
    from autosplit.tools.starting_workload import write_workload

    with progress(manner):
        written = write_workload(spec, shape=shape, output=output, force=force)
    if manner.as_json:
        print_json(written)
        return 0
    rows = {"model": f"{written.model}()", "inputs" if written.is_guess else "batch": written.inputs}
    rows |= {} if written.targets is None else {"targets": written.targets}
    rows["loss"] = written.loss_fn or "the model returns it"
    command = f"python -m autosplit tune {shlex.quote(written.path)}"
    lines = [f"wrote {written.path}", "", *(f"{name:<9}{text}" for name, text in rows.items()), ""]
    guess = ["next  replace the guessed sample batch with a batch of your data, then run", f"      {command}"]
    lines += guess if written.is_guess else [f"next  {command}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
