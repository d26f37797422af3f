"""What DDP by a plan costs where the ranks are alike, and what it gains where they are not.

    python benchmarks/ddp.py [--rounds 400] [--quick] [--output benchmarks/results/ddp.json]

Alike: the loop of `ctx.wrap`, `ctx.steps` and `step.backward` against one written by hand in DistributedDataParallel,
and that one against itself, step by step in the same two processes. Unlike: one rank runs every sample several times;
equal shares against those that the plan's solver takes from times measured in the same run, and the gain beside the
one that was predicted. On the processor each rank keeps to a core of its own, and gloo carries what they send; on GPUs
it is NCCL, and gloo beside it, and torch's own back end on other accelerators.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a rank has one core

import torch
from balanced import SmallGPT, token_loss
from startup import processor
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from autosplit import ddp
from autosplit.accelerators import accelerator_kind, backend, is_accelerator
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, PlanDevice, RankSettings
from autosplit.solve.memory import Ceiling
from autosplit.solve.problem import Problem
from autosplit.solve.step_time import BACKWARD_SHARE, Fit, StepTime, TimeCurve, overlapped_seconds

RANKS = 2
COST_LIMIT = 0.01
"""The most that our loop may take beyond the control, as a share of a step written by hand."""
GAIN_ERROR = 0.1
"""The most by which the gain may be off the predicted one, as a share of it."""
QUICK_ROUNDS = 6
CONFIDENCE = 0.95
RESAMPLES = 2000
WARM_UP = 5
"""Rounds that do not count: optimizer states, and DDP's buckets, which it orders anew after the first step."""
PERMUTATIONS = tuple(itertools.permutations(range(3)))

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        width: Of the GPT.
        depth: Layers.
        length: Tokens per sample.
        share: Samples of a rank in one forward, where the ranks are alike.
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
"""Tells what a micro-step costs in Python, where a step is hardly more than that."""
UNLIKE = Case(128, 4, 64, 8, 1)
UNLIKE_WORK = (1, 3)
"""How often each rank runs each sample."""
SIZES = (1, 2, 4, 6, 8, 10, 12, 14)
"""Samples at which the ranks are timed; together they take 16."""


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """So many samples of random tokens, of which a few are kept and come again."""

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
    """What the ranks are told.

    Attributes:
        rounds: Rounds that count.
        backend: ``gloo``, ``nccl`` and so on.
        devices: Of each rank.
        folder: Where rank 0 writes what was found.
    """

    rounds: int
    backend: str
    devices: tuple[str, ...]
    folder: str


def run_job(rounds: int, backend: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """Start the ranks, and return what they found."""
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
    # Models of DistributedDataParallel outlive the group, and may wait for its threads for ever.
    sys.stdout.flush()
    os._exit(0)


def keep_to_a_core(rank: int, device: torch.device) -> None:
    """Give a rank that computes on a processor a core of its own.

    One of a GPU's has several threads that must not wait for each other: the loop, which launches its kernels, autograd
    and the back end's own.
    """
    if device.type == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def plan_of(devices: Sequence[str], sizes: Sequence[int], steps: int, effective: int) -> Plan:
    """Return a plan with these ranks, made by hand."""
    ceilings = [Ceiling(label, "rank", 64, "memory", 1000, 10, 1640, 2000) for label in devices]
    kind: Any = devices[0].partition(":")[0]
    name = str(backend(kind).get_device_properties(0).name) if is_accelerator(kind) else kind
    return Plan(
        split=tuple(sizes),
        gpu0_bsz=sizes[0],
        batch_size=sum(sizes),
        accumulation_steps=steps,
        effective_batch_size=effective,
        samples_per_s=1.0,
        even_samples_per_s=None,
        ceilings=(64,) * len(sizes),
        devices=tuple(
            PlanDevice(label, kind, rank, name, 2000, 2000, True, sizes[rank], 1640, 0.1, ceilings[rank])
            for rank, label in enumerate(devices)
        ),
        trials=(),
        ddp=DdpPlan(
            tuple(
                RankSettings(rank, label, sizes[rank], steps, ceilings[rank], 1640)
                for rank, label in enumerate(devices)
            ),
            1.0,
            effective_batch_size=effective,
        ),
        precision="none",
        simulated=False,
    )


# Timing


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
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
        For each round, each rival's seconds on the rank that took longest.
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
    """Return the most that any rank took, figure by figure."""
    everyones: list[Any] = [None] * RANKS
    distributed.all_gather_object(everyones, own)
    return [[max(figures) for figures in zip(*rows, strict=True)] for rows in zip(*everyones, strict=True)]


def interval_of(figure: Callable[[Sequence[int]], float], rounds: int) -> list[float]:
    """Return the bootstrap interval of a figure that is made from some rounds."""
    draw = random.Random(0)  # noqa: S311 (it guards nothing)
    found = sorted(figure(draw.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    cut = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return [round(found[cut], 5), round(found[-1 - cut], 5)]


def with_interval(name: str, figure: Callable[[Sequence[int]], float], rounds: int) -> dict[str, Any]:
    """Return a figure over all rounds, and its interval."""
    return {name: round(figure(range(rounds)), 5), f"{name}_interval": interval_of(figure, rounds)}


# Ranks that are alike


def by_hand(rank: int, job: Job, case: Case, num_samples: int) -> Step:
    """Return an optimizer step as it is written for DistributedDataParallel."""
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
    """Return an optimizer step as the README has it."""
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
    """Hold our loop against the one by hand, and that one against itself."""
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
    """Return the ratios of our steps and of the control, and what is between them."""

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


# Ranks that are not


class Slower(nn.Module):
    """A model on a rank that runs every sample several times, forward and backward.

    What it does beside goes on in a copy, whose gradients nobody looks at.

    Args:
        model: What is trained.
        work: How often each sample is run; 1 for once.
    """

    def __init__(self, model: nn.Module, work: int) -> None:
        super().__init__()
        self.model = model
        self.work = work
        # In a list, so that it is no part of the model: DDP would want its gradients, too.
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
    """Time a rank's forward and backward on its own, at a few sizes in turn; all ranks do so at once."""
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
    """Hold equal shares against the solved ones, and the gain against the predicted one."""
    effective = RANKS * UNLIKE.share
    curves: list[Any] = [None] * RANKS
    distributed.all_gather_object(curves, curve_of(rank, job, max(3, job.rounds // 16)))
    all_reduce_s, update_s = shared_costs(job, rank, max(3, job.rounds // 8))
    ceilings = tuple(Ceiling(str(index), "rank", effective, "max_batch_size", 0, 0, 0, 0) for index in range(RANKS))
    answer = Problem.of(
        Fit(StepTime.bare(tuple(curves), update_s, adds_up=False), all_reduce_s),
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
    """Return an optimizer step by a plan on a rank that may be slower than the other."""
    num_samples = ctx.effective_batch_size * (rounds + WARM_UP)
    texts = Texts(num_samples, UNLIKE.length)
    loader = DataLoader(texts, batch_sampler=ctx.batch_sampler(num_samples, shuffle=True))
    return by_plan(ctx, ctx.wrap(Slower(UNLIKE.model(), UNLIKE_WORK[ctx.rank])), loader)


# All of it


def claim(said: str, figure: float, limit: float) -> dict[str, Any]:
    """Return a claim with its figure and its limit, and whether it holds."""
    return {"claim": said, "figure": round(figure, 5), "limit": limit, "holds": figure <= limit}


def places() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield what the ranks may run on here: a name, the backend, and each rank's device."""
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
    """Say what could not be run, and why."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = f"torch {torch.__version__} sees {count or 'no'} GPU{'s' * (count > 1)} here"
    missing = {0: ("nccl", "gloo on GPUs"), 1: ("nccl",)}.get(count, ())
    return dict.fromkeys(missing, f"{seen}; NCCL takes no two ranks of one" if count else seen)


def measured_at(backend: str, devices: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Measure both parts on some devices."""
    found = run_job(rounds, backend, devices)
    costs, gain = found["alike"], found["unlike"]
    said = "a step by a plan beyond the control, as a share of a step by hand ({}; its interval is beside it)"
    claims = [
        claim(said.format(name), cost["cost"], COST_LIMIT) for name, cost in costs.items() if name not in WITHOUT_LIMIT
    ]
    off = abs(gain["gain"] / gain["predicted"] - 1)
    claims.append(claim("the gain by unequal shares is off the predicted one, as a share of it", off, GAIN_ERROR))
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
    """Measure, write the figures, print what holds; 1 where a claim is broken."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400, help="rounds that count (default: 400)")
    parser.add_argument("--quick", action="store_true", help="a few rounds: nothing to go by")
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
