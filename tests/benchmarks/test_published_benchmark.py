"""The benchmarks of published steps predict a step, and keep its trace for each compute capability."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from folders import BENCHMARKS
from torch import nn
from torch.nn import functional as F

from autosplit.workload.workload import Workload


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")  # the module sets it; monkeypatch restores it
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch):
    return loaded("published", monkeypatch)


def row_of(bench: ModuleType, card: str, cards: int = 1):
    return bench.Row(
        family="torchvision",
        model="any",
        card=card,
        cards=cards,
        precision="fp32",
        layout="nchw",
        batch=8,
        size=32,
        step_s=1.0,
        failed=16,
        torch="2.0",
    )


def test_traces_are_kept_by_compute_capability_and_read_again(bench, monkeypatch, tmp_path):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = (torch.zeros(2, 32), torch.zeros(2, dtype=torch.long))
    monkeypatch.setattr(bench, "workload", lambda row: Workload(net, batch, loss_fn=F.cross_entropy))
    rows = [row_of(bench, card) for card in ("RTX3090", "H100-80GB", "H200")]
    found = [bench.seconds(row, tmp_path) for row in rows]
    assert all(found)
    assert len(list(tmp_path.iterdir())) == 2, "H100 and H200 have the same compute capability"
    monkeypatch.setattr(bench, "_tracer", None)
    assert [bench.seconds(row, tmp_path) for row in rows] == found
