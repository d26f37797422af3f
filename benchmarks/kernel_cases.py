"""Collect the cases that `cuda_kernels.py` traces, and select some of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from kernel_attention import attention_cases
from kernel_case import Case
from kernel_language_models import language_cases
from kernel_modules import module_cases
from kernel_vision_models import load_torchvision, vision_cases


def all_cases() -> Iterator[Case]:
    """Yield every case, modules first."""
    load_torchvision()
    yield from attention_cases()
    yield from module_cases()
    yield from language_cases()
    yield from vision_cases()


def chosen_cases(patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose names match one of the shell patterns; without patterns, all cases."""
    # The names contain brackets, which patterns treat as sets of characters.
    escaped = [pattern.replace("[", "[[]") for pattern in patterns]
    return [case for case in all_cases() if not patterns or any(fnmatchcase(case.name, one) for one in escaped)]
