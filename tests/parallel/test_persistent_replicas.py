"""Replicas kept over the micro-steps of an optimizer step give the same gradients with fewer copies."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import nullcontext
from functools import partial

import balanced_models
import pytest
import torch
from balanced_models import loss_of as mean_loss
from balanced_models import wrap
from gpus import CARDS, KIND, card
from raised import raises
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from autosplit.errors import InputError
from autosplit.oom import OutOfMemoryError
from autosplit.parallel.accumulation import current_accumulation
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.epoch_steps import steps
from autosplit.runtime.memory_tracker import Tracker

SPLITS = [(4, 6, 6), (1, 2, 13), (0, 8, 8), (16, 0, 0), (0, 0, 16)]


class Moves(Tracker):
    """Counts the copies between devices by their contents."""

    def __init__(self, num_devices=3):
        super().__init__([f"device {index}" for index in range(num_devices)], [None] * num_devices)
        self.counts = Counter()

    def _has_moved(self, source, destination, nbytes, purpose):
        self.counts[purpose] += 1


def tracked(num_devices=3, capacities=None):
    names = [f"device {index}" for index in range(num_devices)]
    return Tracker(names, capacities or [None] * num_devices)


def assert_same_gradients(module, reference):
    balanced_models.assert_same_gradients(module, reference, 1e-10)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert ours.grad is None or ours.grad.layout == theirs.grad.layout


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Mixed(nn.Module):
    """Tied, sparse, normed, recurrent, frozen and unused parameters, and a buffer with a gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.tied = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.normed = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("scale", torch.rand(8, dtype=torch.float64, requires_grad=True))  # a leaf

    def forward(self, x):
        codes = (x.sum(1).abs() * 100).long() % 11
        both = torch.stack([self.embedding(codes), self.tied(codes)], 1) * self.scale
        hidden = self.frozen(self.normed(torch.tanh(self.rnn(both)[0][:, -1])))
        return self.head(hidden) + self.counts.sum()


def accumulate(model, batches, loss=mean_loss):
    """Run one optimizer step's micro-batches, all but the last within no_sync."""
    total = sum(len(batch) for batch in batches)
    for index, batch in enumerate(batches):
        with model.no_sync() if index < len(batches) - 1 else nullcontext():
            (loss(model(batch)) * (len(batch) / total)).backward()


def batches_of(*sizes, width=5):
    return [torch.randn(size, width, dtype=torch.float64) for size in sizes]


def assert_as_plain(train, split=(4, 6, 6)):
    """Compare the gradients of a plain model with those of a wrapped copy.

    Args:
        train: Gets the model to call, its module, and a context for all micro-batches but the last.
    """
    reference = mlp()
    module = copy.deepcopy(reference)
    train(reference, reference, nullcontext)
    with tracked():
        wrapped = wrap(module, *split)
        train(wrapped, module, wrapped.no_sync)
    assert_same_gradients(module, reference)


class TestGradients:
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("make", [mlp, lambda: Mixed().double()], ids=["mlp", "mixed"])
    @pytest.mark.parametrize("run", [nullcontext, tracked], ids=["plain", "tracked"])
    def test_are_those_of_the_whole_step(self, make, split, run):
        reference = make()
        module = copy.deepcopy(reference)
        module.load_state_dict(reference.state_dict())
        batches = batches_of(16, 16, 16, 5)
        whole = torch.cat(batches)
        mean_loss(reference(whole)).backward()
        with run():
            accumulate(wrap(module, *split), batches)
        assert_same_gradients(module, reference)

    def test_a_device_that_sat_out_a_micro_batch_has_this_steps_weights(self):
        """Its copies counted as new because the other devices' copies were new. The second step was 12% off."""
        reference = mlp()
        module = copy.deepcopy(reference)
        wrapper = wrap(module, 2, 2, 2)
        sides = [(model, torch.optim.SGD(model.parameters(), lr=0.5)) for model in (module, reference)]
        for sizes in [(6, 6), (2, 6)]:
            batches = batches_of(*sizes)
            for model, optimizer in sides:
                optimizer.zero_grad()
                if model is reference:
                    mean_loss(model(torch.cat(batches))).backward()
                else:
                    with tracked():
                        accumulate(wrapper, batches)
            assert_same_gradients(module, reference)
            for _, optimizer in sides:
                optimizer.step()

    def test_parameters_changed_behind_autograds_back(self):
        """`p.data.add_()` changes no version. The next optimizer step still copies the parameters again."""
        module = mlp()
        batches = batches_of(16, 16)
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            accumulate(wrapped, batches)
            module.zero_grad()
            for parameter in module.parameters():
                parameter.data.add_(1.0)
            accumulate(wrapped, batches)
        reference = copy.deepcopy(module)
        reference.zero_grad()
        mean_loss(reference(torch.cat(batches))).backward()
        assert_same_gradients(module, reference)

    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_batch_norm_moves_in_every_micro_step(self, split):
        def trained(keeps):
            torch.manual_seed(3)
            module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
            batches = batches_of(16, 16, 16)
            with tracked():
                wrapped = wrap(module, *split)
                for index, batch in enumerate(batches):
                    with wrapped.no_sync() if keeps and index < 2 else nullcontext():
                        mean_loss(wrapped(batch)).backward()
            return module

        ours, theirs = trained(True), trained(False)
        assert ours[1].num_batches_tracked == theirs[1].num_batches_tracked == 3
        torch.testing.assert_close(ours[1].running_var, theirs[1].running_var)
        assert_same_gradients(ours, theirs)


class Drawn(nn.Module):
    """A model of random parts: tied layers, frozen layers, and a layer that some micro-batches skip."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        if rng.random() < 0.4:
            self.last.weight = self.first.weight
        if rng.random() < 0.4:
            rng.choice([self.first, self.second]).requires_grad_(False)

    def forward(self, x, *, deep: bool):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(x)) if deep else x)


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_trains_as_one_device_does(seed):
    """Empty shares, micro-batches that leave devices out, frozen and tied parameters, and optimizers with or without
    budgets.

    This test found that one device's copies counted as new because another device's were.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    reference = Drawn(rng)
    module = copy.deepcopy(reference)
    split = [rng.choice([0, 1, 2, 2, 3]) for _ in range(rng.randint(2, 4))]
    split[rng.randrange(len(split))] += 1
    inputs = batches_of(*(rng.randint(1, sum(split)) for _ in range(rng.randint(2, 9))), width=3)
    batches = [(batch, rng.random() < 0.7) for batch in inputs]
    effective = rng.randint(1, 3 * sum(split))
    updates_within, foreach = rng.random() < 0.5, rng.random() < 0.5

    def train(model, parameters, budgets):
        optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.5, foreach=foreach)
        for step in steps(batches, batch_size=sum(split), effective_batch_size=effective):
            with budgets():
                for batch, deep in step:
                    step.backward(mean_loss(model(batch, deep=deep)))
            with budgets() if updates_within else nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    train(wrap(module, *split), [*module.parameters()], partial(tracked, len(split)))
    train(reference, [*reference.parameters()], nullcontext)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def gan(model, discriminator, real, made):
    """Both losses in one micro-step. The discriminator is frozen for the second forward."""
    first = mean_loss(model(real))
    discriminator.requires_grad_(False)
    second = mean_loss(model(made))
    discriminator.requires_grad_(True)
    (first + second).backward()


class TestUsersLoops:
    """Common training loops. Each had a wrong gradient and no error."""

    @staticmethod
    def pair():
        reference = mlp()
        return reference, copy.deepcopy(reference)

    @pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_a_hook_on_a_parameter_sees_the_whole_gradient(self, kind):
        """A hook that masks a gradient was applied only to the first device's part."""
        reference, module = self.pair()
        batches = batches_of(16, 16)

        def mask(tensor):
            if kind == "register_hook":
                return tensor * 0.5
            tensor.grad.mul_(0.5)
            return None

        for model in (reference, module):
            getattr(model[0].weight, kind)(mask)
        mean_loss(reference(torch.cat(batches))).backward()
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            if kind == "register_hook":
                accumulate(wrapped, batches)
            else:  # it runs once for each backward, as in the plain module
                mean_loss(wrapped(torch.cat(batches))).backward()
        assert_same_gradients(module, reference)

    def test_a_hook_that_is_new_sees_the_gradients_of_all_devices(self):
        """Replicas that were kept before the hook did not run it, so rows that it masks were trained."""

        def train(model, module, within):
            for number in range(2):
                if number:
                    module[0].weight.register_hook(lambda gradient: gradient * 0)
                with within():
                    mean_loss(model(batches[0])).backward()
                mean_loss(model(batches[1])).backward()
                if not number:
                    module.zero_grad()

        batches = batches_of(16, 16)
        assert_as_plain(train)

    def test_frozen_for_a_second_forward(self):
        """A leaf frozen between forward and backward lost its gradient."""
        batches = batches_of(16, 16, 16, 16)

        def train(model, module, within):
            with within():
                gan(model, module, *batches[:2])
            gan(model, module, *batches[2:])

        assert_as_plain(train)

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("again", [True, False])
    def test_cleared_between_forward_and_backward(self, to_none, again):
        """Forward, zero_grad, backward is a common order. Gradients of an abandoned step were still added."""
        reference, module = self.pair()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        lost, kept, last = batches_of(16, 16, 16)
        mean_loss(reference(kept)).backward()
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            with wrapped.no_sync():
                mean_loss(wrapped(lost)).backward()
            with wrapped.no_sync() if again else nullcontext():
                loss = mean_loss(wrapped(kept))
                optimizer.zero_grad(set_to_none=to_none)
                loss.backward()
            if again:
                mean_loss(reference(last)).backward()
                mean_loss(wrapped(last)).backward()
        assert_same_gradients(module, reference)

    def test_two_forwards_one_of_them_within(self):
        """The second forward, outside of no_sync, freed the replicas that the first backward needed."""
        first, second = batches_of(16, 16)

        def train(model, _, within):
            with within():
                loss = mean_loss(model(first))
            (loss + mean_loss(model(second))).backward()

        assert_as_plain(train)

    @pytest.mark.parametrize("last", [True, False])
    def test_a_loss_on_what_a_hook_caught(self, last):
        """A feature loss does not use the wrapper's output, so its backward went unnoticed."""
        batches = batches_of(16, 16)

        def train(model, module, within):
            caught = []
            handle = module[1].register_forward_hook(lambda part, args, output: caught.append(output))
            for index, batch in enumerate(batches):
                with within() if index == 0 or not last else nullcontext():
                    model(batch)
                    torch.cat(caught).square().mean().backward()
                caught.clear()
            handle.remove()
            if model is not module and not last:
                with raises(InputError):
                    torch.optim.SGD(module.parameters(), lr=0.1).step()
                model.synchronize()

        assert_as_plain(train)

    @pytest.mark.parametrize("change", ["scale", "replace", "clip"])
    def test_a_gradient_changed_between_micro_steps_is_refused(self, change):
        """Only the first device's part was scaled."""
        module = mlp()
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            with wrapped.no_sync():
                mean_loss(wrapped(batches_of(16)[0])).backward()
            if change == "scale":
                module[0].weight.grad.mul_(0.5)
            elif change == "replace":
                module[0].weight.grad = module[0].weight.grad.clone()
            else:
                nn.utils.clip_grad_norm_(
                    module.parameters(), 1e-3, foreach=False
                )  # a mode hides version changes of foreach ops
            with raises(InputError):
                wrapped(batches_of(16)[0])
            wrapped.zero_grad()
            wrapped(batches_of(16)[0])


class TestCopies:
    @staticmethod
    def moves(keeps, micro_steps=4):
        observer = Moves()
        module = mlp()
        with observer:
            wrapped = wrap(module, 4, 6, 6)
            for index in range(micro_steps):
                with wrapped.no_sync() if keeps and index < micro_steps - 1 else nullcontext():
                    mean_loss(wrapped(torch.randn(16, 5).double())).backward()
        return observer.counts

    def test_parameters_go_once_and_gradients_come_once(self):
        kept, plain = self.moves(True), self.moves(False)
        assert (kept["parameter"], kept["gradient"]) == (2 * 4, 2 * 4)
        assert (plain["parameter"], plain["gradient"]) == (4 * 2 * 4, 4 * 2 * 4)
        assert kept["input"] == plain["input"]

    def test_memory_of_replicas_is_free_when_nothing_is_accumulated(self):
        module = nn.Linear(256, 256).double()
        with tracked() as tracker:
            wrapped = wrap(module, 4, 6, 6)
            inputs = torch.randn(16, 256).double()
            mean_loss(wrapped(inputs)).backward()
            before = tracker.live_bytes[1:]
            with wrapped.no_sync():
                mean_loss(wrapped(inputs)).backward()
            assert tracker.live_bytes[1] >= before[0] + 2 * 8 * 256 * 256  # the parameters, and their gradients
            mean_loss(wrapped(inputs)).backward()
            assert tracker.live_bytes[1] < before[0] + 1.5 * 8 * 256 * 256
            with torch.no_grad():
                wrapped(inputs)
            assert tracker.live_bytes[1:] == before


class TestTwoForwards:
    """Siamese and contrastive models run twice before one backward."""

    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_the_second_does_not_spoil_the_first(self, split):
        """Values were copied again under the first forward's graph, and its backward raised an error."""
        pairs = [batches_of(16, 16), batches_of(16, 16)]

        def train(model, _, within):
            for index, (one, other) in enumerate(pairs):
                with nullcontext() if index else within():
                    (model(one) - model(other)).square().sum(1).mean().backward()

        assert_as_plain(train, split)


class TestBrokenOff:
    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_what_a_broken_backward_left_is_not_brought_home(self, split):
        """A backward that ran out of memory had filled some leaves without a record. The next step used them."""

        class Breaks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                raise torch.OutOfMemoryError("midway")

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.breaks = nn.Linear(5, 8), nn.Linear(8, 3), False

            def forward(self, x):
                hidden = self.first(x)
                return self.second(Breaks.apply(hidden) if self.breaks else hidden)

        reference = Model().double()
        module = copy.deepcopy(reference)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        lost, *batches = batches_of(16, 16, 16)
        mean_loss(reference(torch.cat(batches))).backward()
        with tracked():
            wrapped = wrap(module, *split)
            module.breaks = True
            with wrapped.no_sync(), pytest.raises(torch.OutOfMemoryError, match="midway"):
                mean_loss(wrapped(lost)).backward()
            module.breaks = False
            optimizer.zero_grad()
            accumulate(wrapped, batches)
        assert_same_gradients(module, reference)


class TestClearing:
    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_an_abandoned_step_leaves_nothing_behind(self, split, to_none):
        """After a step is abandoned and its gradients are cleared, gradients on other devices must not reach the next
        step.
        """
        reference = mlp()
        module = copy.deepcopy(reference)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        lost, *batches = batches_of(16, 16, 16)
        mean_loss(reference(torch.cat(batches))).backward()
        with tracked():
            wrapped = wrap(module, *split)
            with wrapped.no_sync():
                mean_loss(wrapped(lost)).backward()
            optimizer.zero_grad(set_to_none=to_none)
            accumulate(wrapped, batches)
        assert_same_gradients(module, reference)

    def test_an_update_of_half_a_gradient_is_refused(self):
        module, other = mlp(), mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before = copy.deepcopy(module.state_dict())
        mean_loss(other(batches_of(4)[0])).backward()
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            for _ in range(2):
                with wrapped.no_sync():
                    mean_loss(wrapped(batches_of(16)[0])).backward()
            with raises(InputError):
                optimizer.step()
            torch.optim.SGD(other.parameters(), lr=0.1).step()  # not of this module
            assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
            wrapped.synchronize()
            optimizer.step()
        assert not torch.equal(before["0.weight"], module[0].weight)

    @pytest.mark.filterwarnings("ignore:Using backward")
    @pytest.mark.parametrize("last", [True, False])
    def test_a_graph_of_gradients_is_refused(self, last):
        with tracked():
            wrapped = wrap(mlp(), 4, 6, 6)
            with wrapped.no_sync():
                loss = mean_loss(wrapped(batches_of(16)[0]))
                if last:
                    loss.backward()
            if last:
                loss = mean_loss(wrapped(batches_of(16)[0]))
            with raises(InputError):
                loss.backward(create_graph=True)

    def test_out_of_memory_when_gradients_come_home_names_the_device(self):
        module = nn.Linear(64, 64, bias=False).double()
        room = 64 * 64 * 8
        with tracked(2, [room + 512 * 40, None]) as tracker:
            wrapped = wrap(module, 0, 4)
            with wrapped.no_sync(), pytest.raises(OutOfMemoryError, match="device 0 is out of memory"):
                mean_loss(wrapped(torch.randn(4, 64).double())).backward()
            assert tracker.live_bytes[0] >= room


class TestSteps:
    @staticmethod
    def train(model, module, batches, **kwargs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in steps(batches, **kwargs):
            for batch in step:
                step.backward(mean_loss(model(batch)))
            optimizer.step()
            optimizer.zero_grad()

    def test_keep_replicas(self):
        reference = mlp()
        module = copy.deepcopy(reference)
        batches = batches_of(16, 16, 16, 16, 16, 3)
        observer = Moves()
        with observer:
            self.train(wrap(module, 4, 6, 6), module, batches, batch_size=16, effective_batch_size=64)
        self.train(reference, reference, batches, batch_size=16, effective_batch_size=64)
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert observer.counts["parameter"] == observer.counts["gradient"] == 2 * (2 * 4)

    def test_a_model_that_sat_out_the_last_micro_step(self):
        """Only one of two models runs in the last micro-step. The other's gradients are reduced at its end."""
        first, second = mlp(), mlp()
        copies = copy.deepcopy(first), copy.deepcopy(second)
        batches = batches_of(16, 16)

        def losses(one, two, batch, index):
            return mean_loss(two(batch)) + (mean_loss(one(batch)) if index == 0 else 0.0)

        with tracked():
            one, two = wrap(first, 4, 6, 6), wrap(second, 4, 6, 6)
            for step in steps(batches, batch_size=16, effective_batch_size=32):
                for index, batch in enumerate(step):
                    step.backward(losses(one, two, batch, index))
        for step in steps(batches, batch_size=16, effective_batch_size=32):
            for index, batch in enumerate(step):
                step.backward(losses(*copies, batch, index))
        assert_same_gradients(first, copies[0])
        assert_same_gradients(second, copies[1])

    @pytest.mark.parametrize("how", ["break", "raise"])
    def test_leaving_the_loop_leaves_nothing_switched(self, how):
        """If a flag stayed set across a yield, every later step would lose its gradients."""
        module = mlp()
        with tracked():
            wrapped = wrap(module, 4, 6, 6)
            try:
                for step in steps(batches_of(16, 16, 16), batch_size=16, effective_batch_size=48):
                    for batch in step:
                        step.backward(mean_loss(wrapped(batch)))
                        assert current_accumulation() is not None
                        if how == "raise":
                            raise ArithmeticError
                        break
                    break
            except ArithmeticError:
                pass
            assert current_accumulation() is None
            module.zero_grad()
            reference = copy.deepcopy(module)
            (batch,) = batches_of(16)
            mean_loss(wrapped(batch)).backward()
        mean_loss(reference(batch)).backward()
        assert_same_gradients(module, reference)


class TestWalks:
    @pytest.mark.parametrize("sizes", [(3, 3), (3, 2), (2, 3)])
    def test_two_side_by_side_leave_nothing_running(self, sizes):
        """They do not end in reverse order. The second restored the first, which had already ended."""
        module = mlp()
        walks = [steps(batches_of(*(4,) * n), batch_size=4, effective_batch_size=4 * n) for n in sizes]
        for one, other in zip(*walks, strict=True):
            for _ in range(max(sizes)):
                for iterated in (one, other):
                    if not hasattr(iterated, "running"):
                        iterated.running = iter(iterated)
                    batch = next(iterated.running, None)
                    if batch is not None:
                        iterated.backward(mean_loss(module(batch)))
            for iterated in (one, other):
                assert next(iterated.running, None) is None
        assert current_accumulation() is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN's, of weights that were copied one by one
class TestOnGpus:
    """On two GPUs, or on one GPU named twice."""

    @pytest.mark.parametrize("split", [(2, 6), (6, 2), (0, 8), (8, 0)], ids=str)
    @pytest.mark.parametrize(
        "make",  # the emulated devices have no sparse tensors
        [mlp, lambda: Mixed().double()],
        ids=["mlp", "mixed"],
    )
    def test_gradients_are_those_of_the_whole_step(self, make, split):
        home = card(CARDS[0])
        with home:  # not .to(home): a buffer that requires grad would be a leaf no more
            reference, module = make(), make()
        module.load_state_dict(reference.state_dict())
        batches = [batch.to(home) for batch in batches_of(8, 8, 8, 3)]
        mean_loss(reference(torch.cat(batches))).backward()
        wrapped = BalancedDataParallel(None, module, list(CARDS), split=split)
        accumulate(wrapped, batches)
        assert_same_gradients(module, reference)

    def test_half_precision_does_not_keep_old_weights(self):
        """Autocast caches casts of leaves. The next step must not use old casts."""
        home = card(CARDS[0])
        module = nn.Linear(64, 64).to(home)
        wrapped = BalancedDataParallel(None, module, list(CARDS), split=(4, 4))
        inputs = torch.randn(8, 64, device=home)
        with torch.autocast(KIND, dtype=torch.bfloat16):
            for value in (1.0, 2.0):
                with torch.no_grad():
                    module.weight.fill_(value)
                module.zero_grad()
                with wrapped.no_sync():
                    outputs = wrapped(inputs)
                    outputs.float().sum().backward()
                expected = inputs.sum(1, keepdim=True) * value + module.bias
                torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=0.5)
                wrapped.synchronize()
