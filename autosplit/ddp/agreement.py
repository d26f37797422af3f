"""Compare the settings that must be equal on all ranks, at the first step of a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosplit.ddp.device import told_by_all
from autosplit.errors import InputError, shown
from autosplit.parallel.batch_sampler import ScheduledBatchSampler

_ADVICE = {
    "seed": "Pass the same seed on every rank, because each rank takes its part of one common order",
    "epoch": "Call set_epoch with the same number on every rank",
    "samples_consumed": "Load the same checkpoint on every rank",
    "num_samples": "Pass the length of the whole data set on every rank. The sampler divides it among the ranks",
    "data set size": "Give every rank the whole data set. The sampler divides it among the ranks",
}


def settings_of(loader: Any, **options: Any) -> dict[str, Any]:
    """Return the settings of a loop over a loader that must be equal on all ranks, by name."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ScheduledBatchSampler):
        return {"loader": "a loader without ctx.batch_sampler", **options}
    dataset: Any = getattr(loader, "dataset", None)
    size = {"data set size": len(dataset)} if hasattr(dataset, "__len__") else {}
    return {"loader": "a loader with ctx.batch_sampler", **sampler.common_facts(), **size, **options}


def require_equal_settings(settings: Mapping[str, Any]) -> None:
    """Raise InputError on all ranks if the settings of any rank differ from rank 0's."""
    everyones = told_by_all(dict(settings))
    if all(one == everyones[0] for one in everyones):
        return
    every_name = dict.fromkeys(name for one in everyones for name in one)
    names = [name for name in every_name if len({repr(one.get(name)) for one in everyones}) > 1]
    held = "; ".join(f"{name} is {_by_rank([one.get(name) for one in everyones])}" for name in names)
    advice = next(
        (_ADVICE[name] for name in names if name in _ADVICE), "Call ctx.steps with the same arguments on every rank"
    )
    raise InputError(
        f"The ranks' settings of this loop differ: {held}. Expected equal settings on all ranks. {advice}.",
        code="ranks-disagree",
    )


def _by_rank(values: list[Any]) -> str:
    """Return "7 on rank 0, 8 on ranks 1, 2" for the values 7, 8 and 8."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shown(value), []).append(str(rank))
    return ", ".join(f"{value} on rank{'s' * (len(held) > 1)} {', '.join(held)}" for value, held in ranks.items())
