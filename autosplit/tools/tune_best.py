"""Tune several variants of a training, with other precisions or checkpointed layers, and return the fastest plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from autosplit.devices.device import Device
from autosplit.errors import AutosplitError, WorkloadError, ends_tracebacks, shown
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced, with_notes
from autosplit.profiles import store as profiles
from autosplit.runtime.prepare import Source, workload_source
from autosplit.text import rate_text
from autosplit.tools.precision import native_ones, precision_list, without_bf16
from autosplit.tuning.keywords import refuse_unknown
from autosplit.tuning.progress import Progress, never_falling, part_of, progress_listener
from autosplit.tuning.tune import TuningInterrupted, quiet, request_for, tune, tune_request, with_warnings
from autosplit.workload.checkpointing import AUTO, Checkpointing
from autosplit.workload.workload import Workload

EVERY = (None, 2, 1)
"""The options to search: checkpoint no layers, every second layer, and every layer. The first wins a tie."""


INTERRUPTED_NOTE = Note(
    "interrupted", "Tuning was interrupted before all variants were tuned. This is the best plan so far."
)

TRIED = "variants"
"""The kind of the note that lists the variants."""


@dataclass(frozen=True)
class TunedVariant:
    """The result of a variant.

    Attributes:
        name: The precision and the checkpointed layers, such as ``"precision bf16, every layer checkpointed"``.
        batch_size: Samples per forward.
        samples_per_s: Throughput.
    """

    name: str
    batch_size: int
    samples_per_s: float

    def __str__(self) -> str:
        return f"{self.name}: {rate_text(self.samples_per_s)} with {self.batch_size:,} per forward"


@dataclass(frozen=True)
class BestPlan:
    """The fastest plan of several variants.

    Attributes:
        plan: The fastest plan. `plan.precision` and `plan.checkpointed` have its variant.
        variants: The results of all variants that fit, the fastest first.
    """

    plan: Plan
    variants: tuple[TunedVariant, ...]


@ends_tracebacks
def tune_best(
    model_or_workload: nn.Module | Workload | Callable[[], Workload],
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    precision: str | Sequence[str] | None = None,
    checkpointing: Any = None,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    loss_reduction: str | None = None,
    devices: Any = None,
    strategy: str = "auto",
    time_limit_s: float | None = None,
    isolate: bool = False,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> BestPlan:
    """Tune each combination of precisions and checkpointed layers, and return the fastest plan.

        best = autosplit.tune_best(model, batch, loss_fn, precision=("none", "bf16"), checkpointing=Block)
        model = best.plan.wrap(model)

    Args:
        model_or_workload: See `autosplit.tune` for this and all other arguments that are not listed here.
        precision: Precisions, as in ``("none", "bf16")`` or ``"none,bf16"``. bf16 is left out if a device has no
            native support. Default: the workload's own.
        checkpointing: Class of the layers that a model repeats, or its name, or several; ``"auto"`` for a model of
            transformers. The options are to checkpoint none, every second or all of these layers. The plan has their
            names in `checkpointed`. Default: the model stays unchanged.
        time_limit_s: Time in seconds for all variants together.
        **options: The other arguments of `autosplit.tune`.

    Returns:
        The fastest plan, which is also the newest saved plan, and the results of all variants.

    Raises:
        DoesNotFitError: No variant fits.
        TuningInterrupted: Ctrl-C was pressed. The exception has the best plan so far.
    """
    refuse_unknown(tune_best, options, tune)
    options = {"n_trials": 24, "profile": "auto", **options, "time_limit_s": time_limit_s}
    request = request_for(devices, strategy, **options)
    wanted, layers = precision_list(precision), checkpointing_list(checkpointing)
    precisions, notes = native_ones(wanted, _without_bf16(wanted, request.devices, strategy))
    described: dict[str, Any] = {"loss_fn": loss_fn, "compute_loss": compute_loss, "optimizer": optimizer}
    described["loss_reduction"] = loss_reduction
    variants = [*itertools.product(precisions, layers)]

    # Make all sources first, so that an invalid variant raises before any variant is tuned.
    sources: list[Source] = [
        workload_source(model_or_workload, sample_batch, {**described, "precision": name, "checkpointing": chosen})
        for name, chosen in variants
    ]
    names = [_name_of(*variant, len(precisions), len(layers)) for variant in variants]
    plans: dict[str, Plan] = {}
    misfits: list[DoesNotFitError] = []
    with progress_listener(progress) as listener:
        listen = never_falling(listener or quiet)
        for number, name in enumerate(names):
            timed = replace(request, deadline=request.deadline.part(len(names) - number))
            part_listener = listen if len(names) == 1 else part_of(listen, number, len(names), name)
            try:
                plans[name] = tune_request(timed, partial(_source, sources[number]), part_listener, isolate=isolate)
            except TuningInterrupted as interrupted:
                raise _interrupted(plans, name, interrupted.plan) from None
            except DoesNotFitError as misfit:  # other variants may fit
                misfits.append(misfit)
                notes = (*notes, Note("variant-left-out", f"{name} is left out: {misfit}"))
    if not plans:
        raise misfits[0]
    best = _best_of(plans, notes)
    with_warnings(best.plan)
    return best


def _source(source: Source, _number: int) -> Source:
    return source


def _interrupted(plans: dict[str, Plan], name: str, found: Plan | None) -> TuningInterrupted:
    """Return the exception with the best plan so far, which is not complete."""
    if found is not None:
        plans = {**plans, name: found}
    if not plans:
        return TuningInterrupted(None)
    best = max(plans.values(), key=lambda plan: plan.samples_per_s)
    return TuningInterrupted(with_notes(replaced(best, complete=False), INTERRUPTED_NOTE))


def _best_of(plans: dict[str, Plan], notes: tuple[Note, ...]) -> BestPlan:
    ordered = sorted(plans.items(), key=lambda named: -named[1].samples_per_s)
    plan = ordered[0][1]
    results = tuple(TunedVariant(name, plan.batch_size, plan.samples_per_s) for name, plan in ordered)
    if len(results) > 1:
        tried = Note(TRIED, f"Chose {results[0]}. Also tried {'; '.join(map(str, results[1:]))}.")
        plan = with_notes(replaced(plan, notes=tuple(note for note in plan.notes if note.kind != TRIED)), tried)
        _save_last(plan, tried)
    return BestPlan(with_notes(plan, *notes), results)


def _save_last(plan: Plan, tried: Note) -> None:
    """Save the fastest plan again, because a job without a named plan takes the newest."""
    if plan.path is None:
        return
    with suppress(AutosplitError, OSError):  # the profile is valid without the note
        saved = Plan.load(plan.path)
        if saved.split == plan.split:  # a plan that was solved again for less memory is not saved
            saved = replaced(saved, notes=tuple(note for note in saved.notes if note.kind != TRIED))
            profiles.store(plan.path.stem, with_notes(saved, last=[tried]))


def _without_bf16(wanted: tuple[str | None, ...], here: tuple[Device, ...], strategy: str) -> list[str]:
    """Return the devices without native bfloat16, the same on all ranks of a job."""
    from autosplit.ddp.rendezvous import place_here
    from autosplit.tuning.rank_group import in_a_job, peers_here

    if strategy != "ddp" or not in_a_job():
        return without_bf16(wanted, here)
    own = here[(place_here().local_rank or 0) % len(here)]  # of a CPU's budgets, each rank has one
    with peers_here() as peers:
        found = peers.all_run(lambda: without_bf16(wanted, [own]))
        peers.part()
    return [*itertools.chain(*found)]


def _name_of(precision: str | None, layers: Checkpointing | None, precisions: int, choices: int) -> str:
    parts = [f"precision {precision}"] if precisions > 1 else []
    parts += [str(layers or "no checkpointed layer")] if choices > 1 else []
    return ", ".join(parts)


def checkpointing_list(value: Any) -> tuple[Checkpointing | None, ...]:
    """Return the checkpointing options to search for an argument of `tune`. ``(None,)`` keeps the model unchanged."""
    if value is None:
        return (None,)
    given = value.split(",") if isinstance(value, str) else value
    kinds = tuple(given) if isinstance(given, Sequence) else (given,)
    kinds = tuple(kind.strip() if isinstance(kind, str) else kind for kind in kinds)
    of_layers = all(
        kind.isidentifier() if isinstance(kind, str) else isinstance(kind, type) and issubclass(kind, nn.Module)
        for kind in kinds
    )
    if not kinds or not of_layers or (AUTO in kinds and len(kinds) > 1):
        raise WorkloadError(
            f"checkpointing is {shown(value)}. Expected 'auto' for a transformers model, or the class or name of the "
            "repeated layers, or several of these. Pass checkpointing=Block, say.",
        )
    return tuple(None if every is None else Checkpointing(kinds, every) for every in EVERY)
