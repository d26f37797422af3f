"""Declare the command of `integrations`."""

from __future__ import annotations

from autosplit.cli import options as o
from autosplit.cli.options import Command

EXPORT = Command(
    "integrations.export_command:export",
    "Print a plan as the settings of another tool.",
    "autosplit export plan.json --to transformers",
    {
        "Plan": o.PLAN,
        "Output": {
            "--to TOOL": "transformers, accelerate and lightning get the nearest plan with one batch size for all "
            "ranks. torchrun, slurm, trainjob (Kubernetes) and skypilot get the commands that start "
            "a job. env and json get the numbers.",
            "-o --output PATH": "Save the settings to a file.",
            "--force": "Replace an existing file.",
        },
    },
)
