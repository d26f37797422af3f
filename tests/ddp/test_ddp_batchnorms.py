"""BatchNorms and SyncBatchNorms under DDP with a plan, in real processes: empty shares, and last batches of 1 or 2.

torch's SyncBatchNorm needs GPUs. Here its code runs over gloo, with its five kernels in Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from ddp_jobs import gradient, make_plan, relative_error
from ranks import found_by, job_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.solve.split import micro_batch_sizes

INPUTS = torch.randn(60, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 + 1
EXACT = 1e-10

# The kernels of torch's SyncBatchNorm, (n, channels, length)


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2)), (x.var((0, 2), unbiased=False) + eps).rsqrt()


def _gathered(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    total = counts.sum()
    mean = (counts[:, None] * means).sum(0) / total
    var = (counts[:, None] * (invstds**-2 - eps + (means - mean) ** 2)).sum(0) / total
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * var * total / (total - 1))
    return mean, (var + eps).rsqrt()


def _normalised(x, weight, bias, mean, invstd, eps):
    return (x - mean[:, None]) * (invstd * weight)[:, None] + bias[:, None]


def _reduced(grad, x, mean, invstd, weight, *_):
    by_mean = (grad * (x - mean[:, None])).sum((0, 2))
    return grad.sum((0, 2)), by_mean, by_mean * invstd, grad.sum((0, 2))


def _input_gradient(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    total = counts.sum()
    from_var = (x - mean[:, None]) * (invstd**2 * sum_dy_xmu / total)[:, None]
    return (grad - (sum_dy / total)[:, None] - from_var) * (invstd * weight)[:, None]


KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gathered,
    "batch_norm_elemt": _normalised,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _input_gradient,
}

# The scenarios


class Samples(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[index], index


def make_model(*, flat: bool = False) -> nn.Module:
    torch.manual_seed(3)
    first = [nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)] if flat else [nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)]
    if flat:
        return nn.Sequential(*first, nn.Tanh(), nn.Linear(4, 1)).double()
    return nn.Sequential(*first, nn.Tanh(), nn.Conv1d(4, 2, 2), nn.BatchNorm1d(2)).double()


def losses(outputs: Tensor) -> Tensor:
    return (outputs**3 + outputs.sin()).flatten(1).sum(1)


def counts(indices: Any) -> int:
    return int((torch.as_tensor(indices) % 3 == 0).sum())


def mean_of_counted(outputs: Tensor, indices: Tensor) -> Tensor:
    """A common handwritten mean. It is 0/0 if nothing counts."""
    mask = indices % 3 == 0
    return (losses(outputs) * mask).sum() / mask.sum()


def norms_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def statistics(model: nn.Module) -> list[Tensor]:
    buffers = ((norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms_of(model))
    return [buffer.clone() for buffer in itertools.chain(*buffers)]


def on_one_device(length: int, batch_size: int, effective: int, *, counted: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return each optimizer step's gradient, and the final statistics."""
    model, found = make_model(), []
    for first in range(0, length, effective):
        step = range(first, min(first + effective, length))
        ends = list(itertools.accumulate(micro_batch_sizes(len(step), batch_size), initial=0))
        for begin, end in itertools.pairwise(ends):
            indices = torch.tensor(step[begin:end])
            if counted:
                amount = counts(indices) / max(1, counts(step))
                outputs = model(INPUTS[indices])
                loss = mean_of_counted(outputs, indices) if amount else outputs.sum() * 0
            else:
                amount, loss = len(indices) / len(step), losses(model(INPUTS[indices])).mean()
            (loss * amount).backward()
        found.append(gradient(model).clone())
        model.zero_grad()
    return found, statistics(model)


def synchronised(sizes: tuple[int, ...], effective: int, length: int, counted: bool = False) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in KERNELS.items():
            patch.setattr(torch, name, kernel)
        patch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
        with ddp.setup(make_plan(sizes, effective)) as ctx:
            model = ctx.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(make_model()))
            found = []
            loader = DataLoader(Samples(length), batch_sampler=ctx.batch_sampler(length))
            for step in ctx.steps(loader, count=(lambda batch: counts(batch[1])) if counted else None):
                for inputs, indices in step:
                    outputs = model(inputs)
                    step.backward(mean_of_counted(outputs, indices) if counted else losses(outputs).mean())
                found.append(gradient(model).clone())
                model.zero_grad()
            assert not any("forward" in vars(norm) for norm in norms_of(model))
            return found, statistics(model)


def plain(sizes: tuple[int, ...], effective: int, length: int) -> list[int]:
    """Train BatchNorms with one value per sample. Return the number of samples on the rank with the statistics."""
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        model = ctx.wrap(make_model(flat=True))
        own, loader = [], DataLoader(Samples(length), batch_sampler=ctx.batch_sampler(length, shuffle=True))
        for step in ctx.steps(loader):
            for inputs, _ in step:
                step.backward(losses(model(inputs)).mean())
                own.append((inputs, bool(step.weight)))
            model.zero_grad()
        reference = make_model(flat=True)
        for inputs, counted in own:
            if counted:
                reference(inputs)
        if ctx.rank == 0:
            for ours, theirs in zip(statistics(model), statistics(reference), strict=True):
                torch.testing.assert_close(ours, theirs)
        return [len(inputs) if counted else 0 for inputs, counted in own]


def left_in_a_stand_in() -> list[bool]:
    with ddp.setup(make_plan((8, 0), 8)) as ctx:
        model = ctx.wrap(make_model(flat=True))
        loader = DataLoader(Samples(16), batch_sampler=ctx.batch_sampler(16))
        found = []
        with suppress(ArithmeticError):
            for step in ctx.steps(loader):
                for inputs, _ in step:
                    model(inputs)
                    found += ["forward" in vars(norm) for norm in norms_of(model)]
                    raise ArithmeticError
        return [*found, *("forward" in vars(norm) for norm in norms_of(model))]


def refusals() -> list[str]:
    found = []
    with ddp.setup(make_plan((0, 8), 8)) as ctx:
        with pytest.raises(InputError) as caught:
            ctx.wrap(make_model())
        found.append(str(caught.value))
    return found


SYNCHRONISED = {
    "a share of 0 behind": ((8, 0), 8, 24),
    "a last batch of one share": ((5, 3), 8, 27),
    "unlike shares": ((2, 6), 16, 45),
}
PLAIN = {
    "a share of 1": ((6, 2), 8, 29),
    "no share": ((8, 0), 16, 44),
    "two forwards": ((5, 3), 16, 59),
}
SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: partial(synchronised, *job) for name, job in SYNCHRONISED.items()},
    **{f"{name}, counted": partial(synchronised, *job, counted=True) for name, job in SYNCHRONISED.items()},
    **{f"{name}, plain": partial(plain, *job) for name, job in PLAIN.items()},
    "left": left_in_a_stand_in,
    "refusals": refusals,
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("counted", [False, True], ids=["samples", "counted"])
@pytest.mark.parametrize("name", SYNCHRONISED)
def test_synchronised_ones_see_every_sample_once(ranks, name, counted):
    """The norms counted a sample of weight 0 that a rank without a share ran. The gradient was 6% to 100% off."""
    sizes, effective, length = SYNCHRONISED[name]
    gradients, statistic = on_one_device(length, sum(sizes), effective, counted=counted)
    for found, buffers in found_by(ranks, f"{name}, counted" if counted else name):
        for got, expected in zip(found, gradients, strict=True):
            assert relative_error(got, expected) < EXACT
        for got, expected in zip(buffers, statistic, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", PLAIN)
def test_no_rank_trains_a_norm_on_one_sample(ranks, name):
    """torch's "Expected more than 1 value per channel" came at the end of the first epoch."""
    length = PLAIN[name][2]
    both = found_by(ranks, f"{name}, plain")
    assert sum(map(sum, both)) == length
    assert 1 not in itertools.chain(*both)
    assert 0 in itertools.chain(*both) or name == "a share of 1"


def test_a_loop_that_is_left_leaves_no_norm_changed(ranks):
    both = found_by(ranks, "left")
    assert both == [[False, False], [True, False]]  # of a rank with samples, and of a rank without


def test_rank_0_keeps_the_statistics_and_needs_samples(ranks):
    for (message,) in found_by(ranks, "refusals"):
        assert "from rank 0 alone. Rank 0 has no samples of (0, 8). Expected at least one" in message
