"""Waiting for an event that another thread or process causes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], limit_s: float = 250.0) -> None:
    """Wait until a condition holds, and fail if it does not hold within the limit, which suits a busy machine."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"the event did not happen within {limit_s} s"
        time.sleep(0.01)
