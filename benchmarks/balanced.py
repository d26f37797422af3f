"""Time a training step in BalancedDataParallel, relative to a step without it.

    python benchmarks/balanced.py [--rounds 101] [--output benchmarks/results/balanced.json]

On CPUs, the rival is a handwritten loop over the chunks. On GPUs, the rival is nn.DataParallel with the same even
split, with one and with four micro-steps per optimizer step. On simulated GPUs, only four micro-steps are compared. The
rivals take turns, and each round reverses the order, so other load on the machine affects both. The result is the
median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from startup import processor
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import BalancedDataParallel, Workload, parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import make_tracer

CPU_LIMIT = 1.05
"""Largest time of a step on the CPU, as a share of the handwritten loop."""
GPU_LIMIT = 1.0
"""Largest time of a step minus the noise, as a share of nn.DataParallel with the same even split."""
KEPT_LIMIT = 0.95
"""Largest time with four micro-steps per optimizer step, as a share of nn.DataParallel."""
MICRO_STEPS = 4
SHARE = 8
"""Samples per GPU and micro-step. Small, because training with accumulation has small micro-batches."""
THREADS = 1
SIMULATED = ("sim:2xRTX3090", "sim:4xRTX3090")

Step = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]


# Models


class SmallGPT(nn.Module):
    """A standard GPT.

    Args:
        width: Width of the residual stream.
        depth: Number of layers.
        length: Tokens per sample.
    """

    def __init__(self, width: int, depth: int, length: int, vocabulary: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True))
        return logits


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(samples: int, width: int = 128, depth: int = 4, length: int = 64) -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """Return a GPT with a batch of random tokens, and its loss."""
    tokens = torch.randint(0, 96, (samples, length))
    return SmallGPT(width, depth, length), tokens, tokens.roll(-1, 1), token_loss


def larger_gpt(samples: int) -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """Return a GPT for GPUs, with 19 million parameters, as `gpt` does."""
    return gpt(samples, width=512, depth=6, length=128)


def cnn(samples: int) -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """Return a small CNN with a batch of random images, and its loss."""
    widths = (3, 16, 32, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in itertools.pairwise(widths)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, 10))
    return model, torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,)), F.cross_entropy


# Timing


def spread(values: list[float]) -> dict[str, Any]:
    """Return the median of ratios with their quartiles, minimum and maximum."""
    low, _, high = statistics.quantiles(values, n=4)
    return {
        "ratio": round(statistics.median(values), 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "rounds": len(values),
    }


def rounds_of(rivals: Mapping[str, Step], rounds: int, steps: int, wait: Step) -> list[dict[str, float]]:
    """Time the rivals in turn.

    Args:
        rivals: The training step of each rival.
        rounds: Measured rounds, after one warm-up round.
        steps: Steps of each rival in a round.
        wait: Returns when the devices have finished.

    Returns:
        Seconds per step of each rival, for each round.
    """
    names = list(rivals)
    found = []
    for round_ in range(rounds + 1):
        seconds = {}
        for name in names if round_ % 2 else reversed(names):
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                rivals[name]()
                wait()
            seconds[name] = (time.perf_counter() - start) / steps
        if round_:
            found.append(seconds)
    return found


def ratios(found: list[dict[str, float]], one: str, other: str) -> list[float]:
    """Divide one rival's time by another's in each round."""
    return [seconds[one] / seconds[other] for seconds in found]


def medians_s(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median step time of each rival, in seconds."""
    return {f"{name}_s": round(statistics.median(seconds[name] for seconds in found), 6) for name in found[0]}


def steps_for(step: Step, wait: Step, least_s: float = 0.05) -> int:
    """Return how many steps last at least `least_s` together. Two steps warm up."""
    for _ in range(2):
        step()
    wait()
    start = time.perf_counter()
    step()
    wait()
    return max(1, int(least_s / (time.perf_counter() - start)))


def compared(rivals: Mapping[str, Step], other: str, rounds: int, wait: Step) -> dict[str, Any]:
    """Compare the wrapper with another rival, and that rival with its copy.

    Returns:
        The ratio with its spread, each rival's time, and the noise of the ratio.
    """
    for step in rivals.values():
        step()
    steps = steps_for(rivals[other], wait)
    found = rounds_of(rivals, rounds, steps, wait)
    return {
        **spread(ratios(found, "ours", other)),
        **medians_s(found),
        "noise": round(noise(ratios(found, f"{other}_again", other)), 4),
        "steps_per_round": steps,
    }


def noise(values: list[float]) -> float:
    """Return the noise of a self-comparison: its distance from 1, or two standard errors if these are larger."""
    low, middle, high = statistics.quantiles(values, n=4)
    error = 0.93 * (high - low) / math.sqrt(len(values))  # standard error of a median, for normally distributed values
    return max(abs(middle - 1), 2 * error)


def judged(ratio: float, limit: float) -> dict[str, Any]:
    """Return a limit, and whether the ratio is within it."""
    return {"limit": limit, "holds": ratio <= limit}


def nothing() -> None:
    """Do nothing: a CPU has no queued work."""


# CPU


def cpu_rivals(case: tuple[nn.Module, Tensor, Tensor, Loss], split: tuple[int, ...]) -> dict[str, Step]:
    """Return one step through the wrapper, and two through a loop over the chunks (forward, loss, backward)."""
    model, inputs, targets, loss_fn = case
    wrapper = BalancedDataParallel(None, model, ["cpu"] * len(split), split=split)

    def ours() -> None:
        model.zero_grad()
        loss_fn(wrapper(inputs), targets).backward()

    def loop() -> None:
        model.zero_grad()
        loss_fn(torch.cat([model(piece) for piece in inputs.split(split)]), targets).backward()

    return {"ours": ours, "loop": loop, "loop_again": loop}


def on_cpu(rounds: int) -> dict[str, Any]:
    """Compare the wrapper with a loop over three uneven chunks."""
    cases = {"gpt": (gpt(12), (2, 4, 6)), "cnn": (cnn(48), (8, 16, 24))}
    figures: dict[str, Any] = {
        "claim": f"forward, loss and backward take at most {CPU_LIMIT} of a hand-written loop over the same chunks",
        "threads": torch.get_num_threads(),
    }
    for name, (case, split) in cases.items():
        figures[name] = compared(cpu_rivals(case, split), "loop", rounds, nothing)
        figures[name] |= {"split": list(split), **judged(figures[name]["ratio"], CPU_LIMIT)}
    return figures


# GPUs


def trained(
    module: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    loss_fn: Loss,
    unfinished: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Step:
    """Return an optimizer step over several micro-batches.

    Args:
        module: The wrapper.
        batches: Inputs and targets on the first device.
        loss_fn: The mean loss of a micro-batch.
        unfinished: Context of every micro-step except the last.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for index, (inputs, targets) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else unfinished():
                (loss_fn(module(inputs), targets) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpu_rivals(devices: list[int], micro_steps: int) -> dict[str, Step]:
    """Return an optimizer step in the wrapper, and two in nn.DataParallel. The two show the noise."""
    home = torch.device("cuda", devices[0])
    rivals: dict[str, Step] = {}
    for name in ("ours", "data_parallel", "data_parallel_again"):
        model, inputs, targets, loss_fn = larger_gpt(SHARE * len(devices))
        model.to(home)
        batches = [(inputs.to(home), targets.to(home))] * micro_steps
        if name == "ours":
            wrapper = BalancedDataParallel(None, model, devices, split=[SHARE] * len(devices))
            rivals[name] = trained(wrapper, batches, loss_fn, wrapper.no_sync)
        else:
            rivals[name] = trained(nn.DataParallel(model, devices), batches, loss_fn)
    return rivals


def synchronize(devices: list[int]) -> None:
    """Wait for all GPUs."""
    for device in set(devices):
        torch.cuda.synchronize(device)


def on_gpu(rounds: int) -> dict[str, Any]:
    """Compare the wrapper with nn.DataParallel on two GPUs, or on one GPU that is named twice."""
    if not torch.cuda.is_available():
        return {"run": False, "reason": f"torch {torch.__version__} sees no GPU here"}
    devices = [0, 1] if torch.cuda.device_count() > 1 else [0, 0]
    wait = partial(synchronize, devices)
    one = compared(gpu_rivals(devices, 1), "data_parallel", rounds, wait)
    several = compared(gpu_rivals(devices, MICRO_STEPS), "data_parallel", rounds, wait)
    return {
        "run": True,
        "claim": (
            f"an optimizer step takes at most {GPU_LIMIT} of nn.DataParallel's, its median less the noise; "
            f"with {MICRO_STEPS} micro-steps at most {KEPT_LIMIT} in three rounds of four"
        ),
        "device_ids": devices,
        "gpus": [torch.cuda.get_device_name(device) for device in sorted(set(devices))],
        "one_micro_step": one | judged(one["ratio"] - one["noise"], GPU_LIMIT),
        f"{MICRO_STEPS}_micro_steps": several | judged(several["quartiles"][1], KEPT_LIMIT),
    }


# Simulated GPUs


def simulated() -> dict[str, Any]:
    """Compare predicted times of replicas kept through an optimizer step with those of nn.DataParallel."""
    model, inputs, targets, loss_fn = larger_gpt(SHARE)
    workload = Workload(model, (inputs, targets), loss_fn=loss_fn, optimizer=torch.optim.AdamW)
    tracer, reason = make_tracer(workload, like_gpu=True)
    assert reason is None, reason
    figures: dict[str, Any] = {
        "claim": f"predicted, {MICRO_STEPS} micro-steps and an update take at most {KEPT_LIMIT} of nn.DataParallel's",
    }
    for spec in SIMULATED:
        devices = parse_devices(spec)
        worker = SimulatedWorker(devices, tuple(device.capacity_bytes for device in devices), tracer)
        split = (SHARE,) * len(devices)
        ours_s = worker.measure(StepShape((split,) * MICRO_STEPS)).seconds
        theirs_s = data_parallel_s(worker, split)
        figures[spec] = {
            "ratio": round(ours_s / theirs_s, 4),
            "ours_s": round(ours_s, 6),
            "data_parallel_s": round(theirs_s, 6),
            "split": list(split),
            **judged(ours_s / theirs_s, KEPT_LIMIT),
        }
    return figures


def data_parallel_s(worker: SimulatedWorker, split: tuple[int, ...]) -> float:
    """Return the seconds of an optimizer step in nn.DataParallel, which copies and reduces in every micro-step."""
    alone = worker.measure(StepShape((split,)))
    spec = worker.devices[0].spec
    assert spec is not None
    added_s = sum(cost.seconds(spec) for cost in worker.tracer.accumulation_costs())
    return MICRO_STEPS * (alone.seconds - alone.update_s) + alone.update_s + (MICRO_STEPS - 1) * added_s


# Command line


def measured(rounds: int) -> dict[str, Any]:
    """Measure everything, with the machine, the versions and the date."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    return {
        "cpu": on_cpu(rounds),
        "gpu": on_gpu(rounds),
        "simulated": simulated(),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def results_in(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each ratio that has a limit, named after its part."""
    return {
        f"{part} {name}": result
        for part in ("cpu", "gpu", "simulated")
        for name, result in figures[part].items()
        if isinstance(result, dict) and "holds" in result
    }


def main() -> int:
    """Measure, write the results, and print the ratios. Return 1 if a ratio is over its limit."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101, help="measured rounds (default: 101)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "balanced.json")
    arguments = parser.parse_args()
    figures = measured(max(2, arguments.rounds))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    results = results_in(figures)
    for name, result in results.items():
        quartiles = "" if "quartiles" not in result else f" (quartiles {result['quartiles']})"
        print(f"{name}: {result['ratio']}{quartiles}, limit {result['limit']}{'' if result['holds'] else ': BROKEN'}")
    if not figures["gpu"]["run"]:
        print(f"gpu: not run, {figures['gpu']['reason']}")
    return 0 if all(result["holds"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
