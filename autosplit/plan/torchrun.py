"""Check whether a plan can start a DDP job, and make torchrun's command for it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosplit.errors import DeviceError, InputError, PlanError
from autosplit.plan.layout import Layout
from autosplit.plan.record import PlanRecord
from autosplit.text import printable

PLAN_VARIABLE = "AUTOSPLIT_PROFILE"
"""Environment variable with the file of the job's plan."""

NEWEST_VARIABLE = "AUTOSPLIT_PROFILE_IS_NEWEST"
"""Environment variable, set to "1" if `launch` chose the newest plan, because its user named none."""

_COUNT = "nproc-per-node"
_NODES = "nnodes"
_MEETINGS = {"standalone", "rdzv-endpoint", "rdzv-backend", "master-addr", "master-port", "node-rank"}
"""torchrun options that connect its processes. If none is given, `command_for` adds ``--standalone`` on one machine."""


@dataclass(frozen=True)
class Command:
    """A command, and the `variables` to add to its environment."""

    command: tuple[str, ...]
    variables: Mapping[str, str]

    def line(self) -> str:
        """Return the command as a shell command line."""
        set_before = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return printable(" ".join((*set_before, shlex.join(self.command))), longest=None)


def command_for(plan: PlanRecord, path: Path, arguments: Sequence[str]) -> Command:
    """Make torchrun's command for a plan.

    Args:
        arguments: Options of torchrun, the script (or ``-m module``), and its arguments.
    """
    options = _options_of(arguments)
    ranks = len(trainable_ranks(plan).seats)
    _refuse_other_count(ranks, options)
    chosen: list[str] = []
    if _COUNT not in options:
        chosen.append(f"--nproc-per-node={_processes_per_node(ranks, options)}")
    if not options.keys() & {*_MEETINGS, _NODES}:
        chosen.append("--standalone")
    command = (sys.executable, "-m", "torch.distributed.run", *chosen, *arguments)
    return Command(command, {PLAN_VARIABLE: str(path.absolute())})


def trainable_ranks(plan: PlanRecord) -> Layout:
    """Return DDP's layout. Raise an error if no job can be started, because it is missing or the GPUs are simulated."""
    refuse_simulated(plan, "train on")
    return required_ranks(plan)


def refuse_several_processes() -> None:
    """Raise InputError if this process is one of several ranks. Each would train its own BalancedDataParallel."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world_size.isdecimal() and int(world_size) > 1:
        raise InputError(
            f"plan.wrap was called in rank {os.environ['RANK']} of {world_size}. Each rank would train its own "
            "model on all samples. Start the script with python, or use autosplit.ddp.setup() and ctx.wrap.",
        )


def refuse_simulated(plan: PlanRecord, what: str) -> None:
    """Raise DeviceError if a plan is for simulated GPUs. `what` is a verb phrase for the message: "wrap a model"."""
    if plan.simulated:
        names = printable(", ".join(sorted({device.name for device in plan.devices})), longest=300)
        raise DeviceError(
            f"the plan is for simulated GPUs ({names}), but real devices are needed to {what}. Tune on the machine "
            "that has them.",
        )


def required_ranks(plan: PlanRecord) -> Layout:
    """Return DDP's layout. Raise PlanError if a plan has none."""
    if plan.ddp is None:
        raise PlanError(
            f"the plan has no DDP ranks ({printable(plan.why_no_ddp or 'no reason is given')}). Tune for devices that "
            "each have enough memory for a rank, or use plan.wrap.",
        )
    return plan.ddp


def _options_of(arguments: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    waiting: str | None = None
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            name, _, value = argument.lstrip("-").partition("=")
            name = name.replace("_", "-")  # torchrun accepts hyphens and underscores
            options[name] = value
            waiting = None if "=" in argument or name in _SWITCHES else name
        elif waiting is not None:
            options[waiting], waiting = argument, None
        else:
            return options
    raise InputError(
        f"{shlex.join(arguments)!r} has no script. Put it after the options of torchrun: autosplit launch train.py.",
    )


_SWITCHES = {"standalone", "no-python", "run-path", "m", "module", "h", "help"}
"""Options of torchrun without a value. The module after ``-m`` counts as the script."""


def _processes_per_node(count: int, options: Mapping[str, str]) -> int:
    nodes = options.get(_NODES, "1")
    if not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise InputError(
            f"--nnodes={nodes!r} is not a number. A plan has a fixed number of ranks, so pass the exact number of "
            "machines.",
        )
    if count % int(nodes):
        raise PlanError(
            f"the plan's {count} ranks can't be divided equally among --nnodes={nodes} machines. Pass --nproc-per-node "
            "on each machine.",
        )
    return count // int(nodes)


def _refuse_other_count(ranks: int, options: Mapping[str, str]) -> None:
    """Raise PlanError if the number of processes differs from the plan's ranks.

    Skip the check on several machines, which may have different numbers of processes.
    """
    given = options.get(_COUNT, "")
    if not (given.isascii() and given.isdigit()) or options.get(_NODES, "1") != "1":
        return
    if int(given) != ranks:
        raise PlanError(
            f"the plan has {ranks} ranks, but --nproc-per-node is {given}. Leave the option out, or tune "
            "for that many devices.",
            code="world-size",
        )
