"""Find a plan for a tool that gives all ranks one batch size, and list what this tool can't express.

If the plan's ranks have different batch sizes, the nearest even plan is solved with the plan's ceilings and fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autosplit.errors import PlanError, shown
from autosplit.plan.explain import problem_of, problem_with
from autosplit.plan.explanation import BINDING_SHARE
from autosplit.plan.exported import Export
from autosplit.plan.record import PlanRecord
from autosplit.plan.torchrun import refuse_without_ranks
from autosplit.solve.even_ranks import EvenProblem, EvenRanks
from autosplit.solve.memory import Ceiling
from autosplit.solve.problem import MOST_WORK
from autosplit.text import counted_text, printable, rate_text, tuple_text


@dataclass(frozen=True)
class Tool:
    """A training tool that gives every rank the same batch size.

    Attributes:
        to: Name of the export format.
        called: Name of the tool in messages.
        loss_rule: How the tool weights micro-batches with different counts.
    """

    to: str
    called: str
    loss_rule: str


_SCALE = "scale the loss yourself, or train with autosplit.ddp and ctx.steps(loader, count=...)"

TRANSFORMERS = Tool(
    "transformers",
    "transformers' Trainer",
    "it weighs them by labels that are not -100, over all ranks, if the model takes num_items_in_batch or a "
    f"compute_loss_func is given, and otherwise alike: then {_SCALE}",
)

ACCELERATE = Tool("accelerate", "accelerate", f"it weighs them alike: {_SCALE}")

LIGHTNING = Tool("lightning", "Lightning's Trainer", f"it weighs them alike: {_SCALE}")


@dataclass(frozen=True)
class _Ranks:
    """The DDP ranks of a plan. A plan for a single device is treated as one rank."""

    sizes: tuple[int, ...]
    ceilings: tuple[Ceiling, ...]
    accumulation_steps: int
    effective_batch_size: int

    @property
    def even(self) -> EvenRanks | None:
        """The plan's own settings, if every rank has the same batch size in every forward; otherwise None."""
        if len(set(self.sizes)) > 1:
            return None
        even = EvenRanks(len(self.sizes), self.sizes[0], self.accumulation_steps)
        return even if even.effective_batch_size == self.effective_batch_size else None


def even_plan(plan: PlanRecord, tool: Tool) -> tuple[EvenRanks, Export]:
    """Return even settings for a tool, and an export with notes but without the tool's settings."""
    ranks = _ranks_of(plan)
    problem = _even_problem(plan, ranks)
    even, exact = ranks.even or problem.best(), ranks.even is not None
    if even is None:
        raise PlanError(
            f"no batch of one size fits all ranks, whose ceilings are {shown(problem.ceilings)}; expected one that "
            f"{tool.called} can be given; train with autosplit.ddp, which gives each rank its own",
            code="no-even-plan",
        )
    rate = None if plan.shares_processor else problem.rate(even.batch_size, even.accumulation_steps)
    even = replace(even, samples_per_s=rate)
    lost_share, best = _lost(plan, ranks, even)
    notes = [*first_notes(plan)]
    if not exact:
        notes += _nearest_notes(ranks, problem, even, tool, _lost_text(lost_share, best))
    elif lost_share is not None and lost_share > BINDING_SHARE:
        notes.append(f"{tool.called} runs DDP: {_predicted(even, known=even)}, {_lost_text(lost_share, best)}")
    notes += [*_fewer_notes(plan, problem, even, tool), *_training_notes(plan, even, tool)]
    return even, Export(tool.to, {}, "", exact, tuple(map(printable, notes)), even, lost_share)


def _ranks_of(plan: PlanRecord) -> _Ranks:
    """Return the plan's DDP ranks. A single device is one rank with the plan's own numbers."""
    if len(plan.devices) == 1:
        ceiling = replace(plan.devices[0].ceiling, batch_size=plan.ceilings[0])
        return _Ranks(plan.split, (ceiling,), plan.accumulation_steps, plan.effective_batch_size)
    refuse_without_ranks(plan)
    sizes = tuple(rank.batch_size for rank in plan.ddp.ranks)
    if min(sizes) < 1:
        raise PlanError(
            f"the plan's ranks have {shown(sizes)} samples; expected 1 or more for each; tune again",
            code="plan-rank-sizes",
        )
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
        # Without an effective batch size, the ceilings are for steps of one forward. They do not count gradients that
        # wait for a second forward.
        plan.accumulates and (plan.effective_batch_sizes is not None or ranks.accumulation_steps > 1),
        plan.fit,
    )


def _lost(plan: PlanRecord, ranks: _Ranks, even: EvenRanks) -> tuple[float | None, str]:
    """Compare even ranks with the fastest option of the plan, both predicted.

    Returns:
        The fraction of the samples/s that is lost, or None if it is unknown, and the name of the fastest option.
    """
    too_long = ranks.effective_batch_size > MOST_WORK * sum(ranks.sizes)
    if plan.fit is None or even.samples_per_s is None or plan.shares_processor or too_long:
        return None, ""
    several, sizes = len(plan.devices) > 1, tuple_text(ranks.sizes)
    rate = problem_with(plan, plan.fit, ranks.ceilings, None).rate(ranks.sizes, ranks.effective_batch_size)
    rates = [(rate, f"autosplit.ddp with {sizes}" if several else "the plan")]
    own = problem_of(plan) if several and plan.region is not None else None
    if own is not None:
        name = f"plan.wrap(model), BalancedDataParallel with {tuple_text(plan.split)}"
        rates.append((own.rate(plan.split, plan.effective_batch_size), name))
    rate, name = max(rates, key=lambda pair: float(f"{pair[0]:.6g}"))  # prefer DDP in a tie
    return 1 - even.samples_per_s / rate, name


def first_notes(plan: PlanRecord) -> list[str]:
    """Return notes for a plan that is simulated or incomplete."""
    notes = []
    if plan.simulated:
        names = ", ".join(dict.fromkeys(device.name for device in plan.devices))
        notes.append(f"simulated: predicted for cards that are not here ({names}); tune again where they are")
    if not plan.complete:
        notes.append("the search was interrupted: this is the best so far")
    return notes


def _nearest_notes(ranks: _Ranks, problem: EvenProblem, even: EvenRanks, tool: Tool, lost: str) -> list[str]:
    """Return notes on why a tool can't use the plan's own numbers, and on the nearest settings."""
    wanted, count = ranks.effective_batch_size, len(ranks.sizes)
    if len(set(ranks.sizes)) > 1:
        cause = f"the plan's ranks take {tuple_text(ranks.sizes)} samples, and {tool.called} has one number for all"
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
        f"{cause}; the nearest that fits is {each} in {counted_text(even.accumulation_steps, 'forward')}, an "
        f"effective batch of {even.effective_batch_size}{kept}"
    )
    nearest = "; ".join(filter(None, (said, ", ".join(filter(None, (_predicted(even, known=even), lost))))))
    exact = None if same else problem.exact()
    if exact is None:
        return [nearest]
    more = f"{wanted} exactly takes {exact.batch_size} on each in {counted_text(exact.accumulation_steps, 'forward')}"
    return [nearest, "; ".join(filter(None, (more, _predicted(exact, known=even))))]


def _predicted(even: EvenRanks, *, known: EvenRanks) -> str:
    """Return a text with the predicted rate, or an empty text if the chosen settings have no predicted rate."""
    rate = even.samples_per_s
    return "" if rate is None or known.samples_per_s is None else f"predicted {rate_text(rate)}"


def _lost_text(lost_share: float | None, best: str) -> str:
    if lost_share is None:
        return ""
    if lost_share <= BINDING_SHARE:
        return f"no fewer than by {best}"
    percent = f"{100 * lost_share:.0f} %" if lost_share >= 0.1 else f"{100 * lost_share:.1f} %"
    return f"{percent} fewer than by {best}"


def _fewer_notes(plan: PlanRecord, problem: EvenProblem, even: EvenRanks, tool: Tool) -> list[str]:
    """Return a note on slow devices, without which the tool would be faster."""
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
        f"{better.batch_size} on each of {len(kept)} in {counted_text(better.accumulation_steps, 'forward')} for a "
        f"step of {better.effective_batch_size}, predicted {rate_text(better.samples_per_s)}; tune for "
        f"{', '.join(labels[index] for index in kept)} alone"
    )
    return [said]


def _training_notes(plan: PlanRecord, even: EvenRanks, tool: Tool) -> list[str]:
    """Return notes on differences between the tool's training and the workload."""
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
        more = ", or all ranks' with sync_batchnorm=True" if tool is LIGHTNING and even.num_ranks > 1 else ""
        others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        notes.append(f"{norms[0]}{others} sees the {even.batch_size} samples of one rank's forward{more}")
    if plan.precision != "none" and tool is not LIGHTNING:
        who = ", by which it trains," if tool is TRANSFORMERS else ""
        notes.append(
            f"with {plan.precision} {ACCELERATE.called}{who} copies the model's outputs to float32, and the "
            "plan's memory does not count that: tune with a reserve if they are large"
        )
    if plan.workload.get("step") is not None:
        notes.append(f"the workload's own step= is not known to {tool.called}: write it there")
    if plan.devices[0].kind == "cpu" and plan.devices[0].budgeted:
        notes.append(f"memory budgets are autosplit's own (plan.budgets()): {tool.called} enforces none")
    return notes
