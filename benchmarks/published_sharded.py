"""Compare predicted steps of sharded models with published steps of FSDP.

    python benchmarks/published_sharded.py [--output FILE]

The rows are MPT models in bfloat16 on H100-80GB GPUs, without activation checkpointing
(github:mosaicml/llm-foundry, scripts/train/benchmarking/README.md, torch 1.13 to 2.1, Composer, FSDP FULL_SHARD). The
13B model fits no single GPU. The published micro-batch ran, so the plan must have it, too. The network between nodes is
not stated, so only 8 GPUs are compared. The attention is causal without MPT's ALiBi bias, which the published flash
kernel adds in place.

The rows of memory are LoRA of Llama-2 7B on two RTX 3090 with checkpointed layers (github:AnswerDotAI/fsdp_qlora,
benchmarks_03_2024.md, FSDP1). Published is torch.cuda.max_memory_reserved, which includes the allocator's gaps.

Nothing is fitted to these rows. A ratio is predicted / published.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import published_language
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import autosplit

RESULTS = Path(__file__).parent / "results" / "published_sharded.json"
GPUS, LENGTH, WORDS = 8, 2048, 50368


@dataclass(frozen=True)
class Row:
    """A published step. `batch` is a micro-batch per GPU."""

    model: str
    width: int
    layers: int
    heads: int
    batch: int
    accumulation: int
    step_s: float


ROWS = (
    Row("MPT-1b", 2048, 24, 16, 14, 1, 0.63077),
    Row("MPT-13b", 5120, 40, 40, 2, 1, 0.85476),
)


LORA_RESERVED_GIB = {4: 16.14, 6: 21.35}
"""Published memory of LoRA by batch per GPU."""


class Block(nn.Module):
    """A layer of MPT without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and a feed-forward network."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT, whose output layer has the weights of the embedding."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, row.width)
        self.blocks = nn.ModuleList(Block(row.width, row.heads) for _ in range(row.layers))
        self.norm = nn.LayerNorm(row.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next word."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of the next words."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def compared(row: Row) -> dict[str, Any]:
    """Predict a row."""

    def workload() -> autosplit.Workload:
        tokens = torch.zeros(2, LENGTH, dtype=torch.long)
        return autosplit.Workload(Mpt(row), tokens, compute_loss=loss, optimizer=torch.optim.AdamW)

    samples = GPUS * row.batch * row.accumulation
    plan = autosplit.tune_sharded(
        workload,
        layers=Block,
        shard_size=GPUS,
        param_dtype=torch.bfloat16,
        devices=f"sim:{GPUS}xH100-80GB",
        effective_batch_size=samples,
        max_batch_size=GPUS * row.batch,
    )
    step_s, first = samples / plan.samples_per_s, plan.main.seats[0]
    return {
        **asdict(row),
        "whole_model_fits": not any(note.kind == "sharded-simulated" for note in plan.notes),
        "predicted_step_s": step_s,
        "ratio": step_s / row.step_s,
        "predicted_batch": first.samples,
        "predicted_accumulation": plan.accumulation_steps,
        "predicted_peak_bytes": first.peak_bytes,
    }


def lora(batch: int) -> dict[str, Any]:
    """Predict the memory of LoRA with sharded frozen weights."""
    row = next(row for row in published_language.rows() if (row.recipe, row.simulated) == ("lora loop", "RTX3090"))
    plan = autosplit.tune_sharded(
        lambda: published_language.workload(replace(row, batch=batch)),
        layers=LlamaDecoderLayer,
        devices="sim:2xRTX3090",
        effective_batch_size=2 * batch,
        max_batch_size=2 * batch,
    )
    rank, published = plan.main.seats[0], LORA_RESERVED_GIB[batch]
    assert rank.samples == batch, rank
    return {
        "batch": batch,
        "published_reserved_gib": published,
        "predicted_gib": rank.peak_bytes / 2**30,
        "ratio": rank.peak_bytes / 2**30 / published,
    }


def main() -> None:
    """Compare all rows, and write the results."""
    parser = argparse.ArgumentParser(description="Compare predicted steps of sharded models with published ones.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [compared(row) for row in ROWS]
    memory = [lora(batch) for batch in LORA_RESERVED_GIB]
    for one in memory:
        print(f"LoRA, batch {one['batch']}: {one['ratio']:.2f} of {one['published_reserved_gib']} GiB")
    for row in rows:
        print(f"{row['model']}: {row['ratio']:.2f} of {row['step_s']} s, batch {row['predicted_batch']}")
    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"torch": torch.__version__, "autosplit": autosplit.__version__},
        "compared": rows,
        "memory of LoRA": memory,
    }
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
