"""Convert a plan to the settings of other tools: keyword arguments, command lines, environment variables, JSON.

transformers, accelerate and Lightning run DDP with one batch size for all ranks, which `even_plan` finds.
"""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.errors import InputError, PlanError, shown
from autosplit.integrations.even_plan import ACCELERATE, LIGHTNING, TRANSFORMERS, even_plan, first_notes
from autosplit.integrations.export_jobs import (
    IMAGE,
    REQUIREMENTS,
    SCRIPT,
    machines_of,
    sbatch_file,
    skypilot_task,
    trainjob_manifests,
    yaml_text,
)
from autosplit.integrations.exported import Export
from autosplit.plan.record import PlanRecord
from autosplit.plan.redact import shareable
from autosplit.plan.torchrun import PLAN_VARIABLE, command_for, required_ranks
from autosplit.text import has_control_character, printable, tuple_text

UNSAVED = "plan.json"
"""Placeholder for the file of a plan that was not saved."""


def export(plan: PlanRecord, to: str, *, path: str | os.PathLike[str] | None = None) -> Export:
    """Convert a plan to the settings of another tool, see `Plan.export`."""
    make = _MAKERS.get(to) if isinstance(to, str) else None
    if make is None:
        raise InputError(f"to={shown(to)} is not an export format. Choose one of {', '.join(FORMATS)}.")
    if plan.checkpointed and to in ("transformers", "accelerate", "lightning"):
        raise PlanError(
            f"the plan checkpoints {len(plan.checkpointed)} layers, such as {printable(plan.checkpointed[0])}, but "
            f"{shown(to)} has no setting for this. Train with autosplit or its integrations, or tune without "
            "checkpointing.",
        )
    return make(plan, path)


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variables that limit the devices that a process can use, by device kind."""


@dataclass(frozen=True)
class _Start:
    """Describe how the processes of a job are started.

    Attributes:
        machines: Number of ranks on each machine.
        visible: Indices of the GPUs, if they must be selected. None if they are the first GPUs of each machine.
        variable: Environment variable that selects the GPUs.
    """

    machines: tuple[int, ...]
    visible: tuple[int, ...] | None
    variable: str = ""

    @classmethod
    def of(cls, plan: PlanRecord) -> _Start:
        count = len(plan.devices)
        counts = plan.machine.get("ranks_per_machine")
        numbers = counts if isinstance(counts, list) and all(isinstance(n, int) and n > 0 for n in counts) else []
        if len(numbers) > 1 and sum(numbers) == count:
            return cls(tuple(numbers), None)
        indices = tuple(device.index for device in plan.devices)
        variable = _VISIBLE.get(plan.devices[0].kind, "")
        return cls((count,), indices if variable and indices != tuple(range(count)) else None, variable)

    @property
    def several(self) -> bool:
        return len(self.machines) > 1

    def by_torchrun(self) -> str:
        before = "" if self.visible is None else f"{self.variable}={_comma(self.visible)} "
        if not self.several:
            return f"{before}torchrun --standalone --nproc-per-node={self.machines[0]} {SCRIPT}"
        here = str(self.machines[0]) if len(set(self.machines)) == 1 else "RANKS_HERE"
        rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE"
        return f"{before}torchrun --nnodes={len(self.machines)} --nproc-per-node={here} {rendezvous} {SCRIPT}"

    def remark(self) -> list[str]:
        if not self.several:
            return []
        listed = ", ".join(map(str, self.machines))
        ranks = f" RANKS_HERE is {listed}, in this order." if len(set(self.machines)) > 1 else ""
        return [f"Run it on each of {len(self.machines)} machines. FIRST_MACHINE is the name of the first.{ranks}"]


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


_PRECISIONS = {"none": ("no", "32-true"), "bf16": ("bf16", "bf16-mixed"), "fp16": ("fp16", "16-mixed")}
"""Names of the precisions in accelerate and Lightning."""


def _to_transformers(plan: PlanRecord, _path: object) -> Export:
    """Return `TrainingArguments`. Arguments that are left out have a suitable default, or are unrelated to the plan."""
    (even, found), start = even_plan(plan, TRANSFORMERS), _Start.of(plan)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": even.batch_size,
        "gradient_accumulation_steps": even.accumulation_steps,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
    }
    if plan.devices[0].kind == "cpu":
        arguments["use_cpu"] = True
    if even.num_ranks > 1:
        options = required_ranks(plan).options
        arguments["ddp_find_unused_parameters"] = options.find_unused_parameters
        if options.static_graph:
            arguments["ddp_static_graph"] = True
        arguments["average_tokens_across_devices"] = True
        command = start.by_torchrun()
    elif plan.devices[0].kind == "cpu":
        command = f"python {SCRIPT}"
    else:  # with more GPUs, Trainer would use nn.DataParallel
        first = plan.devices[0]
        shown = f"{_VISIBLE[first.kind]}={first.index} " if first.kind in _VISIBLE else ""
        command = f"{shown}python {SCRIPT}"
    return _script(found, {"TrainingArguments": arguments, "command": command}, start)


def _to_accelerate(plan: PlanRecord, _path: object) -> Export:
    precision, _ = _PRECISIONS[plan.precision]
    (even, found), start = even_plan(plan, ACCELERATE), _Start.of(plan)
    on_cpu, several = plan.devices[0].kind == "cpu", even.num_ranks > 1
    settings: dict[str, Any] = {
        "Accelerator": {
            "gradient_accumulation_steps": even.accumulation_steps,
            "mixed_precision": precision,
            **({"cpu": True} if on_cpu else {}),
        },
        # The batch size below is per process.
        "DataLoaderConfiguration": {"split_batches": False},
        **({"DistributedDataParallelKwargs": required_ranks(plan).options.keywords()} if several else {}),
        "DataLoader": {"batch_size": even.batch_size},
    }
    # accelerate's launcher needs MPI for several processes on CPUs, and the same number of processes on each machine.
    by_torchrun = start.several or (on_cpu and several)
    command = start.by_torchrun() if by_torchrun else _accelerate_launch(plan, start, precision)
    settings["command"] = command
    return _script(found, settings, start if by_torchrun else None)


def _accelerate_launch(plan: PlanRecord, start: _Start, precision: str) -> str:
    """Return accelerate's command line, with all options that the user's configuration might set otherwise."""
    count, kind = len(plan.devices), plan.devices[0].kind
    words = ["accelerate", "launch", *(["--multi_gpu"] if count > 1 else []), *(["--cpu"] if kind == "cpu" else [])]
    words += ["--num_machines=1", f"--num_processes={count}", f"--mixed_precision={precision}", "--dynamo_backend=no"]
    if start.visible is not None:
        words.append(f"--gpu_ids={_comma(start.visible)}")
    return shlex.join([*words, SCRIPT])


def _to_lightning(plan: PlanRecord, _path: object) -> Export:
    """Return arguments of `Trainer`, which starts the other processes itself, and the batch size of each DataLoader."""
    _, precision = _PRECISIONS[plan.precision]
    (even, found), start = even_plan(plan, LIGHTNING), _Start.of(plan)
    if len(set(start.machines)) > 1:
        raise PlanError(
            f"the plan's machines have {tuple_text(start.machines)} ranks, but Lightning's Trainer needs the same "
            "number on each machine. Train with autosplit.ddp, or export to torchrun.",
        )
    kind, several = plan.devices[0].kind, even.num_ranks > 1
    # Select the GPUs by index on a single machine, so that Lightning uses no other GPUs.
    named = kind != "cpu" and not start.several
    devices: Any = [device.index for device in plan.devices] if named else start.machines[0]
    trainer: dict[str, Any] = {
        "accelerator": "cpu" if kind == "cpu" else "gpu",
        "devices": devices,
        **({"num_nodes": len(start.machines)} if start.several else {}),
        "precision": precision,
        "accumulate_grad_batches": even.accumulation_steps,
    }
    settings: dict[str, Any] = {
        "Trainer": trainer,
        **({"DDPStrategy": required_ranks(plan).options.keywords()} if several else {}),
        "DataLoader": {"batch_size": even.batch_size},
    }
    # On several machines, Lightning finds the other processes through torchrun's variables.
    command = start.by_torchrun() if start.several else f"python {SCRIPT}"
    settings["command"] = command
    return _script(found, settings, start if start.several else None)


def _to_torchrun(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    file, notes = _file_of(plan, path)
    command = command_for(plan, file, [SCRIPT])
    start = _Start.of(plan)
    if start.several:
        notes.append(
            f"The plan's {len(start.machines)} machines have {tuple_text(start.machines)} ranks. Pass --nnodes and the "
            "rendezvous options of torchrun to autosplit launch."
        )
    notes = [
        *first_notes(plan),
        *notes,
        f"{SCRIPT} is a placeholder for your script, which calls autosplit.ddp.setup().",
    ]
    settings = {"command": list(command.command), "variables": dict(command.variables)}
    return Export("torchrun", settings, command.line(), notes=tuple(map(printable, notes)))


def _to_env(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    notes = first_notes(plan)
    variables: dict[str, str] = {}
    if plan.simulated:
        notes.append(f"{PLAN_VARIABLE} is not set, because no job can train with a plan for simulated GPUs.")
    else:
        file, more = _file_of(plan, path)
        variables[PLAN_VARIABLE] = str(file.absolute())
        notes += more
    variables |= {
        "AUTOSPLIT_SPLIT": _comma(plan.split),
        "AUTOSPLIT_GPU0_BSZ": str(plan.gpu0_bsz),
        "AUTOSPLIT_BATCH_SIZE": str(plan.batch_size),
        "AUTOSPLIT_ACCUMULATION_STEPS": str(plan.accumulation_steps),
        "AUTOSPLIT_EFFECTIVE_BATCH_SIZE": str(plan.effective_batch_size),
        "AUTOSPLIT_PRECISION": plan.precision,
    }
    ddp = plan.ddp
    if ddp is not None:
        variables |= {
            "AUTOSPLIT_DDP_BATCH_SIZES": _comma(ddp.split),
            "AUTOSPLIT_DDP_ACCUMULATION_STEPS": str(ddp.accumulation_steps),
            "AUTOSPLIT_DDP_EFFECTIVE_BATCH_SIZE": str(ddp.effective_batch_size),
        }
        if not _Start.of(plan).several:
            variables["PET_NPROC_PER_NODE"] = str(len(ddp.seats))
    lines = [*_comment_lines(notes), *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
    return Export("env", variables, "\n".join(lines), notes=tuple(map(printable, notes)))


def _to_json(plan: PlanRecord, _path: object) -> Export:
    settings = shareable(plan).to_dict()
    # Escape non-ASCII characters, because some can control a terminal.
    return Export("json", settings, json.dumps(settings, indent=2), notes=tuple(map(printable, first_notes(plan))))


def _file_of(plan: PlanRecord, path: str | os.PathLike[str] | None) -> tuple[Path, list[str]]:
    file = plan.path if path is None else Path(path)
    if file is not None:
        if has_control_character(str(file)):
            raise InputError(
                f"the plan's path {str(file)!r} has a control character. Expected a path that can be printed in a "
                "command. Rename the file or its folder.",
            )
        return file, []
    return Path(UNSAVED), [
        f'The plan is not saved. Run plan.save("{UNSAVED}") to write the file that the command names.'
    ]


def _to_slurm(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    """Return a Slurm batch script. The notes follow its first line, which must be the interpreter."""
    machines = machines_of(plan, _Start.of(plan).machines)
    file, notes = _file_of(plan, path)
    notes += [
        f"{SCRIPT} is a placeholder for your script. Add --time, --partition and --cpus-per-task for your cluster.",
        "Save the plan's file on a disk that all nodes see.",
    ]
    if machines[0].gpu is not None:
        notes.append(
            "Names of GPUs differ between clusters. Request the GPUs that the comments name, with --constraint or "
            "--gpus-per-node=TYPE:COUNT."
        )
    first, *lines = sbatch_file(machines, file.absolute()).split("\n")
    text = "\n".join([first, *_comment_lines(notes), *lines])
    return Export("slurm", {"machines": [asdict(group) for group in machines]}, text, notes=tuple(notes))


def _to_trainjob(plan: PlanRecord, _path: object) -> Export:
    machines = machines_of(plan, _Start.of(plan).machines)
    manifests = trainjob_manifests(machines, shareable(plan).to_dict(), plan.devices[0].kind)
    notes = [f"{IMAGE} and {SCRIPT} are placeholders for your container image and the script in it."]
    if machines[0].gpu is not None:
        notes.append("nodeSelector has the label that NVIDIA's GPU feature discovery gives to nodes. Check it there.")
    if len(machines) > 1:
        notes.append(
            "All nodes of a TrainJob have the same resources, so each kind of machine gets its own "
            "TrainingRuntime. The output was checked against the schema, and not on a cluster."
        )
    text = "\n".join([*_comment_lines(notes), "\n---\n".join(map(yaml_text, manifests))])
    return Export("trainjob", {"manifests": manifests}, text, notes=tuple(notes))


def _to_skypilot(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    file, notes = _file_of(plan, path)
    task = skypilot_task(machines_of(plan, _Start.of(plan).machines), file.absolute())
    notes.append(
        f"{SCRIPT} is a placeholder for your script in the working directory, and {REQUIREMENTS} for the list of its "
        "packages. List autosplit there, with its path or its repository."
    )
    if "resources" in task:
        notes.append("Check the GPU's name with sky show-gpus.")
    return Export("skypilot", task, "\n".join([*_comment_lines(notes), yaml_text(task)]), notes=tuple(notes))


_MAKERS: Mapping[str, Callable[[PlanRecord, str | os.PathLike[str] | None], Export]] = {
    "transformers": _to_transformers,
    "accelerate": _to_accelerate,
    "lightning": _to_lightning,
    "torchrun": _to_torchrun,
    "slurm": _to_slurm,
    "trainjob": _to_trainjob,
    "skypilot": _to_skypilot,
    "env": _to_env,
    "json": _to_json,
}

FORMATS = tuple(_MAKERS)


_HOMES = {
    "TrainingArguments": ("transformers", "arguments"),
    "DataLoaderConfiguration": ("accelerate.utils", "config"),
    "DistributedDataParallelKwargs": ("accelerate.utils", "ddp"),
    "Accelerator": ("accelerate", "accelerator"),
    "DDPStrategy": ("lightning.pytorch.strategies", "ddp"),
    "Trainer": ("lightning.pytorch", "trainer"),
    "DataLoader": ("torch.utils.data", "loader"),
}
"""The module of each class in the settings, and its variable in the text to paste, in the order of their use."""

_USES = {
    ("Accelerator", "DataLoaderConfiguration"): "dataloader_config=config",
    ("Accelerator", "DistributedDataParallelKwargs"): "kwargs_handlers=[ddp]",
    ("Trainer", "DDPStrategy"): "strategy=ddp",
}
"""The argument that passes the second class to the first."""


def _script(found: Export, settings: Mapping[str, Any], start: _Start | None) -> Export:
    """Add settings and text to an export. The text has the notes, the calls that make the settings, and the command."""
    imports, calls = [], []
    per_process = "  # batch_size is per process" if found.even is not None and found.even.num_ranks > 1 else ""
    for name in (name for name in _HOMES if name in settings):
        module, variable = _HOMES[name]
        imports.append(f"from {module} import {name}")
        arguments = ["dataset", "shuffle=True"] if name == "DataLoader" else []
        arguments += [f"{key}={json.dumps(v) if isinstance(v, str) else repr(v)}" for key, v in settings[name].items()]
        arguments += [use for (user, used), use in _USES.items() if user == name and used in settings]
        lines = "".join(f"    {argument},\n" for argument in arguments)
        calls.append(f"{variable} = {name}({per_process * (name == 'DataLoader')}\n{lines})")
    started = [f"# Start it with: {settings['command']}", *_comment_lines([] if start is None else start.remark())]
    text = "\n".join([*_comment_lines(found.notes), *imports, "", *calls, *started])
    return replace(found, settings=settings, text=text)


def _comment_lines(notes: Sequence[str]) -> list[str]:
    safe = map(printable, notes)
    return [line for note in safe for line in textwrap.wrap(note, 100, initial_indent="# ", subsequent_indent="#   ")]
