"""Shorten the repeated timing of steps in tests that do not check times."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUDGETS = {
    "autosplit.tuning.survey": ("POINT_BUDGET_S", "TRIAL_BUDGET_S"),
    "autosplit.tuning.rank_survey": ("POINT_BUDGET_S",),
    "autosplit.tuning.search": ("TRIAL_BUDGET_S",),
    "autosplit.tuning.measure": ("POINT_BUDGET_S", "TRIAL_BUDGET_S"),
    "autosplit.tools.tune_lengths": ("TRIAL_BUDGET_S",),
    "autosplit.tuning.recall": ("STEP_BUDGET_S",),
    "autosplit.probe.ceilings": ("DOUBLING_BUDGET_S",),
}
"""The names of the budgets in each module that imports them."""

SHORT_S = 0.01
"""A step is still repeated three times (`MIN_REPEATS`)."""


@contextmanager
def short_budgets() -> Iterator[None]:
    """Shorten all budgets in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in BUDGETS.items():
            for name in names:
                if importlib.util.find_spec(module.rpartition(".")[0]) is not None:  # the core alone has no tools
                    patch.setattr(importlib.import_module(module), name, SHORT_S)
        yield
