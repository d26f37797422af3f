"""Samplers and optimizer steps of plans: every sample once, exact effective batches, exact gradients, resuming."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from ddp_jobs import INPUTS, NUM_SAMPLES, TARGETS, gradient, make_model, make_plan, mean_loss, relative_error
from error_types import InputError
from raised import raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autosplit import ddp

JOBS = [
    # split, effective batch, samples of the data set
    ((4,), 4, 45),
    ((4,), 10, 45),
    ((3, 5), 8, 45),
    ((3, 5), 20, 45),
    ((0, 8), 20, 43),
    ((8, 0), 24, 41),
    ((1, 2, 13), 16, 45),
    ((2, 3, 7), 30, 44),
    ((1, 1), 7, 23),
    ((6, 2), 64, 45),
    ((16, 16), 6, 45),
    ((5, 4, 3, 2, 1), 23, 40),
]
IDS = [f"{'+'.join(map(str, split))} of {effective} in {count}" for split, effective, count in JOBS]
ALL_JOBS = pytest.mark.parametrize(("split", "effective", "count"), JOBS, ids=IDS)


def contexts(split: tuple[int, ...], effective: int) -> list[ddp.Context]:
    """Return the settings of every rank, without its process."""
    plan = make_plan(split, effective)
    return [ddp.Context(plan, rank, torch.device("cpu")) for rank in range(len(split))]


class TestOneProcess:
    @pytest.mark.parametrize("shuffle", [False, True])
    @ALL_JOBS
    def test_an_epoch_has_every_sample_once(self, split, effective, count, shuffle):
        sampler = make_plan(split, effective).batch_sampler(count, shuffle=shuffle, seed=3)
        batches = list(sampler)
        assert len(sampler) == len(batches)
        assert sorted(itertools.chain(*batches)) == list(range(count))
        assert max(map(len, batches)) <= sum(split)

    @ALL_JOBS
    def test_drop_last_leaves_out_the_short_step(self, split, effective, count):
        if count < effective:
            with raises(InputError):
                make_plan(split, effective).batch_sampler(count, drop_last=True)
            return
        sampler = make_plan(split, effective).batch_sampler(count, drop_last=True)
        assert sum(map(len, sampler)) == count - count % effective

    @pytest.mark.filterwarnings("ignore:The data set has 45 samples, but the plan has 64")
    @ALL_JOBS
    def test_gradients_are_those_of_the_whole_step(self, split, effective, count):
        plan = make_plan(split, effective)
        wrapped = plan.wrap(make_model())
        data = TensorDataset(torch.arange(count))
        for step in plan.steps(DataLoader(data, batch_sampler=plan.batch_sampler(count, shuffle=True))):
            wrapped.zero_grad()
            used: list[int] = []
            for (indices,) in step:
                used += indices.tolist()
                step.backward(mean_loss(wrapped, indices))
            reference = make_model()
            mean_loss(reference, used).backward()
            assert relative_error(gradient(wrapped), gradient(reference)) < 1e-12

    @pytest.mark.parametrize("done", [0, 1, 2])
    @pytest.mark.parametrize(("split", "effective"), [((4,), 10), ((3, 5), 8), ((2, 3, 7), 20)])
    def test_resuming_goes_on_with_the_same_epoch(self, split, effective, done):
        plan = make_plan(split, effective)
        sampler = plan.batch_sampler(NUM_SAMPLES, shuffle=True, seed=1)
        sampler.set_epoch(2)
        whole = list(sampler)
        sampler.resume(done * effective)
        resumed = plan.batch_sampler(NUM_SAMPLES, shuffle=True, seed=1)
        resumed.load_state_dict(sampler.state_dict())
        skipped = sum(len(step.micro_batch_sizes) for step in resumed.schedule[:done])
        assert list(resumed) == whole[skipped:]

    def test_the_plans_loader_hands_out_its_micro_batches(self):
        plan = make_plan((3, 5), 20)
        loader = plan.loader(TensorDataset(INPUTS, TARGETS))
        assert [len(inputs) for inputs, _ in loader] == [8, 8, 4, 8, 8, 4, 5]

    @pytest.mark.parametrize(
        "consumed",
        [
            7,
            60,
            -1,
        ],
    )
    def test_resuming_elsewhere_is_refused(self, consumed):
        with raises(InputError):
            make_plan((4,), 10).batch_sampler(NUM_SAMPLES).resume(consumed)

    @pytest.mark.parametrize("state", [None, 5, {}, {"epoch": 1}], ids=str)
    def test_a_state_of_something_else_is_refused(self, state):
        with raises(InputError):
            make_plan((4,), 10).batch_sampler(NUM_SAMPLES).load_state_dict(state)

    @pytest.mark.parametrize("count", [0, -1, 2.5, True, None], ids=str)
    def test_a_data_set_of_another_size_is_refused(self, count):
        with pytest.raises(InputError, match="num_samples is"):
            make_plan((4,), 10).batch_sampler(count)


class TestRanks:
    """The samplers of all ranks, without their processes."""

    @staticmethod
    def taken(samplers: list[Any]) -> list[list[int]]:
        """Return the samples of each rank in each micro-batch. A rank without any draws some of no weight."""
        found = []
        for sampler in samplers:
            counts = [size for step in sampler.schedule for size in step.micro_batch_sizes]
            found.append([batch[:size] for batch, size in zip(sampler, counts, strict=True)])
        return found

    @pytest.mark.parametrize("shuffle", [False, True])
    @ALL_JOBS
    def test_the_ranks_together_have_every_sample_once(self, split, effective, count, shuffle):
        samplers = [context.batch_sampler(count, shuffle=shuffle, seed=5) for context in contexts(split, effective)]
        parts = self.taken(samplers)
        assert len({len(part) for part in parts}) == 1
        assert sorted(itertools.chain(*itertools.chain(*parts))) == list(range(count))

    @ALL_JOBS
    def test_the_ranks_agree_on_every_step(self, split, effective, count):
        samplers = [context.batch_sampler(count) for context in contexts(split, effective)]
        assert len({tuple(step.num_samples for step in sampler.schedule) for sampler in samplers}) == 1
        for parts in zip(*(sampler.schedule for sampler in samplers), strict=True):
            assert sum(sum(part.micro_batch_sizes) for part in parts) == parts[0].num_samples

    @ALL_JOBS
    def test_the_first_micro_batch_has_the_plans_sizes(self, split, effective, count):
        ranks = contexts(split, effective)
        sizes = tuple(context.batch_sampler(count).schedule[0].micro_batch_sizes[0] for context in ranks)
        samples = min(sum(split), ranks[0].effective_batch_size, count)
        assert sum(sizes) == samples
        assert samples < sum(split) or sizes == split

    @pytest.mark.parametrize("done", [1, 2])
    def test_resuming_is_the_same_on_every_rank(self, done):
        samplers = [context.batch_sampler(NUM_SAMPLES, shuffle=True) for context in contexts((2, 6), 16)]
        whole = self.taken(samplers)
        for sampler in samplers:
            sampler.resume(done * 16)
        rest = [list(sampler) for sampler in samplers]
        assert [part[2 * done :] for part in whole] == rest


TRAINED = range(30)
"""The training samples of a cross-validation. The other samples must not be trained."""


class FirstThirty(Sampler[int]):
    def __iter__(self):
        return iter(TRAINED)

    def __len__(self):
        return len(TRAINED)


CHOOSING = {
    "subset": {"sampler": SubsetRandomSampler(TRAINED)},
    "subset, batched": {"batch_sampler": BatchSampler(SubsetRandomSampler(TRAINED), 8, drop_last=False)},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 30 + [0.0] * 15, NUM_SAMPLES)},
    "random": {"sampler": RandomSampler(TRAINED)},
    "in order": {"sampler": SequentialSampler(TRAINED)},
    "distributed": {"sampler": DistributedSampler(TRAINED, num_replicas=2, rank=0)},
    "class": {"sampler": FirstThirty()},
    "list": {"sampler": [*TRAINED]},
    "batches": {"batch_sampler": [[*range(8)], [*range(8, 30)]]},
}


class TestSamplersThatChoose:
    @pytest.mark.parametrize("name", CHOOSING)
    def test_no_advice_trains_other_samples(self, name):
        """Cross-validation with a SubsetRandomSampler was refused with "Leave the sampler out".

        That trains the 15 validation samples. A SequentialSampler or DistributedSampler of the training samples was
        taken, and all 45 samples were trained.
        """
        loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), **CHOOSING[name])
        for place in (make_plan((5, 3), 8), *contexts((5, 3), 8)):
            with raises(InputError, "torch.utils.data.Subset(dataset, ") as caught:
                place.loader(loader)
            for wrong in ("Leave the sampler out", "ctx.steps"):
                assert wrong not in str(caught.value)

    def test_the_advised_subset_is_trained_once(self):
        subset = Subset(TensorDataset(torch.arange(NUM_SAMPLES)), SubsetRandomSampler(TRAINED).indices)
        loaders = [context.loader(DataLoader(subset, shuffle=True)) for context in contexts((5, 3), 8)]
        assert sorted(index for loader in loaders for (batch,) in loader for index in batch.tolist()) == [*TRAINED]

    def test_the_advised_subset_may_repeat_samples(self):
        """It takes the place of a WeightedRandomSampler."""
        drawn = [*WeightedRandomSampler([1.0] * 30 + [0.0] * 15, NUM_SAMPLES)]
        subset = Subset(TensorDataset(torch.arange(NUM_SAMPLES)), drawn)
        loaders = [context.loader(DataLoader(subset)) for context in contexts((5, 3), 8)]
        seen = sorted(index for loader in loaders for (batch,) in loader for index in batch.tolist())
        assert seen == sorted(drawn)


SPOILED = (10**30, 2**32 + 1, -1, True, 1.0, math.nan, "1", None, [], torch.tensor(0), torch.zeros(3))


@pytest.mark.parametrize("value", SPOILED, ids=repr)
@pytest.mark.parametrize("name", ["epoch", "samples_consumed", "num_samples", "seed", "shuffle"])
def test_a_spoiled_state_is_refused_before_anything_changes(name, value):
    """An epoch of 10**30 or a tensor was loaded, and the first batch failed."""
    sampler = make_plan((2, 2), 8).batch_sampler(24, shuffle=True, seed=3)
    sampler.set_epoch(2)
    sampler.resume(8)
    before, order = sampler.state_dict(), [*make_plan((2, 2), 8).batch_sampler(24, shuffle=True, seed=3)]
    if value is before[name]:
        return
    with pytest.raises(InputError):
        sampler.load_state_dict({**before, name: value})
    assert sampler.state_dict() == before
    assert len([*sampler]) == len(order) - 2


@pytest.mark.parametrize("epoch", [10**30, -1, True, 1.5, math.nan, "1"], ids=repr)
def test_an_epoch_that_no_loader_can_draw_is_refused(epoch):
    sampler = make_plan((2, 2), 8).batch_sampler(24, shuffle=True)
    with pytest.raises(InputError):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_the_largest_seed_and_epoch_can_be_drawn():
    sampler = make_plan((2, 2), 8).batch_sampler(24, shuffle=True, seed=2**64 - 1)
    sampler.set_epoch(2**32)
    assert sorted(index for batch in sampler for index in batch) == [*range(24)]
