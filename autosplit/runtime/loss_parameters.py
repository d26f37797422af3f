"""Refuse a loss that trains parameters outside of the model, such as the class weights of ArcFace.

autosplit would count neither their gradients nor their optimizer state. BalancedDataParallel would not replicate them,
and DDP would not synchronise them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autosplit.errors import WorkloadError
from autosplit.text import counted_text
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload, modules_of

INTO_THE_MODEL = (
    "Make the loss a part of the model: a module whose forward(inputs, targets) returns self.loss(self.net(inputs), "
    "targets), with compute_loss=lambda model, batch: model(*batch)"
)
"""How a loss with trained parameters is planned and trained."""


@dataclass
class OutsideParameters:
    """Look for trained tensors outside of the model in the first two steps, and not in later steps.

    A leaf tensor that is not a Parameter counts if both steps have it. A loss may also make new leaves in each step, as
    a gradient penalty does.
    """

    _steps: int = 0
    _before: list[tuple[weakref.ref[Tensor], Tensor | None]] = field(default_factory=list)

    def refuse(self, loss: Tensor, workload: Workload, modules: tuple[nn.Module, ...], batch: Any) -> None:
        """Raise WorkloadError if the loss depends on a trained tensor outside of the modules and the batch."""
        if self._steps == 2:
            return
        self._steps += 1
        known = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        known.update(map(id, tensors_of(batch)))
        outside = [leaf for leaf in _leaves_of(loss) if id(leaf) not in known]
        earlier = [ref() for ref, _ in self._before]
        found = [leaf for leaf in outside if isinstance(leaf, nn.Parameter) or any(leaf is one for one in earlier)]
        if not found:
            self._before = [(weakref.ref(leaf), leaf.grad) for leaf in outside]
            return
        for ref, gradient in self._before:
            if (leaf := ref()) is not None:
                leaf.grad = gradient
        given = {id(parameter) for module in modules_of(workload) for parameter in module.parameters()}
        advice = "Use the model that compute_loss or loss_fn gets as its argument, because autosplit trains a copy"
        if not any(id(leaf) in given for leaf in found):
            advice = f"{INTO_THE_MODEL}. If it is not trained, call requires_grad_(False) on it"
        raise WorkloadError(
            f"The loss trains {counted_text(len(found), 'tensor')} outside of the model, the first of shape "
            f"{tuple(found[0].shape)}. Expected all trained parameters in the model. {advice}.",
            code="loss-trains-outside",
        )


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        nodes.extend(following for following, _ in node.next_functions)
