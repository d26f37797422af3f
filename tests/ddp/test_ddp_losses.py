"""Real losses train on two unequal ranks as in one process: class weights, sample weights, DETR's normaliser, a GAN.

The loops of docs/same-training.md run unchanged.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan, relative_error, weights
from folders import DOCS
from ranks import found_by, job_of
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.probe.check_result import Check

EXACT = 1e-12
NUM_SAMPLES = 40
SIZES = (5, 3)
INPUTS = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1))
CLASS_WEIGHTS = torch.tensor([0.3, 2.7, 1.1], dtype=torch.float64)
SAMPLE_WEIGHTS = torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SAMPLE_WEIGHTS[:7] = 0.0  # a whole micro-batch of rank 0, and a part of rank 1's
BOXES = torch.randint(1, 6, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(3))


def page_block(containing: str) -> str:
    """Return the loop over the steps of the block of docs/same-training.md that contains a text."""
    blocks = [part.split("```")[0] for part in (DOCS / "same-training.md").read_text().split("```python\n")[1:]]
    (block,) = (block for block in blocks if containing in block)
    return textwrap.dedent(block[block.index("    for step in ctx.steps(") :])


def make_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(4, 3).double()


def whole_steps(effective: int) -> list[slice]:
    return [slice(first, first + effective) for first in range(0, NUM_SAMPLES, effective)]


def in_one_process(loss_of: Callable[..., torch.Tensor], effective: int, *columns: torch.Tensor) -> torch.Tensor:
    """Return the weights after an epoch of whole steps."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in whole_steps(effective):
        loss_of(model, *(column[part] for column in columns)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def box_loss(outputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return (outputs.pow(2).sum(1) * boxes).sum()


def class_weighted(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS)


def sample_weighted(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    return (losses * own).sum() / own.sum()


def boxed(model: nn.Module, inputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return box_loss(model(inputs), boxes) / boxes.sum()


@contextmanager
def prepared(effective: int, *columns: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    with ddp.setup(make_plan(SIZES, effective)) as ctx:
        model = ctx.wrap(make_model())
        loader = DataLoader(TensorDataset(*columns), batch_sampler=ctx.batch_sampler(NUM_SAMPLES))
        yield ctx, model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def counted_loop(
    loss_of: Callable[..., torch.Tensor], count: Callable[[Any], Any], *columns: torch.Tensor, effective: int = 16
) -> torch.Tensor:
    with prepared(effective, *columns) as (ctx, model, optimizer, loader):
        for step in ctx.steps(loader, count=count):
            for batch in step:
                step.backward(loss_of(model, *batch))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


def of_page(containing: str, effective: int, *columns: torch.Tensor) -> torch.Tensor:
    """Run a loop of the page."""
    names = {"class_weights": CLASS_WEIGHTS, "weights": CLASS_WEIGHTS, "nn": nn, "torch": torch}
    with prepared(effective, *columns) as (ctx, model, optimizer, loader):
        exec(page_block(containing), {**names, "ctx": ctx, "model": model, "optimizer": optimizer, "loader": loader})
        return weights(model)


def refused(effective: int, **options: Any) -> str:
    """Train with DETR's loss, and return the message of the error."""
    with prepared(effective, INPUTS, BOXES) as (ctx, model, _, loader):
        try:
            for step in ctx.steps(loader, **options):
                for inputs, boxes in step:
                    num_boxes = boxes.sum().double()
                    dist.all_reduce(num_boxes)
                    step.backward(box_loss(model(inputs), boxes) / (num_boxes / ctx.world_size))
        except InputError as refusal:
            return str(refusal)
    return "not refused"


def logged() -> torch.Tensor:
    """If a loss is only reduced for logging, the training loss is still the rank's own mean."""
    with prepared(16, INPUTS, LABELS) as (ctx, model, optimizer, loader):
        for step in ctx.steps(loader, loss_scope="sample"):
            for inputs, labels in step:
                loss = F.cross_entropy(model(inputs), labels)
                dist.all_reduce(loss.detach().clone())
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


class WithBuffers(nn.Module):
    """DDP broadcasts the buffers in its forward: this is no collective of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


def with_buffers() -> torch.Tensor:
    with ddp.setup(make_plan(SIZES, 16)) as ctx:
        model = ctx.wrap(WithBuffers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in ctx.steps(DataLoader(TensorDataset(INPUTS, LABELS), batch_sampler=ctx.batch_sampler(NUM_SAMPLES))):
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


def uncounted() -> list[str]:
    """Return the warnings of a loop without a count, if the plan's check found one."""
    check = Check("loss", 0.0, 0.4, depends=True, count="float(class_weights[batch[1][batch[1] != -100]].sum())")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddp.setup(replace(make_plan(SIZES, 16), checks=(check,))) as ctx:
            ctx.steps(DataLoader(TensorDataset(INPUTS, LABELS), batch_sampler=ctx.batch_sampler(NUM_SAMPLES)))
    return [str(one.message) for one in caught if one.category is UnevenLossWarning]


def foreign_loader() -> torch.Tensor:
    """Every rank has its own batches, without a sampler."""
    with ddp.setup(make_plan(SIZES, 16)) as ctx:
        own = ((slice(0, 5), slice(8, 13)), (slice(5, 8), slice(13, 16)))[ctx.rank]
        batches = [(INPUTS[part], BOXES[part]) for part in own]
        model = ctx.wrap(make_model())
        for step in ctx.steps(batches, loss_scope="ranks", count=lambda batch: int(batch[1].sum())):
            assert (step.num_samples, step.count) == (16, int(BOXES[:16].sum()))
            for inputs, boxes in step:
                num_boxes = boxes.sum().double()
                dist.all_reduce(num_boxes)
                step.backward(box_loss(model(inputs), boxes) / (num_boxes / ctx.world_size))
        return torch.cat([p.grad.flatten() for p in model.parameters()])


def make_gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    return nn.Linear(4, 4).double(), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def gan_of_page() -> torch.Tensor:
    with ddp.setup(make_plan(SIZES, 16)) as ctx:
        generator, critic = map(ctx.wrap, make_gan())
        loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_sampler=ctx.batch_sampler(NUM_SAMPLES))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
        names = {"ctx": ctx, "generator": generator, "critic": critic, "loader": loader, "torch": torch}
        exec(page_block("loss_d"), {**names, "optimizers": optimizers})
        return torch.cat([weights(generator), weights(critic)])


def gan_in_one_process() -> torch.Tensor:
    generator, critic = make_gan()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for part in whole_steps(16):
        fake = generator(INPUTS[part])
        (critic(fake.detach()).mean() - critic(INPUTS[part]).mean()).backward()
        of_generator = torch.autograd.grad(-critic(fake).mean(), [*generator.parameters()])
        for parameter, grad in zip(generator.parameters(), of_generator, strict=True):
            parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([weights(generator), weights(critic)])


LOOPS: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
    "class weights, of the page": (
        partial(of_page, "class_weights", 16, INPUTS, LABELS),
        partial(in_one_process, class_weighted, 16, INPUTS, LABELS),
    ),
    "sample weights, all 0 in one micro-batch": (
        partial(counted_loop, sample_weighted, lambda batch: batch[2].sum(), INPUTS, LABELS, SAMPLE_WEIGHTS),
        partial(in_one_process, sample_weighted, 16, INPUTS, LABELS, SAMPLE_WEIGHTS),
    ),
    "boxes of all ranks, of the page": (
        partial(of_page, "num_boxes", 16, INPUTS, BOXES),
        partial(in_one_process, boxed, 16, INPUTS, BOXES),
    ),
    "a loss that is logged over the ranks": (
        logged,
        partial(in_one_process, lambda model, x, y: F.cross_entropy(model(x), y), 16, INPUTS, LABELS),
    ),
    "buffers": (
        with_buffers,
        partial(in_one_process, lambda model, x, y: F.cross_entropy(model(x), y), 16, INPUTS, LABELS),
    ),
    "a GAN, of the page": (gan_of_page, gan_in_one_process),
}


class Estimate:
    """A noise scale that is refused before it begins a step."""

    def begin_step(self, over_ranks: Any) -> None:
        raise AssertionError("it is refused before")


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: there for name, (there, _) in LOOPS.items()},
    "foreign": foreign_loader,
    "undeclared": partial(refused, 8),
    "not counted": partial(refused, 16, loss_scope="ranks"),
    "no samples": partial(refused, 17, loss_scope="ranks", count=lambda batch: int(batch[1].sum())),
    "noise scale": partial(refused, 8, loss_scope="ranks", noise_scale=Estimate()),
    "cut": partial(refused, 8, loss_scope="ranks", on_oom="cut"),
    "unknown scope": partial(refused, 8, loss_scope="job"),
    "uncounted": uncounted,
}


ranks = job_of(__name__, "SCENARIOS", 2, limit_s=300)


@pytest.mark.parametrize("name", LOOPS)
def test_two_unequal_ranks_train_as_one_process(ranks, name):
    expected = LOOPS[name][1]()
    for found in found_by(ranks, name):
        assert relative_error(found, expected) < EXACT
    assert not torch.equal(expected, weights(make_model()))


def test_a_loader_of_another_kind_has_its_counts_over_the_ranks(ranks):
    model = make_model()
    boxed(model, INPUTS[:16], BOXES[:16]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for found in found_by(ranks, "foreign"):
        assert relative_error(found, expected) < EXACT


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("undeclared", "The ranks ran a collective before the backward of a micro-batch's loss"),
        ("not counted", "loss_scope is 'ranks', and a step has 2 micro-batches"),
        ("no samples", "a rank has no samples in a micro-batch"),
        ("noise scale", "loss_scope is 'ranks' and noise_scale:"),
        ("cut", "loss_scope is 'ranks' and on_oom='cut'"),
        ("unknown scope", "loss_scope is 'job'. Expected 'sample', or 'ranks'"),
    ],
)
def test_a_loss_over_the_ranks_is_refused_on_every_rank(ranks, name, says):
    for found in found_by(ranks, name):
        assert says in found


def test_class_weights_without_a_count_are_warned_of_once(ranks):
    for found in found_by(ranks, "uncounted"):
        (said,) = found
        assert "Pass count=lambda batch: float(class_weights[batch[1][batch[1] != -100]].sum()) to steps()" in said


@pytest.mark.parametrize("count", [math.nan, -0.5, "3", None, torch.tensor(True)])
def test_a_count_has_to_be_a_number(count):
    from autosplit.parallel.epoch_steps import steps

    with pytest.raises(InputError, match=r"count\(batch\) returned"):
        next(steps([0], batch_size=4, effective_batch_size=8, count=lambda _: count))
