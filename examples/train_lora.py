"""Fine-tune a small Llama with LoRA, by a plan for two devices.

    python examples/train_lora.py

peft adds the adapters. autosplit plans for frozen weights: they have no gradients and no optimizer state. The model has
random weights, so nothing is downloaded.
"""

from __future__ import annotations

import peft
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import autosplit

TOKENS, LENGTH, SAMPLES, STEPS = 64, 12, 128, 16


def adapted_model() -> nn.Module:
    """Return a Llama with frozen weights and adapters of rank 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, use_cache=False, **sizes))
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(llama, adapters)
    return model


def main() -> None:
    """Tune, wrap and train the model, and print the loss."""
    starts = torch.arange(SAMPLES)[:, None] % (TOKENS - LENGTH)
    sequences = starts + torch.arange(LENGTH)  # consecutive tokens
    batch = {"input_ids": sequences[:8], "labels": sequences[:8]}
    devices = "cuda" if torch.cuda.is_available() else "cpu:512MiB,cpu:256MiB"
    model = adapted_model()
    workload = autosplit.Workload(model, batch, optimizer=torch.optim.AdamW)
    plan = autosplit.tune(workload, devices=devices, effective_batch_size=32, n_trials=2)
    print(f"split {plan.split}, {plan.accumulation_steps} micro-steps of a step of {plan.effective_batch_size} samples")

    wrapped = plan.wrap(model)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    data = TensorDataset(sequences)
    loader = DataLoader(data, batch_sampler=plan.batch_sampler(len(data), shuffle=True))
    number = 0
    while number < STEPS:
        for step in plan.steps(loader):
            for (tokens,) in step:
                step.backward(wrapped(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            if number % 4 == 0:
                print(f"step {number:3d}   loss {step.loss:.3f}")


if __name__ == "__main__":
    main()
