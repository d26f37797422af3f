"""Marks of single parameters, and whether this run is for a release."""

from __future__ import annotations

import os
from typing import Any

import pytest

FOR_RELEASE = bool(os.environ.get("AUTOSPLIT_RELEASE"))
"""Whether this run also has the tests, and the numbers of repeats, that only a release needs."""


def slow(*values: Any) -> Any:
    """Leave a test with these values to the slow ones, where another parameter shows the same quickly."""
    return pytest.param(*values, marks=pytest.mark.slow)


def for_release(*values: Any) -> Any:
    """Run a test with these values only if `AUTOSPLIT_RELEASE` is set. Other values of it run in every slow stage."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.release])
