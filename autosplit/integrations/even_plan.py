"""Convert a plan for a tool that gives all ranks one batch size, and note the differences.

If the plan's ranks have different batch sizes, the nearest even plan is solved with the plan's ceilings and fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autosplit.errors import PlanError, shown
from autosplit.integrations.even_ranks import EvenProblem, EvenRanks
from autosplit.integrations.exported import Export
from autosplit.plan.explanation import BINDING_SHARE
from autosplit.plan.layout import Layout
from autosplit.plan.record import PlanRecord
from autosplit.plan.solve_again import problem_of
from autosplit.plan.torchrun import required_ranks
from autosplit.solve.memory import Region
from autosplit.solve.problem import Problem
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.text import counted_text, percent_text, printable, rate_text, tuple_text


@dataclass(frozen=True)
class Tool:
    """A training tool that gives every rank the same batch size.

    Attributes:
        called: Name of the tool in messages.
        loss_rule: How the tool weights micro-batches with different numbers of samples.
    """

    to: str
    called: str
    loss_rule: str


_EQUALLY = (
    "weights them equally. Scale the loss yourself, or train with autosplit.ddp and ctx.steps(loader, count=...)."
)

TRANSFORMERS = Tool(
    "transformers",
    "transformers' Trainer",
    "weights them by all ranks' labels that are not -100, if the model takes num_items_in_batch or you pass "
    f"compute_loss_func. Otherwise it {_EQUALLY}",
)

ACCELERATE = Tool("accelerate", "accelerate", _EQUALLY)

LIGHTNING = Tool("lightning", "Lightning's Trainer", _EQUALLY)


def even_plan(plan: PlanRecord, tool: Tool) -> tuple[EvenRanks, Export]:
    """Return even settings for a tool, and an export that has notes but no settings yet."""
    ranks = _ranks_of(plan)
    search = _search(plan, ranks)
    own = _own_even(ranks)
    even, exact = own or search.best(), own is not None
    if even is None:
        raise PlanError(
            f"no batch size fits all ranks, whose ceilings are {shown([*ranks.ceilings])}, "
            f"but {tool.called} has one batch size for all ranks. Train with autosplit.ddp, which gives each rank its "
            "own batch size.",
        )
    notes, lost_share = first_notes(plan), None
    even = replace(even, samples_per_s=None)
    if ranks.cost is not None and not ranks.shares_processor:
        even = replace(even, samples_per_s=search.rate(even.batch_size, even.accumulation_steps))
        lost_share, compared = _lost(plan, ranks, search, even)
        if not exact:
            notes += _nearest_notes(ranks, search, even, tool, f" Predicted: {compared}.")
        elif lost_share > BINDING_SHARE:
            notes.append(f"{tool.called} runs DDP. Predicted: {compared}.")
        notes += _faster_notes(plan, search, even, tool)
    elif not exact:
        notes += _nearest_notes(ranks, search, even, tool, "")
    notes += _training_notes(plan, even, tool)
    return even, Export(tool.to, {}, "", exact, tuple(map(printable, notes)), even, lost_share)


def _ranks_of(plan: PlanRecord) -> Layout:
    if len(plan.devices) == 1:
        return plan.main
    ranks = required_ranks(plan)
    if min(ranks.split) < 1:
        raise PlanError(
            f"the plan's ranks have {shown(ranks.split)} samples, but every rank needs at least 1. Tune again.",
        )
    return ranks


def _own_even(ranks: Layout) -> EvenRanks | None:
    """Return the plan's own settings, if every rank has the same batch size in every forward. Otherwise None."""
    even = EvenRanks(len(ranks.seats), ranks.split[0], ranks.accumulation_steps)
    is_even = len(set(ranks.split)) == 1 and even.effective_batch_size == ranks.effective_batch_size
    return even if is_even else None


def _search(plan: PlanRecord, ranks: Layout) -> EvenProblem:
    caps = ranks.ceilings
    most = sum(caps) if plan.max_batch_size is None else plan.max_batch_size
    region = Region.apart(caps, most, min(ranks.least_batch, *ranks.split))
    # Without an effective batch size, the ceilings are for steps of one forward. They leave no room for gradients that
    # stay in memory during a second forward.
    accumulates = plan.accumulates and (plan.effective_batch_sizes is not None or ranks.accumulation_steps > 1)
    # A plan made by hand has no time model. Assume that the fixed time of a forward equals a third of the smallest
    # ceiling. Then steps with up to twice the minimum number of forwards reach `WITHIN_REACH` of the best
    # throughput, so they are considered.
    curve = TimeCurve(tuple((samples, samples + min(caps) / 3) for samples in (1, 2)))
    cost = ranks.cost or Cost(StepTime.bare((curve,) * len(caps), 0.0, adds_up=False))
    ceilings = tuple(seat.ceiling for seat in ranks.seats)
    problem = Problem(cost, ceilings, region, True, plan.effective_batch_sizes, accumulates)
    return EvenProblem(problem, ranks.effective_batch_size)


def _lost(plan: PlanRecord, ranks: Layout, search: EvenProblem, even: EvenRanks) -> tuple[float, str]:
    """Compare equal batch sizes with the plan's fastest option. Return the lost fraction of samples/s, and a note."""
    several, balanced = len(plan.devices) > 1, plan.balanced
    rate = search.problem.rate(ranks.split, ranks.effective_batch_size)
    rates = [(rate, f"autosplit.ddp and {tuple_text(ranks.split)}" if several else "the plan")]
    own = problem_of(plan, balanced) if several and balanced is not None else None
    if own is not None and balanced is not None:
        name = f"plan.wrap(model), BalancedDataParallel and {tuple_text(balanced.split)}"
        rates.append((own.rate(balanced.split, balanced.effective_batch_size), name))
    rate, name = max(rates, key=lambda pair: float(f"{pair[0]:.6g}"))  # prefer DDP in a tie
    lost_share = 1 - (even.samples_per_s or 0.0) / rate
    fewer = "no fewer" if lost_share <= BINDING_SHARE else f"{percent_text(lost_share)} fewer"
    return lost_share, f"{rate_text(even.samples_per_s or 0.0)}, {fewer} than with {name}"


def first_notes(plan: PlanRecord) -> list[str]:
    """Return notes for a plan that is simulated or incomplete."""
    notes = []
    if plan.simulated:
        names = ", ".join(dict.fromkeys(device.name for device in plan.devices))
        notes.append(f"The plan is for simulated GPUs ({names}). Tune again on the real GPUs.")
    if not plan.complete:
        notes.append("The search was interrupted. This is the best result so far.")
    return notes


def _nearest_notes(ranks: Layout, search: EvenProblem, even: EvenRanks, tool: Tool, predicted: str) -> list[str]:
    wanted, sizes = ranks.effective_batch_size, search.problem.effective_batch_sizes
    cause = f"The plan's ranks have {tuple_text(ranks.split)} samples"
    if len(set(ranks.split)) == 1:
        cause = f"The last of the plan's {ranks.accumulation_steps} forwards is shorter"
    is_same = even.effective_batch_size == wanted
    kept = "as in the plan" if is_same else f"and the plan has {wanted}"
    if not is_same and sizes is not None and sizes[0] < sizes[1]:
        kept += f" (requested: {sizes[0]} to {sizes[1]})"
    nearest = (
        f"{cause}, but {tool.called} has one batch size. The nearest that fits is {_even_text(even)}, an effective "
        f"batch of {even.effective_batch_size}, {kept}.{predicted}"
    )
    exact = None if is_same else search.exact()
    if exact is None:
        return [nearest]
    rate = f" (predicted {rate_text(exact.samples_per_s or 0.0)})" if predicted else ""
    return [nearest, f"For exactly {wanted} samples, use {_even_text(exact)}{rate}."]


def _even_text(even: EvenRanks) -> str:
    ranks = f" on each of {even.num_ranks} ranks" if even.num_ranks > 1 else ""
    return f"{even.batch_size}{ranks} in {counted_text(even.accumulation_steps, 'forward')}"


def _faster_notes(plan: PlanRecord, search: EvenProblem, even: EvenRanks, tool: Tool) -> list[str]:
    kept, better = search.without_slow() or ((), even)
    gain = (better.samples_per_s or 0.0) / (even.samples_per_s or 1.0)
    if gain <= 1 + BINDING_SHARE:
        return []
    labels = [device.label for device in plan.devices]
    slow = ", ".join(label for index, label in enumerate(labels) if index not in kept)
    note = (
        f"The slowest device limits all ranks. Without {slow}, {tool.called} is {gain:.2f} times as fast with "
        f"{_even_text(better)}, an effective batch of {better.effective_batch_size} (predicted). Tune for "
        f"{', '.join(labels[index] for index in kept)} alone."
    )
    return [note]


def _training_notes(plan: PlanRecord, even: EvenRanks, tool: Tool) -> list[str]:
    notes = []
    parts = even.num_ranks * even.accumulation_steps
    depends = [check for check in plan.checks if check.depends]
    if parts > 1 and plan.loss_reduction == "sum":
        notes.append(
            f"The loss is a sum, but {tool.called} averages {parts} micro-batches. Multiply the loss by {parts}."
        )
    if parts > 1 and any(check.subject == "loss" for check in depends):
        notes.append(
            f"The loss is not a mean over samples. A step has {parts} micro-batches, and {tool.called} {tool.loss_rule}"
        )
    norms = [check.subject for check in depends if "BatchNorm" in check.subject]
    if norms and parts > 1:
        more = ", or over all ranks with sync_batchnorm=True" if tool is LIGHTNING and even.num_ranks > 1 else ""
        names = " and ".join(norms)
        notes.append(f"{names} normalizes over the {even.batch_size} samples of one rank's forward{more}.")
    if plan.precision != "none" and tool is not LIGHTNING:
        used = " (used by Trainer)" if tool is TRANSFORMERS else ""
        notes.append(
            f"With {plan.precision}, accelerate{used} copies the model's outputs to float32. The plan's memory does "
            "not include these copies. If the outputs are large, tune with a larger reserve."
        )
    if plan.workload.get("step") is not None:
        notes.append(f"{tool.called} does not call the workload's own step=. Implement its logic there.")
    if plan.devices[0].kind == "cpu" and plan.devices[0].budgeted:
        notes.append(f"{tool.called} does not enforce memory budgets, as plan.budgets() does.")
    return notes
