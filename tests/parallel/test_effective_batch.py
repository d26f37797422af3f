"""`plan.steps` reports a loader with another batch size: it trained with steps of 100 samples for a plan of 64."""

from __future__ import annotations

import warnings

import pytest
import torch
from ddp_jobs import make_plan

from autosplit.parallel.epoch_steps import EffectiveBatchWarning


def batches(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, 1) for size in sizes]


def warned_of(sizes: tuple[int, ...], effective: int = 64) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight = torch.ones(1, requires_grad=True)
        for step in make_plan((16, 16), effective).steps(batches(*sizes)):
            for batch in step:
                step.backward((batch.mean() * weight).sum())
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught if warning.category is EffectiveBatchWarning]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((100, 100, 100), 100), ((48, 48, 48, 48), 96), ((100,), 100), ((20,), 20), ((32, 33, 32, 32), 65)],
)
def test_both_numbers_are_in_one_warning(sizes: tuple[int, ...], found: int) -> None:
    (text,) = warned_of(sizes)
    assert f"The optimizer steps have {found} samples, but the plan's have 64" in text


@pytest.mark.parametrize("sizes", [(32, 32, 32, 32), (64, 64), (16,) * 8, (32, 32, 32, 7), (64, 3), ()])
def test_equal_steps_and_a_smaller_last_step_are_silent(sizes: tuple[int, ...]) -> None:
    assert warned_of(sizes) == []


def test_the_plans_own_loader_is_silent() -> None:
    plan = make_plan((16, 16), 64)
    data = torch.utils.data.TensorDataset(torch.zeros(100, 1))
    weight = torch.ones(1, requires_grad=True)
    for step in plan.steps(plan.loader(data)):
        for (batch,) in step:
            step.backward((batch.mean() * weight).sum())


def test_a_data_set_below_the_step_is_one_warning_with_both_numbers() -> None:
    """A plan of 512 samples per step trained steps of 100, without a message."""
    plan = make_plan((16, 16), 64)
    with pytest.warns(EffectiveBatchWarning) as caught:
        steps = plan.steps(plan.loader(torch.utils.data.TensorDataset(torch.zeros(20, 1))))
    (text,) = [str(one.message) for one in caught]
    assert text.startswith("The data set has 20 samples, but the plan has 64 per optimizer step.")
    assert "effective_batch_size=20" in text
    assert next(iter(steps)).num_samples == 20


def test_a_count_is_in_other_units() -> None:
    weight = torch.ones(1, requires_grad=True)
    for step in make_plan((16, 16), 64).steps(batches(32, 32, 32, 32), count=lambda batch: 3 * len(batch)):
        for batch in step:
            step.backward((batch.mean() * weight).sum())
