"""Regression tests of tune()."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autosplit
from autosplit.cli.main import main
from autosplit.errors import UserCodeError
from autosplit.runtime import timing


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.mul_(2))


class Leaving(nn.Module):
    """Exits the program from its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        sys.exit(0)


def test_a_module_that_changes_its_input_in_place_does_not_reach_the_other_chunks():
    """Chunks were views of one batch, so the second chunk's forward changed tensors that the first had saved."""
    model = Doubling()
    batch = torch.randn(6, 4)
    wrapper = autosplit.BalancedDataParallel(2, model, ["cpu", "cpu"])
    wrapper(batch.clone()).sum().backward()
    wrapped = model.linear.weight.grad.clone()
    model.zero_grad()
    model(batch.clone()).sum().backward()
    torch.testing.assert_close(wrapped, model.linear.weight.grad)


def test_an_exit_in_the_users_forward_is_not_taken_for_ours(tmp_path, capsys):
    """`sys.exit(0)` in a forward ended `tune` with exit code 0 and no output, which scripts read as success."""
    file = tmp_path / "leaving.py"
    file.write_text(
        "import sys, torch, autosplit\n"
        "class Leaving(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        sys.exit(0)\n"
        "def workload():\n"
        "    return autosplit.Workload(Leaving(4, 4), torch.randn(8, 4))\n"
    )
    assert main(["tune", str(file), "--devices", "cpu:1MiB", "--profile", "off"]) == 5
    assert "leaving.py" in capsys.readouterr().err
    with pytest.raises(UserCodeError):
        autosplit.tune(Leaving(), torch.randn(8, 4), devices="cpu:1MiB", profile="off")


def test_output_replaces_nothing_but_a_plan(tmp_path, capsys):
    """`--output ok.py` wrote the plan's JSON over the workload's own source."""
    file = tmp_path / "ok.py"
    source = "raise AssertionError('not reached')\n"
    file.write_text(source)
    assert main(["tune", str(file), "--output", str(file)]) == 2
    assert "is not a plan" in capsys.readouterr().err
    assert Path(file).read_text() == source


def test_a_single_device_that_accumulates_is_probed_as_it_accumulates():
    """The only device's ceiling did not count gradients of earlier micro-steps, so every trial ran out of memory."""
    plan = autosplit.tune(
        nn.Linear(64, 64),
        torch.randn(8, 64),
        devices="cpu:300KiB",
        effective_batch_size=4000,
        n_trials=2,
        profile="off",
    )
    assert plan.accumulation_steps > 1
    assert plan.main.seats[0].peak_bytes <= plan.devices[0].capacity_bytes


def test_one_slow_run_does_not_decide(monkeypatch):
    """On a busy machine the first and only run took seconds, and `tune` returned batch 1."""
    clock = iter([0.0, 0.0, 5.0, 5.0, 5.1, 5.1, 5.2, 5.2, 5.3, 5.3, *([9.0] * 9)])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    measured = timing.timed(lambda mark: None, 0.5, warmups=0)
    assert measured.repeats > 1
    assert measured.seconds < 5.0


@pytest.mark.whole
def test_a_class_is_a_factory_of_its_models():
    """`Workload(Net, batch)` ended in a traceback, because the class was treated as a module."""
    plan = autosplit.tune(Sized, torch.randn(8, 4), devices="sim:RTX3090", max_batch_size=16, n_trials=2)
    assert plan.batch_size <= 16


class Sized(nn.Linear):
    """A linear layer that needs no arguments."""

    def __init__(self) -> None:
        super().__init__(4, 4)
