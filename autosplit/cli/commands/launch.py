"""Run ``autosplit launch``: start a training script with torchrun and a plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from autosplit.cli.named_plan import plan_file
from autosplit.cli.output import Manner, note, print_json
from autosplit.errors import InputError


def launch(manner: Manner, *, arguments: Sequence[str], plan: str | None = None, print_only: bool = False) -> int:
    """Replace this process with torchrun, or print torchrun's command as a shell command line or as JSON."""
    from autosplit.cli.torchrun_job import launch_of

    found = launch_of(None if plan is None else str(plan_file(plan)), arguments)
    if manner.as_json:
        from autosplit.cli.json_types import LaunchCommand

        print_json(LaunchCommand(found.command, dict(found.variables), found.description))
        return 0
    if print_only:
        sys.stdout.write(found.line() + "\n")
        return 0
    script = next((argument for argument in arguments if argument.endswith(".py")), None)
    if script is not None and not Path(script).exists():
        raise InputError(f"{script} does not exist. Check the path of the training script.", code="script-missing")
    note(f"plan: {found.description}", manner)
    with suppress(OSError, UnicodeDecodeError):  # torchrun reports errors of the script
        if script is not None and "autosplit" not in Path(script).read_text(encoding="utf-8"):
            text = (
                "Each process trains its own model on all samples, unless the script calls autosplit.ddp.setup() "
                "in another module."
            )
            note(f"{script} does not import autosplit. {text}", manner)
    found.run()
    raise AssertionError("execve replaces this process")
