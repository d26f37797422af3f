"""Models whose batches have no common first dimension are tuned: `make_batch` gives the number of samples."""

from __future__ import annotations

import pytest
import torch
from marks import for_release, slow
from noted import kinds
from ragged_models import RAGGED
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import autosplit
from autosplit import Workload
from autosplit.errors import WorkloadError

FEW = {"max_batch_size": 8, "n_trials": 2, "profile": "off"}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("graphs", "sim:1xA100-40GB"),
        slow("vision-language", "sim:1xA100-40GB"),
        # These models loop over their samples, so each trace takes seconds. `test_two_devices` tunes one of them.
        for_release("detector", "sim:1xA100-40GB"),
        for_release("detr", "cpu:256MiB"),
        slow("graphs", "cpu:256MiB"),
        slow("vision-language", "cpu:256MiB"),
    ],
)
def test_one_device(name, devices):
    plan = autosplit.tune(RAGGED[name].workload(), devices=devices, **FEW)
    assert 1 <= plan.batch_size <= 8
    assert plan.sample_batch_size == 4


@pytest.mark.whole
@pytest.mark.parametrize("name", ["graphs", slow("vision-language"), for_release("detr")])
def test_ddp(name):
    plan = autosplit.tune(RAGGED[name].workload(), devices="sim:2xA100-40GB", strategy="ddp", **FEW)
    assert [*plan.ddp.split] == [*plan.split]
    assert min(plan.split) >= 1


@pytest.mark.parametrize("name", [for_release("detector"), slow("detr")])
def test_two_devices(name):
    plan = autosplit.tune(RAGGED[name].workload(), devices="sim:2xA100-40GB", **FEW)
    assert 1 <= plan.batch_size <= 16
    assert "not-checked" not in kinds(plan.notes)
    assert plan.checks[0].split_error == 0.0


@pytest.mark.whole
@pytest.mark.parametrize("name", ["graphs", slow("vision-language")])
def test_two_devices_need_ddp_if_a_batch_cannot_be_cut(name):
    with pytest.raises(WorkloadError, match=r"rows.*cannot be cut trains on one device or with DDP"):
        autosplit.tune(RAGGED[name].workload(), devices="sim:2xA100-40GB", **FEW)


@pytest.mark.parametrize("name", [name for name, ragged in RAGGED.items() if ragged.is_cut])
def test_the_check_cuts_lists(name):
    gradient, *_ = autosplit.check(RAGGED[name].workload(8))
    assert not gradient.depends


class Packed(nn.Module):
    """An LSTM over a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)

    def forward(self, packed):
        return self.layer(packed)[0].data.square().mean()


def sequences(n: int):
    return {"packed": pack_sequence([torch.randn(5 - index % 3, 3) for index in range(n)], enforce_sorted=False)}


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["sim:1xA100-40GB", "cpu:256MiB"])
def test_packed_sequences(devices):
    workload = Workload(Packed(), sequences(4), make_batch=sequences)
    assert workload.sample_batch_size == 4
    assert autosplit.tune(workload, devices=devices, **FEW).batch_size >= 1
