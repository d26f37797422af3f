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
    """Write the file, and print what was guessed and the next command."""
    from autosplit.extras.starting_workload import write_workload

    with progress(manner):
        written = write_workload(spec, shape=shape, output=output, force=force)
    if manner.as_json:
        print_json(written)
        return 0
    batch = [f"inputs   {written.inputs}"]
    batch += [] if written.targets is None else [f"targets  {written.targets}"]
    loss = written.loss_fn or "the model returns it"
    lines = [f"wrote {written.path}", "", f"model    {written.model}()", *batch, f"loss     {loss}", ""]
    lines.append("next  replace the sample batch with a batch of your data, then run")
    lines.append(f"      python -m autosplit tune {shlex.quote(written.path)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
