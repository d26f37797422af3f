"""Four small models whose batches are not tensors with one common first dimension.

Each has a data set of `Samples`, a function that collates samples into a batch, and a loss that is a mean over samples.
All randomness is drawn per sample from its own seed: sample 3 is the same in every batch and in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from autosplit import Workload

DTYPE = torch.float64
"""Dtype of all models and samples, so that gradients can be compared to within 1e-12."""


def numbers(seed: int, *shape: int) -> Tensor:
    """Draw numbers between 0 and 1 from a seed."""
    drawn = random.Random(seed)
    size = torch.Size(shape)
    return torch.tensor([drawn.random() for _ in range(size.numel())], dtype=DTYPE).view(size)


# A detector as in torchvision: lists of images of different sizes, and a dict of boxes and labels for each image.


def image_and_boxes(index: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an image, with one to three boxes."""
    boxes = 1 + index % 3
    labels = torch.tensor([(index + box) % 4 for box in range(boxes)])
    return numbers(index, 3, 8 + index % 3, 9), {"boxes": numbers(1000 + index, boxes, 4), "labels": labels}


def collate_lists(samples: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the images and the targets as two lists."""
    return [image for image, _ in samples], [target for _, target in samples]


class Detector(nn.Module):
    """Return a dict of losses in training, and a dict of scores for each image in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 6, 3)
        self.box, self.classes = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = [self.backbone(image[None]).relu().mean((0, 2, 3)) for image in images]
        if targets is None:
            return [{"boxes": self.box(one), "scores": self.classes(one).softmax(0)} for one in features]
        assert len(images) == len(targets)
        boxes = [
            (self.box(one) - target["boxes"]).square().mean() for one, target in zip(features, targets, strict=True)
        ]
        labels = [
            F.cross_entropy(self.classes(one).expand(len(target["labels"]), -1), target["labels"])
            for one, target in zip(features, targets, strict=True)
        ]
        return {"loss_box": torch.stack(boxes).mean(), "loss_classifier": torch.stack(labels).mean()}


def sum_of_losses(model: Any, batch: Any) -> Tensor:
    """Return the sum of the losses that a detector returns."""
    loss: Tensor = sum(model(*batch).values())
    return loss


# A graph classifier as in PyG: the nodes of all graphs in one tensor, edges between their positions.


def graph(index: int) -> dict[str, Any]:
    """Return a ring of two to six nodes, with features and a class."""
    nodes = 2 + index % 5
    edges = [[node, (node + 1) % nodes] for node in range(nodes)]
    return {"x": numbers(index, nodes, 4), "edges": edges, "y": index % 3}


def collate_graphs(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Put graphs next to each other: one graph with `batch`, the graph of each node."""
    edges, owners, first = [], [], 0
    for number, sample in enumerate(samples):
        edges += [[start + first, end + first] for start, end in sample["edges"]]
        owners += [number] * len(sample["x"])
        first += len(sample["x"])
    return {
        "x": torch.cat([sample["x"] for sample in samples]),
        "edge_index": torch.tensor(edges).t().contiguous(),
        "batch": torch.tensor(owners),
        "y": torch.tensor([sample["y"] for sample in samples]),
    }


class GraphClassifier(nn.Module):
    """Passes messages along edges, and classifies the sum of each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        start, end = edge_index
        features = self.message(x).tanh()
        features = features.index_add(0, end, features[start])
        pooled = features.new_zeros(len(y), 8).index_add(0, batch, features)
        return F.cross_entropy(self.head(pooled), y)


# A vision-language model as Qwen-VL: tokens with a batch dimension, next to the patches of all images in one tensor.


def text_and_image(index: int) -> dict[str, Any]:
    """Return tokens with the patches of one image, which has 1 x 2 x 2 to 1 x 3 x 2 patches."""
    drawn = random.Random(index)
    height = 2 + index % 2
    tokens = torch.tensor([drawn.randrange(20) for _ in range(7)])
    return {"input_ids": tokens, "pixel_values": numbers(index, height * 2, 6), "grid": [1, height, 2]}


def collate_patches(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack the tokens, and put the patches of all images one after another."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "pixel_values": torch.cat([sample["pixel_values"] for sample in samples]),
        "image_grid_thw": torch.tensor([sample["grid"] for sample in samples]),
    }


class VisionLanguage(nn.Module):
    """Predicts each token from the tokens before it and from the mean patch of its image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.patch, self.head = nn.Embedding(20, 8), nn.Linear(6, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        patches = self.patch(pixel_values).tanh()
        images = torch.stack([one.mean(0) for one in patches.split(image_grid_thw.prod(1).tolist())])
        logits = self.head(self.embedding(input_ids) + images[:, None])
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return {"loss": loss, "logits": logits}


# A detector as DETR: images in one tensor, and a list with the labels of each image.


def square_image(index: int) -> dict[str, Any]:
    """Return an image of the common size, with one to three boxes."""
    boxes = 1 + index % 3
    classes = torch.tensor([(index + box) % 4 for box in range(boxes)])
    return {
        "pixel_values": numbers(index, 3, 8, 8),
        "labels": {"class_labels": classes, "boxes": numbers(1000 + index, boxes, 4)},
    }


def collate_labels(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack the images, and list the labels."""
    images = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": images, "labels": [sample["labels"] for sample in samples]}


class Detr(nn.Module):
    """Returns a loss over a list of labels, with the classes and boxes of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 6, 3)
        self.box, self.classes = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> Any:
        assert len(pixel_values) == len(labels)
        features = self.backbone(pixel_values).relu().mean((2, 3))
        boxes, logits = self.box(features), self.classes(features)
        losses = [
            (box - label["boxes"]).square().mean()
            + F.cross_entropy(logit.expand(len(label["class_labels"]), -1), label["class_labels"])
            for box, logit, label in zip(boxes, logits, labels, strict=True)
        ]
        return {"loss": torch.stack(losses).mean(), "logits": logits, "pred_boxes": boxes}


def own_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss that a model returns among its outputs."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def output_is_loss(model: Any, batch: Any) -> Tensor:
    """Return the output of a model that returns its loss alone."""
    loss: Tensor = model(**batch)
    return loss


class Samples(Dataset[Any]):
    """A data set whose sample number `index` is ``sample(index)``."""

    def __init__(self, sample: Callable[[int], Any], length: int) -> None:
        self.sample, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


@dataclass(frozen=True)
class Ragged:
    """A model with the samples that it trains on.

    Attributes:
        is_cut: Whether `BalancedDataParallel` can cut its batches.
    """

    model: Callable[[], nn.Module]
    sample: Callable[[int], Any]
    collate: Callable[[Sequence[Any]], Any]
    compute_loss: Callable[[Any, Any], Tensor]
    is_cut: bool

    def built(self) -> nn.Module:
        """Build the model from seed 0, in double precision."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().to(DTYPE)

    def data(self, length: int = 64) -> Samples:
        """Return a data set, for a DataLoader with ``collate_fn=collate``."""
        return Samples(self.sample, length)

    def batch(self, n: int) -> Any:
        """Return the batch of the first `n` samples: the `make_batch` of a workload."""
        return self.collate([self.sample(index) for index in range(n)])

    def workload(self, n: int = 4, **options: Any) -> Workload:
        """Return a workload with a sample batch of `n` samples, and with `make_batch`."""
        given = {"compute_loss": self.compute_loss, "optimizer": torch.optim.SGD, "make_batch": self.batch, **options}
        return Workload(self.built(), self.batch(n), **given)


RAGGED = {
    "detector": Ragged(Detector, image_and_boxes, collate_lists, sum_of_losses, is_cut=True),
    "graphs": Ragged(GraphClassifier, graph, collate_graphs, output_is_loss, is_cut=False),
    "vision-language": Ragged(VisionLanguage, text_and_image, collate_patches, own_loss, is_cut=False),
    "detr": Ragged(Detr, square_image, collate_labels, own_loss, is_cut=True),
}
