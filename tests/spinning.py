"""A back end that waits like NCCL: forever and without an error, if a rank does not come.

It sends with gloo. Each collective runs in a thread, and the caller polls for its end, like waiting for a GPU's stream.
Only `abort` ends the wait, without an error. gloo's own time-out ends its thread, so that the group can be destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

NAME = "spinning"


class _Done(dist.Work):  # type: ignore[misc]
    """A collective that has ended."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


def _has_succeeded(work: Any) -> bool:
    try:
        return bool(work.is_completed() and work.wait())
    except RuntimeError:  # gloo's time-out
        return False


class Spinning(dist.ProcessGroup):  # type: ignore[misc]
    """The group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=15))
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        assert self.aborted or not self.waits, "a group in use is destroyed"

    waits = False

    def _run(self, start: Callable[[], Any], tensors: Any) -> _Done:
        if not self.aborted:
            work, self.waits = start(), True
            while not (_has_succeeded(work) or self.aborted):
                time.sleep(0.002)
            self.waits = False
        return _Done(tensors)

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        return self._run(lambda: self._gloo.allreduce(tensors, *options), tensors)

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        return self._run(lambda: self._gloo.broadcast(tensors, *options), tensors)

    def allgather(self, outputs: Any, tensors: Any, *options: Any) -> Any:
        return self._run(lambda: self._gloo.allgather(outputs, tensors, *options), outputs)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name


def register() -> None:
    """Register the back end with torch, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Spinning, devices=["cpu"])
