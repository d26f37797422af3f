"""BatchNorms of ranks with unlike shares: whose statistics are kept, and micro-batches that must reach none.

A rank without a share runs other ranks' samples, because the gradients meet in its backward. A SyncBatchNorm would
count them a second time, a BatchNorm of rank 0 would put them in the statistics that all ranks get.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.errors import InputError
from autosplit.torch_versions import BATCH_NORMS


class BatchNormWarning(UserWarning):
    """A model's running statistics come from a rank that sees fewer samples than another."""


def doubt_batchnorms(
    model: nn.Module,
    rank: int,
    batch_sizes: Sequence[int],
    are: str = "are",
    remedy: str = "pass sync_batchnorm=True (GPUs)",
) -> None:
    """Warn where DDP takes running statistics from a rank with fewer samples than another; refuse one without any."""
    norms = ((name, part) for name, part in model.named_modules() if isinstance(part, BATCH_NORMS))
    kept = [norm for norm in norms if norm[1].track_running_stats and not isinstance(norm[1], nn.SyncBatchNorm)]
    if not kept:
        return
    said = (
        f"the running statistics of {len(kept)} BatchNorms ({kept[0][0] or 'the model'} is the first) {are} those of "
        "rank 0 alone, which has"
    )
    if not batch_sizes[0] and any(part.training for _, part in kept):
        raise InputError(
            f"{said} no samples of {tuple(batch_sizes)}; expected some; {remedy}, or give rank 0 a share",
            code="batchnorm-rank-without-samples",
        )
    if rank == 0 and batch_sizes[0] < max(batch_sizes):
        said = f"{said} {batch_sizes[0]} samples of {sum(batch_sizes)}; {remedy}, or tune with the device first that "
        warnings.warn(f"{said}takes the most", BatchNormWarning, stacklevel=3)


@contextmanager
def uncounted(models: Iterable[nn.Module], *, stands_in: bool) -> Iterator[None]:
    """Keep a micro-batch out of the models' BatchNorms.

    It `stands_in` where its samples are other ranks'. Where not, they belong to the batch and to its statistics, and
    only their gradient is nothing.
    """
    forward = _stand_in if stands_in else _silent
    norms: list[Any] = [part for model in models for part in model.modules() if isinstance(part, BATCH_NORMS)]
    replaced = [(norm, partial(forward, norm)) for norm in norms]
    for norm, instead in replaced:
        norm.forward = instead
    try:
        yield
    finally:
        for norm, instead in replaced:
            if norm.__dict__.get("forward") is instead:  # a loop that is collected late ends no other's
                del norm.forward


def silence(gradient: Tensor) -> Tensor:
    """Return a gradient of what counts for nothing in a model with SyncBatchNorms, where it need not be 0.

    Samples that count for nothing in the loss still are in the statistics of those that do. But where a mean over
    nothing, 0/0, has made it NaN, it is 0.
    """
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def silenced(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let a backward send zeros, whatever its loss is: the mean over no labels is 0/0, and 0 times that no zero."""
    with ExitStack() as hooks:
        for model in models:
            hook = silence if has_synchronised(model) else torch.zeros_like
            for parameter in filter(attrgetter("requires_grad"), model.parameters()):
                hooks.enter_context(parameter.register_hook(hook))
        yield


def has_synchronised(model: nn.Module) -> bool:
    """Tell whether ranks meet in every forward and every backward of a model, in its SyncBatchNorms."""
    return any(isinstance(norm, nn.SyncBatchNorm) for norm in model.modules())


def _stand_in(norm: Any, inputs: Tensor) -> Tensor:
    """Normalise by the running statistics; a SyncBatchNorm takes part in what the ranks do with a count of 0."""
    if not norm.training or not (norm.track_running_stats or isinstance(norm, nn.SyncBatchNorm)):
        return _own_forward(norm, inputs)
    nothing: Tensor | float = 0.0
    if isinstance(norm, nn.SyncBatchNorm):
        # The others send statistics of single precision at least.
        empty = inputs[:0].float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs[:0]
        nothing = _own_forward(norm, empty).sum()  # in the graph: its backward meets the others', too
    if norm.running_mean is None:
        return inputs + nothing
    # Clones: another forward before the backward may move these.
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    return F.batch_norm(inputs, mean, var, norm.weight, norm.bias, eps=norm.eps) + nothing


def _silent(norm: Any, inputs: Tensor) -> Tensor:
    """Send numbers to the other ranks in the backward, whatever comes: the loss of nothing may be 0/0."""
    outputs = _own_forward(norm, inputs)
    if isinstance(norm, nn.SyncBatchNorm) and outputs.requires_grad:
        outputs.register_hook(silence)
    return outputs


def _own_forward(norm: Any, inputs: Tensor) -> Tensor:
    outputs: Tensor = type(norm).forward(norm, inputs)
    return outputs
