"""Attention cases for `cuda_kernels.py`: masks, dropout, grouped queries, head sizes, and torch's attention modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_case import Case
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Workload

LENGTH = 512
WIDTH = 256
HEADS = 4
BATCH = 4
SAMPLES = (4, 8)
DROPOUTS = (0.0, 0.1)
PRECISIONS = ("none", "bf16")


class Attention(nn.Module):
    """Self-attention between linear layers.

    Args:
        mask: The kind of mask that `_mask` makes, or None.
        key_heads: Heads of keys and values; fewer than `heads` for grouped queries.
    """

    def __init__(
        self,
        *,
        width: int = WIDTH,
        heads: int = HEADS,
        key_heads: int | None = None,
        length: int = LENGTH,
        dropout: float = 0.0,
        causal: bool = False,
        mask: str | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads or heads
        self.head_size = width // heads
        self.dropout, self.causal, self.mask = dropout, causal, mask
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, self.key_heads * self.head_size)
        self.v = nn.Linear(width, self.key_heads * self.head_size)
        self.out = nn.Linear(width, width)
        if mask == "bias":
            self.bias = nn.Parameter(torch.zeros(1, heads, length, length))

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        q = self._split(self.q(x), self.heads)
        k, v = (self._split(layer(x), self.key_heads) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask(q),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.key_heads != self.heads,
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_size).transpose(1, 2)

    def _mask(self, q: Tensor) -> Tensor | None:
        batch, _, length, _ = q.shape
        if self.mask is None:
            return None
        if self.mask == "bias":
            return self.bias[:, :, :length, :length].to(q.dtype)
        kind, _, shape = self.mask.partition(" ")
        sizes = {"": (batch, 1, length, length), "padding": (batch, 1, 1, length), "shared": (length, length)}[shape]
        if kind == "bool":
            return torch.ones(sizes, dtype=torch.bool, device=q.device)
        return torch.zeros(sizes, dtype=torch.float32 if kind == "float32" else q.dtype, device=q.device)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` over one sequence."""

    def __init__(self, *, need_weights: bool, mask: str | None, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.need_weights, self.mask = need_weights, mask

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        batch, length, _ = x.shape
        masks = {}
        if self.mask == "padding":
            masks["key_padding_mask"] = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
        if self.mask == "causal":
            masks["attn_mask"] = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        found: Tensor = self.attention(x, x, x, need_weights=self.need_weights, **masks)[0]
        return found


class Decoder(nn.Module):
    """`nn.TransformerDecoderLayer` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        found: Tensor = self.layer(x, x, tgt_mask=mask, tgt_is_causal=True)
        return found


_MASKS = (None, "bool", "bool padding", "bool shared", "float", "float shared", "float32 shared", "bias")

_SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {"key_heads": 2, "causal": True},
    "grouped queries, bool mask": {"key_heads": 2, "mask": "bool"},
    "head size 60": {"width": 240, "causal": True},
    "head size 60, bool mask": {"width": 240, "mask": "bool"},
    "head size 20": {"width": 80, "causal": True},
    "head size 320": {"width": 640, "heads": 2, "causal": True},
    "length 511, bool mask": {"length": 511, "mask": "bool"},
    "length 50, float mask": {"length": 50, "mask": "float"},
    "length 197": {"length": 197},
}


def _encoder(dropout: float, **options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=dropout, batch_first=True, **options)


def _models(dropout: float) -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, int]]]:
    """Yield name, model, and length and width of the sequences."""
    for mask in _MASKS:
        yield f"attention, {mask or 'no'} mask", partial(Attention, mask=mask, dropout=dropout), (LENGTH, WIDTH)
    for name, options in _SHAPES.items():
        sizes = options.get("length", LENGTH), options.get("width", WIDTH)
        yield f"attention, {name}", partial(Attention, dropout=dropout, **options), sizes
    for need_weights in (False, True):
        for mask in (None, "padding", "causal"):
            name = f"MultiheadAttention, {mask or 'no'} mask{', weights' if need_weights else ''}"
            model = partial(SelfAttention, need_weights=need_weights, mask=mask, dropout=dropout)
            yield name, model, (LENGTH, WIDTH)
    yield "TransformerEncoderLayer", partial(_encoder, dropout), (LENGTH, WIDTH)
    options = {"activation": "gelu", "norm_first": True}
    yield "TransformerEncoderLayer, GELU, norm first", partial(_encoder, dropout, **options), (LENGTH, WIDTH)
    if dropout:
        yield "TransformerDecoderLayer", Decoder, (LENGTH, WIDTH)


def _workload(model: Callable[[], nn.Module], sizes: tuple[int, int], precision: str) -> Workload:
    return Workload(model(), torch.randn(BATCH, *sizes), precision=precision)


def attention_cases() -> Iterator[Case]:
    """Yield the attention cases."""
    for dropout in DROPOUTS:
        for name, model, sizes in _models(dropout):
            for precision in PRECISIONS:
                build = partial(_workload, model, sizes, precision)
                yield Case(f"{name}, dropout {dropout} [{precision}]", build, SAMPLES, every_capability=True)
