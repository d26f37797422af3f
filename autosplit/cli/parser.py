"""Define the commands, their options and their help, and parse a command line.

Each command has a module, which is imported when the command runs. So `--help` needs neither torch nor rich.
"""

from __future__ import annotations

import functools
import itertools
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from autosplit.addons import found_at
from autosplit.cli import options as o
from autosplit.cli.options import Options
from autosplit.cli.output import Manner, logged
from autosplit.errors import InputError, shown


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        body: The module and its function. The function gets a `Manner` and the options that were given.
        text: The help. The list of commands shows its first line.
        example: Command lines that run.
        panels: The options under the headings of the help.
    """

    body: str
    text: str
    example: str
    panels: Mapping[str, Options]


COMMANDS: Mapping[str, Command] = {
    "devices": Command(
        "tools.devices_command:devices", "List the GPUs and their memory.", "autosplit devices --json", {}
    ),
    "doctor": Command(
        "tools.doctor_command:doctor",
        "Diagnose this machine and suggest fixes.",
        "autosplit doctor --json",
        {
            "Devices": {"--devices SPEC": "Default: every GPU, or cpu:256MiB if there is none."},
            "Output": {
                "--save FILE": "Save the measured rates of the GPUs, for AUTOSPLIT_GPUS and sim: devices.",
                "--share FILE": (
                    "Save the results without private data, so that you can contribute them to docs/results."
                ),
            },
        },
    ),
    "init": Command(
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
                o.OUTPUT_FILE: "The file. Default: workload.py next to FILE.",
                "--force": "Replace an existing file.",
            },
        },
    ),
    "tune": Command(
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
    ),
    "compare": Command(
        "sim.compare_command:compare",
        "Tune for several machines and compare their cost.",
        "autosplit compare examples/char_gpt.py --devices sim:2xL4 --devices sim:A100-40GB --price 2xL4=1.2",
        {
            "Workload": {
                o.OPTIONAL_SPEC: o.WORKLOAD[o.SPEC],
                "--models FILE": "Compare several models in one table. FILE has one model per line, such as "
                "timm:resnet50 or hf:gpt2/config.json --seq-len 1024.",
                **{name: text for name, text in o.WORKLOAD.items() if name != o.SPEC},
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
    ),
    "measure": Command(
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
    ),
    "probe": Command(
        "cli.commands.probe:probe",
        "Find the largest batch that fits on each device.",
        "autosplit probe examples/char_gpt.py --devices sim:RTX3090 --role eval",
        {
            "Workload": o.WORKLOAD,
            "Devices": {"--devices SPEC": o.DEVICES_HELP, **o.STEPS},
            "Search": {
                "--role primary|replica|rank|eval|resume|save ...": "What a device does. primary: device 0 of "
                "BalancedDataParallel. replica: another device of "
                "it. rank: a DDP process. eval: a forward without "
                "gradients. resume: a rank with a loaded "
                "checkpoint. save: a rank with a copy that is "
                "being saved. Give this option once per role. "
                "Default: rank.",
                **o.MAX_BATCH_SIZE,
                "--exact": "Also check that one more sample runs out of memory.",
                "--time-limit-s SECONDS": (
                    "Time limit for all devices. After this time, autosplit confirms no result with a real step."
                ),
            },
            "Output": {"--plot PATH": "Plot bytes against batch size (.png, .pdf, .svg). Needs matplotlib."},
        },
    ),
    "check": Command(
        "cli.commands.check:check",
        "Check whether splitting the batch changes the training.",
        "autosplit check examples/char_gpt.py",
        {"Workload": o.WORKLOAD},
    ),
    "loader": Command(
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
    ),
    "show": Command(
        "cli.commands.show:show",
        "Print a saved plan.",
        "autosplit show plan.json",
        {"Plan": o.PLAN, "Output": {**o.DETAILS, **o.CODE}},
    ),
    "report": Command(
        "tools.report_command:report",
        "Write a plan's report as an HTML page.\nThe page has charts, checks and every setting to copy, and works "
        "offline. The command needs jinja2 and vl-convert-python.",
        "autosplit report plan.json -o report.html",
        {
            "Plan": o.PLAN,
            "Output": {
                o.OUTPUT_FILE: "The page, or - for stdout. Default: report.html.",
                "--force": "Replace a file that is not a report.",
            },
        },
    ),
    "export": Command(
        "integrations.export_command:export",
        "Print a plan as the settings of another tool.",
        "autosplit export plan.json --to transformers",
        {
            "Plan": o.PLAN,
            "Output": {
                "--to TOOL": "transformers, accelerate and lightning get the nearest plan with one batch size for all "
                "ranks. torchrun, slurm, trainjob (Kubernetes) and skypilot get the commands that start "
                "a job. env and json get the numbers.",
                o.OUTPUT_FILE: "Save the settings to a file.",
                "--force": "Replace an existing file.",
            },
        },
    ),
    "launch": Command(
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
    ),
    "profiles": Command(
        "cli.commands.profiles:list_profiles",
        "List, show and remove profiles (saved plans).\nWithout a command, list them.",
        "autosplit profiles\nautosplit profiles remove 3f2a",
        {},
    ),
    "profiles list": Command(
        "cli.commands.profiles:list_profiles", "List the profiles, newest first.", "autosplit profiles list --json", {}
    ),
    "profiles show": Command(
        "cli.commands.show:show_profile",
        "Print a profile's plan. Without a key, print the newest.",
        "autosplit profiles show 3f2a",
        {"Plan": o.KEY, "Output": {**o.DETAILS, **o.CODE}},
    ),
    "profiles path": Command(
        "cli.commands.profiles:show_path",
        "Print the folder of the profiles, or a profile's file.",
        "autosplit profiles path\nautosplit profiles path 3f2a",
        {"Plan": o.KEY},
    ),
    "profiles remove": Command(
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
}
"""Every command, by the words that name it."""

EXIT_CODES = """Exit codes:
  0  done
  2  bad input
  3  does not fit
  4  interrupted: the best plan so far is shown and saved
  5  the workload's own code raised
Ctrl-C stops with the best plan so far. A second Ctrl-C stops at once."""


class _Layout(RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: Any) -> str:
        """Print ``-o, --output PATH`` before Python 3.13 too."""
        return super()._format_action_invocation(action).replace("-o PATH,", "-o,")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": '", " '", 1)
        end = "" if message[-1] in ".?" else "."
        raise InputError(f"{message}{end} See {self.prog} --help.")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        import difflib

        wrong = next((word for word in unknown if word.startswith("-")), None)
        if wrong is None:
            self.error(f"unexpected argument {shown(unknown[0])}")
        name = wrong.partition("=")[0]
        if name in _REMOVED:
            self.error(f"{name} was removed. {_REMOVED[name]}")
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        self.error(f"{shown(wrong)} is not an option{f'. Did you mean {near[0]}?' if near else ''}")


_REMOVED = {
    "--fits": "Run autosplit probe --role resume, save or eval.",
    "--storage": "The plan has every trial: autosplit show --json",
}
"""Options that older versions had, with the replacement."""

_SETTINGS: Mapping[str, Any] = {
    "formatter_class": _Layout,
    "add_help": False,  # OF_ALL has --help
    "allow_abbrev": False,
    "argument_default": SUPPRESS,  # an option that was not given has the default of the Python function
}


def make_parser() -> _Parser:
    """Return the parser of the command line."""
    text = "Find the fastest batch size, per-GPU split and accumulation steps for training a PyTorch model."
    usage, epilog = "autosplit [OPTIONS] COMMAND ...", f"{_listed('')}\n\n{EXIT_CODES}"
    top = _Parser(prog="autosplit", usage=usage, description=text, epilog=epilog, **_SETTINGS)
    _add_options(top, {"Options": {"--version": "Print the version and exit.", **o.HELP}})
    top.set_defaults(parser=top)
    groups = {"": top.add_subparsers(metavar="COMMAND", help=SUPPRESS)}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        examples = command.example.splitlines()
        epilog = "\n  ".join([f"Example{'s' * (len(examples) > 1)}:", *examples])
        made = groups[group].add_parser(
            last, prog=f"autosplit {name}", description=command.text, epilog=epilog, **_SETTINGS
        )
        metavars = _add_options(made, {**command.panels, "Output": {**command.panels.get("Output", {}), **o.OF_ALL}})
        made.set_defaults(parser=made, command=command)
        if name == "profiles":
            groups[name] = made.add_subparsers(metavar="[COMMAND]", help=SUPPRESS)
            metavars, made.epilog = ["[COMMAND]"], f"{_listed(name)}\n\n{made.epilog}"
        made.usage = " ".join(["autosplit", name, "[OPTIONS]", *metavars])
    return top


def _add_options(parser: _Parser, panels: Mapping[str, Options]) -> list[str]:
    arguments = []
    for title, options in panels.items():
        group = parser.add_argument_group(title)
        for declaration, text in options.items():
            names, settings = o.settings_of(declaration, text)
            group.add_argument(*names, **settings)
            arguments += [] if names[0].startswith("-") else [settings["metavar"]]
    return arguments


def _listed(group: str) -> str:
    """List the commands of a group. argparse would add a line above the list."""
    found = {name.rpartition(" ")[2]: one.text for name, one in COMMANDS.items() if name.rpartition(" ")[0] == group}
    return "\n".join(["Commands:", *(f"  {name:<10}{text.splitlines()[0]}" for name, text in found.items())])


def parse(words: Sequence[str]) -> Callable[[], int]:
    """Return the command that was typed, as a function without arguments.

    Raises:
        InputError: The command does not exist, or an option is wrong.
        SystemExit: The help was printed.
    """
    parser = make_parser()
    _refuse_unknown_command(parser, words)
    found, unknown = parser.parse_known_args(_with_separator(words) if words[:1] == ["launch"] else words)
    typed = vars(found)
    if unknown:
        typed["parser"].refuse(unknown)
    if typed.pop("version", False):
        return _print_version
    if "command" not in typed:
        parser.error("The command is missing")
    del typed["parser"]
    command: Command = typed.pop("command")
    manner = Manner(**{one.name: typed.pop(one.name) for one in fields(Manner) if one.name in typed})
    if "--seq-len N" in command.panels.get("Workload", {}):
        typed["model_options"] = {name: typed.pop(name) for name in o.MODEL_OPTIONS if name in typed}
    return functools.partial(_run, command.body, manner, typed)


def _refuse_unknown_command(parser: _Parser, words: Sequence[str]) -> None:
    import difflib

    known = [name for name in COMMANDS if " " not in name]
    if words and not words[0].startswith("-") and words[0] not in known:
        near = difflib.get_close_matches(words[0], known, 1)
        parser.error(f"{shown(words[0])} is not a command. Did you mean {near[0] if near else ' or '.join(known)}?")


def _with_separator(words: Sequence[str]) -> list[str]:
    """Put ``--`` before the first word that is not an option of `launch`, so argparse ignores later words."""
    declared = " ".join([*o.OF_ALL, *itertools.chain(*COMMANDS["launch"].panels.values())])
    own = {word for word in declared.split() if word.startswith("-")}
    place = 1
    while place < len(words) and words[place].partition("=")[0] in own:
        place += 2 if words[place] == "--plan" else 1
    return [*words[:place], *([] if words[place : place + 1] == ["--"] else ["--"]), *words[place:]]


def _print_version() -> int:
    from autosplit import __version__

    sys.stdout.write(f"autosplit {__version__}\n")
    return 0


def _run(body: str, manner: Manner, typed: dict[str, Any]) -> int:
    with logged(manner):
        exit_code: int = found_at(body)(manner, **typed)
    return exit_code
