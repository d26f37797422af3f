"""Encode an exception in one process, and decode it in another: the isolated process, or another rank."""

from __future__ import annotations

import itertools
import pickle
import traceback
from contextlib import suppress
from typing import Any

from autosplit.errors import AutosplitError, one_line


class InTheChildError(Exception):
    """The traceback of an unexpected exception in the other process, as the last cause of that exception."""


def encoded(error: BaseException) -> tuple[list[tuple[bytes, str]], str]:
    """Encode an exception for another process: the exception and its cause, pickled and as text, and its traceback.

    Errors of autosplit and KeyboardInterrupt have no traceback.
    """
    links: list[tuple[bytes, str]] = []
    for link in (error, error.__cause__):
        if link is not None:
            data = b""
            with suppress(Exception):  # an exception may have attributes that cannot be pickled
                data = pickle.dumps(link)
            links.append((data, one_line(link)))
    foreseen = isinstance(error, (AutosplitError, KeyboardInterrupt))
    return links, "" if foreseen else "".join(traceback.format_exception(error))


def decoded(links: list[tuple[bytes, str]], trace: str) -> BaseException:
    """Decode an exception and its cause. An exception that can't be unpickled becomes a RuntimeError with its text."""
    chain: list[BaseException] = []
    for data, text in links:
        error: Any = None
        with suppress(Exception):  # other arguments of __init__, or a module that only the other process has
            error = pickle.loads(data)  # noqa: S301  # by the process that we started
        chain.append(error if isinstance(error, BaseException) else RuntimeError(text))
    if trace:
        chain.append(InTheChildError(f"In the other process:\n{trace}"))
    for one, cause in itertools.pairwise(chain):
        one.__cause__ = cause
    return chain[0]
