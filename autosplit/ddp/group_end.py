"""The end of a process group: wrapped models that outlive it must hold nothing of it."""

from __future__ import annotations

import atexit
import sys
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import InputError
from autosplit.torch_versions import use_module_alone

_outliving: WeakSet[DistributedDataParallel] = WeakSet()
"""Models whose group may end after them, or not at all before the interpreter does."""


def let_go_of_group_last(wrapped: nn.Module) -> None:
    """Make DistributedDataParallel's own reference to its process group the last that dies with it.

    Where a model outlives its group, as in most scripts, the last reference to the group ends it and waits for gloo's
    threads. Python's does so without the interpreter's lock, but that of DDP's reducer holds it, which one of the
    threads may be waiting for: both then wait for ever (torch 2.13; about one in thirty models). Attributes die in the
    order in which they were set, so the group is set again, behind the reducer. What is of another class is left as it
    is.

    At the interpreter's exit the model parts from its group, which nobody else may do: a tool's Trainer has no end.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    group = wrapped.__dict__.pop("process_group")
    wrapped.process_group = group
    if wrapped not in _outliving:
        _outliving.add(wrapped)
        atexit.register(_end_group)


def part_from_group(wrapped: Any) -> None:
    """Take from a wrapper all that refers to its process group, so that the group ends when it is destroyed.

    Otherwise it lives until the interpreter is gone: a thread of gloo's that then has a tensor of Python's to give back
    takes the process down (torch 2.13: "terminate called without an active exception", now and then on a busy machine),
    and other ranks see no end of this one's connections until then.
    """
    wrapped.reducer = wrapped.logger = None
    wrapped.process_group = None  # last, see `let_go_of_group_last`
    use_module_alone(wrapped)
    wrapped.register_forward_pre_hook(_forward_alone, with_kwargs=True, prepend=True)


def _forward_alone(wrapped: Any, inputs: Any, kwargs: Any) -> Any:
    """Do before a forward what is left of DDP's own preparations."""
    if wrapped.training and torch.is_grad_enabled():
        raise InputError(
            "the wrapped model is called for training, but autosplit.ddp.setup was left; expected a forward within it, "
            "where the ranks' gradients meet; train inside the block, call it in eval() or torch.no_grad(), or use "
            "wrapper.module",
            code="forward-after-setup",
        )
    if not wrapped.device_ids:
        return None
    moved, moved_kwargs = wrapped.to_kwargs(inputs, kwargs, wrapped.device_ids[0])
    return moved[0], moved_kwargs[0]


def _end_group() -> None:
    """End gloo's threads while the interpreter is whole, see `part_from_group`; not behind an error.

    There other ranks may be in the middle of an exchange, and are to see connections close, not be waited for.
    """
    if hasattr(sys, "last_type"):
        return
    for wrapped in _outliving:
        if wrapped.process_group is not None:
            part_from_group(wrapped)
    # By its devices: of "cpu:gloo", which the Trainer chooses, the back end itself has no name.
    if dist.is_initialized() and dist.Backend.GLOO in dist.get_backend_config():
        dist.destroy_process_group()
