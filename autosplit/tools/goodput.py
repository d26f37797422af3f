"""Recommend an effective batch size by goodput: samples/s times the training progress per sample.

Goodput is from Pollux (Qiao et al., OSDI 2021), with the noise scale of McCandlish et al. 2018. The plan's fit predicts
the samples/s of the plan's split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError, shown
from autosplit.plan.solve_again import required_problem
from autosplit.plan.split_comparison import compared_split
from autosplit.solve.solver import geometric
from autosplit.solve.split import accumulation_steps
from autosplit.tools.canvas import check_installed, side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autosplit.parallel.step_listener import NoiseEstimate
    from autosplit.plan.record import PlanRecord

REACH = 16
"""Largest batch that is tried, as a multiple of the noise scale or of the plan's batch, whichever is larger.

Goodput is highest at the geometric mean of two numbers: the noise scale, and the samples that take as long as the fixed
time of a step.
"""


@dataclass(frozen=True)
class GoodputPoint:
    """The throughput and the goodput of an effective batch size.

    Attributes:
        samples_per_s: Predicted throughput.
        efficiency: Training progress per sample, relative to the plan's effective batch size. Above 1 for smaller
            batches.
        goodput: ``samples_per_s * efficiency``: the samples per second at the plan's effective batch size that would
            give the same progress.
    """

    effective_batch_size: int
    accumulation_steps: int
    samples_per_s: float
    efficiency: float
    goodput: float


@dataclass(frozen=True)
class Goodput:
    """The effective batch size that trains fastest at a noise scale. `str()` returns one line of text.

    Attributes:
        noise_scale: The gradient noise scale, in samples.
        plan_effective_batch_size: The plan's effective batch size. Efficiency and learning rate are relative to it.
        curve: Goodput by effective batch size, in ascending order.
        effective_batch_size: The effective batch size with the highest goodput.
        interval: The recommendations at both ends of the noise scale's 95% interval. Without an interval, the
            recommendation twice. For an infinite end, the largest size that was tried.
        learning_rate_factor: Factor for an SGD learning rate that was chosen for the plan's effective batch size. It is
            ``(1 + noise / plan's) / (1 + noise / recommended)``, McCandlish et al. 2018. For Adam, use its square root.
        gain: Goodput of the recommendation over the goodput of the plan's effective batch size.
    """

    noise_scale: float
    plan_effective_batch_size: int
    curve: tuple[GoodputPoint, ...]
    effective_batch_size: int
    interval: tuple[int, int]
    learning_rate_factor: float
    gain: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"effective batch {self.effective_batch_size:,} ({low:,} to {high:,}) at a noise scale of "
            f"{self.noise_scale:,.4g}: goodput {self.gain:.2f} times that of {self.plan_effective_batch_size:,} "
            f"(predicted), learning rate x {self.learning_rate_factor:.2f} for SGD, x "
            f"{math.sqrt(self.learning_rate_factor):.2f} for Adam"
        )

    def plot(self) -> Figure:
        """Draw samples/s and goodput over the effective batch, as `Plan.plot` does.

        Raises:
            InputError: matplotlib is not installed (the extra ``plot``).
        """
        check_installed("matplotlib.figure", "goodput.plot()")
        return side_by_side(4.2, self._draw)

    def _draw(self, axes: Any) -> None:
        sizes = [point.effective_batch_size for point in self.curve]
        axes.plot(sizes, [point.samples_per_s for point in self.curve], linestyle="--", label="samples/s")
        axes.plot(sizes, [point.goodput for point in self.curve], label="goodput")
        axes.axvspan(*self.interval, color="C1", alpha=0.15)
        best = max(self.curve, key=lambda point: point.goodput)
        axes.scatter([best.effective_batch_size], [best.goodput], s=190, marker="*", color="C3", label="best", zorder=5)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("effective batch, samples")
        axes.set_ylabel("samples/s")


def goodput_of(plan: PlanRecord, noise_scale: NoiseEstimate | float) -> Goodput:
    """Return the recommendation, see `Plan.goodput`."""
    value: Any = noise_scale
    ends = (value, value)
    if hasattr(type(noise_scale), "interval"):  # an estimate with its 95% interval
        value, ends = value.value, value.interval
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(
            f"noise_scale={shown(value)} is not a finite number of samples, 0 or more. Pass a number, or an "
            "autosplit.NoiseScale that plan.steps estimated over more steps.",
        )
    rates = _rates(plan, REACH * max(value, plan.batch_size, plan.effective_batch_size))
    now = plan.effective_batch_size
    best, low, high = (_best(rates, noise, now) for noise in (value, *ends))
    worth = {}
    for size, rate in rates.items():
        efficiency, steps = _efficiency(size, value, now), accumulation_steps(size, plan.batch_size)
        worth[size] = GoodputPoint(size, steps, rate, efficiency, rate * efficiency)
    return Goodput(
        noise_scale=float(value),
        plan_effective_batch_size=now,
        curve=tuple(worth.values()),
        effective_batch_size=best,
        interval=(low, high),
        learning_rate_factor=best / now * worth[best].efficiency,
        gain=worth[best].goodput / worth[now].goodput,
    )


def _rates(plan: PlanRecord, most: float) -> dict[int, float]:
    layout = plan.main
    problem = required_problem(plan, layout)
    sizes = {*geometric(plan.batch_size), plan.effective_batch_size}
    if plan.accumulates and compared_split(plan, plan.split, 2).fits:
        sizes |= {plan.batch_size * forwards for forwards in geometric(max(1, int(most / plan.batch_size)))}
    least = layout.least_batch * (sum(map(bool, plan.split)) if problem.ranks else 1)
    return {size: problem.rate(plan.split, size) for size in sorted(sizes) if size >= least}


def _efficiency(size: int, noise_scale: float, now: int) -> float:
    return 1.0 if math.isinf(noise_scale) else (noise_scale + now) / (noise_scale + size)


def _best(rates: dict[int, float], noise_scale: float, now: int) -> int:
    return max(rates, key=lambda size: rates[size] * _efficiency(size, noise_scale, now))
