"""Find the fastest batch size, per-GPU split and gradient-accumulation steps for training PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosplit import ddp as ddp
    from autosplit.devices.spec import list_devices as list_devices
    from autosplit.devices.spec import parse_devices as parse_devices
    from autosplit.errors import AutosplitError as AutosplitError
    from autosplit.oom import OutOfMemoryError as OutOfMemoryError
    from autosplit.parallel.balanced import BalancedDataParallel as BalancedDataParallel
    from autosplit.parallel.balanced import data_parallel as data_parallel
    from autosplit.parallel.moved_batch import to_device as to_device
    from autosplit.parallel.state_dict import matching_state_dict as matching_state_dict
    from autosplit.plan.plan import Plan as Plan
    from autosplit.probe.find_ceiling import find_ceiling as find_ceiling
    from autosplit.probe.gradient_check import check as check
    from autosplit.sim.compare import compare as compare
    from autosplit.sim.from_name import workload_from_name as workload_from_name
    from autosplit.tools.loader_bound import fit_to_loader as fit_to_loader
    from autosplit.tools.loader_speed import measure_loader as measure_loader
    from autosplit.tools.noise_scale import NoiseScale as NoiseScale
    from autosplit.tools.tune_best import tune_best as tune_best
    from autosplit.tools.tune_lengths import tune_lengths as tune_lengths
    from autosplit.tools.tune_sharded import tune_sharded as tune_sharded
    from autosplit.tuning.measure import measure as measure
    from autosplit.tuning.tune import tune as tune
    from autosplit.workload.tree import Whole as Whole
    from autosplit.workload.workload import Workload as Workload

    __version__: str

# The module of each public name. Names are imported lazily, so that `--help` and a saved plan do not load torch.
_HOMES = {
    "AutosplitError": "errors",
    "BalancedDataParallel": "parallel.balanced",
    "NoiseScale": "tools.noise_scale",
    "OutOfMemoryError": "oom",
    "Plan": "plan.plan",
    "Whole": "workload.tree",
    "Workload": "workload.workload",
    "check": "probe.gradient_check",
    "compare": "sim.compare",
    "data_parallel": "parallel.balanced",
    "find_ceiling": "probe.find_ceiling",
    "fit_to_loader": "tools.loader_bound",
    "list_devices": "devices.spec",
    "matching_state_dict": "parallel.state_dict",
    "measure": "tuning.measure",
    "measure_loader": "tools.loader_speed",
    "parse_devices": "devices.spec",
    "to_device": "parallel.moved_batch",
    "tune": "tuning.tune",
    "tune_best": "tools.tune_best",
    "tune_lengths": "tools.tune_lengths",
    "tune_sharded": "tools.tune_sharded",
    "workload_from_name": "sim.from_name",
}

__all__ = ["__version__", "ddp", *_HOMES]


if not TYPE_CHECKING:  # For this function, type checkers would accept any name, even a misspelt one, as Any.

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(f"autosplit.{_HOMES[name]}"), name)
        elif name == "ddp":
            value = importlib.import_module("autosplit.ddp")
        elif name == "__version__":
            from importlib.metadata import version

            value = version("autosplit")
        elif name == "find_executable_batch_size":
            raise AttributeError(
                "autosplit.find_executable_batch_size was removed. Use accelerate.utils.find_executable_batch_size, or "
                "autosplit.tune(), which predicts the largest batch size."
            )
        else:
            raise AttributeError(f"module 'autosplit' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
