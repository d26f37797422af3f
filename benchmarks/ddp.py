"""Compare DDP with unequal batch sizes (autosplit) with a handwritten DistributedDataParallel loop.

    python benchmarks/ddp.py [--rounds 400] [--quick] [--output benchmarks/results/ddp.json]

Part "alike", equal ranks: the overhead of `ctx.wrap`, `ctx.steps` and `step.backward` over a handwritten loop. A second
copy of the handwritten loop is the control. All three loops take turns in the same two processes.

Part "unlike", unequal ranks: one rank runs every sample several times. The script compares equal batch sizes with the
solver's batch sizes, and the measured gain with the predicted gain. The solver uses times from the same run.

On CPUs, each rank has one core and gloo communicates. On GPUs, the script measures NCCL and gloo. On other
accelerators, it uses torch's own back end.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the import of torch: each rank has one core

import torch
from balanced import SmallGPT, token_loss
from startup import processor
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from autosplit import ddp
from autosplit.accelerators import accelerator_kind, backend, is_accelerator
from autosplit.plan.layout import Layout, PlanDevice, Seat
from autosplit.plan.plan import Plan
from autosplit.solve.memory import Ceiling
from autosplit.solve.problem import Problem
from autosplit.solve.step_time import BACKWARD_SHARE, Cost, StepTime, TimeCurve, overlapped_seconds

RANKS = 2
COST_LIMIT = 0.01
"""Largest overhead of our loop over the control, as a share of the handwritten step."""
GAIN_ERROR = 0.1
"""Largest difference between the measured and the predicted gain, as a share of the predicted gain."""
QUICK_ROUNDS = 6
CONFIDENCE = 0.95
RESAMPLES = 2000
WARM_UP = 5
"""Warm-up rounds create optimizer states. DDP also rebuilds its buckets after the first step."""
PERMUTATIONS = tuple(itertools.permutations(range(3)))

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One measured setting.

    Attributes:
        width: Width of the GPT.
        depth: Number of layers.
        length: Tokens per sample.
        share: Samples of each rank in one forward, if the ranks are equal.
        micro_steps: Forwards of an optimizer step.
    """

    width: int
    depth: int
    length: int
    share: int
    micro_steps: int

    def model(self) -> nn.Module:
        """Return the model, the same in all processes."""
        torch.manual_seed(0)
        return SmallGPT(self.width, self.depth, self.length)


ALIKE = {
    "one micro-step": Case(128, 4, 64, 4, 1),
    "four micro-steps": Case(128, 4, 64, 4, 4),
    "a model of almost nothing": Case(16, 1, 8, 2, 4),
}
WITHOUT_LIMIT = ("a model of almost nothing",)
"""Has no limit. Shows the Python overhead of a micro-step, because the model does nearly no work."""
UNLIKE = Case(128, 4, 64, 8, 1)
UNLIKE_WORK = (1, 3)
"""How often each rank runs each sample."""
SIZES = (1, 2, 4, 6, 8, 10, 12, 14)
"""Sample counts at which the ranks are timed. Both ranks together take 16."""


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of random tokens. It repeats 64 samples."""

    def __init__(self, num_samples: int, length: int) -> None:
        self.num_samples = num_samples
        self.tokens = torch.randint(0, 96, (64, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return tokens, tokens.roll(-1)


# A job of two ranks


@dataclass(frozen=True)
class Job:
    """Settings of the ranks.

    Attributes:
        rounds: Rounds after the warm-up.
        backend: ``gloo``, ``nccl`` and so on.
        devices: The device of each rank.
        folder: Rank 0 writes its results here.
    """

    rounds: int
    backend: str
    devices: tuple[str, ...]
    folder: str


def run_job(rounds: int, backend: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """Start the ranks and return rank 0's results."""
    context = torch.multiprocessing.get_context("spawn")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(rounds, backend, devices, folder)
        ranks = [context.Process(target=run_rank, args=(rank, store.port, job), daemon=True) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
        assert not failed, f"ranks {failed} failed"
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def run_rank(rank: int, port: int, job: Job) -> None:
    """Run a rank."""
    device = torch.device(job.devices[rank])
    keep_to_a_core(rank, device)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    if is_accelerator(device.type):
        backend(device.type).set_device(device)
    distributed.init_process_group(job.backend, store=store, rank=rank, world_size=RANKS)
    found = {"alike": {name: alike(rank, job, case) for name, case in ALIKE.items()}, "unlike": unlike(rank, job)}
    if rank == 0:
        Path(job.folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    # DDP models outlive the process group. Their destructors may wait for its threads forever.
    sys.stdout.flush()
    os._exit(0)


def keep_to_a_core(rank: int, device: torch.device) -> None:
    """Pin a rank that computes on a CPU to one core.

    A rank on a GPU is not pinned. Its loop, autograd and the back end run in threads that must not wait for each other.
    """
    if device.type == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def plan_of(devices: Sequence[str], sizes: Sequence[int], steps: int, effective: int) -> Plan:
    """Return a handwritten plan with these ranks."""
    ceilings = [Ceiling(label, "rank", 64, "memory", 1000, 10, 1640, 2000) for label in devices]
    kind: Any = devices[0].partition(":")[0]
    name = str(backend(kind).get_device_properties(0).name) if is_accelerator(kind) else kind
    places = enumerate(zip(devices, sizes, ceilings, strict=True))
    seats = tuple(
        Seat(PlanDevice(label, kind, rank, name, 2000, 2000, True), size, ceiling, 1640, 0.1)
        for rank, (label, size, ceiling) in places
    )
    return Plan((Layout("ddp", seats, steps, effective, 1.0, measured=False),), "none")


# Timing


def wait_for(device: torch.device) -> None:
    """Wait for the work queued on a device."""
    if is_accelerator(device.type):
        backend(device.type).synchronize(device)


def seconds_of(step: Step, device: torch.device) -> float:
    """Time a step that all ranks begin together, in seconds."""
    wait_for(device)
    distributed.barrier()
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def rounds_of(rivals: Sequence[Step], rounds: int, device: torch.device) -> list[list[float]]:
    """Time the rivals in turn, in every order equally often.

    Returns:
        For each round, the time of each rival on the slowest rank, in seconds.
    """
    orders = [[place for place in order if place < len(rivals)] for order in PERMUTATIONS]
    own = []
    gc.collect()
    gc.freeze()
    for round_ in range(rounds + WARM_UP):
        seconds = [0.0] * len(rivals)
        for place in orders[round_ % len(orders)]:
            seconds[place] = seconds_of(rivals[place], device)
        own.append(seconds)
    return slowest_of(own[WARM_UP:])


def slowest_of(own: list[list[float]]) -> list[list[float]]:
    """Return the maximum over ranks of each number."""
    everyones: list[Any] = [None] * RANKS
    distributed.all_gather_object(everyones, own)
    return [[max(figures) for figures in zip(*rows, strict=True)] for rows in zip(*everyones, strict=True)]


def interval_of(figure: Callable[[Sequence[int]], float], rounds: int) -> list[float]:
    """Return the bootstrap interval of a figure over rounds."""
    draw = random.Random(0)  # noqa: S311 (not for security)
    found = sorted(figure(draw.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    cut = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return [round(found[cut], 5), round(found[-1 - cut], 5)]


def with_interval(name: str, figure: Callable[[Sequence[int]], float], rounds: int) -> dict[str, Any]:
    """Return a figure over all rounds with its interval."""
    return {name: round(figure(range(rounds)), 5), f"{name}_interval": interval_of(figure, rounds)}


# Equal ranks


def by_hand(rank: int, job: Job, case: Case, num_samples: int) -> Step:
    """Return an optimizer step in plain DistributedDataParallel."""
    device = torch.device(job.devices[rank])
    ids = [device.index] if is_accelerator(device.type) else None
    model = DistributedDataParallel(case.model().to(device), device_ids=ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    texts = Texts(num_samples, case.length)
    sampler: DistributedSampler[Any] = DistributedSampler(texts, RANKS, rank, shuffle=True, seed=0)
    batches = iter(DataLoader(texts, case.share, sampler=sampler))

    def step() -> None:
        for micro_step in range(case.micro_steps):
            inputs, targets = next(batches)
            with nullcontext() if micro_step + 1 == case.micro_steps else model.no_sync():
                loss = token_loss(model(inputs.to(device)), targets.to(device))
                (loss / case.micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_plan(ctx: ddp.Context, model: nn.Module, loader: DataLoader[Any]) -> Step:
    """Return an optimizer step as in the README."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = ctx.steps(loader)

    def step() -> None:
        optimizer_step = next(steps)
        for inputs, targets in optimizer_step:
            optimizer_step.backward(token_loss(model(inputs.to(ctx.device)), targets.to(ctx.device)))
        optimizer.step()
        optimizer.zero_grad()

    return step


def alike(rank: int, job: Job, case: Case) -> dict[str, Any]:
    """Compare our loop with the handwritten loop, and that loop with its copy."""
    effective = RANKS * case.share * case.micro_steps
    num_samples = effective * (job.rounds + WARM_UP)
    plan = plan_of(job.devices, (case.share,) * RANKS, case.micro_steps, effective)
    with ddp.setup(plan) as ctx:
        texts = Texts(num_samples, case.length)
        loader = DataLoader(texts, batch_sampler=ctx.batch_sampler(num_samples, shuffle=True))
        ours = by_plan(ctx, ctx.wrap(case.model()), loader)
        rivals = (by_hand(rank, job, case, num_samples), ours, by_hand(rank, job, case, num_samples))
        found = rounds_of(rivals, job.rounds, ctx.device)
    return judged_cost(found, case)


def judged_cost(found: list[list[float]], case: Case) -> dict[str, Any]:
    """Return the ratios of our loop and of the control, and their difference."""

    def ratio(place: int, rows: Sequence[int]) -> float:
        return statistics.median(found[row][place] / found[row][0] for row in rows)

    rounds = len(found)
    by_hand_s, ours_s, again_s = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    return {
        **asdict(case),
        **with_interval("ours", lambda rows: ratio(1, rows), rounds),
        **with_interval("control", lambda rows: ratio(2, rows), rounds),
        **with_interval("cost", lambda rows: ratio(1, rows) - ratio(2, rows), rounds),
        "by_hand_s": round(by_hand_s, 6),
        "ours_s": round(ours_s, 6),
        "control_s": round(again_s, 6),
        "rounds": rounds,
    }


# Unequal ranks


class Slower(nn.Module):
    """A model that runs every sample several times, forward and backward.

    The extra runs use a copy of the model. Its gradients are not used.

    Args:
        model: The trained model.
        work: Number of runs per sample.
    """

    def __init__(self, model: nn.Module, work: int) -> None:
        super().__init__()
        self.model = model
        self.work = work
        # A list hides the copy from DDP, which would otherwise reduce its gradients.
        self.beside = [copy.deepcopy(model)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        for _ in range(self.work - 1):
            if torch.is_grad_enabled():
                beside = self.beside[0].to(tokens.device)
                beside.zero_grad()
                token_loss(beside(tokens), tokens).backward()
        logits: Tensor = self.model(tokens)
        return logits


def curve_of(rank: int, job: Job, rounds: int) -> TimeCurve:
    """Time the forward and backward of a rank at several sizes. All ranks run at once."""
    device = torch.device(job.devices[rank])
    model = Slower(UNLIKE.model().to(device), UNLIKE_WORK[rank])
    texts = Texts(64, UNLIKE.length)
    batches = {
        n: [part.to(device) for part in map(torch.stack, zip(*(texts[i] for i in range(n)), strict=True))]
        for n in SIZES
    }
    times: dict[int, list[float]] = {n: [] for n in SIZES}
    for round_ in range(rounds + 1):
        for n in SIZES if round_ % 2 else reversed(SIZES):
            wait_for(device)
            start = time.perf_counter()
            model.zero_grad()
            token_loss(model(batches[n][0]), batches[n][1]).backward()
            wait_for(device)
            times[n] += [time.perf_counter() - start] if round_ else []
    distributed.barrier()
    return TimeCurve.of([(n, statistics.median(seconds)) for n, seconds in times.items()])


def shared_costs(job: Job, rank: int, rounds: int) -> tuple[float, float]:
    """Time the all-reduce of the gradients and the optimizer, in seconds."""
    device = torch.device(job.devices[rank])
    model = UNLIKE.model().to(device)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rivals: list[Step] = [lambda: distributed.all_reduce(gradients), optimizer.step]  # type: ignore[list-item]
    found = rounds_of(rivals, rounds, device)
    all_reduce_s, update_s = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    return all_reduce_s, update_s


def unlike(rank: int, job: Job) -> dict[str, Any]:
    """Compare equal batch sizes with the solver's, and the measured gain with the predicted gain."""
    effective = RANKS * UNLIKE.share
    curves: list[Any] = [None] * RANKS
    distributed.all_gather_object(curves, curve_of(rank, job, max(3, job.rounds // 16)))
    all_reduce_s, update_s = shared_costs(job, rank, max(3, job.rounds // 8))
    ceilings = tuple(Ceiling(str(index), "rank", effective, "max_batch_size", 0, 0, 0, 0) for index in range(RANKS))
    answer = Problem.of(
        Cost(StepTime.bare(tuple(curves), update_s, adds_up=False), all_reduce_s),
        ceilings,
        None,
        effective_batch_sizes=(effective, effective),
        max_batch_size=effective,
        accumulates=True,
    ).solve()
    assert answer is not None
    times = [curve(UNLIKE.share) for curve in curves]
    even_s = overlapped_seconds(times, all_reduce_s, update_s, BACKWARD_SHARE * max(times))
    predicted = even_s * answer.samples_per_s / effective
    rounds = max(WARM_UP, job.rounds // 4)
    even_plan = plan_of(job.devices, (UNLIKE.share,) * RANKS, 1, effective)
    solved_plan = plan_of(job.devices, answer.split, answer.accumulation_steps, effective)
    with ddp.setup(even_plan) as even, ddp.setup(solved_plan) as solved:
        found = rounds_of([slowed_step(ctx, rounds) for ctx in (even, solved)], rounds, even.device)
    gain = with_interval("gain", lambda rows: statistics.median(found[r][0] / found[r][1] for r in rows), len(found))
    even_measured_s, solved_measured_s = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    return {
        "work": list(UNLIKE_WORK),
        "even": [UNLIKE.share] * RANKS,
        "solved": list(answer.split),
        "accumulation_steps": answer.accumulation_steps,
        **gain,
        "predicted": round(predicted, 5),
        "even_s": round(even_measured_s, 6),
        "even_predicted_s": round(even_s, 6),
        "solved_s": round(solved_measured_s, 6),
        "solved_predicted_s": round(effective / answer.samples_per_s, 6),
        "all_reduce_s": round(all_reduce_s, 6),
        "update_s": round(update_s, 6),
        "curves": [[[n, round(seconds, 6)] for n, seconds in curve.points] for curve in curves],
        "rounds": len(found),
    }


def slowed_step(ctx: ddp.Context, rounds: int) -> Step:
    """Return an optimizer step with a plan, on a rank that may be slower than the other."""
    num_samples = ctx.effective_batch_size * (rounds + WARM_UP)
    texts = Texts(num_samples, UNLIKE.length)
    loader = DataLoader(texts, batch_sampler=ctx.batch_sampler(num_samples, shuffle=True))
    return by_plan(ctx, ctx.wrap(Slower(UNLIKE.model(), UNLIKE_WORK[ctx.rank])), loader)


# All of it


def claim(text: str, figure: float, limit: float) -> dict[str, Any]:
    """Return a claim with its figure, its limit, and whether it holds."""
    return {"claim": text, "figure": round(figure, 5), "limit": limit, "holds": figure <= limit}


def places() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the variants for this machine: name, back end, and device of each rank."""
    yield "cpu, gloo", "gloo", ("cpu:0", "cpu:1")
    kind = accelerator_kind()
    count = 0 if kind is None else backend(kind).device_count()
    if count > 1:
        usual = distributed.get_default_backend_for_device(kind)
        for chosen in (usual, *(("gloo",) if kind == "cuda" else ())):
            yield f"two {'GPUs' if kind == 'cuda' else kind}, {chosen}", chosen, (f"{kind}:0", f"{kind}:1")
    elif kind == "cuda":
        yield "one GPU for both, gloo", "gloo", ("cuda:0", "cuda:0")


def not_here() -> dict[str, str]:
    """Return the variants that cannot run here, with the reason."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = f"torch {torch.__version__} sees {count or 'no'} GPU{'s' * (count > 1)} here"
    missing = {0: ("nccl", "gloo on GPUs"), 1: ("nccl",)}.get(count, ())
    return dict.fromkeys(missing, f"{seen}; NCCL needs one GPU per rank" if count else seen)


def measured_at(backend: str, devices: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Measure both parts on some devices."""
    found = run_job(rounds, backend, devices)
    costs, gain = found["alike"], found["unlike"]
    text = "overhead of a step with a plan over the control, as a share of a handwritten step ({})"
    claims = [
        claim(text.format(name), cost["cost"], COST_LIMIT) for name, cost in costs.items() if name not in WITHOUT_LIMIT
    ]
    off = abs(gain["gain"] / gain["predicted"] - 1)
    claims.append(
        claim(
            "difference between the measured and the predicted gain, as a share of the predicted gain", off, GAIN_ERROR
        )
    )
    return {**found, "claims": claims}


def measured(rounds: int) -> dict[str, Any]:
    """Measure everything, with the machine, the versions and the date."""
    start, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "places": {name: measured_at(backend, devices, rounds) for name, backend, devices in places()},
        "not_run": not_here(),
        "ranks": RANKS,
        "threads_per_rank": 1,
        "confidence": CONFIDENCE,
        "load_at_start": load,
        "wall_s": round(time.perf_counter() - start, 1),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure, write the results, and print the claims. Return 1 if a claim is broken."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400, help="measured rounds (default: 400)")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to test the script only")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "ddp.json")
    arguments = parser.parse_args()
    figures = measured(QUICK_ROUNDS if arguments.quick else max(QUICK_ROUNDS, arguments.rounds))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    held = []
    for place, parts in figures["places"].items():
        for entry in parts["claims"]:
            held.append(entry["holds"])
            verdict = "" if entry["holds"] else ": BROKEN"
            print(f"{place}: {entry['claim']}: {entry['figure']}, limit {entry['limit']}{verdict}")
        for name, row in (*parts["alike"].items(), ("unlike", parts["unlike"])):
            print(f"{place}: {name}: {row}")
    for name, reason in figures["not_run"].items():
        print(f"{name}: not run: {reason}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
