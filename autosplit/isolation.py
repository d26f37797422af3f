"""Run something in a process of its own, which a crash ends instead of this one."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from autosplit.errors import AutosplitError, InputError

__all__ = ["in_child"]

T = TypeVar("T")


def in_child(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a spawned process and return what it returns.

    Args:
        function: Importable, as its arguments are picklable.
        *args: Its arguments.

    Raises:
        InputError: Something can't be sent to the process.
        AutosplitError: The process died (a crash in a kernel, the system's out-of-memory killer).
        Exception: Whatever the function raised there.
    """
    try:
        pickle.dumps((function, args))
    except Exception as error:  # noqa: BLE001  # pickling runs the objects' own code, which may raise anything
        raise InputError(
            f"isolate=True and the workload can't be pickled ({type(error).__name__}: {error}); expected a workload "
            "made of importable functions and classes; define them in a module, or leave isolate out"
        ) from None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise AutosplitError(
                "the tuning process died without an answer: a crash in a kernel, or the system's out-of-memory killer; "
                "see the system's log, and try a smaller max_batch_size"
            ) from error
