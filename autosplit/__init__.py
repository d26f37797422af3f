"""How much of the batch goes on which GPU, how big may it be, and how many accumulation steps?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosplit.balanced import BalancedDataParallel as BalancedDataParallel
    from autosplit.balanced import data_parallel as data_parallel
    from autosplit.batches import Whole as Whole
    from autosplit.checks import check as check
    from autosplit.comparing import compare as compare
    from autosplit.devices import list_devices as list_devices
    from autosplit.devices import parse_devices as parse_devices
    from autosplit.errors import AutosplitError as AutosplitError
    from autosplit.executable import find_executable_batch_size as find_executable_batch_size
    from autosplit.oom import OutOfMemoryError as OutOfMemoryError
    from autosplit.plan import Plan as Plan
    from autosplit.probe import find_ceiling as find_ceiling
    from autosplit.states import matching_state_dict as matching_state_dict
    from autosplit.tuning import tune as tune
    from autosplit.workload import Workload as Workload

# Where each public name lives. Nothing is imported before it is asked for: `--help` and a remembered plan
# must not wait for torch.
_HOMES = {
    "AutosplitError": "errors",
    "BalancedDataParallel": "balanced",
    "OutOfMemoryError": "oom",
    "Plan": "plan",
    "Whole": "batches",
    "Workload": "workload",
    "check": "checks",
    "compare": "comparing",
    "data_parallel": "balanced",
    "find_ceiling": "probe",
    "find_executable_batch_size": "executable",
    "list_devices": "devices",
    "matching_state_dict": "states",
    "parse_devices": "devices",
    "tune": "tuning",
}

__all__ = ["__version__", "ddp", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"autosplit.{_HOMES[name]}"), name)
    elif name == "ddp":
        value = importlib.import_module("autosplit.ddp")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("autosplit")
    else:
        raise AttributeError(f"module 'autosplit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
