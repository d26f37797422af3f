"""Cases for `cuda_kernels.py` that are image models of transformers, timm and torchvision."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kernel_case import Case
from kernel_language_models import VOCABULARY, Family
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Workload
from autosplit.workload.tree import tensors_of

BATCH = 4
SIZE = 224
SAMPLES = (32, 64)
PRECISIONS = ("bf16", "none")

CLASSIFIER = "AutoModelForImageClassification"


def _images(size: int = SIZE) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(2, (BATCH,))}


def _segmented() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIZE, SIZE), "labels": torch.randint(2, (BATCH, SIZE, SIZE))}


def _described() -> dict[str, Any]:
    codes = torch.randint(3, VOCABULARY, (BATCH, 77))
    return {"input_ids": codes, "pixel_values": torch.randn(BATCH, 3, SIZE, SIZE), "return_loss": True}


def _unlabelled() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 256, 256)}


def _finite_outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the mean of DETR's outputs; the model does not check whether its hidden states are finite."""
    finite = SimpleNamespace(all=lambda: True)
    with patch.object(torch, "isfinite", lambda _: finite):
        outputs = model(**batch)
    means = [output.float().mean() for output in tensors_of(outputs) if output.requires_grad]
    return sum(means[1:], means[0]) / len(means)


class _DetrFamily(Family):
    """DETR with a small ResNet as its backbone."""

    def workload(self, precision: str, *, for_cuda: bool = False) -> Workload:
        """Build the model."""
        import transformers

        backbone = transformers.ResNetConfig(depths=[1, 1, 1, 1], out_features=["stage4"])
        none = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        config = transformers.DetrConfig(**none, backbone_config=backbone, encoder_layers=1, decoder_layers=1)
        loss = self.loss_for_cuda if for_cuda else None
        model = transformers.DetrModel(config).train()
        return Workload(model, self.batch(), precision=precision, compute_loss=loss)


_TWO_LAYERS = {"num_hidden_layers": 2}
_CLIP = {
    "text_config": {**_TWO_LAYERS, "vocab_size": VOCABULARY, "eos_token_id": 2},
    "vision_config": _TWO_LAYERS,
}

_family = partial(Family, model=CLASSIFIER, batch=_images, vocabulary={})

OF_TRANSFORMERS = (
    _family("ViT", "ViTConfig", _TWO_LAYERS),
    _family("ViT, attention dropout", "ViTConfig", {**_TWO_LAYERS, "attention_probs_dropout_prob": 0.1}),
    _family("DeiT", "DeiTConfig", _TWO_LAYERS, model="DeiTForImageClassification"),
    _family("BEiT", "BeitConfig", {**_TWO_LAYERS, "use_relative_position_bias": True}),
    _family("DINOv2", "Dinov2Config", {**_TWO_LAYERS, "image_size": SIZE, "patch_size": 14}),
    _family("Swin", "SwinConfig", {"depths": [2, 2, 2, 2]}),
    _family("Swin v2", "Swinv2Config", {"depths": [2, 2, 2, 2]}, batch=partial(_images, 256)),
    _family("ConvNeXt", "ConvNextConfig", {"depths": [1, 1, 1, 1]}),
    _family("ResNet", "ResNetConfig", {"depths": [1, 1, 1, 1]}),
    _family(
        "SegFormer",
        "SegformerConfig",
        {"depths": [1, 1, 1, 1]},
        model="SegformerForSemanticSegmentation",
        batch=_segmented,
    ),
    _family("CLIP", "CLIPConfig", _CLIP, model="CLIPModel", batch=_described),
    _DetrFamily(
        "DETR",
        "DetrConfig",
        {},
        batch=_unlabelled,
        precisions=("bf16",),
        samples=(8, 16),
        loss_for_cuda=_finite_outputs,
    ),
)

TIMM = (
    "convnext_atto",
    "deit_tiny_patch16_224",
    "efficientnet_b0",
    "mixer_s16_224",
    "mobilenetv3_small_100",
    "resnet18",
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
)

TORCHVISION = (
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v3_small",
    "resnet18",
    "shufflenet_v2_x0_5",
    "swin_t",
    "vit_b_16",
)

_DECLARED: list[Any] = []


def load_torchvision() -> None:
    """Import torchvision, if it is installed, also next to a CPU build of torch.

    PyPI's torchvision contains a compiled library that loads only next to a CUDA build. Its models do not need that
    library. But torchvision, and with it transformers and timm, cannot be imported unless two of its ops exist.
    """
    if _DECLARED or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        _DECLARED.append(library)  # the ops vanish with the library
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _timm_model(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def _torchvision_model(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def _classified(model: Callable[[], nn.Module], precision: str) -> Workload:
    batch = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(1000, (BATCH,))
    return Workload(model().train(), batch, loss_fn=F.cross_entropy, precision=precision)


def vision_cases() -> Iterator[Case]:
    """Yield the cases that are image models."""
    for family in OF_TRANSFORMERS:
        yield from family.cases()
    for package, names, build in (
        ("timm", TIMM, _timm_model),
        ("torchvision", TORCHVISION, _torchvision_model),
    ):
        needs = ("torchvision",) if package == "torchvision" else ("timm", "torchvision")
        for name in names:
            for precision in PRECISIONS:
                workload = partial(_classified, partial(build, name), precision)
                yield Case(f"{package} {name} [{precision}]", workload, SAMPLES, needs=needs)
