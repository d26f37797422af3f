"""Expect an error of autosplit by its class and the values in its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(kind: type[Exception], *values: str) -> Iterator[Any]:
    """Expect an error of this class, whose message or code contains these values.

    Yields:
        The result of `pytest.raises`.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    missing = [value for value in values if value not in str(error) and value != error.code]
    assert not missing, f"{missing} are missing in: {error}"
