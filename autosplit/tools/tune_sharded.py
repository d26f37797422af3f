"""Tune DDP for a model that FSDP2 shards, even if the whole model fits no device.

tune(strategy="ddp") on the devices                 ->  a plan with whole models, from real steps
    does not fit: tune for simulated devices of the     a plan with whole models, from the catalogue's kernel times
    same kinds, with memory for the whole model
sharded_plan(plan, ...), with the devices' memory   ->  batch sizes of the sharded model

A batch of n samples needs the same activations and the same computation with and without sharding. So only the
memory of parameters, gradients and optimizer state, and the communication are replaced.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.accelerators import is_accelerator
from autosplit.devices.catalog import find_card
from autosplit.devices.device import Device, reserve_bytes
from autosplit.devices.spec import parse_devices
from autosplit.errors import InputError, ends_tracebacks, users_errors
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError
from autosplit.plan.layout import Layout, PlanDevice, Seat
from autosplit.plan.other_model import warn_of_other_model
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_notes
from autosplit.plan.torchrun import required_ranks
from autosplit.profiles.key import machine_of
from autosplit.rng import preserved_rng
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import Source, workload_source
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.prepare import build_simulated, traced_workload
from autosplit.sim.simulated import traced_peaks
from autosplit.text import size_text
from autosplit.tools.fsdp import Layers, groups_of
from autosplit.tools.sharded_plan import Activations, shard_sizes, sharded_plan, state_bytes
from autosplit.torch_versions import FakeTensor
from autosplit.tuning.keywords import refuse_unknown
from autosplit.tuning.rank_group import in_a_job
from autosplit.tuning.tune import tune
from autosplit.workload.tree import map_tensors
from autosplit.workload.workload import Workload

WHOLE_COPIES = 6
"""Simulated devices get this many times the parameters' bytes as additional memory.

A rank with AdamW that accumulates needs 5 times: parameters, gradients, DDP's buckets, and two tensors of state.
"""

GAPS = 0.1
"""Share of a GPU's memory that gaps between tensors waste. Shards are not replayed through the allocator's model."""


@ends_tracebacks
def tune_sharded(
    model_or_workload: Any,
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    layers: Layers | None = None,
    shard_size: int | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
    devices: Any = None,
    reserve: str | float | None = None,
    **options: Any,
) -> Plan:
    """Find the batch sizes for a model that `ctx.shard` shards over the devices, even if it fits no single device.

        plan = autosplit.tune_sharded(make_workload, layers=Block, effective_batch_size=256)
        with autosplit.ddp.setup(plan) as ctx:
            model = ctx.shard(model, layers=Block)

    If the whole model fits each device, autosplit measures real steps of it. Otherwise autosplit simulates GPUs of the
    same kinds with enough memory, and the plan has a note of kind ``"sharded-simulated"``. In both cases, no step of
    the sharded model runs: its memory and throughput are predicted, and notes of kind ``"sharded"`` and
    ``"unequal-shards"`` explain them. The plan is for DDP only, and is not stored.

    Args:
        model_or_workload: See `autosplit.tune`. If the model does not fit this machine's memory, pass a function that
            returns a `Workload`. autosplit calls the function under fake tensors.
        sample_batch: See `autosplit.tune`.
        loss_fn: See `autosplit.tune`.
        layers: The same layers as for `ctx.shard`.
        shard_size: Ranks per shard group. It must divide the number of ranks. Consecutive ranks form a group. Groups
            hold equal copies of the model, and all-reduce their gradients. Default: the smallest size whose predicted
            throughput is at most 0.1% below the best.
        reshard_after_forward: The same option as for `ctx.shard`.
        param_dtype: The same dtype as in ``MixedPrecisionPolicy(param_dtype=...)`` for `ctx.shard`. Steps are measured
            or simulated with parameters and inputs in this dtype. Default: the dtype of the parameters.
        plan: A plan for the whole model, with `strategy` ``"ddp"`` and `param_dtype` as its parameters' dtype. Pass it
            if a job of several machines made it. Arguments that it was tuned with, such as `devices`, are refused then.
            Default: tune first.
        devices: See `autosplit.tune`.
        reserve: See `autosplit.tune`.
        **options: Other keyword arguments of `autosplit.tune`, except `strategy`. A model that checkpoints its layers
            itself works.

    Raises:
        InputError: An argument is invalid. FSDP2 can't shard the model. Or this process is a rank of a job.
        DeviceError: The whole model does not fit, and the catalogue lacks a GPU.
        DoesNotFitError: The whole model does not fit the CPU devices, and autosplit simulates only GPUs.
        PlanError: The effective batch does not fit, even if the model is sharded. Or there is a single device.

    Warns:
        OtherModelWarning: `plan` was made for a model of another size.
    """
    _refuse_options(options, param_dtype, reshard_after_forward)
    if in_a_job():
        raise InputError(
            "tune_sharded was called in a job with several ranks. Expected a single process, which sees all devices. "
            "Call it before the job, save the plan, and pass its file to autosplit.ddp.setup.",
        )
    if plan is None:
        asked = parse_devices(devices)
        shard_sizes(len(asked), shard_size)  # raise before minutes of tuning
    else:
        _refuse_with_plan(plan, {"devices": devices, "reserve": reserve, **options})
    with users_errors("The function that builds the model"):
        model = built_without_memory(partial(_model_of, model_or_workload), fake_mode())
    with users_errors("layers"):
        groups = groups_of(model, layers)
    given = model_or_workload
    if param_dtype is not None:
        _refuse_optimizer(options.get("optimizer"))
        given = _cast(given, param_dtype)
    tuned = partial(tune, given, sample_batch, loss_fn, strategy="ddp", reserve=reserve, **options)
    if plan is None:
        plan, traced_on = _whole_plan(tuned, asked, state_bytes(model.parameters()), reserve)
    else:
        warn_of_other_model(plan, model)
        traced_on = [_like(index, planned) for index, planned in enumerate(plan.devices)]
    described = {name: options[name] for name in _DESCRIBED & options.keys()} | {"loss_fn": loss_fn}
    described |= {"precision": plan.precision}
    source = workload_source(given, sample_batch, described)
    with _activations(source, traced_on, plan) as activations:
        return sharded_plan(
            plan,
            groups,
            activations,
            shard_size=shard_size,
            reshards=reshard_after_forward,
            param_dtype=param_dtype,
            gaps=0.0 if plan.devices[0].kind == "cpu" else GAPS,
        )


_DESCRIBED = {"compute_loss", "optimizer", "loss_reduction"}
"""Arguments of `tune` that describe the workload."""


_PARAM_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that layers can compute in. Products of float8 need scales, which plain layers do not have."""


def _refuse_options(options: Mapping[str, Any], param_dtype: Any, reshards: Any) -> None:
    refuse_unknown(tune_sharded, options, tune)
    if "strategy" in options:
        raise InputError(
            f"strategy={options['strategy']!r:.80} was passed. Expected none: tune_sharded plans DDP. Leave it out.",
        )
    if param_dtype is not None and param_dtype not in _PARAM_DTYPES:
        raise InputError(
            f"param_dtype is {param_dtype!r:.80}. Expected a floating-point dtype of at least 16 bits, or None for the "
            "dtype of the parameters. Pass a dtype such as torch.bfloat16.",
        )
    if not isinstance(reshards, bool):
        raise InputError(
            f"reshard_after_forward is {reshards!r:.80}. Expected True or False. Pass the value that ctx.shard gets.",
        )


def _refuse_with_plan(plan: Any, options: Mapping[str, Any]) -> None:
    """Raise InputError if `plan` is no plan, or for options that it was tuned with. They would have no effect."""
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan is {plan!r:.80}. Expected a Plan. Load a file with autosplit.Plan.load.",
        )
    ignored = [name for name, value in options.items() if name not in _DESCRIBED and value is not None]
    if ignored:
        raise InputError(
            f"{ignored[0]}={options[ignored[0]]!r:.80} was passed with plan=. Expected none, because the plan is "
            "already tuned. Leave one of the two out.",
        )


def _whole_plan(
    tuned: Callable[..., Plan], devices: Sequence[Device], state: tuple[int, int], reserve: str | float | None
) -> tuple[Plan, Sequence[Device]]:
    """Return a plan for unsharded ranks, and the devices it was measured on.

    If the model does not fit, use simulated devices with more memory.

    Args:
        state: Bytes of all parameters, and of their gradients.
    """
    misfit: DoesNotFitError | None = None
    capacities = [device.capacity_bytes - reserve_bytes(reserve, device) for device in devices]
    if sum(state) < min(capacities):
        try:
            return tuned(devices=devices), devices
        except DoesNotFitError as error:
            misfit = error
    if devices[0].kind == "cpu":
        raise misfit or DoesNotFitError(
            f"The parameters and gradients take {size_text(sum(state))}, and {devices[0].label} has "
            f"{size_text(min(capacities))}. autosplit simulates only GPUs with more memory. Use devices='sim:...', or "
            "a smaller model.",
        )
    large = [
        _simulated(device.name, index, capacity + WHOLE_COPIES * state[0])
        for index, (device, capacity) in enumerate(zip(devices, capacities, strict=True))
    ]
    # The capacities are already without the reserve.
    return _placed(tuned(devices=large, profile="off", reserve=None), devices, capacities), large


@contextmanager
def _activations(source: Source, devices: Sequence[Device], plan: Plan) -> Iterator[Activations]:
    """Trace forwards and backwards, and yield their bytes without parameters and gradients.

    A plan's ceilings do not show these bytes if a rank with a whole model needs the most memory in its update. So trace
    with an optimizer whose update needs no memory.
    """
    seats = required_ranks(plan).seats
    untraced = [0] * len(seats)
    if is_accelerator(plan.devices[0].kind) and plan.real_steps:
        forwards = 2 if plan.accumulates and plan.effective_batch_sizes is not None else 1
        with _traced(source, devices) as (whole_bytes, _):
            untraced = [
                max(0, seat.ceiling.peak_bytes - whole_bytes(number, seat.ceiling.batch_size, forwards))
                for number, seat in enumerate(seats)
            ]
    with _traced(partial(_without_state, source), devices) as (step_bytes, state_bytes):
        yield lambda rank, samples: step_bytes(rank, samples, 1) - state_bytes + untraced[rank]


@contextmanager
def _traced(source: Source, devices: Sequence[Device]) -> Iterator[tuple[Callable[[int, int, int], int], int]]:
    """Yield a function that returns a rank's peak for samples and forwards, and the bytes of parameters and buckets."""
    with ExitStack() as closing:
        closing.enter_context(preserved_rng())
        built = build_simulated(source)
        closing.enter_context(untouched(built.workload))
        traced = traced_workload(built, devices, closing)

        @functools.cache
        def peak_bytes(rank: int, samples: int, forwards: int) -> int:
            split = tuple(samples if place == rank else 0 for place in range(len(devices)))
            shape = StepShape((split,) * forwards, "rank", num_ranks=len(devices))
            return traced_peaks(traced.traces, shape, devices)[rank]

        trainee = traced.tracer.trainee
        yield peak_bytes, sum(one.nbytes for one in trainee.parameters()) + bucket_bytes(trainee)


def _without_state(source: Source) -> Workload:
    workload = source if isinstance(source, Workload) else source()
    return replace(workload, optimizer=partial(torch.optim.SGD, lr=0.1, foreach=False))


def _simulated(name: str, index: int, capacity_bytes: int) -> Device:
    spec = find_card(name)
    return Device("sim", index, spec.name, capacity_bytes, budgeted=True, spec=spec)


def _like(index: int, planned: PlanDevice) -> Device:
    """Return a stand-in for a plan's device, for tracing. The real device may be absent."""
    if planned.kind == "cpu":
        return Device("cpu", index, planned.name, planned.memory_bytes, budgeted=True)
    return _simulated(planned.name, index, planned.memory_bytes)


def _placed(plan: Plan, devices: Sequence[Device], capacities: Sequence[int]) -> Plan:
    def seated(layout: Layout) -> Layout:
        found = zip(layout.seats, devices, capacities, strict=True)
        return replace(layout, seats=tuple(_placed_seat(seat, device, capacity) for seat, device, capacity in found))

    made = replace(
        plan,
        layouts=tuple(map(seated, plan.layouts)),
        machine=machine_of(devices),
        request={**plan.request, "devices": [device.label for device in devices]},
    )
    kinds = ", ".join(dict.fromkeys(device.name for device in plan.devices))
    text = (
        f"The whole model does not fit, so no step ran. autosplit simulated {kinds} with more memory, and predicted "
        "the times and the memory for activations from these steps."
    )
    return with_notes(made, Note("sharded-simulated", text))


def _placed_seat(seat: Seat, device: Device, capacity_bytes: int) -> Seat:
    placed = replace(
        seat.device,
        label=device.label,
        kind=device.kind,
        index=device.index,
        name=device.name,
        memory_bytes=device.capacity_bytes,
        capacity_bytes=capacity_bytes,
        budgeted=device.budgeted,
        uuid=device.uuid,
        driver=device.driver,
    )
    ceiling = replace(seat.ceiling, device=device.label, capacity_bytes=capacity_bytes)
    return replace(seat, device=placed, ceiling=ceiling)


def _model_of(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    if isinstance(given, Workload):
        return _model_of(given.model)
    if callable(given):
        return _model_of(given())
    raise InputError(
        f"The model is a {type(given).__name__}. Expected one module, because FSDP2 shards a single model. Pass a "
        "module, a Workload with one module, or a function that returns one of these.",
    )


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Return a workload, or a function that returns a model or a workload, whose model computes in this dtype."""
    if isinstance(given, Workload):
        _refuse_optimizer(given.optimizer)
        return replace(given, model=partial(_cast_model, given.model, dtype))
    if isinstance(given, nn.Module):
        return partial(_cast_model, given, dtype)
    return partial(_cast_built, given, dtype)


def _refuse_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"The optimizer is a {type(optimizer).__name__} object. With param_dtype, autosplit trains a copy of the "
            "model with other parameters. Expected a class or a factory, such as torch.optim.AdamW. Pass "
            "functools.partial for its options.",
        )


def _cast_built(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    built = build()
    return _cast_model(built, dtype) if isinstance(built, nn.Module) else _cast(built, dtype)


def _cast_model(given: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model whose parameters and inputs are cast as by FSDP2, which leaves buffers unchanged."""
    model = _model_of(given)
    # A model with fake tensors was just built for autosplit. Deepcopy would read its tensors' memory, and crash.
    if model is given and not any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        # torch logs an error if deepcopy copies a buffer's storage under fake tensors.
        model = copy.deepcopy(given, {id(buffer): buffer.clone() for buffer in model.buffers()})
    cast = {
        parameter: nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        for parameter in model.parameters()
        if parameter.is_floating_point()
    }
    for part in model.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            setattr(part, name, cast.get(parameter, parameter))
    model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    return model


def _cast_inputs(dtype: torch.dtype, _model: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return map_tensors(cast, (args, kwargs), keeps_marks=True)
