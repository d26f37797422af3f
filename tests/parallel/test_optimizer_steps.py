"""The uneven batch sampler, and the loop over optimizer steps: every sample once, and exact gradients."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from raised import raises
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from autosplit.errors import InputError
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.batch_sampler import LeftOutWarning, ScheduledBatchSampler
from autosplit.parallel.epoch_steps import steps
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.solve.split import micro_batch_sizes

NUM_SAMPLES = 23
INPUTS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Pair(NamedTuple):
    name: str
    inputs: torch.Tensor


@dataclasses.dataclass
class Record:
    name: str
    inputs: torch.Tensor


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def whole_gradient(indices: list[int]) -> tuple[torch.Tensor, float]:
    """The gradient and the mean loss of these samples in one batch."""
    model = make_model()
    loss = torch.nn.functional.mse_loss(model(INPUTS[indices]), TARGETS[indices])
    loss.backward()
    return gradient(model), loss.item()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def sampled_loader(batch_size: int, effective_batch_size: int, **options: Any) -> DataLoader:
    sampler = ScheduledBatchSampler(NUM_SAMPLES, batch_size, effective_batch_size, shuffle=True, seed=5)
    return DataLoader(TensorDataset(torch.arange(NUM_SAMPLES), INPUTS, TARGETS), batch_sampler=sampler, **options)


def check_gradients(loader: Any, batch_size: int, effective_batch_size: int) -> list[list[int]]:
    """Walk the loader and compare each step's gradient with one batch of its samples. Return the samples."""
    seen = []
    for step in steps(loader, batch_size=batch_size, effective_batch_size=effective_batch_size):
        model = make_model()
        indices: list[int] = []
        for index, inputs, targets in step:
            assert step.weight == len(index) / step.num_samples
            indices += index.tolist()
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        expected, loss = whole_gradient(indices)
        assert step.num_samples == len(indices)
        assert relative_error(gradient(model), expected) < 1e-12
        assert step.loss == pytest.approx(loss, rel=1e-12)
        seen.append(indices)
    return seen


class TestScheduledBatchSampler:
    @given(st.integers(1, 90), st.integers(1, 20), st.integers(1, 40), st.booleans(), st.booleans())
    def test_every_sample_once_in_steps_of_the_effective_batch(
        self, num_samples: int, batch_size: int, effective_batch_size: int, shuffle: bool, drop_last: bool
    ) -> None:
        assume(not drop_last or num_samples >= effective_batch_size)
        sampler = ScheduledBatchSampler(
            num_samples, batch_size, effective_batch_size, shuffle=shuffle, seed=7, drop_last=drop_last
        )
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [n for step in sampler.schedule for n in step.micro_batch_sizes]
        assert len(sampler) == len(batches)
        indices = [i for batch in batches for i in batch]
        short = num_samples % effective_batch_size
        if drop_last:
            assert len(indices) == len(set(indices)) == num_samples - short
        else:
            assert sorted(indices) == list(range(num_samples))
        for step in sampler.schedule[: num_samples // effective_batch_size]:
            assert step.num_samples == effective_batch_size
            assert step.micro_batch_sizes == micro_batch_sizes(effective_batch_size, batch_size)

    def test_global_random_state_is_neither_read_nor_changed(self) -> None:
        sampler = ScheduledBatchSampler(50, 4, 10, shuffle=True)
        torch.manual_seed(1)
        first = list(sampler)
        torch.manual_seed(2)
        before = torch.get_rng_state()
        assert list(sampler) == first
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        "arguments",
        [
            (0, 4, 10),
            (23, 0, 10),
            (23, 4, 2.5),
        ],
    )
    def test_bad_sizes(self, arguments: tuple[Any, ...]) -> None:
        with raises(InputError):
            ScheduledBatchSampler(*arguments)


class TestEpochs:
    """A loop without `set_epoch` had the same order in every epoch."""

    @staticmethod
    def walked(loader: DataLoader[Any], most: int | None = None) -> list[int]:
        seen: list[int] = []
        for step in steps(loader, batch_size=4, effective_batch_size=10):
            for (batch,) in step:
                seen += batch.tolist()
                step.backward(torch.zeros(1, requires_grad=True))
            if most is not None and len(seen) >= most:
                break
        return seen

    @staticmethod
    def loader(workers: int = 0) -> DataLoader[Any]:
        sampler = ScheduledBatchSampler(NUM_SAMPLES, 4, 10, shuffle=True)
        return DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), batch_sampler=sampler, num_workers=workers)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_each_walk_to_the_end_draws_anew(self, workers: int) -> None:
        loader, chosen = self.loader(workers), self.loader()
        for epoch in range(3):
            chosen.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
            assert self.walked(loader) == self.walked(chosen)

    def test_one_that_is_left_early_is_over(self) -> None:
        """With `islice(plan.steps(loader), 2)`, all epochs had the same order, and the last samples were never seen."""
        loader = self.loader()
        seen = [self.trained(loader, most=2) for _ in range(3)]
        expected = [self.walked(self.chosen(epoch))[:20] for epoch in range(3)]
        assert seen == expected

    def test_a_resumed_one_goes_on_after_a_batch_was_drawn(self) -> None:
        """A batch that was drawn for a log lost the position, and the first samples were trained twice."""
        first = self.loader()
        seen = self.trained(first, most=1)
        loader = self.loader()
        loader.batch_sampler.load_state_dict(first.batch_sampler.state_dict())  # type: ignore[union-attr]
        next(iter(loader))
        next(iter(next(steps(loader, batch_size=4, effective_batch_size=10))))
        assert len(steps(loader, batch_size=4, effective_batch_size=10)) == 2
        assert seen + self.trained(loader) == self.walked(self.chosen(0))

    def chosen(self, epoch: int) -> DataLoader[Any]:
        loader = self.loader()
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        return loader

    @staticmethod
    def trained(loader: DataLoader[Any], most: int | None = None) -> list[int]:
        weight = torch.ones(1, requires_grad=True)
        optimizer, seen = torch.optim.SGD([weight], lr=0.1), []
        for step in itertools.islice(steps(loader, batch_size=4, effective_batch_size=10), most):
            for (batch,) in step:
                seen += batch.tolist()
                step.backward(weight.square().sum())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def test_one_that_is_left_after_its_last_step_has_ended(self) -> None:
        loader, chosen = self.loader(), self.loader()
        assert len(self.walked(loader, NUM_SAMPLES)) == NUM_SAMPLES
        chosen.batch_sampler.set_epoch(1)  # type: ignore[union-attr]
        assert self.walked(loader) == self.walked(chosen)


class TestGradients:
    # 23 samples: short last micro-batches, short last steps, whole ones, one step only, a batch above the effective.
    SIZES = pytest.mark.parametrize(
        ("batch_size", "effective_batch_size"), [(4, 10), (4, 8), (1, 5), (10, 10), (7, 23), (8, 64), (16, 6), (3, 11)]
    )

    @SIZES
    def test_by_counting(self, batch_size: int, effective_batch_size: int) -> None:
        loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES), INPUTS, TARGETS), batch_size)
        seen = check_gradients(loader, batch_size, effective_batch_size)
        assert [i for indices in seen for i in indices] == list(range(NUM_SAMPLES))

    def test_batches_of_varying_size(self) -> None:
        parts = [(torch.arange(a, b), INPUTS[a:b], TARGETS[a:b]) for a, b in [(0, 3), (3, 4), (4, 12), (12, 13)]]
        # 3 + 1 + 8 exceeds the effective batch of 10 by 2. Then the loader ends.
        assert [len(indices) for indices in check_gradients(parts, 4, 10)] == [12, 1]

    def test_token_means(self) -> None:
        # A mean over labels without padding is exact if micro-batches are weighted by these labels.
        labels = torch.randint(0, 6, (NUM_SAMPLES, 4), generator=torch.Generator().manual_seed(4))
        labels[torch.arange(NUM_SAMPLES) % 3 == 0, 1:] = -100
        labels[8:12] = -100  # a micro-batch without any label: its own mean is 0/0
        loader = sampled_loader(4, 12)
        for source in (loader, DataLoader(loader.dataset, batch_size=4)):
            model = torch.nn.Linear(5, 24).double()
            reference = torch.nn.Linear(5, 24).double()
            reference.load_state_dict(model.state_dict())
            indices: list[int] = []
            for step in steps(
                source,
                batch_size=4,
                effective_batch_size=12,
                count=lambda batch: (labels[batch[0]] != -100).sum(),
            ):
                model.zero_grad()
                indices = []
                for index, inputs, _ in step:
                    indices += index.tolist()
                    logits = model(inputs).view(-1, 6)
                    step.backward(torch.nn.functional.cross_entropy(logits, labels[index].flatten()))
                reference.zero_grad()
                logits = reference(INPUTS[indices]).view(-1, 6)
                torch.nn.functional.cross_entropy(logits, labels[indices].flatten()).backward()
                assert relative_error(gradient(model), gradient(reference)) < 1e-12

    def test_a_micro_batch_that_counts_for_nothing_leaves_no_nan(self) -> None:
        parameter = torch.ones(1, requires_grad=True)
        step = OptimizerStep([torch.zeros(0), torch.ones(2)], [0, 2])
        for batch in step:
            step.backward((parameter * batch).mean())
        assert parameter.grad == 1
        assert step.loss == 1
        nothing = OptimizerStep([torch.zeros(0)], [0])
        for batch in nothing:
            nothing.backward((parameter * batch).mean())
        assert nothing.loss == 0
        assert parameter.grad == 1


class TestCounting:
    @pytest.mark.parametrize(
        "batch",
        [
            torch.zeros(3, 2),
            (torch.zeros(3), torch.zeros(9)),
            {"scale": 0.5, "inputs": torch.zeros(3, 2)},
            ["text", {"temperature": torch.tensor(0.5), "deep": [(torch.zeros(3),)]}],
            Pair("a", torch.zeros(3)),
            Record("a", torch.zeros(3)),
            collections.UserDict(inputs=torch.zeros(3)),
            pack_sequence([torch.zeros(5), torch.zeros(4), torch.zeros(2)]),
        ],
        ids=lambda batch: type(batch).__name__,
    )
    def test_finds_the_samples_and_passes_the_batch_unchanged(self, batch: Any) -> None:
        step = next(steps([batch, batch], batch_size=3, effective_batch_size=6))
        assert step.micro_batch_sizes == (3, 3)
        assert next(iter(step)) is batch

    @pytest.mark.parametrize("loader", [TensorDataset(torch.zeros(9, 4)), 5, None], ids=["data set", "5", "None"])
    def test_no_loader(self, loader: Any) -> None:
        """Each sample of a dataset was treated as a batch, with as many samples as features."""
        with raises(InputError):
            steps(loader, batch_size=3, effective_batch_size=6)

    @pytest.mark.parametrize("batch", [["text"], 5, {"a": torch.tensor(1.0)}, Record])
    def test_nothing_to_count(self, batch: Any) -> None:
        with raises(InputError):
            next(steps([batch], batch_size=3, effective_batch_size=6))
        step = next(steps([batch], batch_size=3, effective_batch_size=6, count=lambda _: 3))
        assert step.num_samples == step.count == 3

    def test_a_count_makes_steps_of_so_many_micro_batches(self) -> None:
        made = steps([0, 1, 2, 3, 4], batch_size=4, effective_batch_size=8, count=lambda batch: 100 + batch)
        assert [(len(step), step.count) for step in map(finish, made)] == [(2, 201), (2, 205), (1, 104)]

    @pytest.mark.parametrize("planned", [True, False], ids=["plan's sampler", "own loader"])
    def test_num_samples_counts_samples_and_count_counts_tokens(self, planned: bool) -> None:
        """With `count=`, num_samples was a number of tokens, so a loop's samples/s were too high."""
        tokens = torch.arange(1, 11)
        sampler = ScheduledBatchSampler(10, 4, 8) if planned else None
        loader = DataLoader(tokens, **({"batch_sampler": sampler} if planned else {"batch_size": 4}))
        made = [*map(finish, steps(loader, batch_size=4, effective_batch_size=8, count=lambda batch: batch.sum()))]
        assert [(step.num_samples, step.count) for step in made] == [(8, 36), (2, 19)]
        assert [step.micro_batch_sizes for step in made] == [(4, 4), (2,)]
        plain = next(steps(loader, batch_size=4, effective_batch_size=8))
        assert plain.num_samples == plain.count == 8

    def test_a_bad_count(self) -> None:
        with raises(InputError, "count(batch)", "-1.5"):
            next(steps([0], batch_size=4, effective_batch_size=8, count=lambda _: -1.5))


def finish(step: OptimizerStep) -> OptimizerStep:
    for _ in step:
        step.backward(torch.ones((), requires_grad=True))
    return step


class TestMistakes:
    LOSS = torch.ones((), requires_grad=True)

    def make(self) -> Any:
        return steps(sampled_loader(4, 10), batch_size=4, effective_batch_size=10)

    def test_backward_twice(self) -> None:
        step = next(self.make())
        next(iter(step))
        step.backward(self.LOSS)
        with raises(InputError):
            step.backward(self.LOSS)

    @pytest.mark.parametrize("split", [None, (3, 1)])
    def test_an_update_between_two_micro_batches(self, split: tuple[int, int] | None) -> None:
        """On GPUs, waiting gradients reveal it. On one device it went unnoticed."""
        module = make_model()
        model = module if split is None else BalancedDataParallel(None, module, ["cpu", "cpu"], split=split)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def train(within: Callable[[], object]) -> None:
            for step in self.make():
                for _, inputs, targets in step:
                    step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    within()
                optimizer.step()
                optimizer.zero_grad()

        train(lambda: None)
        with raises(InputError, "parameters were changed"):
            train(optimizer.step)

    @pytest.mark.parametrize("split", [None, (3, 1)])
    @pytest.mark.parametrize("when", ["before the forward", "after the backward"])
    def test_gradients_that_are_thrown_away_between_two_micro_batches(
        self, split: tuple[int, int] | None, when: str
    ) -> None:
        """Users who moved zero_grad() into the inner loop trained on the last micro-batch only."""
        module = make_model()
        model = module if split is None else BalancedDataParallel(None, module, ["cpu", "cpu"], split=split)
        with raises(InputError, "gradients were discarded"):
            for step in self.make():
                for _, inputs, targets in step:
                    if when == "before the forward":
                        module.zero_grad()
                    step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    if when == "after the backward":
                        module.zero_grad()

    @pytest.mark.parametrize("split", [None, (3, 1)])
    @pytest.mark.parametrize("what", ["zero_grad", "fused step", "step of the body"])
    def test_zeroed_gradients_and_updates_that_change_no_version(
        self, split: tuple[int, int] | None, what: str
    ) -> None:
        """A gradient that is set to zero is not None, and fused optimizers do not change a tensor's version."""
        module = make_model()
        model = module if split is None else BalancedDataParallel(None, module, ["cpu", "cpu"], split=split)
        fused = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        body = torch.optim.SGD(module[0].parameters(), lr=0.1)  # type: ignore[index]
        within = {"zero_grad": lambda: module.zero_grad(set_to_none=False), "fused step": fused.step}
        with raises(InputError, "parameters were changed" if "step" in what else "gradients were set to zero"):
            for step in self.make():
                for _, inputs, targets in step:
                    step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    within.get(what, body.step)()

    def test_another_optimizer_may_step(self) -> None:
        """A probe on the features of the model is trained with each micro-batch."""
        model, probe = make_model(), torch.nn.Linear(7, 1).double()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, probe)]
        for step in self.make():
            for _, inputs, targets in step:
                step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                with torch.no_grad():
                    features = model[:2](inputs)  # type: ignore[index]
                torch.nn.functional.mse_loss(probe(features), targets).backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            optimizers[0].step()
            optimizers[0].zero_grad()

    def test_a_loop_that_does_not_ask_for_the_end(self) -> None:
        """The sampler never counted the step, so each epoch had the same order. Ranks never averaged the gradients."""
        made = self.make()
        step = next(made)
        for _, _ in zip(range(len(step)), step):  # noqa: B905
            step.backward(self.LOSS)
        with raises(InputError, "strict=True"):
            next(made)

    def test_two_steps_side_by_side(self) -> None:
        """FixMatch draws labelled and unlabelled batches. The second loader stayed at its first epoch."""
        first, second = sampled_loader(4, 10), sampled_loader(4, 10)
        weight = torch.ones((), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        walks = [steps(loader, batch_size=4, effective_batch_size=10) for loader in (first, second)]
        for pair in zip(*walks, strict=True):
            for _ in zip(*pair, strict=True):
                for step in pair:
                    step.backward(weight.square())
            optimizer.step()
            optimizer.zero_grad()
        assert [loader.batch_sampler.samples_consumed for loader in (first, second)] == [23, 23]  # type: ignore[union-attr]

    @pytest.mark.parametrize("loss", [0.5, torch.ones(3, requires_grad=True)])
    def test_a_loss_that_is_not_one_number(self, loss: Any) -> None:
        step = next(self.make())
        next(iter(step))
        with raises(InputError):
            step.backward(loss)

    def test_a_loader_whose_batches_change_places(self) -> None:
        """The weights of the schedule went to batches of other sizes."""
        loader = sampled_loader(4, 10, num_workers=1)
        loader.in_order = False  # type: ignore[attr-defined]  # an argument since torch 2.6
        with raises(InputError, "in_order"):
            next(steps(loader, batch_size=4, effective_batch_size=10))

    def test_an_inner_loop_left_early(self) -> None:
        made = self.make()
        step = next(made)
        for _ in step:
            step.backward(self.LOSS)
            break
        with raises(InputError, "0", "1", "3"):
            next(made)

    def test_a_step_iterated_twice(self) -> None:
        step = finish(next(self.make()))
        with raises(InputError, "0"):
            next(iter(step))

    @pytest.mark.parametrize(("batch_size", "effective_batch_size"), [(5, 10), (4, 12)])
    def test_a_sampler_of_other_sizes(self, batch_size: int, effective_batch_size: int) -> None:
        with raises(InputError):
            steps(sampled_loader(4, 10), batch_size=batch_size, effective_batch_size=effective_batch_size)

    @pytest.mark.filterwarnings("ignore:The data set has 3 samples, but the plan")
    @pytest.mark.parametrize("samples", [3, NUM_SAMPLES + 1])
    def test_a_sampler_of_another_data_set(self, samples: int) -> None:
        """Too many samples raised the loader's IndexError. Too few left samples out without a message."""
        sampler = ScheduledBatchSampler(samples, 4, 10)
        loader = DataLoader(TensorDataset(INPUTS), batch_sampler=sampler)
        said = f"made for {samples} samples, but the data set has {NUM_SAMPLES}.* Pass batch_sampler\\(len"
        with pytest.warns(LeftOutWarning, match=said) if samples < 23 else pytest.raises(InputError, match=said):
            steps(loader, batch_size=4, effective_batch_size=10)

    def test_bad_numbers_are_refused_before_the_first_step(self) -> None:
        with raises(InputError, "batch_size", "0"):
            steps([], batch_size=0, effective_batch_size=4)
        with raises(InputError, "effective_batch_size", "True"):
            steps([], batch_size=1, effective_batch_size=True)

    @pytest.mark.parametrize("count", [None, lambda batch: 4])
    def test_a_loader_that_ends_before_its_schedule(self, count: Any) -> None:
        loader = ShortLoader(ScheduledBatchSampler(10, 4, 10), batches=2)
        step = next(steps(loader, batch_size=4, effective_batch_size=10, count=count))
        with raises(InputError, "2", "3", "0"):
            finish(step)

    def test_a_loader_that_gives_more_than_its_schedule(self) -> None:
        loader = ShortLoader(ScheduledBatchSampler(10, 4, 10), batches=4)
        with raises(InputError):
            for step in steps(loader, batch_size=4, effective_batch_size=10):
                finish(step)

    def test_no_backward_for_the_last(self) -> None:
        step = next(self.make())
        with raises(InputError):
            for number, _ in enumerate(step):
                if number < 2:
                    step.backward(self.LOSS)

    def test_backward_outside_the_loop(self) -> None:
        step = next(self.make())
        with raises(InputError):
            step.backward(self.LOSS)

    def test_a_step_never_iterated(self) -> None:
        with raises(InputError, "0", "3"):
            list(self.make())


class ShortLoader:
    """Gives a fixed number of batches, whatever its sampler contains."""

    def __init__(self, batch_sampler: ScheduledBatchSampler, batches: int) -> None:
        self.batch_sampler = batch_sampler
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(range(self._batches))


def test_a_step_of_many_forwards_holds_one_loss() -> None:
    """A loss per forward, 512 bytes on a device, once exceeded the plan's memory in a training with 19 forwards."""
    weight = torch.tensor(3.0, requires_grad=True)
    step = OptimizerStep(iter(range(40)), [1] * 40, index=0)
    alive = []
    gc.collect()  # what other tests left would be freed in the loop
    for number in step:
        step.backward(weight * number)
        alive.append(sum(type(one) is torch.Tensor and one.numel() == 1 for one in gc.get_objects()))
    assert alive[-1] == alive[1]
    assert step.loss == pytest.approx(3 * sum(range(40)) / 40)
    assert weight.grad == pytest.approx(sum(range(40)) / 40)
