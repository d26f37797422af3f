"""Compare memory estimators on published largest batches: predict the largest batch of each model on an RTX 3090.

    python benchmarks/rivals.py [--brackets N] [--jobs 2] [--seed 0] [--output FILE]

The brackets are the rows of ``published.csv`` in which timm's training benchmark found the largest batch that fits, and
the next larger batch failed. The layout is nchw, the precision fp16 autocast. A prediction is correct if it is at least
the first and smaller than the second. Every estimator gets the same memory: 21.7 GiB, which torch 1.12 could reserve on
this GPU (`published.USABLE_BYTES`). The committed run is older and had 20.92 GiB, because autosplit then predicted
tensors, without the allocator's gaps. No estimator keeps a reserve (``reserve=0`` in autosplit). Predictions in the
output file are kept if the installed versions are the same, so an interrupted run continues.

How each estimator is used:

autosplit: ``find_ceiling`` on the simulated GPU.
MemTracker: torch's tracker over a step of fake CPU tensors, with the CPU's autocast and the momentum already there.
    The script searches for the largest batch whose peak fits. It turns off the statistics of each module, which do not
    change the peak.
torch-preflight: the model on the meta device, precision AMP, SGD with momentum. It adds a CUDA context, which the
    memory given to it does not contain, so the script subtracts the context.
torch-kitsune: ``predict_memory`` in float32 for one sample. It has no autocast, so the script halves the activations.
    As in its own search, only the activations grow, in proportion to the batch, up to 4096.
alloc: its activation hooks with the image size of the benchmark, in float32. The script halves the activations, and
    ``ghost`` adds the rest for fp16 and SGD.
vram-check: ``estimate`` with fp16 and SGD, which it defines as SGD with momentum.
Megatron-Bridge: the formula of its ``report_theoretical_memory`` for one GPU, for timm's plain vision transformers. The
    classes are the vocabulary. Other models have no such formula.

`UNANSWERED` lists the tools that predict no largest batch, with the reason. Versions of the committed run (packages
that are not installed are reported, and the others are compared):

    pip install --no-deps timm==1.0.31 torchvision==0.28.0 torch-preflight==0.5.0 torch-kitsune==0.7.0 alloc==0.0.16 \
        vram-check==0.1.1
    pip install libcst rich
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import json
import math
import multiprocessing
import random
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from published import Row, _class_loss, rows, workload
from torch import nn

import autosplit
from autosplit.devices.spec import parse_devices

RESULTS = Path(__file__).parent / "results" / "rivals.json"

CARD = "sim:RTX3090@21.7GiB"

LARGEST = 4096
"""Largest batch that is searched. torch-kitsune's own limit."""

UNANSWERED = {
    "accelerate estimate-memory": "one figure for the weights, gradients and Adam; it takes no batch size",
    "autotrainer": "find_batch_size runs real steps until the GPU is out of memory, so it needs the GPU",
    "torch.distributed._tools.RuntimeEstimator": "predicts the time of a step, not its memory",
}
"""Tools that predict no largest batch for a GPU that is not there."""

PACKAGES = {
    "autosplit": "autosplit",
    "MemTracker": "torch",
    "torch-preflight": "torch-preflight",
    "torch-kitsune": "torch-kitsune",
    "alloc": "alloc",
    "vram-check": "vram-check",
    "Megatron-Bridge": "torch",
}
"""The distribution of each estimator. The formula of Megatron-Bridge is in this script."""


class NoAnswerError(Exception):
    """Raised if an estimator does not cover a model."""


def largest_line(fixed_bytes: float, sample_bytes: float, usable_bytes: float) -> int:
    """Return the largest batch of an estimator whose bytes are `fixed_bytes + batch * sample_bytes`."""
    if sample_bytes <= 0:
        raise NoAnswerError("no memory per sample")
    return max(0, min(LARGEST, math.floor((usable_bytes - fixed_bytes) / sample_bytes)))


def largest_searched(peak: Callable[[int], float], usable_bytes: float) -> int:
    """Return the largest batch whose `peak` fits.

    The next batch is where the line through the last two batches meets the memory. The search ends if this line leaves
    less than one sample free.
    """
    batch, last, found = 32, 2, 0
    last_bytes = peak(last)
    for _ in range(8):
        batch_bytes = peak(batch)
        if batch_bytes <= usable_bytes:
            found = max(found, batch)
        sample_bytes = (batch_bytes - last_bytes) / (batch - last)
        further = batch + math.floor((usable_bytes - batch_bytes) / sample_bytes)
        last, last_bytes = batch, batch_bytes
        batch = min(LARGEST, max(1, further))
        if batch == last:
            break
    return found


# The estimators


def usable_bytes() -> int:
    """Return the memory that every estimator may use."""
    return parse_devices(CARD)[0].capacity_bytes


def _autosplit(row: Row) -> int:
    return autosplit.find_ceiling(partial(workload, row), CARD, role="primary", reserve=0).batch_size


@functools.lru_cache(maxsize=1)
def _model(row: Row) -> nn.Module:
    model = workload(row).model
    assert isinstance(model, nn.Module)
    return model


def totals_only(tracker: Any) -> Any:
    """Turn off the statistics of each module, which take most of MemTracker's time. The total stays the same."""
    for hook in ("_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook", "_post_bw_hook"):
        setattr(tracker, hook, lambda *_: None)
    return tracker


def _mem_tracker(row: Row) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model = copy.deepcopy(_model(row)).train()._apply(mode.from_tensor)  # noqa: SLF001
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    with mode:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # the momentum

        def peak(batch: int) -> float:
            optimizer.zero_grad()
            images, classes = torch.zeros(batch, 3, row.size, row.size), torch.zeros(batch, dtype=torch.long)
            tracker = totals_only(MemTracker())
            tracker.track_external(model, optimizer, images, classes)
            with tracker:
                with torch.autocast("cpu", torch.float16):
                    loss = _class_loss(model(images), classes)
                loss.backward()
                optimizer.step()
            return float(sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))

        return largest_searched(peak, usable_bytes())


def _torch_preflight(row: Row) -> int:
    from torch_preflight.vram import OptimizerKind, PrecisionMode, RunConfig, estimate_config
    from torch_preflight.vram.providers import meta

    def config(batch: int) -> Any:
        return RunConfig(
            batch_size=batch,
            image_size=row.size,
            precision=PrecisionMode.AMP,
            optimizer=OptimizerKind.SGD_MOMENTUM,
        )

    profile = meta.profile("timm:create_model", config(2), {"model_name": row.model})
    if profile.activation_bytes_per_sample is None:
        raise NoAnswerError("no activations")

    def total(batch: int) -> float:
        found = estimate_config(profile, config(batch), with_remediations=False).breakdown
        return float(found.total - found.cuda_context)

    return largest_searched(total, usable_bytes())


def _torch_kitsune(row: Row) -> int:
    from kitsune.predict import predict_memory
    from kitsune.predict.estimator import OVERHEAD_FRACTION

    model = _model(row).eval()  # batch normalisation cannot train on one sample, and the outputs are as large
    found = predict_memory(model, (3, row.size, row.size), 1, torch.float32, "sgd_momentum", training=True)
    fixed = found.param_bytes + found.gradient_bytes + found.optimizer_bytes
    return largest_line(fixed, found.activation_bytes / 2, usable_bytes() / (1 + OVERHEAD_FRACTION))


def _alloc(row: Row) -> int:
    from alloc.extractor_runner import _measure_activations
    from alloc.ghost import ghost

    model = _model(row)
    traced = _measure_activations(model, {"image_size": row.size})
    if not traced:
        raise NoAnswerError("its forward on the CPU failed")
    count = sum(parameter.numel() for parameter in model.parameters())

    def total(batch: int) -> float:
        found = ghost(
            param_count=count,
            dtype="float16",
            batch_size=batch,
            optimizer_type="SGD",
            activation_memory_bytes=traced["activation_memory_bytes"] // 2,
        )
        return float(found.total_gb * 2**30)

    one, two = total(1000), total(2000)  # the report rounds to 0.01 GB
    return largest_line(2 * one - two, (two - one) / 1000, usable_bytes())


def _vram_check(row: Row) -> int:
    from vram_check.estimator import estimate

    count = sum(parameter.numel() for parameter in _model(row).parameters())
    one, two = (estimate(count, batch, "fp16", "sgd").total_bytes for batch in (1, 2))
    return largest_line(2 * one - two, two - one, usable_bytes())


def _megatron(row: Row) -> int:
    from timm.models.vision_transformer import VisionTransformer

    model = _model(row)
    if type(model) is not VisionTransformer:
        raise NoAnswerError("not a plain transformer")
    tokens, hidden = model.pos_embed.shape[1], model.embed_dim
    inner = model.blocks[0].mlp.fc1.out_features
    return largest_line(
        18 * sum(parameter.numel() for parameter in model.parameters()),
        megatron_sample_bytes(tokens, hidden, inner, len(model.blocks), model.num_classes),
        usable_bytes(),
    )


def megatron_sample_bytes(tokens: int, hidden: int, inner: int, layers: int, vocabulary: int) -> float:
    """Return the activation bytes of one sample in Megatron-Bridge's formula, without parallelism.

    The formula is that of table 2 in arXiv:2205.05198 with selective recomputation, plus embedding, dropout and loss.
    """
    layer = tokens * hidden * (18 + 4 * inner / hidden)
    embedding = 8 * tokens + tokens * hidden
    return layers * layer + embedding + 4 * tokens * hidden * (1 + vocabulary / hidden)


ESTIMATORS: dict[str, Callable[[Row], int]] = {
    "autosplit": _autosplit,
    "MemTracker": _mem_tracker,
    "torch-preflight": _torch_preflight,
    "torch-kitsune": _torch_kitsune,
    "alloc": _alloc,
    "vram-check": _vram_check,
    "Megatron-Bridge": _megatron,
}


# The brackets


@dataclass(frozen=True)
class Bracket:
    """A published largest batch.

    Attributes:
        fits: The largest batch that ran.
        fails: The next larger batch that was tried. It failed.
    """

    model: str
    fits: int
    fails: int


def brackets(seed: int) -> list[Row]:
    """Return the rows with a bracket in an order that the seed draws, so that the first ones are a random sample."""
    found = [row for row in rows() if row.failed and row.layout == "nchw"]
    random.Random(seed).shuffle(found)
    return found


def ratio(predicted: int, bracket: Bracket) -> float:
    """Return the prediction divided by the nearest end of the bracket: 1 inside, smaller below, larger above."""
    return predicted / min(max(predicted, bracket.fits), bracket.fails - 1)


def errors(pairs: Iterable[tuple[int, Bracket]]) -> dict[str, float]:
    """Return the shares of predictions inside, below and above their brackets, and the ratios.

    ``"median"`` is the median ratio. ``"factor of 90%"`` is the factor by which 90% of the predictions are off at most.
    """
    ratios = sorted(ratio(predicted, bracket) for predicted, bracket in pairs)
    if not ratios:
        return {"brackets": 0}
    factors = sorted(max(one, 1 / one) if one else math.inf for one in ratios)
    ninth = factors[math.ceil(0.9 * len(factors)) - 1]
    return {
        "brackets": len(ratios),
        "inside": round(sum(one == 1 for one in ratios) / len(ratios), 3),
        "below": round(sum(one < 1 for one in ratios) / len(ratios), 3),
        "above": round(sum(one > 1 for one in ratios) / len(ratios), 3),
        "median": round(statistics.median(ratios), 3),
        "factor of 90%": round(min(ninth, LARGEST), 2),
    }


def predicted(row: Row, names: Iterable[str]) -> dict[str, Any]:
    """Return the prediction of each estimator for a row: a batch, or the reason why there is none."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"fits": row.batch, "fails": row.failed}
    for name in names:
        try:
            found[name] = ESTIMATORS[name](row)
        except Exception as error:  # noqa: BLE001 # models and estimators may raise anything
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return found


def installed() -> dict[str, str]:
    """Return the version of each estimator's package that is installed."""
    versions = {}
    for name, package in PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def report(predictions: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return the errors of each estimator over the models that it gave a batch for."""
    found = {}
    for name in names:
        pairs = [
            (one[name], Bracket(model, one["fits"], one["fails"]))
            for model, one in predictions.items()
            if isinstance(one.get(name), int)
        ]
        found[name] = errors(pairs)
    return found


def main() -> None:
    """Predict, compare, and write the results after each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--brackets", type=int, default=10**6, help="the first of them in the order of the seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    versions = installed()
    everything = brackets(options.seed)
    frame = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"torch": str(torch.__version__), "timm": importlib.metadata.version("timm")},
        "seed": options.seed,
        "published brackets": len(everything),
        "usable_bytes": usable_bytes(),
        "estimators": versions,
        "not installed": sorted(set(PACKAGES) - set(versions)),
        "no answer": UNANSWERED,
    }
    predictions: dict[str, Any] = {}
    if options.output.exists():
        known = json.loads(options.output.read_text())
        if all(known[name] == frame[name] for name in ("versions", "seed", "usable_bytes", "estimators")):
            predictions = known["predictions"]
    left = [row for row in everything[: options.brackets] if row.model not in predictions]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, partial(torch.set_num_threads, 1)) as pool:
        for done in as_completed({pool.submit(_of_model, row, tuple(versions)) for row in left}):
            model, found = done.result()
            predictions[model] = found
            errors_now = report(predictions, versions)
            whole = {**frame, "errors": errors_now, "predictions": dict(sorted(predictions.items()))}
            options.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(report(predictions, versions), indent=1))


def _of_model(row: Row, names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    return row.model, predicted(row, names)


if __name__ == "__main__":
    main()
