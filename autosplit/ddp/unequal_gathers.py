"""Refuse torch's own all_gather of unequal sizes: gloo aborts the process, and the other ranks learn no reason.

The ranks of a plan have unequal numbers of samples, so code that was written for equal ranks meets this at once.
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


@contextmanager
def unequal_gathers_refused() -> Iterator[None]:
    """Compare the sizes of the ranks before each `torch.distributed.all_gather` of the user's code."""
    original = dist.all_gather

    @functools.wraps(original)
    def compared(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        # autosplit's own exchanges have equal sizes.
        caller = getattr(inspect.currentframe(), "f_back", None)
        is_own = caller is not None and str(caller.f_globals.get("__name__")).startswith("autosplit.")
        if not is_own and not torch.compiler.is_compiling() and dist.get_rank(group) >= 0:
            _require_expected_sizes(original, tensor_list, tensor, group)
        return original(tensor_list, tensor, group=group, async_op=async_op)

    dist.all_gather = compared
    try:
        yield
    finally:
        if dist.all_gather is compared:
            dist.all_gather = original


def _require_expected_sizes(all_gather: Any, tensor_list: Any, tensor: Any, group: Any) -> None:
    """Raise InputError on all ranks if any of them sends another size than any other expects."""
    count = dist.get_world_size(group)
    if count == 1 or len(tensor_list) != count:  # torch reports a list of the wrong length
        return
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device
    own = torch.tensor([tensor.numel(), *(one.numel() for one in tensor_list)], device=device)
    found = [torch.empty_like(own) for _ in range(count)]
    all_gather(found, own, group=group)
    numbers = torch.stack(found).tolist()
    sent = [sizes[0] for sizes in numbers]
    if all(sizes[1:] == sent for sizes in numbers):
        return
    held = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sent))
    raise InputError(
        f"all_gather received tensors of unequal sizes: {held} (elements). Expected each rank to allocate the sizes "
        "of the others: the plan gives ranks unequal numbers of samples. Call ctx.all_gather(tensor), which gathers "
        "unequal numbers of rows, with gradients."
    )
