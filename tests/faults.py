"""A network that runs out of memory on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

OUT = "CUDA out of memory. Tried to allocate 1.00 GiB"


@dataclass
class Faults:
    """Raises out-of-memory errors in chosen runs, from a number of samples on, at a chosen depth."""

    every: int = 0
    above: int = 0
    place: str = "backward"
    runs: int = 0

    def __call__(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        self.runs += 1
        if not (self.every and self.runs % self.every == 0) and not (self.above and samples > self.above):
            return tensor
        if self.place == "forward":
            raise torch.OutOfMemoryError(OUT)
        if tensor.requires_grad:
            tensor.register_hook(_raise)
        return tensor


def _raise(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(OUT)


class Network(nn.Module):
    """Three layers. The middle layer may run out of memory when the last layer already has its gradient."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)]).double()
        self.faults = faults

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(self.faults(torch.tanh(second(torch.tanh(first(inputs)))), len(inputs)))


def runs_out(model: nn.Module, faults: Faults) -> None:
    """Make a BERT or GPT run out of memory after its embeddings. In the backward, all other gradients then exist."""
    embeddings = model.bert.embeddings if hasattr(model, "bert") else model.transformer.drop
    embeddings.register_forward_hook(
        lambda _module, _args, output: faults(output, len(output)) if torch.is_grad_enabled() else output
    )
