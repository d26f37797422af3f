"""Estimate the gradient noise scale from the micro-batches of optimizer steps.

A mean gradient over n samples has the expected squared norm |G|^2 + S/n. G is the gradient of the whole distribution,
and S the trace of a sample's covariance. A step has micro-batches (n_i, g_i) and the gradient (N, g):
    sum n_i |g_i - g|^2 = sum n_i |g_i|^2 - N |g|^2    has the expectation (k - 1) S, for any sizes n_i
    |g|^2 - S / N                                      has the expectation |G|^2

S/|G|^2 is the "simple" noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import InputError
from autosplit.parallel.step_listener import StepListener, Sums
from autosplit.tools.oom_cuts import AddedGradients

WINDOW = 1000
"""Largest number of optimizer steps in the estimate.

The noise scale grows while the loss falls, so only late steps count. The estimate uses the latest half of all steps, up
to this number. Numerator and denominator are averaged separately, so the large gradients of the first steps would
dominate an average over the whole run. For a classifier, the estimate is 365 after 20 steps and about 1,700 from 80
steps on.
"""

Z_95 = 1.96
"""Number of standard errors on each side of the 95% interval of a normal distribution."""


class NoiseScale:
    """The gradient noise scale of a training run, estimated from the latest half of its optimizer steps.

        noise_scale = autosplit.NoiseScale()
        for epoch in range(10):
            for step in plan.steps(loader, noise_scale=noise_scale):
                ...
        print(noise_scale, plan.goodput(noise_scale))

    Its unit is the unit that the mean loss averages over: samples, or the unit of the steps' argument `count`.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._steps)

    def begin_step(self, over_ranks: Callable[[Sums], Sums] | None = None) -> StepNorms:
        """Return a recorder for the gradient norms of the next optimizer step."""
        return StepNorms(self, over_ranks)

    def add(self, sums: Sums, count: float) -> None:
        """Add a step with its `count`. Steps with one micro-batch or a gradient that is not finite are left out.

        Raises:
            InputError: The first step has only one micro-batch.
        """
        weighted, number, squared = sums
        scatter, freedom = weighted - count * squared, number - 1
        if freedom < 1 and not self._steps:
            raise InputError(
                f"noise_scale is given, but the optimizer step has {number:g} micro-batch over all ranks. The "
                "estimate compares gradients of at least 2 micro-batches. Tune with an effective_batch_size that "
                "needs accumulation_steps >= 2.",
            )
        if freedom >= 1 and math.isfinite(scatter) and math.isfinite(squared):
            self._steps.append((scatter, freedom, count, count * squared))
            self._num_added += 1
            if len(self._steps) > (self._num_added + 1) // 2:
                self._steps.popleft()

    @property
    def value(self) -> float:
        """The batch size at which noise and gradient are equal. Infinite if the noise hides the gradient.

        Raises:
            InputError: No step was added.
        """
        return _inverse(_gradient_over_noise(self._totals(), len(self)))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the value, by a jackknife over the steps on 1/value. The upper end may be infinite.

        Raises:
            InputError: No step was added.
        """
        totals, number = self._totals(), len(self)
        if number < 2:
            return 0.0, math.inf
        without = []
        for scatter, freedom, samples, squared in self._steps:
            others = totals[0] - scatter, totals[1] - freedom, totals[2] - samples, totals[3] - squared
            without.append(_gradient_over_noise(others, number - 1))
        mean = sum(without) / number
        error = math.sqrt((number - 1) / number * sum((one - mean) ** 2 for one in without))
        middle = _gradient_over_noise(totals, number)
        return _inverse(middle + Z_95 * error), _inverse(middle - Z_95 * error)

    def __str__(self) -> str:
        low, high = self.interval
        return f"noise scale {self.value:.3g}, 95% interval {low:.3g} to {high:.3g} ({len(self)} optimizer steps)"

    def _totals(self) -> tuple[float, float, float, float]:
        if not self._steps:
            raise InputError(
                "The noise scale has seen no optimizer step yet. Read it after all micro-batches of at least one step.",
            )
        scatter, freedom, samples, squared = map(sum, zip(*self._steps, strict=True))
        return scatter, freedom, samples, squared


def _gradient_over_noise(totals: tuple[float, float, float, float], number: int) -> float:
    """Return |G|^2 / S from the sums over steps. Each step's |g|^2 is weighted by its samples."""
    scatter, freedom, samples, squared = totals
    noise = scatter / freedom
    gradient = (squared - number * noise) / samples
    return gradient / noise if noise > 0 else math.inf


def _inverse(gradient_over_noise: float) -> float:
    return 1 / gradient_over_noise if gradient_over_noise > 0 else math.inf


class StepNorms(StepListener):
    """Record the gradient norms of one optimizer step: one norm of each parameter's gradient per micro-batch.

    Norms are computed from the gradients that autograd passes to a parameter, before accumulation and all-reduce. No
    gradient is stored. The cost is one number per micro-batch, and one wait for the device per step.

    Args:
        over_ranks: Function that sums values over the ranks, or None for a single process.
    """

    needs_gradients = True

    def __init__(self, noise_scale: NoiseScale, over_ranks: Callable[[Sums], Sums] | None = None) -> None:
        self.noise_scale, self._over_ranks = noise_scale, over_ranks
        self._found: list[tuple[float, list[Tensor]]] = []
        self._leaves: dict[int, Tensor] = {}
        self._scale: float | Tensor = 1.0
        self._is_whole = True

    @contextmanager
    def recorded(self, scaled: Tensor, size: float, weight: float, scale: float | Tensor = 1.0) -> Iterator[None]:
        """Record the norm of a micro-batch's mean gradient. Run the backward of the loss `scaled` in this context."""
        graph = AddedGradients(scaled)
        if graph.hides:
            raise InputError(
                "noise_scale is given, but reentrant checkpointing hides parameters from the autograd graph. Pass "
                "use_reentrant=False to the checkpointing.",
            )
        norms: list[Tensor] = []
        leaves = [leaf for leaf in graph.leaves if isinstance(leaf, nn.Parameter)]
        del graph
        with ExitStack() as hooks:
            for leaf in leaves:
                hooks.enter_context(leaf.register_hook(lambda grad: norms.append(_squared_norm(grad))))
            yield
        self._leaves.update((id(leaf), leaf) for leaf in leaves)
        self._found.append((size / weight**2, norms))
        self._scale = scale

    def spoil(self) -> None:
        """Leave the step out because a micro-batch was interrupted, so some gradients are missing."""
        self._is_whole = False

    def finish(self, count: float) -> None:
        """Add the step to the estimate. All ranks call this when the gradients are final for the optimizer."""
        grads = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        squared = _total(map(_squared_norm, grads))
        weighted = sum(factor * _total(norms) for factor, norms in self._found) if self._is_whole else math.nan
        scale = float(self._scale) ** 2
        sums: Sums = (weighted / scale, float(len(self._found)), squared / scale)
        self.noise_scale.add(sums if self._over_ranks is None else self._over_ranks(sums), count)


def _squared_norm(grad: Tensor) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    norm: Tensor = torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32))
    return norm * norm


def _total(squares: Any) -> float:
    by_device: dict[torch.device, list[Tensor]] = {}
    for square in squares:
        by_device.setdefault(square.device, []).append(square)
    return math.fsum(number for held in by_device.values() for number in torch.stack(held).tolist())
