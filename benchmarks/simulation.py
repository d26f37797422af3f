"""Compare the simulator with a real GPU: predicted and measured step times, peaks and ceilings.

    python benchmarks/simulation.py [--quick] [--only NAME ...] [--card NAME] [--time-limit-s 420] [--output FILE]

The same optimizer step (copy of the batch, forward, loss, backward, update) runs on `cuda:0` and on `sim:` with the
same GPU. A ratio is predicted / measured. The measured peak is the memory that the allocator reserved, because reserved
memory limits the ceiling. The allocated memory is also recorded.

One GPU cannot check transfers between GPUs. Without a GPU, the steps run on the CPU, and only memory is compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from balanced import SmallGPT, token_loss
from startup import processor
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.devices.catalog import find_card
from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.sim.simulated import SimulatedWorker, traced_peaks
from autosplit.sim.tracer import Tracer, make_tracer
from autosplit.solve.memory import largest_fitting
from autosplit.workload.workload import Workload

RESULTS = Path(__file__).parent / "results" / "simulation.json"

BUDGET_S = 1.0
"""Stop repeating a step after this time."""
CEILING_BYTES = 4 * 2**30
"""Memory limit of the search for a ceiling. A search in all memory of a large GPU would take minutes."""
QUICK_CEILING_BYTES = 16 * 2**20
MOST = 65536
"""Largest ceiling that is searched for."""
STAND_IN = "A100-80GB"
"""GPU whose memory is simulated if this machine has none. Its times are not compared."""


# Models


class Bottleneck(nn.Module):
    """The block of ResNet-50: three convolutions with a residual connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *normed(nn.Conv2d(inputs, width, 1, bias=False)),
            nn.ReLU(inplace=True),
            *normed(nn.Conv2d(width, width, 3, stride, 1, bias=False)),
            nn.ReLU(inplace=True),
            *normed(nn.Conv2d(width, outputs, 1, bias=False)),
        )
        same = stride == 1 and inputs == outputs
        self.beside = nn.Identity() if same else nn.Sequential(*normed(nn.Conv2d(inputs, outputs, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.body(x) + self.beside(x))


def normed(conv: nn.Conv2d) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its BatchNorm."""
    return conv, nn.BatchNorm2d(conv.out_channels)


def resnet(depths: tuple[int, ...], width: int, side: int, precision: str) -> Workload:
    """Return a ResNet of bottlenecks on images; ``(3, 4, 6, 3)`` with width 64 is ResNet-50."""
    layers: list[nn.Module] = [*normed(nn.Conv2d(3, width, 7, 2, 3, bias=False)), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not block else 1))
            inputs = 4 * width * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 100))
    batch = (torch.randn(4, 3, side, side), torch.randint(0, 100, (4,)))
    momentum = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=momentum, precision=precision)


def gpt(width: int, depth: int, length: int, vocabulary: int, precision: str) -> Workload:
    """Return a GPT on random tokens."""
    tokens = torch.randint(0, vocabulary, (4, length))
    model = SmallGPT(width, depth, length, vocabulary)
    batch = (tokens, tokens.roll(-1, 1))
    return Workload(model, batch, loss_fn=token_loss, optimizer=torch.optim.AdamW, precision=precision)


def mlp(width: int, depth: int, precision: str) -> Workload:
    """Return a deep MLP, mostly matrix products."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 100))
    batch = (torch.randn(4, width), torch.randint(0, 100, (4,)))
    adamw = torch.optim.AdamW
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=adamw, precision=precision)


class Recurrent(nn.Module):
    """A recurrent layer with a classifier on its last output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


def lstm(width: int, length: int, precision: str) -> Workload:
    """Return an LSTM on random sequences."""
    batch = (torch.randn(4, length, width), torch.randint(0, 100, (4,)))
    adamw = torch.optim.AdamW
    return Workload(Recurrent(width), batch, loss_fn=F.cross_entropy, optimizer=adamw, precision=precision)


@dataclass(frozen=True)
class Kind:
    """A kind of model, and its batch sizes.

    Attributes:
        make: Builds the workload in a precision.
        sizes: Samples of the steps.
    """

    make: Callable[[str], Workload]
    sizes: tuple[int, ...]


KINDS = {
    "gpt": Kind(partial(gpt, 768, 12, 512, 32768), (4, 16, 64)),  # 137 million parameters
    "small gpt": Kind(partial(gpt, 256, 4, 128, 4096), (16, 128, 1024)),  # bound by kernel launches
    "resnet50": Kind(partial(resnet, (3, 4, 6, 3), 64, 224), (16, 64, 256)),
    "mlp": Kind(partial(mlp, 4096, 8), (256, 2048, 16384)),
    "lstm": Kind(partial(lstm, 1024, 64), (16, 64, 256)),
}

QUICK_KINDS = {
    "gpt": Kind(partial(gpt, 32, 2, 16, 64), (2, 8)),
    "resnet": Kind(partial(resnet, (1, 1), 8, 32), (2, 8)),
    "mlp": Kind(partial(mlp, 64, 2), (2, 8)),
}

PRECISIONS = ("none", "bf16")


# Predicted and measured


class Place:
    """The device that runs the steps, and the simulated GPU that predicts them.

    Args:
        name: The GPU in the catalogue. None on a CPU, whose time is not predicted.
    """

    def __init__(self, name: str | None) -> None:
        self.real: Device = parse_devices("cuda:0" if name else "cpu:64GiB")[0]
        self.card: Device = parse_devices(f"sim:{name or STAND_IN}")[0]
        self.timed = name is not None

    @contextmanager
    def worker(self, workload: Workload) -> Iterator[AcceleratorWorker | CpuWorker]:
        """Return the noise of a self-comparison: its distance from 1, or two standard errors if these are larger."""
        devices, capacities_bytes = (self.real,), (self.real.capacity_bytes,)
        if not self.timed:
            trainee = training_copy(workload, device=torch.device("cpu"))
            try:
                yield CpuWorker(devices, capacities_bytes, trainee, MOST)
            finally:
                trainee.restore()
            return
        worker = AcceleratorWorker(devices, capacities_bytes, workload)
        try:
            yield worker
        finally:
            worker.close()

    def simulated(self, tracer: Tracer) -> SimulatedWorker:
        """Return the worker that predicts steps. It has no memory limit."""
        return SimulatedWorker((self.card,), (2**62,), tracer)


def shape_of(samples: int) -> StepShape:
    """Return the step: one forward and one update on one device."""
    return StepShape(((samples,),))


def compared(place: Place, workload: Workload, sizes: tuple[int, ...]) -> tuple[Tracer, list[dict[str, Any]]]:
    """Run and predict a step of each size.

    Returns:
        The predicting worker, and a row for each size.
    """
    begun_s = time.perf_counter()
    tracer, why_real = make_tracer(workload, like_gpu=place.timed)
    simulated = place.simulated(tracer)
    predicted = {size: simulated.measure(shape_of(size)) for size in sizes}
    traced_s = time.perf_counter() - begun_s
    rows = []
    with place.worker(workload) as worker:
        for size in sizes:
            row: dict[str, Any] = {"batch_size": size, "predicted_bytes": predicted_bytes(place, tracer, size)}
            try:
                row |= measured_step(place, worker, size)
            except OutOfMemoryError as error:
                rows.append({**row, "failed": str(error)})
                continue
            row["bytes_ratio"] = round(row["predicted_bytes"] / row["measured_bytes"], 4)
            if place.timed:
                row["predicted_s"] = round(predicted[size].seconds, 7)
                row["samples_per_s_ratio"] = round(row["measured_s"] / predicted[size].seconds, 4)
            rows.append(row)
    rows[0]["tracing_s"] = round(traced_s, 2)
    if why_real is not None:
        rows[0]["traced_with_real_tensors"] = why_real
    return tracer, rows


def predicted_bytes(place: Place, tracer: Tracer, size: int) -> int:
    """Predict the peak of a step: what the allocator of a GPU reserves, or the tensors on a CPU."""
    shape = shape_of(size)
    return place.simulated(tracer).peaks(shape)[0] if place.timed else traced_peaks(tracer, shape)[0]


def measured_step(place: Place, worker: AcceleratorWorker | CpuWorker, size: int) -> dict[str, Any]:
    """Measure the time and the peak of a step."""
    if not place.timed:
        return {"measured_bytes": worker.peaks(shape_of(size))[0]}
    measured = worker.measure(shape_of(size), budget_s=BUDGET_S)
    return {
        "measured_bytes": measured.peak_bytes[0],  # reserved by the allocator
        "measured_allocated_bytes": torch.cuda.max_memory_allocated(place.real.index),
        "measured_s": round(measured.seconds, 7),
        "measured_s_error": round(measured.error_s / measured.seconds, 4),
        "repeats": measured.repeats,
    }


def ceilings(place: Place, workload: Workload, tracer: Tracer, within_bytes: int) -> dict[str, Any]:
    """Find the largest batch within a memory limit, with real steps and with traces only."""

    def peak_bytes(samples: int) -> int:
        return predicted_bytes(place, tracer, samples)

    if place.timed:
        # Use the memory that is free now. Loading kernels has taken some of it.
        reserve = parse_devices("cuda:0")[0].capacity_bytes - within_bytes
        found = find_ceiling(workload, "cuda:0", role="primary", reserve=reserve, max_batch_size=MOST)
    else:
        found = find_ceiling(workload, f"cpu:{within_bytes}B", role="primary", max_batch_size=MOST)
    within_bytes, start = found.capacity_bytes, workload.sample_batch_size
    row: dict[str, Any] = {"within_bytes": within_bytes}
    row["predicted"] = largest_fitting(peak_bytes, within_bytes, least=0, most=MOST, start=start)
    row |= {"measured": found.batch_size, "limited_by": found.limited_by, "ooms": found.ooms}
    row["ratio"] = round(row["predicted"] / found.batch_size, 4) if found.batch_size else None
    return row


def measured_case(place: Place, kind: Kind, precision: str, within_bytes: int) -> dict[str, Any]:
    """Compare one model in one precision. An exception becomes a line of the results, and the run continues."""
    torch.manual_seed(0)
    try:
        workload = kind.make(precision)
        tracer, steps = compared(place, workload, kind.sizes)
        case: dict[str, Any] = {"steps": steps}
        case["parameters"] = sum(p.numel() for p in workload.model.parameters())
        case["ceiling"] = ceilings(place, workload, tracer, within_bytes)
        tracer.trainee.restore()
    except Exception as error:  # noqa: BLE001 # continue with the other cases
        case = {"failed": f"{type(error).__name__}: {error}"}
    gc.collect()
    if place.timed:
        torch.cuda.empty_cache()
    return case


# Summary


def spread(ratios: list[float]) -> dict[str, Any]:
    """Summarise ratios of predicted to measured: quantiles, and distance from 1."""
    if not ratios:
        return {"count": 0}
    errors = [abs(ratio - 1) for ratio in ratios]
    return {
        "count": len(ratios),
        "median_ratio": round(statistics.median(ratios), 4),
        "least_ratio": round(min(ratios), 4),
        "most_ratio": round(max(ratios), 4),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
    }


def summed_up(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of each compared figure over all cases."""
    steps = [row for case in cases.values() for row in case.get("steps", ())]
    found = [case["ceiling"]["ratio"] for case in cases.values() if case.get("ceiling", {}).get("ratio")]
    return {
        "samples_per_s": spread([row["samples_per_s_ratio"] for row in steps if "samples_per_s_ratio" in row]),
        "memory": spread([row["bytes_ratio"] for row in steps if "bytes_ratio" in row]),
        "ceiling": spread(found),
        "failed": [name for name, case in cases.items() if "failed" in case],
    }


def measured(kinds: dict[str, Kind], card: str | None, limit_s: float, output: Path, *, quick: bool) -> dict[str, Any]:
    """Measure until the time limit. The file is written after each case."""
    begun_s = time.perf_counter()
    place = Place(card)
    figures: dict[str, Any] = {
        "ratios": "predicted / measured",
        "card": card,
        "device": torch.cuda.get_device_name(0) if card else processor(),
        "kind": "cuda" if card else "cpu",
        "quick": quick,
        "summary": {},
        "cases": {},
        "left_out_for_time": [],
    }
    if card is None:
        figures["no_times"] = f"torch {torch.__version__} sees no GPU: only memory is compared, on the CPU"
    else:
        warmed_up()
    for name, precision in ((name, precision) for precision in PRECISIONS for name in kinds):
        label = f"{name}, {precision}"
        if time.perf_counter() - begun_s > limit_s:
            figures["left_out_for_time"].append(label)
            continue
        within_bytes = QUICK_CEILING_BYTES if quick else CEILING_BYTES
        case_s = time.perf_counter()
        case = measured_case(place, kinds[name], precision, within_bytes)
        case["seconds"] = round(time.perf_counter() - case_s, 1)
        figures["cases"][label] = case
        print(f"{label}: {line_of(case)}", flush=True)
        figures["summary"] = summed_up(figures["cases"])
        written(output, figures, begun_s)
    return written(output, figures, begun_s)


def warmed_up() -> None:
    """Run until the GPU's clocks have risen."""
    square = torch.randn(4096, 4096, device="cuda:0")
    end_s = time.perf_counter() + 2.0
    while time.perf_counter() < end_s:
        square @ square
        torch.cuda.synchronize()


def written(output: Path, figures: dict[str, Any], begun_s: float) -> dict[str, Any]:
    """Write the results with the machine, the versions and the date."""
    names = ["torch"] if not torch.version.cuda else ["torch", "cuda"]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    whole = {
        **figures,
        "wall_s": round(time.perf_counter() - begun_s, 1),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: versions[name] for name in names}},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return whole


def line_of(case: dict[str, Any]) -> str:
    """Return one line about a case."""
    if "failed" in case:
        return f"failed: {case['failed']}"
    parts = []
    for row in case["steps"]:
        if "failed" in row:
            parts.append(f"{row['batch_size']}: out of memory")
            continue
        rate = f"samples/s x{row['samples_per_s_ratio']:.2f}, " if "samples_per_s_ratio" in row else ""
        parts.append(f"{row['batch_size']}: {rate}bytes x{row['bytes_ratio']:.3f}")
    found = case["ceiling"]
    return "; ".join([*parts, f"ceiling {found['predicted']} for {found['measured']}"]) + f" ({case['seconds']} s)"


# Command line


def main(argv: list[str] | None = None) -> int:
    """Measure, write the results, and print their summary."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*KINDS, *QUICK_KINDS], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny models: tells that it runs")
    parser.add_argument("--card", help="the catalogue's name of cuda:0. Default: by what CUDA calls it")
    parser.add_argument("--time-limit-s", type=float, default=420.0, help="no case begins after this long")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    card = None
    if torch.cuda.is_available():
        card = find_card(arguments.card or torch.cuda.get_device_name(0)).name
    quick = arguments.quick or card is None  # the large models would take hours on a CPU
    kinds = QUICK_KINDS if quick else KINDS
    chosen = {name: kind for name, kind in kinds.items() if name in (arguments.only or kinds)}
    figures = measured(chosen, card, arguments.time_limit_s, arguments.output, quick=quick)
    print(json.dumps({name: figures[name] for name in ("card", "device", "summary", "left_out_for_time", "wall_s")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
