"""Walk the autograd graph of a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def graph_nodes(*roots: Any) -> Iterator[Any]:
    """Yield the nodes of an autograd graph, each once and the nearest first.

    Args:
        roots: The `grad_fn` of tensors.
    """
    nodes = [node for node in dict.fromkeys(roots) if node is not None]
    seen = {None, *nodes}
    for node in nodes:  # the list grows in the loop, which gives breadth-first order
        yield node
        below = dict.fromkeys(other for other, _ in node.next_functions if other not in seen)
        seen.update(below)
        nodes += below


def graph_leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients the backward of a loss adds to, the nearest first."""
    return (node.variable for node in graph_nodes(loss.grad_fn) if type(node).__name__ == "AccumulateGrad")
