"""The commands: their options, their help, and the parser of a command line.

`commands` has a module for each command, which is imported when the command runs. So `--help` needs neither torch nor
rich.
"""

from __future__ import annotations

import functools
import importlib
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from autosplit.cli import options as o
from autosplit.cli.options import Option, option, switch
from autosplit.cli.output import Manner, logged
from autosplit.errors import InputError, shown

PANELS = ("Arguments", "Workload", "Devices", "Setting", "Search", "Output")
"""The headings of a help, in this order."""


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        body: The module of `commands` and its function. The function gets a `Manner` and the options that were given.
        text: The help. Its first line is in the list of commands.
        options: Without those that every command has.
        examples: Lines that run.
    """

    body: str
    text: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


COMMANDS: Mapping[str, Command] = {
    "devices": Command("devices.devices", "List the GPUs and their load.", (), ("autosplit devices --json",)),
    "doctor": Command(
        "doctor.doctor",
        "Diagnose this machine and suggest fixes.",
        (
            option("--devices", "SPEC", "Default: every GPU, or cpu:256MiB if there is none.", "Devices"),
            option("--save", "FILE", "Save the measured rates of the GPUs, for AUTOSPLIT_GPUS and sim: devices."),
        ),
        ("autosplit doctor --json",),
    ),
    "tune": Command(
        "tune.tune",
        "Find the best split, batch size and accumulation steps.",
        (
            *o.WORKLOAD,
            o.PRECISION,
            option(
                "--loader",
                "FILE[:NAME]",
                "The training's DataLoader (default name: loader), or a function that returns it. autosplit checks "
                "whether it keeps up.",
                "Workload",
            ),
            option(
                "--lengths",
                "FILE",
                "The lengths of the samples, one number per line. autosplit also plans batches of similar length.",
                "Workload",
            ),
            o.CHECKPOINTING,
            o.FITS,
            option("--devices", "SPEC", o.DEVICES_HELP, "Devices", action="append"),
            o.STRATEGY,
            o.RESERVE,
            o.ISOLATE,
            *o.SEARCH,
            option("--output", "PATH", "Save the plan as JSON."),
            o.DETAILS,
        ),
        ("autosplit tune examples/char_gpt.py --devices sim:RTX3090 --effective-batch-size 256 --n-trials 2",),
    ),
    "compare": Command(
        "compare.compare",
        "Tune for several machines and compare their cost.",
        (
            *o.WORKLOAD,
            o.PRECISION,
            o.CHECKPOINTING,
            o.FITS,
            option(
                "--devices",
                "SPEC",
                "A machine: sim:2xL4 is predicted, cuda is measured. Give this option once per machine.",
                "Devices",
                action="append",
            ),
            option(
                "--price",
                "SPEC=MONEY",
                "Price of a machine per hour, as 2xL4=1.2. Give this option once per machine.",
                "Devices",
                action="append",
                type=o.price,
            ),
            o.STRATEGY,
            o.RESERVE,
            o.ISOLATE,
            *o.SEARCH,
        ),
        ("autosplit compare examples/char_gpt.py --devices sim:2xL4 --devices sim:A100-40GB --price 2xL4=1.2",),
    ),
    "measure": Command(
        "measure.measure",
        "Measure the time and memory of one setting.",
        (
            *o.WORKLOAD,
            o.PRECISION,
            o.DEVICES,
            o.STRATEGY,
            o.RESERVE,
            o.ISOLATE,
            option(
                "--split",
                "N,N,...",
                "Samples per device in one forward. Default: the sample batch, split evenly.",
                "Setting",
                type=o.split,
            ),
            option("--accumulation-steps", "N", "Forwards per optimizer step. Default: 1.", "Setting", type=o.whole),
        ),
        ("autosplit measure examples/char_gpt.py --devices sim:RTX3090+RTX2080Ti --split 96,32",),
    ),
    "probe": Command(
        "probe.probe",
        "Find the largest batch that fits on each device.",
        (
            *o.WORKLOAD,
            o.DEVICES,
            o.RESERVE,
            o.ISOLATE,
            option(
                "--role",
                "primary|replica|rank|eval|resume|save",
                "What a device does: device 0 of BalancedDataParallel, another device of it, a DDP process, a forward "
                "without gradients, a DDP process next to a loaded checkpoint or to a copy that is being saved. Give "
                "this option once per role. Default: rank.",
                "Search",
                action="append",
            ),
            o.MAX_BATCH_SIZE,
            switch("--exact", "Also run one sample more, which must run out of memory.", "Search"),
            option(
                "--time-limit-s",
                "SECONDS",
                "Time for all devices. After it, no step confirms a result.",
                "Search",
                type=o.seconds,
            ),
            option("--plot", "PATH", "Plot bytes against batch size (.png, .pdf, .svg). Needs matplotlib."),
        ),
        ("autosplit probe examples/char_gpt.py --devices sim:RTX3090 --role eval",),
    ),
    "check": Command(
        "check.check",
        "Check whether splitting the batch changes the training.",
        o.WORKLOAD,
        ("autosplit check examples/char_gpt.py",),
    ),
    "loader": Command(
        "loader.loader",
        "Find the fastest settings of a DataLoader.",
        (
            option(
                "spec",
                "FILE[:NAME]",
                "A Python file, or package.module. NAME (default: loader) is a DataLoader or a function that returns "
                "one.",
                "Arguments",
            ),
            option(
                "--processes",
                "N",
                "Processes of this machine that load at the same time, such as the ranks of DDP. Default: 1.",
                "Search",
                type=o.whole,
            ),
            option(
                "--time-limit-s",
                "SECONDS",
                "Try no other setting after this time. Default: 60.",
                "Search",
                type=o.seconds,
            ),
        ),
        ("autosplit loader examples/loader.py",),
    ),
    "show": Command(
        "show.show", "Print a saved plan.", (o.STORED_PLAN, o.DETAILS, o.CODE), ("autosplit show plan.json",)
    ),
    "report": Command(
        "report.report",
        "Write a plan's report as an HTML page.\nThe page has charts, checks and every setting to copy, and works "
        "offline. Needs matplotlib.",
        (
            o.STORED_PLAN,
            option("-o --output", "PATH", "The page, or - for stdout. Default: report.html."),
            switch("--force", "Replace a file that is not a report."),
        ),
        ("autosplit report plan.json -o report.html",),
    ),
    "export": Command(
        "export.export",
        "Print a plan as the settings of another tool.",
        (
            o.STORED_PLAN,
            option(
                "--to",
                "transformers|accelerate|lightning|torchrun|env|json",
                "The tool. The first three train with one batch size on all ranks, so autosplit computes the nearest "
                "even plan for them.",
            ),
            option("-o --output", "PATH", "Save the settings to a file."),
            switch("--force", "Replace an existing file."),
        ),
        ("autosplit export plan.json --to transformers",),
    ),
    "launch": Command(
        "launch.launch",
        "Start a training script with torchrun and a plan.\nWrite these options first. torchrun gets all other words.",
        (
            option(
                "arguments",
                "[TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]",
                "Options of torchrun, the script, and its arguments.",
                "Arguments",
                nargs="+",
            ),
            option(
                "--plan",
                "PLAN",
                "A plan's file, or the first characters of a profile's key. Default: AUTOSPLIT_PROFILE, or the only "
                "plan remembered for this machine.",
                "Arguments",
            ),
            switch("--print", "Print the command instead of running it.", dest="print_only"),
        ),
        ("autosplit launch --plan plan.json --print train.py --epochs 3",),
    ),
    "profiles": Command(
        "profiles.list_profiles",
        "List, show and remove profiles: the plans that autosplit keeps.\nWithout a command, list them.",
        (),
        ("autosplit profiles", "autosplit profiles remove 3f2a"),
    ),
    "profiles list": Command(
        "profiles.list_profiles", "List the profiles, newest first.", (), ("autosplit profiles list --json",)
    ),
    "profiles show": Command(
        "show.show_profile",
        "Print a profile's plan. Without a key, print the newest.",
        (o.KEY, o.DETAILS, o.CODE),
        ("autosplit profiles show 3f2a",),
    ),
    "profiles path": Command(
        "profiles.show_path",
        "Print the folder of the profiles, or a profile's file.",
        (o.KEY,),
        ("autosplit profiles path", "autosplit profiles path 3f2a"),
    ),
    "profiles remove": Command(
        "profiles.remove_profiles",
        "Remove profiles and list them.",
        (
            option("keys", "KEY", "The first characters of a profile's key.", "Arguments", nargs="*"),
            switch("--all", "Remove all profiles. On a terminal, autosplit asks first.", dest="everything"),
            switch("--yes", "Do not ask.", dest="confirmed"),
        ),
        ("autosplit profiles remove 3f2a 91c0", "autosplit profiles remove --all --yes"),
    ),
}
"""Every command by the words that name it."""

EXIT_CODES = """Exit codes:
  0  done
  2  bad input
  3  does not fit
  4  interrupted; the best plan so far is shown and saved
  5  the workload's own code raised
Ctrl-C stops with the best plan so far. A second Ctrl-C stops at once."""


class _Layout(RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: Any) -> str:
        """Print ``-o, --output PATH`` before Python 3.13, too."""
        return super()._format_action_invocation(action).replace("-o PATH,", "-o,")


class _Parser(ArgumentParser):
    """A parser that raises InputError."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with the message of argparse, which begins with the flag."""
        message = message.removeprefix("argument ").replace(": '", " '", 1)
        raise InputError(f"{message}; see {self.prog} --help")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise InputError for words that the parser does not know, and suggest the nearest option."""
        import difflib

        wrong = next((word for word in unknown if word.startswith("-")), None)
        if wrong is None:
            self.error(f"unexpected argument {shown(unknown[0])}")
        near = difflib.get_close_matches(wrong.partition("=")[0], self._option_string_actions, 1)
        self.error(f"{shown(wrong)} is not an option; expected {near[0] if near else 'one of its options'}")


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
    _add_options(top, (switch("--version", "Print the version and exit."), o.HELP))
    top.set_defaults(parser=top)
    groups = {"": top.add_subparsers(metavar="COMMAND", help=SUPPRESS)}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        words = [one.usage for one in command.options if not one.names[0].startswith("-")]
        words += ["[COMMAND]"] * (name == "profiles")
        made = groups[group].add_parser(
            last,
            prog=f"autosplit {name}",
            usage=" ".join(["autosplit", name, "[OPTIONS]", *words]),
            description=command.text,
            epilog="\n".join([*([_listed(name), ""] if name == "profiles" else []), *_examples(command)]),
            **_SETTINGS,
        )
        _add_options(made, (*command.options, *o.OF_ALL))
        made.set_defaults(parser=made, command=command)
        if name == "profiles":
            groups[name] = made.add_subparsers(metavar="COMMAND", help=SUPPRESS)
    return top


def _add_options(parser: _Parser, options: Sequence[Option]) -> None:
    for panel in PANELS:
        group = parser.add_argument_group(panel)  # argparse prints no heading without options
        for one in options:
            if one.panel == panel:
                group.add_argument(*one.names, **one.settings)


def _listed(group: str) -> str:
    """Return the list of the commands of a group. argparse would print another line above it."""
    found = {name.rpartition(" ")[2]: one.text for name, one in COMMANDS.items() if name.rpartition(" ")[0] == group}
    return "\n".join(["Commands:", *(f"  {name:<10}{text.splitlines()[0]}" for name, text in found.items())])


def _examples(command: Command) -> list[str]:
    return [f"Example{'s' * (len(command.examples) > 1)}:", *(f"  {line}" for line in command.examples)]


def parse(words: Sequence[str]) -> Callable[[], int]:
    """Return the command that was typed, as a function without arguments.

    Raises:
        InputError: It is no command, or an option is wrong.
        SystemExit: The help was printed.
    """
    parser = make_parser()
    found, unknown = parser.parse_known_args(_with_torchruns_words_apart(words) if words[:1] == ["launch"] else words)
    typed = vars(found)
    if unknown:
        typed["parser"].refuse(unknown)
    if typed.pop("version", False):
        return _print_version
    if "command" not in typed:
        parser.error("the command is missing")
    del typed["parser"]
    command: Command = typed.pop("command")
    manner = Manner(**{one.name: typed.pop(one.name) for one in fields(Manner) if one.name in typed})
    if o.SEQ_LEN in command.options:
        typed["model_options"] = {name: typed.pop(name) for name in o.MODEL_OPTIONS if name in typed}
    return functools.partial(_run, command.body, manner, typed)


def _with_torchruns_words_apart(words: Sequence[str]) -> list[str]:
    """Put ``--`` before the first word that is not an option of `launch`. argparse leaves the words after it alone."""
    own = {name for one in (*COMMANDS["launch"].options, *o.OF_ALL) for name in one.names}
    place = 1
    while place < len(words) and words[place].partition("=")[0] in own:
        place += 2 if words[place] == "--plan" else 1
    return [*words[:place], *([] if words[place : place + 1] == ["--"] else ["--"]), *words[place:]]


def _print_version() -> int:
    from autosplit import __version__

    sys.stdout.write(f"autosplit {__version__}\n")
    return 0


def _run(body: str, manner: Manner, typed: dict[str, Any]) -> int:
    module, name = body.split(".")
    with logged(manner):
        exit_code: int = getattr(importlib.import_module(f"autosplit.cli.commands.{module}"), name)(manner, **typed)
    return exit_code
