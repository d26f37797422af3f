"""The random number generators of this process, put back to where they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_rng"]


@contextmanager
def kept_rng(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put every random number generator back to where it was: Python's, NumPy's if loaded, torch's, CUDA's.

    Args:
        generators: Others to be put back, too.
    """
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    others = [(generator, generator.get_state()) for generator in generators]
    cuda_devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda_devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None and numpy_state is not None:
                numpy.random.set_state(numpy_state)
            for generator, state in others:
                generator.set_state(state)
