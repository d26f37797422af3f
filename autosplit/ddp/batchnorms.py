"""Keep BatchNorm statistics correct if ranks have different batch sizes, or no samples.

A rank without samples runs samples of other ranks with weight 0, because the ranks synchronise in its backward. A
SyncBatchNorm would count these samples twice. A BatchNorm of rank 0 would add them to the statistics that DDP
broadcasts to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.errors import InputError, warn_user
from autosplit.torch_versions import BATCH_NORMS


class BatchNormWarning(UserWarning):
    """A model's running statistics come from a rank with fewer samples than another rank."""


def doubt_batchnorms(
    model: nn.Module,
    rank: int,
    batch_sizes: Sequence[int],
    are: str = "are",
    remedy: str = "Pass sync_batchnorm=True (GPUs)",
) -> None:
    """Warn if the running statistics come from rank 0 and another rank has more samples.

    Raises:
        InputError: Rank 0 has no samples, and a BatchNorm is in training mode.
    """
    norms = ((name, part) for name, part in model.named_modules() if isinstance(part, BATCH_NORMS))
    tracked = [norm for norm in norms if norm[1].track_running_stats and not isinstance(norm[1], nn.SyncBatchNorm)]
    if not tracked:
        return
    text = (
        f"The running statistics of {len(tracked)} BatchNorms ({tracked[0][0] or 'the model'} is the first) {are} from "
        "rank 0 alone. Rank 0 has"
    )
    if not batch_sizes[0] and any(part.training for _, part in tracked):
        raise InputError(
            f"{text} no samples of {tuple(batch_sizes)}. Expected at least one. {remedy}, or give rank 0 samples.",
        )
    if rank == 0 and batch_sizes[0] < max(batch_sizes):
        text = f"{text} {batch_sizes[0]} samples of {sum(batch_sizes)}. {remedy}, or tune with the device that takes "
        warn_user(f"{text}the most samples listed first.", BatchNormWarning)


@contextmanager
def uncounted(models: Iterable[nn.Module], *, stands_in: bool) -> Iterator[None]:
    """Prepare the models' BatchNorms for the micro-batch of weight 0 that runs inside the `with` block.

    Args:
        stands_in: Whether the samples are another rank's, so the statistics must not count them. If False, the samples
            count in the statistics, but their gradient is 0.
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
            if norm.__dict__.get("forward") is instead:  # if this generator is closed late, keep a newer `forward`
                del norm.forward


def silence(gradient: Tensor) -> Tensor:
    """Replace NaN and infinities in a gradient with 0.

    In a model with SyncBatchNorms, samples of weight 0 affect the statistics of the other samples, so their gradient
    need not be 0. But a mean over no labels is 0/0, so the gradient may be NaN.
    """
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def silenced(models: Iterable[nn.Module]) -> Iterator[None]:
    """Make the gradients 0 in every backward inside the `with` block, even if the loss is NaN (0/0 without labels).

    With SyncBatchNorms only NaN and infinities become 0, see `silence`.
    """
    with ExitStack() as hooks:
        for model in models:
            hook = silence if has_synchronised(model) else torch.zeros_like
            for parameter in filter(attrgetter("requires_grad"), model.parameters()):
                hooks.enter_context(parameter.register_hook(hook))
        yield


def has_synchronised(model: nn.Module) -> bool:
    """Return whether a model has SyncBatchNorms, so the ranks synchronise in every forward and backward."""
    return any(isinstance(norm, nn.SyncBatchNorm) for norm in model.modules())


def _stand_in(norm: Any, inputs: Tensor) -> Tensor:
    """Normalise by the running statistics. A SyncBatchNorm joins the ranks' collectives with 0 samples."""
    if not norm.training or not (norm.track_running_stats or isinstance(norm, nn.SyncBatchNorm)):
        return _own_forward(norm, inputs)
    nothing: Tensor | float = 0.0
    if isinstance(norm, nn.SyncBatchNorm):
        # The other ranks send statistics in single precision or higher, and all dtypes must be equal.
        empty = inputs[:0].float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs[:0]
        nothing = _own_forward(norm, empty).sum()  # keep it in the graph, because its backward is a collective, too
    if norm.running_mean is None:
        return inputs + nothing
    # Clone, because another forward may update the statistics in place before the backward.
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    return F.batch_norm(inputs, mean, var, norm.weight, norm.bias, eps=norm.eps) + nothing


def _silent(norm: Any, inputs: Tensor) -> Tensor:
    """Run the norm, and send no NaN to the other ranks in the backward. A mean over no labels is 0/0."""
    outputs = _own_forward(norm, inputs)
    if isinstance(norm, nn.SyncBatchNorm) and outputs.requires_grad:
        outputs.register_hook(silence)
    return outputs


def _own_forward(norm: Any, inputs: Tensor) -> Tensor:
    outputs: Tensor = type(norm).forward(norm, inputs)
    return outputs
