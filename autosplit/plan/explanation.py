"""Define the reasons for a layout as numbers, and describe them in sentences.

Only `Explanation.sentences` converts units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from autosplit.solve.length_plan import LengthPlan
from autosplit.solve.trial import KNEE_SHARE
from autosplit.text import bound_text, counted_text, percent_text, rate_text, tuple_text

ASSUMED_LOSS = "No loss was given, so the plan is for the mean of the model's outputs."

BINDING_SHARE = 0.005
"""Smallest relative gain in predicted samples/s that is reported: 0.5%."""

MOST_GAIN = 10.0
"""Largest factor of throughput that is printed. Fits were never tested against steps that differ by more."""

What = Literal[
    "memory",
    "max_batch_size",
    "effective_batch_size",
    "device",
    "link",
    "copies",
    "gather",
    "overhead",
    "update",
    "host",
    "contention",  # only in older files
]
"""The kinds of bounds of a plan, see `Bound`."""

Changed = Literal[What, "one_gib_more", "alone"]
"""The property of a simulated machine or request that differs from the plan's."""

MOST_TIMES = 3
"""Largest number of time costs that are printed, those with the largest gains first."""

LIMITS = ("memory", "max_batch_size", "effective_batch_size")
"""Bounds that keep the batch small. The other bounds are time costs."""


@dataclass(frozen=True)
class WhatIf:
    """The throughput of a machine that differs from the plan's machine in one property.

    Attributes:
        what: The property, as in `Bound`. Also ``"one_gib_more"`` memory on a device, or a device ``"alone"``.
        device: Label of the changed device. None for all devices, or if the property concerns no single device.
        samples_per_s: Throughput of the fastest split on the changed machine, simulated or predicted.
    """

    what: Changed
    device: str | None
    samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Knee:
    """The smallest batch size that is almost as fast as the fastest one, for a plan without an effective batch size.

    Attributes:
        batch_size: The plan's batch size: the smallest that was tried with `KNEE_SHARE` of the best throughput.
        fastest_batch_size: The fastest batch size that was tried, in samples per forward.
        fastest_samples_per_s: Throughput of the fastest batch size.
    """

    batch_size: Annotated[int, Meta(ge=1)]
    fastest_batch_size: Annotated[int, Meta(ge=1)]
    fastest_samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Bound:
    """A limit or cost, and the throughput without it.

    Attributes:
        what: The kind of bound, which determines the change. ``"memory"``: a device with unlimited memory.
            ``"max_batch_size"`` and ``"effective_batch_size"``: twice the size (`max_batch_size` with an effective
            batch size: no limit). ``"device"``: one device that is twice as fast. ``"link"``: transfers at twice the
            speed. ``"copies"``: free copies of parameters and gradients, or for ranks a free all-reduce. ``"gather"``:
            a free gather of the outputs. ``"update"``: a free optimizer step. ``"host"``: operations that start
            without a cost (only in `MeasuredStep`). ``"overhead"``: no cost between real devices, except the
            optimizer. It can't be measured separately.
        device: Label of the device. None for all devices, or if the bound concerns no single device.
        samples_per_s: Throughput without the bound: simulated for simulated GPUs, otherwise predicted.
        gain: Throughput without the bound over throughput with it.
    """

    what: What
    device: str | None
    samples_per_s: float
    gain: float


@dataclass(frozen=True)
class Alternative:
    """Another option to train, and its throughput.

    Attributes:
        devices: Labels of the devices that take part.
        split: Samples per device in one forward. Empty if only the throughput is known.
        accumulation_steps: Forwards per optimizer step. 0 if unknown.
        samples_per_s: Throughput of whole optimizer steps.
        gain: The plan's throughput over this throughput.
        measured: Whether both throughputs were measured or simulated, rather than predicted.
    """

    devices: tuple[str, ...]
    split: tuple[int, ...]
    accumulation_steps: int
    samples_per_s: float
    gain: float
    measured: bool = False


@dataclass(frozen=True)
class MoreMemory:
    """The throughput with 1 GiB more memory on the fullest device.

    Attributes:
        device: The device with the least free memory at the plan's split, relative to its capacity.
        samples_per_s: Throughput with the additional memory.
        gain: Throughput with the additional memory over throughput without it. 1 if memory does not limit the plan.
        simulated: Whether the throughput was simulated, rather than predicted.
    """

    device: str
    samples_per_s: float
    gain: float
    simulated: bool = False

    @property
    def pays(self) -> bool:
        """Whether more memory would raise the throughput."""
        return self.gain > 1 + BINDING_SHARE


@dataclass(frozen=True)
class FitQuality:
    """The differences between the time model's predictions and the measurements.

    Attributes:
        median_share: Median of ``|predicted / measured - 1|`` over the trials that ran.
        largest_share: Largest of these values.
        count: Number of trials that ran.
        noise_share: Median relative standard error of the trials. 0 for simulated GPUs, whose times are exact.
    """

    median_share: float
    largest_share: float
    count: int
    noise_share: float


@dataclass(frozen=True)
class Explanation:
    """The reasons for a plan. `str()` returns them as text.

    Attributes:
        samples_per_s: The plan's throughput without data loading. A data loader must be at least as fast.
        loader_samples_per_s: Throughput of the data loader. None if it was not measured.
        predicted_samples_per_s: The model's prediction for the plan. None if the plan has no fit.
        bounds: Limits and costs of the plan. Limits by memory and sizes come first, then costs. Each group begins with
            the largest gain. Empty if the plan has no fit, or if it is simulated and no changed machine was simulated.
        even: Prediction for the even split that fits with the smallest number of forwards. None if the plan is even,
            the devices share a CPU, there is one device, or the even split was measured.
        even_measured: The plan's batch size with an even split, if it was measured.
        alone: The throughput of each kind of device without the others, the fastest first. Empty if the devices share a
            CPU.
        more_memory: The throughput with 1 GiB more memory. None if memory limits no ceiling, or if there is no fit.
        fit: The model's errors. None if there is no trial to compare with.
        fastest: ``"balanced"`` or ``"ddp"``. None if only one of them is possible, or if the devices share a CPU.
        ddp_samples_per_s: Throughput of DDP. 0 if DDP is not possible.
        ddp_measured: Whether the throughput of DDP was measured, rather than predicted.
        shares_processor: Whether the devices share one CPU. Then no gain over an even split or one device is claimed.
        simulated: Whether measured values were simulated.
        lengths: The gain of batches with similar lengths. None if no lengths were given.
        knee: Why the batch is not larger. None if an effective batch size was requested, or if no larger batch is
            faster.
        attention: The attention back ends that torch chooses, each with the devices that use it. Empty if they are
            unknown, or if the model does not call `scaled_dot_product_attention`.
        effective_batch_size: Samples per optimizer step, for advice on the learning rate.
        assumes_loss: Whether no loss was given, so that the plan is for the mean of the model's outputs.
    """

    samples_per_s: Annotated[float, Meta(gt=0)]
    predicted_samples_per_s: float | None
    bounds: tuple[Bound, ...]
    even: Alternative | None
    even_measured: Alternative | None
    alone: tuple[Alternative, ...]
    more_memory: MoreMemory | None
    fit: FitQuality | None
    fastest: Literal["balanced", "ddp"] | None
    ddp_samples_per_s: float
    ddp_measured: bool
    shares_processor: bool
    simulated: bool
    loader_samples_per_s: float | None = None
    lengths: LengthPlan | None = None
    knee: Knee | None = None
    attention: dict[str, tuple[str, ...]] = field(default_factory=dict)
    effective_batch_size: int = 0
    assumes_loss: bool = False

    def comparison(self) -> str:
        """Describe how fast DDP is compared with the plan's own split. Return "" if `fastest` is None."""
        if self.fastest is None:
            return ""
        ddp, own = self.ddp_samples_per_s, self.samples_per_s
        if abs(ddp / own - 1) <= BINDING_SHARE:
            return "DDP is as fast as BalancedDataParallel"
        if self.fastest == "ddp":
            return f"DDP is {ddp / own:.2f} times as fast as BalancedDataParallel"
        return f"BalancedDataParallel is {own / ddp:.2f} times as fast as DDP"

    def reasons(self) -> tuple[str, ...]:
        """Return sentences on the plan's bounds: one for each limit of the batch, and one for the largest time costs.

        The result is empty if the bounds are unknown. If neither memory nor `max_batch_size` limits the batch, the time
        costs come first. If the data loader is slower than the devices, only its sentence is returned.
        """
        loader = self.loader_samples_per_s
        if loader is not None and loader < loader_target(self.samples_per_s, self.lengths):
            return (self._loader_text(),)
        limits = [_limit_text(bound) for bound in self.bounds if bound.what in LIMITS]
        times = [time_text(bound) for bound in self.bounds if bound.what not in LIMITS][:MOST_TIMES]
        if not times:
            return tuple(limits)
        faster = f"would be faster with {', '.join(times)}."
        if any(bound.what in ("memory", "max_batch_size") for bound in self.bounds):
            return (*limits, f"Apart from that, the plan {faster}")
        return (f"Not memory-bound. The plan {faster}", *limits)

    def sentences(self) -> dict[str, str]:
        """Return the explanation's sentences by subject. Subjects without a sentence are left out."""
        known = "simulated" if self.simulated else "measured"
        reasons, loader = self.reasons(), self._loader_text()
        texts = {
            "loss": ASSUMED_LOSS if self.assumes_loss else "",
            "lengths": "" if self.lengths is None else lengths_text(self.lengths),
            "knee": "" if self.knee is None else _knee_text(self.knee),
            "bounds": " ".join(reasons),
            "even": self._even_text(known),
            "alone": " ".join(_alternative_text(f"{one.devices[0]} alone", one, known) for one in self.alone),
            "memory": "" if self.more_memory is None else _memory_text(self.more_memory),
            "ddp": self._ddp_text(known),
            "learning_rate": _learning_rate_text(self.effective_batch_size),
            "fit": "" if self.fit is None else _fit_text(self.fit),
            "attention": _attention_text(self.attention),
            "data": "" if reasons == (loader,) else loader,
        }
        return {subject: text for subject, text in texts.items() if text}

    def _loader_text(self) -> str:
        devices, loader = loader_target(self.samples_per_s, self.lengths), self.loader_samples_per_s
        if loader is None:
            return f"Data loading was not measured. The loader must deliver {rate_text(devices)}."
        rates = f"the loader delivers {rate_text(loader)}, and the devices take {rate_text(devices)}"
        return f"{bound_text(loader, devices).capitalize()}: {rates}."

    def _even_text(self, known: str) -> str:
        if self.shares_processor:
            return "The devices share one CPU, so autosplit reports no gain over an even split or a single device."
        texts = []
        if self.even is not None:
            forwards = counted_text(self.even.accumulation_steps, "forward")
            subject = f"The even split {tuple_text(self.even.split)} in {forwards}"
            texts.append(_alternative_text(subject, self.even, known))
        if self.even_measured is not None:
            texts.append(_alternative_text("An even split of the plan's batch", self.even_measured, known))
        return " ".join(texts)

    def _ddp_text(self, known: str) -> str:
        if self.fastest is None:
            return ""
        ddp = f"{rate_text(self.ddp_samples_per_s)} ({known if self.ddp_measured else 'predicted'})"
        own = f"{rate_text(self.samples_per_s)} ({known})"
        return f"{self.comparison()}: DistributedDataParallel {ddp}, BalancedDataParallel {own}."

    def __str__(self) -> str:
        return "\n".join(self.sentences().values())


# --------------------------------------------------------------------------------------------------------- sentences


def _alternative_text(subject: str, alternative: Alternative, known: str) -> str:
    how = known if alternative.measured else "predicted"
    same = abs(alternative.gain - 1) <= BINDING_SHARE
    times = "as fast" if same else f"{alternative.gain:.2f} times as fast"
    return f"{subject} gives {rate_text(alternative.samples_per_s)} ({how}). The plan is {times}."


def _attention_text(backends: Mapping[str, Sequence[str]]) -> str:
    if len({tuple(labels) for labels in backends.values()}) > 1:
        texts = [f"{name} on {', '.join(labels)}" for name, labels in backends.items()]
        return f"Attention: {'; '.join(texts)}."
    return f"Attention: {', '.join(backends)}." if backends else ""


def _knee_text(knee: Knee) -> str:
    return (
        f"{knee.batch_size:,} is the smallest tried batch with {percent_text(KNEE_SHARE)} of the best throughput "
        f"({rate_text(knee.fastest_samples_per_s)} with {knee.fastest_batch_size:,})."
    )


def loader_target(samples_per_s: float, lengths: LengthPlan | None) -> float:
    """Return the samples per second that the data loader must deliver, at the plan's lengths if it has any."""
    return samples_per_s if lengths is None else lengths.samples_per_s


def lengths_text(lengths: LengthPlan) -> str:
    """Compare the throughput of batches of similar length with batches of one size."""
    return (
        f"Batches of similar length give {rate_text(lengths.samples_per_s)} with {percent_text(lengths.padding_share)} "
        f"padding. Batches of one size give {rate_text(lengths.fixed_samples_per_s)} with "
        f"{percent_text(lengths.fixed_padding_share)} padding (predicted)."
    )


def _limit_text(bound: Bound) -> str:
    gain = _more(bound.gain)
    if bound.what == "memory":
        return f"The memory of {bound.device or 'all devices together'} limits the batch: {gain} without this limit."
    if bound.what == "max_batch_size":
        return f"max_batch_size limits the batch: up to {gain} with a larger one."
    return f"A larger effective batch is faster: up to {gain} at twice the size."


def time_text(bound: Bound) -> str:
    """Describe a change that lowers a time cost, and the throughput gain."""
    change = {
        "device": f"{bound.device or 'all devices'} twice as fast",
        "link": "links twice as fast",
        "copies": "free copies of parameters and gradients",
        "gather": "a free gather of the outputs",
        "overhead": "no overhead between devices",
        "contention": "no overhead between devices",
        "update": "a free optimizer update",
        "host": "no CPU launch overhead",
    }[bound.what]
    return f"{change} ({_more(bound.gain)})"


def _memory_text(more: MoreMemory) -> str:
    subject = f"1 GiB more on {more.device}, the fullest device, would"
    how = "simulated" if more.simulated else "predicted"
    return f"{subject} give {_more(more.gain)} ({how})." if more.pays else f"{subject} not help."


def _learning_rate_text(samples: int) -> str:
    factor = f"{samples:,} / B"
    return (
        f"A step has {counted_text(samples, 'sample')}. If your learning rate was tuned for B samples per step, "
        f"scale it. For SGD with warm-up, multiply by {factor} (Goyal et al. 2017). For Adam, multiply by the "
        f"square root of {factor} (Malladi et al. 2022)."
    )


def _fit_text(fit: FitQuality) -> str:
    noise = f" The measured times vary by {percent_text(fit.noise_share)}." if fit.noise_share else ""
    errors = f"{percent_text(fit.median_share)} (median) and {percent_text(fit.largest_share)} (largest)"
    return f"The time model differs from {counted_text(fit.count, 'trial')} by {errors}.{noise}"


def _more(gain: float) -> str:
    return f"+{percent_text(gain - 1)}" if gain < MOST_GAIN else f"over +{percent_text(MOST_GAIN - 1)}"
