"""The models that `gpu.py` trains, and the predictions of `sim:` for them.

Every model is built from its configuration with random weights, so nothing is downloaded. Each has a large size for a
GPU, and a small size that a CPU finishes in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from answer import of_this_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autosplit
from autosplit import Workload

PREDICTED_FOR = ("H100-80GB", "H200")
"""The GPUs of the catalogue that `--predict` predicts."""


@dataclass(frozen=True)
class Setting:
    """One training step whose time and memory are predicted and measured.

    Attributes:
        name: The model, its precision and what is special about it.
        build: Returns the workload; called with ``small``.
        samples: Two batch sizes. The memory is compared at both, the time at the larger.
    """

    name: str
    build: Callable[[bool], Workload]
    samples: tuple[int, int]

    def sizes(self, small: bool) -> tuple[int, int]:
        """Return the two batch sizes."""
        return (2, 4) if small else self.samples


# ------------------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        count, length, width = x.shape
        shape = count, length, 3, self.heads, width // self.heads
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A small GPT of our own."""

    def __init__(
        self, width: int, depth: int, vocabulary: int, length: int, dropout: float, *, checkpointed: bool
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, max(1, width // 64), dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        """Run the model."""
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.tokens(codes) + self.places(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM whose last state is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.head(self.rnn(x)[0][:, -1])


def _cnn_model(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cnn(
    small: bool, *, channels_last: bool = False, optimizer: Any = torch.optim.SGD, precision: str = "none"
) -> Workload:
    """Return a convolutional network with BatchNorm."""
    size, widths = (16, (8, 16)) if small else (160, (64, 128, 256, 512))
    model, images = _cnn_model(widths), torch.randn(4, 3, size, size)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    batch = images, torch.randint(10, (4,))
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=optimizer, precision=precision)


def gpt(
    small: bool,
    *,
    dropout: float = 0.0,
    precision: str = "none",
    optimizer: Any = torch.optim.AdamW,
    checkpointed: bool = False,
) -> Workload:
    """Return a GPT."""
    width, depth, vocabulary, length = (64, 2, 128, 16) if small else (512, 6, 16384, 512)
    codes = torch.randint(vocabulary, (4, length))
    model = Gpt(width, depth, vocabulary, length, dropout, checkpointed=checkpointed)
    return Workload(
        model,
        (codes, codes.roll(-1, 1)),
        loss_fn=token_loss,
        optimizer=optimizer,
        precision=precision,
    )


def encoder(small: bool, *, precision: str = "none") -> Workload:
    """Return torch's own encoder at its default dropout of 0.1."""
    width, length = (64, 16) if small else (512, 256)
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2 if small else 6), nn.Linear(width, 10))
    batch = torch.randn(4, length, width), torch.randint(10, (4, length))
    return Workload(model, batch, loss_fn=token_loss, optimizer=torch.optim.AdamW, precision=precision)


def mlp(small: bool, *, precision: str = "none", optimizer: Any = torch.optim.AdamW) -> Workload:
    """Return a multilayer perceptron."""
    width = 64 if small else 2048
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())]
    batch = torch.randn(8, width), torch.randint(10, (8,))
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=optimizer, precision=precision)


def lstm(small: bool) -> Workload:
    """Return an LSTM."""
    width, length = (32, 8) if small else (512, 128)
    batch = torch.randn(4, length, width), torch.randint(10, (4,))
    return Workload(Recurrent(width), batch, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW)


def compiled(workload: Workload) -> Workload:
    """Return a workload with its model compiled by `torch.compile`."""
    return _with_model(workload, torch.compile(workload.model))


def _with_model(workload: Workload, model: Any) -> Workload:
    return Workload(
        model,
        workload.sample_batch,
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        precision=workload.precision,
    )


def lora(small: bool) -> Workload:
    """Return a Llama in bf16 with LoRA adapters on all linear layers.

    Raises:
        ImportError: transformers or peft is not installed.
    """
    import peft

    workload = of_transformers(small, family="llama", own_dtype=torch.bfloat16)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return _with_model(workload, peft.get_peft_model(workload.model, config))


def resnet(small: bool) -> Workload:
    """Return a ResNet-50 in bf16 with the layout channels_last.

    Raises:
        ImportError: transformers is not installed.
    """
    import transformers

    size = 64 if small else 224
    options = {"depths": [1, 1, 1, 1]} if small else {}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=100, **options))
    images = torch.randn(4, 3, size, size).to(memory_format=torch.channels_last)
    batch = {"pixel_values": images, "labels": torch.randint(100, (4,))}
    return Workload(model.to(memory_format=torch.channels_last), batch, optimizer=_momentum, precision="bf16")


def of_transformers(small: bool, *, family: str, precision: str = "none", own_dtype: Any = None) -> Workload:
    """Return a model of transformers, built from its configuration.

    Raises:
        ImportError: transformers is not installed.
    """
    import transformers

    width, depth, vocabulary, length = (64, 2, 128, 16) if small else (768, 12, 32000, 512)
    common = {"hidden_size": width, "num_attention_heads": max(1, width // 64), "num_hidden_layers": depth}
    codes = torch.randint(vocabulary, (4, length))
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=width, n_layer=depth, n_head=max(1, width // 64), vocab_size=vocabulary, n_positions=length
        )
        model, batch = transformers.GPT2LMHeadModel(config), {"input_ids": codes, "labels": codes}
    elif family == "bert":
        config = transformers.BertConfig(**common, intermediate_size=4 * width, vocab_size=vocabulary)
        model = transformers.BertForSequenceClassification(config)
        half = codes[:, : length // 2]
        batch = {"input_ids": half, "attention_mask": torch.ones_like(half), "labels": torch.randint(2, (4,))}
    elif family == "vit":
        size = 32 if small else 224
        config = transformers.ViTConfig(**common, intermediate_size=4 * width, image_size=size)
        model = transformers.ViTForImageClassification(config)
        batch = {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(2, (4,))}
    else:
        heads = {"num_attention_heads": 4 if small else 16, "num_key_value_heads": 2 if small else 4}
        config = transformers.LlamaConfig(
            **{**common, **heads, "hidden_size": 64 if small else 1024},
            intermediate_size=3 * width,
            vocab_size=vocabulary,
            use_cache=False,
        )
        model, batch = transformers.LlamaForCausalLM(config), {"input_ids": codes, "labels": codes}
    if own_dtype is not None:
        model = model.to(own_dtype)
    return Workload(model, batch, optimizer=torch.optim.AdamW, precision=precision)


# ----------------------------------------------------------------------------------------------------------- settings

_momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_fused = partial(torch.optim.AdamW, fused=True)

SETTINGS = (
    Setting("cnn fp32, SGD", cnn, (64, 256)),
    Setting("cnn bf16, momentum", partial(cnn, precision="bf16", optimizer=_momentum), (64, 256)),
    Setting("cnn bf16, channels_last", partial(cnn, precision="bf16", channels_last=True), (64, 256)),
    Setting("mlp fp32, Adam", partial(mlp, optimizer=torch.optim.Adam), (2048, 8192)),
    Setting("mlp fp16, fused AdamW", partial(mlp, precision="fp16", optimizer=_fused), (2048, 8192)),
    Setting("gpt fp32", gpt, (8, 32)),
    Setting("gpt bf16", partial(gpt, precision="bf16"), (8, 32)),
    Setting("gpt bf16, dropout", partial(gpt, precision="bf16", dropout=0.1), (8, 32)),
    Setting("gpt bf16, checkpointing", partial(gpt, precision="bf16", checkpointed=True), (8, 32)),
    Setting("encoder fp32, dropout", encoder, (32, 128)),
    Setting("encoder bf16, dropout", partial(encoder, precision="bf16"), (32, 128)),
    Setting("lstm fp32", lstm, (64, 256)),
    Setting("gpt2 bf16, dropout", partial(of_transformers, family="gpt2", precision="bf16"), (4, 16)),
    Setting("bert bf16, dropout", partial(of_transformers, family="bert", precision="bf16"), (16, 64)),
    Setting("vit fp16", partial(of_transformers, family="vit", precision="fp16"), (16, 64)),
    Setting(
        "llama in bf16, grouped queries", partial(of_transformers, family="llama", own_dtype=torch.bfloat16), (4, 16)
    ),
    Setting("resnet50 bf16, channels_last", resnet, (32, 128)),
    Setting("llama in bf16, LoRA", lora, (4, 16)),
    Setting("gpt bf16, compiled", lambda small: compiled(gpt(small, precision="bf16")), (8, 32)),
)
"""Nineteen steps: precisions, attention, dropout, checkpointing, channels_last, optimizers, LoRA, torch.compile."""

CEILINGS = (
    ("cnn with BatchNorm", cnn),
    ("gpt2 bf16, dropout", partial(of_transformers, family="gpt2", precision="bf16")),
    ("bert bf16, dropout", partial(of_transformers, family="bert", precision="bf16")),
    ("vit bf16", partial(of_transformers, family="vit", precision="bf16")),
    ("llama in bf16", partial(of_transformers, family="llama", own_dtype=torch.bfloat16)),
    ("lstm", lstm),
)
"""The six models whose largest batch is compared with brute force."""


def predictions() -> dict[str, Any]:
    """Return what `sim:` predicts for every setting on each GPU, with the date and the versions."""
    gpus = {name: {setting.name: predicted(setting, name) for setting in SETTINGS} for name in PREDICTED_FOR}
    return {**of_this_run(), "gpus": gpus}


def predicted(setting: Setting, gpu: str) -> dict[str, Any]:
    """Return the predicted step time and peak memory of a setting at its two batch sizes."""
    small, large = setting.samples
    torch.manual_seed(0)
    try:
        workload = setting.build(False)
        steps = [autosplit.measure(workload, devices=f"sim:{gpu}", split=size) for size in (small, large)]
    except (ImportError, autosplit.AutosplitError) as error:
        return {"error": str(error)}
    return {
        "samples": [small, large],
        "peak_bytes": [step.peak_bytes[0] - step.memory[0].untraced_bytes for step in steps],
        "reserved_bytes": [step.peak_bytes[0] for step in steps],
        "step_s": steps[1].step_s,
        "notes": [str(note) for step in steps for note in step.notes],
    }
