"""Count and check the collectives of torch.distributed that the user's code runs.

The ranks of a plan have unequal numbers of samples, so code for equal batches fails at once. gloo would abort the
process without a clear error. A loss that runs a collective may already be normalised over the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from autosplit.errors import InputError

_NAMES = ("all_gather", "all_gather_into_tensor", "all_reduce")
_count = 0


def collectives_so_far() -> int:
    """Return the number of collectives of the user's code, counted inside `user_collectives`."""
    return _count


@contextmanager
def user_collectives(*, compares: bool) -> Iterator[None]:
    """Count the collectives that the user's code runs in the `with` block.

    Args:
        compares: Whether the ranks first compare the sizes of their tensors. Only for gloo, and for `all_gather` with
            every backend: NCCL would wait forever, or return another rank's memory.
    """
    originals = {name: getattr(dist, name) for name in _NAMES}
    replaced = {
        name: _watched(name, one, originals["all_gather"] if compares else None) for name, one in originals.items()
    }
    for name, watched in replaced.items():
        setattr(dist, name, watched)
    try:
        yield
    finally:
        for name, watched in replaced.items():
            if getattr(dist, name) is watched:
                setattr(dist, name, originals[name])


def _watched(name: str, original: Any, all_gather: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _is_users(inspect.currentframe()):
            _count_one()
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            if all_gather and dist.get_rank(group) >= 0 and (name == "all_gather" or dist.get_backend(group) == "gloo"):
                _require_expected_sizes(name, given, group, all_gather)
        return original(*args, **kwargs)

    return watched


def _count_one() -> None:
    global _count  # noqa: PLW0603  # the replaced functions belong to the module torch.distributed
    _count += 1


def _is_users(frame: Any) -> bool:
    caller = str(frame.f_back.f_globals.get("__name__")) if frame is not None and frame.f_back is not None else ""
    return caller.startswith("torch.distributed.nn.") or not caller.startswith(("torch.", "autosplit."))


def _require_expected_sizes(name: str, given: Any, group: Any, all_gather: Any) -> None:
    count = dist.get_world_size(group)
    tensor = given["input_tensor" if name == "all_gather_into_tensor" else "tensor"]
    room = given["tensor_list"] if name == "all_gather" else [tensor] * count
    if count == 1 or len(room) != count:  # torch reports a list of the wrong length
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
        f"{name} received tensors of unequal sizes: {held} (elements). The plan gives the ranks unequal numbers of "
        "samples, so each rank would have to allocate outputs of these sizes. Call ctx.all_gather(tensor) instead. It "
        "gathers unequal numbers of rows, with gradients.",
    )
