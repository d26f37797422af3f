"""Compare `autosplit.measure_loader` with a full grid search: samples/s, and time.

python benchmarks/loader.py [FILE]

Three datasets: images to decode, many small files, and samples in memory. The grid has every number of workers up to
the number of cores, with 1, 2, 4 and 8 batches ahead. Each setting loads for `SECONDS` after its first batch. The
grid's figures also score the setting that `measure_loader` finds. Prints JSON, or writes it to FILE.
"""

from __future__ import annotations

import os
import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run, put
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autosplit
from autosplit.tools.loader_result import LoaderSettings

SECONDS = 5.0
"""Loading time of each setting after its first batch."""


class Files(Dataset[torch.Tensor]):
    """Samples of 4 KiB, one file each."""

    def __init__(self, folder: Path, samples: int = 4096) -> None:
        self.paths = [folder / f"{index}" for index in range(samples)]
        for path in self.paths:
            path.write_bytes(os.urandom(4096))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8).float()


def rate(dataset: Any, settings: LoaderSettings) -> float:
    """Return the samples/s of each setting over `SECONDS`, without the first batch of each epoch."""
    kept = {**settings.to_dict(), "persistent_workers": settings.num_workers > 0}
    loader = DataLoader(dataset, batch_size=32, shuffle=True, **kept)
    samples, seconds = 0, 0.0
    while seconds < SECONDS:
        iterator = iter(loader)
        next(iterator)
        began = time.perf_counter()
        for batch in iterator:
            samples += len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])
            if seconds + time.perf_counter() - began >= SECONDS:
                break
        seconds += time.perf_counter() - began
    return samples / seconds


def compared(name: str, dataset: Any, cores: int) -> dict[str, Any]:
    """Return the grid and the setting found, with the seconds of both."""
    began = time.perf_counter()
    found = autosplit.measure_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    found_s = time.perf_counter() - began
    settings = [LoaderSettings()]
    settings += [LoaderSettings(workers, ahead) for workers in range(1, cores + 1) for ahead in (1, 2, 4, 8)]
    began = time.perf_counter()
    grid = {(one.num_workers, one.prefetch_factor): rate(dataset, one) for one in settings}
    grid_s = time.perf_counter() - began
    taken = grid[found.settings.num_workers, found.settings.prefetch_factor]
    return {
        "data_set": name,
        "found": found.settings.to_dict(),
        "share_of_best": round(taken / max(grid.values()), 4),
        "share_of_time": round(found_s / grid_s, 4),
        "search_s": round(found_s, 2),
        "grid_s": round(grid_s, 2),
        "search_samples_per_s": round(found.samples_per_s, 1),
        "grid": [{"num_workers": w, "prefetch_factor": p, "samples_per_s": round(r, 1)} for (w, p), r in grid.items()],
    }


def main() -> None:
    """Compare on the three datasets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    compressed = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "loader.py"))["Compressed"]
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            "decoding": compressed(1024),
            "small files": Files(Path(folder)),
            "in memory": TensorDataset(torch.randn(16384, 64)),
        }
        results = [compared(name, dataset, cores) for name, dataset in sets.items()]
    answer = {
        **of_this_run(),
        "load": os.getloadavg()[0],
        "seconds_per_setting": SECONDS,
        "results": results,
    }
    put(answer)


if __name__ == "__main__":
    main()
