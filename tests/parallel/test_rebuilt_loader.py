"""`plan.loader(loader)`: a plan's batches with the dataset, order and settings of the user's loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import made_plan
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from autosplit.errors import InputError
from autosplit.plan.plan import Plan

NUM_SAMPLES = 50
DATA = TensorDataset(torch.arange(NUM_SAMPLES))


@pytest.fixture
def plan() -> Plan:
    """Steps of 20 samples: micro-batches of 8, 8 and 4."""
    return made_plan((3, 5), kind="cpu", effective=20)


def drawn(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def test_the_settings_and_the_order_are_those_of_the_loader(plan):
    def begin(worker: int) -> None: ...

    own = DataLoader(
        DATA, batch_size=4, collate_fn=torch.utils.data.default_collate, num_workers=2, prefetch_factor=3, timeout=9
    )
    own.worker_init_fn = begin
    made = plan.loader(own)
    for name in ("dataset", "collate_fn", "num_workers", "prefetch_factor", "timeout", "worker_init_fn", "pin_memory"):
        assert getattr(made, name) == getattr(own, name)
    assert drawn(plan.loader(DataLoader(DATA, batch_size=4)))[0] == [*range(8)]


def test_a_loader_that_shuffles_is_shuffled(plan):
    shuffled = plan.loader(DataLoader(DATA, batch_size=4, shuffle=True), seed=3)
    assert drawn(shuffled) == drawn(plan.loader(DATA, shuffle=True, seed=3))
    assert drawn(shuffled)[0] != [*range(8)]
    assert drawn(plan.loader(DataLoader(DATA, batch_size=4, shuffle=True), shuffle=False))[0] == [*range(8)]


@pytest.mark.parametrize(("given", "sizes"), [(None, [8, 8, 4] * 2), (False, [*([8, 8, 4] * 2), 8, 2])])
def test_drop_last_is_that_of_the_loader_unless_given(plan, given, sizes):
    made = plan.loader(DataLoader(DATA, batch_size=4, drop_last=True), drop_last=given)
    assert [len(batch) for batch in drawn(made)] == sizes


def test_options_replace_the_settings(plan):
    made = plan.loader(DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=3), num_workers=0)
    assert (made.num_workers, made.prefetch_factor, made.persistent_workers) == (0, None, False)


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Stream(), batch_size=4), "Stream"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (
            DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES)),
            "WeightedRandomSampler",
        ),
    ],
)
def test_what_a_plan_cannot_divide_is_refused_with_the_next_step(plan, loader, named):
    with pytest.raises(InputError) as caught:
        plan.loader(loader)
    assert named in str(caught.value)
    assert "plan.steps" in str(caught.value) or loader.batch_size is None


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (iter([1, 2]), "list_iterator"),
        ((torch.zeros(4, 2), torch.zeros(4)), "tuple"),
    ],
)
def test_mistakes_name_the_next_step(plan, data, named):
    with pytest.raises(InputError) as caught:
        plan.loader(data)
    assert named in str(caught.value)
