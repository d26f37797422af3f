"""Compare methods that find the largest batch that fits: autosplit, Lightning, accelerate and brute force.

    pip install -e ".[benchmarks]"
    python benchmarks/ceilings.py [--quick] [--only NAME ...] [--output benchmarks/results/ceilings.json]

Every method runs the same training step on a device with an enforced memory budget. Each gets a copy of the same
workload, with optimizer state. Lightning's and accelerate's own code chooses the sizes. If a step runs out of memory,
it raises an error that they recognise. Steps are counted when they begin, in autosplit's search, too. On the CPU,
autosplit also runs steps of few samples, which predict the memory of larger steps.

With a GPU, the comparison is repeated at four memory limits.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from startup import processor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architectures import ARCHITECTURES, BUDGETS, OPTIMIZERS

from autosplit import Workload, find_ceiling, parse_devices
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import preserved_rng
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import run_placed
from autosplit.runtime.trainee import Trainee
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.fake_trainee import FakeTrainee
from autosplit.sim.simulated import traced_peaks
from autosplit.sim.tracer import make_tracer
from autosplit.solve.memory import largest_fitting

THREADS = 1
MIB = 2**20
MOST = 4096
"""Largest size that is tried on a CPU."""
GPU_MOST = 32768
"""Largest size that is tried on a GPU, which has larger limits."""
REAL_MOST = 512
"""Largest size of traces with real tensors, for models that fake tensors cannot trace."""
LARGE = 1 / 8
"""A step is large if its size is at least this share of the ceiling."""
NEIGHBOURS = 4
"""Brute force also runs this many sizes on each side of the ceiling."""
STEPS_PER_TRIAL = 3
"""Lightning's default."""
FIRST_GUESS = 256
"""Start of accelerate's search, above every ceiling here. Its own default, 128, would hide some ceilings."""
GPU_CAPS_GIB = (0.25, 0.5, 1, 2)
GPU_TOLERANCE = 0.02
"""On a GPU, allocator blocks and size-dependent kernels make the limit less sharp."""

Step = Callable[[int], None]


# Counting


@dataclass
class Meter:
    """Counts real training steps.

    Attributes:
        samples: Samples of each step that was started.
        ooms: Number of steps that ran out of memory.
        seconds: Wall time of the search.
    """

    samples: list[int] = field(default_factory=list)
    ooms: int = 0
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the steps that run in this context."""
        real = Trainee.step

        @functools.wraps(real)
        def step(trainee: Trainee, models: Any, batches: Any, sizes: Any, *rest: Any, **options: Any) -> None:
            if isinstance(trainee, FakeTrainee):
                return real(trainee, models, batches, sizes, *rest, **options)
            self.samples.append(sum(sizes))
            try:
                return real(trainee, models, batches, sizes, *rest, **options)
            except RuntimeError as error:
                self.ooms += is_oom(error)
                raise

        gc.collect()  # left from an earlier search
        start = time.perf_counter()
        with mock.patch.object(Trainee, "step", step):
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - start

    def row(self, answer: int | None, ceiling: int) -> dict[str, Any]:
        """Return the columns of a search.

        Args:
            answer: The size found, or None.
            ceiling: The true ceiling.
        """
        return {
            "answer": answer,
            "of_ceiling": None if answer is None else round(answer / ceiling, 4),
            "steps": len(self.samples),
            "samples": sum(self.samples),
            "large_steps": sum(n >= LARGE * ceiling for n in self.samples),
            "ooms": self.ooms,
            "seconds": round(self.seconds, 4),
        }


# The step


@dataclass(frozen=True)
class Case:
    """An architecture with an optimizer on a device with a memory budget.

    Attributes:
        name: Name of the architecture.
        optimizer: A key of `OPTIMIZERS`.
        budget_bytes: Memory budget of the device.
        gpu: True for a GPU.
    """

    name: str
    optimizer: str
    budget_bytes: int
    gpu: bool = False

    def workload(self) -> Workload:
        """Build the workload, with the same weights each time."""
        torch.manual_seed(0)
        return ARCHITECTURES[self.name](OPTIMIZERS[self.optimizer])

    @property
    def most(self) -> int:
        """Return the largest size that is tried."""
        return GPU_MOST if self.gpu else MOST

    def __str__(self) -> str:
        """Name the case."""
        return f"{self.name}, {self.optimizer}, {self.budget_bytes / MIB:g} MiB"


def shape_of(n: int) -> StepShape:
    """Return the step that `find_ceiling` checks by default: a DDP rank's, in a job of several ranks."""
    return StepShape(((n,),), "rank", num_ranks=2)


def step_of(case: Case, closing: ExitStack) -> Step:
    """Return a training step for a number of samples. It raises if the device runs out of memory.

    On a GPU it runs three steps, because the allocator's peak is steady in the third.
    """
    if case.gpu:
        worker = AcceleratorWorker(parse_devices("cuda:0"), (case.budget_bytes,), case.workload())
        closing.callback(worker.close)
        return lambda n: void(worker.peaks(shape_of(n)))
    trainee = training_copy(case.workload(), device=torch.device("cpu"))

    def step(n: int, capacity_bytes: int | None = case.budget_bytes) -> None:
        gc.collect(1)
        with preserved_rng():
            run_placed(trainee, shape_of(n), Tracker(["cpu:0"], [capacity_bytes]), void)

    step(2, None)  # creates optimizer state
    return step


def void(_value: object) -> None:
    """Drop a value."""


def runs(step: Step, n: int) -> bool:
    """Return whether a step fits in memory."""
    try:
        step(n)
    except OutOfMemoryError:
        return False
    return True


# The rivals


def brute_force(step: Step, most: int, start: int = 64) -> tuple[int, bool]:
    """Find the ceiling by running all sizes that could decide it.

    Args:
        step: The step.
        most: The largest size to try.
        start: The first size.

    Returns:
        The largest size that fits, and whether the limit is sharp. It is sharp if all sizes just below it fit and all
        sizes just above it do not.
    """
    low, high = 0, most + 1
    n = start
    while high - low > 1:
        low, high = (n, high) if runs(step, n) else (low, n)
        n = min(2 * low, most) if high > most else (low + high) // 2
    near = {n: runs(step, n) for n in range(max(2, low - NEIGHBOURS), min(most, low + NEIGHBOURS) + 1)}
    found = max((n for n, ran in near.items() if ran), default=low)
    return found, found == low and all(ran == (n <= low) for n, ran in near.items())


def predicted(case: Case) -> int | None:
    """Find the ceiling from traces only. Return None if it is above the largest traced size."""
    workload = case.workload()
    tracer, _ = make_tracer(workload, like_gpu=case.gpu)
    most = case.most if tracer.fake else min(case.most, REAL_MOST)

    def peak_bytes(n: int) -> int:
        return traced_peaks(tracer, shape_of(n))[0]

    found = largest_fitting(peak_bytes, case.budget_bytes, least=0, most=most, start=workload.sample_batch_size)
    return found if found < most else None


def ours(case: Case) -> int:
    """Find the ceiling with the public function."""
    if case.gpu:
        (device,) = parse_devices("cuda:0")
        reserve = device.capacity_bytes - case.budget_bytes
        return find_ceiling(case.workload(), "cuda:0", reserve=reserve, max_batch_size=case.most).batch_size
    return find_ceiling(case.workload(), f"cpu:{case.budget_bytes}B", max_batch_size=case.most).batch_size


def told(step: Step, n: int) -> None:
    """Run a step. Convert its out-of-memory error to the form that Lightning and accelerate recognise.

    Raises:
        RuntimeError: The step ran out of memory.
    """
    message = None
    try:
        step(n)
    except OutOfMemoryError as error:
        message = f"CUDA out of memory. {error}"
    if message is not None:
        raise RuntimeError(message)  # outside the except block, whose traceback keeps tensors alive


def by_lightning(step: Step, mode: str, steps_per_trial: int, most: int) -> int | None:
    """Find the ceiling with Lightning's batch size finder.

    Args:
        step: The step that its training step runs.
        mode: ``"power"`` or ``"binsearch"``. The latter subtracts Lightning's default margin of 5%.
        steps_per_trial: Lightning's argument of that name.
        most: The largest size to try.
    """
    pl = importlib.import_module("lightning.pytorch")
    tuner = importlib.import_module("lightning.pytorch.tuner")
    numbers = torch.arange(4 * most)

    class Asked(pl.LightningModule):  # type: ignore[misc, name-defined]
        """A module that runs our step. It has an optimizer because Lightning counts optimizer steps."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.batch_size = 2
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: torch.Tensor, _index: int) -> None:
            """Run the step with as many samples as the batch has."""
            told(step, len(batch))
            self.optimizers().step()

        def train_dataloader(self) -> Any:
            """Return batches of the tried size."""
            return torch.utils.data.DataLoader(numbers, batch_size=self.batch_size)

        def configure_optimizers(self) -> Any:
            """Return an optimizer that does nothing."""
            return torch.optim.SGD(self.parameters(), lr=0.0)

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        found = tuner.Tuner(trainer).scale_batch_size(Asked(), mode=mode, steps_per_trial=steps_per_trial, max_val=most)
    return None if found is None else int(found)


def by_accelerate(step: Step, start: int) -> int | None:
    """Find the ceiling with accelerate's decorator. The training that it repeats is one step here.

    Args:
        step: The step.
        start: The first size. It descends from there.
    """
    memory = importlib.import_module("accelerate.utils.memory")

    def training(batch_size: int) -> int:
        told(step, batch_size)
        return batch_size

    try:
        return int(memory.find_executable_batch_size(training, starting_batch_size=start)())
    except RuntimeError as error:
        if "No executable batch size found" not in str(error):
            raise
        return None


# Cases


def searched(case: Case, ceiling: int) -> dict[str, dict[str, Any]]:
    """Run every method, each on its own copy of the workload.

    Setting up is not counted for the rivals. It is counted for autosplit.

    Returns:
        The columns of each method.
    """
    rows = {}

    def enter(name: str, search: Callable[[], int | None]) -> None:
        meter = Meter()
        with meter.running():
            answer = search()
        rows[name] = meter.row(answer, ceiling)

    def enter_rival(name: str, search: Callable[[Step], int | None]) -> None:
        with ExitStack() as closing:
            step = step_of(case, closing)
            enter(name, lambda: search(step))

    enter("ours", lambda: ours(case))
    enter("prediction_alone", lambda: predicted(case))
    trial = 1 if case.gpu else STEPS_PER_TRIAL
    enter_rival("lightning_binsearch", lambda step: by_lightning(step, "binsearch", trial, case.most))
    enter_rival("lightning_power", lambda step: by_lightning(step, "power", trial, case.most))
    enter_rival("accelerate", lambda step: by_accelerate(step, case.most if case.gpu else FIRST_GUESS))
    for row in rows.values():
        row["times_ours"] = round(row["seconds"] / rows["ours"]["seconds"], 3)
    return rows


def measured_case(case: Case) -> dict[str, Any]:
    """Measure a case. Return its description, its true ceiling, and the columns of each method."""
    with ExitStack() as closing:
        meter = Meter()
        step = step_of(case, closing)
        with meter.running():
            ceiling, sharp = brute_force(step, case.most)
    assert 0 < ceiling < case.most, (str(case), ceiling)
    row = {**meter.row(ceiling, ceiling), "sharp": sharp}
    return {
        "architecture": case.name,
        "optimizer": case.optimizer,
        "budget_bytes": case.budget_bytes,
        "ceiling": ceiling,
        "brute_force": row,
        **searched(case, ceiling),
    }


def cases(names: list[str], quick: bool) -> list[Case]:
    """Return every architecture with each of its budgets, and spread the optimizers over them."""
    optimizers = list(OPTIMIZERS)
    return [
        Case(name, optimizers[(i + j) % len(optimizers)], int(budget * MIB))
        for i, name in enumerate(ARCHITECTURES)
        for j, budget in enumerate(BUDGETS[name])
        if name in names and (not quick or j == 1)
    ]


def gpu_cases(names: list[str], quick: bool) -> list[Case]:
    """Return every architecture at each memory limit."""
    optimizers = list(OPTIMIZERS)
    return [
        Case(name, optimizers[(i + j) % len(optimizers)], int(cap * 2**30), gpu=True)
        for i, name in enumerate(ARCHITECTURES)
        for j, cap in enumerate(GPU_CAPS_GIB)
        if name in names and (not quick or j == 1)
    ]


# Claims


def claim(text: str, figure: float, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    """Return a claim with its figure, its limit, and whether it holds."""
    holds = figure >= limit if at_least else figure <= limit
    return {"claim": text, "figure": round(figure, 4), "limit": limit, "holds": holds}


def of_exact_mode(found: list[dict[str, Any]], column: str) -> list[float]:
    """Return the ratio of autosplit's column to Lightning's exact mode, for each case."""
    return [case["ours"][column] / case["lightning_binsearch"][column] for case in found]


def claims(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims about the CPU cases."""
    rows = [case["ours"] for case in found]
    return [
        claim(
            "share of cases with the exact ceiling",
            statistics.mean(row["of_ceiling"] == 1 for row in rows),
            1.0,
            at_least=True,
        ),
        claim("share of cases without OOM", statistics.mean(not row["ooms"] for row in rows), 0.95, at_least=True),
        claim("OOMs in a case, maximum", max(row["ooms"] for row in rows), 1),
        claim("steps at 1/8 of the ceiling or more, median", statistics.median(row["large_steps"] for row in rows), 5),
        claim("steps at 1/8 of the ceiling or more, maximum", max(row["large_steps"] for row in rows), 8),
        claim(
            "samples run, as a share of Lightning's exact mode, median",
            statistics.median(of_exact_mode(found, "samples")),
            0.25,
        ),
        claim(
            "wall time, as a share of Lightning's exact mode, median",
            statistics.median(of_exact_mode(found, "seconds")),
            0.25,
        ),
    ]


def gpu_claims(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims about the GPU cases."""
    rows = [case["ours"] for case in found]
    return [
        claim(
            f"largest distance from brute force, at most {GPU_TOLERANCE:.0%}",
            max(abs(row["of_ceiling"] - 1) for row in rows),
            GPU_TOLERANCE,
        ),
        claim("OOMs, median", statistics.median(row["ooms"] for row in rows), 0),
    ]


RIVALS = ("ours", "prediction_alone", "lightning_binsearch", "lightning_power", "accelerate", "brute_force")


def medians(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the median of each column for each method, and how often the method found the exact ceiling."""
    table = {}
    for rival in RIVALS:
        rows = [case[rival] for case in found]
        columns = [name for name in rows[0] if name not in ("answer", "sharp")]
        known = {name: [row[name] for row in rows if row[name] is not None] for name in columns}
        table[rival] = {name: round(statistics.median(values), 4) for name, values in known.items() if values}
        table[rival]["exact_share"] = round(statistics.mean(row["of_ceiling"] == 1 for row in rows), 4)
        table[rival]["most_ooms"] = max(row["ooms"] for row in rows)
    return table


def errors_of(found: list[dict[str, Any]], rival: str) -> dict[str, float]:
    """Return the distance of a method's results from the ceilings, as shares. Missing results are left out."""
    shares = [abs(case[rival]["of_ceiling"] - 1) for case in found if case[rival]["of_ceiling"] is not None]
    return {"median": round(statistics.median(shares), 4), "most": round(max(shares), 4)} if shares else {}


def beyond(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases that are wrong or over the limits on cost, with their costs."""
    out = []
    for case in found:
        row, theirs = case["ours"], case["lightning_binsearch"]
        shares = {name: round(row[name] / theirs[name], 3) for name in ("samples", "seconds")}
        if row["of_ceiling"] != 1 or row["ooms"] or row["large_steps"] > 5 or max(shares.values()) > 0.25:
            out.append({"case": [case["architecture"], case["optimizer"], case["ceiling"]], "of_exact_mode": shares})
            out[-1] |= {name: row[name] for name in ("answer", "ooms", "large_steps")}
    return out


def table_of(chosen: list[Case], judge: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> dict[str, Any]:
    """Measure the cases and check the claims."""
    found = []
    for case in chosen:
        found.append(measured_case(case))
        print(line_of(case, found[-1]), flush=True)
    unsharp = [[case["architecture"], case["ceiling"]] for case in found if not case["brute_force"]["sharp"]]
    return {
        "run": True,
        "claims": judge(found),
        "medians": medians(found),
        "prediction_alone_off_by": errors_of(found, "prediction_alone"),
        "edges_not_sharp": unsharp,
        "beyond_the_limits": beyond(found),
        "cases": found,
    }


def line_of(case: Case, found: dict[str, Any]) -> str:
    """Return one line about a case."""
    parts = []
    for rival in RIVALS[:-1]:
        row = found[rival]
        parts.append(f"{rival} {row['answer']} ({row['steps']} steps, {row['ooms']} OOMs, {row['seconds']:.2f} s)")
    return f"{case}: {found['ceiling']}; " + ", ".join(parts)


# Command line


def warmed_up() -> None:
    """Import the methods' libraries, and freeze garbage collection: all methods collect garbage."""
    warnings.filterwarnings("ignore")
    for name in ("transformers", "optuna", "accelerate.utils.memory", "lightning.pytorch.tuner"):
        importlib.import_module(name)
    importlib.import_module("transformers").logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    fake_mode()
    case = Case("halting", "sgd", 4 * MIB)
    measured_case(case)
    gc.collect()
    gc.freeze()


def measured(names: list[str], quick: bool) -> dict[str, Any]:
    """Measure everything, with the machine, the versions and the date."""
    torch.set_num_threads(THREADS)
    warmed_up()
    figures: dict[str, Any] = {
        "step": "the training step of a DDP rank in a job of several ranks, on a device with an enforced budget",
        "not_counted": "Imports and the collection of earlier garbage. For the rivals also the copy of the workload "
        "and the step that creates optimizer state.",
        "threads": THREADS,
        "rivals": {
            "ours": "find_ceiling(workload, device)",
            "prediction_alone": "prediction from traces only",
            "lightning_binsearch": f"Tuner.scale_batch_size, binsearch, {STEPS_PER_TRIAL} steps per trial, margin 5%",
            "lightning_power": f"Tuner.scale_batch_size, power, {STEPS_PER_TRIAL} steps per trial",
            "accelerate": f"find_executable_batch_size from {FIRST_GUESS}, one step as the training",
            "brute_force": f"bisection, then {NEIGHBOURS} sizes on each side of the result",
        },
        "cpu": table_of(cases(names, quick), claims),
    }
    if torch.cuda.is_available():
        figures["gpu"] = {"device": torch.cuda.get_device_name(0), **table_of(gpu_cases(names, quick), gpu_claims)}
    else:
        figures["gpu"] = {"run": False, "reason": f"torch {torch.__version__} sees no GPU"}
    return {
        **figures,
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "accelerate", "transformers")},
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure, write the results, and print the claims. Return 1 if a claim is broken."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one budget for each architecture")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "ceilings.json")
    arguments = parser.parse_args()
    figures = measured(arguments.only, arguments.quick)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    held = []
    for part in ("cpu", "gpu"):
        if not figures[part]["run"]:
            print(f"{part}: not run, {figures[part]['reason']}")
        for entry in figures[part].get("claims", ()):
            held.append(entry["holds"])
            verdict = "" if entry["holds"] else ": BROKEN"
            print(f"{part}: {entry['claim']}: {entry['figure']}, limit {entry['limit']}{verdict}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
