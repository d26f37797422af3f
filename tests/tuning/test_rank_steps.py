"""One rank's part of real DDP steps, run alone on a real or an emulated device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpus import KIND, card
from workloads import small

from autosplit.runtime.model_copy import training_copy
from autosplit.tuning.peers import Interrupts, Peers
from autosplit.tuning.rank_steps import RankSteps


@pytest.mark.gpu
def test_a_dry_pass_peaks_at_its_own_batch():
    """The peak included memory that an earlier, larger batch had left in the allocator's cache.

    Without a wrapper, only the dry pass moves the batch, which is made on the host.
    """
    worker = SimpleNamespace(devices=(SimpleNamespace(label=f"{KIND}:0"),))
    steps = RankSteps(small(), worker, card(0), Peers(0, 1, None, Interrupts()), backend="gloo", options={})
    steps._trainee = training_copy(steps.workload, device=steps.device)
    steps._models = steps._trainee.models
    try:
        large, few = steps._dry_peak_bytes((2**16,)), steps._dry_peak_bytes((8,))
    finally:
        steps.close()
    assert few > 0
    assert large - few > 2**24  # both hold the workspaces of cuBLAS
    assert next(steps.workload.model.parameters()).device == torch.device("cpu")
