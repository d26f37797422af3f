"""Compare the gradient of a whole batch with the gradients of the split and the accumulated batch. Find the cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autosplit.errors import AutosplitError, WorkloadError, from_user_code, one_line
from autosplit.parallel.loss_weights import Reduce
from autosplit.parallel.side_outputs import ADVICE as SIDE_ADVICE
from autosplit.parallel.side_outputs import kept_tensors
from autosplit.probe.check_result import Check
from autosplit.probe.gradient_runs import GRADIENT, Gradients, QuietCopy, TooDearError, relative
from autosplit.probe.loss_rule import Rule, mixed, reduction_of, rule_of, unseen_rule
from autosplit.probe.module_hooks import NormSeen, freeze, watching_draws, watching_norms
from autosplit.runtime.live_tensors import kept_values
from autosplit.torch_versions import BATCH_NORMS, NORMS
from autosplit.workload.samples import batch_size_of
from autosplit.workload.tree import marked, named_leaves
from autosplit.workload.workload import Workload, modules_of, sample_text

LEAST_SAMPLES = 4
"""Smallest number of samples of a check. Fewer can't be split unevenly, and repeated samples would hide differences."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference that counts as rounding, by dtype."""

ROUNDINGS = 10
"""Factor on the measured rounding error. The error is measured by scaling the loss, as micro-batches do."""

MOST_ROUNDING = 1e-2
"""Largest measured difference that counts as rounding."""

_DEPENDS = (
    "It depends on the whole batch: the loss or a layer uses several samples at once, as contrastive losses and a "
    "router's auxiliary loss do"
)

State = dict[str, torch.Tensor]
"""Buffers that a run changed (memory banks, codebooks, expert loads): new values by path."""

_MOST_NAMES = 3


@dataclass(frozen=True)
class Begun:
    """A copy that has run the whole batch. `refusal` is the reason why the copy is not in float64."""

    copy: QuietCopy
    whole: Gradients
    norms: list[NormSeen]
    state: State
    refusal: str = ""


def begin(workload: Workload, batch: Any, closing: ExitStack, limit_s: float | None = None) -> Begun:
    """Copy a workload and run the whole batch, in float64 or, if the model can't run in float64, in float32."""
    refusal = ""
    shares = _shares_of(workload, batch_size_of(batch, workload.batch_dim))
    for dtype in (torch.float64, torch.float32):
        copy = QuietCopy(workload, batch, dtype, shares)
        try:
            with watching_norms(copy.modules, shares, copy.micro_sizes) as norms:
                whole = copy.whole(limit_s=limit_s)
        except BaseException as error:
            copy.close()
            if not isinstance(error, Exception) or isinstance(error, (AutosplitError, TooDearError, MemoryError)):
                raise
            if dtype == torch.float32:
                raise from_user_code(error, sample_text(workload)) from error
            refusal = one_line(error)
            continue
        closing.callback(copy.close)
        return Begun(copy, whole, [*norms.values()], copy.state, refusal)
    raise AssertionError("float32 either ran or raised")


def _shares_of(workload: Workload, size: int) -> tuple[int, int]:
    """Split a batch size unevenly. If the model has BatchNorm layers, each part gets at least two samples."""
    normed = any(isinstance(part, BATCH_NORMS) for module in modules_of(workload) for part in module.modules())
    first = max(2 if normed or size > LEAST_SAMPLES else 1, size // 3)
    return first, size - first


class Comparison:
    """Check one workload on one batch of at least `LEAST_SAMPLES` samples. The model must be built."""

    def __init__(self, workload: Workload, batch: Any, remark: str = "") -> None:
        self.workload, self.batch = workload, batch
        self.remarks = [remark] if remark else []
        self.tolerance = 0.0
        self.reduce: Literal["samples", "tokens", "next tokens"] | None = None
        self.differences: _Differences | None = None

    def checks(self) -> tuple[Check, ...]:
        """Compare the gradients, and find the loss's unit if they differ."""
        with ExitStack() as closing:
            begun = begin(self.workload, self.batch, closing)
            self.copy = begun.copy
            self.tolerance = TOLERANCES[self.copy.dtype]
            if begun.refusal:
                self.remarks.append(f"Checked in float32, because the model can't run in float64 ({begun.refusal}).")
            if not self._accumulates:
                why = "step= is a whole optimizer step" if self.workload.step else "loss_scope='batch' forbids it"
                self.remarks.append(f"Accumulation was not checked: {why}.")
            if not _is_finite(begun.whole):
                raise WorkloadError(
                    "The gradient of the whole sample batch is not finite. Pass a batch and parameters that can be "
                    "trained.",
                    code="gradient-not-finite",
                )
            if self.workload.step is None and self.workload.loss_reduction == "mean":
                self.reduce = reduction_of(self.copy, self.tolerance)
            try:
                return (*self._compared(begun), *self._state_checks(begun))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                table = self._table(begun.whole)
                if table:
                    raise WorkloadError(table, code="gradient-not-finite") from error
                if isinstance(error, AutosplitError):
                    raise
                raise from_user_code(error, "The workload on a part of its own sample batch") from error

    @property
    def _accumulates(self) -> bool:
        return self.workload.step is None and self.workload.loss_scope == "sample"

    def _compared(self, begun: Begun) -> tuple[Check, ...]:
        differences = self.differences = self._differences(begun.whole)
        samples = self.workload.sample_batch_size
        norms = tuple(_norm_check(seen, samples, accumulates=self._accumulates) for seen in begun.norms)
        if differences.over(self.tolerance) and (state := self._loss_state(begun.whole, differences)):
            return (*self._gradients(differences), *norms, state)
        is_random = differences.over(self.tolerance) and self._widens_tolerance(begun.whole, differences)
        gradients = self._gradients(differences, is_random=is_random)
        if is_random or not differences.over(self.tolerance):
            return (*gradients, *norms, *self._unseen(differences))
        rest, whole = differences, begun.whole
        if begun.norms:
            freeze(begun.norms)
            whole = self.copy.whole()
            rest = self._differences(whole)
        return (*gradients, *norms, *([self._cause(whole, rest)] if rest.over(self.tolerance) else []))

    def _unseen(self, differences: _Differences) -> Iterator[Check]:
        """Yield the check of a loss whose divisor is equal in the two micro-batches of this sample batch."""
        rule = unseen_rule(self.copy) if self._accumulates else None
        if rule is not None:
            figures = max(differences.split.values()), differences.accumulation
            yield Check("loss", *figures, depends=False, advice=_accumulation_advice(rule), count=rule.count)

    def _loss_state(self, whole: Gradients, differences: _Differences) -> Check | None:
        """Return the check of a loss whose own tensors and gradient change from run to run, or None."""
        before = kept_values(self.copy.workload)
        again = max(relative(self.copy.whole(), whole).values())
        after = kept_values(self.copy.workload)
        if again <= self.tolerance or (len(before) == len(after) and all(map(torch.equal, before, after))):
            return None
        figures = _finite(max(differences.split.values())), _finite(differences.accumulation)
        return Check(
            "loss",
            *figures,
            depends=True,
            advice="The loss keeps values from one call to the next, as a memory bank or a running mean does. So the "
            "same batch has another gradient in a second run, and micro-batches change the values several times. "
            "Update them once per optimizer step.",
        )

    def _widens_tolerance(self, whole: Gradients, differences: _Differences) -> bool:
        """Widen the tolerance by random draws and rounding. Return whether draws may explain the differences."""
        drawn = self._drawn(whole)
        if drawn > self.tolerance:
            self.remarks.append(
                "The forward draws random numbers, and they differ between a whole batch and its parts. The "
                f"reported difference includes this. Two different seeds alone give {100 * drawn:.2g}%."
            )
            if not differences.over(ROUNDINGS * drawn):
                return True
            self.tolerance = ROUNDINGS * drawn
        rounding = max(relative(self.copy.rescaled(), whole).values())
        if rounding <= MOST_ROUNDING:
            self.tolerance = max(self.tolerance, ROUNDINGS * rounding)
        return False

    def _drawn(self, whole: Gradients) -> float:
        """Return the difference between two seeds, which is due to random numbers only.

        A step= may draw numbers for all samples before they are split. Such numbers do not count.
        """
        with watching_draws(self.copy.trainee.models.modules) as draws:
            drawn = max(relative(self.copy.whole(seed=1), whole).values())
        return drawn if any(draws) or self.workload.step is None else 0.0

    def _differences(self, whole: Gradients) -> _Differences:
        split, split_state = relative(self.copy.split(self.reduce), whole), self.copy.state
        if not self._accumulates:
            return _Differences(split, None, (split_state,))
        parts = self.copy.parts()
        accumulation = relative(mixed(parts, self._weights), whole)[GRADIENT]
        return _Differences(split, accumulation, (split_state, self.copy.state), tuple(parts))

    def _state_checks(self, begun: Begun) -> tuple[Check, ...]:
        """Compare the buffers that forwards change. BatchNorm layers have their own checks."""
        copy, states = self.copy, () if self.differences is None else self.differences.states
        if not begun.state or not states:
            return ()
        names = _lost_names(begun.state, states[0], copy.modules, self.tolerance)
        if names:
            copy.again()
            names = [name for name in names if name in copy.state]
        if names:  # Try another seed: a codebook may replace entries at random.
            copy.whole(seed=1)
            drawn = _lost_names(begun.state, copy.state, copy.modules, self.tolerance)
            names = [name for name in names if name not in drawn]
        return (_state_check(names, begun.state, states),) if names else ()

    @property
    def _weights(self) -> tuple[float, float]:
        if self.workload.loss_reduction == "sum":
            return 1.0, 1.0
        first, second = self.copy.micro_sizes
        return first / (first + second), second / (first + second)

    def _gradients(self, differences: _Differences, *, is_random: bool = False) -> tuple[Check, ...]:
        remark = " ".join(self.remarks)
        checks = []
        for subject, split in differences.split.items():
            accumulation = differences.accumulation
            depends = not is_random and max(split, accumulation or 0.0) > self.tolerance
            figures = _finite(split), _finite(accumulation)
            checks.append(Check(subject, *figures, depends, remark=remark, reduce=self.reduce))
            remark = ""  # Report the remark only once.
        return tuple(checks)

    # The verdict, apart from BatchNorm

    def _cause(self, whole: Gradients, rest: _Differences) -> Check:
        split, accumulation = max(rest.split.values()), rest.accumulation
        figures = _finite(split), _finite(accumulation)
        # If some weights of the parts' gradients yield the whole gradient, no sample affects another sample.
        copy, rule = self.copy, None
        if rest.parts:
            rule = rule_of(copy, whole, rest.parts, self.tolerance)
        subject, advice = "loss", ""
        if rule is None and (advice := self._table(whole)):
            subject = "batch"
        count = rule.count if rule is not None and (accumulation or 0.0) > self.tolerance else None
        advice = advice or self._loss_advice(whole, rest, rule)
        return Check(subject, *figures, depends=True, advice=advice, count=count)

    def _table(self, whole: Gradients) -> str:
        """Return advice on a tensor that was cut although its rows are not samples, or "" if there is none."""
        leaves = [*named_leaves(self.batch, "sample_batch")]
        tensors = [position for position, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for position in tensors if len(tensors) > 1 + (self.workload.loss_fn is not None) else ():
            place, leaf = leaves[position]
            if self._mends(position, whole):
                return (
                    f"{place} of shape {tuple(leaf.shape)} holds no samples, but autosplit splits it, because it "
                    "has as many rows as the batch. Pass autosplit.Whole(tensor), in training too."
                )
        return ""

    def _mends(self, position: int, whole: Gradients) -> bool:
        other = Comparison(self.workload, marked(self.batch, {position}))
        try:
            with ExitStack() as closing:
                other.copy = begin(self.workload, other.batch, closing).copy
                tolerance = max(self.tolerance, TOLERANCES[other.copy.dtype])
                found = other._differences(whole)
                if found.over(tolerance):
                    return False
                # If each part has the whole gradient, the tensor has all samples that the loss uses.
                parts = found.parts or (other.copy.parts() if self.workload.step is None else ())
                return not parts or any(max(relative(part, whole).values()) > tolerance for part in parts)
        except Exception:  # noqa: BLE001  # the tensor holds samples, so the uncut tensor does not match
            return False

    def _loss_advice(self, whole: Gradients, rest: _Differences, rule: Rule | None) -> str:
        if self.workload.step is not None:
            return (
                f"{_DEPENDS}. If a model computes that loss, let it return its outputs, and compute the loss in step=, "
                "where the outputs are gathered."
            )
        if not all(map(_is_finite, rest.parts)):
            return (
                "The loss of one micro-batch is not finite, for example because all its labels are ignored. Pass "
                "count= to plan.steps: a function that counts the labels in use. autosplit then skips a "
                "micro-batch without labels."
            )
        split_is_off = rest.split[GRADIENT] > self.tolerance
        if split_is_off and (kept := self._kept_elsewhere()):
            return kept
        accumulation_is_off = rest.accumulation is not None and rest.accumulation > self.tolerance
        if rule is not None and rule.reduction is not None:
            reduce: Reduce = "sum" if rule.reduction == "sum" else "samples"
            if not split_is_off or self._split_error(whole, reduce) <= self.tolerance:
                scaled = ", and call step.backward(loss * step.num_ranks / step.weight) in the loop"
                looping = scaled if reduce == "sum" else ""
                return (
                    f"It is a {rule.reduction} over the samples, but loss_reduction={self.workload.loss_reduction!r} "
                    f"was given. Pass loss_reduction={rule.reduction!r} to tune() or to Workload(){looping}."
                )
        split, accumulated = split_is_off and self._split_advice(whole, rule), _accumulation_advice(rule)
        if rule is None and (moved := [*rest.states[-1]]):
            accumulated += (
                f" Or the model keeps state from one forward to the next ({', '.join(moved[:3])}), which a step of "
                "several forwards changes several times. Then update it once per optimizer step."
            )
        verdict = f"{_DEPENDS}. " if rule is None else ""
        if split and accumulation_is_off:
            return f"{verdict}Split: {split} Accumulated: {accumulated}"
        return verdict + (split or accumulated)

    def _kept_elsewhere(self) -> str:
        if self.workload.compute_loss is None:
            return ""
        kept = [name for module in self.copy.trainee.models.modules for name, _ in kept_tensors(module)]
        hooked = [path for path, module in self.copy.modules if getattr(module, "_forward_hooks", None)]
        if not kept and not hooked:
            return ""
        what = f"the attribute {kept[0]} keeps" if kept else f"a forward hook on {hooked[0] or 'the model'} keeps"
        return f"The loss may use a tensor that {what}. {SIDE_ADVICE}"

    def _split_advice(self, whole: Gradients, rule: Rule | None) -> str:
        outside = "Let the model return its outputs, and compute their common loss with loss_fn= or compute_loss=."
        if rule is None:
            return f"If the model computes that loss, it sees only a part of the batch on each device. {outside}"
        if self._split_error(whole, "sum") <= self.tolerance:
            return (
                'The model\'s loss is not a mean over samples. After model = plan.wrap(model) set model.reduce = "sum".'
            )
        return f"The model's loss is a mean over {rule.over}, not over samples. {outside}"

    def _split_error(self, whole: Gradients, reduce: Reduce) -> float:
        return relative(self.copy.split(reduce), whole)[GRADIENT]


@dataclass(frozen=True)
class _Differences:
    split: dict[str, float]
    accumulation: float | None
    states: tuple[State, ...] = ()
    parts: tuple[Gradients, ...] = ()

    def over(self, tolerance: float) -> bool:
        return max(*self.split.values(), self.accumulation or 0.0) > tolerance


def _accumulation_advice(rule: Rule | None) -> str:
    if rule is None:
        return (
            'Weights of micro-batches can\'t replace that. Pass loss_scope="batch" to the Workload, which turns '
            "accumulation off. With DDP, gather the tensors that the loss compares with ctx.all_gather(tensor)."
        )
    if rule.count is None:
        return (
            "The loss is a mean, but not over samples. Pass count= to plan.steps: a function that returns the "
            "divisor of the mean, such as the sum of the weights."
        )
    return (
        f"It is a mean over {rule.over}, not over samples. Accumulate with plan.steps(loader, count=lambda batch: "
        f"{rule.count}) (under DDP ctx.steps, with the same count=)."
    )


def _norm_check(seen: NormSeen, samples: int, *, accumulates: bool) -> Check:
    return Check(
        _called(seen.path, seen.norm),
        _finite(seen.split_error),
        _finite(seen.accumulation_error) if accumulates else None,
        depends=True,
        advice="It computes its statistics from the samples of each device. Use larger splits, freeze it with "
        ".eval(), or use GroupNorm. With DDP on GPUs, use ctx.wrap(model, sync_batchnorm=True), which uses "
        "the samples of all ranks.",
        remark=f"These figures are for the workload's {samples} samples, cut into two parts. Larger parts differ less.",
    )


def _called(path: str, module: nn.Module | None) -> str:
    kind = "the model" if module is None else type(module).__name__
    return f"{kind} at {path}" if path else kind


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _is_finite(gradients: Gradients) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def _lost_names(whole: State, split: State, modules: Sequence[tuple[str, nn.Module]], tolerance: float) -> list[str]:
    """Return the names of buffers that differ after a forward of the whole batch and one of the split batch.

    Buffers of BatchNorm and InstanceNorm are left out.
    """
    norms = tuple(f"{path}." for path, module in modules if isinstance(module, NORMS))
    names = [name for name in whole if not name.startswith(norms)]
    return [name for name in names if _difference(whole[name], split.get(name)) > tolerance]


def _state_check(names: Sequence[str], whole: State, cut: Sequence[State]) -> Check:
    """Return the check result for the buffers that `_lost_names` returned.

    Args:
        whole: The buffers after the whole batch.
        cut: The buffers after the batch is split over devices and, if that is run, after it is accumulated.
    """
    errors = [max(_difference(whole[name], state.get(name)) for name in names) for state in cut]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return Check(
        f"state in {', '.join(names[:_MOST_NAMES])}{more}",
        errors[0],
        errors[1] if len(errors) > 1 else None,
        depends=True,
        advice="The forward updates these buffers. With several devices, only the update from device 0 (with DDP: "
        "from rank 0) may be kept. Return the values that the update needs from the forward, and update the "
        "buffers after optimizer.step().",
    )


def _difference(whole: torch.Tensor, cut: torch.Tensor | None) -> float:
    """Return ``|cut - whole| / |whole|``, 1 if the buffer was not changed, 0 if the shapes can't be compared."""
    if cut is None:
        return 1.0
    if cut.shape != whole.shape or whole.is_complex():
        return 0.0
    size = float(whole.double().norm())
    error = float((cut.double() - whole.double()).norm())
    found = error / size if size else error
    return found if math.isfinite(found) else 0.0
