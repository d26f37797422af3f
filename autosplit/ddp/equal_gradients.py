"""Detect gradients that differ between the ranks, because nothing synchronises them.

DDP synchronises the parameters that had `requires_grad` when it wrapped the model, if the wrapper ran the forward. It
leaves out a loss with parameters, layers that were unfrozen or added later, and a forward of `wrapper.module`. Each
rank then trains a different model.

So the ranks compare a checksum of their gradients after the last backward of the first optimizer step. They compare
again when other parameters have a gradient. The other steps only read which parameters have one:

    step                      0      1      2      3 (the backbone is unfrozen)   4
    gradients of              head   head   head   head, backbone                 head, backbone
    compared over the ranks   yes    no     no     yes                            no
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from autosplit.ddp.device import exchange_device, gathered, told_by_all
from autosplit.ddp.rank_models import Models
from autosplit.errors import InputError
from autosplit.parallel.loss_graph import graph_nodes
from autosplit.parallel.step_listener import StepListener

_CHUNK = 2**22
"""Elements that are summed at a time, because torch copies them to int64."""

Place = Literal["unwrapped", "outside", "late", "wrapped"]
"""A parameter's place: no model is wrapped, outside of those models, unfrozen or added after wrapping, or wrapped."""

Described = tuple[str, Place]
"""A parameter's name for messages, and its place."""


class GradientComparison:
    """Compare the ranks' gradients once for each set of parameters that have one.

    Args:
        advice: What to do about a gradient that differs, by the parameter's place.
    """

    def __init__(self, advice: Mapping[Place, str]) -> None:
        self._advice = advice
        self._compared: set[int] = set()

    def compare(
        self, parameters: Iterable[Tensor], describe: Callable[[Tensor], Described], step: str, device: torch.device
    ) -> None:
        """Compare the gradients, unless the same parameters had one in an earlier comparison. All ranks call this.

        Args:
            describe: Returns a parameter's name and place. Called only if the gradients are compared.
            step: The optimizer step, for the message.
            device: The device of this rank.

        Raises:
            InputError: A parameter's gradient differs between the ranks, or some ranks have none.
        """
        found = [one for one in parameters if one.grad is not None]
        key = hash(tuple(map(id, found)))
        if key in self._compared:
            return
        self._compared.add(key)
        rows = [(*describe(one), _checksum(one.grad)) for one in found if not _is_shard(one)]
        digest = int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:8], "big", signed=True)
        digests = gathered(torch.tensor([digest], device=exchange_device(device)))
        if any(int(other) != digest for other in digests):
            self._refuse(told_by_all(rows), step)

    def _refuse(self, everyones: list[list[tuple[str, Place, int]]], step: str) -> None:
        by_name = [{name: checksum for name, _, checksum in rows} for rows in everyones]
        union = {name: place for rows in everyones for name, place, _ in rows}
        differs = [name for name in union if len({one.get(name) for one in by_name}) > 1]
        others = f" (the first of {len(differs)})" if len(differs) > 1 else ""
        raise InputError(
            f"The gradient of {differs[0]}{others} differs between the ranks in {step}, so each rank would train a "
            f"different model. {self._advice[union[differs[0]]]}",
            code="gradients-differ",
        )


class EqualGradients(StepListener):
    """Compare the ranks' gradients in `Context.steps`."""

    def __init__(self, models: Models, device: torch.device) -> None:
        self._models, self._device = models, device
        self._comparison = GradientComparison(_ADVICE)
        self._parameters: dict[Tensor, Described] = {}
        self._leaves: dict[Tensor, None] = {}
        self._is_first = True
        self._index = 0

    def begin_loop(self) -> None:
        """Look for parameters again in the next step, because layers may be new."""
        self._is_first = True

    def begin_step(self, index: int) -> None:
        """Begin optimizer step `index`."""
        self._index = index

    def begin_backward(self, loss: Tensor) -> None:
        """Find the parameters outside of the models in the graph of the loss, in the first step of a loop."""
        if self._is_first:
            nodes = (node for node in graph_nodes(loss.grad_fn) if type(node).__name__ == "AccumulateGrad")
            self._leaves |= dict.fromkeys(node.variable for node in nodes)

    def finish(self, num_samples: float) -> None:  # noqa: ARG002
        """Compare the gradients after the last backward."""
        if self._is_first:
            self._is_first = False
            self._parameters = dict(_described(self._models, self._leaves))
            self._leaves = {}
        describe = self._parameters.__getitem__
        self._comparison.compare(self._parameters, describe, f"optimizer step {self._index}", self._device)


_ADVICE: dict[Place, str] = {
    "unwrapped": "No model was wrapped. Call model = ctx.wrap(model) before the loop, and train what it returns.",
    "outside": "DDP does not synchronise it. Make it a part of the model before ctx.wrap, or wrap its module as well: "
    "loss_fn = ctx.wrap(loss_fn).",
    "late": "It was frozen or missing when ctx.wrap wrapped the model. Wrap the model again after unfreezing or adding "
    "layers: model = ctx.wrap(net).",
    "wrapped": "Its model was not called through the wrapper. Call the wrapper that ctx.wrap returned, not "
    "wrapper.module or its methods. Call such a method from the model's forward.",
}


def _described(models: Models, leaves: Iterable[Tensor]) -> Iterator[tuple[Tensor, Described]]:
    known: set[int] = set()
    for number, model in enumerate(models.wrapped):
        prefix = f"model {number}: " if number else ""
        for name, parameter in model.module.named_parameters():
            known.add(id(parameter))
            yield parameter, (f"{prefix}{name}", "wrapped" if name in model.trained else "late")
    outside = [leaf for leaf in leaves if id(leaf) not in known]
    place: Place = "outside" if models.wrapped or models.sharded else "unwrapped"
    for number, leaf in enumerate(outside):
        yield leaf, (describe_outside(number, leaf), place)


def describe_outside(number: int, parameter: Tensor) -> str:
    """Describe a parameter without a name."""
    return f"tensor {number} of shape {tuple(parameter.shape)} outside of the wrapped models"


def _is_shard(parameter: Tensor) -> bool:
    """Return whether each rank has another part of a parameter: a DTensor, or a parameter of FSDP1."""
    return any(hasattr(parameter, name) for name in ("device_mesh", "_fsdp_flattened", "_is_flat_param"))


def _checksum(gradient: Tensor | None) -> int:
    """Return the sum of a gradient's bits as integers, which does not depend on the order of the sum."""
    assert gradient is not None, "`compare` selects parameters with a gradient"
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    parts = values.reshape(-1).view(bits).split(_CHUNK)
    return int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()) if values.numel() else 0
