"""The command line: its flags and helps. What a command does is in `commands`, a module for each.

Exit codes: 0 done, 2 bad input, 3 does not fit, 4 interrupted (the best so far is shown and kept), 5 the user's own
code raised. The answer goes to stdout and everything else to stderr. torch, rich and the plan's classes are imported by
the command that needs them: ``--help`` waits for none of them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from autosplit.cli.exit_code import leaves_at_the_second, reported
from autosplit.cli.options import (
    IMAGE_SIZE,
    RESERVE,
    SEQ_LEN,
    TASK,
    Code,
    Details,
    Isolate,
    SameWorkload,
    StoredPlan,
    Text,
    command,
    example,
    option,
    parsed_by,
)
from autosplit.cli.output import EXIT_INTERRUPTED, failed
from autosplit.cli.terminal import bars_say_it_stops, restored_terminal, sent_nowhere, streams_made_fit
from autosplit.errors import AutosplitError, UserCodeError, shown

EXIT_USAGE = 2
TYPERS_INTERRUPTED = 130
"""What typer returns where Ctrl-C comes while it parses."""

USAGE_ERROR: Any = [base for base in typer.BadParameter.__mro__ if hasattr(base, "format_message")][-1]
"""The base class of typer's parsing errors. Its home differs between versions: click, `typer._click`, `typer`."""

_INTERRUPTED_BEFORE = {"doctor": "the examination was over", "loader": "the loader was measured"}

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

profiles_app = typer.Typer(
    help="List, show and remove remembered plans.",
    invoke_without_command=True,
    epilog=example("autosplit profiles", "autosplit profiles remove 3f2a"),
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(profiles_app, name="profiles")


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
    except USAGE_ERROR as error:
        said = f"{error.format_message().rstrip('.')}; see".replace("?; see", "? See")
        return failed(f"{said} autosplit {_help_for(arguments)}", EXIT_USAGE)
    except UserCodeError as error:
        return failed(str(error), error.exit_code, error.frames)
    except AutosplitError as error:
        return failed(str(error), error.exit_code, getattr(error, "frames", ()))
    except KeyboardInterrupt:
        before = _INTERRUPTED_BEFORE.get(arguments[0], "there was any plan")
        return failed(f"interrupted before {before}; run it again", EXIT_INTERRUPTED)
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
    with contextlib.suppress(FileNotFoundError):
        if error.errno != errno.ENOENT or Path.cwd():
            return None
    return "the working directory is gone; expected one that exists; change to another one with cd"


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
    for one in waiting:
        waiting.extend(getattr(one, "commands", {}).values())
        for parameter in one.get_params(typer.Context(one)):  # with that of --help
            if hasattr(parameter, "get_runtime_param"):  # what has none of typer's own does without it anyway
                parameter.get_runtime_param = _AsTyped
    return made


def _help_for(arguments: list[str]) -> str:
    """Return the help of the command that was meant, as far as it is one."""
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    if arguments[0] not in known:
        return "--help"
    if arguments[0] == "profiles" and {*arguments[1:2]} & {one.name for one in profiles_app.registered_commands}:
        return f"profiles {arguments[1]} --help"
    return f"{arguments[0]} --help"


# --------------------------------------------------------------------------------------------------------- commands


def _print_version(wanted: bool) -> None:
    if wanted:
        from autosplit import __version__

        typer.echo(f"autosplit {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(  # noqa: ARG001 (the callback of the option reads it)
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


@command(app, "devices", "devices.devices", "autosplit devices --json")
def devices_command() -> None:
    """List the GPUs with their load."""


@command(app, "doctor", "doctor.doctor", "autosplit doctor --json")
def doctor_command(
    devices: Text = option("SPEC", "Default: every GPU; without any, cpu:256MiB."),
    save: Text = option("FILE", "Keep the rates of the cards, for AUTOSPLIT_GPUS and sim: devices."),
) -> None:
    """Examine this machine, and name what to mend."""


@command(
    app,
    "tune",
    "tune.tune",
    "autosplit tune examples/char_gpt.py --devices sim:RTX3090 --effective-batch-size 256 --n-trials 2",
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
    devices: list[str] | None = option(
        "SPEC",
        "auto, cuda, cuda:0,2 (or xpu, npu, mps), cpu, cpu:2GiB,cpu:1GiB or sim:2xA100-40GB+1xRTX3090. "
        "Default: auto, every visible GPU; without any, cpu.",
    ),
    strategy: Text = option(
        "auto|balanced|ddp", "What is searched; ddp starts a process for each real device, by torchrun. Default: auto."
    ),
    precision: Text = option(
        "none|bf16|fp16", "Several, as in none,bf16: the fastest is taken. Default: what the workload says."
    ),
    effective_batch_size: Text = option(
        "N|LEAST:MOST",
        "Samples per optimizer step, kept exactly; or the fastest of a range. Default: whatever is best.",
    ),
    max_batch_size: Text = option("N", "The most samples per forward."),
    reserve: Text = RESERVE,
    n_trials: Text = option("N", "Trials of the search, at most. Default: 24."),
    time_limit_s: Text = option("SECONDS", "No trial begins after this long."),
    storage: Text = option("URL", "An Optuna storage that keeps the study."),
    isolate: Isolate = None,
    profile: Text = option(
        "auto|refresh|off", "Use and keep a plan for this machine and workload; tune anew; or neither. Default: auto."
    ),
    name: Text = option("NAME", "Keeps plans for equal workloads apart.", "--name"),
    seed: Text = option("N", "Of the search. Default: 0."),
    loader: Text = option(
        "FILE[:NAME]", "The training's DataLoader (loader), or a function that makes it: says whether it keeps up."
    ),
    lengths: Text = option(
        "FILE", "The length of each sample, a number a line, where they differ: plans batches of like length, too."
    ),
    checkpointing: Text = option(
        "auto|CLASS",
        "The model's layers, by their class: tries none, every second and all of them checkpointed; auto for those of "
        "transformers. Default: the model as it is.",
    ),
    fits: Text = option(
        "resume|save|eval",
        "What else has to fit: a checkpoint that was loaded onto the device, a copy that is being saved, evaluation. "
        "Several, as in resume,eval. Default: nothing.",
    ),
    seq_len: Text = SEQ_LEN,
    image_size: Text = IMAGE_SIZE,
    task: Text = TASK,
    output: Text = option("PATH", "Save the plan as JSON."),
    details: Details = False,
) -> None:
    """Find the split, batch and steps of a workload."""


@command(
    app,
    "compare",
    "compare.compare",
    "autosplit compare examples/char_gpt.py --devices sim:2xL4 --devices sim:A100-40GB --price 2xL4=1.2",
)
def compare_command(
    spec: SameWorkload,
    devices: list[str] | None = option(
        "SPEC", "A machine: sim:2xL4 is predicted, cuda measured. Give it for each machine."
    ),
    price: list[str] | None = option("SPEC=MONEY", "For an hour of a machine, as 2xL4=1.2. Give it for each machine."),
    strategy: Text = option("auto|balanced|ddp", "As for tune."),
    precision: Text = option("none|bf16|fp16", "As for tune."),
    checkpointing: Text = option("auto|CLASS", "As for tune."),
    fits: Text = option("resume|save|eval", "As for tune."),
    effective_batch_size: Text = option("N|LEAST:MOST", "As for tune."),
    max_batch_size: Text = option("N", "As for tune."),
    reserve: Text = option("SIZE|SHARE", "As for tune."),
    n_trials: Text = option("N", "For each machine. Default: 24."),
    time_limit_s: Text = option("SECONDS", "For all machines together."),
    storage: Text = option("URL", "As for tune."),
    isolate: Isolate = None,
    profile: Text = option("auto|refresh|off", "As for tune."),
    name: Text = option("NAME", "As for tune.", "--name"),
    seed: Text = option("N", "As for tune."),
    seq_len: Text = SEQ_LEN,
    image_size: Text = IMAGE_SIZE,
    task: Text = TASK,
) -> None:
    """Tune for several machines, and show what each would cost."""


@command(
    app,
    "measure",
    "measure.measure",
    "autosplit measure examples/char_gpt.py --devices sim:RTX3090+RTX2080Ti --split 96,32",
)
def measure_command(
    spec: SameWorkload,
    devices: Text = option("SPEC", "As for tune. Default: every visible GPU; without any, cpu."),
    split: Text = option("N,N,...", "Samples per device in one forward. Default: the sample batch, split evenly."),
    accumulation_steps: Text = option("N", "Forwards per optimizer step. Default: 1."),
    strategy: Text = option(
        "auto|balanced|ddp",
        "Whose step; ddp starts a process for each real device, by torchrun. Default: auto, balanced.",
    ),
    precision: Text = option("none|bf16|fp16", "Default: what the workload says."),
    reserve: Text = RESERVE,
    isolate: Isolate = None,
    seq_len: Text = SEQ_LEN,
    image_size: Text = IMAGE_SIZE,
    task: Text = TASK,
) -> None:
    """Show what one setting does: its time, its memory, its bounds."""


@command(app, "probe", "probe.probe", "autosplit probe examples/char_gpt.py --devices sim:RTX3090 --role eval")
def probe_command(
    spec: SameWorkload,
    devices: Text = option("SPEC", "As for tune. Default: every visible GPU; without any, cpu."),
    role: list[str] | None = option(
        "primary|replica|rank|eval|resume|save",
        "What a device does: device 0 of BalancedDataParallel, another of it, a DDP process, a forward without "
        "gradients, a DDP process beside a loaded checkpoint or a copy that is being saved. May be given several "
        "times. Default: rank.",
    ),
    max_batch_size: Text = option("N", "Look no further."),
    reserve: Text = RESERVE,
    exact: Annotated[
        bool | None, typer.Option("--exact", help="Also run one sample more, which must run out of memory.")
    ] = None,
    time_limit_s: Text = option("SECONDS", "For all ceilings; past it no further step confirms one."),
    isolate: Isolate = None,
    seq_len: Text = SEQ_LEN,
    image_size: Text = IMAGE_SIZE,
    task: Text = TASK,
    plot: Text = option("PATH", "Draw bytes against batch (.png, .pdf, .svg). Needs matplotlib."),
) -> None:
    """Find how many samples each device holds."""


@command(app, "check", "check.check", "autosplit check examples/char_gpt.py")
def check_command(
    spec: SameWorkload,
    seq_len: Text = SEQ_LEN,
    image_size: Text = IMAGE_SIZE,
    task: Text = TASK,
) -> None:
    """Tell what of the training changes with the split."""


@command(app, "loader", "loader.loader", "autosplit loader examples/loader.py")
def loader_command(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, or package.module, whose NAME (loader) is a DataLoader, or a function that makes it.",
        ),
    ],
    processes: Text = option("N", "Processes of this machine that load at once, as DDP's ranks. Default: 1."),
    time_limit_s: Text = option("SECONDS", "No other setting is tried after this long. Default: 60."),
) -> None:
    """Find the settings with which a DataLoader loads the fastest."""


@command(app, "show", "show.show", "autosplit show plan.json")
def show_command(which: StoredPlan = None, details: Details = False, code: Code = False) -> None:
    """Show a saved plan, or one that is remembered."""


@command(app, "report", "report.report", "autosplit report plan.json -o report.html")
def report_command(
    which: StoredPlan = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="The page; - for stdout. Default: report.html.")
    ] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False,
) -> None:
    """Make a page of a plan that works offline. It has charts, checks, every setting to copy; needs matplotlib."""


@command(app, "export", "export.export", "autosplit export plan.json --to transformers")
def export_command(
    which: StoredPlan = None,
    to: Text = option(
        "transformers|accelerate|lightning|torchrun|env|json",
        "Whose settings. The first three give all ranks one batch size: the nearest even plan is computed.",
    ),
    output: Text = option("PATH", "Save what would be printed to a file.", "--output", "-o"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Turn a plan into another tool's settings."""


@command(
    app,
    "launch",
    "launch.launch",
    "autosplit launch --plan plan.json --print train.py --epochs 3",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def launch_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]", help="What torchrun is to start.")
    ],
    plan: Text = option(
        None,
        "A file that a plan was saved to, or the beginning of a profile's key. Default: AUTOSPLIT_PROFILE, or "
        "the only plan remembered for this machine.",
    ),
    print_only: Annotated[bool, typer.Option("--print", help="Print the line instead of running it.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON instead of running it. Its keys are in docs/json.md.")
    ] = False,
) -> None:
    """Start a training script by torchrun with a plan's processes. Each of them is given the plan."""


_Key = Annotated[Text, typer.Argument(metavar="KEY", help="The beginning of a profile's key.", show_default=False)]


@profiles_app.callback()
@parsed_by("profiles.list_profiles")
def profiles_command() -> None:
    """List, show and remove remembered plans; without a command, list them."""


@command(profiles_app, "list", "profiles.list_profiles", "autosplit profiles list --json")
def profiles_list_command() -> None:
    """List what is remembered, the newest first."""


@command(profiles_app, "show", "show.show_profile", "autosplit profiles show 3f2a")
def profiles_show_command(key: _Key = None, details: Details = False, code: Code = False) -> None:
    """Show a remembered plan; without a key the newest."""


@command(profiles_app, "path", "profiles.show_path", "autosplit profiles path", "autosplit profiles path 3f2a")
def profiles_path_command(key: _Key = None) -> None:
    """Print the folder of the profiles, or the file of one."""


@command(
    profiles_app,
    "remove",
    "profiles.remove_profiles",
    "autosplit profiles remove 3f2a 91c0",
    "autosplit profiles remove --all --yes",
)
def profiles_remove_command(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Beginnings of profiles' keys.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; on a terminal it asks first.")] = False,
    confirmed: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget remembered plans, and say which. Nothing outside the cache is ever removed."""
