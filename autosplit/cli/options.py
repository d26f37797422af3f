"""Flags that several commands share, the reading of their values, and a command that is parsed and not yet run."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any

import typer

from autosplit.cli.output import Manner, logged
from autosplit.errors import InputError, shown

Text = str | None


def option(metavar: str | None, said: str, *names: str) -> Any:
    """Return the typer option of a parameter, None by default.

    Args:
        said: The option's help.
        names: The option's flags. Give them if `metavar` is the parameter's name in capitals.
    """
    return typer.Option(None, *names, metavar=metavar, help=said)


Details = Annotated[bool, typer.Option("--details", help="Say all there is to say, not the short report.")]

Code = Annotated[bool, typer.Option("--code", help="Print the lines to paste that use the plan, and nothing else.")]

Isolate = Annotated[
    bool | None,
    typer.Option(
        "--isolate/--no-isolate",
        help="Run real steps in a process of its own, so that a crash costs one step. Default: on GPUs and cpu:SIZE.",
        show_default=False,
    ),
]


SameWorkload = Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="The workload, as for tune.")]

SEQ_LEN = option("N", "Of hf:PATH: tokens of a sample. Default: 512, or as many as it takes.")
IMAGE_SIZE = option("N", "Of a named model: height and width in pixels. Default: the model's own.")
TASK = option(
    "TASK",
    "Of hf:PATH: causal-lm, masked-lm, seq2seq, classification or token-classification. Default: its architecture's.",
    "--task",  # typer < 0.28 names an option after its metavar if the two differ only in case
)
RESERVE = option("SIZE|SHARE", "Kept free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs.")

StoredPlan = Annotated[
    Text,
    typer.Argument(
        metavar="[PLAN]",
        help="A file that a plan was saved to, or the beginning of a profile's key. Default: the newest profile.",
    ),
]

ToRun = Callable[[], int]
"""A command with its arguments, parsed and not yet run: typer is to parse only, its handling of errors is not ours."""

_MODEL_OPTIONS = ("seq_len", "image_size", "task")


def example(*lines: str) -> str:
    """Return the end of a command's help; the mark before it keeps a line to copy on one line."""
    return "\b\n" + "\n".join([f"Example{'s' * (len(lines) > 1)}:", *(f"  {line}" for line in lines)])


Declared = Callable[..., None]
"""A function whose parameters are a command's options, and whose docstring is its help."""


def command(
    app: typer.Typer, name: str, body: str, *examples: str, **settings: Any
) -> Callable[[Declared], Callable[..., ToRun]]:
    """Register a function as a command; `settings` are typer's. See `parsed_by`."""

    def registered(declared: Declared) -> Callable[..., ToRun]:
        parsed = parsed_by(body)(declared)
        app.command(name, epilog=example(*examples), **settings)(parsed)
        return parsed

    return registered


def parsed_by(body: str) -> Callable[[Declared], Callable[..., ToRun]]:
    """Let a function return what is to run with what was typed; it gets the flags that every command has, too.

    Args:
        body: A function of a module of `commands`, called with a `Manner` and what was typed, less what was left out.
            The options of a named model are one argument, `model_options`.
    """

    def declared_by(declared: Declared) -> Callable[..., ToRun]:
        own = inspect.signature(declared, eval_str=True).parameters

        def parsed(context: typer.Context, **typed: Any) -> ToRun:
            flags = {one.name: typed.pop(one.name, False) for one in fields(Manner)}
            if isinstance(context.obj, Manner):  # of those before a group's command
                flags = {flag: given or getattr(context.obj, flag) for flag, given in flags.items()}
            context.obj = Manner(**flags)
            given = keywords_given(**typed)
            if "seq_len" in own:
                given["model_options"] = {one: given.pop(one) for one in _MODEL_OPTIONS if one in given}
            return functools.partial(_run, body, context.obj, given)

        parsed.__doc__ = declared.__doc__
        of_all = inspect.signature(_of_all, eval_str=True).parameters
        parsed.__signature__ = inspect.Signature([*own.values(), *(of_all[one] for one in of_all if one not in own)])  # type: ignore[attr-defined]
        return parsed

    return declared_by


def _of_all(
    *,
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, alone on stdout. Its keys are in docs/json.md.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer, and nothing but errors on stderr.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log on stderr every step that is tried, and why.")
    ] = False,
) -> None:
    """Declare what every command has."""


def _run(body: str, manner: Manner, given: dict[str, Any]) -> int:
    place, name = body.split(".")
    with logged(manner):
        exit_code: int = getattr(importlib.import_module(f"autosplit.cli.commands.{place}"), name)(manner, **given)
    return exit_code


def _whole(flag: str, text: str) -> int:
    """Read a whole number; its range is `tune`'s to check, which has the same words for Python."""
    # Bounded: int() refuses thousands of digits with an error of its own.
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise InputError(f"{flag} {text!r}: expected a whole number; write it as {flag} 64", code="flag-whole-number")
    return int(text)


def _whole_or_range(flag: str, text: str) -> int | str:
    """Read a whole number, or a range as ``256:1024``, which `tune` knows as well."""
    if ":" not in text:
        return _whole(flag, text)
    ends = text.split(":")
    if len(ends) != 2:
        raise InputError(
            f"{flag} {text!r}: expected a whole number or a range; write it as {flag} 256:1024", code="flag-range"
        )
    return ":".join(str(_whole(flag, end)) for end in ends)


def _seconds(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"{flag} {text!r}: expected a number of seconds; write it as {flag} 60", code="flag-seconds"
        ) from None


def _split(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(_whole(flag, share) for share in text.split(","))
    except InputError:
        raise InputError(
            f"{flag} {shown(text)}: expected a whole number for each device; write it as {flag} 4,8",
            code="flag-split",
        ) from None


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "effective_batch_size": _whole_or_range,
    "accumulation_steps": _whole,
    "image_size": _whole,
    "max_batch_size": _whole,
    "n_trials": _whole,
    "processes": _whole,
    "seed": _whole,
    "seq_len": _whole,
    "split": _split,
    "time_limit_s": _seconds,
}


def keywords_given(**options: Any) -> dict[str, Any]:
    """Return the keywords of the options that were given, numbers read; the others have the defaults of `tune`."""
    keywords = {}
    for keyword, value in options.items():
        if value is not None:
            read = _READERS.get(keyword)
            keywords[keyword] = value if read is None else read(f"--{keyword.replace('_', '-')}", value)
    return keywords


def price_given(text: str) -> tuple[str, float]:
    """Read a machine and its price for an hour."""
    machine, equals, money = text.rpartition("=")
    with suppress(ValueError):
        if equals and machine.strip():
            return machine, float(money)
    raise InputError(
        f"--price {shown(text)}: expected a machine and money for an hour, a number without a currency; write it as "
        "--price 2xL4=1.2",
        code="price-format",
    )
