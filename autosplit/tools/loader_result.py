"""Define the results of measuring a DataLoader: its fastest settings, and the throughput of all tried settings."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.notes import Note
from autosplit.plan.loader_settings import LoaderSettings


@dataclass(frozen=True)
class TimedLoader:
    """Settings of a DataLoader with their measured throughput.

    Attributes:
        settings: The settings.
        samples_per_s: Samples per second while the workers run, if the batches are not used.
        error_share: Standard error of the throughput, as a fraction of the throughput.
        start_s: Time to the first batch in seconds, including the start of the workers.
    """

    settings: LoaderSettings
    samples_per_s: float
    error_share: float
    start_s: float


@dataclass(frozen=True)
class MeasuredLoader:
    """The fastest settings of a data loader.

    Attributes:
        settings: The settings with the smallest number of workers among those within 5% of the fastest.
        samples_per_s: Throughput with these settings, in one process.
        present: The loader's own settings, without those that have no effect on this machine.
        present_samples_per_s: Throughput with the loader's own settings. None if it was not measured, because there are
            more workers than cores or the time was up.
        first_pass_samples_per_s: Throughput of the very first pass over the measured samples, in one process without
            workers. Compare it with the first entry of `tried`, which read the same samples again.
        processes: Number of processes of this machine that load at the same time and share its cores.
        cores: Number of cores that this process may use.
        tried: All settings that were measured, in this order.
        notes: Remarks on the measurement.
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
