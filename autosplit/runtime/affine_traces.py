"""Foretell traces at any batch from a few: what comes and goes in a step is the same at every batch.

Each storage takes ``c + s * samples`` bytes. So two traces of different sizes, laid beside each other, tell what each
storage of a third takes; these are rounded to blocks and added up in their order, which gives the peak to the byte. A
device that gathers for others adds a size, and takes a third trace. Where a storage is quadratic in the samples (a
loss over the whole batch), a smaller trace that is known says so, and one more is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autosplit.runtime.memory_tracker import BLOCK_BYTES
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracer import Trace, Tracer
from autosplit.runtime.trainee import Trainee
from autosplit.solve.memory import MemoryParts

__all__ = ["AffineTraces"]

_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "left")


class AffineTraces:
    """Tells what steps hold as a `Tracer` does, after few real traces.

    Args:
        tracer: Follows the workload; what is not affine is asked of it at the sizes traced alone.
        samples: A size that the workload runs with; small multiples of it are traced.
        most: Nothing larger is traced.
    """

    def __init__(self, tracer: Tracer, samples: int, most: int) -> None:
        self._tracer = tracer
        self._samples = max(1, min(samples, most))
        self._most = most
        self._laws: dict[StepShape, _Law] = {}
        self._is_curved = False

    @property
    def trainee(self) -> Trainee:
        """The copy that is traced."""
        return self._tracer.trainee

    def trace(self, shape: StepShape) -> Trace:
        """Return the trace of a step; its events are those of another size."""
        split = shape.splits[0]
        unit = replace(shape, splits=(tuple(min(1, samples) for samples in split),))
        if unit not in self._laws:
            self._laws[unit] = self._law(unit)
        return self._laws[unit].at(split)

    def _law(self, unit: StepShape) -> _Law:
        """Trace a step at a few sizes: one, and from there one for each device with samples of its own."""
        active = [index for index, samples in enumerate(unit.splits[0]) if samples]
        samples = max(1, min(self._samples, self._most // (3 * len(active))))
        low, high = (2 * samples, 3 * samples) if 3 * samples * len(active) <= self._most else (samples, 2 * samples)
        if high * len(active) > self._most:
            low, high = max(1, samples // 2), samples
        base = tuple(low * one for one in unit.splits[0])
        law = _Law(self._traced(unit, base))
        for index in active if high > low else ():
            law.add(index, self._traced(unit, (*base[:index], high, *base[index + 1 :])))
        known = self._tracer.known(replace(unit, splits=((self._samples,),)))
        if known is not None and len(unit.splits[0]) == 1 and law.is_alike:
            self._is_curved = law.at((self._samples,)).peak_bytes != known.peak_bytes
        if self._is_curved and len(active) == 1 and high > low:
            law.add(active[0], self._traced(unit, tuple(samples and high + low for samples in base)))
        return law

    def _traced(self, unit: StepShape, split: tuple[int, ...]) -> _Followed:
        shape = replace(unit, splits=(split,))
        entries = self._tracer.entries_of(shape)
        kinds = torch.tensor([_KINDS.index(kind) for kind, _, _ in entries])
        devices = torch.tensor([device for _, device, _ in entries])
        nbytes = torch.tensor([float(amount) for _, _, amount in entries], dtype=torch.float64)
        return _Followed(split, self._tracer.trace(shape), kinds, devices, nbytes)


@dataclass(frozen=True)
class _Followed:
    """A traced step.

    Attributes:
        split: Samples of each device.
        trace: The trace.
        kinds: What each storage is for, as an index of `_KINDS`.
        devices: Where it came to, or went from.
        nbytes: How large it is, not rounded; negative where it went.
    """

    split: tuple[int, ...]
    trace: Trace
    kinds: Tensor
    devices: Tensor
    nbytes: Tensor

    def is_like(self, other: _Followed) -> bool:
        """Tell whether the same came and went in the same order."""
        return (
            torch.equal(self.kinds, other.kinds)
            and torch.equal(self.devices, other.devices)
            and torch.equal(self.nbytes.sign(), other.nbytes.sign())
        )


class _Law:
    """The bytes of a kind of step, by the samples of each device.

    Args:
        base: The step that others are compared with.
    """

    def __init__(self, base: _Followed) -> None:
        self._base = base
        self._others: list[tuple[int, _Followed]] = []
        self.is_alike = True

    def add(self, index: int, followed: _Followed) -> None:
        """Take in a step in which one device has other samples than in the base."""
        self._others.append((index, followed))
        self.is_alike = self.is_alike and self._base.is_like(followed)

    def at(self, split: tuple[int, ...]) -> Trace:
        """Return what would be traced."""
        base = self._base.trace
        if not self.is_alike:  # kernels chosen by size, say: no more than lines through the peaks
            peaks = self._evaluated(split, [torch.tensor(f.trace.peak_bytes, dtype=torch.float64) for f in self._all])
            found = tuple(max(0, int(peak)) for peak in peaks)
            made = [one.of_peak(peak, measured=False) or one for one, peak in zip(base.parts, found, strict=True)]
            return replace(base, peak_bytes=found, parts=tuple(made))
        nbytes = self._evaluated(split, [followed.nbytes for followed in self._all]).round()
        rounded = nbytes.sign() * torch.ceil(nbytes.abs() / BLOCK_BYTES) * BLOCK_BYTES
        parts = tuple(self._parts(rounded, device) for device in range(len(split)))
        return replace(base, peak_bytes=tuple(part.total_bytes for part in parts), parts=parts)

    @property
    def _all(self) -> list[_Followed]:
        return [self._base, *(followed for _, followed in self._others)]

    def _evaluated(self, split: tuple[int, ...], values: list[Tensor]) -> Tensor:
        """Return values at other samples: by the polynomial in each device's, one degree for each further step."""
        total = values[0].clone()
        for index in {index for index, _ in self._others}:
            places = [(self._base.split[index], 0)]
            places += [(f.split[index], i) for i, (own, f) in enumerate(self._others, 1) if own == index]
            for samples, i in places[1:]:
                weight = 1.0
                for other, _ in places:
                    if other != samples:
                        weight *= (split[index] - other) / (samples - other)
                total += weight * (values[i] - values[0])
        return total

    def _parts(self, rounded: Tensor, device: int) -> MemoryParts:
        """Return what a device holds at its peak."""
        here = self._base.devices == device
        kinds, nbytes = self._base.kinds[here], rounded[here]
        if not len(nbytes):
            return MemoryParts(0, 0, 0, 0, 0)
        live = nbytes.cumsum(0)
        until = int(live.argmax()) + 1
        held = [int(nbytes[:until][kinds[:until] == kind].sum()) for kind in range(len(_KINDS))]
        parameters, *others, left = held
        return MemoryParts(parameters + left, *others)
