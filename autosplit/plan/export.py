"""A plan as other tools' settings: keyword arguments, command lines, environment variables, JSON, and text to paste.

transformers, accelerate and Lightning run DDP with one batch size for all ranks. What of a plan they can't express is
said in notes, with the nearest even plan solved from the plan's own ceilings and fit. Nothing is run here.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.errors import InputError, PlanError, shown
from autosplit.plan.explanation import BINDING_SHARE
from autosplit.plan.exported import Code, Export, assignment_lines, call_text, comment_lines
from autosplit.plan.record import PlanRecord
from autosplit.plan.redact import shareable
from autosplit.plan.torchrun import PLAN_VARIABLE, command_for, refuse_without_ranks
from autosplit.solve.even_ranks import EvenProblem, EvenRanks
from autosplit.solve.memory import Ceiling
from autosplit.solve.problem import MOST_WORK, Problem
from autosplit.text import printable, rate_text

__all__ = ["FORMATS", "export"]


SCRIPT = "train.py"
"""Stands in command lines for the user's own script."""

UNSAVED = "plan.json"
"""Stands for the file of a plan that is in none."""


def export(plan: PlanRecord, to: str, *, path: str | os.PathLike[str] | None = None) -> Export:
    """Turn a plan into the settings of another tool.

    Args:
        plan: Also one for simulated cards, but for `torchrun`.
        to: One of `FORMATS`.
        path: The plan's file, which `torchrun` and `env` name. Default: `PlanRecord.path`.

    Raises:
        InputError: There is no such format.
        PlanError: The tool runs DDP, and the plan has no ranks.
        DeviceError: A job can't be started, since the plan is for simulated cards.
    """
    make = _MAKERS.get(to) if isinstance(to, str) else None
    if make is None:
        raise InputError(f"to is {shown(to)}; expected one of {', '.join(FORMATS)}; choose one of them")
    return make(plan, path)


@dataclass(frozen=True)
class _Tool:
    """A tool that gives every rank the same.

    Attributes:
        to: Its format.
        called: In a sentence.
        loss_rule: How it weighs micro-batches, where they count unequally.
    """

    to: str
    called: str
    loss_rule: str


_SCALE = "scale the loss yourself, or train with autosplit.ddp and ctx.steps(loader, count=...)"

_TRANSFORMERS = _Tool(
    "transformers",
    "transformers' Trainer",
    "it weighs them by labels that are not -100, over all ranks, if the model takes num_items_in_batch or a "
    f"compute_loss_func is given, and otherwise alike: then {_SCALE}",
)

_ACCELERATE = _Tool("accelerate", "accelerate", f"it weighs them alike: {_SCALE}")

_LIGHTNING = _Tool("lightning", "Lightning's Trainer", f"it weighs them alike: {_SCALE}")


@dataclass(frozen=True)
class _Ranks:
    """The plan's DDP answer; of one device, its own."""

    sizes: tuple[int, ...]
    ceilings: tuple[Ceiling, ...]
    accumulation_steps: int
    effective_batch_size: int

    @property
    def even(self) -> EvenRanks | None:
        """The same numbers, if every rank has the same in every forward."""
        if len(set(self.sizes)) > 1:
            return None
        even = EvenRanks(len(self.sizes), self.sizes[0], self.accumulation_steps)
        return even if even.effective_batch_size == self.effective_batch_size else None


@dataclass(frozen=True)
class _Evened:
    """A plan for a tool that gives every rank the same."""

    plan: PlanRecord
    tool: _Tool
    even: EvenRanks
    exact: bool
    lost_share: float | None
    notes: tuple[str, ...]

    def export(self, settings: Mapping[str, Any], code: str) -> Export:
        """Put the settings together; the code gets the notes above it."""
        text = "\n".join((*comment_lines(self.notes), code))
        return Export(self.tool.to, settings, text, self.exact, self.notes, self.even, self.lost_share)


def _evened(plan: PlanRecord, tool: _Tool) -> _Evened:
    """Find the plan's numbers for such a tool, and what there is to say of them."""
    ranks = _ranks_of(plan)
    problem = _even_problem(plan, ranks)
    even, exact = ranks.even or problem.best(), ranks.even is not None
    if even is None:
        raise PlanError(
            f"no batch of one size fits all ranks, whose ceilings are {shown(problem.ceilings)}; expected one that "
            f"{tool.called} can be given; train with autosplit.ddp, which gives each rank its own"
        )
    rate = None if _share_processor(plan) else problem.rate(even.batch_size, even.accumulation_steps)
    even = replace(even, samples_per_s=rate)
    lost_share, best = _lost(plan, ranks, even)
    notes = [*_first_notes(plan)]
    if not exact:
        notes += _nearest_notes(ranks, problem, even, tool, _lost_text(lost_share, best))
    elif lost_share is not None and lost_share > BINDING_SHARE:
        notes.append(f"{tool.called} runs DDP: {_predicted(even, known=even)}, {_lost_text(lost_share, best)}")
    notes += [*_fewer_notes(plan, problem, even, tool), *_training_notes(plan, even, tool)]
    return _Evened(plan, tool, even, exact, lost_share, tuple(map(printable, notes)))


def _ranks_of(plan: PlanRecord) -> _Ranks:
    """Return the plan's DDP ranks; a single device has the plan's own numbers.

    Raises:
        PlanError: There are several devices and no ranks.
    """
    if len(plan.devices) == 1:
        ceiling = replace(plan.devices[0].ceiling, batch_size=plan.ceilings[0])
        return _Ranks(plan.split, (ceiling,), plan.accumulation_steps, plan.effective_batch_size)
    refuse_without_ranks(plan)
    sizes = tuple(rank.batch_size for rank in plan.ddp.ranks)
    if min(sizes) < 1:
        raise PlanError(f"the plan's ranks have {shown(sizes)} samples; expected 1 or more for each; tune again")
    effective = plan.ddp.effective_batch_size or plan.effective_batch_size
    ceilings = tuple(rank.ceiling for rank in plan.ddp.ranks)
    return _Ranks(sizes, ceilings, plan.ddp.ranks[0].accumulation_steps, effective)


def _even_problem(plan: PlanRecord, ranks: _Ranks) -> EvenProblem:
    normed = any(check.depends and "BatchNorm" in check.subject for check in plan.checks)
    least = plan.region.least_share if plan.region is not None else 1 + normed
    return EvenProblem(
        tuple(ceiling.batch_size for ceiling in ranks.ceilings),
        ranks.effective_batch_size,
        plan.effective_batch_sizes,
        plan.max_batch_size,
        min(least, *ranks.sizes),
        # Where no effective batch was asked for, the ceilings are those of steps of one forward: gradients that wait
        # for a second one were not counted.
        plan.accumulates and (plan.effective_batch_sizes is not None or ranks.accumulation_steps > 1),
        plan.fit,
    )


def _share_processor(plan: PlanRecord) -> bool:
    """Tell whether the devices are parts of one processor, on which no gain is claimed."""
    return len(plan.devices) > 1 and all(device.kind == "cpu" for device in plan.devices)


def _lost(plan: PlanRecord, ranks: _Ranks, even: EvenRanks) -> tuple[float | None, str]:
    """Compare even ranks with the best that the plan has to offer, both by the model.

    Returns:
        The share of the samples/s that is lost; None where nobody knows. And what has the best.
    """
    too_long = ranks.effective_batch_size > MOST_WORK * sum(ranks.sizes)
    if plan.fit is None or even.samples_per_s is None or _share_processor(plan) or too_long:
        return None, ""
    problem = functools.partial(
        Problem.of,
        plan.fit,
        effective_batch_sizes=plan.effective_batch_sizes,
        max_batch_size=plan.max_batch_size,
        accumulates=plan.accumulates,
    )
    several, sizes = len(plan.devices) > 1, _tuple_text(ranks.sizes)
    rates = [
        (
            problem(ranks.ceilings, None).rate(ranks.sizes, ranks.effective_batch_size),
            f"autosplit.ddp with {sizes}" if several else "the plan",
        )
    ]
    if several and plan.region is not None and plan.effective_batch_size <= MOST_WORK * plan.batch_size:
        own = problem(tuple(device.ceiling for device in plan.devices), plan.region)
        name = f"plan.wrap(model), BalancedDataParallel with {_tuple_text(plan.split)}"
        rates.append((own.rate(plan.split, plan.effective_batch_size), name))
    rate, name = max(rates, key=lambda pair: float(f"{pair[0]:.6g}"))  # of equal ones DDP, which the tools run
    return 1 - even.samples_per_s / rate, name


def _first_notes(plan: PlanRecord) -> list[str]:
    """Say of which kind the plan is, where that is not what one would think."""
    notes = []
    if plan.simulated:
        names = ", ".join(dict.fromkeys(device.name for device in plan.devices))
        notes.append(f"simulated: predicted for cards that are not here ({names}); tune again where they are")
    if not plan.complete:
        notes.append("the search was interrupted: this is the best so far")
    return notes


def _nearest_notes(ranks: _Ranks, problem: EvenProblem, even: EvenRanks, tool: _Tool, lost: str) -> list[str]:
    """Say why a tool can't have the plan's own numbers, and what it has instead."""
    wanted, count = ranks.effective_batch_size, len(ranks.sizes)
    if len(set(ranks.sizes)) > 1:
        cause = f"the plan's ranks take {_tuple_text(ranks.sizes)} samples, and {tool.called} has one number for all"
    else:
        cause = (
            f"of the plan's {ranks.accumulation_steps} forwards per step of {wanted} samples the last is shorter, and "
            f"{tool.called} has one number for all"
        )
    same = even.effective_batch_size == wanted
    kept = " as in the plan" if same else f", where the plan has {wanted}"
    if not same and problem.effective_batch_sizes is not None:
        least, most = problem.effective_batch_sizes
        kept += f" (asked for: {least} to {most})" if least < most else ""
    each = f"{even.batch_size} on each of {count}" if count > 1 else f"{even.batch_size}"
    said = (
        f"{cause}; the nearest that fits is {each} in {_forwards(even.accumulation_steps)}, an effective batch of "
        f"{even.effective_batch_size}{kept}"
    )
    nearest = "; ".join(filter(None, (said, ", ".join(filter(None, (_predicted(even, known=even), lost))))))
    exact = None if same else problem.exact()
    if exact is None:
        return [nearest]
    more = f"{wanted} exactly takes {exact.batch_size} on each in {_forwards(exact.accumulation_steps)}"
    return [nearest, "; ".join(filter(None, (more, _predicted(exact, known=even))))]


def _predicted(even: EvenRanks, *, known: EvenRanks) -> str:
    """Return a predicted rate; none where that of the answer is not claimed."""
    rate = even.samples_per_s
    return "" if rate is None or known.samples_per_s is None else f"predicted {rate_text(rate)}"


def _lost_text(lost_share: float | None, best: str) -> str:
    if lost_share is None:
        return ""
    if lost_share <= BINDING_SHARE:
        return f"no fewer than by {best}"
    percent = f"{100 * lost_share:.0f} %" if lost_share >= 0.1 else f"{100 * lost_share:.1f} %"
    return f"{percent} fewer than by {best}"


def _fewer_notes(plan: PlanRecord, problem: EvenProblem, even: EvenRanks, tool: _Tool) -> list[str]:
    """Name the devices that only hold the others up."""
    fewer = problem.without_slow()
    if fewer is None or even.samples_per_s is None:
        return []
    kept, better = fewer
    assert better.samples_per_s is not None, "it was found by its rate"
    gain = better.samples_per_s / even.samples_per_s
    if gain <= 1 + BINDING_SHARE:
        return []
    labels = [device.label for device in plan.devices]
    out = ", ".join(label for index, label in enumerate(labels) if index not in kept)
    said = (
        f"one number for all lets the slowest set the pace: without {out} {tool.called} is {gain:.2f} times as fast, "
        f"{better.batch_size} on each of {len(kept)} in {_forwards(better.accumulation_steps)} for a "
        f"step of {better.effective_batch_size}, predicted {rate_text(better.samples_per_s)}; tune for "
        f"{', '.join(labels[index] for index in kept)} alone"
    )
    return [said]


def _training_notes(plan: PlanRecord, even: EvenRanks, tool: _Tool) -> list[str]:
    """Say what of the training the tool does otherwise."""
    notes = []
    parts = even.num_ranks * even.accumulation_steps
    depends = [check for check in plan.checks if check.depends]
    if parts > 1 and plan.loss_reduction == "sum":
        notes.append(f"the loss is a sum, and {tool.called} averages {parts} of them: multiply it by {parts}")
    if parts > 1 and any(check.subject == "loss" for check in depends):
        notes.append(
            f"the loss is no mean over samples: in a step {tool.called} has {parts} micro-batches, and {tool.loss_rule}"
        )
    norms = [check.subject for check in depends if "BatchNorm" in check.subject]
    if norms and parts > 1:
        more = ", or all ranks' with sync_batchnorm=True" if tool is _LIGHTNING and even.num_ranks > 1 else ""
        others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        notes.append(f"{norms[0]}{others} sees the {even.batch_size} samples of one rank's forward{more}")
    if plan.precision != "none" and tool is not _LIGHTNING:
        who = ", by which it trains," if tool is _TRANSFORMERS else ""
        notes.append(
            f"with {plan.precision} {_ACCELERATE.called}{who} copies the model's outputs to float32, and the "
            "plan's memory does not count that: tune with a reserve if they are large"
        )
    if plan.workload.get("step") is not None:
        notes.append(f"the workload's own step= is not known to {tool.called}: write it there")
    if plan.devices[0].kind == "cpu" and plan.devices[0].budgeted:
        notes.append(f"memory budgets are autosplit's own (plan.budgets()): {tool.called} enforces none")
    return notes


def _forwards(count: int) -> str:
    return "1 forward" if count == 1 else f"{count} forwards"


def _tuple_text(numbers: Sequence[int]) -> str:
    listed = [str(number) for number in numbers[:16]]
    return f"({', '.join(listed)}{', ...' if len(numbers) > 16 else ''})"


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""By which a process is shown some of the machine's devices alone, by their kind."""


@dataclass(frozen=True)
class _Start:
    """How the ranks are started.

    Attributes:
        machines: How many ranks each machine has.
        visible: The GPUs of them, by their numbers, where they have to be named; None where they are all the first.
        variable: By which a process is shown some of them alone.
    """

    machines: tuple[int, ...]
    visible: tuple[int, ...] | None
    variable: str = ""

    @classmethod
    def of(cls, plan: PlanRecord) -> _Start:
        """Read it from a plan."""
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
        """Whether there is more than one machine."""
        return len(self.machines) > 1

    def by_torchrun(self) -> str:
        """Return torchrun's line; of several machines, that of each."""
        before = "" if self.visible is None else f"{self.variable}={_comma(self.visible)} "
        if not self.several:
            return f"{before}torchrun --standalone --nproc-per-node={self.machines[0]} {SCRIPT}"
        here = str(self.machines[0]) if len(set(self.machines)) == 1 else "RANKS_HERE"
        meeting = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE"
        return f"{before}torchrun --nnodes={len(self.machines)} --nproc-per-node={here} {meeting} {SCRIPT}"

    def remark(self) -> list[str]:
        """Say what stands for something in that line."""
        if not self.several:
            return []
        ranks = (
            f"; RANKS_HERE is {', '.join(map(str, self.machines))}, in this order"
            if len(set(self.machines)) > 1
            else ""
        )
        return [f"on each of {len(self.machines)} machines, with the first one's name for FIRST_MACHINE{ranks}"]


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


_PRECISIONS = {"none": ("no", "32-true"), "bf16": ("bf16", "bf16-mixed"), "fp16": ("fp16", "16-mixed")}
"""What accelerate and Lightning call them."""


def _precision(plan: PlanRecord) -> tuple[str, str]:
    if plan.precision not in _PRECISIONS:
        raise PlanError(
            f"the plan's precision is {shown(plan.precision)}; expected one of {', '.join(_PRECISIONS)}; tune again"
        )
    return _PRECISIONS[plan.precision]


def _to_transformers(plan: PlanRecord, _path: object) -> Export:
    """`TrainingArguments`; what is left out has the right default, or nothing to do with it."""
    _precision(plan)
    found, start = _evened(plan, _TRANSFORMERS), _Start.of(plan)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": found.even.batch_size,
        "gradient_accumulation_steps": found.even.accumulation_steps,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
    }
    if plan.devices[0].kind == "cpu":
        arguments["use_cpu"] = True
    if found.even.num_ranks > 1:
        arguments["ddp_find_unused_parameters"] = plan.ddp.options.find_unused_parameters
        if plan.ddp.options.static_graph:
            arguments["ddp_static_graph"] = True
        arguments["average_tokens_across_devices"] = True
        command = start.by_torchrun()
    elif plan.devices[0].kind == "cpu":
        command = f"python {SCRIPT}"
    else:  # of several visible GPUs, one process would take all, by nn.DataParallel
        first = plan.devices[0]
        shown = f"{_VISIBLE[first.kind]}={first.index} " if first.kind in _VISIBLE else ""
        command = f"{shown}python {SCRIPT}"
    code = [
        "from transformers import TrainingArguments",
        "",
        assignment_lines("arguments", "TrainingArguments", arguments),
        *_started_by(command, start),
    ]
    return found.export({"TrainingArguments": arguments, "command": command}, "\n".join(code))


def _to_accelerate(plan: PlanRecord, _path: object) -> Export:
    """`Accelerator`, and the batch size of the DataLoader that is given to its `prepare`: of each process."""
    precision, _ = _precision(plan)
    found, start = _evened(plan, _ACCELERATE), _Start.of(plan)
    on_cpu, several = plan.devices[0].kind == "cpu", found.even.num_ranks > 1
    settings: dict[str, Any] = {
        "Accelerator": {
            "gradient_accumulation_steps": found.even.accumulation_steps,
            "mixed_precision": precision,
            **({"cpu": True} if on_cpu else {}),
        },
        # The batch size below is each process's.
        "DataLoaderConfiguration": {"split_batches": False},
        **({"DistributedDataParallelKwargs": plan.ddp.options.keywords()} if several else {}),
        "DataLoader": {"batch_size": found.even.batch_size},
    }
    # accelerate's own launcher starts several processes on processors by MPI only, and as many on each machine.
    by_torchrun = start.several or (on_cpu and several)
    command = start.by_torchrun() if by_torchrun else _accelerate_launch(plan, start, precision)
    settings["command"] = command
    imported = [name for name in ("DataLoaderConfiguration", "DistributedDataParallelKwargs") if name in settings]
    config = Code(call_text("DataLoaderConfiguration", settings["DataLoaderConfiguration"]))
    arguments = {**settings["Accelerator"], "dataloader_config": config}
    before = []
    if several:
        before.append(assignment_lines("ddp", imported[-1], settings[imported[-1]]))
        arguments["kwargs_handlers"] = Code("[ddp]")
    code = [
        "from accelerate import Accelerator",
        f"from accelerate.utils import {', '.join(imported)}",
        "from torch.utils.data import DataLoader",
        "",
        *before,
        assignment_lines("accelerator", "Accelerator", arguments),
        *_loader_lines(found.even),
        *_started_by(command, start if by_torchrun else None),
    ]
    return found.export(settings, "\n".join(code))


def _accelerate_launch(plan: PlanRecord, start: _Start, precision: str) -> str:
    """Write accelerate's own line, with everything that its default configuration would decide otherwise."""
    count, kind = len(plan.devices), plan.devices[0].kind
    words = ["accelerate", "launch", *(["--multi_gpu"] if count > 1 else []), *(["--cpu"] if kind == "cpu" else [])]
    words += ["--num_machines=1", f"--num_processes={count}", f"--mixed_precision={precision}", "--dynamo_backend=no"]
    if start.visible is not None:
        words.append(f"--gpu_ids={_comma(start.visible)}")
    return shlex.join([*words, SCRIPT])


def _to_lightning(plan: PlanRecord, _path: object) -> Export:
    """`Trainer`, which starts the other processes itself, and the batch size of each one's DataLoader."""
    _, precision = _precision(plan)
    found, start = _evened(plan, _LIGHTNING), _Start.of(plan)
    if len(set(start.machines)) > 1:
        raise PlanError(
            f"the plan's machines have {_tuple_text(start.machines)} ranks; expected as many on each, as Lightning's "
            "Trainer does; train with autosplit.ddp, or export to torchrun"
        )
    kind, several = plan.devices[0].kind, found.even.num_ranks > 1
    # Several GPUs of one machine by their numbers, so that it is these and no others.
    named = kind != "cpu" and not start.several
    devices: Any = [device.index for device in plan.devices] if named else start.machines[0]
    trainer: dict[str, Any] = {
        "accelerator": "cpu" if kind == "cpu" else "gpu",
        "devices": devices,
        **({"num_nodes": len(start.machines)} if start.several else {}),
        "precision": precision,
        "accumulate_grad_batches": found.even.accumulation_steps,
    }
    settings: dict[str, Any] = {
        "Trainer": trainer,
        **({"DDPStrategy": plan.ddp.options.keywords()} if several else {}),
        "DataLoader": {"batch_size": found.even.batch_size},
    }
    # On several machines it finds the others by torchrun's variables.
    command = start.by_torchrun() if start.several else f"python {SCRIPT}"
    settings["command"] = command
    imports, before, arguments = ["from lightning.pytorch import Trainer"], [], dict(trainer)
    if several:
        imports.append("from lightning.pytorch.strategies import DDPStrategy")
        before.append(assignment_lines("ddp", "DDPStrategy", settings["DDPStrategy"]))
        arguments["strategy"] = Code("ddp")
    code = [
        *imports,
        "from torch.utils.data import DataLoader",
        "",
        *before,
        assignment_lines("trainer", "Trainer", arguments),
        *_loader_lines(found.even),
        *_started_by(command, start if start.several else None),
    ]
    return found.export(settings, "\n".join(code))


def _to_torchrun(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    """Return the line that `autosplit launch --print` gives."""
    file, notes = _file_of(plan, path)
    command = command_for(plan, file, [SCRIPT])
    start = _Start.of(plan)
    if start.several:
        notes.append(
            f"the plan's ranks are on {len(start.machines)} machines, {_tuple_text(start.machines)}: give torchrun "
            "--nnodes and where they meet, by autosplit launch"
        )
    notes = [*_first_notes(plan), *notes, f"{SCRIPT} stands for your script, which calls autosplit.ddp.setup()"]
    settings = {"command": list(command.command), "variables": dict(command.variables)}
    return Export("torchrun", settings, command.line(), notes=tuple(map(printable, notes)))


def _to_env(plan: PlanRecord, path: str | os.PathLike[str] | None) -> Export:
    """Return the plan's numbers as variables: what autosplit itself reads, and the rest for scripts of one's own."""
    _precision(plan)
    notes = _first_notes(plan)
    variables: dict[str, str] = {}
    if plan.simulated:
        notes.append(f"{PLAN_VARIABLE} is left out: no job trains with a plan for cards that are not here")
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
    ranks = plan.ddp.ranks
    if ranks:
        effective = plan.ddp.effective_batch_size or plan.effective_batch_size
        variables |= {
            "AUTOSPLIT_DDP_BATCH_SIZES": _comma([rank.batch_size for rank in ranks]),
            "AUTOSPLIT_DDP_ACCUMULATION_STEPS": str(ranks[0].accumulation_steps),
            "AUTOSPLIT_DDP_EFFECTIVE_BATCH_SIZE": str(effective),
        }
        if not _Start.of(plan).several:
            variables["PET_NPROC_PER_NODE"] = str(len(ranks))
    notes = [printable(note) for note in notes]
    lines = [*comment_lines(notes), *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
    return Export("env", variables, "\n".join(lines), notes=tuple(notes))


def _to_json(plan: PlanRecord, _path: object) -> Export:
    settings = shareable(plan).to_dict()
    # Characters beyond ASCII are escaped: none of them can act on a terminal.
    return Export("json", settings, json.dumps(settings, indent=2), notes=tuple(map(printable, _first_notes(plan))))


def _file_of(plan: PlanRecord, path: str | os.PathLike[str] | None) -> tuple[Path, list[str]]:
    """Return the plan's file, and what to do where it has none."""
    if path is not None:
        return Path(path), []
    if plan.path is not None:
        return plan.path, []
    return Path(UNSAVED), [f'the plan is in no file yet: plan.save("{UNSAVED}") makes the one that is named here']


_Maker = Callable[[PlanRecord, str | os.PathLike[str] | None], Export]

_MAKERS: Mapping[str, _Maker] = {
    "transformers": _to_transformers,
    "accelerate": _to_accelerate,
    "lightning": _to_lightning,
    "torchrun": _to_torchrun,
    "env": _to_env,
    "json": _to_json,
}

FORMATS = tuple(_MAKERS)
"""What a plan can be exported to."""


def _loader_lines(even: EvenRanks) -> list[str]:
    of_each = "  # of each process" if even.num_ranks > 1 else ""
    return [f"loader = DataLoader(dataset, batch_size={even.batch_size}, shuffle=True){of_each}"]


def _started_by(command: str, start: _Start | None) -> list[str]:
    return [f"# start it by: {command}", *comment_lines([] if start is None else start.remark())]
