"""`tune()`: facts, measurements, fitted cost, search, plan. It composes the other modules and has no algorithm of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from autosplit import profiles
from autosplit.cost import Ceiling, MemoryFit, Region, Role, StepTime, TimeCurve
from autosplit.errors import ProfileError
from autosplit.isolation import in_child
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan import DdpPlan, Plan, PlanDevice, RankSettings
from autosplit.probe import Prober, does_not_fit
from autosplit.request import Request, checked_request
from autosplit.runtime.measurement import Measurement, StepShape
from autosplit.runtime.placed import bucket_bytes
from autosplit.search import PATIENCE, search
from autosplit.solver import RankSolver, Solver
from autosplit.staging import Followed, Source, follow, runtime_for, workload_source
from autosplit.space import Configuration, Space, Trial, best_trial
from autosplit.split import accumulation_steps, even_split, micro_batch_sizes
from autosplit.trainee import kept_rng

__all__ = ["Progress", "TuningInterrupted", "tune"]

POINT_BUDGET_S = 0.5
"""Repeating one measured size stops after this long."""

TRIAL_BUDGET_S = 1.0
"""Repeating one trial stops after this long."""


EXACT_PATIENCE = 4
"""As `search.PATIENCE`, where times are exact: the solver's answer and its neighbours tell it all."""


@dataclass(frozen=True)
class Progress:
    """Where a tuning stands.

    Attributes:
        stage: ``"ceilings"``, ``"times"``, ``"search"`` or ``"done"``.
        message: What is being done, in a few words.
        fraction: Of the whole, 0 to 1, as far as it can be told.
        steps: Real training steps so far.
        ooms: How many of them ran out of memory.
        best_samples_per_s: The best trial so far.
    """

    stage: str
    message: str
    fraction: float
    steps: int = 0
    ooms: int = 0
    best_samples_per_s: float | None = None


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C while tuning.

    Attributes:
        plan: The best so far; None where no trial had succeeded.
        path: The profile it was saved as; None where it was not.
    """

    def __init__(self, plan: Plan | None, path: Path | None) -> None:
        super().__init__(plan, path)
        self.plan = plan
        self.path = path

    def __str__(self) -> str:
        """Say what happened."""
        return "tuning was interrupted"


def tune(
    model_or_workload: Any,
    sample_batch: Any = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    batch_dim: int = 0,
    make_batch: Callable[[int], Any] | None = None,
    devices: Any = None,
    strategy: str = "auto",
    precision: str | None = None,
    effective_batch_size: int | None = None,
    max_batch_size: int | None = None,
    reserve: str | float | None = None,
    n_trials: int = 24,
    time_limit_s: float | None = None,
    storage: str | None = None,
    isolate: bool = False,
    profile: str = "auto",
    name: str | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find how much of the batch goes on which device, how big it may be, and how many accumulation steps.

    The model, its optimizer and every random number generator are left as they were, bit for bit, also after an
    exception or Ctrl-C: copies are trained.

    Args:
        model_or_workload: A module with its `sample_batch`, a `Workload`, or a function that returns a `Workload`
            (for ``sim:`` it is called under fake tensors, so that a model larger than this machine can be planned).
        sample_batch: One batch as training sees it; see `Workload`, as for all up to `make_batch` and `precision`.
        loss_fn: ``loss_fn(outputs, targets)``.
        compute_loss: ``compute_loss(model, batch)``.
        optimizer: A class, a factory or a live instance. Default: AdamW.
        batch_dim: The batch dimension.
        make_batch: ``make_batch(n)``.
        devices: ``"cuda:0,1"``, ``"cpu:2GiB,cpu:1GiB"``, ``"sim:2xA100-40GB+1xRTX3090"`` and the like. Default: every
            visible GPU; without any, the processor.
        strategy: ``"auto"`` and ``"balanced"`` search BalancedDataParallel's split and solve DDP's beside it;
            ``"ddp"`` solves DDP's alone, and the plan's split holds the ranks' batch sizes.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``.
        effective_batch_size: Samples per optimizer step, kept exactly. Default: one forward of whatever is best.
        max_batch_size: The most samples per forward.
        reserve: Kept free on every device: bytes, ``"1GiB"``, or a share (``0.05``, ``"5%"``). Default: 5 % on GPUs.
        n_trials: Trials of the search, at most.
        time_limit_s: No trial begins after this long.
        storage: An Optuna storage URL that keeps the study.
        isolate: Tune in a process of its own, which a crash ends instead of this one. The workload must be picklable.
        profile: ``"auto"`` uses a remembered plan for this kind of machine and this workload, and remembers a new one;
            ``"refresh"`` tunes anew; ``"off"`` neither reads nor writes.
        name: Keeps plans for otherwise equal workloads apart.
        seed: Of the search.
        progress: Called with a `Progress` now and then.

    Returns:
        The plan.

    Raises:
        InputError: An argument that can't be used; `DeviceError` and `WorkloadError` are among its leaves.
        DoesNotFitError: Not even the smallest batch fits.
        UserCodeError: The workload's own code raised on its own sample.
        TuningInterrupted: Ctrl-C; it carries the best plan so far.
    """
    request = checked_request(
        devices=devices,
        strategy=strategy,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        storage=storage,
        profile=profile,
        name=name,
        seed=seed,
    )
    described = {
        "loss_fn": loss_fn,
        "compute_loss": compute_loss,
        "optimizer": optimizer,
        "precision": precision,
        "make_batch": make_batch,
        "batch_dim": batch_dim or None,
    }
    source = workload_source(model_or_workload, sample_batch, described)
    if isolate:
        return in_child(_tune_source, request, source, reserve)
    return _tune_source(request, source, reserve, progress or _quiet)


def _quiet(progress: Progress) -> None:
    """Report to nobody."""


def _tune_source(
    request: Request, source: Source, reserve: object, progress: Callable[[Progress], None] = _quiet
) -> Plan:
    with kept_rng(), ExitStack() as closing:
        followed = follow(source, request.devices)
        workload = followed.workload
        machine, described = profiles.machine_of(request.devices), profiles.workload_of(workload)
        key = profiles.key_of(machine, described, request.facts(reserve), request.name)
        remembered, notes = _remembered(request, key, machine, described)
        if remembered is not None:
            return remembered
        session = _Session(request, followed, progress, closing, machine, described, notes, key)
        try:
            plan = session.plan()
        except KeyboardInterrupt:
            best = session.best_so_far()
            raise TuningInterrupted(best, None if best is None else _stored(request, key, best)[1]) from None
        return _stored(request, key, plan)[0]


def _remembered(
    request: Request, key: str, machine: dict[str, Any], workload: dict[str, Any]
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan that is remembered and still holds; otherwise why not, if there was one."""
    if request.profile != "auto":
        return None, ()
    found = profiles.find(key, machine=machine, workload=workload)
    if found.plan is None:
        return None, found.notes
    if not found.plan.complete:
        return None, (
            *found.notes,
            "the search of the remembered plan was interrupted: tuned anew",
        )
    short = profiles.memory_shortfall(found.plan, request.devices, request.capacities_bytes)
    if short is not None:
        return None, (*found.notes, f"{short}: tuned anew")
    said = f"from the profile {found.path}: nothing was run; --profile refresh (profile='refresh') tunes anew"
    differing = profiles.differing_facts(found.plan, request.devices)
    return replace(found.plan, notes=(said, *found.notes, *differing, *found.plan.notes)), ()


def _stored(request: Request, key: str, plan: Plan) -> tuple[Plan, Path | None]:
    """Remember a plan; where that fails, the plan says so."""
    if request.profile == "off":
        return plan, None
    try:
        return plan, profiles.store(key, plan)
    except ProfileError as error:
        return replace(plan, notes=(*plan.notes, f"the plan is not remembered: {error}")), None


class _Session:
    """One tuning: the measurements so far, and the plan they make."""

    def __init__(
        self,
        request: Request,
        followed: Followed,
        progress: Callable[[Progress], None],
        closing: ExitStack,
        machine: dict[str, Any],
        described: dict[str, Any],
        notes: tuple[str, ...],
        key: str,
    ) -> None:
        self.key = key
        self.request = request
        self.workload = followed.workload
        self.tell = progress
        self.machine, self.described = machine, described
        self.notes = [*notes, *followed.notes]
        self.runtime = runtime_for(request.devices, request.capacities_bytes, followed, closing)
        self.prober = Prober(self.runtime, followed.tracer, request.largest_batch, self._report)
        if request.simulated and self.prober.largest_traced < request.largest_batch:
            # A simulated step is a trace: what is not traced can't be run.
            self.prober.max_batch_size = self.prober.largest_traced
            self.notes.append(
                f"no batch over {self.prober.max_batch_size} was looked at: real tensors fill this machine"
            )
        self.stage = "ceilings"
        self.trials: list[Trial] = []
        self.measured: dict[int, Measurement] = {}
        self.solver: Solver | None = None
        self.replicas: tuple[Ceiling, ...] = ()

    def plan(self) -> Plan:
        """Measure, search, and put the plan together."""
        ranks, primary = self._ceilings()
        curves = self._curves(ranks, primary)
        space = self._space(primary)
        step_time = self._step_time(space, curves)
        self.solver = Solver(space, step_time)
        self._search(space)
        best = best_trial(self.trials, effective_batch_size=self.request.effective_batch_size)
        if best is None:
            raise self._nothing_fits()
        even = self._even_rate(best)
        ddp = self._ddp(best, ranks, step_time)
        plan = self._assembled(best, self._final_ceilings(best), ddp, even)
        self._say("done", "done", 1.0)
        return plan

    def best_so_far(self) -> Plan | None:
        """Return the best plan that the trials so far make, without running anything more."""
        best = best_trial(self.trials, effective_batch_size=self.request.effective_batch_size)
        if best is None or self.solver is None:
            return None
        region = self.solver.space.region
        primary = self.primary_alone
        ceilings = (
            replace(primary, batch_size=max(best.gpu0_bsz, region.primary_most(best.batch_size))),
            *self.replicas,
        )
        ddp = DdpPlan((), 0.0, "the search was interrupted before DDP was solved")
        plan = self._assembled(best, ceilings, ddp, None)
        return replace(plan, complete=False, notes=(*plan.notes, "the search was interrupted: this is the best so far"))

    # Measurements

    def _ceilings(self) -> tuple[tuple[Ceiling, ...], Ceiling]:
        """Find each device's ceiling as a rank, device 0's alone, and the others' as replicas."""
        devices, accumulates = self.request.devices, self.request.effective_batch_size is not None
        if self._on_plain_cpu():
            self.plain_cpu_curve, primary = self.prober.until_it_stops_paying()
        else:
            primary = self.prober.ceiling(0, "primary")
        self.primary_alone = primary
        if len(devices) == 1:
            if primary.batch_size == 0:
                raise does_not_fit(self.prober, 0)
            return (replace(primary, role="rank"),), primary
        buckets = bucket_bytes(self.prober.tracer.trainee)
        ranks = tuple(self._like(primary, index, "rank", buckets, accumulates) for index in range(len(devices)))
        self.replicas = tuple(self._like(primary, index, "replica", 0, False) for index in range(1, len(devices)))
        return ranks, primary

    def _like(self, known: Ceiling, index: int, role: Role, more_bytes: int, accumulates: bool) -> Ceiling:
        """Find a ceiling, beginning where another device's says that it should be."""
        slope = known.bytes_per_sample
        room_bytes = self.runtime.capacities_bytes[index] - known.fixed_bytes - more_bytes
        start = max(1, int(room_bytes / slope)) if slope > 0 else None
        return self.prober.ceiling(index, role, accumulates=accumulates, start=start, slope=slope)

    def _on_plain_cpu(self) -> bool:
        return self.request.kind == "cpu" and not self.request.devices[0].budgeted

    def _space(self, primary: Ceiling) -> Space:
        """Bound the search by what fits."""
        request = self.request
        if self.replicas:
            accumulates = request.effective_batch_size is not None
            most = self.prober.max_batch_size
            share = min(most, max(2, primary.batch_size))
            others = min(most, max(2, sum(ceiling.batch_size for ceiling in self.replicas)))
            fit = self.prober.primary_fit(share, others, accumulates=accumulates)
            # What a real step holds beyond its trace (a CUDA context's workspaces, fragmentation) stays with it.
            fit = replace(fit, fixed_bytes=fit.fixed_bytes + self.prober.untraced_bytes(primary))
        else:
            fit = MemoryFit(primary.fixed_bytes, primary.bytes_per_sample)
        region = Region(
            primary=fit,
            primary_capacity_bytes=self.runtime.capacities_bytes[0],
            primary_ceiling=primary.batch_size,
            replica_ceilings=tuple(ceiling.batch_size for ceiling in self.replicas),
            max_batch_size=self.prober.max_batch_size,
        )
        if region.largest_batch == 0:
            raise does_not_fit(self.prober, 0)
        fewest = accumulation_steps(request.effective_batch_size or 1, region.largest_batch)
        return Space(region, request.effective_batch_size, fewest + max(3, fewest))

    def _curves(self, ranks: tuple[Ceiling, ...], primary: Ceiling) -> tuple[TimeCurve, ...]:
        """Time each device alone; devices that share a processor share a curve."""
        self.stage = "times"
        if self._on_plain_cpu():
            return (self.plain_cpu_curve,)
        if self.runtime.shares_processor:
            widest = max(range(len(ranks)), key=lambda index: ranks[index].batch_size)
            return (self._curve(widest, ranks[widest]),) * len(ranks)
        return tuple(self._curve(index, rank) for index, rank in enumerate(ranks))

    def _curve(self, index: int, rank: Ceiling) -> TimeCurve:
        if rank.batch_size > 0:
            return self.prober.curve(index, rank.batch_size, role="rank", budget_s=POINT_BUDGET_S)
        if index > 0 and self.replicas[index - 1].batch_size > 0:
            # Too small for a rank, with the optimizer's state: timed as a replica, its copies included.
            return self.prober.curve(
                index, self.replicas[index - 1].batch_size, role="replica", budget_s=POINT_BUDGET_S
            )
        return TimeCurve(((1, 1.0),))  # it gets no samples, so its time is never asked for

    def _step_time(self, space: Space, curves: tuple[TimeCurve, ...]) -> StepTime:
        """Fit the time of a step: the devices' own curves, and what replicas add."""
        update_s = self.prober.update_seconds()
        bare = StepTime(curves, 0.0, 0.0, update_s, adds_up=self.runtime.shares_processor)
        if not self.replicas or self.runtime.shares_processor:
            return bare
        measured: list[tuple[tuple[int, ...], float]] = []
        solver = Solver(replace(space, effective_batch_size=None), bare)
        largest = space.region.largest_batch
        for size in dict.fromkeys((largest, max(1, largest // 4))):
            configuration = solver.fastest_of(size, 1)
            if configuration is None:
                continue
            split = solver.split_of(configuration)
            if not any(split[1:]):
                continue
            self._report(f"time of the split {split}")
            try:
                seconds = self.prober.micro_seconds(StepShape((split,)), budget_s=POINT_BUDGET_S)
            except OutOfMemoryError:
                continue  # the plane was a little too good there; the trials will tell
            measured.append((split, seconds))
        return bare.with_overhead(measured) if measured else bare

    # The search

    def _search(self, space: Space) -> None:
        assert self.solver is not None
        self.stage = "search"
        search(
            space,
            self._evaluate,
            first=self.solver.first_trials(),
            n_trials=self.request.n_trials,
            seed=self.request.seed,
            patience=EXACT_PATIENCE if self.runtime.simulated else PATIENCE,
            deadline_s=self.request.deadline_s,
            storage=self.request.storage,
            study_name=f"{self.request.name or 'autosplit'}-{self.key}",
            on_trial=self._keep,
        )

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._report(f"trial {trial.number + 1} of at most {self.request.n_trials}")

    def _evaluate(self, number: int, configuration: Configuration) -> Trial:
        """Run a configuration; one that fails is a failed trial."""
        assert self.solver is not None
        splits = self.solver.splits_of(configuration)
        trial = Trial(
            number, configuration.gpu0_bsz, configuration.batch_size, configuration.accumulation_steps, splits[0]
        )
        least = self.prober.least_batch()
        if any(0 < share < least for split in splits for share in split):
            return replace(trial, failure=f"a share below {least}: BatchNorm needs {least} samples to train on")
        try:
            measured = self.prober.step(splits, budget_s=TRIAL_BUDGET_S)
        except OutOfMemoryError as error:
            return replace(trial, failure=str(error))
        self.measured[number] = measured
        return replace(
            trial,
            samples_per_s=sum(map(sum, splits)) / measured.seconds,
            error_share=measured.error_s / measured.seconds,
            peak_bytes=measured.peak_bytes,
        )

    def _even_rate(self, best: Trial) -> float | None:
        """Measure the even split of the same effective batch, in as many micro-steps more as it needs to fit."""
        if not self.replicas or self.runtime.shares_processor:
            return None
        count, effective = len(self.request.devices), self.request.effective_batch_size
        sizes = [best.batch_size]
        if effective is not None:
            sizes += [-(-effective // (best.accumulation_steps + more)) for more in (1, 2, 3)]
        region = self.solver.space.region if self.solver is not None else None
        for size in dict.fromkeys(sizes):
            shares = None if region is None else region.gpu0_bounds(size)
            even = even_split(size, count)
            if shares is None or not shares[0] <= even[0] <= shares[1]:
                continue  # by the model it does not fit, and need not be run to see
            total = best.batch_size if effective is None else effective
            splits = tuple(even_split(micro, count) for micro in micro_batch_sizes(total, size))
            known = next((t.samples_per_s for t in self.trials if t.split == splits[0] and t.batch_size == size), None)
            if known is not None:
                return known
            try:
                return total / self.prober.step(splits, budget_s=TRIAL_BUDGET_S).seconds
            except OutOfMemoryError:
                continue
        return None

    def _nothing_fits(self) -> DoesNotFitError:
        failure = self.trials[-1].failure if self.trials else "no configuration was in the space"
        return DoesNotFitError(
            f"none of {len(self.trials)} configurations could be run; the last: {failure}; "
            "expected at least one; raise effective_batch_size, or use a smaller model or a larger device"
        )

    # The plan

    def _ddp(self, best: Trial, ranks: tuple[Ceiling, ...], step_time: StepTime) -> DdpPlan:
        """Solve DDP's batch sizes from the same measurements; one rank alone takes the plan's own."""
        if len(ranks) == 1:
            rank, peak_bytes = ranks[0], self.measured[best.number].peak_bytes[0]
            assert best.samples_per_s is not None
            return DdpPlan(
                (RankSettings(0, rank.device, best.batch_size, best.accumulation_steps, rank, peak_bytes),),
                best.samples_per_s,
            )
        small = [rank.device for rank in ranks if rank.batch_size < 1]
        if small:
            return DdpPlan(
                (), 0.0, f"{', '.join(small)} can't hold a DDP rank: parameters, gradients and optimizer state"
            )
        solver = RankSolver(
            step_time.curves,
            tuple(rank.batch_size for rank in ranks),
            all_reduce_s=self._all_reduce_seconds(step_time),
            update_s=step_time.update_s,
            effective_batch_size=self.request.effective_batch_size,
            max_batch_size=self.request.largest_batch,
            adds_up=self.runtime.shares_processor,
        )
        answer = solver.answer()
        if answer is None:
            return DdpPlan((), 0.0, f"{len(ranks)} ranks need a batch of at least {len(ranks)} samples")
        settings = tuple(
            RankSettings(
                rank=index,
                device=ceiling.device,
                batch_size=samples,
                accumulation_steps=answer.accumulation_steps,
                ceiling=ceiling,
                peak_bytes=max(0, ceiling.fixed_bytes + ceiling.bytes_per_sample * samples),
            )
            for index, (ceiling, samples) in enumerate(zip(ranks, answer.batch_sizes, strict=True))
        )
        return DdpPlan(settings, answer.samples_per_s)

    def _all_reduce_seconds(self, step_time: StepTime) -> float:
        """Return the time of DDP's all-reduce: a ring over simulated links, otherwise what replicas' copies took."""
        count = len(self.request.devices)
        if count == 1:
            return 0.0
        if self.request.simulated:
            link = min(device.spec.link_bytes_per_s for device in self.request.devices if device.spec is not None)
            # A ring sends 2 (W - 1) / W of the gradients over each link (Patarasuk and Yuan 2009).
            return 2 * (count - 1) / count * bucket_bytes(self.prober.tracer.trainee) / link
        return step_time.shared_s

    def _final_ceilings(self, best: Trial) -> tuple[Ceiling, ...]:
        """Find the largest shares that fit all at once: any split within them does."""
        if not self.replicas:
            return (self.primary_alone,)
        accumulates = best.accumulation_steps > 1
        others = tuple(ceiling.batch_size for ceiling in self.replicas)
        assert self.solver is not None
        slope = self.solver.space.region.primary.bytes_per_share + self.solver.space.region.primary.bytes_per_batch
        primary = self.prober.ceiling(
            0, "primary", elsewhere=others, accumulates=accumulates, start=max(1, best.gpu0_bsz), slope=slope
        )
        if primary.batch_size >= best.gpu0_bsz:
            return (primary, *self.replicas)
        # Device 0 can't gather that much: the others' ceilings come down until the plan's own share fits beside them.
        room = self.prober.room_beside(best.gpu0_bsz, best.split[1:], others, accumulates=accumulates)
        lowered = tuple(replace(c, batch_size=n, confirmed=False) for c, n in zip(self.replicas, room, strict=True))
        return (replace(primary, batch_size=best.gpu0_bsz, confirmed=False), *lowered)

    def _assembled(
        self, best: Trial, ceilings: tuple[Ceiling, ...], ddp: DdpPlan, even_samples_per_s: float | None
    ) -> Plan:
        assert self.solver is not None and best.samples_per_s is not None
        request, curves = self.request, self.solver.step_time.curves
        peaks = self.measured[best.number].peak_bytes
        devices = tuple(
            PlanDevice(
                label=device.label,
                kind=device.kind,
                index=device.index,
                name=device.name,
                memory_bytes=device.capacity_bytes,
                capacity_bytes=request.capacities_bytes[position],
                budgeted=device.budgeted,
                share=best.split[position],
                peak_bytes=peaks[position],
                busy_s=curves[position](best.split[position]),
                ceiling=ceilings[position],
                uuid=device.uuid,
                driver=device.driver,
            )
            for position, device in enumerate(request.devices)
        )
        return Plan(
            split=best.split,
            gpu0_bsz=best.gpu0_bsz,
            batch_size=best.batch_size,
            accumulation_steps=best.accumulation_steps,
            effective_batch_size=request.effective_batch_size or best.batch_size,
            samples_per_s=best.samples_per_s,
            even_samples_per_s=even_samples_per_s,
            ceilings=tuple(ceiling.batch_size for ceiling in ceilings),
            devices=devices,
            trials=tuple(self.trials),
            ddp=ddp,
            precision=self.workload.precision or "none",
            simulated=request.simulated,
            batch_dim=self.workload.batch_dim,
            loss_reduction=self.workload.loss_reduction,
            machine=self.machine,
            workload=self.described,
            notes=tuple(self.notes),
            real_steps=self.prober.counts.steps,
            real_ooms=self.prober.counts.ooms,
        )

    # Progress

    def _report(self, message: str) -> None:
        begin, end = _STAGES[self.stage]
        done = len(self.trials) / self.request.n_trials if self.stage == "search" else 0.0
        self._say(self.stage, message, begin + (end - begin) * min(1.0, done))

    def _say(self, stage: str, message: str, fraction: float) -> None:
        best = best_trial(self.trials, effective_batch_size=self.request.effective_batch_size)
        counts = self.prober.counts
        rate = None if best is None else best.samples_per_s
        self.tell(Progress(stage, message, fraction, counts.steps, counts.ooms, rate))


_STAGES = {"ceilings": (0.0, 0.3), "times": (0.3, 0.45), "search": (0.45, 1.0)}
"""Where on the whole each stage begins and ends, roughly."""
