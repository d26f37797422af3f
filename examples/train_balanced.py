"""Tune the character-level GPT, wrap it, and train it with the plan.

    python examples/train_balanced.py

Without a GPU, two CPU devices with memory budgets replace two different GPUs. The code stays the same.
"""

from __future__ import annotations

import time

import char_gpt
import torch
from torch.utils.data import DataLoader

import autosplit

STEPS = 48
EFFECTIVE_BATCH_SIZE = 64


def main() -> None:
    """Tune, wrap and train the model, and print the loss."""
    torch.manual_seed(0)
    devices = "cuda" if torch.cuda.is_available() else "cpu:512MiB,cpu:256MiB"
    plan = autosplit.tune(char_gpt.workload, devices=devices, effective_batch_size=EFFECTIVE_BATCH_SIZE)
    print(f"split {plan.split}, {plan.accumulation_steps} micro-steps of a step of {plan.effective_batch_size} samples")

    model = plan.wrap(char_gpt.CharGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = char_gpt.Snippets()
    loader = DataLoader(dataset, batch_sampler=plan.batch_sampler(len(dataset), shuffle=True))

    begun_s, samples = time.perf_counter(), 0.0
    for number, step in enumerate(plan.steps(loader), start=1):
        for inputs, targets in step:
            logits = model(inputs)
            step.backward(char_gpt.next_character_loss(logits, targets.to(logits.device)))
        optimizer.step()
        optimizer.zero_grad()
        samples += step.num_samples
        if number % 8 == 0:
            rate = samples / (time.perf_counter() - begun_s)
            print(f"step {number:3d}   loss {step.loss:.3f}   {rate:6.0f} samples/s")
        if number == STEPS:
            break


if __name__ == "__main__":
    main()
