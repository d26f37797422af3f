"""How far simulated cards are off what others measured: step times, the gain of several cards, the largest batch.

    python benchmarks/published.py [--cache DIR] [--seed 0] [--output FILE]

Replays the tables in ``published.csv`` on simulated cards: timm's training benchmark on an RTX 3090, torchvision's
models on one card and by nn.DataParallel on two to four, transformers' on a V100. Models are built with random
weights. Half of the models, drawn by the seed, and some cards were fitted (``fit_cards.py``), the rest were not: both
are told apart. A ratio is predicted / measured.

It takes timm and torchvision (``pip install --no-deps timm torchvision``); what is not installed is left out, and said
to be. Where torchvision's kernels do not load beside a torch for processors, its models still do.

Sources: github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv
(Apache-2.0); github.com/ryujaehun/pytorch-gpu-benchmark, new_results (MIT); github.com/sitar-lab/NeuSight,
scripts/asplos/label (MIT).
"""

from __future__ import annotations

import csv
import os
import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TIMM_FUSED_ATTN"] = "0"  # what was measured had none

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracer import Trace, Tracer
from autosplit.workload.workload import Workload

TABLE = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        batch: Samples of each card.
        size: Pixels of a side, or tokens.
        failed: The next larger batch that was tried and failed; 0 where none was.
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
        """What has to be traced for it."""
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
        ]


def workload(row: Row) -> Workload:
    """Build what was trained.

    Raises:
        ImportError: Its family's package is not here.
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
    """Let torchvision be imported whose kernels do not load: it describes two ops that must exist."""
    if not _DECLARED:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


def _language_model(row: Row) -> Workload:
    import transformers

    eager = {"attn_implementation": "eager"}
    if row.model == "bert_large":
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **eager
        )
        model: nn.Module = transformers.BertForMaskedLM(config)
    else:
        config = transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20, **eager)
        model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(2, row.size, dtype=torch.long)
    return Workload(model, {"input_ids": tokens, "labels": tokens}, optimizer=torch.optim.SGD, precision="none")


def kept_at(row: Row, batch: int, cache: Path | None) -> Path:
    """Return where a trace is kept."""
    return (cache or Path(os.devnull)) / ("-".join(map(str, (*row.step, batch))).replace("/", "_") + ".pickle")


def trace(row: Row, batch: int, cache: Path | None) -> Trace:
    """Follow a step of one card.

    Args:
        cache: Where traces are kept from one run to the next.
    """
    kept = kept_at(row, batch, cache)
    if kept.exists():
        found: Trace = pickle.loads(kept.read_bytes())
        return found
    followed = Tracer(workload(row), fake=True, like_gpu=True).trace(StepShape(((batch,),)))
    found = replace(followed, entries=())
    if cache is not None:
        kept.write_bytes(pickle.dumps(found))
    return found
