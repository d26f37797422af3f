"""Plans for sharded models: ceilings, shard groups, communication and refusals, by hand-computed numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from handmade import changed_plan, changed_seats, made_ceiling
from plans import MIB
from raised import raises
from shared_training import shares_plan
from torch import nn

from autosplit import Plan
from autosplit.ddp.context import Context
from autosplit.errors import InputError, PlanError
from autosplit.plan.layout import Seat
from autosplit.plan.solve_again import LINE_ERROR
from autosplit.solve.memory import MemoryParts
from autosplit.solve.problem import Problem
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.tools import sharded_plan as extra
from autosplit.tools.fsdp import groups_of
from autosplit.tools.other_devices import RankDevice, plan_for_devices
from autosplit.tools.sharded_plan import unequal_ceilings

ROOT, LAYER, LAYERS = 2, 4, 8
PARAMETERS = ROOT + LAYERS * LAYER
"""MiB of parameters: of the root, of a layer, the number of layers, and of the whole model."""


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1024, 1024, bias=False)


def make_model(*, trains: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024, bias=False), *(Layer() for _ in range(LAYERS)))
    return model.requires_grad_(trains)


def make_plan(
    capacities: tuple[int, ...] = (200, 240),
    effective: int = 64,
    *,
    speeds: tuple[float, ...] = (),
    all_reduce_s: float = 0.0,
    limits: tuple[Any, ...] = (),
    **changes: Any,
) -> Plan:
    """Return a plan of ranks that accumulate, with AdamW and 1 MiB per sample. Capacities are in MiB."""
    count = len(capacities)
    fixed = 5 * PARAMETERS  # parameters, buckets, accumulated gradients, two states
    parts = MemoryParts(PARAMETERS * MIB, PARAMETERS * MIB, 2 * PARAMETERS * MIB, 0, 0)

    def seated(index: int, seat: Seat) -> Seat:
        ceiling = made_ceiling(
            "cpu:0",
            max(8, capacities[index] - fixed),
            capacities[index] * MIB,
            fixed_bytes=fixed * MIB,
            bytes_per_sample=MIB,
            peak_bytes=0,
            limited_by=limits[index] if limits else "memory",
        )
        return replace(seat, ceiling=ceiling, memory=None if index else parts)

    curves = tuple(TimeCurve(((1, speed), (8, 8 * speed))) for speed in speeds or (0.001,) * count)
    cost = Cost(StepTime.bare(curves, 0.002, adds_up=False), all_reduce_s)
    given = {"effective_batch_sizes": (effective, effective), "cost": cost, **changes}
    return changed_plan(changed_seats(shares_plan((8,) * count, effective), seated), **given)


def sharded_plan(plan: Plan, model: nn.Module, *, layers: Any = None, **options: Any) -> Plan:
    """Return the sharded plan with 1 MiB of activations per sample."""
    return extra.sharded_plan(plan, groups_of(model, layers), lambda _, samples: samples * MIB, **options)


def fixed_of(plan: Plan) -> list[float]:
    return [rank.ceiling.fixed_bytes / MIB for rank in plan.ddp.seats]


ONE = ROOT + 2 * LAYER + ROOT + 2 * LAYER
SEVERAL = ROOT + 2 * LAYER + PARAMETERS + LAYER
"""MiB of gathered tensors, by the formula of Note [Memory of a sharded model]."""


FORWARDS = (ONE, "one forward"), (SEVERAL, "several")


class TestCeilings:
    def test_a_step_of_one_forward(self):
        plan = make_plan()
        found = sharded_plan(plan, make_model(), layers=Layer)
        fixed = 4 * PARAMETERS / 2 + ONE
        assert fixed_of(found) == [fixed, fixed]
        sizes = [rank.ceiling.batch_size for rank in found.ddp.seats]
        assert sizes == [min(64, int((1 - LINE_ERROR) * capacity - fixed)) for capacity in (200, 240)]
        assert (found.accumulation_steps, found.effective_batch_size, found.batch_size) == (1, 64, 64)
        assert found.split == found.ddp.split == (32, 32)
        assert found.ddp.shard_size == 2
        assert [rank.peak_bytes / MIB for rank in found.ddp.seats] == [fixed + 32] * 2
        assert [note.kind for note in found.notes[len(plan.notes) :]] == ["sharded", "unequal-shards"]
        assert Plan.from_json(found.to_json()) == found

    def test_a_step_of_several_forwards_keeps_whole_gradients(self):
        found = sharded_plan(make_plan(effective=640), make_model(), layers=Layer)
        fixed = 4 * PARAMETERS / 2 + SEVERAL
        assert fixed_of(found) == [fixed, fixed]
        most = [int((1 - LINE_ERROR) * capacity - fixed) for capacity in (200, 240)]
        assert [rank.ceiling.batch_size for rank in found.ddp.seats] == most
        assert found.accumulation_steps >= 640 / sum(most)
        assert found.effective_batch_size == 640

    def test_layers_that_stay_gathered(self):
        found = sharded_plan(make_plan(), make_model(), layers=Layer, reshards=False)
        assert fixed_of(found) == [2 * PARAMETERS + PARAMETERS + ROOT + 2 * LAYER] * 2

    def test_only_memory_lets_a_ceiling_grow(self):
        found = sharded_plan(make_plan(limits=("kernel", "memory")), make_model(), layers=Layer)
        assert [rank.ceiling.batch_size for rank in found.ddp.seats] == [200 - 5 * PARAMETERS, 64]
        assert [rank.ceiling.limited_by for rank in found.ddp.seats] == ["kernel", "memory"]

    def test_rows_are_rounded_up(self):
        with torch.device("meta"):
            model = nn.Linear(7, 3, bias=False)
        plan = make_plan((200, 200, 200, 200))
        found = sharded_plan(plan, model, shard_size=4)
        parameters, shard = 3 * 7 * 4, 1 * 7 * 4
        optimizer = 2 * PARAMETERS * MIB
        wanted = 2 * shard + optimizer * shard // parameters + 2 * 4 * shard
        assert found.ddp.seats[0].ceiling.fixed_bytes == wanted

    def test_activations_that_grow_faster_in_large_batches(self):
        """The line of the ceiling is drawn near the ceiling. Through the smallest batches it would be too flat."""
        plan, groups = make_plan(effective=640), groups_of(make_model(), Layer)
        found = extra.sharded_plan(plan, groups, lambda _, samples: max(20, 2 * samples) * MIB)
        for rank in found.ddp.seats:
            ceiling = rank.ceiling
            assert ceiling.bytes_per_sample == 2 * MIB
            room = int((1 - LINE_ERROR) * ceiling.capacity_bytes)
            assert ceiling.bytes_at(ceiling.batch_size) <= room < ceiling.bytes_at(ceiling.batch_size + 1)


class TestShardGroups:
    def test_the_smallest_group_that_is_fast(self):
        found = sharded_plan(make_plan((300,) * 4, all_reduce_s=0.02), make_model(), layers=Layer)
        assert found.ddp.shard_size == 2

    def test_a_larger_group_if_memory_is_short(self):
        found = sharded_plan(make_plan((103,) * 4, all_reduce_s=0.001), make_model(), layers=Layer)
        assert (found.ddp.shard_size, found.accumulation_steps) == (4, 1)
        assert fixed_of(found) == [4 * PARAMETERS / 4 + ONE] * 4

    @pytest.mark.parametrize("size", [0, 1, 3, 8])
    def test_a_size_that_does_not_divide_the_ranks(self, size):
        with raises(InputError, f"shard_size is {size}. Expected one of [2, 4]"):
            sharded_plan(make_plan((300,) * 4), make_model(), layers=Layer, shard_size=size)


UPDATE_S = 0.002 / 2
"""Seconds of the update on two ranks. The whole update takes 2 ms."""


class TestCommunication:
    def test_of_all_ranks(self):
        """Two ranks: an all-reduce takes 40 ms, so sending P once takes half."""
        found = sharded_plan(make_plan(all_reduce_s=0.04), make_model(), layers=Layer)
        gathers_s = 0.04 / 2 * (2 * PARAMETERS - ROOT) / PARAMETERS
        assert found.main.cost.all_reduce_s == pytest.approx(0.02 + gathers_s * 2 / 3)
        assert found.main.cost.step_time.curves[0](1) == pytest.approx(gathers_s)
        forward_s = max(gathers_s, 0.032)
        expected_s = forward_s + max(0.0, 0.02 + (gathers_s - forward_s) * 2 / 3) + UPDATE_S
        assert found.samples_per_s == pytest.approx(64 / expected_s)
        assert found.notes[-2].text.startswith("Predicted ")

    def test_of_shard_groups(self):
        """A ring of n ranks sends (n - 1) / n. Groups of 2 reduce-scatter 1/2, then all-reduce half of the bytes."""
        found = sharded_plan(make_plan((300,) * 4, all_reduce_s=0.06), make_model(), layers=Layer, shard_size=2)
        once_s = 0.06 / 2 * 4 / 3
        gathers_s = once_s / 2 * (2 * PARAMETERS - ROOT) / PARAMETERS
        assert found.main.cost.all_reduce_s == pytest.approx(once_s * (1 / 2 + 2 * (1 / 2) / 2) + gathers_s * 2 / 3)

    def test_computation_that_takes_longer_hides_the_gathers(self):
        """The measured sizes, up to 8 samples, take less time than the gathers. The plan's 32 samples take more."""
        found = sharded_plan(make_plan(all_reduce_s=0.04, speeds=(0.004, 0.004)), make_model(), layers=Layer)
        times = [found.main.cost.step_time.curves[0](samples) for samples in (1, 8, 9, 10, 32)]
        assert times == pytest.approx([0.0388, 0.0388, 0.0388, 0.04, 0.128], rel=1e-3)
        assert found.samples_per_s == pytest.approx(64 / (0.128 + UPDATE_S))


class TestUnequalShards:
    @pytest.mark.parametrize("capacities", [(25, 90), (22, 200)])
    def test_all_ranks_take_the_same_time_and_fill_the_memory(self, capacities):
        shard, fixed, slopes = 10, 20, (2, 3)
        curves = (TimeCurve(((1, 3.0), (50, 150.0))), TimeCurve(((1, 1.0), (50, 50.0))))
        ceilings = tuple(
            made_ceiling("x", 50, capacity, fixed_bytes=fixed, bytes_per_sample=slope)
            for capacity, slope in zip(capacities, slopes, strict=True)
        )
        fit = Cost(StepTime.bare(curves, 0.0, adds_up=False))
        problem = Problem.of(
            fit, ceilings, None, effective_batch_sizes=(40, 40), max_batch_size=None, accumulates=False
        )
        rooms = [int(0.99 * capacity) - fixed + shard for capacity in capacities]

        def fits(split: tuple[int, ...]) -> bool:
            free = [room - slope * n for room, slope, n in zip(rooms, slopes, split, strict=True)]
            return min(free) >= 0 and sum(free) >= 2 * shard

        found = unequal_ceilings(problem, shard, [int(0.99 * capacity) for capacity in capacities])
        assert fits(tuple(found))
        times = sorted({curve(n) for curve in curves for n in range(1, 41)})
        splits = [tuple(curve.most_within(time, 0, 40) for curve in curves) for time in times]
        within = [
            tuple(map(min, split, [room // slope for room, slope in zip(rooms, slopes, strict=True)]))
            for split in splits
        ]
        assert tuple(found) == max(filter(fits, within), key=sum)

    def test_gaps_count_as_in_equal_shards(self):
        """With 10% for gaps, two equal ranks can't gain from unequal shards. The note counted the gaps as memory."""
        found = extra.sharded_plan(
            *(make_plan((160, 160), 200), groups_of(make_model(), Layer), lambda _, samples: samples * MIB), gaps=0.1
        )
        most = sum(rank.ceiling.batch_size for rank in found.ddp.seats)
        allowed = re.search(r"would allow (\d+) samples", found.notes[-1].text)
        assert allowed is not None
        assert int(allowed[1]) == most

    def test_the_note_names_the_gain(self):
        """The first rank has hardly any room with equal shards, and the second has 100 MiB more than it needs."""
        plan = make_plan((94, 300), 100, speeds=(0.001, 0.004))
        note = sharded_plan(plan, make_model(), layers=Layer).notes[-1]
        numbers = re.findall(r"([\d,]+) samples", note.text)
        more, faster, slower = (int(number.replace(",", "")) for number in numbers)
        assert more > 100
        assert faster > slower


class TestRefusals:
    @pytest.mark.parametrize(
        ("plan", "lacks"),
        [
            (make_plan(cost=None), "no time model"),
            (changed_seats(make_plan(), lambda _, seat: replace(seat, memory=None)), "no parts of device 0's memory"),
        ],
    )
    def test_plans_without_measurements(self, plan, lacks):
        with raises(PlanError, f"The plan has {lacks}"):
            sharded_plan(plan, make_model())

    def test_a_sharded_plan(self):
        found = sharded_plan(make_plan(), make_model(), layers=Layer)
        with raises(PlanError, "a sharded model already"):
            sharded_plan(found, make_model(), layers=Layer)

    def test_an_effective_batch_that_does_not_fit(self):
        """Several forwards need more memory than one, so a message with one number could be below the capacity."""
        one, several = (f"{2 * PARAMETERS + gathered + 1} MiB in a step of {name}" for gathered, name in FORWARDS)
        with raises(PlanError, "64 samples", "do not fit 2 ranks", one, several, "59.4 MiB"):
            sharded_plan(make_plan((60, 60)), make_model(), layers=Layer)

    def test_a_whole_model_on_each_rank(self):
        found = sharded_plan(make_plan(), make_model(), layers=Layer)
        with raises(InputError, "Call ctx.shard"):
            Context(found, 0, torch.device("cpu")).wrap(nn.Linear(1, 1))

    def test_other_devices(self):
        found = sharded_plan(make_plan(), make_model(), layers=Layer)
        device = RankDevice("cpu:0", found.devices[0].name, budget_bytes=found.devices[0].memory_bytes)
        assert plan_for_devices(found, [device, device]).split == found.split
        with raises(PlanError):
            plan_for_devices(found, [device])
