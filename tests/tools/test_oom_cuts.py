"""A micro-batch that runs out of memory runs in parts. The training stays the same, and nothing counts twice."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import emulated
import pytest
import torch
from ddp_jobs import make_plan
from faults import OUT, Faults, Network
from gpus import CARDS, KIND, card
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from autosplit.errors import InputError
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.epoch_steps import steps
from autosplit.plan.plan import Plan
from autosplit.tools.oom_cuts import Cuts, CutWarning


def batches(count: int, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    made = [torch.randn(size, 5, dtype=torch.float64, generator=numbers) for _ in range(count)]
    return [(batch[:, :4], batch[:, 4:]) for batch in made]


def walk(network: Any) -> None:
    """Run one step with one micro-batch that may be cut."""
    for step in steps(batches(1), batch_size=6, effective_batch_size=6, cuts=Cuts()):
        for inputs, targets in step:
            with step.attempt():
                step.backward(F.mse_loss(network(inputs), targets))


def trained(faults: Faults, cuts: Cuts | None, *, forwards: int = 3, count: int = 40, wrap: Any = None) -> Any:
    """Train. Return the weights, the losses of the steps, and the samples in successful runs."""
    network = Network(faults)
    model = network if wrap is None else wrap(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, seen = [], 0
    for step in steps(batches(count), batch_size=6, effective_batch_size=6 * forwards, cuts=cuts):
        for inputs, targets in step:
            with step.attempt():
                step.backward(F.mse_loss(model(inputs), targets))
                seen += len(inputs)
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in network.parameters()]), losses, seen


@pytest.mark.parametrize("wrap", [None, lambda m: BalancedDataParallel(None, m, ["cpu", "cpu"], split=(4, 2))])
@pytest.mark.parametrize("forwards", [1, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore::autosplit.tools.oom_cuts.CutWarning")
class TestTheSameTraining:
    def test_with_a_fault_at_every_tenth_run(self, place, forwards, wrap):
        told, losses, _ = trained(Faults(), None, forwards=forwards, wrap=wrap)
        cuts = Cuts()
        found, cut_losses, seen = trained(Faults(every=10, place=place), cuts, forwards=forwards, wrap=wrap)
        assert cuts.count_cut >= 4
        torch.testing.assert_close(found, told, rtol=1e-9, atol=1e-12)
        assert cut_losses == pytest.approx(losses, rel=1e-9)
        assert seen == 40 * 6  # each sample exactly once

    def test_with_micro_batches_that_never_fit(self, place, forwards, wrap):
        """After three failures, the full size is not tried again."""
        told, _, _ = trained(Faults(), None, forwards=forwards, wrap=wrap)
        faults, noted = Faults(above=2 if wrap is None else 1, place=place), []
        found, _, seen = trained(faults, cuts := Cuts(note=noted.append), forwards=forwards, wrap=wrap)
        torch.testing.assert_close(found, told, rtol=1e-9, atol=1e-12)
        assert seen == 40 * 6
        assert cuts.most_samples in (2, 3)
        assert cuts.count_cut < 20
        assert len(noted) == 1
        assert noted[0].text.startswith("In training, micro-batches of 6 samples ran out of memory and were cut to ")


@pytest.mark.filterwarnings("ignore::autosplit.tools.oom_cuts.CutWarning")
def test_the_parts_draw_the_same_random_numbers_as_the_whole_would():
    """The draws of a failed forward have no effect: the next step draws the same numbers as without it."""
    drawn = []
    for failing in (False, True):
        torch.manual_seed(5)
        attempts = itertools.count()
        for step in steps(batches(1), batch_size=6, effective_batch_size=6, cuts=Cuts()):
            for inputs, targets in step:
                with step.attempt():
                    noise = torch.rand(())
                    weight = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
                    if failing and next(attempts) == 0:
                        raise torch.OutOfMemoryError(OUT)
                    step.backward(F.mse_loss(inputs @ weight, targets) * noise)
                    drawn.append(noise.item())
    assert drawn[0] == drawn[1]
    assert len(drawn) == 3


@pytest.mark.filterwarnings("ignore::autosplit.tools.oom_cuts.CutWarning")
def test_memory_of_a_failed_backward_is_free_for_the_parts():
    """The loop's own `loss` kept the whole graph while the first part ran, which then ran out of memory, too."""
    network = Network(Faults(every=1000, runs=998))

    class Marker(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx, inputs):
            ctx.counted = Counted()
            return inputs * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Counted:
        def __init__(self):
            Marker.alive += 1

        def __del__(self):
            Marker.alive -= 1

    alive = []
    for step in steps(batches(2), batch_size=6, effective_batch_size=12, cuts=Cuts()):
        for inputs, targets in step:
            alive.append(Marker.alive)
            with step.attempt():
                loss = F.mse_loss(network(Marker.apply(inputs.requires_grad_())), targets)
                step.backward(loss)
    assert len(alive) == 4  # the second ran out of memory
    assert alive[2] == alive[0] == 0


class TestErrors:
    def test_what_has_had_its_backward_is_not_run_again(self):
        """It ran again in parts, so its gradient counted twice."""
        network = Network(Faults())
        after = Faults(every=1, place="forward")
        step = next(steps(batches(1), batch_size=6, effective_batch_size=6, cuts=Cuts()))
        inputs, targets = next(iter(step))

        def run() -> None:
            with step.attempt():
                step.backward(F.mse_loss(network(inputs), targets))
                after(targets, 6)

        with pytest.raises(torch.OutOfMemoryError) as caught:
            run()
        assert caught.value.autosplit_advice == "the backward had run already, so a smaller micro-batch does not help"

    def test_one_sample_can_not_be_cut(self):
        with pytest.warns(CutWarning), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
            walk(Network(Faults(every=1)))
        assert caught.value.autosplit_advice == "a part of 1 sample can't be cut any further"

    def test_a_backward_outside_of_an_attempt_says_how_to_write_it(self):
        step = next(steps(batches(1), batch_size=6, effective_batch_size=6, cuts=Cuts()))
        inputs, targets = next(iter(step))
        loss = F.mse_loss(Network(Faults())(inputs), targets)
        with raises(InputError):
            step.backward(loss)

    def test_reentrant_checkpointing_hides_what_has_the_gradient(self):
        network = Network(Faults(every=1))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            walk(lambda inputs: checkpoint(network, inputs.requires_grad_(), use_reentrant=True))
        assert "use_reentrant=False" in caught.value.autosplit_advice

    def test_an_unknown_answer(self):
        with raises(InputError, "'retry'"):
            make_plan((4, 2)).steps(batches(1), on_oom="retry")  # type: ignore[arg-type]


class TestPlan:
    def test_the_cuts_of_an_epoch_are_known_in_the_next_one_and_to_the_plans_file(self, tmp_path):
        make_plan((4, 2)).save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(10), strict=True)))
        loader = DataLoader(data, batch_sampler=plan.batch_sampler(len(data)))
        network = Network(faults := Faults(above=3))
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        counts = []
        for _epoch in range(2):
            faults.runs = 0
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for step in plan.steps(loader, on_oom="cut"):
                    for inputs, targets in step:
                        with step.attempt():
                            step.backward(F.mse_loss(network(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            counts.append((faults.runs, [str(one.message) for one in warned]))
        (first, told), (second, silent) = counts
        assert (first, second) == (10 * 2 + 3, 10 * 2)
        assert len(told) == 1
        assert told[0] == (
            "A micro-batch of 6 samples ran out of memory and was cut in two. The gradient stays the same. Tune again "
            "with samples as large as these, or with a larger reserve=."
        )
        assert not silent
        (note,) = Plan.load(tmp_path / "plan.json").notes
        assert note.kind == "cut-in-training"
        assert "6 samples ran out of memory and were cut to 3 samples" in note.text

    def test_budgets_that_are_enforced_are_kept(self):
        """Real errors of a full device: the batch is larger than the tuned batch."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        plan = make_plan((64, 32), capacity_bytes=90_000)
        model = plan.wrap(network)
        data = [(torch.randn(96, 64), torch.randn(96, 1)) for _ in range(4)]
        told = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        told.load_state_dict(network.state_dict())
        F.mse_loss(told(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
        cut = make_plan((64, 32), 384).steps(data, on_oom="cut")
        with plan.budgets() as tracker, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in cut:
                for inputs, targets in step:
                    with step.attempt():
                        step.backward(F.mse_loss(model(inputs), targets))
        assert warned
        for ours, theirs in zip(network.parameters(), told.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        assert max(tracker.peak_bytes) <= 90_000


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 3))
def test_parts_are_all_of_it_none_is_over_the_bound_and_alike_in_size(samples, most, dim):
    cuts = Cuts(dim=dim - 1)
    cuts.most_samples = most
    shape = [2] * dim
    shape[dim - 1] = samples
    batch = {"inputs": torch.arange(2 ** (dim - 1) * samples).reshape(shape), "name": "kept"}
    parts = cuts.parts_of(batch, samples)
    sizes = [part.size for part in parts]
    assert sum(sizes) == samples
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part.batch["inputs"] for part in parts], dim - 1), batch["inputs"])
    assert all(part.batch["name"] == "kept" for part in parts)


@pytest.mark.gpu
@pytest.mark.skipif(KIND != "emu", reason="orders a fault, which only emulated devices take")
@pytest.mark.filterwarnings("ignore::autosplit.tools.oom_cuts.CutWarning")
class TestOnCards:
    """Replicas run in threads, and so does each device's backward. Any allocation on either device may fail."""

    @pytest.mark.parametrize("forwards", [1, 3])
    @pytest.mark.parametrize("device", CARDS)
    def test_whichever_allocation_fails_the_gradient_is_the_same(self, device, forwards):
        cut = 0
        for number in range(1, 60, 2):
            network, told = Network(Faults()).to(card(0)), Network(Faults())
            model = BalancedDataParallel(None, network, list(CARDS), split=(4, 2))
            cuts = Cuts()
            for step in steps(batches(forwards), batch_size=6, effective_batch_size=6 * forwards, cuts=cuts):
                for place, (inputs, targets) in enumerate(step):
                    if place == forwards - 1 and not cuts.count_cut:
                        emulated.fail_allocation(device, number)
                    with step.attempt():
                        step.backward((model(inputs.to(card(0))) - targets.to(card(0))).square().mean())
            emulated.fail_allocation(device, 0)
            inputs, targets = (torch.cat(parts) for parts in zip(*batches(forwards), strict=True))
            F.mse_loss(told(inputs), targets).backward()
            for ours, theirs in zip(network.parameters(), told.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-9, atol=1e-12, msg=f"{number}")
            cut += cuts.count_cut
        assert cut >= 10
