"""The random number generators of this process: put back to where they were, or held at an end of their range."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autosplit.accelerators import accelerator_in_use

HIGHEST, LOWEST = 1 - 2**-24, 0.0
"""The ends of what `torch.rand` draws in float32."""

MOST_DRAWS = 1000
"""Draws of a step after which they are left as they are: somebody may wait for one that he likes."""


class ExtremeDraws:
    """The numbers that a model draws to decide by, all of them the highest, or all the lowest there is.

    A model that leaves out layers at random holds the most when it leaves out none: with which end of the range that
    is, only a step at each tells.

    Attributes:
        number: The end that is drawn.
        count: Draws of the last step.
    """

    def __init__(self) -> None:
        self.number = HIGHEST
        self.count = 0

    def turn(self) -> None:
        """Draw the other end from now on."""
        self.number = LOWEST if self.number == HIGHEST else HIGHEST

    def draw(self) -> float | None:
        """Return the number; None where so many were drawn that it is left to chance again."""
        self.count += 1
        return self.number if self.count <= MOST_DRAWS else None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Begin a step, in which Python's `random.random` draws it, too."""
        self.count, by_chance = 0, random.random

        def draw() -> float:
            number = self.draw()
            return by_chance() if number is None else number

        random.random = draw
        try:
            yield
        finally:
            random.random = by_chance


class RngState:
    """The state of every random number generator: Python's, NumPy's if loaded, torch's, the accelerator's.

    Args:
        generators: Others, too.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self._numpy = None if self._numpy_random is None else self._numpy_random.get_state()
        self._torch = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        self._accelerator = accelerator_in_use()
        self._devices = [] if self._accelerator is None else _states_of(self._accelerator)

    def put_back(self) -> None:
        """Put the generators back to where they were."""
        random.setstate(self._python)
        if self._numpy_random is not None:
            self._numpy_random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)
        for state, *device in self._devices:
            self._accelerator.set_rng_state(state, *device)


@contextmanager
def kept_rng(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put every random number generator back to where it was, see `RngState`.

    Args:
        generators: Others to be put back, too.
    """
    state = RngState(generators)
    try:
        yield
    finally:
        state.put_back()


def _states_of(accelerator: Any) -> list[tuple[Any, ...]]:
    """Return the state of each device's generator, and which device it is; Metal's functions take none."""
    if accelerator.device_count() == 1:
        return [(accelerator.get_rng_state(),)]
    return [(accelerator.get_rng_state(index), index) for index in range(accelerator.device_count())]
