"""Training in batches of similar lengths: the weights are one process's, and an epoch can be resumed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from error_types import InputError, PlanError
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from autosplit import OutOfMemoryError, Plan, ddp

pytestmark = pytest.mark.whole

POINTS = [
    {"length": length, "times": times, "samples_per_s": 10 * times, "own_samples_per_s": 10 * times}
    for length, times in ((16, 1.0), (8, 2.5), (4, 6.0))
]
LENGTH_PLAN = {
    "points": POINTS,
    "samples_per_s": 20.0,
    "fixed_samples_per_s": 10.0,
    "padding_share": 0.1,
    "fixed_padding_share": 0.5,
}
DRAWN = random.Random(5)
LENGTHS = [DRAWN.randint(1, 16) for _ in range(101)]


def a_plan(split: tuple[int, ...] = (3, 1), effective: int | None = None) -> Plan:
    asked = None if effective is None else (effective, effective)
    plain = make_plan(split, effective, effective_batch_sizes=asked).to_dict()
    return Plan.from_json(json.dumps({**plain, "lengths": LENGTH_PLAN}))


class Sequences(nn.Module):
    """A model that ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 6, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.seen: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(tokens))
        return self.head(self.embedding(tokens).sum(1))


DATA = [torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(i)) for i, length in enumerate(LENGTHS)]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_one_process(steps: list[list[int]]) -> torch.Tensor:
    """Train on the same optimizer steps, one sample at a time."""
    model = Sequences().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for samples in steps:
        for sample in samples:
            (model(DATA[sample][None]).square().mean() / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def steps_of(sampler: Any) -> list[list[int]]:
    batches = iter(sampler)
    return [[sample for _ in step.micro_batch_sizes for sample in next(batches)] for step in sampler.schedule]


@pytest.mark.parametrize("effective", [None, 25])
def test_the_weights_are_those_of_one_process(effective):
    plan = a_plan(effective=effective)
    sampler = plan.token_sampler(LENGTHS, shuffle=True, seed=3)
    expected = by_one_process(steps_of(sampler))
    wrapped = plan.wrap(Sequences().double())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for step in plan.steps(DataLoader(DATA, batch_sampler=sampler, collate_fn=pad)):
        for tokens in step:
            step.backward(wrapped(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert (weights(wrapped.module) - expected).abs().max() < 1e-9


def test_each_device_gets_what_it_holds_at_the_length():
    plan = a_plan()
    sampler = plan.token_sampler([4] * 50)
    assert sampler.schedule[0].splits == ((18, 6),)  # 6 times (3, 1) at its ceilings for the longest
    wrapped = plan.wrap(Sequences())
    wrapped.ceilings = plan.split  # as on a GPU
    data = [torch.ones(4, dtype=torch.long)] * 50
    for step in plan.steps(DataLoader(data, batch_sampler=sampler, collate_fn=pad)):
        for tokens in step:
            step.backward(wrapped(tokens).mean())
    assert wrapped.module.seen[0] == 18


def test_what_is_cut_keeps_its_proportions_and_no_size_is_cut_before_it_runs():
    """Short samples need less memory. If a batch of long samples runs out, the same number of short ones may fit."""
    plan = a_plan((4,))
    lengths = [16] * 8 + [4] * 40
    sampler = plan.token_sampler(lengths)
    wrapped = plan.wrap(Sequences().double())
    data = [torch.ones(length, dtype=torch.long) for length in lengths]
    loader: Any = DataLoader(data, batch_sampler=sampler, collate_fn=pad)
    sizes, failed = [], []

    def train() -> None:
        for step in plan.steps(loader, on_oom="cut"):
            for tokens in step:
                with step.attempt():
                    sizes.append(len(tokens))
                    if tokens.shape == (4, 16):
                        failed.append(tokens)
                        raise OutOfMemoryError("out of memory")
                    step.backward(wrapped(tokens).mean())

    with pytest.warns(UserWarning, match="ran out of memory and was cut in two"):
        train()
    for _ in range(5):
        train()
    assert len(failed) == 12  # each ran whole first
    assert sizes.count(2) == 24
    assert 24 in sizes


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(0, 3), st.booleans(), st.none() | st.just(9))
def test_the_ranks_take_every_sample_once_and_equally_many_batches(lengths, epoch, shuffle, effective):
    plan = a_plan((3, 0, 2), effective)
    contexts = [ddp.Context(plan, rank, torch.device("cpu")) for rank in range(3)]
    made = [context.token_sampler(lengths, shuffle=shuffle) for context in contexts]
    for sampler in made:
        sampler.set_epoch(epoch)
    counts = [[n for step in sampler.schedule for n in step.micro_batch_sizes] for sampler in made]
    batches = [[*sampler] for sampler in made]
    assert [len(sampler) for sampler in made] == [len(drawn) for drawn in batches]
    taken = [
        sample
        for drawn, sizes in zip(batches, counts, strict=True)
        for batch, size in zip(drawn, sizes, strict=True)
        for sample in batch[:size]
    ]
    assert sorted(taken) == [*range(len(lengths))]
    assert not any(counts[1])
    assert all(len(batch) == 1 for batch in batches[1])  # it runs one sample that does not count
    assert len({tuple(step.num_samples for step in sampler.schedule) for sampler in made}) == 1


@pytest.mark.parametrize("effective", [None, 25])
def test_an_epoch_goes_on_where_it_was(effective):
    plan = a_plan(effective=effective)
    sampler = plan.token_sampler(LENGTHS, shuffle=True)
    sampler.set_epoch(2)
    whole = [*sampler]
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=pad, num_workers=0)
    model = Sequences()
    for number, step in enumerate(plan.steps(loader)):
        for tokens in step:
            step.backward(model(tokens).mean())
        if number == 1:
            break
    done = sum(len(step.micro_batch_sizes) for step in sampler.schedule[:2])
    again = plan.token_sampler(LENGTHS, shuffle=True)
    again.load_state_dict(sampler.state_dict())
    assert [*again] == whole[done:]
    assert [*again] == whole  # once


def test_with_an_effective_batch_another_sampler_may_go_on():
    """A step has the same samples as in `batch_sampler`, so a run may switch at the end of any step."""
    plan = a_plan(effective=20)
    tokens, usual = plan.token_sampler(LENGTHS, shuffle=True, seed=1), plan.batch_sampler(101, shuffle=True, seed=1)
    batches = iter(usual)
    usual_steps = [sorted(i for _ in step.micro_batch_sizes for i in next(batches)) for step in usual.schedule]
    assert [sorted(step) for step in steps_of(tokens)] == usual_steps
    usual.load_state_dict({**tokens.state_dict(), "samples_consumed": 40})
    assert usual.start_step == 2


def test_a_state_of_other_batches_is_refused():
    state = a_plan().token_sampler(LENGTHS).state_dict()
    with raises(InputError):
        a_plan().token_sampler([*LENGTHS[:-1], 16]).load_state_dict(state)
    with raises(InputError):
        a_plan((4, 2)).token_sampler(LENGTHS).load_state_dict(state)


def test_a_state_of_batches_of_like_length_is_no_other_samplers():
    """The other sampler used other samples. Some would have come twice, and others never."""
    state = a_plan().token_sampler(LENGTHS, shuffle=True).state_dict()
    with raises(InputError):
        a_plan().batch_sampler(101, shuffle=True).load_state_dict(state)


def test_shuffling_mixes_the_lengths_and_no_epoch_is_the_last():
    sampler = a_plan().token_sampler(LENGTHS, shuffle=True)
    first = [*sampler]
    sampler.set_epoch(1)
    assert [*sampler] != first
    longest = [max(LENGTHS[i] for i in batch) for batch in first]
    assert longest != sorted(longest, reverse=True)
    assert [*a_plan().token_sampler(LENGTHS, shuffle=True)] == first


def test_a_tensor_of_lengths_will_do():
    assert [*a_plan().token_sampler(torch.tensor(LENGTHS))] == [*a_plan().token_sampler(LENGTHS)]


def test_one_number_for_trainers_that_want_one():
    assert a_plan((3, 1)).max_tokens == (3 * 16, 16)


def test_what_it_can_not_do_is_refused():
    plan = a_plan()
    with raises(InputError, "17", "16"):
        plan.token_sampler([3, 17])
    with raises(PlanError):
        make_plan((4,)).token_sampler([3])
    with raises(PlanError):
        _ = make_plan((4,)).max_tokens
    with raises(InputError, "2"):
        plan.token_sampler([3]).refuse_single_samples(plan.split, 2)


def test_points_that_are_out_of_order_are_no_plan():
    wrong = {**LENGTH_PLAN, "points": POINTS[::-1]}
    with pytest.raises(PlanError, match="Expected points of falling length"):
        Plan.from_json(json.dumps({**make_plan((4,)).to_dict(), "lengths": wrong}))
    assert Plan.from_json(a_plan().to_json()) == a_plan()
