"""Real losses in the Trainer, accelerate and Lightning, on two unequal ranks: exact, or an error.

The cases come from bug reports: class weights, vision-language batches with ragged tensors, DETR's labels and its
normaliser, and sample weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")

import shared_training as shared
import torch
from ranks import found_by, run_ranks_once
from tool_runs import Job, by_accelerate, by_lightning, by_transformers, own_loss
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from autosplit.errors import InputError
from autosplit.parallel.loss_weights import UnevenLossWarning

EXACT = 1e-12
pytestmark = pytest.mark.slow

SIZES, EFFECTIVE, NUM_SAMPLES, LR = (5, 3), 16, 40, 0.1
CLASS_WEIGHTS = torch.tensor([0.3, 2.7, 1.1], dtype=torch.float64)


def make_sample(index: int) -> dict[str, Any]:
    """Return a sample with all fields. The first samples share a class, as in a sorted dataset."""
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 50, (6 + index % 9,), generator=draw)
    ids[: 2 + index % 3] = 0
    labels = ids.clone()
    labels[: 2 + index % 3 + index % 4] = -100
    return {
        "x": torch.randn(4, dtype=torch.float64, generator=draw),
        "kind": torch.tensor(index // 15),
        "weight": torch.rand((), dtype=torch.float64, generator=draw) + 0.1,
        "boxes": torch.rand(1 + index % 3, 4, dtype=torch.float64, generator=draw),
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.randn(2 + index % 3, 6, dtype=torch.float64, generator=draw),
    }


SAMPLES = [make_sample(index) for index in range(NUM_SAMPLES)]


def classes(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([one["x"] for one in samples]), "labels": torch.stack([one["kind"] for one in samples])}


def weighted(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**classes(samples), "weights": torch.stack([one["weight"] for one in samples])}


def detections(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """DETR's batch: its labels are a list of dicts."""
    return {
        "x": torch.stack([one["x"] for one in samples]),
        "labels": [{"boxes": one["boxes"]} for one in samples],
    }


def vision(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Qwen-VL's batch: the patches of all its images, and padded texts."""
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": padded([one["input_ids"] for one in samples], padding_value=1),
        "labels": padded([one["labels"] for one in samples], padding_value=-100),
        "pixel_values": torch.cat([one["pixel_values"] for one in samples]),
    }


class Classifier(nn.Module):
    """Returns a loss with class weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, weights: Any = None) -> dict[str, Any]:
        logits = self.layer(x)
        if labels is None:
            return {"logits": logits}
        if weights is None:
            return {"loss": F.cross_entropy(logits, labels, weight=CLASS_WEIGHTS), "logits": logits}
        each = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": (each * weights).sum() / weights.sum(), "logits": logits}


class Detector(nn.Module):
    """Takes the mean over its images, or divides by the boxes of all ranks."""

    def __init__(self, over: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.over = over
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, labels: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        outputs = self.layer(x)
        squares = [(output - one["boxes"]) ** 2 for output, one in zip(outputs, labels, strict=True)]
        if self.over == "images":
            return {"loss": sum(one.mean() for one in squares) / len(labels), "logits": outputs}
        boxes = torch.tensor(float(sum(map(len, squares))), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(boxes)
            boxes /= dist.get_world_size()
        return {"loss": sum(one.sum() for one in squares) / boxes, "logits": outputs}


class VisionLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(50, 8).double(), nn.Linear(8, 50).double()
        self.patches = nn.Linear(6, 8).double()

    def forward(self, input_ids: Any, labels: Any, pixel_values: Any) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        hidden = hidden.masked_scatter((input_ids == 0)[..., None], self.patches(pixel_values))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], dict[str, Any]]]] = {
    "class weights": (Classifier, classes),
    "sample weights": (Classifier, weighted),
    "images": (partial(Detector, "images"), detections),
    "boxes": (partial(Detector, "boxes"), detections),
    "vision": (VisionLanguage, vision),
}


def next_tokens(batch: dict[str, Any]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def class_weights(batch: dict[str, Any]) -> torch.Tensor:
    return CLASS_WEIGHTS[batch["labels"]].sum()


def sample_weights(batch: dict[str, Any]) -> float:
    return float(batch["weights"].sum())


def boxes(batch: dict[str, Any]) -> int:
    return sum(len(one["boxes"]) for one in batch["labels"])


def in_one_process(name: str) -> torch.Tensor:
    make, collate = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for first in range(0, NUM_SAMPLES, EFFECTIVE):
        model(**collate(SAMPLES[first : first + EFFECTIVE]))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return shared.weights_of(model)


def trained(tool: Callable[..., Any], name: str, *, loss: Any = own_loss, **options: Any) -> torch.Tensor:
    make, collate = MODELS[name]
    job = Job(make, SAMPLES, LR, collate=collate, shuffle=False, loss=loss)
    return shared.weights_of(tool(job, shared.shares_plan(SIZES, EFFECTIVE), **options)[0])


EXACT_RUNS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "trainer, class weights": (by_transformers, "class weights", {}),
    "trainer, lists of labels": (by_transformers, "images", {}),
    "trainer, boxes of all ranks": (by_transformers, "boxes", {"loss_scope": "ranks", "count": boxes}),
    "trainer, vision": (by_transformers, "vision", {}),
    "accelerate, class weights": (by_accelerate, "class weights", {"count": class_weights}),
    "accelerate, sample weights": (by_accelerate, "sample weights", {"count": sample_weights}),
    "accelerate, boxes of all ranks": (by_accelerate, "boxes", {"loss_scope": "ranks", "count": boxes}),
    "accelerate, vision": (by_accelerate, "vision", {"count": next_tokens}),
    "lightning, sample weights": (by_lightning, "sample weights", {"count": sample_weights}),
    "lightning, boxes of all ranks": (by_lightning, "boxes", {"loss_scope": "ranks", "count": boxes}),
    "lightning, vision": (by_lightning, "vision", {}),
}

REFUSED_RUNS: dict[str, tuple[Callable[..., Any], str, dict[str, Any], str]] = {
    "accelerate, class weights": (by_accelerate, "class weights", {}, "float(class_weights[labels].sum())"),
    "accelerate, vision": (by_accelerate, "vision", {}, 'int((batch["labels"][:, 1:] != -100).sum())'),
    "trainer, uncounted": (by_transformers, "boxes", {"loss_scope": "ranks"}, "a step has 2 micro-batches"),
}

WARNED_RUNS = {
    "trainer": (by_transformers, "Pass count= to the Trainer"),
    "accelerate": (by_accelerate, "Pass count= to the Accelerator"),
    "lightning": (by_lightning, "Pass count= to Shares"),
}
"""Runs with sample weights and without a count. No argument of a cross entropy shows these weights."""


def refused(tool: Callable[..., Any], name: str, options: dict[str, Any]) -> str:
    try:
        trained(tool, name, **options)
    except InputError as refusal:
        return str(refusal)
    return "not refused"


def warned(tool: Callable[..., Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(tool, "sample weights")
    return [str(one.message) for one in caught if issubclass(one.category, UnevenLossWarning)]


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: partial(trained, tool, model, **options) for name, (tool, model, options) in EXACT_RUNS.items()},
    **{f"refused: {n}": partial(refused, tool, *args) for n, (tool, *args, _) in REFUSED_RUNS.items()},
    **{f"warned: {name}": partial(warned, tool) for name, (tool, _) in WARNED_RUNS.items()},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    return run_ranks_once(tmp_path_factory, __name__, "SCENARIOS", 2, limit_s=400)


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_two_unequal_ranks_train_as_one_process(ranks, name):
    expected = in_one_process(EXACT_RUNS[name][1])
    for found in found_by(ranks, name):
        assert float((found - expected).abs().max()) < EXACT


@pytest.mark.parametrize("name", REFUSED_RUNS)
def test_what_is_weighted_wrongly_is_refused_on_every_rank(ranks, name):
    for found in found_by(ranks, f"refused: {name}"):
        assert REFUSED_RUNS[name][-1] in found or "In another process the loss is not a mean over samples" in found


@pytest.mark.parametrize("name", WARNED_RUNS)
def test_what_fits_no_rule_is_warned_of(ranks, name):
    first, *_ = found_by(ranks, f"warned: {name}")
    assert any("not a mean over labels or samples" in said for said in first)
    assert any(WARNED_RUNS[name][1] in said for said in first)
