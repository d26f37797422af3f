"""A character-level GPT to tune. It learns the English of Python's own documentation topics.

    python -m autosplit tune examples/char_gpt.py
    python -m autosplit tune examples/char_gpt.py --devices sim:3xRTX3090 --effective-batch-size 512

The text comes with Python (`pydoc_data.topics`), so nothing is downloaded.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit

CONTEXT = 64
"""Characters of context."""

TEXT = "\n".join(topics[name] for name in sorted(topics))
CHARACTERS = sorted(set(TEXT))
CODES = {character: code for code, character in enumerate(CHARACTERS)}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (n, length, width)."""
        n, length, width = x.shape
        parts = self.attention_in(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class CharGPT(nn.Module):
    """A small GPT that predicts the next character.

    Args:
        width: Features per character.
        depth: Number of blocks.
        heads: Attention heads per block.
    """

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next character, shape (n, length, characters), for codes of shape (n, length)."""
        places = torch.arange(codes.shape[1], device=codes.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.characters(codes) + self.positions(places))))
        return logits


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next character, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Snippets(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text. The targets are the same pieces shifted by one character."""

    def __init__(self) -> None:
        self.codes = torch.tensor([CODES[character] for character in TEXT])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        piece = self.codes[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


def workload() -> autosplit.Workload:
    """Return the workload to tune: the model, a real batch, the loss and the optimizer."""
    snippets = Snippets()
    inputs, targets = zip(*(snippets[index] for index in range(8)), strict=True)
    batch = (torch.stack(inputs), torch.stack(targets))
    return autosplit.Workload(CharGPT(), batch, loss_fn=next_character_loss, optimizer=torch.optim.AdamW)
