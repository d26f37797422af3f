"""Restore this process's random number generators, or replace random decisions with extreme values."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autosplit.accelerators import accelerator_in_use

HIGHEST, LOWEST = 1 - 2**-24, 0.0
"""The largest and smallest numbers that `torch.rand` draws in float32."""

MOST_DRAWS = 1000
"""Number of extreme draws per step. Later draws are random, because a loop may redraw until it accepts a number."""


class ExtremeDraws:
    """Replace the random numbers that decide a model's path with the highest or the lowest possible number.

    A model that skips layers at random needs the most memory when it skips none. To find out whether the highest or the
    lowest number skips none, run a step with each.

    Attributes:
        count: Number of draws in the last step.
    """

    def __init__(self) -> None:
        self.number = HIGHEST
        self.count = 0

    def turn(self) -> None:
        """Switch to the other extreme number."""
        self.number = LOWEST if self.number == HIGHEST else HIGHEST

    def draw(self) -> float | None:
        """Return the largest or smallest number that `random.random` can return, or None after `MOST_DRAWS` draws.

        After that, the caller draws a random number.
        """
        self.count += 1
        return self.number if self.count <= MOST_DRAWS else None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Begin a step. Inside it, Python's `random.random` also returns the extreme number."""
        self.count, by_chance = 0, random.random

        def draw() -> float:
            number = self.draw()
            return by_chance() if number is None else number

        random.random = draw
        try:
            yield
        finally:
            random.random = by_chance


MOST_DECIDED_BY = 64
"""Size of the largest draw that may decide which layers run. Models do not branch on each element of a larger draw."""

_DRAWS = frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten.rand, torch.ops.aten.uniform_, torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)
    for overload in packet.overloads()
    if "out" not in overload
)


def number_for(draws: ExtremeDraws, func: Any, args: Sequence[Any], drawn: torch.Tensor) -> float | None:
    """Return the extreme number for the output of an operator that draws few random numbers, or None for others."""
    number = draws.draw() if func in _DRAWS and drawn.numel() <= MOST_DECIDED_BY else None
    if number is None:
        return None
    if "bernoulli" in func.name():
        return float(round(number))
    if func is torch.ops.aten.uniform_.default:
        low, high = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
        return float(low + (high - low) * number)
    return number


class RngState:
    """Store the state of all random number generators: Python's, NumPy's if loaded, torch's and the accelerator's.

    Args:
        generators: Additional generators.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self._numpy = None if self._numpy_random is None else self._numpy_random.get_state()
        self._torch = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        self._accelerator = accelerator_in_use()
        self._devices = [] if self._accelerator is None else _states_of(self._accelerator)

    def put_back(self) -> None:
        """Restore the generators' states."""
        random.setstate(self._python)
        if self._numpy_random is not None:
            self._numpy_random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)
        for state, *device in self._devices:
            self._accelerator.set_rng_state(state, *device)


@contextmanager
def preserved_rng(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore every random number generator afterwards. See `RngState`.

    Args:
        generators: Additional generators to restore.
    """
    state = RngState(generators)
    try:
        yield
    finally:
        state.put_back()


def _states_of(accelerator: Any) -> list[tuple[Any, ...]]:
    """Return the state and the index of each device's generator. Metal's functions take no index."""
    if accelerator.device_count() == 1:
        return [(accelerator.get_rng_state(),)]
    return [(accelerator.get_rng_state(index), index) for index in range(accelerator.device_count())]
