"""Check a model's name, such as ``timm:resnet18``, and return a function that builds its workload."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.sim.from_name import model_by_name, workload_from_name
from autosplit.sim.low_bit_adamw import named_optimizer

if TYPE_CHECKING:
    from autosplit.workload.workload import Workload


def named_workload(spec: str, options: dict[str, Any]) -> Callable[[], Workload]:
    """Return a function that builds the workload of a model's name. Raise InputError for a wrong name or option."""
    scheme, _, name = spec.partition(":")
    if scheme == "hf":  # Then the path is valid in any folder.
        # The shell does not expand ~ after a colon. Use os.path.expanduser, because Path.expanduser raises an error for
        # unknown users.
        home = os.path.expanduser(name)  # noqa: PTH111
        spec = f"hf:{Path(home).absolute()}"
    checked = dict(options)
    if "optimizer" in checked:
        named_optimizer(checked.pop("optimizer"))
    model_by_name(spec, **checked)
    return partial(workload_from_name, spec, **options)
