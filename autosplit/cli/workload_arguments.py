"""Check the arguments of commands that run a workload, load the workload, and name the user's code in errors."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosplit.addons import addon
from autosplit.errors import AutosplitError, InputError, from_user_code, user_frames
from autosplit.launcher import end_with_launcher
from autosplit.workload.from_file import Loaded, load_workload

if TYPE_CHECKING:
    from autosplit.devices.device import Device
    from autosplit.plan.plan import Plan
    from autosplit.workload.workload import Workload

    Source = Workload | Callable[[], Workload]

_MODEL_PREFIXES = ("hf:", "timm:", "torchvision:")


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of `tune` or `measure`.

    Attributes:
        spec: The workload.
        model_options: Options of a named model.
        keywords: Keywords of the Python function.
        devices: The devices of this machine, with their total memory as capacity.
        is_rank: Whether this process is one of several in a job. Such a job always uses DDP.
    """

    spec: str
    model_options: Mapping[str, Any]
    keywords: Mapping[str, Any]
    devices: tuple[Device, ...]
    is_rank: bool

    @property
    def num_processes(self) -> int:
        """The number of processes to start for DDP: one for each real device, or one for simulated devices."""
        starts = self.keywords.get("strategy") == "ddp" and not self.is_rank and self.devices[0].kind != "sim"
        return len(self.devices) if starts else 1

    @property
    def isolate(self) -> bool:
        """Whether real steps run in a separate process. See `isolates`."""
        return isolates(self.keywords.get("isolate"), self.devices, is_rank=self.is_rank)

    def source(self) -> Source:
        """Load the workload. In a job, each rank loads it later, so that all ranks get an error of any rank."""
        if self.is_rank:
            return functools.partial(built_workload, self.spec, **self.model_options)
        return sendable(self.spec, workload_of_spec(self.spec, **self.model_options), isolate=self.isolate)


def checked_arguments(spec: str, model_options: Mapping[str, Any], keywords: Mapping[str, Any]) -> Arguments:
    """Check arguments before the user's file is run, which may take long.

    Raises:
        InputError: The devices or the reserve are invalid, or the strategy needs one process and the job has several.
    """
    from autosplit.devices.device import parse_reserve
    from autosplit.devices.spec import parse_devices

    end_with_launcher()
    devices = parse_devices(keywords.get("devices"), ask_memory=False)  # a process that starts others uses no GPU
    parse_reserve(keywords.get("reserve"))
    is_rank = is_one_of_several()
    if is_rank and keywords.get("strategy") == "balanced":
        raise InputError(
            "BalancedDataParallel (--strategy balanced) uses one process, but the job has several. Run the command "
            "without torchrun."
        )
    return Arguments(spec, model_options, {**keywords, **({"strategy": "ddp"} if is_rank else {})}, devices, is_rank)


def is_one_of_several() -> bool:
    """Return whether this process is one of several in a job. Import torch only if it may be."""
    if not any(os.environ.get(name) for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return False
    from autosplit.tuning.rank_group import in_a_job

    return in_a_job()


def isolates(asked: bool | None, devices: Sequence[Device], *, is_rank: bool = False) -> bool:
    """Return whether real steps run in a separate process: as requested, or by default if they may fill the memory.

    A rank on a CPU with a budget is already a separate process, and running out of the budget does not end it.
    """
    if asked is not None:
        return asked
    from autosplit.accelerators import is_accelerator

    first = devices[0]
    return is_accelerator(first.kind) or (first.kind == "cpu" and first.budgeted and not is_rank)


def sendable(spec: str, workload: Source, *, isolate: bool) -> Source:
    """Return a workload. If its steps run in another process, return a function that can be sent there.

    The function loads the file again, because the file's classes can't be sent.
    """
    from autosplit.workload.workload import Workload

    return Loaded(spec, workload) if isolate and isinstance(workload, Workload) else workload


def is_model_name(spec: str) -> bool:
    """Return whether a spec names a model, which needs no file."""
    return spec.startswith(_MODEL_PREFIXES)


def workload_of_spec(spec: str, **options: Any) -> Source:
    """Return the workload that a spec names, or a function that builds it.

    The function can be sent to another process, so the caller decides where the model is built.

    Args:
        spec: A file or a module, as for `load_workload`, or a model's name, as for `workload_from_name`.
        **options: Options of `workload_from_name`, such as `seq_len`. They are not allowed for a file.
    """
    if is_model_name(spec):
        return addon("named_workload")(spec, options)  # type: ignore[no-any-return]
    if options:
        raise InputError(
            f"{' and '.join(options)} can't be set for {spec}, because its workload has its own sample batch. These "
            "options are for hf:PATH, timm:NAME and torchvision:NAME. Leave them out."
        )
    return load_workload(spec)


def built_workload(spec: str, **options: Any) -> Workload:
    """Load and build the workload that a spec names. Another process can unpickle and call this function."""
    from autosplit.workload.workload import Workload

    found = workload_of_spec(spec, **options)
    return found if isinstance(found, Workload) else found()


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
