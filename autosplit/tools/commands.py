"""Declare the commands of `tools`."""

from __future__ import annotations

from autosplit.cli import options as o
from autosplit.cli.options import Command

DEVICES = Command("tools.devices_command:devices", "List the GPUs and their memory.", "autosplit devices --json")
DOCTOR = Command(
    "tools.doctor_command:doctor",
    "Diagnose this machine and suggest fixes.",
    "autosplit doctor --json",
    {
        "Devices": {"--devices SPEC": "Default: every GPU, or cpu:256MiB if there is none."},
        "Output": {
            "--save FILE": "Save the measured rates of the GPUs, for AUTOSPLIT_GPUS and sim: devices.",
            "--share FILE": ("Save the results without private data, so that you can contribute them to docs/results."),
        },
    },
)
INIT = Command(
    "tools.init_command:init",
    "Write a workload file for the model in a Python file.\nautosplit guesses the sample batch from the model's "
    "layers. Replace it with a batch of your data.",
    "autosplit init examples/char_gpt.py:CharGPT -o workload.py",
    {
        "Workload": {
            "spec FILE[:NAME]": "A Python file, or package.module. NAME is a class of models, or a function that "
            "makes a model. Default: the last class that needs no arguments.",
            "--input N,N,...": "Shape of one sample, as 3,32,32. Default: guessed from the first layers.",
        },
        "Output": {
            "-o --output PATH": "The file. Default: workload.py next to FILE.",
            "--force": "Replace an existing file.",
        },
    },
)
LOADER = Command(
    "tools.loader_command:loader",
    "Find the fastest settings of a DataLoader.",
    "autosplit loader examples/loader.py",
    {
        "Workload": {
            "spec FILE[:NAME]": "A Python file, or package.module. NAME (default: loader) is a DataLoader or a "
            "function that returns one."
        },
        "Search": {
            "--processes N": "Number of processes on this machine that load at the same time, such as DDP ranks. "
            "Default: 1.",
            "--time-limit-s SECONDS": "Try no other setting after this time. Default: 60.",
        },
    },
)
REPORT = Command(
    "tools.report_command:report",
    "Write a plan's report as an HTML page.\nThe page has charts, checks and every setting to copy, and works "
    "offline. The command needs jinja2 and vl-convert-python.",
    "autosplit report plan.json -o report.html",
    {
        "Plan": o.PLAN,
        "Output": {
            "-o --output PATH": "The page, or - for stdout. Default: report.html.",
            "--force": "Replace a file that is not a report.",
        },
    },
)
