"""Contrastive losses over all ranks: `ctx.all_gather` gives the gradient of one process, on unequal ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.nn
import torch.nn.functional as F
from ddp_jobs import INPUTS, NUM_SAMPLES, gradient, make_plan, relative_error
from ranks import found_by, job_of
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.parallel.batch_sampler import ScheduledBatchSampler

CAPTIONS = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
CLASSES = torch.arange(NUM_SAMPLES) % 5


class Clip(nn.Module):
    """Two towers and a temperature, which is used after the gather."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.images = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.texts = nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(captions), dim=1), self.scale.exp()


def clip_loss(model: nn.Module, indices: Tensor, gather: Callable[[Tensor], Any]) -> Tensor:
    """Compare the images with all texts, and the texts with all images: the mean over the own samples."""
    images, texts, scale = model(INPUTS[indices], CAPTIONS[indices])
    all_images, all_texts = gather(images), gather(texts)
    own = all_images.offset + torch.arange(len(images))
    to_texts = F.cross_entropy(scale * images @ all_texts.tensor.T, own)
    return (to_texts + F.cross_entropy(scale * texts @ all_images.tensor.T, own)) / 2


def supervised_loss(model: nn.Module, indices: Tensor, gather: Callable[[Tensor], Any]) -> Tensor:
    """Attract samples of one class (SupCon); labels are gathered, too. A sample is no candidate for itself."""
    images, texts, scale = model(INPUTS[indices], CAPTIONS[indices])
    both = images + texts
    everyone, labels = gather(both), gather(CLASSES[indices]).tensor
    logits = scale * both @ everyone.tensor.T
    own = everyone.offset + torch.arange(len(images))
    others = torch.ones_like(logits).scatter_(1, own[:, None], 0)
    positives = others * (CLASSES[indices][:, None] == labels)
    log_probability = logits - (others * logits.exp()).sum(1, keepdim=True).clamp_min(1e-30).log()
    return (-(positives * log_probability).sum(1) / positives.sum(1).clamp_min(1)).mean()


def common_loss(model: nn.Module, indices: Tensor, gather: Callable[[Tensor], Any]) -> Tensor:
    """Bring both towers together and decorrelate the features (VICReg): one loss over all samples, on every rank."""
    images, texts, scale = model(INPUTS[indices], CAPTIONS[indices])
    found = gather(torch.stack([images, texts]).transpose(0, 1))
    every = found.tensor[: sum(found.sizes)]
    centred = every[:, 0] - every[:, 0].mean(0)
    return (every[:, 0] - every[:, 1]).square().mean() + scale.sum() * (centred.T @ centred).square().mean()


LOSSES = {"clip": clip_loss, "supervised": supervised_loss, "common": common_loss}

JOBS = {
    "5 and 3": ((5, 3), 8),
    "empty shares in the short last step": ((1, 7), 42),
    "a rank without any share": ((0, 8), 20),
}


def gathered_gradients(loss: str, job: str, *, shard: bool = False) -> list[Tensor]:
    found = []
    with ddp.setup(make_plan(*JOBS[job])) as ctx:
        model = ctx.shard(Clip(), layers=nn.Linear) if shard else ctx.wrap(Clip())
        loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=7))
        for step in ctx.steps(loader):
            for indices in step:
                step.backward(LOSSES[loss](model, indices, ctx.all_gather))
            grads = [p.grad.full_tensor() if shard else p.grad for p in model.parameters() if p.grad is not None]
            found.append(torch.cat([grad.flatten() for grad in grads]).clone())
            model.zero_grad()
    return found


def alone_gradients(loss: str, job: str) -> list[Tensor]:
    """One process runs the same micro-batches."""
    sizes, effective = JOBS[job]
    sampler = ScheduledBatchSampler(NUM_SAMPLES, sum(sizes), effective, shuffle=True, seed=7)
    batches, found = iter(sampler), []
    for step in sampler.schedule:
        model = Clip()
        for size in step.micro_batch_sizes:
            value = LOSSES[loss](model, torch.tensor(next(batches)), lambda own: ddp.Gathered(own, 0, (len(own),)))
            (value * size / step.num_samples).backward()
        found.append(gradient(model))
    return found


def evaluated() -> Any:
    """Gather without gradients and outside of steps: every row, in the order of the ranks."""
    with ddp.setup(make_plan((0, 8), 8)) as ctx, torch.no_grad():
        found = ctx.all_gather(torch.arange(2 + ctx.rank).half()[:, None] + 10 * ctx.rank)
        return found.tensor.flatten().tolist(), found.offset, found.sizes, str(found.tensor.dtype)


def refusals() -> list[str]:
    found = []
    with ddp.setup(make_plan((2, 6), 8)) as ctx:
        model = ctx.wrap(Clip())
        loader = DataLoader(range(8), batch_sampler=ctx.batch_sampler(8))

        def refuse(call: Callable[[], object]) -> None:
            with pytest.raises(InputError) as caught:
                call()
            found.append(str(caught.value))

        refuse(lambda: ctx.all_gather(torch.ones(2, 3 + ctx.rank)))
        refuse(lambda: ctx.all_gather(torch.ones(2, 3, requires_grad=not ctx.rank)))
        step = next(ctx.steps(loader, on_oom="cut"))
        for indices in step:
            with step.attempt():
                images, _, _ = model(INPUTS[indices], CAPTIONS[indices])
                refuse(lambda images=images: ctx.all_gather(images))
                step.backward(images.sum())
        rows = torch.ones(2 + 4 * ctx.rank, 3)
        refuse(lambda: torch.distributed.nn.all_gather(rows))
        refuse(lambda: dist.all_gather([torch.empty_like(rows)] * 2, rows))
        padded = [torch.empty(6, 3) for _ in range(2)]
        dist.all_gather(padded, F.pad(rows, (0, 0, 0, 6 - len(rows))))
        found.append(str(float(torch.cat(padded).sum())))
    found.append(dist.all_gather.__module__)
    return found


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"{loss}, {job}": lambda loss=loss, job=job: gathered_gradients(loss, job) for loss in LOSSES for job in JOBS},
    "shard": lambda: gathered_gradients("clip", "empty shares in the short last step", shard=True),
    "evaluated": evaluated,
    "refusals": refusals,
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_steps_gradient_is_that_of_one_process(ranks, loss, job):
    """torch's own all_gather aborted the process: "terminate called after throwing gloo::EnforceNotMet"."""
    expected = alone_gradients(loss, job)
    for found in found_by(ranks, f"{loss}, {job}"):
        assert len(found) == len(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert (got - wanted).norm() <= 1e-12 * wanted.norm().clamp_min(1e-3)  # it may be 0


@pytest.mark.whole
def test_of_a_model_that_is_shared_out(ranks):
    expected = alone_gradients("clip", "empty shares in the short last step")
    for found in found_by(ranks, "shard"):
        for got, wanted in zip(found, expected, strict=True):
            assert relative_error(got, wanted) < 1e-12


@pytest.mark.whole
def test_outside_of_steps_every_row_is_gathered(ranks):
    rows = [0.0, 1.0, 10.0, 11.0, 12.0]
    assert found_by(ranks, "evaluated") == [(rows, 0, (2, 3), "torch.float16"), (rows, 2, (2, 3), "torch.float16")]


@pytest.mark.whole
def test_what_can_not_be_gathered_is_refused_on_all_ranks(ranks):
    for found in found_by(ranks, "refusals"):
        shapes, gradients, cut, *by_torch, padded, module = found
        assert "different rows on the ranks: (3,) of torch.float32 on rank 0, (4,) of torch.float32 on rank 1" in shapes
        assert "(3,) of torch.float32 with gradients on rank 0, (3,) of torch.float32 on rank 1" in gradients
        assert "with on_oom='cut'" in cut
        assert [text.split()[0] for text in by_torch] == ["all_gather"] * 2
        for text in by_torch:
            assert "unequal sizes: 6 on rank 0, 18 on rank 1 (elements)" in text
            assert "Call ctx.all_gather(tensor)" in text
        assert float(padded) == 24.0
        assert module == "torch.distributed.distributed_c10d", "torch's function is unchanged"
