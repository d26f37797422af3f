"""Plans find their GPUs, and know the smallest batch that a BatchNorm can train on."""

from __future__ import annotations

from dataclasses import replace

import torch
from handmade import on_devices
from plans import make_plan, plan_device
from raised import raises
from torch import nn

from autosplit.devices import accelerator
from autosplit.errors import DeviceError, InputError
from autosplit.probe.check_result import Check

PLAN = make_plan()


def test_a_last_batch_that_batchnorms_do_not_train_on_is_refused_before_training():
    norms = make_plan(least_batch=2)
    with raises(InputError, "1", "2"):
        norms.batch_sampler(2 * PLAN.effective_batch_size + 1)
    norms.batch_sampler(2 * PLAN.effective_batch_size + 1, drop_last=True)
    PLAN.batch_sampler(2 * PLAN.effective_batch_size + 1)


def test_its_cards_are_found_wherever_they_stand_now(monkeypatch):
    """CUDA_VISIBLE_DEVICES=1,0 exchanged the splits of the GPUs."""
    large = plan_device(0, kind="cuda", label="cuda:0", name="RTX 3090", uuid="GPU-a")
    small = plan_device(1, kind="cuda", label="cuda:1", name="RTX 2080 Ti", uuid="GPU-b")
    plan = on_devices(make_plan(), large, small)
    seen = [accelerator.Visible("RTX 2080 Ti", "GPU-b"), accelerator.Visible("RTX 3090", "GPU-a")]
    monkeypatch.setattr(accelerator, "visible_devices", lambda kind: seen)
    assert plan.devices_here() == (torch.device("cuda:1"), torch.device("cuda:0"))
    seen[0] = accelerator.Visible("T4", "GPU-c")
    with raises(DeviceError):
        plan.wrap(nn.Linear(4, 1))


def test_a_plan_in_one_line_says_where_splitting_changes_the_training():
    same, other = (Check("gradient", 0.1 * depends, None, depends) for depends in (False, True))
    assert "splitting" not in str(replace(make_plan(), checks=(same,)))
    assert ". Splitting changes the training, see plan.checks" in str(replace(make_plan(), checks=(same, other)))


def test_a_plan_in_one_line_names_a_chosen_step():
    """Without effective_batch_size, a plan of tens of thousands of samples per step changed the training silently."""
    chosen = replace(make_plan(), effective_batch_sizes=None, sample_batch_size=8)
    said = "autosplit chose 16 samples per optimizer step (your sample batch has 8). To keep your own, pass "
    assert str(chosen).endswith(f". {said}effective_batch_size")
    assert "No loss was given, so the plan is for the mean of the model's outputs. autosplit chose" in str(
        replace(chosen, loss_rule="mean")
    )
    assert "No loss was given" in str(replace(chosen, loss_rule="mean").explain())
    assert "No loss was given" not in f"{chosen}{chosen.explain()}"
    assert "autosplit chose" not in str(replace(chosen, effective_batch_sizes=(16, 16)))
