"""Find functions of `tools`, `sim` and `integrations` by name.

The core imports none of these packages, and works without their folders.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from autosplit.errors import InputError

ADDONS = {
    "attention_of": "sim.simulated:attention_of_worker",
    "build_simulated": "sim.prepare:build_simulated",
    "cards_of_examination": "tools.examination:cards_of_examination",
    "ceiling_plot": "tools.ceiling_plot:plot_ceilings",
    "check_plot": "tools.ceiling_plot:check_plot",
    "export": "integrations.export:export",
    "figure_of": "tools.charts:figure_of",
    "goodput_of": "tools.goodput:goodput_of",
    "loader_fit": "tools.loader_bound:loader_fit",
    "lengths_in": "tools.lengths_file:lengths_in",
    "named_workload": "sim.named_workload:named_workload",
    "oom_cuts": "tools.oom_cuts:cuts_of_loader",
    "plan_for_job_devices": "tools.other_devices:plan_for_job_devices",
    "prepare_simulated": "sim.prepare:prepare_simulated",
    "shard": "tools.fsdp:shard",
    "simulated_what_ifs": "sim.sensitivity:simulated_what_ifs",
    "simulated_without": "sim.sensitivity:simulated_without",
    "slow_ranks": "tools.slow_ranks:SlowRanks",
    "token_sampler": "tools.token_sampler:TokenBatchSampler",
    "tune_best": "tools.tune_best:tune_best",
    "tune_lengths": "tools.tune_lengths:tune_lengths",
}
"""The function of each name, as "module:function"."""


def addon(name: str) -> Any:
    """Return the function of a name in `ADDONS`.

    Raises:
        InputError: The function's package is not installed.
    """
    return found_at(ADDONS[name])


def found_at(place: str) -> Any:
    """Return the function at a place such as ``"tools.goodput:goodput_of"``.

    Raises:
        InputError: The function's package is not installed.
    """
    module, _, function = place.partition(":")
    package = f"autosplit.{module.partition('.')[0]}"
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(
            f"{function} needs the package {package}, which this installation of autosplit lacks. Install autosplit "
            "again: pip install --force-reinstall autosplit."
        ) from None
    return getattr(importlib.import_module(f"autosplit.{module}"), function)


def found_addon(name: str) -> Any | None:
    """Return the function of a name in `ADDONS`, or None if its package is not installed."""
    package = ADDONS[name].partition(".")[0]
    return addon(name) if importlib.util.find_spec(f"autosplit.{package}") is not None else None
