"""The command line: its flags and helps. What a command does is in `commands`, a module for each.

Exit codes: 0 done, 2 bad input, 3 does not fit, 4 interrupted (the best so far is shown and kept), 5 the user's own
code raised. The answer goes to stdout and everything else to stderr. torch, rich and the plan's classes are imported by
the command that needs them: ``--help`` waits for none of them.
"""

from __future__ import annotations

import errno
import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from autosplit.cli.exit_code import reported
from autosplit.cli.options import (
    Code,
    Command,
    Details,
    ImageSize,
    Isolate,
    Json,
    Layers,
    LengthsFile,
    LoaderFile,
    Quiet,
    Reserve,
    SameWorkload,
    SeqLen,
    StoredPlan,
    Task,
    Text,
    Verbose,
    example,
    keywords_given,
    price_given,
    to_run,
)
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed
from autosplit.cli.profiles_options import profiles_app
from autosplit.cli.signals import leaves_at_the_second
from autosplit.cli.step_options import check_command, measure_command, probe_command
from autosplit.cli.terminal import bars_say_it_stops, restored_terminal, sent_nowhere, streams_made_fit
from autosplit.errors import AutosplitError, InputError, UserCodeError, shown

__all__ = ["main", "run"]

EXIT_USAGE = 2
TYPERS_INTERRUPTED = 130
"""What typer returns where Ctrl-C comes while it parses."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EAGAIN)
"""Errors of a stdout that takes no more: its disk is full, its terminal gone, it is for reading only."""

app = typer.Typer(
    name="autosplit",
    help="Find how much of the batch goes on which GPU, how big it may be, and how many accumulation steps to take.",
    epilog="\b\n"
    "Exit codes:\n"
    "  0  done\n"
    "  2  bad input\n"
    "  3  does not fit\n"
    "  4  interrupted; the best so far is shown and kept\n"
    "  5  the workload's own code raised\n"
    "Ctrl-C stops with the best so far, a second one at once.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(argv: list[str] | None = None) -> int:
    """Run a command line, and return the exit code.

    Errors that are the user's to mend end as one line on stderr; others, which are ours, are raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        parsed = _parser().main(arguments, prog_name="autosplit", standalone_mode=False)
        if parsed == TYPERS_INTERRUPTED:
            raise KeyboardInterrupt
        code = parsed() if callable(parsed) else int(parsed or 0)
        sys.stdout.flush()  # here, where it can still be told that it can't be written
        return code
    except typer.TyperException as error:
        said = f"{error.format_message().rstrip('.')}; see".replace("?; see", "? See")
        return failed(f"{said} autosplit {_help_for(arguments)}", EXIT_USAGE)
    except UserCodeError as error:
        return failed(str(error), error.exit_code, error.frames)
    except AutosplitError as error:
        return failed(str(error), error.exit_code, getattr(error, "frames", ()))
    except KeyboardInterrupt:
        return failed("interrupted before there was any plan; run it again", EXIT_INTERRUPTED)
    except BrokenPipeError:
        sent_nowhere(sys.stdout)  # the reader, such as `head`, has seen enough
        return 0
    except OSError as error:
        if (mended := _users_to_mend(error)) is None:
            raise
        return failed(mended, EXIT_USAGE)


def _users_to_mend(error: OSError) -> str | None:
    """Return what to say of an error of the system that has an end of the user's; None where it is ours."""
    if error.errno == errno.ENAMETOOLONG:
        return f"{shown(error.filename)} is longer than a file's name can be; expected a file; correct it"
    if error.filename is None and error.errno in UNWRITABLE:  # errors of files that are ours to write name them
        sent_nowhere(sys.stdout)
        return f"stdout can't be written: {error.strerror}; expected one that takes the answer; send it elsewhere"
    if error.errno == errno.ENOENT and _is_nowhere():
        return "the working directory is gone; expected one that exists; change to another one with cd"
    return None


def _is_nowhere() -> bool:
    """Tell whether the working directory was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def run() -> NoReturn:
    """Run this process's command line, and exit; a second Ctrl-C ends it at once, with the same exit code."""
    streams_made_fit()
    if sys.argv[1:2] in (["show"], ["profiles"]):
        gc.disable()  # what is made is kept to the end, which comes soon: looking for garbage is a tenth of the time
    # torchrun passes on what its processes may have had themselves.
    leaves_at_the_second(_left, first=bars_say_it_stops, apart_s=1.0 if os.environ.get("RANK") else 0.0)
    try:
        code = main()
    except KeyboardInterrupt:  # while the first was being told of
        code = EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(reported(code))


def _left() -> int:
    """Leave a terminal as it was found, and return what to exit with."""
    exit_code = reported(EXIT_INTERRUPTED)
    restored_terminal()
    return exit_code


class _AsTyped:
    """A parameter that typer leaves as it is: to make texts of our texts, it would import pydantic."""

    @staticmethod
    def coerce(value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG004  # as typer calls it
        """Return a value as it was typed; for none of several, none."""
        return () if value is None and (param.multiple or param.nargs == -1) else value


def _parser() -> Any:
    """Make the parser of the command line."""
    made: Any = typer.main.get_command(app)
    waiting = [made]
    for command in waiting:
        waiting.extend(getattr(command, "commands", {}).values())
        for parameter in command.get_params(typer.Context(command)):  # with that of --help
            if hasattr(parameter, "get_runtime_param"):  # what has none of typer's own does without it anyway
                parameter.get_runtime_param = _AsTyped
    return made


def _help_for(arguments: list[str]) -> str:
    """Return the help of the command that was meant, as far as it is one."""
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    if arguments[0] not in known:
        return "--help"
    if (
        arguments[0] == "profiles"
        and arguments[1:2]
        and arguments[1] in {c.name for c in profiles_app.registered_commands}
    ):
        return f"profiles {arguments[1]} --help"
    return f"{arguments[0]} --help"


app.add_typer(profiles_app, name="profiles")


# --------------------------------------------------------------------------------------------------------- commands


@app.command("devices", epilog=example("autosplit devices --json"))
def devices_command(as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> Command:
    """List the GPUs with their load."""
    return to_run("devices.devices", Manner(as_json, quiet, verbose))


@app.command("doctor", epilog=example("autosplit doctor --json"))
def doctor_command(
    devices: Annotated[Text, typer.Option(metavar="SPEC", help="Default: every GPU; without any, cpu:256MiB.")] = None,
    save: Annotated[
        Text, typer.Option(metavar="FILE", help="Keep the rates of the cards, for AUTOSPLIT_GPUS and sim: devices.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Examine this machine, and name what to mend."""
    return to_run("doctor.doctor", Manner(as_json, quiet, verbose), devices, save)


@app.command(
    "tune",
    epilog=example("autosplit tune examples/char_gpt.py --devices sim:RTX3090 --effective-batch-size 256 --n-trials 2"),
)
def tune_command(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, or package.module, whose NAME (workload) is an autosplit.Workload or a function "
            "that returns one. Or a model without a file: hf:PATH of a config.json, timm:NAME, torchvision:NAME.",
        ),
    ],
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="auto, cuda, cuda:0,2 (or xpu, npu, mps), cpu, cpu:2GiB,cpu:1GiB or sim:2xA100-40GB+1xRTX3090. "
            "Default: auto, every visible GPU; without any, cpu.",
        ),
    ] = None,
    strategy: Annotated[
        Text,
        typer.Option(
            metavar="auto|balanced|ddp",
            help="What is searched; ddp starts a process for each real device, by torchrun. Default: auto.",
        ),
    ] = None,
    precision: Annotated[
        Text,
        typer.Option(
            metavar="none|bf16|fp16",
            help="Several, as in none,bf16: the fastest is taken. Default: what the workload says.",
        ),
    ] = None,
    effective_batch_size: Annotated[
        Text,
        typer.Option(
            metavar="N|LEAST:MOST",
            help="Samples per optimizer step, kept exactly; or the fastest of a range. Default: whatever is best.",
        ),
    ] = None,
    max_batch_size: Annotated[Text, typer.Option(metavar="N", help="The most samples per forward.")] = None,
    reserve: Reserve = None,
    n_trials: Annotated[Text, typer.Option(metavar="N", help="Trials of the search, at most. Default: 24.")] = None,
    time_limit_s: Annotated[Text, typer.Option(metavar="SECONDS", help="No trial begins after this long.")] = None,
    storage: Annotated[Text, typer.Option(metavar="URL", help="An Optuna storage that keeps the study.")] = None,
    isolate: Isolate = None,
    profile: Annotated[
        Text,
        typer.Option(
            metavar="auto|refresh|off",
            help="Use and keep a plan for this machine and workload; tune anew; or neither. Default: auto.",
        ),
    ] = None,
    name: Annotated[Text, typer.Option(metavar="NAME", help="Keeps plans for equal workloads apart.")] = None,
    seed: Annotated[Text, typer.Option(metavar="N", help="Of the search. Default: 0.")] = None,
    loader: LoaderFile = None,
    lengths: LengthsFile = None,
    checkpointing: Layers = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    task: Task = None,
    output: Annotated[Text, typer.Option(metavar="PATH", help="Save the plan as JSON.")] = None,
    details: Details = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Find the split, batch and steps of a workload."""
    keywords = keywords_given(
        devices=_one_machine(spec, devices),
        strategy=strategy,
        precision=precision,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        storage=storage,
        isolate=isolate,
        profile=profile,
        name=name,
        seed=seed,
        loader=loader,
        lengths=lengths,
        checkpointing=checkpointing,
    )
    model_options = keywords_given(seq_len=seq_len, image_size=image_size, task=task)
    manner = Manner(as_json, quiet, verbose, details)
    return to_run("tune.tune", manner, spec, keywords, model_options=model_options, output=output)


def _one_machine(spec: str, devices: Sequence[str] | None) -> str | None:
    """Return the one device spec that a plan is for; several machines are another command's."""
    if devices is not None and len(devices) > 1:
        several = shlex.join(word for one in devices for word in ("--devices", one))
        raise InputError(
            f"--devices is given {len(devices)} times; expected it once, for one plan; to see several machines side by "
            f"side run autosplit compare {shlex.quote(spec)} {several}"
        )
    return devices[0] if devices else None


@app.command(
    "compare",
    epilog=example(
        "autosplit compare examples/char_gpt.py --devices sim:2xL4 --devices sim:A100-40GB --price 2xL4=1.2"
    ),
)
def compare_command(
    spec: SameWorkload,
    devices: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A machine: sim:2xL4 is predicted, cuda measured. Give it for each machine."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC=MONEY", help="For an hour of a machine, as 2xL4=1.2. Give it for each machine."),
    ] = None,
    strategy: Annotated[Text, typer.Option(metavar="auto|balanced|ddp", help="As for tune.")] = None,
    precision: Annotated[Text, typer.Option(metavar="none|bf16|fp16", help="As for tune.")] = None,
    checkpointing: Annotated[Text, typer.Option(metavar="auto|CLASS", help="As for tune.")] = None,
    effective_batch_size: Annotated[Text, typer.Option(metavar="N|LEAST:MOST", help="As for tune.")] = None,
    max_batch_size: Annotated[Text, typer.Option(metavar="N", help="As for tune.")] = None,
    reserve: Annotated[Text, typer.Option(metavar="SIZE|SHARE", help="As for tune.")] = None,
    n_trials: Annotated[Text, typer.Option(metavar="N", help="For each machine. Default: 24.")] = None,
    time_limit_s: Annotated[Text, typer.Option(metavar="SECONDS", help="For all machines together.")] = None,
    storage: Annotated[Text, typer.Option(metavar="URL", help="As for tune.")] = None,
    isolate: Isolate = None,
    profile: Annotated[Text, typer.Option(metavar="auto|refresh|off", help="As for tune.")] = None,
    name: Annotated[Text, typer.Option(metavar="NAME", help="As for tune.")] = None,
    seed: Annotated[Text, typer.Option(metavar="N", help="As for tune.")] = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    task: Task = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Tune for several machines, and show what each would cost."""
    keywords = keywords_given(
        strategy=strategy,
        precision=precision,
        checkpointing=checkpointing,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        storage=storage,
        isolate=isolate,
        profile=profile,
        name=name,
        seed=seed,
    )
    prices = [price_given(text) for text in price or ()]
    model_options = keywords_given(seq_len=seq_len, image_size=image_size, task=task)
    asked = (spec, devices or [], prices, keywords)
    return to_run("compare.compare", Manner(as_json, quiet, verbose), *asked, model_options=model_options)


app.command(
    "measure", epilog=example("autosplit measure examples/char_gpt.py --devices sim:RTX3090+RTX2080Ti --split 96,32")
)(measure_command)
app.command("probe", epilog=example("autosplit probe examples/char_gpt.py --devices sim:RTX3090 --role eval"))(
    probe_command
)
app.command("check", epilog=example("autosplit check examples/char_gpt.py"))(check_command)


@app.command("loader", epilog=example("autosplit loader examples/loader.py"))
def loader_command(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, or package.module, whose NAME (loader) is a DataLoader, or a function that makes it.",
        ),
    ],
    processes: Annotated[
        Text, typer.Option(metavar="N", help="Processes of this machine that load at once, as DDP's ranks. Default: 1.")
    ] = None,
    time_limit_s: Annotated[
        Text, typer.Option(metavar="SECONDS", help="No other setting is tried after this long. Default: 60.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Find the settings with which a DataLoader loads the fastest."""
    keywords = keywords_given(processes=processes, time_limit_s=time_limit_s)
    return to_run("loader.loader", Manner(as_json, quiet, verbose), spec, keywords)


@app.command("show", epilog=example("autosplit show plan.json"))
def show_command(
    which: Annotated[
        Text,
        typer.Argument(
            metavar="[PLAN]",
            help="A file that a plan was saved to, or the beginning of a profile's key. Default: list the profiles "
            "and show the newest.",
        ),
    ] = None,
    details: Details = False,
    code: Code = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Show a saved plan, or those remembered."""
    return to_run("show.show", Manner(as_json, quiet, verbose, details, code), which)


@app.command("report", epilog=example("autosplit report plan.json -o report.html"))
def report_command(
    which: StoredPlan = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="The page; - for stdout. Default: report.html.")
    ] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Make a page of a plan that works offline. It has charts, checks, every setting to copy; needs matplotlib."""
    return to_run("report.report", Manner(as_json, quiet, verbose), which, output, force=force)


@app.command("export", epilog=example("autosplit export plan.json --to transformers"))
def export_command(
    which: StoredPlan = None,
    to: Annotated[
        Text,
        typer.Option(
            metavar="transformers|accelerate|lightning|torchrun|env|json",
            help="Whose settings. The first three give all ranks one batch size: the nearest even plan is computed.",
        ),
    ] = None,
    output: Annotated[
        Text, typer.Option("--output", "-o", metavar="PATH", help="Save what would be printed to a file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Turn a plan into another tool's settings."""
    return to_run("export.export", Manner(as_json, quiet, verbose), which, to, output=output, force=force)


@app.command(
    "launch",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=example("autosplit launch --plan plan.json --print train.py --epochs 3"),
)
def launch_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]", help="What torchrun is to start.")
    ],
    plan: Annotated[
        Text,
        typer.Option(
            help="A file that a plan was saved to, or the beginning of a profile's key. Default: AUTOSPLIT_PROFILE, or "
            "the only plan remembered for this machine."
        ),
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the line instead of running it.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON instead of running it. Its keys are in docs/json.md.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Start a training script by torchrun with a plan's processes. Each of them is given the plan."""
    return to_run("launch.launch", Manner(as_json, quiet, verbose), arguments, plan, print_only=print_only)
