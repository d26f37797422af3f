"""Call a model with a batch, and compute the loss from its outputs if no loss function is given."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autosplit.devices.transfer import HOST, active_placement
from autosplit.errors import WorkloadError
from autosplit.workload.batch import map_tensors, placed_on, tensors_of, unmarked
from autosplit.workload.models import Models


def call_model(model: Any, inputs: Any) -> Any:
    """Call a model with a tensor, with the items of a mapping as keywords, or with the items of a tuple or list.

    A wrapper gets the `Whole` markers. For a plain module, remove them.
    """
    if not isinstance(model, nn.DataParallel):
        inputs = unmarked(inputs)
    if isinstance(inputs, (Mapping, UserDict)):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def loss_rule(outputs: Any) -> str:
    """Return the rule for the loss of outputs: their field ``"loss"``, a ``"scalar"`` output, or the ``"mean"``."""
    if isinstance(_own_loss(outputs), Tensor):
        return "loss"
    return "scalar" if isinstance(outputs, Tensor) and outputs.dim() == 0 else "mean"


def _own_loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, (Mapping, UserDict)) else getattr(outputs, "loss", None)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss of outputs, see `loss_rule`. The mean is over all floating-point outputs with a gradient.

    Raises:
        WorkloadError: The outputs have no loss and no floating-point tensor with a gradient.
    """
    rule = loss_rule(outputs)
    if rule != "mean":
        loss: Tensor = _own_loss(outputs) if rule == "loss" else outputs
        return loss
    floating = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point() and tensor.requires_grad]
    if not floating:
        raise WorkloadError(
            f"The model returned a {type(outputs).__name__} without a loss or a floating-point tensor that has a "
            "gradient. Expected one of them. Pass loss_fn=(outputs, targets) -> loss, "
            "or compute_loss=(model, batch) -> loss.",
            code="model-output-without-loss",
        )
    first, *others = (tensor.float().mean() for tensor in floating)
    return sum(others, first) / len(floating)


def on_device_of(outputs: Any, targets: Any) -> Any:
    """Move the targets to the device of the outputs, and remove `Whole` markers for the user's loss function."""
    targets = unmarked(targets)
    first, placement = next(tensors_of(outputs), None), active_placement()
    if first is not None and placement is None:
        return map_tensors(lambda tensor: tensor.to(first.device), targets)
    home = HOST if first is None or placement is None else placement.device_of(first)
    return targets if home == HOST else placed_on(home, targets)


def on_first_device(batch: Any, models: Models) -> Any:
    """Move the batch to the first device of a step, and remove `Whole` markers for the user's code."""
    batch = unmarked(batch)
    if active_placement() is not None:
        return placed_on(0, batch)
    parameter = models.first_parameter
    return batch if parameter is None else map_tensors(lambda tensor: tensor.to(parameter.device), batch)
