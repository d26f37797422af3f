"""Compare simulated GPUs with published measurements: step times, gains of several GPUs, and largest batches.

    python benchmarks/published.py [--cache DIR] [--cached-only] [--seed 0] [--models 10] [--sample] [--output FILE]

The table is ``published.csv``: timm's training benchmark on an RTX 3090, torchvision's models on one GPU and with
nn.DataParallel on two to four, and models of transformers on V100, A100, H100 and L4. Models have random weights. Half
of the models, drawn by the seed, and some GPUs were fitted (``fit_cards.py``). The results separate them from the
others, which are "held out". A ratio is predicted / measured.

A full run takes hours, because it makes more than 1,200 traces. With ``--cached-only --sample``, only the steps whose
traces are in the cache are predicted. They become the entry ``sample`` of the results, and all other entries stay.

The script needs timm and torchvision (``pip install --no-deps timm torchvision``). It leaves out and reports models
that cannot be built. torchvision's models also work if its kernels do not load, as with a CPU build of torch.

Sources: github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv
(Apache-2.0); github.com/ryujaehun/pytorch-gpu-benchmark, new_results (MIT); github.com/sitar-lab/NeuSight,
scripts/asplos/label (MIT).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import pickle
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TIMM_FUSED_ATTN"] = "0"  # the measured models had none

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.devices.catalog import find_card
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.trainee import Trainee
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.op_cost import OpCost
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Trace, Tracer
from autosplit.workload.workload import Workload

TABLE = Path(__file__).with_name("published.csv")
RESULTS = Path(__file__).parent / "results" / "published.json"

LATER = ("H100-80GB", "A100-PCIe-80GB", "L4")
"""GPUs that were added to the table after the fit."""

CHANGED = ("ig_resnext101_32x16d", "ig_resnext101_32x32d", "ig_resnext101_32x48d")
"""Models that have an eighth to a half of the measured parameters in today's timm."""

USABLE_BYTES = int(21.7 * 2**30)
"""Memory of the RTX 3090 that torch could reserve for the published largest batches.

torch 1.12 with CUDA 11.3 loads all kernels when it starts, so its context is larger than that of the catalogue. The
size was fitted: of 89 rows, drawn at random, 93% are predicted within the published range with 21.7 GiB. With 21.3 GiB
and with 22 GiB, 92% are.
"""

HELD_OUT = ("TITAN-Xp", "V100-PCIe-16GB", *LATER)
"""GPUs that nothing is fitted to."""


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        batch: Samples of each GPU.
        size: Pixels of a side, or tokens.
        failed: The next larger batch size that was tried and failed, or 0.
    """

    family: str
    model: str
    card: str
    cards: int
    precision: str
    layout: str
    batch: int
    size: int
    step_s: float
    failed: int
    torch: str

    @property
    def step(self) -> tuple[Any, ...]:
        """Return the fields that determine the trace."""
        return self.family, self.model, self.precision, self.layout, self.size


def rows() -> list[Row]:
    """Read the table."""
    with TABLE.open() as file:
        return [
            Row(
                **{
                    **row,
                    **{name: int(row[name] or 0) for name in ("cards", "batch", "size", "failed")},
                    "step_s": float(row["step_s"]),
                }
            )
            for row in csv.DictReader(file)
            if row["model"] not in CHANGED
        ]


def workload(row: Row) -> Workload:
    """Build the model that was trained.

    Raises:
        ImportError: The package of its family is missing.
    """
    if row.family == "transformers":
        return _language_model(row)
    model = _vision_model(row)
    images = torch.zeros(2, 3, row.size, row.size)
    if row.family == "torchvision" and row.precision == "fp16":
        model, images = model.half(), images.half()
    if row.layout == "nhwc":
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    momentum = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    precision = "fp16" if row.family == "timm" else "none"
    classes = torch.zeros(2, dtype=torch.long)
    return Workload(model, (images, classes), loss_fn=_class_loss, optimizer=momentum, precision=precision)


def _class_loss(outputs: Any, classes: Tensor) -> Tensor:
    first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    return F.cross_entropy(first, classes)


def _vision_model(row: Row) -> nn.Module:
    _declare_torchvision()
    if row.family == "timm":
        import timm

        return timm.create_model(row.model)
    import torchvision

    return torchvision.models.get_model(row.model, weights=None)


_DECLARED: list[Any] = []


def _declare_torchvision() -> None:
    """Define two ops, so that torchvision can be imported even if its kernels do not load."""
    if not _DECLARED:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


_GPTS = {
    "gpt2_large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt3_27": {"n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
    "gpt3_xl": {"n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
}
"""Configurations from the source's scripts/asplos/data/DLmodel_configs. BERT and OPT are below."""


def _language_model(row: Row) -> Workload:
    _declare_torchvision()  # transformers imports it
    import transformers

    eager = {"attn_implementation": "eager"}
    tokens = torch.zeros(2, row.size, dtype=torch.long)

    def model() -> nn.Module:
        if row.model == "bert_large":
            config = transformers.BertConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **eager
            )
            return transformers.BertForMaskedLM(config)
        if row.model == "opt_13":
            config = transformers.OPTConfig(
                hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, **eager
            )
            return transformers.OPTForCausalLM(config)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPTS[row.model], **eager))

    # The largest model takes 10 GB, and its weights' values are not needed.
    built = built_without_memory(model, fake_mode())
    return Workload(built, {"input_ids": tokens, "labels": tokens}, optimizer=torch.optim.SGD, precision="none")


def kept_at(row: Row, batch: int, cache: Path | None) -> Path:
    """Return the file of a trace in the cache."""
    name = "-".join(map(str, (*row.step, batch, _kernels(row).capability)))
    return (cache or Path(os.devnull)) / (name.replace("/", "_") + ".pickle")


def _kernels(row: Row) -> GpuKernels:
    return GpuKernels.of(find_card(row.card).compute_capability)


def trace(row: Row, batch: int, cache: Path | None) -> Trace:
    """Return the trace of a step on one GPU.

    Args:
        cache: The folder of traces from earlier runs.
    """
    kept = kept_at(row, batch, cache)
    if kept.exists():
        found: Trace = pickle.loads(kept.read_bytes())
        return found
    found = _tracer(_step_only(row), _kernels(row)).trace(StepShape(((batch,),)))
    if cache is not None:
        kept.write_bytes(pickle.dumps(found))
    return found


# Predicted and published


def seconds(row: Row, cache: Path | None) -> float:
    """Return the predicted time of a step. It includes the optimizer's update only for timm, as the table does."""
    devices = parse_devices(f"sim:{row.cards}x{row.card}")
    # timm's inputs are on the GPU already.
    free = frozenset({"input"}) if row.family == "timm" else frozenset()
    worker = SimulatedWorker(devices, (2**60,) * row.cards, _Kept(row, cache), free=free)
    found = worker.measure(StepShape(((row.batch,) * row.cards,)))
    return found.seconds if row.family == "timm" else found.seconds - found.update_s


def _step_only(row: Row) -> Row:
    """Return the row without the fields that its traces do not depend on."""
    return replace(row, card="", cards=1, batch=0, step_s=0.0, failed=0, torch="")


@functools.lru_cache(maxsize=1)
def _tracer(row: Row, kernels: GpuKernels) -> Tracer:
    return Tracer(workload(row), fake=True, like_gpu=True, kernels=kernels)


class _Kept:
    """The traces of one row. The cache keeps traces of one GPU only."""

    fake = True
    scales_loss = False  # no benchmark of the table has a gradient scaler

    def __init__(self, row: Row, cache: Path | None) -> None:
        self._row, self._cache = row, cache

    def for_kernels(self, kernels: GpuKernels) -> _Kept:
        """Return these traces: all GPUs of a row are equal."""
        assert kernels == _kernels(self._row)
        return self

    @property
    def trainee(self) -> Trainee:
        return self._made().trainee

    def _made(self) -> Tracer:
        return _tracer(_step_only(self._row), _kernels(self._row))

    def trace(self, shape: StepShape, first: StepShape | None = None) -> Trace:  # noqa: ARG002  # as `Tracer`
        if shape.splits == ((self._row.batch,),):
            return trace(self._row, self._row.batch, self._cache)
        return self._made().trace(shape)

    def accumulation_costs(self) -> list[OpCost]:
        return self._made().accumulation_costs()

    def zeroing_costs(self) -> list[OpCost]:
        return self._made().zeroing_costs()


def summary(ratios: list[float]) -> dict[str, float]:
    """Return the bias, the median, the 90% quantile and the worst of errors."""
    off = sorted(abs(ratio - 1) for ratio in ratios)
    return {
        "steps": len(ratios),
        "bias": round(statistics.median(ratios), 3),
        "median": round(statistics.median(off), 3),
        "p90": round(off[int(0.9 * (len(off) - 1))], 3),
        "worst": round(off[-1], 3),
    }


def fitted_models(seed: int) -> set[str]:
    """Return the fitted models: half of the models that the table had at the time of the fit."""
    models = sorted({row.model for row in rows() if row.card not in LATER} | set(CHANGED))
    random.Random(seed).shuffle(models)
    return set(models[: len(models) // 2])


def step_times(known: list[Row], seed: int, cache: Path | None) -> dict[str, dict[str, float]]:
    """Return the errors of step times on one GPU, by GPU, precision and layout, for fitted and other models."""
    fitted = fitted_models(seed)
    ratios: dict[str, list[float]] = {}
    for row in known:
        if row.cards == 1:
            half = "fitted" if row.model in fitted and row.card not in HELD_OUT else "held out"
            names = [" ".join(part for part in (row.family, row.card, row.precision, row.layout, half) if part)]
            if row.family == "transformers":
                names.append("transformers, all cards")
            with _leaving_out(row):
                ratio = seconds(row, cache) / row.step_s
                for name in names:
                    ratios.setdefault(name, []).append(ratio)
    return {name: summary(found) for name, found in sorted(ratios.items())}


def gains(known: list[Row], cache: Path | None, most: int) -> dict[str, dict[str, float]]:
    """Return the errors of nn.DataParallel's gain: samples/s of several GPUs over those of one.

    Args:
        most: Number of models, drawn evenly from the table. Each needs its own traces.
    """
    models = sorted({row.model for row in known if row.cards > 1})
    chosen = set(models[:: max(1, len(models) // most)])
    ours: dict[tuple[str, ...], float] = {}
    ratios: dict[str, list[float]] = {}
    for row in sorted(known, key=lambda row: (row.model, row.cards)):
        if row.family != "torchvision" or row.model not in chosen or row.precision != "fp32":
            continue
        key = (row.model, row.card, row.torch)
        with _leaving_out(row):
            if row.cards == 1:
                ours[key] = seconds(row, cache) / row.step_s
            elif key in ours:
                name = f"{row.card} x {row.cards}"
                ratios.setdefault(name, []).append(ours[key] * row.step_s / seconds(row, cache))
    return {name: summary(found) for name, found in sorted(ratios.items())}


def brackets(known: list[Row], cache: Path | None) -> dict[str, Any]:
    """Return how often the largest batch is between the largest successful batch and the next failed batch."""
    settings = AllocatorSettings()
    inside = above = count = 0
    for row in known:
        if row.failed and row.layout == "nchw":
            with _leaving_out(row):
                found = (trace(row, batch, cache) for batch in (row.batch, row.failed))
                fits, fails = (one.reserved_bytes(0, settings, USABLE_BYTES) <= USABLE_BYTES for one in found)
                count, inside, above = count + 1, inside + (fits and not fails), above + fails
    shares = {"inside": round(inside / max(1, count), 3), "above": round(above / max(1, count), 3)}
    return {"models": count, **shares, "date": datetime.now(timezone.utc).date().isoformat()}


@contextmanager
def _leaving_out(row: Row) -> Iterator[None]:
    """Leave out and report rows that cannot be built. The model or its package may be missing."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 # models of other packages may raise anything
        print(f"left out: {row.model}: {type(error).__name__}: {str(error)[:100]}")


def main() -> None:
    """Replay the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path, help="a folder that keeps traces, which take most of the time")
    parser.add_argument("--cached-only", action="store_true", help="leave out steps without a trace in the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=10, help="models whose gain with several GPUs is compared")
    parser.add_argument("--sample", action="store_true", help="write only the entry `sample`, and keep all others")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = rows()
    if options.cached_only:
        known = [row for row in known if kept_at(row, row.batch, options.cache).exists()]
    bracketed = [r for r in known if not options.cached_only or kept_at(r, r.failed, options.cache).exists()]
    today = datetime.now(timezone.utc).date().isoformat()
    report: dict[str, Any] = {
        "date": today,
        "gain date": today,
        "torch": str(torch.__version__),
        "seed": options.seed,
        "step times": step_times(known, options.seed, options.cache),
        "largest batch": brackets(bracketed, options.cache),
    }
    if options.sample:
        del report["gain date"]
        report = {**json.loads(options.output.read_text()), "sample": report}
    else:
        report["gain of DataParallel"] = gains(known, options.cache, options.models)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
