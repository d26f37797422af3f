"""The command line: ``devices``, ``tune``, ``show``. It parses, calls, prints, and turns errors into exit codes.

0 done, 2 bad input, 3 does not fit, 4 interrupted (the best so far is shown and kept), 5 the user's own code raised.
The answer goes to stdout and everything else to stderr. torch, rich and the plan's classes are imported by the
command that needs them: ``--help`` waits for none of them.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from autosplit.errors import AutosplitError, InputError, PlanError, UserCodeError, from_user_code, user_frames
from autosplit.terminal import progress_bar, stdout_kept_clean

if TYPE_CHECKING:
    from autosplit.plan import Plan
    from autosplit.report import Origin

__all__ = ["main"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 4

Command = Callable[[], int]
"""A command with its arguments, parsed and not yet run: typer is to parse only, its handling of errors is not ours."""

app = typer.Typer(
    name="autosplit",
    help="Find how much of the batch goes on which GPU, how big it may be, and how many accumulation steps to take.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(argv: list[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The arguments without the program's name. Default: this process's.

    Returns:
        The exit code. Errors that are the user's to mend end as one line on stderr; others, which are ours, are raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        parsed = typer.main.get_command(app).main(arguments, prog_name="autosplit", standalone_mode=False)
        return parsed() if callable(parsed) else int(parsed or 0)
    except typer.TyperException as error:
        return _failed(f"{error.format_message().rstrip('.')}; see autosplit {_help_for(arguments)}", EXIT_USAGE)
    except UserCodeError as error:
        return _failed(str(error), error.exit_code, error.frames)
    except AutosplitError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted before there was any plan; run it again", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _failed(message: str, exit_code: int, frames: tuple[str, ...] = ()) -> int:
    """Say on one line what went wrong, with the user's own frames below."""
    lines = [f"error: {' '.join(message.split())}", *(f"  {frame}" for frame in frames)]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return exit_code


def _help_for(arguments: list[str]) -> str:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return f"{arguments[0]} --help" if arguments[0] in known else "--help"


# --------------------------------------------------------------------------------------------------------- commands


@app.command("devices")
def devices_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Command:
    """List the GPUs with their load."""
    return functools.partial(_devices, as_json=as_json)


def _devices(*, as_json: bool) -> int:
    from autosplit.survey import survey_devices

    # Both libraries talk while they start; the table is alone on stdout.
    with stdout_kept_clean():
        devices, notes = survey_devices()
    if as_json:
        import msgspec

        _print_json(msgspec.json.format(msgspec.json.encode({"devices": devices, "notes": notes}), indent=2).decode())
    else:
        from autosplit.report import print_devices
        from autosplit.terminal import console_for

        print_devices(devices, notes, console_for(sys.stdout))
    return 0


_Text = str | None


@app.command("tune")
def tune_command(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, or package.module, whose NAME (workload) is an autosplit.Workload or a function "
            "that returns one.",
        ),
    ],
    devices: Annotated[
        _Text,
        typer.Option(
            metavar="SPEC",
            help="cuda, cuda:0,2, cpu, cpu:2GiB,cpu:1GiB or sim:2xA100-40GB+1xRTX3090. Default: every visible GPU; "
            "without any, cpu.",
        ),
    ] = None,
    strategy: Annotated[
        _Text, typer.Option(metavar="auto|balanced|ddp", help="What is searched. Default: auto.")
    ] = None,
    precision: Annotated[_Text, typer.Option(metavar="none|bf16|fp16", help="Default: what the workload says.")] = None,
    effective_batch_size: Annotated[
        _Text, typer.Option(metavar="N", help="Samples per optimizer step, kept exactly. Default: whatever is best.")
    ] = None,
    max_batch_size: Annotated[_Text, typer.Option(metavar="N", help="The most samples per forward.")] = None,
    reserve: Annotated[
        _Text,
        typer.Option(metavar="SIZE|SHARE", help="Kept free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs."),
    ] = None,
    n_trials: Annotated[_Text, typer.Option(metavar="N", help="Trials of the search, at most. Default: 24.")] = None,
    time_limit_s: Annotated[_Text, typer.Option(metavar="SECONDS", help="No trial begins after this long.")] = None,
    storage: Annotated[_Text, typer.Option(metavar="URL", help="An Optuna storage that keeps the study.")] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Tune in a process of its own, which a crash ends instead of this one.")
    ] = False,
    profile: Annotated[
        _Text,
        typer.Option(
            metavar="auto|refresh|off",
            help="Use and keep a plan for this machine and workload; tune anew; or neither. Default: auto.",
        ),
    ] = None,
    name: Annotated[_Text, typer.Option(metavar="NAME", help="Keeps plans for equal workloads apart.")] = None,
    seed: Annotated[_Text, typer.Option(metavar="N", help="Of the search. Default: 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, alone on stdout.")] = False,
    output: Annotated[_Text, typer.Option(metavar="PATH", help="Save the plan as JSON.")] = None,
) -> Command:
    """Find the split, batch and steps of a workload."""
    given: dict[str, Any] = {
        "devices": devices,
        "strategy": strategy,
        "precision": precision,
        "effective_batch_size": _whole("--effective-batch-size", effective_batch_size),
        "max_batch_size": _whole("--max-batch-size", max_batch_size),
        "reserve": reserve,
        "n_trials": _whole("--n-trials", n_trials),
        "time_limit_s": _seconds("--time-limit-s", time_limit_s),
        "storage": storage,
        "isolate": isolate or None,
        "profile": profile,
        "name": name,
        "seed": _whole("--seed", seed),
    }
    keywords = {keyword: value for keyword, value in given.items() if value is not None}
    return functools.partial(_tune, spec, keywords, as_json=as_json, output=output)


def _whole(flag: str, text: str | None) -> int | None:
    """Read a whole number; its range is `tune`'s to check, which has the same words for Python."""
    if text is None:
        return None
    # Bounded: int() refuses thousands of digits with an error of its own.
    digits = text.strip().lstrip("+-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and len(text.strip()) - len(digits) <= 1):
        raise InputError(f"{flag} {text!r}: expected a whole number; write it as {flag} 64")
    return int(text)


def _seconds(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{flag} {text!r}: expected a number of seconds; write it as {flag} 60") from None


@app.command("show")
def show_command(
    which: Annotated[
        _Text,
        typer.Argument(
            metavar="[PLAN]",
            help="A file that a plan was saved to, or the beginning of a profile's key. Default: list the profiles "
            "and show the newest.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, alone on stdout.")] = False,
) -> Command:
    """Show a saved plan, or those remembered."""
    return functools.partial(_show, which, as_json=as_json)


# ------------------------------------------------------------------------------------------------------------- tune


def _tune(spec: str, keywords: dict[str, Any], *, as_json: bool, output: str | None) -> int:
    _check_before_running(keywords, output)
    from autosplit.loading import Loaded, load_workload

    with stdout_kept_clean():
        workload = load_workload(spec)
        # A process of its own loads the file again: classes defined in it can't be sent there.
        sent = Loaded(spec, workload) if keywords.get("isolate") and not isinstance(workload, Loaded) else workload
        plan, interrupted = _tuned(sent, spec, keywords)
    path: Path | None = getattr(interrupted, "path", None)
    saved = None if path is None else str(path)
    unsaved: PlanError | None = None
    if output is not None:
        try:
            plan.save(output)
            saved = output
        except PlanError as error:
            unsaved = error
    if interrupted is not None:
        _failed(_interrupted_text(saved), EXIT_INTERRUPTED)
    _print_plan(plan, _origin(spec, workload, keywords, saved), as_json=as_json)
    if unsaved is not None:
        raise unsaved  # only now: what took so long to find has been shown
    return 0 if interrupted is None else EXIT_INTERRUPTED


def _interrupted_text(saved: str | None) -> str:
    kept = f"saved as {saved}" if saved else "not saved (--output PATH saves it)"
    return f"interrupted: the best plan so far is shown and {kept}; run it again to tune to the end"


def _check_before_running(keywords: Mapping[str, Any], output: str | None) -> None:
    """Refuse bad flags before the user's file runs, which may take long."""
    from autosplit.devices import parse_devices, parse_reserve

    if "devices" in keywords:
        parse_devices(keywords["devices"])
    parse_reserve(keywords.get("reserve"))
    if output is not None and Path(output).is_dir():
        raise InputError(f"--output {output} is a folder; expected a file; write it as {Path(output) / 'plan.json'}")
    if output is not None and Path(output).exists():
        from autosplit.plan import Plan

        try:
            Plan.load(output)
        except PlanError:
            raise InputError(
                f"--output {output} exists and is not a plan; expected a new file, or a plan to replace; "
                "choose another name"
            ) from None


def _tuned(workload: object, spec: str, keywords: Mapping[str, Any]) -> tuple[Plan, KeyboardInterrupt | None]:
    """Tune, with a bar on a terminal.

    Returns:
        The plan, and what interrupted the tuning if it is only the best so far.
    """
    from autosplit import tuning

    try:
        with progress_bar() as progress:
            return tuning.tune(workload, **keywords, progress=progress), None
    except KeyboardInterrupt as error:
        # TuningInterrupted carries the best so far; Ctrl-C before that carries nothing.
        best: Plan | None = getattr(error, "plan", None)
        if best is None:
            raise
        return best, error
    except AutosplitError:
        raise
    except Exception as error:
        if not user_frames(error.__traceback__):
            raise  # ours, and no one is helped by hiding where
        raise from_user_code(error, f"the code of {spec}") from error


def _origin(spec: str, workload: object, keywords: Mapping[str, Any], saved: str | None) -> Origin:
    """Say how this plan is had again: from its file, or by the same call, which its profile answers."""
    from autosplit.loading import split_spec
    from autosplit.report import Origin

    elsewhere = {keyword: value for keyword, value in keywords.items() if keyword not in {"devices", "profile"}}
    command = shlex.join(["python", "-m", "autosplit", "tune", spec, "--devices", "cuda", *_flags(elsewhere)])
    if saved is not None:
        return Origin(f"autosplit.Plan.load({_quoted(saved)})", command=command)
    place, name = split_spec(spec)
    module = Path(place).stem if place.endswith(".py") else place
    same = {k: v for k, v in keywords.items() if (k, v) != ("profile", "refresh")}
    arguments = "".join(f", {keyword}={_quoted(value)}" for keyword, value in same.items())
    remark = "tunes again: --output PATH saves it" if same.get("profile") == "off" else "answered from its profile"
    return Origin(
        f"autosplit.tune({name}{'()' if callable(workload) else ''}{arguments})",
        (f"from {module} import {name}" + (f"  # {place}" if place.endswith(".py") else ""),),
        remark,
        command,
    )


def _quoted(value: object) -> str:
    """Write a value as Python, a string in the quotes that formatters like."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flags(keywords: Mapping[str, Any]) -> list[str]:
    flags = []
    for keyword, value in keywords.items():
        flags.append(f"--{keyword.replace('_', '-')}")
        flags.extend([] if value is True else [str(value)])
    return flags


# ------------------------------------------------------------------------------------------------------------- show


def _show(which: str | None, *, as_json: bool) -> int:
    from autosplit.plan import Plan
    from autosplit.report import Origin

    if which is not None and (Path(which).is_file() or not _is_key(which)):
        path, plan = Path(which), Plan.load(which)
    elif which is not None:
        path, plan = _profile(which)
    else:
        newest = _newest(as_json=as_json)
        if newest is None:
            return 0
        path, plan = newest
    _print_plan(plan, Origin(f"autosplit.Plan.load({_quoted(str(path))})"), as_json=as_json)
    return 0


def _is_key(which: str) -> bool:
    return all(character in "0123456789abcdef" for character in which)


def _profile(key: str) -> tuple[Path, Plan]:
    """Find the one profile whose key begins so."""
    from autosplit.plan import Plan
    from autosplit.profiles import profiles

    paths = [path for path, _ in profiles()]
    matches = [path for path in paths if path.stem.startswith(key)]
    if len(matches) == 1:
        return matches[0], Plan.load(matches[0])
    found = ", ".join(path.stem[:12] for path in matches or paths[:5]) or "none"
    raise InputError(
        f"{key!r} is neither a file nor the beginning of one profile's key; expected one of them; "
        f"{'these begin so' if matches else 'the newest keys are'}: {found}"
    )


def _newest(*, as_json: bool) -> tuple[Path, Plan] | None:
    """List the profiles, and return the newest that can be read."""
    from autosplit.profiles import profiles
    from autosplit.report import print_profiles
    from autosplit.terminal import console_for

    found = profiles()
    readable = [(path, plan) for path, plan in found if plan is not None]
    if as_json and not readable:
        raise InputError("no plan is remembered; expected one to print; make one with autosplit tune FILE")
    if not as_json and found:
        print_profiles(found, console_for(sys.stdout))
    elif not as_json:
        sys.stdout.write("no plan is remembered yet; autosplit tune FILE makes one\n")
    return readable[0] if readable else None


# ----------------------------------------------------------------------------------------------------------- output


def _print_plan(plan: Plan, origin: Origin, *, as_json: bool) -> None:
    if as_json:
        _print_json(plan.to_json())
        return
    from autosplit.report import print_plan
    from autosplit.terminal import console_for

    print_plan(plan, console_for(sys.stdout), origin=origin)


def _print_json(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
