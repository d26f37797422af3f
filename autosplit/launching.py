"""Starting a training script by torchrun with a plan: as many processes as it has ranks, and the plan for each."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosplit.ddp.plans import PLAN_VARIABLE, described, plan_for_job
from autosplit.errors import InputError, PlanError, RankFailedError
from autosplit.outcome import OUTCOME_VARIABLE
from autosplit.plan import Plan
from autosplit.printed import printable

__all__ = ["Launch", "launch_of", "run_together"]

_COUNTS = ("nproc-per-node", "nproc_per_node")
_NODES = "nnodes"
_MEETINGS = (
    *("standalone", "rdzv-endpoint", "rdzv_endpoint", "rdzv-backend", "rdzv_backend"),
    *("master-addr", "master_addr", "master-port", "master_port", "node-rank", "node_rank"),
)
"""Options of torchrun by which its processes meet; without any, those of one machine do so by themselves."""


@dataclass(frozen=True)
class Launch:
    """A command with what its environment has in addition.

    Attributes:
        command: The program and its arguments.
        variables: For the environment.
        told: Which plan it is, for the user.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]
    told: str = ""

    def line(self) -> str:
        """Return it as a shell takes it."""
        set_before = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return printable(" ".join((*set_before, shlex.join(self.command))), longest=None)

    def run(self) -> None:
        """Become that process: signals and the exit code are torchrun's."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.command[0], list(self.command), {**os.environ, **self.variables})  # noqa: S606 - it is our own


def launch_of(profile: str | None, arguments: Sequence[str]) -> Launch:
    """Make torchrun's command for a plan.

    Args:
        profile: The plan's file; None for the one that the environment names, or the only one that is remembered for
            this machine.
        arguments: torchrun's options, the script (or ``-m module``), and its arguments.

    Raises:
        InputError: There is no script.
        PlanError: There is no plan, or its ranks can't be shared evenly by the machines.
        DeviceError: The plan is for simulated cards.
    """
    options = _options_of(arguments)
    plan, path = plan_for_job(profile)
    assert path is not None, "a plan that is not given as one has a file"
    _refuse_other_count(plan, options)
    chosen: list[str] = []
    if not options.keys() & set(_COUNTS):
        chosen.append(f"--nproc-per-node={_processes_per_node(plan, options)}")
    if not options.keys() & {*_MEETINGS, _NODES}:
        chosen.append("--standalone")
    command = (sys.executable, "-m", "torch.distributed.run", *chosen, *arguments)
    return Launch(command, {PLAN_VARIABLE: str(Path(path).absolute())}, printable(f"{described(plan)}, {path}"))


def run_together(arguments: Sequence[str], num_processes: int) -> int:
    """Run a command of autosplit's in several processes of this machine, by torchrun, from within this one.

    Args:
        arguments: Of autosplit's command line.
        num_processes: How many; each finds its rank in its environment.

    Returns:
        Rank 0's exit code.

    Raises:
        RankFailedError: A process ended, and left no exit code.
        KeyboardInterrupt: A signal came, before rank 0 had anything to say.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # loud about what the processes say themselves
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it would be loud about
        os.environ[OUTCOME_VARIABLE] = str(outcome)
        lost: ChildFailedError | None = None
        signalled: SignalException | None = None
        options = ["--standalone", f"--nproc-per-node={num_processes}", "--log-dir", folder]
        try:
            torchrun([*options, "-m", "autosplit", *arguments])
        except SignalException as error:  # the processes had it, too
            signalled = error
        except ChildFailedError as error:
            lost = error
        finally:
            del os.environ[OUTCOME_VARIABLE]
        text = outcome.read_text() if outcome.exists() else ""
    if text.isdigit():
        return int(text)
    if signalled is not None:
        raise KeyboardInterrupt
    if lost is None:
        raise RankFailedError(
            f"rank 0 of {num_processes} ended without a word; expected its plan; see what stands above, or whether the "
            "workload's code ends the process"
        )
    rank, failure = lost.get_first_failure()
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
    raise RankFailedError(
        f"rank {rank} of {num_processes} {how} without a word, and the others with it; expected all of them until the "
        "end; see what stands above, or whether the system ran out of memory (dmesg)"
    )


def _options_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return torchrun's own options, which come before the script, with their values."""
    options: dict[str, str] = {}
    waiting: str | None = None
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            name, _, value = argument.lstrip("-").partition("=")
            options[name] = value
            waiting = None if "=" in argument or name in _SWITCHES else name
        elif waiting is not None:
            options[waiting], waiting = argument, None
        else:
            return options
    raise InputError(
        f"no script is given in {shlex.join(arguments)!r}; expected one, after torchrun's own options if any; write "
        "autosplit launch train.py"
    )


_SWITCHES = {"standalone", "no-python", "no_python", "run-path", "run_path", "m", "module", "h", "help"}
"""Options of torchrun that take no value. Of ``-m`` the module is the script."""


def _processes_per_node(plan: Plan, options: Mapping[str, str]) -> int:
    count, nodes = len(plan.ddp.ranks), options.get(_NODES, "1")
    if not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise InputError(
            f"--nnodes is {nodes!r}; expected a fixed number: a plan's ranks are; pass the number of machines"
        )
    if count % int(nodes):
        raise PlanError(
            f"the plan has {count} ranks, and --nnodes is {nodes}; expected as many on each machine; pass "
            "--nproc-per-node yourself on each of them"
        )
    return count // int(nodes)


def _refuse_other_count(plan: Plan, options: Mapping[str, str]) -> None:
    """Refuse a number of processes that the plan has no ranks for; several machines may have unlike ones."""
    given = next((options[name] for name in _COUNTS if name in options), "")
    if not (given.isascii() and given.isdigit()) or options.get(_NODES, "1") != "1":
        return
    if int(given) != len(plan.ddp.ranks):
        raise PlanError(
            f"the plan has {len(plan.ddp.ranks)} ranks, and --nproc-per-node is {given}; expected a process for each "
            "rank; leave the option out, or tune for as many devices"
        )
