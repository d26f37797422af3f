"""A GPT with rotary positions, RMSNorm and squared ReLU, and without biases.

Models of github.com/KellerJordan/modded-nanogpt (October 2024) and github.com/karpathy/nanochat have this shape. Parts
without a large cost are left out: learned scales, value embeddings and the optimizer Muon.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and a feed-forward layer with squared ReLU."""

    def __init__(self, width: int, heads: int, rotary: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(3)])
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of shape (samples, length, width)."""
        count, length, width = x.shape
        normal = F.rms_norm(x, (width,))
        q, k, v = (layer(normal).view(count, length, self.heads, width // self.heads) for layer in self.qkv)
        q, k = (self._rotated(F.rms_norm(part, (part.shape[-1],))) for part in (q, k))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (width,)))).square())

    def _rotated(self, part: Tensor) -> Tensor:
        """Return queries or keys of shape (samples, length, heads, width of a head) with rotary positions."""
        cosines, sines = self.rotary.to(part.dtype)[:, : part.shape[1]]
        first, second = part.chunk(2, dim=-1)
        return torch.cat([first * cosines + second * sines, second * cosines - first * sines], dim=-1)


class SpeedrunGpt(nn.Module):
    """A language model that returns its mean loss over tokens.

    Args:
        tied: Whether the embedding and the head share their weights.
    """

    def __init__(self, width: int, layers: int, heads: int, words: int, length: int, *, tied: bool) -> None:
        super().__init__()
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        rotary = torch.stack([angles.cos(), angles.sin()])[:, :, None, :]
        self.tokens, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.blocks = nn.Sequential(*(Block(width, heads, rotary) for _ in range(layers)))

    def forward(self, codes: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of codes and targets of shape (samples, length)."""
        x = self.blocks(self.tokens(codes))
        logits = self.head(F.rms_norm(x, (x.shape[-1],)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
