"""Describe a workload file that `autosplit init` wrote. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartingWorkload:
    """A workload file that was written for a model.

    Attributes:
        path: The file.
        model: The class, or the function that makes the model.
        inputs: Python expression for the inputs of the sample batch.
        targets: Python expression for its targets. None if the model returns its loss, or if `inputs` is a whole batch
            of the file's DataLoader.
        loss_fn: Python expression for the loss. None if the model returns its loss.
        is_guess: Whether the sample batch is guessed. False if it is the first batch of the file's DataLoader.
    """

    path: str
    model: str
    inputs: str
    targets: str | None
    loss_fn: str | None
    is_guess: bool
