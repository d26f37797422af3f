"""Run ``autosplit launch``: start a training script with torchrun and a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from autosplit.cli.named_plan import plan_file
from autosplit.cli.output import CommandResult, Manner, note
from autosplit.errors import InputError
from autosplit.launcher import STARTER_VARIABLE
from autosplit.plan.torchrun import NEWEST_VARIABLE, PLAN_VARIABLE, command_for
from autosplit.text import printable


@dataclass(frozen=True)
class LaunchCommand:
    """The command that `launch` would run.

    Attributes:
        command: The program and its arguments.
        environment: Additional environment variables.
        plan: A description of the plan.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: str


def launch(
    manner: Manner, *, arguments: Sequence[str], plan: str | None = None, print_: bool = False
) -> CommandResult[LaunchCommand]:
    """Replace this process with torchrun, or return torchrun's command."""
    from autosplit.ddp.find_plan import described, plan_for_job

    if plan is None and "--plan" in arguments:
        note(
            "--plan stands after the script, so the script gets it. Put autosplit's options before the script.", manner
        )
    found, path = plan_for_job(None if plan is None else str(plan_file(plan)))
    assert path is not None, "only a plan that was passed as an object has no file"
    job = command_for(found, path, arguments)
    if plan is None and not os.environ.get(PLAN_VARIABLE):
        job = replace(job, variables={**job.variables, NEWEST_VARIABLE: "1"})
    description = printable(f"{described(found)}, {path}")
    if manner.json or print_:
        return CommandResult(LaunchCommand(job.command, dict(job.variables), description), job.line() + "\n")
    script = next((argument for argument in arguments if argument.endswith(".py")), None)
    if script is not None and not Path(script).exists():
        raise InputError(f"{script} does not exist. Check the path of the training script.")
    note(f"plan: {description}", manner)
    with suppress(OSError, UnicodeDecodeError):  # torchrun reports errors of the script
        if script is not None and "autosplit" not in Path(script).read_text(encoding="utf-8"):
            text = (
                "Each process trains its own model on all samples, unless the script calls autosplit.ddp.setup() "
                "in another module."
            )
            note(f"{script} does not import autosplit. {text}", manner)
    sys.stdout.flush()
    sys.stderr.flush()
    # torchrun replaces this process, so that it gets the signals and sets the exit code. Its process id stays the same.
    inherited = {name: value for name, value in os.environ.items() if name != NEWEST_VARIABLE}
    environment = {**inherited, **job.variables, STARTER_VARIABLE: str(os.getpid())}
    os.execve(job.command[0], list(job.command), environment)  # noqa: S606 - our own command
    raise AssertionError("execve replaces this process")
