"""Run ``autosplit init``: write a workload file for a model."""

from __future__ import annotations

import shlex

from autosplit.cli.output import CommandResult, Manner, progress
from autosplit.tools.starting_workload import StartingWorkload, write_workload


def init(
    manner: Manner,
    *,
    spec: str,
    input_: tuple[int, ...] | None = None,
    output: str | None = None,
    force: bool = False,
) -> CommandResult[StartingWorkload]:
    """Write a workload file. The answer has the guessed sample batch and the next command."""
    with progress(manner):
        written = write_workload(spec, shape=input_, output=output, force=force)
    rows = {"model": f"{written.model}()", "inputs" if written.is_guess else "batch": written.inputs}
    rows |= {} if written.targets is None else {"targets": written.targets}
    rows["loss"] = written.loss_fn or "the model returns it"
    command = f"python -m autosplit tune {shlex.quote(written.path)}"
    lines = [f"wrote {written.path}", "", *(f"{name:<9}{text}" for name, text in rows.items()), ""]
    guess = ["next  replace the guessed sample batch with a batch of your data, then run", f"      {command}"]
    lines += guess if written.is_guess else [f"next  {command}"]
    return CommandResult(written, "\n".join(lines) + "\n")
