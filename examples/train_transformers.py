"""Trains a small GPT-2 on made-up sequences with transformers' Trainer; where there is a plan, by its shares.

    python examples/train_transformers.py
    python -m autosplit tune examples/train_transformers.py --strategy ddp --output plan.json
    python -m autosplit launch --plan plan.json examples/train_transformers.py

Training differs by one line from a script without autosplit: where Trainer is imported from.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import autosplit
import autosplit.integrations.transformers
from autosplit.integrations.transformers import Trainer

COUNT, LENGTH, TOKENS = 512, 24, 64


def sequence(index: int) -> list[int]:
    """Return tokens that count up from somewhere, for a while."""
    start, length = random.Random(index).choices(range(1, TOKENS // 2), k=2)  # noqa: S311 - nothing is at stake
    return [*range(start, start + min(length + 4, LENGTH))]


def collate(sequences: list[list[int]]) -> dict[str, Any]:
    """Pad sequences; what is padding has no label."""
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    ids = torch.tensor([tokens + [0] * (LENGTH - len(tokens)) for tokens in sequences])
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def made_trainer() -> Trainer:
    """Return what trains: a model, its arguments and its data."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **ends))
    data = [sequence(index) for index in range(COUNT)]
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(tempfile.gettempdir(), max_steps=40, learning_rate=3e-3, logging_steps=10, **quiet)
    return Trainer(gpt2, args, train_dataset=data, data_collator=collate)


def workload() -> autosplit.Workload:
    """Return what is tuned: the Trainer as it is."""
    return autosplit.integrations.transformers.workload(made_trainer())


if __name__ == "__main__":
    trainer = made_trainer()
    trainer.train()
