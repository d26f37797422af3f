"""What a training step in BalancedDataParallel takes, as a share of what it takes without.

    python benchmarks/balanced.py [--rounds 101] [--output benchmarks/results/balanced.json]

On the processor it is held against a loop over the chunks, written by hand. On GPUs, where there are any, against
nn.DataParallel with the same even split, for one micro-step per optimizer step and for four; on simulated cards
for four. The rivals step in turn, in an order that is turned round each time, so that what else the machine does meets
both alike; the figure is the median of the ratios of neighbours.
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
from autosplit.runtime.simulated import SimulatedRuntime
from autosplit.runtime.tracer import make_tracer

CPU_LIMIT = 1.05
"""The most that a step may take on the processor, as a share of the loop written by hand."""
GPU_LIMIT = 1.0
"""The most, beside the noise, as a share of nn.DataParallel with the same even split."""
KEPT_LIMIT = 0.95
"""The most with four micro-steps per optimizer step, as a share of nn.DataParallel: clearly below it."""
MICRO_STEPS = 4
SHARE = 8
"""Samples per card and micro-step: who accumulates has small ones."""
THREADS = 1
SIMULATED = ("sim:2xRTX3090", "sim:4xRTX3090")

Step = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]


# The models


class SmallGPT(nn.Module):
    """A GPT of ordinary parts.

    Args:
        width: Of the residual stream.
        depth: Layers.
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
    """Return the same in a size for GPUs: 19 million parameters."""
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
    """Return the median of some ratios with their quartiles, the least and the most."""
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
        rivals: A training step each.
        rounds: Rounds that count; one more comes first.
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
    """Divide a rival's time by another's, round by round."""
    return [seconds[one] / seconds[other] for seconds in found]


def medians_s(found: list[dict[str, float]]) -> dict[str, float]:
    """Return each rival's median time of a step, in seconds."""
    return {f"{name}_s": round(statistics.median(seconds[name] for seconds in found), 6) for name in found[0]}


def steps_for(step: Step, wait: Step, least_s: float = 0.05) -> int:
    """Tell how many steps last long enough to be timed together; the first two warm up."""
    for _ in range(2):
        step()
    wait()
    start = time.perf_counter()
    step()
    wait()
    return max(1, int(least_s / (time.perf_counter() - start)))


def compared(rivals: Mapping[str, Step], other: str, rounds: int, wait: Step) -> dict[str, Any]:
    """Hold the wrapper against another rival, and that one against itself.

    Returns:
        The ratio with its spread, each rival's time, and the noise in the ratio.
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
    """Return how far the median of a rival's ratios to itself is from 1, or may well be: two standard errors."""
    low, middle, high = statistics.quantiles(values, n=4)
    error = 0.93 * (high - low) / math.sqrt(len(values))  # of a median, where the values are normal
    return max(abs(middle - 1), 2 * error)


def judged(ratio: float, limit: float) -> dict[str, Any]:
    """Return a limit, and whether a ratio keeps to it."""
    return {"limit": limit, "holds": ratio <= limit}


def nothing() -> None:
    """Wait for the processor, which is never ahead of us."""


# On the processor


def cpu_rivals(case: tuple[nn.Module, Tensor, Tensor, Loss], split: tuple[int, ...]) -> dict[str, Step]:
    """Return a step (forward, loss, backward) through the wrapper, and two through a loop over the chunks."""
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
    """Hold the wrapper against the loop over three uneven chunks."""
    cases = {"gpt": (gpt(12), (2, 4, 6)), "cnn": (cnn(48), (8, 16, 24))}
    figures: dict[str, Any] = {
        "claim": f"forward, loss and backward take at most {CPU_LIMIT} of a hand-written loop over the same chunks",
        "threads": torch.get_num_threads(),
    }
    for name, (case, split) in cases.items():
        figures[name] = compared(cpu_rivals(case, split), "loop", rounds, nothing)
        figures[name] |= {"split": list(split), **judged(figures[name]["ratio"], CPU_LIMIT)}
    return figures


# On GPUs


def trained(
    module: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    loss_fn: Loss,
    unfinished: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Step:
    """Return an optimizer step over some micro-batches.

    Args:
        module: The wrapper.
        batches: Inputs and targets, on the first device.
        loss_fn: The mean loss of a micro-batch.
        unfinished: Around every micro-step but the last.
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
    """Return an optimizer step in the wrapper, and two in nn.DataParallel: how far these differ is noise."""
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
    """Hold the wrapper against nn.DataParallel on two cards, or on one that is named twice."""
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


# On simulated cards


def simulated() -> dict[str, Any]:
    """Hold replicas that are kept through an optimizer step against what nn.DataParallel pays, in predicted times."""
    model, inputs, targets, loss_fn = larger_gpt(SHARE)
    workload = Workload(model, (inputs, targets), loss_fn=loss_fn, optimizer=torch.optim.AdamW)
    tracer, reason = make_tracer(workload, like_gpu=True)
    assert reason is None, reason
    figures: dict[str, Any] = {
        "claim": f"predicted, {MICRO_STEPS} micro-steps and an update take at most {KEPT_LIMIT} of nn.DataParallel's",
    }
    for spec in SIMULATED:
        devices = parse_devices(spec)
        runtime = SimulatedRuntime(devices, tuple(device.capacity_bytes for device in devices), tracer)
        split = (SHARE,) * len(devices)
        ours_s = runtime.measure(StepShape((split,) * MICRO_STEPS)).seconds
        theirs_s = data_parallel_s(runtime, split)
        figures[spec] = {
            "ratio": round(ours_s / theirs_s, 4),
            "ours_s": round(ours_s, 6),
            "data_parallel_s": round(theirs_s, 6),
            "split": list(split),
            **judged(ours_s / theirs_s, KEPT_LIMIT),
        }
    return figures


def data_parallel_s(runtime: SimulatedRuntime, split: tuple[int, ...]) -> float:
    """Return what nn.DataParallel takes for an optimizer step, in seconds: it copies and reduces in each micro-step."""
    alone = runtime.measure(StepShape((split,)))
    spec = runtime.devices[0].spec
    assert spec is not None
    added_s = sum(cost.seconds(spec) for cost in runtime.tracer.accumulation_costs())
    return MICRO_STEPS * (alone.seconds - alone.update_s) + alone.update_s + (MICRO_STEPS - 1) * added_s


# All of it


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
    """Return each ratio that has a limit, under its part's name and its own."""
    return {
        f"{part} {name}": result
        for part in ("cpu", "gpu", "simulated")
        for name, result in figures[part].items()
        if isinstance(result, dict) and "holds" in result
    }


def main() -> int:
    """Measure, write the figures, print the ratios; 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101, help="rounds that count (default: 101)")
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
