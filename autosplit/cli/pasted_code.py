"""Write the lines that use a plan: Python code to paste into a script, or a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from autosplit.cli.options import flags_of
from autosplit.plan.explanation import ASSUMED_LOSS
from autosplit.plan.plan import Plan
from autosplit.plan.record import count_of
from autosplit.probe.check_result import EXACT, is_count_expression
from autosplit.text import printable


@dataclass(frozen=True)
class Origin:
    """The place where a plan is saved, and the command that makes it again.

    Attributes:
        saved_as: The first digits of a profile's key, or the path of a plan's file. None if the plan is not saved.
        command: For simulated plans, the command that tunes the same on real GPUs. If it is empty, it is made from the
            plan.
    """

    saved_as: str | None = None
    command: str = ""


UNSAVED = Origin()

_LOSS_IN_OUTPUTS = {"attribute": ".loss", "item": '["loss"]', "first": "[0]", "scalar": "", "mean": "", None: ".loss"}
"""Python code of a plan's `loss_rule`. None: the plan is from an older version."""


def paste_lines(plan: Plan, origin: Origin = UNSAVED) -> tuple[str, ...]:
    """Return the lines that use a plan: Python for real devices, a command for simulated devices.

    The Python code expects `model`, `optimizer`, `loss_fn` and `loader`, the DataLoader of the user's script. It begins
    with a comment that names the objects which it expects.
    """
    if plan.simulated:
        return (_command_of(plan, origin),)
    if plan.recommended.strategy == "ddp" and len(plan.devices) > 1:
        return _ranks_lines(plan, origin)
    return (
        _requirements_line(plan),
        *_imports(plan, "autosplit"),
        "",
        *([] if origin.saved_as else ['# First save the plan: plan.save("plan.json")']),
        f"plan = autosplit.Plan.load({json.dumps(origin.saved_as or 'plan.json', ensure_ascii=False)})",
        "model = plan.wrap(model)",
        *_loader_lines(plan, "plan"),
        *_loop_lines(plan, "plan"),
    )


def _requirements_line(plan: Plan) -> str:
    """Return a comment that names the objects that the user's script must define."""
    loader = " and loader" if plan.lengths is None else ", dataset, lengths and pad"
    loss_from = _loss_from(plan)
    loss = "" if loss_from == "output" else f", {loss_from}"
    loss += ", class_weights" if "class_weights" in count_of(plan) else ""
    one_by_one = ". Wrap several models one by one." if loss_from == "step" else ""
    return f"# Your script defines model, optimizer{loss}{loader}{one_by_one}"


def _loss_from(plan: Plan) -> str:
    own = next((name for name in ("step", "compute_loss") if plan.workload.get(name) is not None), None)
    is_assumed = any(note.kind == "loss-assumed" for note in plan.notes)
    has_none = plan.workload.get("loss_fn", "unknown") is None and not is_assumed
    return own or ("output" if has_none else "loss_fn")


def _loader_lines(plan: Plan, of: str) -> tuple[str, ...]:
    if plan.lengths is None:
        return (f"loader = {of}.loader(loader)  # the same data set, order, collate_fn and workers",)
    return (
        f"sampler = {of}.token_sampler(lengths, shuffle=True)  # the length of each sample",
        "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)  # which pads samples to the longest",
    )


def _imports(plan: Plan, package: str) -> tuple[str, ...]:
    loader = () if plan.lengths is None else ("from torch.utils.data import DataLoader",)
    return (f"import {package}", *(["import torch"] if plan.precision != "none" else []), *loader)


def _loop_lines(plan: Plan, of: str) -> Iterator[str]:
    """Yield the loop over the steps of an epoch, in the plan's precision.

    The loss has the weights that the gradient check found. Advice that code can't follow is a comment above the loop.
    """
    if _loss_from(plan) == "step":
        yield from _own_step_lines(plan, of)
        return
    kind, scaled = plan.devices[0].kind, plan.precision == "fp16"
    device = _device_of_batches(plan, of)
    batch, loss = _batch_and_loss(plan, of)
    if any(note.kind == "not-checked" for note in plan.notes):
        yield "# The gradient check was not run. If the loss is not a mean over samples, steps() needs count=. Run"
        yield "# autosplit check FILE."
    if wrong := [*_uncorrected(plan, of)]:
        yield "# No loop is printed, because it would not train as one process does."
        yield from (f"# {printable(one)}" for one in wrong)
        return
    count = f", count=lambda batch: {count_of(plan)}" if count_of(plan) else ""
    if scaled:
        yield f'scaler = torch.amp.GradScaler("{kind}")'
    yield f"for step in {of}.steps(loader{count}{device and f', device={device}'}):"
    yield f"    for {batch} in step:"
    if "targets" in batch and not device:
        yield "        targets = autosplit.to_device(targets, model.output_device)"
    if plan.precision == "none":
        yield f"        step.backward({loss})"
    else:
        yield f"        {_autocast(plan)}"
        yield f"            loss = {loss}"
        yield f"        step.backward(loss{', scaler' * scaled})"
    yield from ["    scaler.step(optimizer)", "    scaler.update()"] if scaled else ["    optimizer.step()"]
    yield "    optimizer.zero_grad()"


def _uncorrected(plan: Plan, of: str) -> Iterator[str]:
    """Yield why no loop would train exactly. `count=` corrects only the weights of micro-batches and ranks."""
    if plan.loss_rule == "mean":
        yield f"{ASSUMED_LOSS} Tune with loss_fn=."
    layout = plan.recommended
    if sum(map(bool, layout.split)) <= 1 and layout.accumulation_steps == 1:
        return
    for check in plan.checks:
        if check.depends and check.subject == "loss":
            if check.count and not is_count_expression(check.count):
                yield "autosplit did not write the plan's count=. Run autosplit check."
            elif not check.count or (of == "plan" and (check.split_error or 0.0) > EXACT):
                yield check.advice


def _autocast(plan: Plan) -> str:
    dtype = "float16" if plan.precision == "fp16" else "bfloat16"
    return f'with torch.autocast("{plan.devices[0].kind}", torch.{dtype}):'


def _own_step_lines(plan: Plan, of: str) -> Iterator[str]:
    sizes = plan.recommended.split
    if of == "ctx" and len({*sizes}) > 1:
        yield f"# Batch sizes differ: multiply each mean loss by ctx.batch_size * ctx.world_size / {sum(sizes)}"
    device = "ctx.device" if of == "ctx" else "plan.devices_here()[0]"
    call = f"step(model, optimizer, autosplit.to_device(batch, {device}))"
    yield "for batch in loader:"
    if plan.precision == "none":
        yield f"    {call}"
    else:
        yield f"    {_autocast(plan)}"
        yield f"        {call}"


def _device_of_batches(plan: Plan, of: str) -> str:
    """Return the expression for the device of the batches in `steps`. Empty if the wrapper moves the inputs.

    On several devices the wrapper moves them. On the first device, the whole batch would need more memory.
    """
    if of == "ctx":
        return "ctx.device"
    moves = len(plan.devices) == 1 or _loss_from(plan) == "compute_loss"
    return "model.output_device" if moves else ""


def _batch_and_loss(plan: Plan, of: str) -> tuple[str, str]:
    loss_from = _loss_from(plan)
    name = "inputs" if loss_from == "loss_fn" else "batch"
    stars = {"tensor": "", "arguments": "*", "keywords": "**"}[plan.called_with]
    if loss_from == "compute_loss":
        batch, loss = name, f"compute_loss(model, {name})"
    elif loss_from == "output":
        batch, loss = name, f"model({stars}{name}){_LOSS_IN_OUTPUTS[plan.loss_rule]}"
    else:
        batch, loss = "inputs, targets", f"loss_fn(model({stars}{name}), targets)"
    ranks = " * step.num_ranks" if of == "ctx" else ""  # DDP divides the gradient by the number of ranks
    return batch, f"{loss}{ranks} / step.weight" if plan.loss_reduction == "sum" else loss


def _command_of(plan: Plan, origin: Origin) -> str:
    command = origin.command or _command_again(plan)
    is_given = plan.request.get("strategy") not in (None, "auto")
    return command if is_given or plan.recommended is plan.main else f"{command} --strategy ddp"


def _command_again(plan: Plan) -> str:
    keywords = ("strategy", "effective_batch_size", "max_batch_size", "reserve", "name")
    asked = {**{name: plan.request.get(name) for name in keywords}, "precision": plan.precision}
    sizes = asked["effective_batch_size"]
    if isinstance(sizes, list):
        asked["effective_batch_size"] = ":".join(map(str, sizes))
    usual = {"strategy": "auto", "precision": "none"}
    flags = flags_of({name: value for name, value in asked.items() if value not in (None, usual.get(name))})
    return shlex.join(["python", "-m", "autosplit", "tune", "FILE", "--devices", "cuda", *flags])


def _ranks_lines(plan: Plan, origin: Origin) -> tuple[str, ...]:
    given = "" if origin.saved_as is None else f" --plan {shlex.quote(origin.saved_as)}"
    return (
        _requirements_line(plan),
        *_imports(plan, "autosplit.ddp"),
        "",
        f"# Start train.py with: python -m autosplit launch{given} train.py",
        "with autosplit.ddp.setup() as ctx:",
        "    model = ctx.wrap(model)",
        *(f"    {line}" for line in _loader_lines(plan, "ctx")),
        *(f"    {line}" for line in _loop_lines(plan, "ctx")),
    )
