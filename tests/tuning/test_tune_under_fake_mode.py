"""`tune` under a FakeTensorMode is refused: torch's own error came, and then the process crashed."""

from __future__ import annotations

import pytest
import torch

import autosplit
from autosplit.errors import InputError
from autosplit.torch_versions import FakeTensorMode


def test_it_is_refused() -> None:
    model, batch = torch.nn.Linear(4, 2), torch.randn(8, 4)
    with FakeTensorMode(), pytest.raises(InputError, match="A FakeTensorMode is active, so tensors have no values"):
        autosplit.tune(model, batch, devices="cpu:64MiB,cpu:64MiB", effective_batch_size=8, profile="off")
