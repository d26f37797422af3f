"""Differences between torch versions: one function for each difference, which names the versions it is for.

The rest of the package calls these functions and does not look at torch's version.
"""

from __future__ import annotations

from typing import Any


def fsdp_parameters(module: Any) -> list[Any]:
    """Return FSDP2's records of the parameters that one `fully_shard` call shards.

    torch >= 2.12 keeps a list of parameter groups. torch 2.6 to 2.11 keeps one group, or None if the module has no
    parameters of its own.

    Args:
        module: A module that was passed to `fully_shard`.

    Raises:
        RuntimeError: This torch keeps the groups elsewhere.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        if not hasattr(state, "_fsdp_param_group"):
            raise _unknown("FSDPState._fsdp_param_groups")
        groups = () if state._fsdp_param_group is None else (state._fsdp_param_group,)
    return [parameter for group in groups for parameter in group.fsdp_params]


def _unknown(name: str) -> RuntimeError:
    import torch

    return RuntimeError(
        f"torch {torch.__version__} has no {name}, which autosplit needs here. Install a torch version that autosplit "
        "was tested with (docs/private-names.md)."
    )
