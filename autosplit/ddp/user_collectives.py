"""Count and check the collectives of torch.distributed that the user's code runs.

The ranks of a plan have unequal numbers of samples, so an `all_gather` for equal batches is wrong. A loss that runs a
collective may already be normalised over the ranks, as in DETR.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed as dist

from autosplit.autograd_graph import graph_nodes
from autosplit.errors import InputError
from autosplit.parallel.step_listener import StepListener

_NAMES = ("all_gather", "all_gather_into_tensor", "all_reduce")
_count = 0


@contextmanager
def user_collectives(*, compares: bool) -> Iterator[None]:
    """Count the collectives that the user's code runs in the `with` block.

    Args:
        compares: Whether the ranks compare the sizes of their tensors before `all_gather`. NCCL would wait forever, or
            return another rank's memory.
    """
    originals = {name: getattr(dist, name) for name in _NAMES}
    replaced = {name: _watched(name, one, compares=compares) for name, one in originals.items()}
    for name, watched in replaced.items():
        setattr(dist, name, watched)
    try:
        yield
    finally:
        for name, watched in replaced.items():
            if getattr(dist, name) is watched:
                setattr(dist, name, originals[name])


def _watched(name: str, original: Any, *, compares: bool) -> Any:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _is_users(inspect.currentframe()):
            _count_one()
            if compares and name == "all_gather":
                _require_expected_sizes(original, *args[:3], **kwargs)
        return original(*args, **kwargs)

    return watched


def _count_one() -> None:
    global _count  # noqa: PLW0603  # the replaced functions belong to the module torch.distributed
    _count += 1


def _is_users(frame: Any) -> bool:
    caller = str(frame.f_back.f_globals.get("__name__")) if frame is not None and frame.f_back is not None else ""
    return caller.startswith("torch.distributed.nn.") or not caller.startswith(("torch.", "autosplit."))


def _require_expected_sizes(
    all_gather: Any, tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **_: Any
) -> None:
    count, room = dist.get_world_size(group), tensor_list
    if count <= 1 or len(room) != count:  # not a rank of the group, or torch reports a list of the wrong length
        return
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device
    own = torch.tensor([tensor.numel(), *(one.numel() for one in room)], device=device)
    found = [torch.empty_like(own) for _ in range(count)]
    all_gather(found, own, group=group)
    numbers = torch.stack(found).tolist()
    sent = [sizes[0] for sizes in numbers]
    if all(sizes[1:] == sent for sizes in numbers):
        return
    held = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sent))
    raise InputError(
        f"all_gather received tensors of unequal sizes: {held} (elements). The plan gives the ranks unequal numbers of "
        "samples, so each rank would have to allocate outputs of these sizes. Call ctx.all_gather(tensor) instead. It "
        "gathers unequal numbers of rows, with gradients.",
    )


class LossCollectives(StepListener):
    """Count the collectives that the user's code runs between the draw of a micro-batch and its backward.

    Args:
        counts: Whether to count them here, because `autosplit.ddp.setup` does not.
    """

    def __init__(self, *, counts: bool = False) -> None:
        self._is_done = False
        self._counting = ExitStack()
        if counts:
            self._counting.enter_context(user_collectives(compares=False))
        self.begin()

    def begin(self) -> None:
        """Start to count the collectives of a micro-batch that was just drawn."""
        self._before = _count

    def draw(self, is_last: bool) -> None:  # noqa: ARG002
        """Start to count the collectives of a micro-batch."""
        self.begin()

    def first_loss(self, loss: torch.Tensor, samples: int, weight: float) -> None:  # noqa: ARG002
        """Examine the first loss of a step of `ctx.steps`."""
        self.refuse(loss, weight, "ctx.steps")

    def refuse(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Raise InputError if the first loss ran a collective, unless its weight is 1 or it gathers with gradients.

        Args:
            where: The function with `loss_scope=`, for the message.

        Raises:
            InputError: The loss may be normalised over the ranks already.
        """
        is_done, self._is_done = self._is_done, True
        self._counting.close()
        if not is_done and _count > self._before and abs(weight - 1) > 1e-9 and not _gathers(loss):
            raise InputError(
                "The ranks ran a collective before the backward of a micro-batch's loss. A loss may divide by a sum "
                f"over the ranks, such as the boxes in DETR. Then its weight of {weight:.3g} would normalise it "
                f"twice. Pass loss_scope='ranks' to {where}. If the loss is this rank's own mean, pass "
                "loss_scope='sample'.",
            )


def _gathers(loss: torch.Tensor) -> bool:
    for node in itertools.islice(graph_nodes(loss.grad_fn), 200):
        name = type(node).__name__.lower()
        if ("gather" in name and not name.startswith("gatherbackward")) or "allreduce" in name:
            return True
    return False
