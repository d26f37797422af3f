"""The command line: ``devices``, ``tune``, ``probe``, ``check``, ``show``, ``report``, ``launch``.

It parses, calls, prints, and exits.

0 done, 2 bad input, 3 does not fit, 4 interrupted (the best so far is shown and kept), 5 the user's own code raised.
The answer goes to stdout and everything else to stderr. torch, rich and the plan's classes are imported by the
command that needs them: ``--help`` waits for none of them.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
import typer.main

from autosplit.errors import AutosplitError, InputError, PlanError, UserCodeError, from_user_code, user_frames
from autosplit.outcome import end_with_parent, reported
from autosplit.terminal import progress_bar, stdout_kept_clean

if TYPE_CHECKING:
    from autosplit.cost import Ceiling
    from autosplit.devices import Device
    from autosplit.loading import Loaded
    from autosplit.oom import DoesNotFitError
    from autosplit.plan import Plan
    from autosplit.progress import Progress
    from autosplit.report import Origin

__all__ = ["main", "run"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 4
TYPERS_INTERRUPTED = 130
"""What typer returns where Ctrl-C comes while it parses."""


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
        if parsed == TYPERS_INTERRUPTED:
            raise KeyboardInterrupt
        return parsed() if callable(parsed) else int(parsed or 0)
    except typer.TyperException as error:
        return _failed(f"{error.format_message().rstrip('.')}; see autosplit {_help_for(arguments)}", EXIT_USAGE)
    except UserCodeError as error:
        return _failed(str(error), error.exit_code, error.frames)
    except AutosplitError as error:
        return _failed(str(error), error.exit_code, getattr(error, "frames", ()))
    except KeyboardInterrupt:
        return _failed("interrupted before there was any plan; run it again", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run() -> NoReturn:
    """Run this process's command line, and exit; a second Ctrl-C on the way out does not change the exit code."""
    try:
        code = main()
    except KeyboardInterrupt:  # while the first was being told of
        code = EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(reported(code))


def _speaks() -> bool:
    """Tell whether this process is the one of its machine that prints: of a job's ranks the first."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def _failed(message: str, exit_code: int, frames: tuple[str, ...] = ()) -> int:
    """Say on one line what went wrong, with the user's own frames below."""
    lines = [f"error: {' '.join(message.split())}", *(f"  {frame}" for frame in frames)]
    if _speaks():
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

_Isolate = Annotated[
    bool | None,
    typer.Option(
        "--isolate/--no-isolate",
        help="Run real steps in a process of its own, so that a crash costs one step. Default: on GPUs and cpu:SIZE.",
        show_default=False,
    ),
]


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
        _Text,
        typer.Option(
            metavar="auto|balanced|ddp",
            help="What is searched; ddp starts a process for each real device, by torchrun. Default: auto.",
        ),
    ] = None,
    precision: Annotated[
        _Text,
        typer.Option(
            metavar="none|bf16|fp16",
            help="Several, as in none,bf16: the fastest is taken. Default: what the workload says.",
        ),
    ] = None,
    effective_batch_size: Annotated[
        _Text,
        typer.Option(
            metavar="N|LEAST:MOST",
            help="Samples per optimizer step, kept exactly; or the fastest of a range. Default: whatever is best.",
        ),
    ] = None,
    max_batch_size: Annotated[_Text, typer.Option(metavar="N", help="The most samples per forward.")] = None,
    reserve: Annotated[
        _Text,
        typer.Option(metavar="SIZE|SHARE", help="Kept free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs."),
    ] = None,
    n_trials: Annotated[_Text, typer.Option(metavar="N", help="Trials of the search, at most. Default: 24.")] = None,
    time_limit_s: Annotated[_Text, typer.Option(metavar="SECONDS", help="No trial begins after this long.")] = None,
    storage: Annotated[_Text, typer.Option(metavar="URL", help="An Optuna storage that keeps the study.")] = None,
    isolate: _Isolate = None,
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
        "effective_batch_size": _whole_or_range("--effective-batch-size", effective_batch_size),
        "max_batch_size": _whole("--max-batch-size", max_batch_size),
        "reserve": reserve,
        "n_trials": _whole("--n-trials", n_trials),
        "time_limit_s": _seconds("--time-limit-s", time_limit_s),
        "storage": storage,
        "isolate": isolate,
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


def _whole_or_range(flag: str, text: str | None) -> int | str | None:
    """Read a whole number, or a range as ``256:1024``, which `tune` knows as well."""
    if text is None or ":" not in text:
        return _whole(flag, text)
    ends = text.split(":")
    if len(ends) != 2:
        raise InputError(f"{flag} {text!r}: expected a whole number or a range; write it as {flag} 256:1024")
    return ":".join(str(_whole(flag, end)) for end in ends)


def _seconds(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{flag} {text!r}: expected a number of seconds; write it as {flag} 60") from None


@app.command("probe")
def probe_command(
    spec: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="The workload, as for tune.")],
    devices: Annotated[
        _Text, typer.Option(metavar="SPEC", help="As for tune. Default: every visible GPU; without any, cpu.")
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="primary|replica|rank|eval",
            help="What a device does: device 0 of BalancedDataParallel, another of it, a DDP process, a forward "
            "without gradients. May be given several times. Default: rank.",
        ),
    ] = None,
    max_batch_size: Annotated[_Text, typer.Option(metavar="N", help="Look no further.")] = None,
    reserve: Annotated[
        _Text,
        typer.Option(metavar="SIZE|SHARE", help="Kept free on every device: 1GiB, 5%, 0.05. Default: 5% on GPUs."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also run one sample more, which must run out of memory.")
    ] = False,
    time_limit_s: Annotated[
        _Text, typer.Option(metavar="SECONDS", help="For all ceilings; past it no further step confirms one.")
    ] = None,
    isolate: _Isolate = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON, alone on stdout: a Ceiling's attributes for each device and role, and notes."
        ),
    ] = False,
    plot: Annotated[
        _Text, typer.Option(metavar="PATH", help="Draw bytes against batch (.png, .pdf, .svg). Needs matplotlib.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Draw no progress.")] = False,
) -> Command:
    """Find how many samples each device holds."""
    limit_s = _seconds("--time-limit-s", time_limit_s)
    given: dict[str, Any] = {
        "max_batch_size": _whole("--max-batch-size", max_batch_size),
        "reserve": reserve,
        "exact": exact or None,
    }
    keywords = {keyword: value for keyword, value in given.items() if value is not None}
    probing = _Probing(spec, devices, tuple(dict.fromkeys(role or ["rank"])), keywords, limit_s, isolate)
    return functools.partial(_probe, probing, as_json=as_json, plot=plot, quiet=quiet)


@app.command("check")
def check_command(
    spec: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="The workload, as for tune.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, alone on stdout: a list of a Check's attributes.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Draw no progress.")] = False,
) -> Command:
    """Tell what of the training changes with the split."""
    return functools.partial(_check, spec, as_json=as_json, quiet=quiet)


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


@app.command("report", epilog="Example: autosplit report plan.json -o report.html")
def report_command(
    which: Annotated[
        _Text,
        typer.Argument(
            metavar="[PLAN]",
            help="A file that a plan was saved to, or the beginning of a profile's key. Default: the newest profile.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PATH", help="The page; - for stdout. Default: report.html.")
    ] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON, alone on stdout: {"path": ...}.')] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing where all is well.")] = False,
) -> Command:
    """Make a page of a plan that works offline: its charts, its checks, every setting to copy. Needs matplotlib."""
    return functools.partial(_report, which, output, force=force, as_json=as_json, quiet=quiet)


@app.command(
    "launch",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: autosplit launch --plan plan.json train.py --epochs 3",
)
def launch_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]", help="What torchrun is to start.")
    ],
    plan: Annotated[
        _Text,
        typer.Option(
            help="A file that a plan was saved to, or the beginning of a profile's key. Default: AUTOSPLIT_PROFILE, or "
            "the only plan remembered for this machine."
        ),
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the line instead of running it.")] = False,
) -> Command:
    """Start a training script by torchrun, with the plan's processes, and the plan for each of them."""
    return functools.partial(_launch, arguments, plan, print_only=print_only)


# ------------------------------------------------------------------------------------------------------------- tune


def _tune(spec: str, keywords: dict[str, Any], *, as_json: bool, output: str | None) -> int:
    end_with_parent()
    _check_before_running(keywords, output)
    folder = Path.cwd()
    together, keywords = _in_a_job(keywords)
    if not together and keywords.get("strategy") == "ddp":
        count = _ranks_to_start(keywords.get("devices"))
        if count > 1:
            return _tune_by_torchrun(spec, keywords, count, as_json=as_json, output=output)
    from autosplit.loading import load_workload, loaded_workload

    with stdout_kept_clean():
        # In a job it is loaded where all ranks hear of it if one can't.
        workload: Any = functools.partial(loaded_workload, spec) if together else load_workload(spec)
        called = {keyword: value for keyword, value in keywords.items() if keyword != "isolate"}
        source: object = workload
        if _isolates(keywords.get("isolate"), keywords.get("devices"), together=together):
            source, called = workload if together else _sendable(spec, workload), {**called, "isolate": True}
        plan, interrupted = _tuned(source, spec, called)
        if together and not _speaks():
            return 0 if interrupted is None else EXIT_INTERRUPTED
    path: Path | None = getattr(interrupted, "path", None)
    saved = None if path is None else str(path)
    unsaved: PlanError | None = None
    if output is not None:
        if Path.cwd() != folder:  # the workload's code went elsewhere
            output = str(folder / output)
        try:
            plan.save(output)
            saved = output
        except PlanError as error:
            unsaved = error
    if interrupted is not None:
        _failed(_interrupted_text(saved), EXIT_INTERRUPTED)
    _print_plan(plan, _origin(spec, plan, workload, keywords, saved), as_json=as_json)
    if unsaved is not None:
        raise unsaved  # only now: what took so long to find has been shown
    return 0 if interrupted is None else EXIT_INTERRUPTED


def _in_a_job(keywords: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Tell whether this process is one of several; these tune for DDP, whether that was asked for or not."""
    if not any(os.environ.get(name) for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return False, keywords
    from autosplit.ddp.job import in_a_job

    if not in_a_job():
        return False, keywords
    if keywords.get("strategy", "auto") == "balanced":
        raise InputError(
            "--strategy balanced in one of several processes: expected ddp, a BalancedDataParallel has one process; "
            "leave torchrun out"
        )
    return True, {**keywords, "strategy": "ddp"}


def _ranks_to_start(devices: str | None) -> int:
    """Return how many processes a DDP tuning needs: one for each device that is there; simulated ones need none."""
    from autosplit.devices import parse_devices

    found = parse_devices(devices)
    return 1 if found[0].kind == "sim" else len(found)


def _tune_by_torchrun(spec: str, keywords: dict[str, Any], count: int, *, as_json: bool, output: str | None) -> int:
    """Tune by as many processes as there are devices, which print and save."""
    from autosplit.launching import run_together

    arguments = ["tune", spec, *_flags(keywords), *(["--json"] if as_json else [])]
    return run_together([*arguments, *([] if output is None else ["--output", output])], count)


def _isolates(asked: bool | None, devices: str | Sequence[Device] | None, *, together: bool = False) -> bool:
    """Tell whether real steps run in a process of their own: as asked, otherwise where memory is filled to the brim.

    A rank on a budgeted processor is a process of its own already, and what is enforced there ends none.
    """
    if asked is not None:
        return asked
    from autosplit.devices import parse_devices

    first = parse_devices(devices)[0]
    return first.kind == "cuda" or (first.kind == "cpu" and first.budgeted and not together)


def _sendable(spec: str, workload: object) -> Loaded:
    """Return what another process can have: it loads the file again, since classes defined in it can't be sent."""
    from autosplit.loading import Loaded
    from autosplit.workload import Workload

    if isinstance(workload, Loaded):
        return workload
    assert isinstance(workload, Workload)
    return Loaded(spec, workload)


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
        if not Path(output).is_file():
            raise InputError(
                f"--output {output} is neither a new file nor a plan to replace; expected one of them; leave it out to "
                "have the plan on stdout (--json)"
            )
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
        with _users_errors(spec), progress_bar() if _speaks() else nullcontext() as progress:
            return tuning.tune(workload, **keywords, progress=progress), None
    except KeyboardInterrupt as error:
        # TuningInterrupted carries the best so far; Ctrl-C before that carries nothing.
        best: Plan | None = getattr(error, "plan", None)
        if best is None:
            raise
        return best, error


@contextmanager
def _users_errors(spec: str) -> Iterator[None]:
    """Show the user's own frames of what their code raises; what we raise passes."""
    try:
        yield
    except AutosplitError:
        raise
    except (Exception, SystemExit) as error:
        if not user_frames(error.__traceback__):
            raise  # ours, and no one is helped by hiding where
        raise from_user_code(error, f"the code of {spec}") from error


def _origin(spec: str, plan: Plan, workload: object, keywords: Mapping[str, Any], saved: str | None) -> Origin:
    """Say how this plan is had again: from its file, or by the same call, which its profile answers."""
    from autosplit.loading import split_spec
    from autosplit.profiles import profile_holding
    from autosplit.report import Origin

    elsewhere = {keyword: value for keyword, value in keywords.items() if keyword not in {"devices", "profile"}}
    command = shlex.join(["python", "-m", "autosplit", "tune", spec, "--devices", "cuda", *_flags(elsewhere)])
    if saved is not None:
        return Origin(f"autosplit.Plan.load({_quoted(saved)})", command=command, path=saved)
    place, name = split_spec(spec)
    module = Path(place).stem if place.endswith(".py") else place
    same = {k: v for k, v in keywords.items() if (k, v) not in (("profile", "refresh"), ("isolate", False))}
    arguments = "".join(f", {keyword}={_quoted(value)}" for keyword, value in same.items())
    found = None if keywords.get("profile") == "off" else profile_holding(plan)
    remark = "tunes again: --output PATH saves it" if same.get("profile") == "off" else "answered from its profile"
    return Origin(
        f"autosplit.tune({name}{'()' if callable(workload) else ''}{arguments})",
        (f"from {module} import {name}" + (f"  # {place}" if place.endswith(".py") else ""),),
        remark,
        command,
        None if found is None else str(found),
    )


def _quoted(value: object) -> str:
    """Write a value as Python, a string in the quotes that formatters like."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flags(keywords: Mapping[str, Any]) -> list[str]:
    flags = []
    for keyword, value in keywords.items():
        flag = keyword.replace("_", "-")
        flags.append(f"--no-{flag}" if value is False else f"--{flag}")
        flags.extend([] if isinstance(value, bool) else [str(value)])
    return flags


# ------------------------------------------------------------------------------------------------------------ probe


@dataclass
class _Probing:
    """What is probed, and what has come of it."""

    spec: str
    devices_spec: str | None
    roles: tuple[str, ...]
    keywords: dict[str, Any]
    time_limit_s: float | None
    isolate: bool | None
    ceilings: list[Ceiling] = field(default_factory=list)
    misfits: list[DoesNotFitError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    simulated: bool = False


def _probe(probing: _Probing, *, as_json: bool, plot: str | None, quiet: bool) -> int:
    _check_before_probing(probing, plot)
    interrupted = False
    with stdout_kept_clean():
        try:
            with nullcontext() if quiet else progress_bar() as tell:
                _find_ceilings(probing, tell)
        except KeyboardInterrupt:
            interrupted = True
    for error in probing.misfits:
        _failed(str(error), error.exit_code)
    if interrupted:
        text = "the ceilings found so far are shown" if probing.ceilings else "no ceiling was found yet"
        _failed(f"interrupted: {text}; run it again for all of them", EXIT_INTERRUPTED)
    if any(ceiling.batch_size for ceiling in probing.ceilings):
        _print_ceilings(probing, as_json=as_json, plot=plot)
    if interrupted:
        return EXIT_INTERRUPTED
    return probing.misfits[0].exit_code if probing.misfits else 0


def _check_before_probing(probing: _Probing, plot: str | None) -> None:
    """Refuse bad flags before the user's file runs, which may take long."""
    from autosplit.cost import Role

    _check_before_running({**probing.keywords, **_given(devices=probing.devices_spec)}, None)
    for role in probing.roles:
        if role not in get_args(Role):
            raise InputError(f"--role {role!r}: expected one of {', '.join(get_args(Role))}; choose one of them")
    if probing.time_limit_s is not None and not probing.time_limit_s > 0:
        raise InputError(
            f"--time-limit-s {probing.time_limit_s:g}: expected seconds, above 0; leave it out for no limit"
        )
    if plot is not None:
        from autosplit.report import check_plot

        check_plot(plot)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _find_ceilings(probing: _Probing, tell: Callable[[Progress], None] | None) -> None:
    """Find the ceiling of each device in each role, one after the other, into `probing`."""
    from autosplit.devices import parse_devices
    from autosplit.loading import load_workload
    from autosplit.tuning import NO_GPU_NOTE

    workload: Any = load_workload(probing.spec)
    devices = parse_devices(probing.devices_spec)
    probing.simulated = devices[0].kind == "sim"
    if probing.devices_spec is None and devices[0].kind == "cpu":
        probing.notes.append(NO_GPU_NOTE)
    isolate = _isolates(probing.isolate, devices)
    source = _sendable(probing.spec, workload) if isolate else workload
    ends_s = None if probing.time_limit_s is None else time.monotonic() + probing.time_limit_s
    pairs = [(device, role) for device in devices for role in probing.roles]
    known: dict[tuple[Device, str], Ceiling] = {}
    for done, (device, role) in enumerate(pairs):
        _tell_ceiling(tell, probing.ceilings, f"{device.label}: ceiling as {role}", done / len(pairs))
        # Cards that are not there are alike to the byte.
        alike = (replace(device, index=0) if probing.simulated else device, role)
        if alike not in known:
            # Each gets its part of what is left of the time.
            left_s = None if ends_s is None else max(0.001, (ends_s - time.monotonic()) / (len(pairs) - done))
            known[alike] = _ceiling_of(probing, source, device, role, time_limit_s=left_s, isolate=isolate)
        probing.ceilings.append(replace(known[alike], device=device.label))


def _tell_ceiling(
    tell: Callable[[Progress], None] | None, found: Sequence[Ceiling], message: str, fraction: float
) -> None:
    if tell is not None:
        from autosplit.progress import Progress

        steps, ooms = sum(ceiling.steps for ceiling in found), sum(ceiling.ooms for ceiling in found)
        tell(Progress("ceilings", message, fraction, steps, ooms))


def _ceiling_of(probing: _Probing, source: Any, device: Device, role: Any, **keywords: Any) -> Ceiling:
    """Find one ceiling; where nothing fits it is 0, and why is kept."""
    from autosplit import probe
    from autosplit.cost import Ceiling
    from autosplit.oom import DoesNotFitError

    try:
        with _users_errors(probing.spec):
            return probe.find_ceiling(source, device, role=role, **probing.keywords, **keywords)
    except DoesNotFitError as error:
        probing.misfits.append(error)
        return Ceiling(device.label, role, 0, "memory", 0, 0, error.requested_bytes, error.capacity_bytes)


def _print_ceilings(probing: _Probing, *, as_json: bool, plot: str | None) -> None:
    from autosplit.report import plot_ceilings, print_ceilings

    notes = list(dict.fromkeys([*probing.notes, *(note for ceiling in probing.ceilings for note in ceiling.notes)]))
    if as_json:
        shown = [{**asdict(ceiling), "headroom_bytes": ceiling.headroom_bytes} for ceiling in probing.ceilings]
        _print_json(json.dumps({"simulated": probing.simulated, "ceilings": shown, "notes": notes}, indent=2))
    else:
        from autosplit.terminal import console_for

        print_ceilings(probing.ceilings, notes, console_for(sys.stdout), simulated=probing.simulated)
    if plot is not None:  # last: where it can't be drawn, what took long to find is printed already
        plot_ceilings(probing.ceilings, plot)


# ------------------------------------------------------------------------------------------------------------ check


def _check(spec: str, *, as_json: bool, quiet: bool) -> int:
    from autosplit import checks
    from autosplit.loading import load_workload
    from autosplit.progress import Progress

    with stdout_kept_clean():
        workload = load_workload(spec)
        with _users_errors(spec), nullcontext() if quiet else progress_bar() as tell:
            if tell is not None:
                tell(Progress("checks", "the gradient of the sample batch, whole and cut", 0.0))
            found = checks.check(workload)
    if as_json:
        _print_json(json.dumps({"checks": [asdict(one) for one in found]}, indent=2))
    else:
        from autosplit.report import print_checks
        from autosplit.terminal import console_for

        print_checks(found, console_for(sys.stdout))
    return 0


# ------------------------------------------------------------------------------------------------------------- show


def _launch(arguments: list[str], plan: str | None, *, print_only: bool) -> int:
    from autosplit.launching import launch_of

    if plan is not None and not Path(plan).exists() and _is_key(plan):
        plan = str(_profile(plan)[0])
    launch = launch_of(plan, arguments)
    if print_only:
        sys.stdout.write(launch.line() + "\n")
        return 0
    sys.stderr.write(f"plan: {launch.told}\n")
    launch.run()
    raise AssertionError("this process is torchrun now")


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
    _print_plan(plan, Origin(f"autosplit.Plan.load({_quoted(str(path))})", path=str(path)), as_json=as_json)
    return 0


def _report(which: str | None, output: str, *, force: bool, as_json: bool, quiet: bool) -> int:
    from autosplit.page import check_page, page_of, write_page

    to_stdout = output == "-"
    if to_stdout and as_json:
        raise InputError("-o - and --json both print to stdout; expected one of them; leave one out")
    if not to_stdout:
        check_page(output, force=force)
    plan = _plan_of(which)
    if to_stdout:
        sys.stdout.buffer.write(page_of(plan).encode())
        return 0
    write_page(plan, output, force=force)
    if as_json:
        _print_json(json.dumps({"path": output}))
    elif not quiet:
        sys.stderr.write(f"the report is in {output}\n")
    return 0


def _plan_of(which: str | None) -> Plan:
    """Find the plan of a file or of a profile's key, the newest profile's without either."""
    from autosplit.plan import Plan

    if which is None:
        newest = _newest(as_json=True)
        assert newest is not None, "it raises where there is none"
        return newest[1]
    return Plan.load(which) if Path(which).is_file() or not _is_key(which) else _profile(which)[1]


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
