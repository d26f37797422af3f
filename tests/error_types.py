"""The classes of autosplit's errors, by the names that a traceback prints.

Only the base class is a public name. The tests find the others among its subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator

import autosplit


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


_ = autosplit.OutOfMemoryError  # loads the module that defines this class and `DoesNotFitError`
_FOUND = {kind.__name__: kind for kind in _with_subclasses(autosplit.AutosplitError)}

CheckpointError = _FOUND["CheckpointError"]
DeviceError = _FOUND["DeviceError"]
DoesNotFitError = _FOUND["DoesNotFitError"]
InputError = _FOUND["InputError"]
PlanError = _FOUND["PlanError"]
RankFailedError = _FOUND["RankFailedError"]
UserCodeError = _FOUND["UserCodeError"]
WorkloadError = _FOUND["WorkloadError"]
