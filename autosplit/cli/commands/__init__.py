"""Declare the core's commands. Each has a module in this package, which is imported when the command runs."""

from __future__ import annotations

from autosplit.cli import options as o
from autosplit.cli.options import Command

TUNE = Command(
    "cli.commands.tune:tune",
    "Find the best split, batch size and accumulation steps.",
    "autosplit tune examples/char_gpt.py --devices sim:RTX3090 --effective-batch-size 256 --n-trials 2",
    {
        "Workload": {
            **o.WORKLOAD,
            **o.TRAINING,
            "--loader FILE[:NAME]": "The training DataLoader (default name: loader), or a function that returns "
            "it. autosplit checks whether it keeps up with the devices.",
            "--lengths FILE": "The lengths of the samples, one number per line. autosplit also plans batches of "
            "similar length.",
        },
        "Devices": {"--devices SPEC ...": o.DEVICES_HELP, **o.STRATEGY},
        "Search": o.SEARCH,
        "Output": {"--output PATH": "Save the plan as JSON.", **o.DETAILS},
    },
)
MEASURE = Command(
    "cli.commands.measure:measure",
    "Measure the time and memory of one setting.\nHere, --strategy auto means balanced.",
    "autosplit measure examples/char_gpt.py --devices sim:RTX3090+RTX2080Ti --split 96,32",
    {
        "Workload": {**o.WORKLOAD, **o.PRECISION},
        "Devices": {"--devices SPEC": o.DEVICES_HELP, **o.STRATEGY},
        "Setting": {
            "--split N,N,...": "Samples per device in one forward. Default: the sample batch, split evenly.",
            "--accumulation-steps N": "Forwards per optimizer step. Default: 1.",
        },
    },
)
PROBE = Command(
    "cli.commands.probe:probe",
    "Find the largest batch that fits on each device.",
    "autosplit probe examples/char_gpt.py --devices sim:RTX3090 --role eval",
    {
        "Workload": o.WORKLOAD,
        "Devices": {"--devices SPEC": o.DEVICES_HELP, **o.STEPS},
        "Search": {
            "--role primary|replica|rank|eval|resume|save ...": "What a device does. primary: device 0 of "
            "BalancedDataParallel. replica: another device of "
            "BalancedDataParallel. rank: a DDP process. "
            "eval: a forward without gradients. "
            "resume: a rank with a loaded checkpoint. "
            "save: a rank with a copy that is being saved. Give this option once per role. "
            "Default: rank.",
            **o.MAX_BATCH_SIZE,
            "--exact": "Also check that a batch with one more sample runs out of memory.",
            "--time-limit-s SECONDS": (
                "Time limit for all devices. After this time, autosplit confirms no result with a real step."
            ),
        },
        "Output": {"--plot PATH": "Plot bytes against batch size (.png, .pdf, .svg). Needs matplotlib."},
    },
)
CHECK = Command(
    "cli.commands.check:check",
    "Check whether splitting the batch changes the training.",
    "autosplit check examples/char_gpt.py",
    {"Workload": o.WORKLOAD},
)
SHOW = Command(
    "cli.commands.show:show",
    "Print a saved plan.",
    "autosplit show plan.json",
    {"Plan": o.PLAN, "Output": {**o.DETAILS, **o.CODE}},
)
LAUNCH = Command(
    "cli.commands.launch:launch",
    "Start a training script with torchrun and a plan.\nWrite these options first. autosplit passes all other "
    "words to torchrun.",
    "autosplit launch --plan plan.json --print train.py --epochs 3",
    {
        "Job": {
            "arguments [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]": "torchrun's options, the script and its arguments.",
            "--plan PLAN": "A plan's file, or the first characters of a profile's key. Default: AUTOSPLIT_PROFILE, "
            "or the newest plan saved for this machine.",
        },
        "Output": {"--print": "Print the command instead of running it."},
    },
)
PROFILES = Command(
    "cli.commands.profiles:list_profiles",
    "List, show and remove profiles (saved plans).\nWithout a command, list them.",
    "autosplit profiles\nautosplit profiles remove 3f2a",
    subcommands={
        "list": Command(
            "cli.commands.profiles:list_profiles", "List the profiles, newest first.", "autosplit profiles list --json"
        ),
        "show": Command(
            "cli.commands.show:show_profile",
            "Print a profile's plan. Without a key, print the newest.",
            "autosplit profiles show 3f2a",
            {"Plan": o.KEY, "Output": {**o.DETAILS, **o.CODE}},
        ),
        "path": Command(
            "cli.commands.profiles:show_path",
            "Print the folder of the profiles, or a profile's file.",
            "autosplit profiles path\nautosplit profiles path 3f2a",
            {"Plan": o.KEY},
        ),
        "remove": Command(
            "cli.commands.profiles:remove_profiles",
            "Remove profiles and list them.",
            "autosplit profiles remove 3f2a 91c0\nautosplit profiles remove --all --yes",
            {
                "Plan": {
                    "keys [KEY ...]": "The first characters of a profile's key.",
                    "--all": "Remove all profiles. On a terminal, autosplit asks first.",
                    "--yes": "Do not ask.",
                }
            },
        ),
    },
)
