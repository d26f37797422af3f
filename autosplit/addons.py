"""Find commands, and functions of `tools`, `sim` and `integrations`, by name.

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
    "lengths_in": "tools.padded_length:lengths_in",
    "named_workload": "sim.from_name:named_workload",
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


COMMANDS = {
    "devices": "tools.commands:DEVICES",
    "doctor": "tools.commands:DOCTOR",
    "init": "tools.commands:INIT",
    "tune": "cli.commands:TUNE",
    "compare": "sim.commands:COMPARE",
    "measure": "cli.commands:MEASURE",
    "probe": "cli.commands:PROBE",
    "check": "cli.commands:CHECK",
    "loader": "tools.commands:LOADER",
    "show": "cli.commands:SHOW",
    "report": "tools.commands:REPORT",
    "export": "integrations.commands:EXPORT",
    "launch": "cli.commands:LAUNCH",
    "profiles": "cli.commands:PROFILES",
}
"""The declaration of each command, in the order of the help."""


def addon(name: str) -> Any:
    """Return the function of a name in `ADDONS`. Raise InputError if its package is not installed."""
    return found_at(ADDONS[name])


def found_at(place: str) -> Any:
    """Return the object at a place such as ``"tools.goodput:goodput_of"``. See `addon`."""
    module, _, name = place.partition(":")
    if not is_installed(place):
        raise InputError(
            f"This installation of autosplit lacks the package autosplit.{module.partition('.')[0]}. Install autosplit "
            "again: pip install --force-reinstall autosplit."
        )
    return getattr(importlib.import_module(f"autosplit.{module}"), name)


def is_installed(place: str) -> bool:
    """Return whether the package of a place such as ``"tools.goodput:goodput_of"`` is installed."""
    return importlib.util.find_spec(f"autosplit.{place.partition('.')[0]}") is not None


def found_addon(name: str) -> Any | None:
    """Return the function of a name in `ADDONS`, or None if its package is not installed."""
    return addon(name) if is_installed(ADDONS[name]) else None
