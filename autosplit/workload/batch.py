"""Cut a batch, and resize a batch. See Note [What is cut] in `autosplit.workload.samples`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autosplit.devices.transfer import active_placement, transfer
from autosplit.errors import WorkloadError
from autosplit.workload.samples import Layout, batch_size_of, uncuttable
from autosplit.workload.tree import Whole, children_of, leaves_of, map_tensors, with_children


def unmarked(tree: Any) -> Any:
    """Return a batch without `Whole` markers, for a plain module."""
    if not any(isinstance(leaf, Whole) for leaf in leaves_of(tree)):
        return tree
    return map_tensors(lambda tensor: tensor, tree)


def _map_samples(
    layout: Layout,
    tree: Any,
    of_tensor: Callable[[Tensor], Tensor],
    of_items: Callable[[list[Any]], list[Any]],
    of_others: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Apply a function to each tensor and each list of samples.

    Args:
        of_others: Applied to tensors without samples, and to the values of `Whole` markers.
    """

    def walk(node: Any, level: int) -> Any:
        if isinstance(node, Whole):
            return of_others(node.value)
        if layout.is_list(node, level):
            items = of_items(list(node))
            return items if type(node) is list else type(node)(items)
        children = children_of(node)
        if children is not None:
            return with_children(node, [walk(item, level + 1) for _, item in children])
        if not isinstance(node, Tensor):
            return node
        return of_tensor(node) if layout.is_cut(node) else of_others(node)

    return walk(tree, 0)


def chunk(
    tree: Any, sizes: tuple[int, ...], dim: int = 0, size: int | None = None, *, layout: Layout | None = None
) -> list[Any]:
    """Cut a batch into one batch per size. Tensors are views. Each batch contains all parts without samples.

    Args:
        layout: Decides which parts contain samples. Default: the layout of a batch of `size` samples.

    Raises:
        WorkloadError: A part of the batch cannot be cut.
    """
    if len(sizes) == 1 and size is not None:
        return [unmarked(tree)]
    size = batch_size_of(tree, dim) if size is None else size
    assert sum(sizes) == size, (sizes, size)
    if layout is None:
        layout = Layout.of(tree, size, dim)
        if len(sizes) > 1 and (why := uncuttable(tree, "batch", layout)):
            raise WorkloadError(why)
    ends = [*itertools.accumulate(sizes)]
    return [
        _map_samples(
            layout,
            tree,
            lambda tensor, a=end - n, n=n: tensor.narrow(dim, a, n),  # type: ignore[misc]
            lambda items, a=end - n, b=end: items[a:b],  # type: ignore[misc]
        )
        for end, n in zip(ends, sizes, strict=True)
    ]


def placed_on(device: int, tree: Any) -> Any:
    """Move a batch to a device of the active placement, and remove its `Whole` markers."""
    placement = active_placement()
    assert placement is not None

    def move(tensor: Tensor) -> Tensor:
        source = placement.device_of(tensor)
        return tensor if source == device else transfer(tensor, source, device, "input")

    return map_tensors(move, tree)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def resize(tree: Any, n: int, dim: int = 0) -> Any:
    """Return a batch of `n` samples that repeats the samples of a sample batch in order.

    Tensors without samples are marked as `Whole`, because at a different size, a ``(T, T)`` mask may look like a batch.
    """
    size = batch_size_of(tree, dim)

    def repeat(tensor: Tensor) -> Tensor:
        index = torch.arange(n, device=tensor.device).remainder_(size)
        repeated = tensor.detach().index_select(dim, index)
        layout = _CHANNELS_LAST.get(tensor.dim()) if tensor.layout is torch.strided else None
        if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
            return repeated
        return repeated.contiguous(memory_format=layout)  # the memory format decides which kernels run

    layout = Layout.of(tree, size, dim)
    return _map_samples(layout, tree, repeat, lambda items: [items[i % size] for i in range(n)], Whole)
