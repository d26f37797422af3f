"""Check whether splitting changes the state that a forward leaves in buffers: memory banks, codebooks, expert loads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from autosplit.probe.check_result import Check
from autosplit.torch_versions import NORMS

State = dict[str, Tensor]
"""Buffers that a run changed: new values by path."""

_MOST_NAMES = 3


def lost_names(whole: State, split: State, modules: Sequence[tuple[str, nn.Module]], tolerance: float) -> list[str]:
    """Return the names of buffers that differ after a forward of the whole batch and one of the split batch.

    Buffers of BatchNorm and InstanceNorm are left out.
    """
    norms = tuple(f"{path}." for path, module in modules if isinstance(module, NORMS))
    names = [name for name in whole if not name.startswith(norms)]
    return [name for name in names if _difference(whole[name], split.get(name)) > tolerance]


def state_check(names: Sequence[str], whole: State, cut: Sequence[State]) -> Check:
    """Return the check result for the buffers that `lost_names` returned.

    Args:
        whole: The buffers after the whole batch.
        cut: The buffers after the batch is split over devices and, if that is run, after it is accumulated.
    """
    errors = [max(_difference(whole[name], state.get(name)) for name in names) for state in cut]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return Check(
        f"state in {', '.join(names[:_MOST_NAMES])}{more}",
        errors[0],
        errors[1] if len(errors) > 1 else None,
        depends=True,
        advice="The forward updates these buffers. With several devices, only the update from device 0 (with DDP: "
        "from rank 0) may be kept. Return the values that the update needs from the forward, and update the "
        "buffers after optimizer.step().",
    )


def _difference(whole: Tensor, cut: Tensor | None) -> float:
    """Return ``|cut - whole| / |whole|``, 1 if the buffer was not changed, 0 if the shapes can't be compared."""
    if cut is None:
        return 1.0
    if cut.shape != whole.shape or whole.is_complex():
        return 0.0
    size = float(whole.double().norm())
    error = float((cut.double() - whole.double()).norm())
    found = error / size if size else error
    return found if math.isfinite(found) else 0.0
