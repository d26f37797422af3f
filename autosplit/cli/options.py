"""Define the options that several commands share, and convert an option's declaration for argparse.

An option is declared as the help prints it, with its help text: ``{"--seed N": "Random seed of the search."}``. The
metavar determines the type of the value, see `TYPES`. An option without a metavar is a switch. ``...`` after the
metavar means that the option can be given several times. A declaration without dashes is an argument, such as
``"spec FILE[:NAME]"``.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from autosplit.errors import shown

Options = Mapping[str, str]
"""Help text by declaration."""


def whole(text: str) -> int:
    """Read a whole number. The command that uses the number checks its range."""
    # int() raises another error for thousands of digits.
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise ArgumentTypeError(f"{shown(text)} is not a whole number. Write digits, such as 64 or 1024.")
    return int(text)


def whole_or_range(text: str) -> int | str:
    """Read a whole number, or check a range such as ``256:1024``, which `tune` reads."""
    if ":" not in text:
        return whole(text)
    ends = text.split(":")
    if len(ends) != 2:
        raise ArgumentTypeError(f"{shown(text)} is neither a whole number nor a range. Write 256, or 256:1024.")
    return ":".join(str(whole(end)) for end in ends)


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


TYPES: Mapping[str, Callable[[str], object]] = {
    "N": whole,
    "N|LEAST:MOST": whole_or_range,
    "N,N,...": split,
    "SECONDS": seconds,
    "SPEC=MONEY": price,
}
"""Functions that read a value, by metavar. Other values are strings."""

_COUNTS = {"which": "?", "key": "?", "keys": "*", "arguments": "+"}
_KEYWORDS = {
    "--json": "as_json",
    "--print": "print_only",
    "--all": "everything",
    "--yes": "confirmed",
    "--input": "shape",
}


def settings_of(declaration: str, text: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an option, and its keywords for `argparse.ArgumentParser.add_argument`."""
    found = re.fullmatch(r"((?:-\S+ ?)+|\w+ )(.*?)( \.\.\.)?", declaration)
    assert found is not None, declaration
    names, metavar = found[1].split(), found[2]
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    if names[-1] in _KEYWORDS:
        settings["dest"] = _KEYWORDS[names[-1]]
    if names[-1] in ("--help", "--isolate"):
        settings["action"] = "help" if names[-1] == "--help" else BooleanOptionalAction
    elif not metavar:
        settings["action"] = "store_true"
    else:
        settings |= {"metavar": metavar, "type": TYPES.get(metavar, str)}
    if found[3]:
        settings["action"] = "append"
    if metavar.startswith("[") and names == ["spec"]:
        settings["nargs"] = "?"
    if names[0] in _COUNTS:
        settings["nargs"] = _COUNTS[names[0]]
    return names, settings


HELP = {"-h --help": "Print this help and exit."}
OF_ALL = {
    "--json": "Print only JSON on stdout. docs/json-schema.json describes the keys.",
    "--quiet": "Print the result, and only errors on stderr.",
    "--verbose": "Log every step and its reason on stderr.",
    **HELP,
}
"""The options of every command."""

SPEC = "spec FILE[:NAME]"
OPTIONAL_SPEC = "spec [FILE[:NAME]]"
WORKLOAD = {
    SPEC: "A Python file or package.module. NAME (default: workload) is an autosplit.Workload, or a function that "
    "returns a Workload. You can also name a model: hf:PATH of a config.json, timm:NAME, torchvision:NAME.",
    "--seq-len N": "For hf:PATH: tokens per sample. Default: 512, or the model's limit if that is lower.",
    "--image-size N": "For a named model: height and width in pixels. Default: the model's own.",
    "--task TASK": "For hf:PATH: causal-lm, masked-lm, seq2seq, classification or token-classification. Default: the "
    "task of the architecture in config.json.",
    "--lora SETTINGS": "For hf:PATH: train LoRA adapters only, as in r=16,alpha=32,targets=all-linear. With "
    "quantize=nf4, the frozen weights have 4 bits (QLoRA).",
    "--optimizer NAME": "For a named model: adamw_torch, adamw_8bit, paged_adamw_8bit or paged_adamw_32bit. Default: "
    "adamw_torch.",
}
"""The options of every command that runs a workload."""

MODEL_OPTIONS = ("seq_len", "image_size", "task", "lora", "optimizer")
"""Keywords that `commands` gets as one argument, `model_options`."""

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
    "--isolate": (
        "Run real steps in a separate process, so that a crash loses one step only. Default: on for GPUs and cpu:SIZE."
    ),
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
OUTPUT_FILE = "-o --output PATH"
