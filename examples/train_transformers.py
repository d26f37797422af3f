"""Train a small GPT-2 on synthetic sequences with transformers' Trainer.

With a plan, each process uses its own batch size.

    python examples/train_transformers.py
    python -m autosplit tune examples/train_transformers.py --strategy ddp --output plan.json
    python -m autosplit launch --plan plan.json examples/train_transformers.py

Only one line of the training differs from a script without autosplit: the import of Trainer.
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
    """Return consecutive tokens with a random start and length."""
    start, length = random.Random(index).choices(range(1, TOKENS // 2), k=2)  # noqa: S311 - not for security
    return [*range(start, start + min(length + 4, LENGTH))]


def collate(sequences: list[list[int]]) -> dict[str, Any]:
    """Pad the sequences. Padding has no label."""
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    ids = torch.tensor([tokens + [0] * (LENGTH - len(tokens)) for tokens in sequences])
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def made_trainer() -> Trainer:
    """Return the Trainer with its model, arguments and data."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **ends))
    data = [sequence(index) for index in range(COUNT)]
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(tempfile.gettempdir(), max_steps=40, learning_rate=3e-3, logging_steps=10, **quiet)
    return Trainer(gpt2, args, train_dataset=data, data_collator=collate)


def workload() -> autosplit.Workload:
    """Return the workload to tune: the unchanged Trainer."""
    return autosplit.integrations.transformers.workload(made_trainer())


if __name__ == "__main__":
    trainer = made_trainer()
    trainer.train()
