"""Correct training loops that `ctx.steps` refused, and unsynchronised parameters that it did not detect.

Each case has a public report of another project: see the docstrings of the tests. Two ranks train the scenarios, and
one process trains the same model on whole batches, for comparison.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from error_types import InputError
from ranks import for_workers, found_by, job_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from autosplit import ddp

EXACT = 1e-12
EPOCHS = 2
NUM_SAMPLES, EFFECTIVE = 45, 16
INPUTS = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.randint(3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUTS, LABELS)


class Net(nn.Module):
    """Two layers. The second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.more = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.norm: nn.Module = nn.Identity()
        self.head = nn.Linear(5, 3).double()
        self.uses_more = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.body(inputs)).tanh()
        return self.head(hidden + self.more(hidden).tanh() if self.uses_more else hidden)


class Reentrant(Net):
    """A model with reentrant checkpointing, whose input needs `requires_grad`."""

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(super().forward, inputs.clone().requires_grad_(), use_reentrant=True)


def usual_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def penalised_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Penalise the gradient of the inputs, which are leaves of the graph."""
    inputs = inputs.clone().requires_grad_()
    loss = usual_loss(model, inputs, labels)
    (gradient,) = torch.autograd.grad(loss * len(inputs), inputs, create_graph=True)
    return loss + gradient.square().sum(1).mean() + 0 * inputs.mean()


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in net.parameters()])


def trained_alone(net: nn.Module, loss_of: Callable[..., Tensor]) -> Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(EPOCHS):
        for first in range(0, NUM_SAMPLES, EFFECTIVE):
            loss_of(net, INPUTS[first : first + EFFECTIVE], LABELS[first : first + EFFECTIVE]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


def train(
    ctx: ddp.Context,
    model: nn.Module,
    loss_of: Callable[..., Tensor] = usual_loss,
    *others: Tensor,
    begin: Callable[[int, int], object] | None = None,
) -> None:
    """Train all epochs. `begin` is called before each step, with its epoch and index."""
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.5)
    for epoch in range(EPOCHS):
        for step in ctx.steps(DataLoader(DATA, batch_sampler=ctx.batch_sampler(NUM_SAMPLES))):
            if begin is not None:
                begin(epoch, step.index)
            for inputs, labels in step:
                step.backward(loss_of(model, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()


def job(sizes: tuple[int, int] = (7, 1)) -> Any:
    return ddp.setup(make_plan(sizes, EFFECTIVE), timeout_s=60)


LOOPS: dict[str, tuple[type[Net], Callable[..., Tensor]]] = {
    "reentrant": (Reentrant, usual_loss),
    "penalty": (Net, penalised_loss),
}


def trained(how: str) -> Tensor:
    with job() as ctx:
        kind, loss_of = LOOPS[how]
        net = kind()
        train(ctx, ctx.wrap(net), loss_of)
        return weights_of(net)


def with_ignored_parameters() -> list[bool]:
    """Return for each parameter whether it is equal on the ranks. DDP ignores those of one layer."""
    with job() as ctx:
        net = Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["more.weight", "more.bias"])
        train(ctx, ctx.wrap(net))
        equal = []
        for one in net.parameters():
            found = [torch.empty_like(one) for _ in range(2)]
            torch.distributed.all_gather(found, one.detach())
            equal.append(torch.equal(*found))
        return equal


def with_own_batch_sampler() -> list[int]:
    """Return this rank's samples of an epoch, drawn by the user's own batch sampler for ranks."""
    with job((4, 4)) as ctx:
        model = ctx.wrap(Net())
        samples = DistributedSampler(DATA, num_replicas=2, rank=ctx.rank, shuffle=False, drop_last=True)

        class Grouped:
            def __iter__(self) -> Iterator[list[int]]:
                chosen = [*samples]
                yield from (chosen[first : first + 4] for first in range(0, len(chosen), 4))

            def __len__(self) -> int:
                return (len(samples) + 3) // 4

        loader = DataLoader(TensorDataset(INPUTS, LABELS, torch.arange(NUM_SAMPLES)), batch_sampler=Grouped())
        seen = []
        for step in ctx.steps(loader):
            for inputs, labels, indices in step:
                step.backward(usual_loss(model, inputs, labels))
                seen += indices.tolist()
        return seen


def evaluated_by_one_rank() -> Tensor:
    """Evaluate on rank 0 with the wrapper, after `eval` of the inner model only."""
    with job((5, 3)) as ctx:
        net = Net()
        net.norm = nn.BatchNorm1d(5).double()
        model = ctx.wrap(net)

        def evaluate(*_: int) -> None:
            if ctx.rank == 0:
                net.eval()
                with torch.no_grad():
                    model(INPUTS)
                net.train()

        train(ctx, model, begin=evaluate)
        return weights_of(net)


def unsynchronised(how: str) -> str:
    """Train with parameters that DDP does not synchronise, and return the error."""
    with job() as ctx:
        net, now = Net(), {"epoch": 0, "step": 0}
        model = ctx.wrap(net)
        scale = torch.ones(3, dtype=torch.complex128 if how == "complex" else torch.float64, requires_grad=True)
        if how == "replaced":
            net.body = nn.Linear(5, 5).double()
        outside = nn.Parameter(scale.detach().clone())

        def begin(epoch: int, step: int) -> None:
            now.update(epoch=epoch, step=step)
            net.uses_more = how != "unused" or (epoch, step) < (0, 1)

        def loss_of(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
            if (how == "module from epoch 1" and now["epoch"]) or (how == "module in step 1" and now["step"] == 1):
                return usual_loss(model.module, inputs, labels)
            outputs = model(inputs)
            if how == "complex":
                outputs = outputs + (outputs * outside.conj()).imag
            elif how == "parameter from step 1" and now["step"]:
                outputs = outputs * outside
            elif how == "tensor":
                outputs = outputs * scale
            elif how == "checkpointed":
                outputs = checkpoint(lambda given: given * outside, outputs, use_reentrant=True)
            return F.cross_entropy(outputs, labels)

        try:
            train(ctx, model, loss_of, scale, outside, begin=begin)
        except InputError as error:
            return str(error)
    return "no error"


UNSYNCHRONISED = {
    "parameter from step 1": ("shape (3,)", "optimizer step 1", "loss_fn = ctx.wrap(loss_fn)"),
    "tensor": ("shape (3,)", "optimizer step 1", "part of the model"),
    "checkpointed": ("shape (3,)", "optimizer step 1", "part of the model"),
    "complex": ("shape (3,)", "optimizer step 0", "part of the model"),
    "module in step 1": ("body.weight", "optimizer step 1", "wrapper.module"),
    "module from epoch 1": ("body.weight", "optimizer step 0", "wrapper.module"),
    "replaced": ("body.weight", "optimizer step 0", "Wrap the model again"),
    "unused": ("body.weight", "optimizer step 1", "find_unused_parameters=True"),
}


class Batches(IterableDataset):
    """The batches of a loader, as a data set of another loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Trainer:
    """A trainer with a hook on its model, and so in a reference cycle with it."""

    def __init__(self, ctx: ddp.Context) -> None:
        net = Net()
        net.body.register_forward_hook(self.keep)
        self.model = ctx.wrap(net)

    def keep(self, _module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        self.features = outputs.detach()


def after_a_fold() -> Tensor:
    """Train two folds. Only rank 0 collects the first trainer, as Python's collector may do."""
    with job() as ctx:
        train(ctx, Trainer(ctx).model)
        if ctx.rank == 0:
            gc.collect()
        trainer = Trainer(ctx)
        train(ctx, trainer.model)
        return weights_of(trainer.model)


def without_steps() -> list[str]:
    """Train with the loader alone. Return the warnings."""
    with ddp.setup(make_plan((7, 1), 8), timeout_s=60) as ctx, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ctx.wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for inputs, labels in ctx.loader(DATA):
            usual_loss(model, inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [str(one.message) for one in caught]


class HardestFirst(Sampler[int]):
    """A sampler that orders samples by their losses. A rank knows only the losses of its own samples."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(NUM_SAMPLES), key=lambda number: number % (2 + self.rank)))

    def __len__(self) -> int:
        return NUM_SAMPLES


def with_own_order() -> str:
    with job() as ctx:
        loader = ctx.loader(DataLoader(DATA, batch_size=4, sampler=HardestFirst(ctx.rank)))
        with pytest.raises(InputError) as caught:
            next(ctx.steps(loader))
    return str(caught.value)


def frozen_at_the_end() -> Tensor:
    """Train with `on_oom="cut"`. The model is frozen between its backward and its update, as a discriminator."""
    with job() as ctx:
        model = ctx.wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(EPOCHS):
            for step in ctx.steps(DataLoader(DATA, batch_sampler=ctx.batch_sampler(NUM_SAMPLES)), on_oom="cut"):
                for inputs, labels in step:
                    model.requires_grad_(True)
                    with step.attempt():
                        step.backward(usual_loss(model, inputs, labels))
                    model.requires_grad_(False)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)


def first_batch_after_it_was_used() -> bool:
    """Return whether the first batch is still in memory."""
    with job() as ctx:
        model = ctx.wrap(Net())
        inputs = INPUTS.clone()
        model(inputs).sum().backward()
        reference = weakref.ref(inputs)
        del inputs
        return reference() is not None


SCENARIOS: dict[str, Callable[[], Any]] = {
    "fold": after_a_fold,
    "without steps": without_steps,
    "own order": with_own_order,
    "frozen": frozen_at_the_end,
    "first batch": first_batch_after_it_was_used,
    **{how: lambda how=how: trained(how) for how in LOOPS},
    **{how: lambda how=how: unsynchronised(how) for how in UNSYNCHRONISED},
    "ignored": with_ignored_parameters,
    "own batch sampler": with_own_batch_sampler,
    "evaluation": evaluated_by_one_rank,
}

ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("how", LOOPS)
def test_inputs_with_requires_grad_are_no_parameters(ranks, how):
    """The inputs' gradients differ between the ranks, so adapters with reentrant checkpointing were refused.

    transformers #21598 (`enable_input_require_grads`), and gradient penalties (caogang/wgan-gp #4).
    """
    kind, loss_of = LOOPS[how]
    expected = trained_alone(kind(), loss_of)
    for found in found_by(ranks, how):
        assert (found - expected).abs().max() < EXACT


def test_parameters_that_ddp_ignores_may_differ(ranks):
    """Each rank has its own part of such a layer: pytorch #43690, peft #900."""
    assert found_by(ranks, "ignored") == [[True, True, False, False, True, True]] * 2


def test_own_batch_sampler_of_each_rank_is_accepted(ranks):
    """A DataLoader with a batch sampler has an unused SequentialSampler: Lightning #1661, torchvision #2884."""
    assert found_by(ranks, "own batch sampler") == [[*range(0, 44, 2)], [*range(1, 44, 2)]]


def test_one_rank_may_evaluate_after_eval_of_the_inner_model(ranks):
    """gloo killed a rank, because rank 0 alone broadcast its buffers: pytorch #54059, open_clip #1152."""
    first, second = found_by(ranks, "evaluation")
    assert torch.equal(first, second)


def test_a_model_of_an_earlier_loop_does_not_matter(ranks):
    """The garbage collector had freed it on one rank only, so the names of all gradients differed."""
    expected = trained_alone(Net(), usual_loss)
    for found in found_by(ranks, "fold"):
        assert (found - expected).abs().max() < EXACT


def test_a_loop_without_steps_is_warned_of_if_ranks_are_unequal(ranks):
    """DDP averages the means of 7 samples and of 1 sample. With one forward per step, no warning appeared."""
    for texts in found_by(ranks, "without steps"):
        assert any("The ranks have 7, 1 samples" in text for text in texts)


def test_a_sampler_with_another_order_on_each_rank_is_refused(ranks):
    """The ranks trained some samples twice and others never."""
    assert all("digest of the order" in text for text in found_by(ranks, "own order"))


def test_gradients_of_a_frozen_model_are_averaged(ranks):
    """With `on_oom="cut"`, the averaging looked for parameters that require gradients, and found none."""
    expected = trained_alone(Net(), usual_loss)
    for found in found_by(ranks, "frozen"):
        assert (found - expected).abs().max() < EXACT


def test_the_first_batch_is_freed(ranks):
    """Before Python 3.13, reading the variables of the callers kept them in memory while the training ran."""
    assert found_by(ranks, "first batch") == [False, False]


@pytest.mark.parametrize("how", UNSYNCHRONISED)
def test_an_unsynchronised_parameter_is_found_and_explained(ranks, how):
    """Weights drifted apart by 1e-2, the cause was wrong, or the comparison itself failed.

    pytorch-metric-learning #710 (losses), diffusers #4046 and accelerate #3285 (`module`), pytorch #12603 (a replaced
    parameter), pytorch #128949 (unused parameters).
    """
    for text in found_by(ranks, how):
        for part in UNSYNCHRONISED[how]:
            assert part in text


def test_a_loader_inside_the_data_set_of_another_loader_is_refused():
    """The sampler drew in a worker, so a resumed epoch began at its first sample."""
    plan = make_plan((7, 1), EFFECTIVE)
    inner = DataLoader(DATA, batch_sampler=plan.batch_sampler(NUM_SAMPLES))
    outer = DataLoader(Batches(inner), batch_size=None, num_workers=1, multiprocessing_context=for_workers())
    with pytest.raises(InputError, match=r"plan.steps\(loader\)"):
        next(plan.steps(outer))
