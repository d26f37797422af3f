"""Expect an error of autosplit by its code, so that a test need not quote the message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(kind: type[Exception], code: str, *values: str) -> Iterator[Any]:
    """Expect an error of this class and code, whose message contains these values.

    Yields:
        The result of `pytest.raises`.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"the code is {error.code!r}: {error}"
    missing = [value for value in values if value not in str(error)]
    assert not missing, f"{missing} are missing in: {error}"
