"""Declare the command of `sim`."""

from __future__ import annotations

from autosplit.cli import options as o
from autosplit.cli.options import Command

COMPARE = Command(
    "sim.compare_command:compare",
    "Tune for several machines and compare their cost.",
    "autosplit compare examples/char_gpt.py --devices sim:2xL4 --devices sim:A100-40GB --price 2xL4=1.2",
    {
        "Workload": {
            "spec [FILE[:NAME]]": o.SPEC["spec FILE[:NAME]"],
            "--models FILE": "Compare several models in one table. FILE has one model per line, such as "
            "timm:resnet50 or hf:gpt2/config.json --seq-len 1024.",
            **o.MODEL,
            **o.TRAINING,
        },
        "Devices": {
            "--devices SPEC ...": "A machine. autosplit predicts sim:2xL4 and measures cuda. It predicts a "
            "cluster such as sim:4x(8xA100-80GB)@100Gbps for 1, 2 and 4 nodes. Give this "
            "option once per machine.",
            "--price SPEC=MONEY ...": "Price of a machine per hour, as 2xL4=1.2. Give it once per machine.",
            "--samples N": "Samples of the whole training. autosplit prints its hours, device-hours and cost.",
            **o.STRATEGY,
        },
        "Search": o.SEARCH,
        "Output": {
            "--format markdown|html": "With --models. Default: by the suffix of --output, else markdown.",
            "-o --output PATH": "With --models: write the table to this file.",
        },
    },
)
