"""Compare the gradient of a whole batch with the gradients of the split and the accumulated batch. Give the verdict.

A loss is a mean over samples, a mean over counted labels, or a sum. Otherwise it depends on the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.errors import AutosplitError, NotFiniteError, WorkloadError, from_user_code, one_line
from autosplit.probe.check_result import Check
from autosplit.probe.gradient_runs import GRADIENT, Gradients, QuietCopy, TooDearError, relative
from autosplit.probe.loss_rule import Rule, by_samples, mixed, reduction_of, rule_for_other_batches, rule_of
from autosplit.runtime.live_tensors import saved_values
from autosplit.torch_versions import BATCH_NORMS, NORMS
from autosplit.workload.batch_layout import read_batch
from autosplit.workload.workload import Workload, modules_of, sample_text

LEAST_SAMPLES = 4
"""Smallest number of samples of a check. Fewer can't be split unevenly, and repeated samples would hide differences."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference that counts as rounding, by dtype."""

NOISES = 10
"""Factor on the difference between two runs of the whole batch, with other random numbers and other rounding."""

_MOST_NAMES = 3

State = dict[str, torch.Tensor]
"""The buffers after a run, by path: memory banks, codebooks, expert loads."""

_DEPENDS = (
    "It depends on the whole batch: the loss or a layer uses several samples at once, as contrastive losses and a "
    "router's auxiliary loss do, or keeps state from one forward to the next."
)
_OUTSIDE = "Let the model return its outputs, and compute their common loss with loss_fn= or compute_loss=."
_KEEPS = (
    "The loss keeps values from one call to the next, as a memory bank or a running mean does. So the same batch has "
    "another gradient in a second run, and micro-batches change the values several times. Update them once per "
    "optimizer step."
)
_NORM_ADVICE = (
    "It computes its statistics from the samples of each device. Use larger splits, freeze it with .eval(), or use "
    "GroupNorm. With DDP on GPUs, use ctx.wrap(model, sync_batchnorm=True), which uses the samples of all ranks."
)
_STATE_ADVICE = (
    "The forward updates these buffers. With several devices, only the update from device 0 (with DDP: from rank 0) "
    "may be kept. Return the values that the update needs from the forward, and update the buffers after "
    "optimizer.step()."
)


@dataclass(frozen=True)
class Begun:
    """A copy that has run the whole batch. `refusal` is the reason why the copy is not in float64."""

    copy: QuietCopy
    whole: Gradients
    state: State
    refusal: str = ""


def begin(workload: Workload, batch: Any, closing: ExitStack, limit_s: float | None = None) -> Begun:
    """Copy a workload and run the whole batch, in float64 or, if the model can't run in float64, in float32."""
    refusal = ""
    shares = _shares_of(workload, read_batch(batch, workload.batch_dim).size)
    for dtype in (torch.float64, torch.float32):
        copy = QuietCopy(workload, batch, dtype, shares)
        try:
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
        return Begun(copy, whole, copy.state, refusal)
    raise AssertionError("float32 either ran or raised")


def _shares_of(workload: Workload, size: int) -> tuple[int, int]:
    """Split a batch size unevenly. If the model has BatchNorm layers, each part gets at least two samples."""
    normed = any(isinstance(part, BATCH_NORMS) for module in modules_of(workload) for part in module.modules())
    first = max(2 if normed or size > LEAST_SAMPLES else 1, size // 3)
    return first, size - first


@dataclass(frozen=True)
class _Differences:
    split: dict[str, float]
    accumulation: float | None
    states: tuple[State, ...]
    parts: tuple[Gradients, ...] = ()

    def over(self, tolerance: float) -> bool:
        return max(*self.split.values(), self.accumulation or 0.0) > tolerance

    @property
    def figures(self) -> tuple[float | None, float | None]:
        return _finite(max(self.split.values())), _finite(self.accumulation)


class Comparison:
    """Check one workload on one batch of at least `LEAST_SAMPLES` samples. The model must be built."""

    def __init__(self, workload: Workload, batch: Any, remark: str = "") -> None:
        self.workload, self.batch = workload, batch
        self.remarks = [remark] if remark else []
        self.accumulates = workload.step is None and workload.loss_scope == "sample"

    def checks(self) -> tuple[Check, ...]:
        """Compare the gradients, and find the loss's unit if they differ."""
        with ExitStack() as closing:
            begun = begin(self.workload, self.batch, closing)
            self.copy, self.tolerance = begun.copy, TOLERANCES[begun.copy.dtype]
            if begun.refusal:
                self.remarks.append(f"Checked in float32, because the model can't run in float64 ({begun.refusal}).")
            if not self.accumulates:
                why = "step= is a whole optimizer step" if self.workload.step else "loss_scope='batch' forbids it"
                self.remarks.append(f"Accumulation was not checked: {why}.")
            if not all(bool(gradient.isfinite().all()) for gradient in begun.whole.values()):
                raise NotFiniteError(
                    "The gradient of the whole sample batch is not finite. Pass a batch and parameters that can be "
                    "trained.",
                )
            is_mean = self.workload.step is None and self.workload.loss_reduction == "mean"
            self.reduce = reduction_of(self.copy) if is_mean else None
            try:
                differences = self._differences(begun.whole)
                return (*self._compared(begun.whole, differences), *self._state_checks(begun, differences))
            except (AutosplitError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise from_user_code(error, "The workload on a part of its own sample batch") from error

    def _differences(self, whole: Gradients) -> _Differences:
        try:
            split = relative(self.copy.split(self.reduce), whole)
        except WorkloadError:
            if self.reduce is None:
                raise
            self.reduce = None  # the labels are not an argument of the model
            split = relative(self.copy.split(), whole)
        state = self.copy.state
        if not self.accumulates:
            return _Differences(split, None, (state,))
        parts = tuple(self.copy.parts())
        weights = (1.0, 1.0) if self.workload.loss_reduction == "sum" else by_samples(self.copy)
        return _Differences(split, relative(mixed(parts, weights), whole)[GRADIENT], (state, self.copy.state), parts)

    def _compared(self, whole: Gradients, found: _Differences) -> tuple[Check, ...]:
        norms = _norms_in(self.copy)
        checks = tuple(
            Check(f"{kind} at {paths}" if paths else kind, *found.figures, depends=True, advice=_NORM_ADVICE)
            for kind, paths in _named(norms)
        )
        if not found.over(self.tolerance):
            return (*self._gradients(found, depends=False), *checks, *self._unseen(found))
        if self._keeps_values(whole):
            return (
                *self._gradients(found, depends=True),
                *checks,
                Check("loss", *found.figures, depends=True, advice=_KEEPS),
            )
        gradients = self._gradients(found, depends=found.over(self.tolerance))
        if norms:
            _freeze(norms)
            whole = self.copy.whole()
            found = self._differences(whole)
        if not found.over(self.tolerance):
            return (*gradients, *checks)
        rule = rule_of(self.copy, whole, found.parts, self.tolerance) if found.parts else None
        count = rule.count if rule is not None and (found.accumulation or 0.0) > self.tolerance else None
        advice = self._advice(rule, found)
        return (*gradients, *checks, Check("loss", *found.figures, depends=True, advice=advice, count=count))

    def _keeps_values(self, whole: Gradients) -> bool:
        """Run the whole batch again. Return whether the loss's own tensors changed, and the gradient with them.

        If nothing is kept, the difference is due to random numbers and rounding, so widen the tolerance. A `step=` may
        draw numbers for all samples before they are split. Such numbers do not differ in the split batch.
        """
        before = saved_values(self.copy.workload)
        noise = max(relative(self.copy.again(), whole).values())
        after = saved_values(self.copy.workload)
        if noise > self.tolerance and not (len(before) == len(after) and all(map(torch.equal, before, after))):
            return True
        if noise > self.tolerance and self.workload.step is None:
            self.remarks.append(
                f"The forward draws random numbers or rounds. Two runs of the batch differ by {100 * noise:.2g}%. "
                "The reported difference includes this."
            )
        if self.workload.step is None:
            self.tolerance = max(self.tolerance, NOISES * noise)
        return False

    def _gradients(self, found: _Differences, *, depends: bool) -> tuple[Check, ...]:
        remark, accumulation = " ".join(self.remarks), found.accumulation
        checks = []
        for subject, split in found.split.items():
            figures = _finite(split), _finite(accumulation)
            is_off = depends and max(split, accumulation or 0.0) > self.tolerance
            checks.append(Check(subject, *figures, is_off, remark=remark, reduce=self.reduce))
            remark = ""  # Report the remark only once.
        return tuple(checks)

    def _unseen(self, found: _Differences) -> Iterator[Check]:
        """Yield the check of a loss whose divisor is equal in the two micro-batches of this sample batch."""
        rule = rule_for_other_batches(self.copy) if self.accumulates else None
        if rule is not None:
            yield Check("loss", *found.figures, depends=False, advice=_count_advice(rule), count=rule.count)

    def _advice(self, rule: Rule | None, found: _Differences) -> str:
        if self.workload.step is not None:
            return (
                f"{_DEPENDS} If a model computes that loss, let it return its outputs, and compute the loss in step=, "
                "where the outputs are gathered."
            )
        if rule is not None and rule.reduction is not None:
            scaled = ", and call step.backward(loss * step.num_ranks / step.weight) in the loop"
            return (
                f"It is a {rule.reduction} over the samples, but loss_reduction={self.workload.loss_reduction!r} was "
                f"given. Pass loss_reduction={rule.reduction!r} to tune() or to Workload()"
                f"{scaled if rule.reduction == 'sum' else ''}."
            )
        texts = [_DEPENDS] if rule is None else []
        if found.split[GRADIENT] > self.tolerance:
            texts.append(f"Each device computes this loss for its own samples. {_OUTSIDE}")
        if (found.accumulation or 0.0) > self.tolerance:
            texts.append(_BATCH_ADVICE if rule is None else _count_advice(rule))
        return " ".join(texts)

    def _state_checks(self, begun: Begun, found: _Differences) -> Iterator[Check]:
        """Compare the buffers that forwards change. BatchNorm layers have their own checks."""
        whole, states = begun.state, found.states
        norms = tuple(f"{path}." for path, module in self.copy.modules if isinstance(module, NORMS))
        names = [name for name in whole if not name.startswith(norms) and _lost(whole, states[0], name, self.tolerance)]
        if names:  # Try another seed: a codebook may replace entries at random.
            self.copy.again()
            names = [name for name in names if not _lost(whole, self.copy.state, name, self.tolerance)]
        if names:
            errors = [max(_difference(whole[name], state[name]) for name in names) for state in states]
            yield Check(
                f"state in {_listed(names)}",
                errors[0],
                errors[1] if len(errors) > 1 else None,
                depends=True,
                advice=_STATE_ADVICE,
            )


_BATCH_ADVICE = (
    'Weights of micro-batches can\'t replace that. Pass loss_scope="batch" to the Workload, which turns accumulation '
    "off. With DDP, gather the tensors that the loss compares with ctx.all_gather(tensor). But if the loss is a mean "
    "over something else than samples, pass count= to plan.steps: a function that returns the divisor of the mean."
)


def _count_advice(rule: Rule) -> str:
    return (
        f"It is a mean over {rule.over}, not over samples. Accumulate with plan.steps(loader, count=lambda batch: "
        f"{rule.count}) (under DDP ctx.steps, with the same count=)."
    )


def _norms_in(copy: QuietCopy) -> list[tuple[str, Any]]:
    """Return the BatchNorm layers that normalise by the statistics of the batch, with their paths."""
    return [
        (path, module)
        for path, module in copy.modules
        if isinstance(module, BATCH_NORMS)
        and (module.training or (module.running_mean is None and module.running_var is None))
    ]


def _named(norms: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for kind in dict.fromkeys(type(module).__name__ for _, module in norms):
        yield kind, _listed([path for path, module in norms if type(module).__name__ == kind])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _freeze(norms: list[tuple[str, Any]]) -> None:
    """Switch BatchNorm layers of a copy to running statistics. Missing statistics become zeros and ones."""
    for _, norm in norms:
        norm.training = False
        if norm.running_mean is None or norm.running_var is None:
            like = next(iter(norm.parameters()), torch.empty(0))
            norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype)
            norm.running_var = torch.ones(norm.num_features, dtype=like.dtype)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _lost(whole: State, split: State, name: str, tolerance: float) -> bool:
    return _difference(whole[name], split[name]) > tolerance


def _difference(whole: torch.Tensor, split: torch.Tensor) -> float:
    """Return ``|split - whole| / |whole|``, or 0 if the buffers can't be compared."""
    if split.shape != whole.shape or whole.is_complex():
        return 0.0
    size = float(whole.double().norm())
    error = float((split.double() - whole.double()).norm())
    found = error / size if size else error
    return found if math.isfinite(found) else 0.0
