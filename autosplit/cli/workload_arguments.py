"""Check the arguments of commands that run a workload, load the workload, and name the user's code in errors."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.addons import addon
from autosplit.errors import AutosplitError, InputError, PlanError, from_user_code, user_frames

if TYPE_CHECKING:
    from autosplit.devices.device import Device
    from autosplit.plan.plan import Plan
    from autosplit.workload.workload import Workload


def check_before_running(keywords: Mapping[str, Any], output: str | None) -> None:
    """Raise InputError for invalid flags before the user's file is run, which may take long."""
    from autosplit.devices.device import parse_reserve
    from autosplit.devices.spec import parse_devices

    if keywords.get("devices") is not None:
        parse_devices(keywords["devices"], ask_memory=False)
    parse_reserve(keywords.get("reserve"))
    if output is None or not Path(output).exists():
        return
    if Path(output).is_dir():
        raise InputError(
            f"--output {output} is a folder, not a file. Write --output {Path(output) / 'plan.json'}.",
        )
    if not Path(output).is_file():
        raise InputError(
            f"--output {output} is not a regular file. Name a file, or leave the option out and print the plan with "
            "--json.",
        )
    from autosplit.plan.plan import Plan

    try:
        Plan.load(output)
    except PlanError:
        raise InputError(
            f"--output {output} exists and is not a plan. autosplit did not replace it. Choose another name.",
        ) from None


def one_of_several() -> bool:
    """Return whether this process is one of several in a job. Import torch only if it may be."""
    if not any(os.environ.get(name) for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return False
    from autosplit.tuning.rank_group import in_a_job

    return in_a_job()


def as_rank(keywords: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether this process is one of several, and the arguments. Several processes always use DDP."""
    if not one_of_several():
        return False, keywords
    if keywords.get("strategy", "auto") == "balanced":
        raise InputError(
            "BalancedDataParallel (--strategy balanced) uses one process, but the job has several. Run the command "
            "without torchrun.",
        )
    return True, {**keywords, "strategy": "ddp"}


def ranks_to_start(keywords: Mapping[str, Any], *, together: bool) -> int:
    """Return the number of processes to start for DDP: one for each real device, or one for simulated devices."""
    from autosplit.devices.spec import parse_devices

    if together or keywords.get("strategy") != "ddp":
        return 1
    found = parse_devices(keywords.get("devices"), ask_memory=False)  # Each process queries its own device.
    return 1 if found[0].kind == "sim" else len(found)


def isolates(asked: bool | None, devices: str | Sequence[Device] | None, *, together: bool = False) -> bool:
    """Return whether real steps run in a separate process: as requested, or by default if they may fill the memory.

    A rank on a CPU with a budget is already a separate process, and running out of the budget does not end it.
    """
    if asked is not None:
        return asked
    from autosplit.accelerators import is_accelerator
    from autosplit.devices.spec import parse_devices

    first = parse_devices(devices, ask_memory=False)[0]
    return is_accelerator(first.kind) or (first.kind == "cpu" and first.budgeted and not together)


def loaded(
    spec: str, model_options: Mapping[str, Any], *, together: bool, isolate: bool
) -> tuple[Workload | Callable[[], Workload], Workload | Callable[[], Workload]]:
    """Load a workload. Return it, and the source to measure, which is a function if another process loads it.

    In a job, each rank loads the workload later, so that all ranks get an error of any rank.
    """
    from autosplit.cli.workload_spec import built_workload, workload_of_spec

    if together:
        later = functools.partial(built_workload, spec, **model_options)
        return later, later
    workload = workload_of_spec(spec, **model_options)
    return workload, sendable(spec, workload) if isolate else workload


def sendable(spec: str, workload: Workload | Callable[[], Workload]) -> Callable[[], Workload]:
    """Return a function that can be sent to another process.

    The function loads the file again, because the file's classes can't be sent.
    """
    from autosplit.workload.from_file import Loaded
    from autosplit.workload.workload import Workload

    return Loaded(spec, workload) if isinstance(workload, Workload) else workload


@contextmanager
def users_errors(spec: str) -> Iterator[None]:
    """Convert exceptions of the user's code to UserCodeError with the user's frames. Keep autosplit's own errors."""
    try:
        yield
    except AutosplitError:
        raise
    except (Exception, SystemExit) as error:
        if not user_frames(error.__traceback__):
            raise  # a bug of autosplit keeps its traceback
        raise from_user_code(error, f"the code of {spec}") from error


def tuned_quietly(spec: str, workload: Any, **keywords: Any) -> Plan:
    """Tune without the warnings that the report repeats. Call `tune_best` or `tune_lengths` if a keyword needs it."""
    from autosplit.tuning import tune as tuning

    with users_errors(spec), warnings.catch_warnings():
        for category in (tuning.AssumedLossWarning, tuning.ChangedTrainingWarning, tuning.DoubtfulTimesWarning):
            warnings.simplefilter("ignore", category)
        if "lengths" in keywords:
            return addon("tune_lengths")(workload, **keywords)  # type: ignore[no-any-return]
        if "checkpointing" in keywords or "," in (keywords.get("precision") or ""):
            return addon("tune_best")(workload, **keywords).plan  # type: ignore[no-any-return]
        return tuning.tune(workload, **keywords)


def flags_of(keywords: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as flags of the command line."""
    flags = []
    for keyword, value in keywords.items():
        flag = keyword.replace("_", "-")
        flags.append(f"--no-{flag}" if value is False else f"--{flag}")
        if not isinstance(value, bool):
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags
