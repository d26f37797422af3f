"""A plan for the devices that the ranks of a job really have: in another order, fewer of them, or unknown ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from handmade import changed_plan, changed_seats, made_ceiling, on_devices
from hypothesis import given
from hypothesis import strategies as st
from plans import MIB
from raised import raises
from shared_training import shares_plan

from autosplit.ddp.device import device_for
from autosplit.ddp.rendezvous import Place
from autosplit.devices.accelerator import Visible
from autosplit.errors import DeviceError, PlanError
from autosplit.plan.layout import Seat
from autosplit.plan.plan import Plan
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.tools.other_devices import RankDevice, plan_for_devices

NAMES, SIZES, EFFECTIVE = ("Fast", "Slow", "Slow"), (12, 3, 3), 72
FAST, SLOW = RankDevice("cuda:0", "Fast"), RankDevice("cuda:0", "Slow")


def gpu_plan(**changes: object) -> Plan:
    """Return a plan for a fast GPU and two slow ones, which take 1 and 4 ms per sample."""

    def on_gpu(index: int, seat: Seat) -> Seat:
        known = {"name": NAMES[index], "uuid": f"GPU-{index}", "label": f"cuda:{index}"}
        return replace(seat, device=replace(seat.device, kind="cuda", budgeted=False, **known), ceiling=held)

    held = made_ceiling("cuda:0", 50, 60 * MIB, fixed_bytes=MIB, bytes_per_sample=MIB, peak_bytes=51 * MIB)
    curves = tuple(TimeCurve(((1, speed), (64, 64 * speed))) for speed in (0.001, 0.004, 0.004))
    cost = Cost(StepTime.bare(curves, 0.002, adds_up=False), all_reduce_s=0.003)
    return changed_plan(changed_seats(shares_plan(SIZES, EFFECTIVE), on_gpu), cost=cost, **changes)


@given(st.permutations(range(3)))
def test_each_rank_finds_its_own_gpu(order: list[int]) -> None:
    """Ray numbers the workers again after each failure."""
    found = plan_for_devices(gpu_plan(), [RankDevice(f"cuda:{n}", NAMES[n], f"GPU-{n}") for n in order])
    assert [device.uuid for device in found.devices] == [f"GPU-{n}" for n in order]
    assert found.split == found.ddp.split == tuple(SIZES[n] for n in order)
    assert (found.accumulation_steps, found.effective_batch_size) == (4, EFFECTIVE)
    assert Plan.from_json(found.to_json()) == found


def test_gpus_of_other_machines_are_found_by_name() -> None:
    """The UUID of a planned GPU has priority: the second planned GPU is not assigned to the first rank."""
    devices = [RankDevice("cuda:0", "Slow", "GPU-new"), RankDevice("cuda:1", "Slow", "GPU-1"), FAST]
    found = plan_for_devices(gpu_plan(), devices)
    assert found.ddp.split == (3, 3, 12)
    assert [device.label for device in found.ddp.devices] == ["cuda:0", "cuda:1", "cuda:0"]


def test_setup_uses_the_gpu_that_the_engine_chose() -> None:
    """The first node has a slow and a fast GPU, in another order than in the plan."""
    devices = [RankDevice("cuda:0", "Slow", "GPU-2"), RankDevice("cuda:1", "Fast", "GPU-0"), SLOW]
    found, here = plan_for_devices(gpu_plan(), devices), [Visible("Slow", "GPU-2"), Visible("Fast", "GPU-0")]
    chosen = [device_for(found, Place(rank, 3, rank, 2), here) for rank in (0, 1)]
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert device_for(found, Place(2, 3, 0, 1), [Visible("Slow", "GPU-new")]) == torch.device("cuda", 0)


@pytest.mark.parametrize("devices", [(FAST,), (SLOW, FAST), (SLOW, SLOW), (FAST, FAST, SLOW, SLOW, SLOW)])
def test_other_numbers_of_gpus_keep_the_effective_batch(devices: tuple[RankDevice, ...]) -> None:
    found = plan_for_devices(gpu_plan(), devices)
    assert (found.effective_batch_size, found.ddp.effective_batch_size) == (EFFECTIVE, EFFECTIVE)
    assert found.batch_size * (found.accumulation_steps - 1) < EFFECTIVE <= found.batch_size * found.accumulation_steps
    assert not found.ddp.measured
    assert Plan.from_json(found.to_json()) == found
    sizes = {device.name: samples for device, samples in zip(devices, found.ddp.split, strict=True)}
    if len(sizes) == 2:
        assert 3 * sizes["Slow"] <= sizes["Fast"] <= 5 * sizes["Slow"]


def test_an_unknown_gpu_is_refused() -> None:
    with raises(DeviceError, "Rank 1 has the device New", "only has measurements of Fast, Slow"):
        plan_for_devices(gpu_plan(), [FAST, RankDevice("cuda:0", "New")])


def test_a_cpu_is_found_by_its_budget() -> None:
    plan = shares_plan((3, 1), 4)
    smaller = (replace(plan.devices[0], memory_bytes=2**21), replace(plan.devices[1], memory_bytes=2**20))
    plan = on_devices(plan, *smaller)
    cpus = [RankDevice("cpu", "cpu", budget_bytes=n) for n in (2**20, 2**21)]
    assert plan_for_devices(plan, cpus).split == (1, 3)
    with raises(DeviceError, "only has measurements of cpu with 2 MiB, cpu with 1 MiB"):
        plan_for_devices(plan, [RankDevice("cpu", "cpu"), cpus[0]])


def test_a_step_that_can_not_be_kept_is_refused() -> None:
    with raises(PlanError, "72 samples", "(Fast)"):
        plan_for_devices(gpu_plan(accumulates=False, max_batch_size=18), [FAST])
    with raises(PlanError, "no time model"):
        plan_for_devices(changed_plan(gpu_plan(), cost=None), [FAST])
