"""End a process group while wrapped models still exist, by removing their references to the group."""

from __future__ import annotations

import atexit
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import InputError
from autosplit.torch_versions import use_module_alone

_outliving: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models whose group may outlive them, or exist until the interpreter exits."""

_backends: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The gloo backend of each process group."""


def keep_backend(group: Any) -> None:
    """Keep a Python reference to a group's gloo backend until the group's own Python object is gone.

    The backend then ends without the GIL. torch 2.6 ends a group with the GIL held, and waits for gloo's threads. If
    one of them frees the tensors of the last collective, it waits for the GIL: a deadlock. torch 2.11 and 2.13 had no
    deadlock without this function. A group without gloo has no backend for CPUs.
    """
    with suppress(AttributeError, RuntimeError):
        _backends[group] = group._get_backend(torch.device("cpu"))  # noqa: SLF001


def release_group_last(wrapped: nn.Module) -> None:
    """Make a DDP model drop its Python reference to the process group after its reducer. Ignore other models.

    Dropping the last reference to a group ends the group and waits for gloo's threads. The reducer's reference is
    dropped with the GIL held, and a gloo thread may be waiting for the GIL: a deadlock, in about one of thirty models
    (torch 2.13). A Python reference is dropped without the GIL. Attributes are deleted in the order of their
    assignment, so setting the group again moves it behind the reducer.

    At the interpreter's exit, remove the model's references, because a library's Trainer may keep them.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    group = wrapped.__dict__.pop("process_group")
    wrapped.process_group = group
    if wrapped not in _outliving:
        _outliving.add(wrapped)
        atexit.register(_end_group)


def part_from_group(wrapped: Any) -> None:
    """Remove all references of a wrapper to its process group, so the group ends when it is destroyed.

    Otherwise the group and its connections exist until the interpreter exits. If a gloo thread then frees a Python
    tensor, the process aborts (torch 2.13: "terminate called without an active exception", rarely, on a busy machine).
    """
    wrapped.reducer = wrapped.logger = None
    wrapped.process_group = None  # last, see `release_group_last`
    use_module_alone(wrapped)
    wrapped.register_forward_pre_hook(_forward_alone, with_kwargs=True, prepend=True)


def _forward_alone(wrapped: Any, inputs: Any, kwargs: Any) -> Any:
    if wrapped.training and torch.is_grad_enabled():
        raise InputError(
            "The wrapped model was called for training after autosplit.ddp.setup ended. The ranks no longer average "
            "their gradients there. Train inside the block, call the model in eval() or torch.no_grad(), or use "
            "wrapper.module.",
        )
    if not wrapped.device_ids:
        return None
    moved, moved_kwargs = wrapped.to_kwargs(inputs, kwargs, wrapped.device_ids[0])
    return moved[0], moved_kwargs[0]


def _end_group() -> None:
    """End gloo's threads before the interpreter exits, see `part_from_group`.

    Do nothing after an error, because other ranks may be in a collective.
    """
    if hasattr(sys, "last_type"):
        return
    for wrapped in _outliving:
        if wrapped.process_group is not None:
            part_from_group(wrapped)
    # Check the backend of each device. The Trainer chooses "cpu:gloo", and `get_backend()` has no name for it.
    if dist.is_initialized() and dist.Backend.GLOO in dist.get_backend_config():
        dist.destroy_process_group()
