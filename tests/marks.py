"""Marks for single parameters, and whether this run is for a release."""

from __future__ import annotations

import os
from typing import Any

import pytest

FOR_RELEASE = bool(os.environ.get("AUTOSPLIT_RELEASE"))
"""Whether this run includes tests and repetitions that only a release needs."""


def slow(*values: Any) -> Any:
    """Mark a test with these values as slow, because another parameter shows the same more quickly."""
    return pytest.param(*values, marks=pytest.mark.slow)


def whole(*values: Any) -> Any:
    """Leave a test with these values out of the tests of the core alone, because it needs `sim`, for example."""
    return pytest.param(*values, marks=pytest.mark.whole)


def for_release(*values: Any) -> Any:
    """Run a test with these values only if `AUTOSPLIT_RELEASE` is set. Other values of it run in every slow stage."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.release])
