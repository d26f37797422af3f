"""Define GPT-2 of 124M parameters as a book for beginners writes it, with the kernels of its scripts.

The source is github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed. Its first script writes LayerNorm, GELU
and attention by hand. Each later script replaces one of them with torch's own. Here an option selects each variant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, WORDS, LENGTH, DROPOUT = 768, 12, 12, 50257, 1024, 0.1


class HandNorm(nn.Module):
    """LayerNorm as single operations. Autograd keeps their results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class HandGelu(nn.Module):
    """GELU's approximation by tanh as single operations."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class HandAttention(nn.Module):
    """Attention whose scores are in memory. `buffered` keeps a float mask as a buffer of each layer."""

    def __init__(self, *, buffered: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1) if buffered else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of each token."""
        batch, length, _ = x.shape
        key, query, value = (
            layer(x).view(batch, length, HEADS, -1).transpose(1, 2) for layer in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        if self.mask is None:
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        else:
            future = self.mask.bool()[:length, :length]
        scores.masked_fill_(future, -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))


class FusedAttention(nn.Module):
    """Attention by torch's kernel, with one layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of each token."""
        batch, length, _ = x.shape
        query, key, value = self.inputs(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self, *, buffered: bool, native: bool, fused: bool) -> None:
        super().__init__()
        self.attention = FusedAttention() if fused else HandAttention(buffered=buffered)
        gelu = nn.GELU(approximate="tanh") if native else HandGelu()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if native else HandNorm() for _ in range(2))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what attention and the inner layers add."""
        for norm, part in zip(self.norms, (self.attention, self.inner), strict=True):
            x = self.dropout(part(norm(x))) + x
        return x


class Gpt(nn.Module):
    """The model. Its output layer and its embedding share no weights.

    Args:
        buffered: Keep the causal mask as a buffer.
        native: Use torch's LayerNorm and GELU.
        fused: Use torch's attention.
    """

    def __init__(self, *, buffered: bool = False, native: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(buffered=buffered, native=native, fused=fused) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH) if native else HandNorm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits
