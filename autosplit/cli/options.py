"""Options that several commands share, and the types that read their values."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autosplit.errors import shown


@dataclass(frozen=True)
class Option:
    """An option or an argument of a command.

    Attributes:
        names: Its flags. An argument has one name, without dashes.
        panel: The heading in the help under which it is listed.
        settings: Keyword arguments of `argparse.ArgumentParser.add_argument`.
    """

    names: tuple[str, ...]
    panel: str
    settings: Mapping[str, Any]

    @property
    def usage(self) -> str:
        """The argument in the usage line, in brackets if it may be left out."""
        metavar: str = self.settings["metavar"]
        return f"[{metavar}]" if self.settings.get("nargs") in ("?", "*") else metavar


def option(names: str, metavar: str | None, text: str, panel: str = "Output", **settings: Any) -> Option:
    """Return an option that takes a value. `names` are separated by spaces, and `text` is the help."""
    return Option(tuple(names.split()), panel, {"metavar": metavar, "help": text.replace("%", "%%"), **settings})


def switch(name: str, text: str, panel: str = "Output", **settings: Any) -> Option:
    """Return an option without a value."""
    return Option((name,), panel, {"action": "store_true", "help": text, **settings})


def whole(text: str) -> int:
    """Read a whole number. The called function checks its range."""
    # int() raises an error of its own for thousands of digits.
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise ArgumentTypeError(f"{shown(text)}: expected a whole number, such as 64")
    return int(text)


def whole_or_range(text: str) -> int | str:
    """Read a whole number, or check a range such as ``256:1024``, which `tune` reads."""
    if ":" not in text:
        return whole(text)
    ends = text.split(":")
    if len(ends) != 2:
        raise ArgumentTypeError(f"{shown(text)}: expected a whole number or a range, such as 256:1024")
    return ":".join(str(whole(end)) for end in ends)


def seconds(text: str) -> float:
    """Read a number of seconds. The called function checks its range."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)}: expected a number of seconds, such as 60") from None


def split(text: str) -> tuple[int, ...]:
    """Read one batch size per device."""
    try:
        return tuple(map(whole, text.split(",")))
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{shown(text)}: expected a whole number for each device, such as --split 4,8"
        ) from None


def price(text: str) -> tuple[str, float]:
    """Read a machine and its price per hour."""
    machine, equals, money = text.rpartition("=")
    with suppress(ValueError):
        if equals and machine.strip():
            return machine, float(money)
    raise ArgumentTypeError(
        f"{shown(text)}: expected a machine and money for an hour, a number without a currency, such as 2xL4=1.2"
    )


# ------------------------------------------------------------------------------------------------- every command

HELP = Option(("-h", "--help"), "Output", {"action": "help", "help": "Print this help and exit."})
OF_ALL = (
    switch("--json", "Print JSON, alone on stdout. docs/json.md describes its keys.", dest="as_json"),
    switch("--quiet", "Print the answer, and only errors on stderr."),
    switch("--verbose", "Log every step and its reason on stderr."),
    HELP,
)

# ---------------------------------------------------------------------------------------------- workload, devices

SPEC = option(
    "spec",
    "FILE[:NAME]",
    "A Python file, or package.module. NAME (default: workload) is an autosplit.Workload or a function that returns "
    "one. Or the name of a model: hf:PATH of a config.json, timm:NAME, torchvision:NAME.",
    "Workload",
)
PRECISION = option(
    "--precision",
    "none|bf16|fp16",
    "Default: the workload's. Of several, such as none,bf16, autosplit takes the fastest.",
    "Workload",
)
CHECKPOINTING = option(
    "--checkpointing",
    "auto|CLASS",
    "Class of the model's layers, or auto for a transformers model. autosplit tries to checkpoint none, every second "
    "and all of them. Default: the model as it is.",
    "Workload",
)
FITS = option(
    "--fits",
    "resume|save|eval",
    "What must also fit: a checkpoint that was loaded onto the device, a copy that is being saved, evaluation. "
    "Several are possible, as in resume,eval. Default: nothing.",
    "Workload",
)
SEQ_LEN = option(
    "--seq-len",
    "N",
    "For hf:PATH: tokens per sample. Default: 512, or the model's limit if that is lower.",
    "Workload",
    type=whole,
)
IMAGE_SIZE = option(
    "--image-size",
    "N",
    "For a named model: height and width in pixels. Default: the model's own.",
    "Workload",
    type=whole,
)
TASK = option(
    "--task",
    "TASK",
    "For hf:PATH: causal-lm, masked-lm, seq2seq, classification or token-classification. Default: that of its "
    "architecture.",
    "Workload",
)
WORKLOAD = (SPEC, SEQ_LEN, IMAGE_SIZE, TASK)
"""The argument of every command that runs a workload, and its model options."""

MODEL_OPTIONS = ("seq_len", "image_size", "task")
"""The keywords that `commands` gets as one argument, `model_options`."""

DEVICES_HELP = (
    "auto, cuda, cuda:0,2 (or xpu, npu, mps), cpu, cpu:2GiB,cpu:1GiB or sim:2xA100-40GB+1xRTX3090. Default: every "
    "visible GPU, or cpu if there is none."
)
DEVICES = option("--devices", "SPEC", DEVICES_HELP, "Devices")
STRATEGY = option(
    "--strategy",
    "auto|balanced|ddp",
    "How the devices train together. ddp starts one process per real device with torchrun. Default: auto.",
    "Devices",
)
RESERVE = option(
    "--reserve",
    "SIZE|SHARE",
    "Memory to keep free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs.",
    "Devices",
)
ISOLATE = Option(
    ("--isolate",),
    "Devices",
    {
        "action": BooleanOptionalAction,
        "help": "Run real steps in a separate process, so that a crash costs one step. Default: on GPUs and cpu:SIZE.",
    },
)

# --------------------------------------------------------------------------------------------------------- search

MAX_BATCH_SIZE = option("--max-batch-size", "N", "Largest number of samples per forward.", "Search", type=whole)
SEARCH = (
    option(
        "--effective-batch-size",
        "N|LEAST:MOST",
        "Samples per optimizer step, kept exactly, or a range to take the fastest from. Default: any number.",
        "Search",
        type=whole_or_range,
    ),
    MAX_BATCH_SIZE,
    option("--n-trials", "N", "Largest number of trials per machine. Default: 24.", "Search", type=whole),
    option(
        "--time-limit-s",
        "SECONDS",
        "Start no trial after this time. compare divides it among its machines.",
        "Search",
        type=seconds,
    ),
    option("--storage", "URL", "An Optuna storage that keeps the study.", "Search"),
    option("--seed", "N", "Random seed of the search. Default: 0.", "Search", type=whole),
    option(
        "--profile",
        "auto|refresh|off",
        "auto uses and keeps a plan for this machine and workload. refresh tunes again. off does neither. "
        "Default: auto.",
        "Search",
    ),
    option("--name", "NAME", "Keeps plans of equal workloads apart.", "Search"),
)
"""The options of the search, the same for `tune` and `compare`."""

# ------------------------------------------------------------------------------------------------- stored plans

STORED_PLAN = option(
    "which",
    "PLAN",
    "A plan's file, or the first characters of a profile's key. Default: the newest profile.",
    "Arguments",
    nargs="?",
)
KEY = option("key", "KEY", "The first characters of a profile's key.", "Arguments", nargs="?")
DETAILS = switch("--details", "Print the full report.")
CODE = switch("--code", "Print only the code that uses the plan.")
