"""Compare the settings that must be equal on all ranks, at the first step of a loop."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from torch.utils.data import SubsetRandomSampler

from autosplit.ddp.device import gathered_objects
from autosplit.errors import InputError, shown
from autosplit.parallel.batch_sampler import ScheduledBatchSampler

_ADVICE = {
    "seed": "Pass the same seed on every rank, because each rank takes its part of one common order",
    "epoch": "Call set_epoch with the same number on every rank",
    "samples_consumed": "Load the same checkpoint on every rank",
    "num_samples": "Pass the length of the whole data set on every rank. The sampler divides it among the ranks",
    "data set size": "Give every rank the whole data set. The sampler divides it among the ranks",
}


class Settings(NamedTuple):
    """The settings of a loop over a loader.

    Attributes:
        common: Settings that must be equal on all ranks, by name.
        chosen: A digest of the samples that a SubsetRandomSampler chooses. It must differ between the ranks.
    """

    common: dict[str, Any]
    chosen: str | None = None


def settings_of(loader: Any, **options: Any) -> Settings:
    """Return the settings of a loop over a loader."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ScheduledBatchSampler):
        return Settings({"loader": "a loader without ctx.batch_sampler", **options}, _chosen_samples(loader))
    dataset: Any = getattr(loader, "dataset", None)
    size = {"data set size": len(dataset)} if hasattr(dataset, "__len__") else {}
    return Settings({"loader": "a loader with ctx.batch_sampler", **sampler.common_facts(), **size, **options})


def _chosen_samples(loader: Any) -> str | None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, SubsetRandomSampler):
        return None
    return hashlib.sha256(repr(sorted(map(int, sampler.indices))).encode()).hexdigest()


def require_equal_settings(settings: Settings) -> None:
    """Raise InputError on all ranks if the common settings differ, or if two ranks chose the same samples."""
    found = gathered_objects(tuple(settings))
    everyones, choices = [common for common, _ in found], [chosen for _, chosen in found if chosen is not None]
    if len(set(choices)) < len(choices):
        raise InputError(
            "The loader has a SubsetRandomSampler with the same samples on several ranks, so each rank would train on "
            "all of them. Expected only this rank's part. Pass ctx.loader(Subset(dataset, sampler.indices)).",
        )
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
    )


def _by_rank(values: list[Any]) -> str:
    """Return "7 on rank 0, 8 on ranks 1, 2" for the values 7, 8 and 8."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shown(value), []).append(str(rank))
    return ", ".join(f"{value} on rank{'s' * (len(held) > 1)} {', '.join(held)}" for value, held in ranks.items())
