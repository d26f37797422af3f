"""Detect ops that a GPU runs inside one cuDNN call: the ops of a recurrent layer, which the CPU runs separately.

An LSTM over 100 positions is thousands of ops on the CPU. For each position, cuDNN launches its matrix
products. One more kernel after each product computes the gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.sim.op_calls import OpCall
from autosplit.sim.op_cost import OpCost
from autosplit.torch_versions import private

aten = torch.ops.aten

LONG = 4096
"""Inner dimension (samples times positions) that is long enough for a product to reach its full rate."""


@dataclass(frozen=True)
class RecurrentOp:
    """An op of a recurrent layer. `begins` marks the first op of its forward or backward, which the host starts."""

    call: OpCall
    begins: bool


def recurrent_costs(op: RecurrentOp, costs: Iterable[OpCost]) -> Iterator[OpCost]:
    """Yield cuDNN's kernels for an op with known costs: each product, and a kernel for its gates.

    cuDNN sums the gradient of weights over all positions at once.
    """
    if op.begins:
        yield OpCost(0, 0, "float32", part=op.call.part)
    for cost in costs:
        rows, columns, inner, count = cost.product
        if cost.kind not in ("matmul", "batched"):
            continue
        size = {"float64": 8, "float32": 4}.get(cost.rate, 2)
        # cuDNN's recurrent layers use TF32 by default, like its convolutions (torch.backends.cudnn.allow_tf32).
        cost = replace(cost, part="none", rate="tf32" if cost.rate == "float32" else cost.rate)
        # The weight gradient multiplies transposed operands. Detect it by stride: its sizes change with the batch.
        of_weights = op.call.part == "backward" and op.call.func is aten.mm.default and op.call.args[0].stride[0] == 1
        if of_weights:
            read_bytes = count * inner * (rows + columns) * size
            cost = replace(cost, nbytes=read_bytes, product=(rows, columns, LONG, count))
        yield cost
        gates = rows * inner if of_weights else rows * max(columns, inner)
        yield OpCost(0, 2 * count * gates * size, cost.rate, part="none")  # read and written once


class RecurrentCalls:
    """Find the running call of a recurrent layer: by hooks in the forward, by autograd sequence numbers in backward."""

    def __init__(self) -> None:
        self._begun_at: int | None = None
        self._spans: list[tuple[int, int]] = []
        self._last: object = None

    def op(self, call: OpCall) -> OpCall | RecurrentOp:
        """Return a call as a RecurrentOp if it belongs to a recurrent layer, or unchanged."""
        running = self._running(call)
        if running is None:
            return call
        begins, self._last = running != self._last, running
        return RecurrentOp(call, begins)

    def _running(self, call: OpCall) -> object:
        if self._begun_at is not None:
            return self._begun_at
        if call.part != "backward" or not self._spans:
            return None
        node: Any = torch._C._current_autograd_node()
        number = -1 if node is None else private(node, "_sequence_nr")()
        return next((span for span in self._spans if span[0] <= number < span[1]), None)

    def _begin(self, *_: Any) -> None:
        self._begun_at = torch._C._autograd._get_sequence_nr()

    def _end(self, *_: Any) -> None:
        if self._begun_at is not None:
            self._spans.append((self._begun_at, torch._C._autograd._get_sequence_nr()))
        self._begun_at = None

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watch the recurrent layers of models, which may be replicated."""
        with ExitStack() as hooks:
            for module in modules:
                for layer in module.modules():
                    if isinstance(layer, nn.RNNBase):
                        hooks.callback(layer.register_forward_pre_hook(self._begin).remove)
                        hooks.callback(layer.register_forward_hook(self._end, always_call=True).remove)
            yield
