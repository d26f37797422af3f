"""Code around `ctx.wrap` and `ctx.steps` that trained wrongly without a message: it is exact, or raises InputError.

Two ranks train the scenarios below. One process trains the same model on whole batches, for comparison.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from error_types import InputError
from ranks import found_by, job_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

from autosplit import ddp

EXACT = 1e-12
EPOCHS = 2
NUM_SAMPLES, EFFECTIVE = 45, 16
INPUTS = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.randint(3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUTS, LABELS)


class Net(nn.Module):
    """A body and a head, with a loss as a method. The body may be frozen, and a layer may follow later."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 7).double().requires_grad_(not frozen)
        self.head = nn.Linear(7, 3).double()
        self.more: nn.Module | None = None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            return self.loss(inputs, labels)
        hidden = self.body(inputs).tanh()
        return self.head(hidden) if self.more is None else self.head(hidden) + self.more(hidden)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(inputs), labels)


class Centres(nn.Module):
    """A loss with parameters, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.centres = nn.Linear(3, 3).double()

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.centres(outputs), labels)


def weights_of(*modules: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for module in modules for one in module.parameters()])


def job(*, sizes: tuple[int, int] = (7, 1)) -> Any:
    return ddp.setup(make_plan(sizes, EFFECTIVE))


def trained_alone(net: nn.Module, loss_of: Callable[..., Tensor], *others: nn.Module, begin: Any = None) -> Tensor:
    """Return the weights after all epochs in one process. `begin` is called with the number of each epoch."""
    optimizer = torch.optim.SGD([*net.parameters(), *(one for other in others for one in other.parameters())], lr=0.5)
    for epoch in range(EPOCHS):
        if begin is not None:
            begin(net, epoch)
        for first in range(0, NUM_SAMPLES, EFFECTIVE):
            loss_of(net, INPUTS[first : first + EFFECTIVE], LABELS[first : first + EFFECTIVE]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net, *others)


def usual_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


# ---------------------------------------------------------------------------------------------------- wrapped loaders


class Prefetcher:
    """Load batches in another thread, as many training scripts do."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue()
        thread = threading.Thread(target=lambda: [batches.put(one) for one in [*self.loader, None]])
        thread.start()
        thread.join()  # so every draw of the sampler comes before the first batch
        return iter(batches.get, None)


class Preloader:
    """Keep one batch ahead in the same thread, as apex's prefetcher does."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.batches = iter(loader)
        self.ahead = next(self.batches, None)

    def __iter__(self) -> Iterator[Any]:
        while self.ahead is not None:
            batch, self.ahead = self.ahead, next(self.batches, None)
            yield batch


class Bar:
    """Wrap an iterable as tqdm does. The length is that of the iterable."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.total = iterable, len(iterable)

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "tqdm": Bar,
    "generator": lambda loader: (batch for batch in loader),
    "map": lambda loader: map(tuple, loader),
    "iter": iter,
    "list": list,
    "shuffled list": lambda loader: list(loader)[::-1],
    "tqdm of a list": lambda loader: Bar(list(loader)),
    "cycle": itertools.cycle,
    "cycle of a list": lambda loader: itertools.cycle(list(loader)),
    "islice": lambda loader: itertools.islice(loader, 4),
    "zip": lambda loader: zip(loader, loader, strict=True),
    "enumerate": enumerate,
    "chain": lambda loader: itertools.chain(loader, loader),
    "thread": Prefetcher,
    "preloader": Preloader,
}


def loader_of(owner: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=owner.batch_sampler(NUM_SAMPLES))


def with_wrapped_loader(how: str) -> str:
    # A list inside another iterable is recognised by its smaller last batch, which rank 1 of (7, 1) does not have.
    with job(sizes=(5, 3) if "of a list" in how else (7, 1)) as ctx:
        model = ctx.wrap(Net())
        try:
            for step in ctx.steps(WRAPPED[how](loader_of(ctx))):
                for inputs, labels in step:
                    step.backward(usual_loss(model, inputs, labels))
        except InputError as error:
            return str(error)
    return "no error"


def with_chosen_samples(how: str) -> str | list[int]:
    """Train on samples that a SubsetRandomSampler chooses, and return this rank's samples, or the error."""
    with job() as ctx:
        model, seen = ctx.wrap(Net()), []
        chosen = range(30) if how == "the same samples" else (range(28), range(28, 32))[ctx.rank]
        loader = DataLoader(
            TensorDataset(INPUTS, LABELS, torch.arange(NUM_SAMPLES)),
            ctx.seat.samples,
            sampler=SubsetRandomSampler(chosen),
        )
        try:
            for step in ctx.steps(loader):
                for inputs, labels, indices in step:
                    step.backward(usual_loss(model, inputs, labels))
                    seen += indices.tolist()
        except InputError as error:
            return str(error)
    return sorted(seen)


def with_bar_around_steps() -> tuple[Tensor, list[int], int]:
    """Return the weights, the lengths of the bars, and the samples consumed after two steps of the last epoch."""
    with job() as ctx:
        model = ctx.wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = loader_of(ctx)
        lengths, consumed = [], 0
        for _ in range(EPOCHS):
            bar = Bar(ctx.steps(loader))
            lengths.append(bar.total)
            for step in bar:
                for inputs, labels in step:
                    step.backward(usual_loss(model, inputs, labels))
                optimizer.step()
                optimizer.zero_grad()
                if step.index == 1:
                    consumed = loader.batch_sampler.state_dict()["samples_consumed"]
        loader.batch_sampler.resume(2 * EFFECTIVE)
        lengths.append(len(ctx.steps(loader)))
        return weights_of(model), lengths, consumed


# ------------------------------------------------------------------------------ parameters that nothing synchronises


def train(ctx: ddp.Context, loss_of: Callable[..., Tensor], net: nn.Module, *others: nn.Module, begin: Any) -> Tensor:
    """Train all epochs. `begin` returns the wrapper for the next epoch."""
    optimizer = torch.optim.SGD([*net.parameters(), *(one for other in others for one in other.parameters())], lr=0.5)
    for epoch in range(EPOCHS):
        model = begin(net, epoch)
        for step in ctx.steps(loader_of(ctx)):
            for inputs, labels in step:
                step.backward(loss_of(model, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net, *others)


CENTRES = Centres()
TEMPERATURE = nn.ParameterList([nn.Parameter(torch.ones((), dtype=torch.float64))])
LOSSES: dict[str, Callable[..., Tensor]] = {
    "loss": lambda model, inputs, labels: CENTRES(model(inputs), labels),
    "temperature": lambda model, inputs, labels: F.cross_entropy(model(inputs) * TEMPERATURE[0], labels),
    "module()": lambda model, inputs, labels: model.module(inputs, labels),
    "method": lambda model, inputs, labels: model.module.loss(inputs, labels),
}
LATER_LAYERS = {"layer added": (0, 1), "layer on one rank": (1,)}
"""The ranks that add a layer after `ctx.wrap`."""
UNFROZEN = {"unfrozen": 0, "unfrozen in epoch 1": 1}
"""The epochs in which the body is unfrozen after `ctx.wrap`."""


def unsynchronised(how: str) -> str:
    """Train with a model that DDP synchronises in part, and return the error."""
    with job() as ctx:
        net = Net(frozen=how in UNFROZEN)
        model = net if how == "no wrapper" else ctx.wrap(net)
        if ctx.rank in LATER_LAYERS.get(how, ()):
            net.more = nn.Linear(7, 3).double()

        def begin(net: Any, epoch: int) -> nn.Module:
            if UNFROZEN.get(how) == epoch:
                net.body.requires_grad_(True)
            return model

        try:
            train(ctx, LOSSES.get(how, usual_loss), net, CENTRES, TEMPERATURE, begin=begin)
        except InputError as error:
            return str(error)
    return "no error"


UNSYNCHRONISED = {
    "unfrozen": ("body.weight", "ctx.wrap(net)"),
    "unfrozen in epoch 1": ("body.weight", "ctx.wrap(net)"),
    "layer added": ("more.weight", "ctx.wrap(net)"),
    "layer on one rank": ("more.weight", "ctx.wrap(net)"),
    "loss": ("shape (3,)", "loss_fn = ctx.wrap(loss_fn)"),
    "temperature": ("shape ()", "part of the model"),
    "module()": ("body.weight", "wrapper.module"),
    "method": ("body.weight", "wrapper.module"),
    "no wrapper": ("shape (3,)", "model = ctx.wrap(model)"),
}


def wrapped_again() -> Tensor:
    with job() as ctx:

        def begin(net: Any, epoch: int) -> nn.Module:
            net.body.requires_grad_(epoch == 1)
            return ctx.wrap(net)

        return train(ctx, usual_loss, Net(frozen=True), begin=begin)


def loss_wrapped_as_well() -> Tensor:
    with job() as ctx:
        net, centres = Net(), Centres()
        model, loss_fn = ctx.wrap(net), ctx.wrap(centres)
        return train(ctx, lambda model, x, y: loss_fn(model(x), y), net, centres, begin=lambda _net, _epoch: model)


def users_own_wrapper() -> Tensor:
    with job() as ctx:
        net = Net()
        model = DistributedDataParallel(net)
        found = train(ctx, usual_loss, net, begin=lambda _net, _epoch: model)
        # Otherwise torch's reducer ends the group with the GIL held: a rare deadlock.
        group = model.__dict__.pop("process_group")
        model.process_group = group
        return found


def wrapper_then_method() -> Tensor:
    with job() as ctx:
        net = Net()
        model = ctx.wrap(net)
        loss_of = lambda model, *batch: (model(*batch).detach(), model.module.loss(*batch))[1]
        return train(ctx, loss_of, net, begin=lambda _net, _epoch: model)


def compiled(how: str) -> Tensor:
    with job() as ctx:
        net = Net()
        model: Any = ctx.wrap(net)
        if how == "in place":
            model.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        return train(ctx, usual_loss, net, begin=lambda _net, _epoch: model)


def evaluated_by_one_rank() -> list[bool]:
    """Evaluate a model with BatchNorm on rank 0 only, between the epochs and inside of one."""
    with job(sizes=(5, 3)) as ctx:
        torch.manual_seed(6)
        net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 3)).double()
        model, equal = ctx.wrap(net), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            for step in ctx.steps(DataLoader(DATA, batch_sampler=ctx.batch_sampler(NUM_SAMPLES))):
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                if ctx.rank == 0:
                    with torch.no_grad():
                        model.eval()(INPUTS)
                    model.train()
            found = [torch.empty_like(weights_of(net)) for _ in range(2)]
            torch.distributed.all_gather(found, weights_of(net))
            equal.append(torch.equal(*found))
        return equal


def with_own_sampler(batch_size: int | None) -> Any:
    """Pass a DataLoader with its own DistributedSampler, and a batch size or the plan's. Return the error."""
    with job() as ctx:
        ctx.wrap(Net())
        data = TensorDataset(INPUTS, LABELS)
        size = batch_size or ctx.seat.samples
        try:
            next(iter(ctx.steps(DataLoader(data, batch_size=size, sampler=DistributedSampler(data)))))
        except InputError as error:
            return str(error)
    return ""


def with_outer_wrapper() -> Any:
    """Wrap the model of `ctx.wrap` in DistributedDataParallel. Return the error."""
    with job() as ctx:
        model = DistributedDataParallel(ctx.wrap(Net()))
        try:
            model(INPUTS[:2])
        except InputError as error:
            return str(error)
    return ""


SCENARIOS: dict[str, Callable[[], Any]] = {
    "outer wrapper": with_outer_wrapper,
    "own batch size": lambda: with_own_sampler(6),
    "own sampler": lambda: with_own_sampler(None),
    **{how: lambda how=how: with_wrapped_loader(how) for how in WRAPPED},
    **{how: lambda how=how: with_chosen_samples(how) for how in ("the same samples", "own samples")},
    "steps": with_bar_around_steps,
    **{how: lambda how=how: unsynchronised(how) for how in UNSYNCHRONISED},
    "wrapped again": wrapped_again,
    "loss wrapped": loss_wrapped_as_well,
    "wrapper, then method": wrapper_then_method,
    "own wrapper": users_own_wrapper,
    "compiled": lambda: compiled("wrapper"),
    "compiled in place": lambda: compiled("in place"),
    "evaluation": evaluated_by_one_rank,
}

ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("how", WRAPPED)
def test_a_loader_inside_another_iterable_is_refused(ranks, how):
    """ctx.steps(tqdm(loader)) gave a borrowed sample half of a step's weight: weights were 4e-2 off."""
    for text in found_by(ranks, how):
        assert "ctx.steps(loader)" in text
        assert "tqdm(ctx.steps(loader))" in text


def test_a_sampler_that_chooses_the_same_samples_on_each_rank_is_refused(ranks):
    """Each rank drew all 30 training samples: 48 were trained in an epoch, 18 of them twice."""
    for text in found_by(ranks, "the same samples"):
        assert "ctx.loader(Subset(dataset, sampler.indices))" in text
    assert found_by(ranks, "own samples") == [[*range(28)], [*range(28, 32)]]


def test_a_loader_with_its_own_batch_size_is_refused(ranks):
    """The plan had 7 and 1 samples, but both ranks trained on 6, without a message."""
    for text, planned in zip(found_by(ranks, "own batch size"), (7, 1), strict=True):
        assert text.startswith(f"The DataLoader has batch_size=6, but the plan's micro-batches have {planned} samples")
        assert "Call ctx.steps(ctx.loader(loader)), which uses the plan's sizes." in text


def test_a_wrapper_around_the_wrapped_model_is_refused(ranks):
    """Plain DDP averaged the gradient of each micro-batch again: weights were 3e-2 off, without a message."""
    for text in found_by(ranks, "outer wrapper"):
        assert text.startswith("The model that ctx.wrap returned is in another DistributedDataParallel")


def test_a_sampler_that_divides_equally_is_refused(ranks):
    for text in found_by(ranks, "own sampler"):
        assert "gives each rank the same number of samples, but the plan has 7, 1." in text


@pytest.mark.parametrize("how", WRAPPED)
def test_plan_steps_refuses_the_same_loaders(how):
    """The sampler did not learn what was consumed, so a resumed epoch of 45 samples trained 77."""
    plan = make_plan((7, 1), EFFECTIVE)
    steps = plan.steps(WRAPPED[how](loader_of(plan)))
    with pytest.raises(InputError, match=r"tqdm\(plan.steps\(loader\)\)"):
        run(steps)


def run(steps: Any) -> int:
    """Run an epoch without a model, and return its number of steps."""
    number = 0
    for step in steps:
        for _ in step:
            step.backward(torch.zeros((), requires_grad=True) * 1.0)
        number += 1
    return number


def test_other_loaders_are_not_refused():
    """A repeated batch, a validation between the steps, and a user's own batches have no schedule to hide."""
    plan = make_plan((7, 1), EFFECTIVE)
    validation = loader_of(plan)
    first = next(iter(loader_of(plan)))
    assert len([*validation]) == 6
    for loader in ([first] * 4, (batch for batch in [first] * 4), DataLoader(DATA, batch_size=8)):
        assert run(plan.steps(loader)) > 1
        assert len([*validation]) == 6


def test_a_progress_bar_around_the_steps_has_a_length_and_trains_exactly(ranks):
    expected = trained_alone(Net(), usual_loss)
    for found, lengths, consumed in found_by(ranks, "steps"):
        assert (found - expected).abs().max() < EXACT
        assert lengths == [3, 3, 1]
        assert consumed == 2 * EFFECTIVE


def test_the_number_of_steps_is_unknown_without_a_batch_sampler():
    with pytest.raises(TypeError):
        len(make_plan((7, 1), EFFECTIVE).steps(DataLoader(DATA, batch_size=8)))


@pytest.mark.parametrize("how", UNSYNCHRONISED)
def test_a_gradient_that_differs_between_the_ranks_is_an_error(ranks, how):
    """The ranks' weights drifted apart by 1e-3 to 1e-1, without a message. Plain DDP does the same."""
    for text in found_by(ranks, how):
        for part in (*UNSYNCHRONISED[how], "differs between the ranks in optimizer step 0"):
            assert part in text


def trained_alone_with_centres() -> Tensor:
    centres = Centres()
    return trained_alone(Net(), lambda net, inputs, labels: centres(net(inputs), labels), centres)


def unfreeze(net: Any, epoch: int) -> None:
    net.body.requires_grad_(epoch == 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrapped again", lambda: trained_alone(Net(frozen=True), usual_loss, begin=unfreeze)),
        ("loss wrapped", trained_alone_with_centres),
        ("wrapper, then method", lambda: trained_alone(Net(), usual_loss)),
        ("own wrapper", lambda: trained_alone(Net(), usual_loss)),
        ("compiled", lambda: trained_alone(Net(), usual_loss)),
        ("compiled in place", lambda: trained_alone(Net(), usual_loss)),
    ],
)
def test_the_advice_trains_as_one_process(ranks, name, expected):
    """torch.compile(ctx.wrap(net)) raised an internal error of torch, from autosplit's forward hook."""
    wanted = expected()
    for found in found_by(ranks, name):
        assert (found - wanted).abs().max() < EXACT


def test_one_rank_may_evaluate_a_model_with_batchnorms(ranks):
    """Both ranks waited in different collectives until the time-out, without a message."""
    assert found_by(ranks, "evaluation") == [[True] * EPOCHS] * 2
