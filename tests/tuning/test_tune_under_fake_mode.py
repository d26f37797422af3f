"""`tune` under a FakeTensorMode raises an error. torch's own error came, and then the process crashed."""

from __future__ import annotations

import torch
from raised import raises

import autosplit
from autosplit.errors import InputError
from autosplit.torch_versions import FakeTensorMode


def test_it_is_refused() -> None:
    model, batch = torch.nn.Linear(4, 2), torch.randn(8, 4)
    with FakeTensorMode(), raises(InputError):
        autosplit.tune(model, batch, devices="cpu:64MiB,cpu:64MiB", effective_batch_size=8, profile="off")
