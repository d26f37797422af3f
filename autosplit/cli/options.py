"""Declare commands and their options. The parser, the help and the keyword arguments follow from a declaration.

An option is declared as the help prints it, with its help text: ``{"--seed N": "Random seed of the search."}``.

    --seed N              an option. The metavar determines how its value is read, see `READERS`
    --force               a switch
    --isolate --no-isolate  a switch with a second name that switches it off
    --devices SPEC ...    an option that can be given several times
    spec FILE[:NAME]      a positional argument
    key [KEY]             a positional argument that may be missing

The last name is the keyword argument of the command's function. As in PEP 8, it ends with an underscore if Python has
this name: ``all_``.
"""

from __future__ import annotations

import builtins
import re
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autosplit.errors import shown


def whole(text: str) -> int:
    """Read a whole number. The command that uses the number checks its range."""
    # int() raises another error for thousands of digits.
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise ArgumentTypeError(f"{shown(text)} is not a whole number. Write digits, such as 64 or 1024.")
    return int(text)


def whole_or_range(text: str) -> int | str:
    """Read a whole number. `tune` reads a range such as ``256:1024``."""
    return text if ":" in text else whole(text)


def seconds(text: str) -> float:
    """Read a number of seconds. The command that uses the number checks its range."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)} is not a number of seconds. Write a number such as 60.") from None


def split(text: str) -> tuple[int, ...]:
    """Read one batch size per device."""
    try:
        return tuple(map(whole, text.split(",")))
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{shown(text)} is not a list of whole numbers. Write one number per device, such as 4,8."
        ) from None


def price(text: str) -> tuple[str, float]:
    """Read a machine and its price per hour."""
    machine, equals, money = text.rpartition("=")
    with suppress(ValueError):
        if equals and machine.strip():
            return machine, float(money)
    raise ArgumentTypeError(
        f"{shown(text)} is not a machine and its price per hour, such as 2xL4=1.2. Leave out the currency."
    )


READERS: Mapping[str, Callable[[str], object]] = {
    "N": whole,
    "N|LEAST:MOST": whole_or_range,
    "N,N,...": split,
    "SECONDS": seconds,
    "SPEC=MONEY": price,
}
"""Functions that read a value, by metavar. Other values are strings."""


Panel = Mapping[str, str]
"""Help texts of options, by their usage."""


class Option(NamedTuple):
    """An option or a positional argument."""

    usage: str
    help: str

    @property
    def names(self) -> list[str]:
        """The names on the command line, or the name of a positional argument."""
        words = self.usage.split()
        return [word for word in words if word.startswith("-")] or words[:1]

    @property
    def metavar(self) -> str:
        """The name of the value in the help. Empty for a switch."""
        return self.usage.removeprefix(" ".join(self.names)).strip().removesuffix(" ...")

    @property
    def keyword(self) -> str:
        """The keyword argument of the command's function."""
        name = self.names[0 if self.is_pair else -1].lstrip("-").replace("-", "_")
        return f"{name}_" if hasattr(builtins, name) and name != "help" else name

    @property
    def is_pair(self) -> bool:
        """Whether the option is a switch with a second name that switches it off."""
        return self.names[-1].startswith("--no-")

    def read(self, text: str) -> object:
        """Convert the text of a value."""
        return READERS.get(self.metavar, str)(text)

    def add_to(self, group: Any) -> None:
        """Add the option to a group of an `argparse.ArgumentParser`."""
        settings: dict[str, Any] = {"help": self.help.replace("%", "%%")}
        if not self.names[0].startswith("-"):
            counts = {"[": "+" if " [" in self.metavar else "*" if "..." in self.metavar else "?"}
            settings |= {"nargs": counts[self.metavar[0]]} if self.metavar[0] in counts else {}
        else:
            settings["dest"] = self.keyword
        if self.metavar:
            settings |= {"metavar": self.metavar, "type": self.read}
            settings |= {"action": "append"} if self.usage.endswith(" ...") else {}
        elif self.keyword == "help":
            settings["action"] = "help"
        else:
            settings["action"] = BooleanOptionalAction if self.is_pair else "store_true"
        group.add_argument(*self.names[: 1 if self.is_pair else None], **settings)


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        body: The module and its function. The function gets a `Manner` and the options that were given, and returns the
            command's `Answer`.
        text: The help. The list of commands shows its first line.
        example: Command lines that run.
        panels: The options under the headings of the help.
        subcommands: Commands that are named by a second word.
    """

    body: str
    text: str
    example: str
    panels: Mapping[str, Panel] = field(default_factory=dict)
    subcommands: Mapping[str, Command] = field(default_factory=dict)

    def groups(self) -> dict[str, list[Option]]:
        """Return the options under the headings of the help, with the options of every command."""
        return groups_of({**self.panels, "Output": {**self.panels.get("Output", {}), **OF_ALL}})


def groups_of(panels: Mapping[str, Panel]) -> dict[str, list[Option]]:
    """Return the options of panels."""
    return {title: [Option(*one) for one in panel.items()] for title, panel in panels.items()}


HELP = {"-h --help": "Print this help and exit."}
OF_ALL = {
    "--json": "Print only JSON on stdout. docs/json-schema.json describes the keys.",
    "--quiet": "Print the result, and only errors on stderr.",
    "--verbose": "Log every step and its reason on stderr.",
    **HELP,
}
"""The options of every command."""

SPEC = {
    "spec FILE[:NAME]": "A Python file or package.module. NAME (default: workload) is an autosplit.Workload, or a "
    "function that returns a Workload. You can also name a model: hf:PATH of a config.json, timm:NAME, "
    "torchvision:NAME."
}
MODEL = {
    "--seq-len N": "For hf:PATH: tokens per sample. Default: 512, or the model's limit if that is lower.",
    "--image-size N": "For a named model: height and width in pixels. Default: the model's own.",
    "--task TASK": "For hf:PATH: causal-lm, masked-lm, seq2seq, classification or token-classification. Default: the "
    "task of the architecture in config.json.",
    "--lora SETTINGS": "For hf:PATH: train LoRA adapters only, as in r=16,alpha=32,targets=all-linear. With "
    "quantize=nf4, the frozen weights have 4 bits (QLoRA).",
    "--optimizer NAME": "For a named model: adamw_torch, adamw_8bit, paged_adamw_8bit or paged_adamw_32bit. Default: "
    "adamw_torch.",
}
"""The options of named models. A command gets them as one keyword argument, `model_options`."""

WORKLOAD = {**SPEC, **MODEL}
"""The options of every command that runs a workload."""

PRECISION = {
    "--precision none|bf16|fp16": "Default: the workload's precision. If you name several, as in none,bf16, autosplit "
    "takes the fastest."
}
TRAINING = {
    **PRECISION,
    "--checkpointing auto|CLASS": "Class of the model's layers, or auto for a transformers model. autosplit tries to "
    "checkpoint none, every second and all of them. Default: the unchanged model.",
}

DEVICES_HELP = (
    "auto, cuda, cuda:0,2 (or xpu, npu, mps), cpu, cpu:2GiB,cpu:1GiB or sim:2xA100-40GB+1xRTX3090. Default: every "
    "visible GPU, or cpu if there is none."
)
STEPS = {
    "--reserve SIZE|SHARE": "Memory to keep free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs.",
    "--isolate --no-isolate": "Run real steps in a separate process, so that a crash loses one step only. Default: on "
    "for GPUs and cpu:SIZE.",
}
STRATEGY = {
    "--strategy auto|balanced|ddp": "How the devices train together. ddp starts one process per real device with "
    "torchrun. Default: auto.",
    **STEPS,
}

MAX_BATCH_SIZE = {"--max-batch-size N": "Largest number of samples per forward."}
SEARCH = {
    "--effective-batch-size N|LEAST:MOST": "Samples per optimizer step: an exact number, or a range from which "
    "autosplit takes the fastest. Default: any number.",
    **MAX_BATCH_SIZE,
    "--n-trials N": "Largest number of trials per machine. Default: 24.",
    "--time-limit-s SECONDS": "Start no trial after this time. compare divides the time among its machines.",
    "--seed N": "Random seed of the search. Default: 0.",
    "--profile auto|refresh|off": "auto uses a saved plan for this machine and workload, or saves a new plan. refresh "
    "tunes again. off neither reads nor saves plans. Default: auto.",
    "--name NAME": "A name that distinguishes the plans of equal workloads.",
}

KEY = {"key [KEY]": "The first characters of a profile's key."}
PLAN = {"which [PLAN]": "A plan's file, or the first characters of a profile's key. Default: the newest profile."}
DETAILS = {"--details": "Print the full report."}
CODE = {"--code": "Print only the code that uses the plan."}


def flags_of(keywords: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as flags of the command line."""
    flags = []
    for keyword, value in keywords.items():
        flag = keyword.replace("_", "-")
        flags.append(f"--no-{flag}" if value is False else f"--{flag}")
        if not isinstance(value, bool):
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags
