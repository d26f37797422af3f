"""Loaders of another batch size, and code for one process in a job: reported in the first step, on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ddp_jobs import INPUTS, loader_of, make_model, make_plan
from ranks import found_by, job_of
from torch import Tensor

from autosplit import ddp
from autosplit.errors import InputError


def of_loader(sizes: list[int]) -> list[str]:
    """Use a loader with this batch size on each rank, and return the warnings."""

    def made() -> Iterator[Tensor]:
        yield from (INPUTS[:size] for size in sizes)

    with warnings.catch_warnings(record=True) as caught, ddp.setup(make_plan((2, 6), 8)) as ctx:
        warnings.simplefilter("always")
        model = ctx.wrap(make_model())
        for step in ctx.steps(made()):
            for inputs in step:
                step.backward(model(inputs).square().mean())
    return [str(warning.message) for warning in caught if warning.category is ddp.EffectiveBatchWarning]


def bypassed_with_cuts() -> str:
    with ddp.setup(make_plan((2, 6), 8)) as ctx:
        model = ctx.wrap(make_model())
        try:
            for step in ctx.steps(loader_of(ctx), on_oom="cut"):
                for indices in step:
                    with step.attempt():
                        step.backward(model.module(INPUTS[indices]).square().mean())
        except InputError as error:
            return str(error)
    return "no error"


def wrapped_by_plan() -> str:
    try:
        make_plan((2, 6), 8).wrap(make_model())
    except InputError as error:
        return str(error)
    return "nothing"


LOADERS = {"too large": [10, 10, 10], "too small": [3, 3, 3], "fits": [4, 4, 4]}

SCENARIOS: dict[str, Callable[[], Any]] = {
    "cut": bypassed_with_cuts,
    "plan.wrap": wrapped_by_plan,
    **{name: lambda sizes=sizes: of_loader(sizes) for name, sizes in LOADERS.items()},
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.whole
def test_with_cuts_autosplit_averages_the_gradients_itself(ranks):
    assert found_by(ranks, "cut") == ["no error"] * 2


def test_plan_wrap_in_a_rank_is_an_error(ranks):
    """Code for one process, started by launch, trained two models on all samples, silently."""
    assert all("ctx.wrap" in said for said in found_by(ranks, "plan.wrap"))


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_another_batch_size_are_reported(ranks, name):
    samples = 2 * LOADERS[name][0]
    for found in found_by(ranks, name):
        assert len(found) == (samples != 8)
        assert all(f"have {samples} samples, but the plan's have 8" in text for text in found)
