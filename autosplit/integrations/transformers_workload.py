"""Create a `Workload` from a transformers Trainer, to tune it before training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from autosplit.errors import InputError
from autosplit.integrations.loss_mean import count_by
from autosplit.workload.workload import Workload


def workload(trainer: Any) -> Workload:
    """Create a workload from a Trainer's model, data, collator, loss, optimizer and precision, for `tune`.

        plan = autosplit.tune(autosplit.integrations.transformers.workload(trainer), effective_batch_size=512)

    Args:
        trainer: A Trainer, with or without a plan. It is not changed.

    Returns:
        The workload. Its sample batch contains the first samples of the training data set, collated.

    Raises:
        InputError: There is no training data set, or it has no length.
    """
    dataset = trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__len__") or not len(dataset):
        raise InputError(
            f"The Trainer's train_dataset is {type(dataset).__name__}. Expected a dataset that returns "
            "samples by index, because autosplit makes a sample batch from them. Pass train_dataset=.",
        )
    share, trainer.share = getattr(trainer, "share", None), None  # get the Trainer's loader without the plan
    try:
        loader: Any = trainer.get_train_dataloader()
    finally:
        trainer.share = share
    rows: Any = loader.dataset
    samples = [rows[index] for index in range(min(len(rows), _SAMPLES))]
    optimizer_class, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    precision = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "none"
    return Workload(
        trainer.model,
        dict(loader.collate_fn(samples)),
        compute_loss=partial(_loss_by, trainer) if _has_own_loss(trainer) else _loss_of,
        optimizer=partial(optimizer_class, **options),
        precision=precision,
    )


_SAMPLES = 8
"""Number of samples in the sample batch."""


def _loss_of(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    outputs = model(**batch)
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss


def _has_own_loss(trainer: Any) -> bool:
    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    return own or trainer.label_smoother is not None or trainer.compute_loss_func is not None


def _loss_by(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that a Trainer computes for a batch if the batch is the whole optimizer step."""
    labels = batch.get("labels")
    given = {}
    if trainer.compute_loss_func is not None and labels is not None:
        shifted = "shifted labels" if trainer._loss_shifts_labels else "labels"
        given["num_items_in_batch"] = torch.tensor(count_by(shifted, batch), device=labels.device)
    loss: torch.Tensor = trainer.compute_loss(model, dict(batch), **given)
    return loss
