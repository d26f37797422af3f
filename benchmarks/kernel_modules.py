"""Cases for `cuda_kernels.py` that are one module or function: activations, norms, losses, images, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from kernel_case import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit import Workload

BATCH = 4
LENGTH = 512
WIDTH = 256
CLASSES = 1024
SAMPLES = (4, 8)
PRECISIONS = ("none", "bf16")


class Between(nn.Module):
    """A function between two layers, so that its input needs a gradient and its output is used."""

    def __init__(self, before: nn.Module, function: Callable[[Tensor], Tensor], after: nn.Module) -> None:
        super().__init__()
        self.before, self.function, self.after = before, function, after

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.after(self.function(self.before(x)))


class HandmadeRMSNorm(nn.Module):
    """RMSNorm as models of transformers have it: in float32, and made of single operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class First(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        found: Tensor = self.layer(x)[0]
        return found


# --------------------------------------------------------------------------------------------------------- sequences

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.1),
    "Dropout, in place": lambda: nn.Dropout(0.1, inplace=True),
    "Dropout1d": lambda: nn.Dropout1d(0.1),
    "AlphaDropout": lambda: nn.AlphaDropout(0.1),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.1),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm, not affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "RMSNorm, handmade": HandmadeRMSNorm,
    "PReLU": nn.PReLU,
    "GRU": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "LSTM": lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "LSTM, 2 layers, dropout": lambda: First(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)),
}


def _indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _zero_indices(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.long, device=x.device)


def _similarities(x: Tensor) -> Tensor:
    return x @ x.transpose(1, 2)


def _rotated(x: Tensor) -> Tensor:
    """Multiply by complex numbers, as Llama's original rotary embedding does."""
    length, width = x.shape[1:]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = torch.ones(length, width // 2, device=x.device)
    return torch.view_as_real(pairs * torch.polar(angles, angles)).flatten(-2).to(x.dtype)


def _inverted_spectrum(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x.float(), dim=1), n=x.shape[1], dim=1).to(x.dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # activations
    "celu": F.celu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    # dropout and softmax
    "F.dropout": lambda x: F.dropout(x, 0.1),
    "torch.dropout": lambda x: torch.dropout(x, 0.1, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x - torch.logsumexp(x, -1, keepdim=True),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax, float32": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "softmax, dim 1": lambda x: F.softmax(x, 1),
    # norms and statistics
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x * 2, dim=-1).unsqueeze(-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1),
    "var": lambda x: x / (x.var(-1, keepdim=True) + 1),
    # elementwise arithmetic
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "clamp": lambda x: x.clamp(-1, 1),
    "erf": torch.erf,
    "exp": torch.exp,
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "log": lambda x: torch.log(x.abs() + 1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "pow, 2": lambda x: x**2,
    "pow, 3.5": lambda x: x**3.5,
    "where": lambda x: torch.where(x > 0, x, 0 * x),
    # reductions and scans
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "cummax": lambda x: x.cummax(1)[0],
    "cumsum": lambda x: torch.cumsum(x, 1),
    "kthvalue": lambda x: x - x.kthvalue(3, -1, keepdim=True)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "max": lambda x: x - x.max(-1, keepdim=True)[0],
    "median": lambda x: x - x.median(-1, keepdim=True)[0],
    # products
    "baddbmm": lambda x: torch.baddbmm(_similarities(x), x, x.transpose(1, 2))[..., :WIDTH],
    "bmm": lambda x: _similarities(x)[..., :WIDTH],
    "cdist": lambda x: torch.cdist(x.float(), x.float())[..., :WIDTH].to(x.dtype),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x)[..., :WIDTH],
    "outer product": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1),
    "tril": lambda x: _similarities(x).tril()[..., :WIDTH],
    # indexing and order
    "argsort, gather": lambda x: torch.gather(x, -1, x.argsort(-1)),
    "flip": lambda x: x.flip(1),
    "index": lambda x: x[:, _indices(x)],
    "index_add": lambda x: torch.zeros_like(x).index_add(1, _indices(x), x),
    "index_select": lambda x: x.index_select(1, _indices(x)),
    "pad": lambda x: F.pad(x, (0, 0, 2, 2)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "roll": lambda x: torch.roll(x, 3, 1),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, _zero_indices(x), x),
    "sort": lambda x: torch.sort(x, -1)[0],
    "take_along_dim": lambda x: torch.take_along_dim(x, _zero_indices(x), 1),
    "topk": lambda x: torch.topk(x, WIDTH, -1)[0],
    "unfold": lambda x: x.unfold(1, 4, 2).mean(-1),
    # complex numbers
    "complex product": _rotated,
    "fft": lambda x: torch.fft.fft(x.float(), dim=1).real.to(x.dtype),
    "rfft, irfft": _inverted_spectrum,
}


class Checkpointed(nn.Module):
    """Two encoder layers whose activations are computed again in the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def _sequences(model: Callable[[], nn.Module], precision: str, optimizer: Any = None) -> Workload:
    return Workload(model(), torch.randn(BATCH, LENGTH, WIDTH), precision=precision, optimizer=optimizer)


def _between_linear(function: Callable[[], Callable[[Tensor], Tensor]]) -> nn.Module:
    return Between(nn.Linear(WIDTH, WIDTH), function(), nn.Linear(WIDTH, WIDTH))


def _sequence_cases() -> Iterator[tuple[str, Callable[[str], Workload]]]:
    functions = {name: partial(lambda function: function, one) for name, one in FUNCTIONS.items()}
    for name, function in {**MODULES, **functions}.items():
        yield name, partial(_sequences, partial(_between_linear, function))
    for name, use_reentrant in (("checkpoint", False), ("checkpoint, reentrant", True)):
        yield name, partial(_sequences, partial(Checkpointed, use_reentrant=use_reentrant))
    yield "Adafactor", partial(_sequences, partial(nn.Linear, WIDTH, WIDTH), optimizer=torch.optim.Adafactor)


# ------------------------------------------------------------------------------------------------------------- losses


def _flat(loss: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss over all places of all sequences."""
    return lambda outputs, targets: loss(outputs.flatten(0, 1), targets.flatten(), **options)


def _picked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean log-probability of the targets, as reinforcement learning computes it."""
    return -F.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).mean()


def _distilled(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(outputs, -1), F.softmax(targets, -1), reduction="batchmean")


CLASS_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _flat(F.cross_entropy),
    "cross_entropy, label smoothing": _flat(F.cross_entropy, label_smoothing=0.1),
    "cross_entropy, float32": lambda outputs, targets: _flat(F.cross_entropy)(outputs.float(), targets),
    "nll_loss": lambda outputs, targets: _flat(F.nll_loss)(F.log_softmax(outputs, -1), targets),
    "log-probabilities": _picked,
}

VALUE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_cross_entropy_with_logits": lambda outputs, targets: F.binary_cross_entropy_with_logits(
        outputs, targets.sigmoid()
    ),
    "distillation": _distilled,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
}


def _class_loss(loss: Callable[[Tensor, Tensor], Tensor], precision: str) -> Workload:
    batch = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH, LENGTH))
    return Workload(nn.Linear(WIDTH, CLASSES), batch, loss_fn=loss, precision=precision)


def _value_loss(loss: Callable[[Tensor, Tensor], Tensor], precision: str) -> Workload:
    batch = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, CLASSES)
    return Workload(nn.Linear(WIDTH, CLASSES), batch, loss_fn=loss, precision=precision)


def _loss_cases() -> Iterator[tuple[str, Callable[[str], Workload]]]:
    for name, loss in CLASS_LOSSES.items():
        yield name, partial(_class_loss, loss)
    for name, loss in VALUE_LOSSES.items():
        yield name, partial(_value_loss, loss)


# ------------------------------------------------------------------------------------------------------------- images

CHANNELS = 32

IMAGE_FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "AvgPool2d": lambda: nn.AvgPool2d(2),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(CHANNELS),
    "Dropout2d": lambda: nn.Dropout2d(0.1),
    "GroupNorm": lambda: nn.GroupNorm(4, CHANNELS),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "MaxPool2d": lambda: nn.MaxPool2d(2),
    "PixelShuffle": lambda: nn.Sequential(nn.Conv2d(CHANNELS, 4 * CHANNELS, 1), nn.PixelShuffle(2)),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d(2),
    "ReplicationPad2d": lambda: nn.ReplicationPad2d(2),
    "Conv2d, grouped": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=4),
    "Conv2d, depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2),
    "grid_sample": lambda: lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    "interpolate, nearest": lambda: lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "interpolate, bilinear": lambda: lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate, bicubic": lambda: lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
}

VOLUME_FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "AvgPool3d": lambda: nn.AvgPool3d(2),
    "BatchNorm3d": lambda: nn.BatchNorm3d(CHANNELS),
    "MaxPool3d": lambda: nn.MaxPool3d(2),
    "interpolate, trilinear": lambda: lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
}


def _images(function: Callable[[], Callable[[Tensor], Tensor]], precision: str, *, channels_last: bool) -> Workload:
    model = Between(nn.Conv2d(3, CHANNELS, 3), function(), nn.Conv2d(CHANNELS, CHANNELS, 3))
    images = torch.randn(BATCH, 3, 64, 64)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    return Workload(model, images, precision=precision)


def _volumes(function: Callable[[], Callable[[Tensor], Tensor]], precision: str) -> Workload:
    model = Between(nn.Conv3d(3, CHANNELS, 3), function(), nn.Conv3d(CHANNELS, CHANNELS, 3))
    return Workload(model, torch.randn(BATCH, 3, 16, 16, 16), precision=precision)


def _image_cases() -> Iterator[tuple[str, Callable[[str], Workload]]]:
    for name, function in IMAGE_FUNCTIONS.items():
        for suffix, channels_last in (("", False), (", channels_last", True)):
            yield name + suffix, partial(_images, function, channels_last=channels_last)
    for name, function in VOLUME_FUNCTIONS.items():
        yield name, partial(_volumes, function)


# --------------------------------------------------------------------------------------------------------- embeddings


class Tokens(nn.Module):
    """An embedding with a linear layer."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.after = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, codes: Tensor) -> Tensor:
        """Run the model."""
        return self.after(self.embedding(codes))


EMBEDDINGS: Mapping[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(CLASSES, WIDTH),
    "EmbeddingBag, mean": lambda: nn.EmbeddingBag(CLASSES, WIDTH),
    "EmbeddingBag, max": lambda: nn.EmbeddingBag(CLASSES, WIDTH, mode="max"),
}


def _tokens(embedding: Callable[[], nn.Module], precision: str) -> Workload:
    return Workload(Tokens(embedding()), torch.randint(CLASSES, (BATCH, LENGTH)), precision=precision)


def _embedding_cases() -> Iterator[tuple[str, Callable[[str], Workload]]]:
    for name, embedding in EMBEDDINGS.items():
        yield name, partial(_tokens, embedding)


def module_cases() -> Iterator[Case]:
    """Yield the cases that are one module or function."""
    for cases in (_sequence_cases, _loss_cases, _image_cases, _embedding_cases):
        for name, build in cases():
            # A sample adds one vector, which is small compared with the embedding table.
            samples = (2048, 4096) if name.startswith("EmbeddingBag") else SAMPLES
            for precision in PRECISIONS:
                yield Case(f"{name} [{precision}]", partial(build, precision=precision), samples)
