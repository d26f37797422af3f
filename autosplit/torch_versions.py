"""Differences between torch versions: one function for each difference, which names the versions it is for.

The rest of the package calls these functions and does not look at torch's version. docs/private-names.md lists every
private name of torch that the package uses.
"""

from __future__ import annotations

from typing import Any

import torch

# ------------------------------------------------------------------------------------------------------------- FSDP2


def fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module that was passed to `fully_shard`.

    torch >= 2.12 keeps a list of groups. torch 2.6 to 2.11 keeps one group, or None for a module without parameters.

    Raises:
        RuntimeError: This torch keeps the groups elsewhere.
    """
    return _groups_of(module._get_fsdp_state())


def reset_fsdp(root: Any) -> None:
    """Discard what an exception in a forward or a backward left in FSDP2; do nothing if `root` is not the root module.

    torch >= 2.12 has `reset_iter_state` for this. On torch 2.6 to 2.11 this function does the same: it waits for
    unfinished collectives, reshards all parameters and clears FSDP2's records of the step.
    """
    state = root._get_fsdp_state()
    if not state._is_root:  # None before the first forward, which makes a module the root
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    shared, streams = state._state_ctx, state._comm_ctx
    current = state._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        running = getattr(streams, name)
        if running is not None and running.event is not None:
            current.wait_event(running.event)
        setattr(streams, name, None)
    for part in shared.all_states:
        part._modules_to_run_forward.clear()
        part._training_state = type(part._training_state).IDLE
        for group in _groups_of(part):
            group.finalize_backward()  # waits, and clears the all-gather that it waited for
            group._partial_reduce_output = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    streams.post_forward_order.clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise _unknown("FSDPState._fsdp_param_groups")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _unknown(name: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {name}, which autosplit needs here. Install a torch version that autosplit "
        "was tested with (docs/private-names.md)."
    )
