"""What small steps show: the smallest batch, which parameters get a gradient, and where the loss is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raised import raises
from torch import nn
from workloads import net_batch, small, with_loss

from autosplit.errors import UserCodeError, WorkloadError
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.small_steps import GradientsSeen, facts_of, few_samples, least_batch_of, small_step
from autosplit.workload.checkpointing import Checkpointing
from autosplit.workload.workload import Workload


def linear(**options) -> Workload:
    return Workload(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 4), **options)


class Runs:
    """Note the sizes that run. Some of them raise an error."""

    def __init__(self, *failing: int, error: type[Exception] = RuntimeError) -> None:
        self.sizes, self.failing, self.error = [], failing, error

    def __call__(self, samples):
        self.sizes.append(samples)
        if samples in self.failing:
            raise self.error("no")


def test_a_model_that_is_not_trained_only_runs_its_forward():
    assert small_step(linear(), 2) == StepShape(((2,),), "rank")
    assert small_step(replace(linear(), held=("forward",)), 2) == StepShape(((2,),), "eval")


class TestLeastBatch:
    def test_is_one_without_a_norm_over_samples(self):
        run = Runs(1)
        assert least_batch_of(training_copy(linear()), run) == 1
        assert run.sizes == [], "no step has to show it"

    @pytest.mark.parametrize(("failing", "least"), [((1,), 2), ((), 1)])
    def test_of_a_norm_over_samples_is_shown_by_a_step(self, failing, least):
        """BatchNorm2d takes one image, because an image has many values. BatchNorm1d raises an error for one row."""
        run = Runs(*failing)
        assert least_batch_of(training_copy(small()), run) == least
        assert run.sizes == [1]


class TestFewSamples:
    @pytest.mark.parametrize(("failing", "sizes", "samples"), [((), [2], 2), ((2,), [2, 4], 4)])
    def test_are_those_of_the_sample_batch_if_fewer_fail(self, failing, sizes, samples):
        run = Runs(*failing)
        assert few_samples(linear(), 2, run) == samples
        assert run.sizes == sizes

    def test_may_be_as_many_as_the_sample_batch(self):
        run = Runs()
        assert few_samples(linear(), 4, run) == 4
        assert run.sizes == [4]

    def test_an_error_of_the_sample_batch_is_the_users(self):
        with raises(UserCodeError, "own sample batch", "RuntimeError: no"):
            few_samples(linear(), 2, Runs(2, 4))

    def test_an_error_of_autosplit_is_raised_at_once(self):
        """The optimizer's state grows from step to step, for example. It grows at any size."""
        run = Runs(2, error=WorkloadError)
        with pytest.raises(WorkloadError):
            few_samples(linear(), 2, run)
        assert run.sizes == [2]


def seen_in_a_step(workload: Workload) -> GradientsSeen:
    trainee, gradients = training_copy(workload), GradientsSeen()
    look = lambda phase: gradients.note(trainee) if phase == "update" else None
    trainee.step(trainee.models, [trainee.batch(4)], [4], look)
    return gradients


class Partly(nn.Module):
    """A model that trains only its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class TestGradients:
    @pytest.mark.parametrize(("frozen", "any_unused"), [(False, True), (True, False)])
    def test_a_trainable_parameter_without_one_is_unused(self, frozen, any_unused):
        model = Partly()
        model.idle.requires_grad_(not frozen)
        assert seen_in_a_step(Workload(model, torch.randn(4, 4))) == GradientsSeen(True, any_unused)

    def test_all_are_used(self):
        assert seen_in_a_step(linear()) == GradientsSeen(any_trained=True, any_unused=False)


def facts(workload: Workload, gradients: GradientsSeen | None = None, **options):
    gradients = gradients or GradientsSeen(any_trained=True)
    return facts_of(training_copy(workload), gradients, **{"least_batch": 1, "samples": 4, **options})


class TestFacts:
    @pytest.mark.parametrize(("make", "rule"), [(linear, "mean"), (with_loss, "scalar"), (small, None)])
    def test_the_loss_is_searched_in_the_outputs_if_no_function_is_given(self, make, rule):
        assert facts(make()).loss_rule == rule

    def test_gradients_take_as_many_bytes_as_the_trainable_parameters(self):
        workload = linear()
        workload.model[0].requires_grad_(False)
        assert facts(workload).gradient_bytes == 4 * (8 * 3 + 3)

    def test_checkpointed_layers_are_named_as_in_the_users_model(self):
        assert facts(linear()).checkpointed == ()
        assert facts(replace(linear(), checkpointing=Checkpointing((nn.Linear,), 2))).checkpointed == ("0",)

    def test_the_least_batch_is_passed_on(self):
        assert facts(small(), least_batch=2).least_batch == 2

    def test_a_custom_step_may_leave_parameters_without_a_gradient(self):
        def step(model, optimizer, batch):
            model(batch[0]).sum().backward()
            optimizer.step()

        unused = GradientsSeen(any_trained=True, any_unused=True)
        assert facts(linear(), unused).leaves_unused
        custom = Workload(nn.Linear(4, 3), net_batch(), step=step, optimizer=torch.optim.SGD)
        assert not facts(custom, unused).leaves_unused
        assert facts(custom, GradientsSeen()).loss_rule is None, "its gradients may be gone before the update"

    def test_a_loss_of_another_model_is_refused(self):
        with raises(WorkloadError, "gets a gradient"):
            facts(linear(), GradientsSeen())

    def test_a_model_that_is_not_trained_needs_no_gradient(self):
        assert facts(replace(linear(), held=("forward",)), GradientsSeen()).least_batch == 1

    def test_random_numbers_go_on_as_if_nothing_had_run(self):
        workload = Workload(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), torch.ones(4, 4))
        trainee, before = training_copy(workload), torch.get_rng_state()
        facts_of(trainee, GradientsSeen(any_trained=True), least_batch=1, samples=4)
        assert torch.equal(torch.get_rng_state(), before)
