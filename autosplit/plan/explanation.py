"""The reasons for a plan, as plain numbers, and the sentences that they are told by.

Only `Explanation.sentences` converts units. The numbers take seconds for many devices: a remembered plan holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from autosplit.solve.memory import Fits
from autosplit.solve.padded_length import LengthPlan
from autosplit.solve.trial import KNEE_SHARE
from autosplit.text import bound_text, counted_text, rate_text, size_text, tuple_text

BINDING_SHARE = 0.005
"""A bound binds if the predicted rate rises by more than this share without it."""

MOST_GAIN = 10.0
"""A larger one is told as larger: a fit was never held against steps so far from those that it is of."""

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
"""What bounds a plan."""

Changed = Literal[What, "one_gib_more", "alone"]
"""How a machine, or what is asked of it, differs from the plan's."""

MOST_TIMES = 3
"""Changes that are named of those that would make a step faster: the ones that bring the most."""

LIMITS = ("memory", "max_batch_size", "effective_batch_size")
"""Those of them that keep the batch small; the others are time."""


@dataclass(frozen=True)
class Change:
    """The simulated throughput of a plan's workload on a machine that differs in one thing.

    Attributes:
        what: In what: as `Bound` has it, or ``"one_gib_more"`` on a device, or a device ``"alone"``.
        device: Which device; None where it is all of them together, or none in particular.
        samples_per_s: The fastest of the splits that were simulated there.
    """

    what: Changed
    device: str | None
    samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class TunedWay:
    """The result of one of several ways to train.

    Attributes:
        name: The precision or the layers that are checkpointed, in words.
        batch_size: Samples per forward of its plan.
        samples_per_s: Throughput of its plan.
    """

    name: str
    batch_size: Annotated[int, Meta(ge=1)]
    samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Knee:
    """The batch of a plan for which none was asked, and the fastest that was tried: it is larger, and hardly faster.

    Attributes:
        batch_size: The plan's own, the smallest tried that has `KNEE_SHARE` of the fastest's throughput.
        fastest_batch_size: Samples per forward.
        fastest_samples_per_s: Throughput.
    """

    batch_size: Annotated[int, Meta(ge=1)]
    fastest_batch_size: Annotated[int, Meta(ge=1)]
    fastest_samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Bound:
    """Something without which the plan would be faster.

    Attributes:
        what: ``"memory"`` of a device; ``"max_batch_size"`` or ``"effective_batch_size"``, against what twice as much
            would bring (of `max_batch_size` at a given effective batch: no limit); ``"device"``: the time of one,
            and ``"link"``: of all transfers, against twice the rates; ``"copies"`` of parameters and gradients (of
            ranks: the all-reduce), ``"gather"`` of the outputs, ``"update"`` (the optimizer) and ``"host"`` (what it
            costs to start each operation; of a single step alone, see `MeasuredStep`), against none;
            ``"overhead"``, what real devices cost each other by all of that but the optimizer: measured together, it
            can't be told apart.
        device: Which device; None where it is all of them together, or none in particular.
        samples_per_s: Without it: simulated for simulated cards, otherwise predicted.
        gain: That over the same with it.
    """

    what: What
    device: str | None
    samples_per_s: float
    gain: float


@dataclass(frozen=True)
class Alternative:
    """Another way to train, and its throughput.

    Attributes:
        devices: Who takes part.
        split: Samples per device in one forward; empty where only the throughput is known.
        accumulation_steps: Forwards per optimizer step; 0 where that is not known.
        samples_per_s: Throughput of whole optimizer steps.
        gain: The plan's throughput over that.
        measured: Whether both were measured (or simulated), rather than predicted.
    """

    devices: tuple[str, ...]
    split: tuple[int, ...]
    accumulation_steps: int
    samples_per_s: float
    gain: float
    measured: bool = False


@dataclass(frozen=True)
class MoreMemory:
    """The throughput that one GiB more on the fullest device would buy.

    Attributes:
        device: The device with the least of its capacity free at the plan's split.
        samples_per_s: With it.
        gain: That over the same without; 1 where its memory bounds nothing.
        simulated: Rather than predicted.
    """

    device: str
    samples_per_s: float
    gain: float
    simulated: bool = False

    @property
    def pays(self) -> bool:
        """Whether it would bring more than nothing."""
        return self.gain > 1 + BINDING_SHARE


@dataclass(frozen=True)
class FitQuality:
    """How far the model's predictions are from what was measured.

    Attributes:
        median_share: Median of ``|predicted / measured - 1|`` over the trials that ran.
        largest_share: The largest.
        count: How many trials these are.
        noise_share: Median standard error of the trials, as a share; 0 on simulated cards, whose times are exact.
    """

    median_share: float
    largest_share: float
    count: int
    noise_share: float


@dataclass(frozen=True)
class LearningRate:
    """By what to multiply the learning rate that suits the sample batch.

    Attributes:
        sample_batch_size: Samples of the batch that the workload came with.
        effective_batch_size: The plan's.
        linear: Their ratio, for SGD: Goyal et al. 2017, who warm up to it.
        square_root: Its square root, for Adam and its kin: Krizhevsky 2014, Malladi et al. 2022.
    """

    sample_batch_size: int
    effective_batch_size: int
    linear: float
    square_root: float


@dataclass(frozen=True)
class Explanation:
    """Why a plan is what it is. `str()` is the text for people.

    Attributes:
        samples_per_s: The plan's throughput; what a data loader has to deliver, for data loading is not counted.
        loader_samples_per_s: Samples per second that the loader loads; None where it was not measured.
        predicted_samples_per_s: What the model says of the plan; None where the plan holds no fit.
        bounds: What binds, of memory and sizes first, each kind by its gain; empty where nobody knows: the plan has no
            fit, or is of simulated cards and nothing else was simulated.
        even: The even split that fits, in as few forwards as it can, predicted; None where the plan is even, the
            devices share a processor, there is one device, or one was measured.
        even_measured: The even split of the plan's own batch, where it was measured.
        alone: Each kind of device by itself, the fastest first; empty where the devices share a processor.
        more_memory: What one GiB more would buy; None where memory limits no ceiling, or there is no fit.
        fit: The model's errors; None where there is no trial to compare with.
        fastest: ``"balanced"`` or ``"ddp"``; None where there is only one answer, or nothing is claimed.
        ddp_samples_per_s: DDP's throughput; 0 where it has no answer.
        ddp_measured: Whether that was measured, rather than predicted.
        learning_rate: None where the plan's effective batch is the sample batch's, or that is unknown.
        shares_processor: The devices share one processor: no gain over an even split or one device is claimed.
        simulated: What counts as measured was simulated.
        ways: What each precision or choice of checkpointed layers gave, the plan's own first.
        lengths: What batches of like length bring; None where no lengths were given.
        fits: The room for other things than training steps; None where nothing was asked for.
        knee: Why the batch is no larger; None where an effective batch was asked for, or none that was tried is faster.
        attention: The back ends of attention that torch chooses, each with its devices. Empty if that is unknown, or if
            the model calls no attention.
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
    learning_rate: LearningRate | None
    shares_processor: bool
    simulated: bool
    loader_samples_per_s: float | None = None
    ways: tuple[TunedWay, ...] = ()
    lengths: LengthPlan | None = None
    fits: Fits | None = None
    knee: Knee | None = None
    attention: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def takes_samples_per_s(self) -> float:
        """Samples per second that the devices take of a loader: of samples that differ in length, of those."""
        return self.samples_per_s if self.lengths is None else self.lengths.samples_per_s

    def comparison(self) -> str:
        """Say which of DDP and the plan's own split is faster, and by how much; empty where there is only one."""
        if self.fastest is None:
            return ""
        ddp, own = self.ddp_samples_per_s, self.samples_per_s
        if abs(ddp / own - 1) <= BINDING_SHARE:
            return "DDP is as fast as BalancedDataParallel"
        if self.fastest == "ddp":
            return f"DDP is {ddp / own:.2f} times as fast as BalancedDataParallel"
        return f"BalancedDataParallel is {own / ddp:.2f} times as fast as DDP"

    def reasons(self) -> tuple[str, ...]:
        """Return what limits the plan: a sentence for each limit of the batch, and one for what takes the most time.

        Empty where nobody knows. Times come first where no limit but the asked effective batch keeps the batch small.
        Where the loader is slower than the devices, nothing else limits it.
        """
        if self.loader_samples_per_s is not None and self.loader_samples_per_s < self.takes_samples_per_s:
            return (_loader_text(self),)
        limits = [bound for bound in self.bounds if bound.what in LIMITS]
        times = [bound for bound in self.bounds if bound.what not in LIMITS][:MOST_TIMES]
        if not times:
            return tuple(map(_limit_text, limits))
        gains = ", ".join(map(time_text, times))
        if any(bound.what != "effective_batch_size" for bound in limits):
            return (*map(_limit_text, limits), f"beside that, it would be faster with {gains}")
        return (f"memory is no limit; it would be faster with {gains}", *map(_limit_text, limits))

    def sentences(self) -> dict[str, str]:
        """Return what there is to say, by subject: only what says something."""
        said = {
            "ways": _ways_text(self.ways),
            "lengths": "" if self.lengths is None else lengths_text(self.lengths),
            "fits": "" if self.fits is None else fits_text(self.fits),
            "knee": "" if self.knee is None else _knee_text(self.knee),
            "bounds": "; ".join(self.reasons()),
            "even": _even_text(self),
            "alone": "; ".join(map(_alone_text, self.alone)),
            "memory": "" if self.more_memory is None else _memory_text(self.more_memory),
            "ddp": _ddp_text(self),
            "learning_rate": "" if self.learning_rate is None else _learning_rate_text(self.learning_rate),
            "fit": "" if self.fit is None else _fit_text(self.fit),
            "attention": _attention_text(self.attention),
            "data": _loader_text(self),
        }
        if said["data"] == said["bounds"]:
            del said["data"]
        return {subject: text for subject, text in said.items() if text}

    def __str__(self) -> str:
        """Return a line for each thing there is to say."""
        return "\n".join(self.sentences().values())


@dataclass(frozen=True)
class Explained:
    """An explanation that is kept beside what it is of.

    Attributes:
        of: The digest of the plan's numbers: of others it says nothing.
        explanation: It.
    """

    of: str
    explanation: Explanation


# --------------------------------------------------------------------------------------------------------- sentences


def _attention_text(backends: Mapping[str, Sequence[str]]) -> str:
    """Return the back ends of attention. The devices are named if they have different ones."""
    if not backends:
        return ""
    alike = len({tuple(labels) for labels in backends.values()}) == 1
    texts = [name if alike else f"{name} on {', '.join(labels)}" for name, labels in backends.items()]
    return f"attention: {', '.join(texts) if alike else '; '.join(texts)}"


def _loader_text(explanation: Explanation) -> str:
    devices, loader = explanation.takes_samples_per_s, explanation.loader_samples_per_s
    if loader is None:
        return f"data loading is not measured: the loader has to deliver {rate_text(devices)}"
    return f"{bound_text(loader, devices)}: it loads {rate_text(loader)}, and the devices take {rate_text(devices)}"


def _knee_text(knee: Knee) -> str:
    return (
        f"{knee.batch_size:,} is the smallest batch tried that has {100 * KNEE_SHARE:.0f} % of the throughput of the "
        f"fastest ({knee.fastest_batch_size:,}: {rate_text(knee.fastest_samples_per_s)})"
    )


def _ways_text(ways: tuple[TunedWay, ...]) -> str:
    given = [f"{way.name} {rate_text(way.samples_per_s)} with {way.batch_size:,} per forward" for way in ways]
    return ", against ".join((given[0], ", ".join(given[1:]))) if len(given) > 1 else ""


def fits_text(fits: Fits) -> str:
    """Say what there is room for besides the training steps."""
    copies = " and for ".join(_COPIES[role] for role in fits.roles if role in _COPIES)
    said = [f"each step leaves {size_text(fits.copies_bytes)} for {copies}"] if copies else []
    if fits.evaluation:
        most = ", ".join(f"{ceiling.batch_size:,} on {ceiling.device}" for ceiling in fits.evaluation)
        said.append(f"evaluation fits in batches of up to {most}, each device by itself as a DDP rank")
    return "; ".join(said)


_COPIES = {
    "resume": "a checkpoint that was loaded onto the device",
    "save": "a copy of model and optimizer that is being saved",
}


def lengths_text(lengths: LengthPlan) -> str:
    """Say what batches of like length bring over batches of one size."""
    return (
        f"batches of like length bring {rate_text(lengths.samples_per_s)} with {_percent(lengths.padding_share)} of "
        f"padding, against {rate_text(lengths.fixed_samples_per_s)} with {_percent(lengths.fixed_padding_share)} in "
        "batches of one size (predicted)"
    )


def _limit_text(bound: Bound) -> str:
    if bound.what == "memory":
        whose = bound.device if bound.device is not None else "all devices together"
        return f"the memory of {whose} limits the batch: {_more(bound.gain)} without that limit"
    if bound.what == "max_batch_size":
        return f"max_batch_size limits the batch: up to {_more(bound.gain)} with a larger one"
    return f"a larger effective batch is faster: up to {_more(bound.gain)} with one twice as large"


def time_text(bound: Bound) -> str:
    """Say what would make a step faster, and what that would bring."""
    cause = {
        "device": f"{bound.device or 'all devices'} twice as fast",
        "link": "links twice as fast",
        "copies": "parameters and gradients copied in no time",
        "gather": "outputs gathered in no time",
        "overhead": "no time lost between devices",
        "contention": "no time lost between devices",
        "update": "an optimizer that takes no time",
        "host": "operations that the processor starts in no time",
    }[bound.what]
    return f"{cause} ({_more(bound.gain)})"


def _even_text(explanation: Explanation) -> str:
    if explanation.shares_processor:
        return "the devices share one processor: no gain over an even split or a single device is claimed"
    parts = []
    if explanation.even is not None:
        even = explanation.even
        forwards = counted_text(even.accumulation_steps, "forward")
        parts.append(
            f"the even split, {tuple_text(even.split)} in {forwards}, gives {rate_text(even.samples_per_s)} "
            f"(predicted): the plan {_times(even.gain)}"
        )
    if explanation.even_measured is not None:
        even = explanation.even_measured
        how = "simulated" if explanation.simulated else "measured"
        parts.append(
            f"the plan's batch split evenly gives {rate_text(even.samples_per_s)} ({how}): the plan {_times(even.gain)}"
        )
    return "; ".join(parts)


def _alone_text(alone: Alternative) -> str:
    how = "simulated" if alone.measured else "predicted"
    return f"{alone.devices[0]} alone gives {rate_text(alone.samples_per_s)} ({how}): the plan {_times(alone.gain)}"


def _memory_text(more: MoreMemory) -> str:
    if not more.pays:
        return f"1 GiB more on {more.device}, the fullest device, would bring nothing"
    how = "simulated" if more.simulated else "predicted"
    return f"1 GiB more on {more.device}, the fullest device, would bring {_more(more.gain)} samples/s ({how})"


def _ddp_text(explanation: Explanation) -> str:
    if explanation.fastest is None:
        return ""
    known = "simulated" if explanation.simulated else "measured"
    ddp = f"{rate_text(explanation.ddp_samples_per_s)} ({known if explanation.ddp_measured else 'predicted'})"
    own = f"{rate_text(explanation.samples_per_s)} ({known})"
    return f"{explanation.comparison()}: DistributedDataParallel {ddp}, BalancedDataParallel {own}"


def _learning_rate_text(advice: LearningRate) -> str:
    return (
        f"a step has {advice.effective_batch_size} samples, the sample batch has {advice.sample_batch_size}: multiply "
        f"a learning rate that suits the sample batch by {_factor(advice.linear)} for SGD with warm-up (linear rule, "
        f"Goyal et al. 2017), by {_factor(advice.square_root)} for Adam (square-root rule, Malladi et al. 2022)"
    )


def _fit_text(fit: FitQuality) -> str:
    noise = f"; the measured times vary by {_percent(fit.noise_share)}" if fit.noise_share else ""
    return (
        f"the model of a step's time is off by {_percent(fit.median_share)} in the median and "
        f"{_percent(fit.largest_share)} at most, over {counted_text(fit.count, 'trial')}{noise}"
    )


def _times(gain: float) -> str:
    return "is as fast" if abs(gain - 1) <= BINDING_SHARE else f"is {gain:.2f} times as fast"


def _more(gain: float) -> str:
    return f"+{_percent(gain - 1)}" if gain < MOST_GAIN else f"over +{_percent(MOST_GAIN - 1)}"


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:.1f} %"


def _factor(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
