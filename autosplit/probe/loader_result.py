"""The results of measuring a DataLoader: its fastest settings, and how many samples/s each that was tried loads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autosplit.notes import Note


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of a DataLoader that change how fast it loads, and nothing of its batches.

    Attributes:
        num_workers: Processes that load; with 0 the training process loads, and its step waits for that.
        prefetch_factor: Batches that each worker loads ahead; None without workers.
        pin_memory: Batches are put into memory from which copies to a GPU are asynchronous.
        persistent_workers: Workers outlive an epoch, so that only the first waits for their start.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return them as keyword arguments of ``torch.utils.data.DataLoader``."""
        return asdict(self)


@dataclass(frozen=True)
class TimedLoader:
    """Settings with the samples/s that were measured.

    Attributes:
        settings: The settings.
        samples_per_s: Samples per second that arrive where nothing is done with them, once the workers run.
        error_share: Standard error of that, as a share of it.
        start_s: Seconds to the first batch, the start of the workers included.
    """

    settings: LoaderSettings
    samples_per_s: float
    error_share: float
    start_s: float


@dataclass(frozen=True)
class MeasuredLoader:
    """The fastest settings of a loader.

    Attributes:
        settings: The ones with the fewest workers of those within 5 % of the fastest.
        samples_per_s: Samples per second that it loads with them, in one process.
        present: The loader's own settings, as far as they mean anything on this machine.
        present_samples_per_s: Samples per second with them; None where they were not measured: there are more workers
            than cores for them, or the time was up.
        first_pass_samples_per_s: Samples per second of the very first pass over what was measured, in one process
            without workers; to be compared with the first of `tried`, which read the same once more.
        processes: Processes of this machine that load at the same time and share its cores.
        cores: The cores that this process may use.
        tried: All that was measured, in that order.
        notes: What there is to say of it, a sentence each.
    """

    settings: LoaderSettings
    samples_per_s: float
    present: LoaderSettings
    present_samples_per_s: float | None
    first_pass_samples_per_s: float
    processes: int
    cores: int
    tried: tuple[TimedLoader, ...]
    notes: tuple[Note, ...]
