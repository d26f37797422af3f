"""Define a part of a micro-batch, and what an optimizer step needs to cut micro-batches that run out of memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from autosplit.addons import addon
from autosplit.errors import InputError

OnOom = Literal["raise", "cut"]


@dataclass(frozen=True, eq=False)
class Part:
    """A micro-batch or a part of it.

    Attributes:
        size: The weight in the optimizer step: samples, or the divisor of the mean loss.
        added: Tensors whose gradients contain this part already.
    """

    batch: Any
    size: float
    added: tuple[Tensor, ...] = ()


class Attempt(Protocol):
    """Run a part that may run out of memory. See `tools.oom_cuts.Attempt`."""

    part: Part
    has_failed: bool

    def running(self) -> AbstractContextManager[None]:
        """Run the part inside the `with` block. Catch out-of-memory errors if smaller parts can help."""

    def backward(self, run: Callable[[], object], loss: Tensor) -> None:
        """Run the backward of a loss. If it runs out of memory, drop the incomplete gradients."""

    def halves(self) -> list[Part]:
        """Free memory, restore the random state, and return the two halves."""


class Cuts(Protocol):
    """Cut micro-batches that run out of memory. See `tools.oom_cuts.Cuts`."""

    def attempt(self, part: Part) -> Attempt:
        """Return an attempt to run a part."""

    def parts_of(self, batch: Any, size: float) -> list[Part]:
        """Return the micro-batch in parts that are known to fit."""

    def samples_of(self, part: Part) -> int:
        """Return the number of samples of a part."""


def cuts_of(loader: Any, on_oom: OnOom, **arguments: Any) -> Cuts | None:
    """Return a loader's `Cuts`, the same in every epoch, or None if `on_oom` is "raise"."""
    check_on_oom(on_oom)
    return None if on_oom == "raise" else addon("oom_cuts")(loader, **arguments)


def check_on_oom(on_oom: object) -> None:
    """Raise InputError if the argument `on_oom` is unknown."""
    if on_oom not in ("raise", "cut"):
        raise InputError(
            f"on_oom is {on_oom!r}. Expected 'raise' or 'cut'. With 'cut', a micro-batch that runs out of "
            "memory is run again in parts.",
        )
