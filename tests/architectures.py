"""Small common architectures for ceilings: real modules with random weights, on the CPU.

Each function takes an optimizer and returns a workload. A step with some hundred samples takes well under a second.
`BUDGETS` has three memory sizes for each. About 10, 40 and 100 samples fit in them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit.workload.workload import Workload

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
"""No state, one tensor for each parameter, two."""

SAMPLES = 4
"""In a sample batch."""

CLASSES = 10
VOCABULARY = 128


def images(side: int) -> tuple[Tensor, Tensor]:
    """Random colour images, each with a class."""
    return torch.randn(SAMPLES, 3, side, side), torch.randint(0, CLASSES, (SAMPLES,))


def tokens(length: int) -> Tensor:
    """Random tokens."""
    return torch.randint(0, VOCABULARY, (SAMPLES, length))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Convolutions


def conv(inputs: int, outputs: int) -> nn.Sequential:
    """A same-size convolution with BatchNorm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def cnn(optimizer: Any = None) -> Workload:
    """Convolutions with BatchNorm, pooled."""
    widths = (3, 32, 64, 128)
    blocks = [nn.Sequential(conv(a, b), nn.MaxPool2d(2)) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 64, CLASSES))
    return Workload(model, images(64), loss_fn=F.cross_entropy, optimizer=optimizer)


class UNet(nn.Module):
    """A U-Net: down and up again, with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = conv(3, width), conv(width, 2 * width)
        self.bottom = conv(2 * width, 4 * width)
        self.up2, self.up1 = conv(6 * width, 2 * width), conv(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        y = F.interpolate(self.bottom(F.max_pool2d(coarse, 2)), scale_factor=2)
        y = F.interpolate(self.up2(torch.cat([y, coarse], 1)), scale_factor=2)
        out: Tensor = self.head(self.up1(torch.cat([y, fine], 1)))
        return out


def unet(optimizer: Any = None) -> Workload:
    """A U-Net, whose peak is in the middle of the backward."""
    batch = (torch.randn(SAMPLES, 3, 48, 48), torch.rand(SAMPLES, 1, 48, 48))
    return Workload(UNet(), batch, loss_fn=F.binary_cross_entropy_with_logits, optimizer=optimizer)


# Recurrent


class Recurrent(nn.Module):
    """The last output of recurrent layers over tokens."""

    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layers(self.embedding(x))
        head: Tensor = self.head(outputs[:, -1])
        return head


def recurrent(kind: type[nn.RNNBase], length: int, optimizer: Any, *, width: int = 256, layers: int = 2) -> Workload:
    """Sequences of one length, each with a class."""
    batch = (tokens(length), torch.randint(0, CLASSES, (SAMPLES,)))
    return Workload(Recurrent(kind, width, layers), batch, loss_fn=F.cross_entropy, optimizer=optimizer)


def lstm(optimizer: Any = None) -> Workload:
    """Two LSTM layers over 64 time steps."""
    return recurrent(nn.LSTM, 64, optimizer)


def lstm_short(optimizer: Any = None) -> Workload:
    """One LSTM layer over 6 time steps. Its parameters are larger than a few samples."""
    return recurrent(nn.LSTM, 6, optimizer, width=384, layers=1)


def gru(optimizer: Any = None) -> Workload:
    """A GRU layer over 12 time steps."""
    return recurrent(nn.GRU, 12, optimizer, width=512, layers=1)


# Transformers by hand


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int, blocks: list[nn.Module], length: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding(x) + self.places
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False) if self.recompute else block(y)
        logits: Tensor = self.head(y)
        return logits


def language(model: nn.Module, length: int, optimizer: Any) -> Workload:
    """A language model on random tokens."""
    x = tokens(length)
    return Workload(model, (x, x.roll(-1, 1)), loss_fn=token_loss, optimizer=optimizer)


def gpt(optimizer: Any = None) -> Workload:
    """Three blocks."""
    return language(GPT(160, [Block(160, 4) for _ in range(3)], 96), 96, optimizer)


def checkpointed(optimizer: Any = None) -> Workload:
    """Return three checkpointed blocks."""
    return language(GPT(160, [Block(160, 4) for _ in range(3)], 96, recompute=True), 96, optimizer)


class Experts(nn.Module):
    """MLPs with a router that sends each token to its best two."""

    def __init__(self, width: int, count: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, which = self.router(flat).softmax(-1).topk(self.chosen)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(which == index)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


def experts(optimizer: Any = None) -> Workload:
    """Return a mixture of experts. Its router decides the rows of each expert, which fake tensors cannot know."""
    return language(GPT(144, [Block(144, 4, Experts(144)) for _ in range(2)], 64), 64, optimizer)


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self, width: int = 144) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.body(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(states)
        return logits


def encoder_decoder(optimizer: Any = None) -> Workload:
    """Two layers of each, with dropout."""
    target = tokens(48)
    batch = ((tokens(64), target), target.roll(-1, 1))
    return Workload(Translator(), batch, loss_fn=token_loss, optimizer=optimizer)


class Halting(nn.Module):
    """Layers that repeat until the state converges, which reads values."""

    def __init__(self, width: int = 256, most: int = 4) -> None:
        super().__init__()
        self.most = most
        self.first, self.again, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        for _ in range(self.most):
            if y.abs().mean().item() < 1e-3:
                break
            y = self.again(y).tanh()
        logits: Tensor = self.head(y.mean(1))
        return logits


def halting(optimizer: Any = None) -> Workload:
    """Control flow that depends on values, so fake tensors cannot trace it."""
    batch = (torch.randn(SAMPLES, 64, 64), torch.randint(0, CLASSES, (SAMPLES,)))
    return Workload(Halting(), batch, loss_fn=F.cross_entropy, optimizer=optimizer)


# transformers is imported only when one of its models is built


def bert(optimizer: Any = None) -> Workload:
    """A BERT of two layers."""
    hub = importlib.import_module("transformers")
    config = hub.BertConfig(
        vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=2, num_attention_heads=4, intermediate_size=768
    )
    x = tokens(64)
    batch = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()}
    return Workload(hub.BertForMaskedLM(config), batch, optimizer=optimizer)


def gpt2(optimizer: Any = None) -> Workload:
    """A GPT-2 of two layers."""
    hub = importlib.import_module("transformers")
    config = hub.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    x = tokens(64)
    return Workload(hub.GPT2LMHeadModel(config), {"input_ids": x, "labels": x.clone()}, optimizer=optimizer)


def vit(optimizer: Any = None) -> Workload:
    """A ViT of two layers, on 64 patches."""
    hub = importlib.import_module("transformers")
    config = hub.ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=640,
        num_labels=CLASSES,
    )
    pixels, labels = images(64)
    return Workload(
        hub.ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}, optimizer=optimizer
    )


ARCHITECTURES: dict[str, Callable[[Any], Workload]] = {
    "cnn": cnn,
    "unet": unet,
    "lstm": lstm,
    "lstm_short": lstm_short,
    "gru": gru,
    "gpt": gpt,
    "checkpointed": checkpointed,
    "experts": experts,
    "encoder_decoder": encoder_decoder,
    "halting": halting,
    "bert": bert,
    "gpt2": gpt2,
    "vit": vit,
}

FROM_TRANSFORMERS = ("bert", "gpt2", "vit")
"""These need the package transformers."""

BUDGETS: dict[str, tuple[float, float, float]] = {
    "cnn": (37, 105.5, 254.75),
    "unet": (36.25, 99, 214.75),
    "lstm": (44.75, 84.5, 223.25),
    "lstm_short": (17.12, 27.74, 44.1),
    "gru": (29.94, 41.55, 50.5),
    "gpt": (63.75, 128, 328),
    "checkpointed": (24.5, 63.75, 155.25),
    "experts": (27.75, 98.75, 186.75),
    "encoder_decoder": (84.5, 175.5, 471.75),
    "halting": (7.25, 19, 60.5),
    "bert": (50, 95.5, 321.75),
    "gpt2": (46, 134, 295.25),
    "vit": (26, 62, 170.75),
}
"""Device memory in MiB. About 10, 40 and 100 samples fit in them."""
