"""Turn a survey and its trials into a plan: choose, confirm the ceilings, and solve for DDP."""

from __future__ import annotations

from dataclasses import replace

from autosplit.addons import addon
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError
from autosplit.plan.layout import Layout
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_devices, with_notes
from autosplit.probe.check_result import Check
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Ceiling, MemoryParts
from autosplit.solve.step_time import BACKWARD_SHARE, Cost, StepTime, TimeCurve
from autosplit.solve.trial import Trial, configuration_of
from autosplit.tuning.assemble import DDP_NOTE, assembled, idle_notes, residuals_of, seats_of
from autosplit.tuning.run import Run, Survey
from autosplit.tuning.search import Search
from autosplit.tuning.survey import all_reduce_seconds, solve_ranks
from autosplit.workload.compiled import compiled_times_note, has_compiled_parts
from autosplit.workload.workload import modules_of

INTERRUPTED_NOTE = Note("interrupted", "The search was interrupted. This is the best plan so far.")


def solved_ranks_plan(run: Run, survey: Survey, checks: tuple[Check, ...]) -> Plan:
    """Return DDP's plan from measurements of single devices, without trials."""
    ddp, step_time = solve_ranks(run, survey.ranks, survey.step_time)
    if isinstance(ddp, str):
        raise DoesNotFitError(
            f"DDP can't train this workload on {', '.join(device.label for device in run.request.devices)}: "
            f"{ddp}. Expected a rank on each device. Leave strategy='ddp' out, or use a smaller model or "
            "larger devices.",
        )
    cost = Cost(step_time, all_reduce_seconds(run, step_time))
    memory = run.prober.rank_parts(ddp.split, ddp.peak_bytes, accumulates=ddp.accumulation_steps > 1)
    curves = cost.step_time.curves
    seats = seats_of(run.request, ddp.split, [seat.ceiling for seat in ddp.seats], ddp.peak_bytes, curves, memory)
    return _with_compiled(run, _assembled(run, checks, (), [replace(ddp, seats=seats, cost=cost)], DDP_NOTE))


def split_plan(run: Run, survey: Survey, search: Search, best: Trial, checks: tuple[Check, ...]) -> Plan:
    """Return the plan of the best trial of BalancedDataParallel, with DDP's layout."""
    assert survey.limits is not None, "a survey for BalancedDataParallel has limits"
    _confirm(run)
    run.notes.extend(search.doubts())
    prober = run.prober
    matters = survey.limits.replicas and not prober.shares_processor and not prober.out_of_time
    even_rate = search.even_rate(best) if matters else None
    ceilings = survey.limits.of_plan(best)
    balanced = _split_layout(run, search, best, ceilings, _memory_of(run, search, best))
    balanced = replace(balanced, even_samples_per_s=even_rate, least_batch=survey.least_batch)
    if len(survey.ranks) > 1:
        ddp, _ = solve_ranks(run, survey.ranks, survey.step_time)
    else:  # the search measured the plain model on the only device
        ddp = replace(balanced, strategy="ddp", region=None, options=survey.options)
    layouts = [balanced] if isinstance(ddp, str) else [balanced, ddp]
    plan = _assembled(run, checks, search.trials, layouts, why_no_ddp=ddp if isinstance(ddp, str) else None)
    if run.request.simulated:
        run.report("simulating other machines")
        what_ifs = addon("simulated_what_ifs")(plan, prober.worker, deadline_s=run.request.deadline.end_s)
        plan = replace(plan, what_ifs=what_ifs)
    return _with_compiled(run, plan)


def ranks_plan(run: Run, survey: Survey, search: Search, best: Trial, checks: tuple[Check, ...]) -> Plan:
    """Return DDP's plan for the best trial of all ranks together."""
    _confirm(run)
    layout = replace(_ranks_layout(run, survey, search, best), even_samples_per_s=search.even_rate(best))
    return _assembled(run, checks, search.trials, [layout], joint_note(run))


def interrupted_plan(run: Run, survey: Survey, search: Search, checks: tuple[Check, ...]) -> Plan | None:
    """Return the best plan so far, without another step, or None if no trial has succeeded."""
    best = search.best()
    if best is None:
        return None
    joint = (joint_note(run),) if run.processes.job.has_peers else ()
    if survey.limits is None:
        layout, why = _ranks_layout(run, survey, search, best), None
    else:
        layout = _split_layout(run, search, best, survey.limits.known_of(best, search.solver.space))
        why = "the search was interrupted before DDP was solved"
    plan = _assembled(run, checks, search.trials, [layout], INTERRUPTED_NOTE, *joint, why_no_ddp=why)
    return replace(plan, complete=False)


def joint_note(run: Run) -> Note:
    """Return the note of a plan whose trials ran on all ranks together."""
    count = len(run.request.devices)
    return Note("ddp-measured", f"With strategy 'ddp', {count} ranks ran all measured steps together.")


def _confirm(run: Run) -> None:
    run.report.stage = "confirming"
    run.report("the plan")


def _split_layout(
    run: Run,
    search: Search,
    best: Trial,
    ceilings: tuple[Ceiling, ...],
    memory: tuple[MemoryParts | None, ...] = (),
) -> Layout:
    """Return BalancedDataParallel's layout for the best trial, without running another step."""
    assert best.samples_per_s is not None
    fitted = search.solver.refitted(search.trials).step_time
    residuals = residuals_of(search.solver, fitted, search.trials)
    curves = search.solver.step_time.curves
    return Layout(
        "balanced",
        seats_of(run.request, best.split, ceilings, best.peak_bytes, curves, memory),
        best.accumulation_steps,
        search.effective_of(best),
        best.samples_per_s,
        least_batch=search.solver.space.region.least_share,
        cost=Cost(fitted, all_reduce_seconds(run, fitted), residuals),
        region=search.solver.space.region_of(best.accumulation_steps),
    )


def _ranks_layout(run: Run, survey: Survey, search: Search, best: Trial) -> Layout:
    """Return DDP's layout for the best trial of all ranks, without running another step."""
    assert best.samples_per_s is not None
    fitted = search.solver.refitted(search.trials).step_time
    residuals = residuals_of(search.solver, fitted, search.trials)
    pairs = zip(survey.ranks, best.split, strict=True)
    ceilings = tuple(replace(rank, batch_size=max(rank.batch_size, samples)) for rank, samples in pairs)
    curves = tuple(TimeCurve(tuple((n, fitted.contention * s) for n, s in curve.points)) for curve in fitted.curves)
    busy_s = max(curve(samples) for curve, samples in zip(curves, best.split, strict=True))
    # Add the part that the backward hides. `overlapped_seconds` subtracts it again.
    reduce_s = BACKWARD_SHARE * busy_s + sum(fitted.copies_s)
    return Layout(
        "ddp",
        seats_of(run.request, best.split, ceilings, best.peak_bytes, curves),
        best.accumulation_steps,
        search.effective_of(best),
        best.samples_per_s,
        least_batch=survey.least_batch,
        cost=Cost(StepTime.bare(curves, fitted.update_s, adds_up=False), reduce_s, residuals),
        options=survey.options,
    )


def _memory_of(run: Run, search: Search, best: Trial) -> tuple[MemoryParts | None, ...]:
    if not best.peak_bytes:
        return ()
    splits = search.solver.splits_of(configuration_of(best), best.split)
    return run.prober.parts(StepShape(splits[:2]), best.peak_bytes)


def _assembled(
    run: Run,
    checks: tuple[Check, ...],
    trials: list[Trial] | tuple[()],
    layouts: list[Layout],
    *notes: Note,
    why_no_ddp: str | None = None,
) -> Plan:
    steps, ooms = run.processes.counted()
    plan = assembled(
        run.request,
        run.workload,
        run.key,
        layouts,
        why_no_ddp=why_no_ddp,
        trials=tuple(trials),
        checks=checks,
        loss_rule=run.prober.facts.loss_rule,
        notes=(*run.notes, *notes, *idle_notes(run.request, layouts[0])),
        real_steps=steps,
        real_ooms=ooms,
    )
    if run.request.simulated:
        attention = addon("attention_of")(run.prober.worker)
        plan = with_devices(plan, lambda place, device: replace(device, attention=attention[place]))
    return plan


def _with_compiled(run: Run, plan: Plan) -> Plan:
    is_compiled = any(map(has_compiled_parts, modules_of(run.workload)))
    return with_notes(plan, last=[compiled_note(run)]) if is_compiled else plan


def compiled_note(run: Run) -> Note:
    """Return a note on torch.compile, with published results for simulated GPUs."""
    if run.prober.worker.exact:
        return Note("compiled", compiled_times_note(modules_of(run.workload)))
    return Note("compiled", "The model is compiled, but memory and time are those of the uncompiled model.")
