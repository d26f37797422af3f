"""Run ``autosplit tune``: tune a workload or read its profile, print the plan and save it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.addons import addon
from autosplit.cli.named_plan import shown_by
from autosplit.cli.options import flags_of
from autosplit.cli.output import (
    EXIT_INTERRUPTED,
    CommandResult,
    Manner,
    Problem,
    collected,
    note,
    progress,
    report_of_plan,
    speaks,
)
from autosplit.cli.pasted_code import Origin
from autosplit.cli.stop_signals import stop_like_ctrl_c
from autosplit.cli.workload_arguments import Arguments, checked_arguments, tuned_quietly
from autosplit.errors import InputError, PlanError
from autosplit.plan.plan import Plan
from autosplit.profiles.store import NOT_SAVED
from autosplit.tuning.progress import Progress


def tune(
    manner: Manner,
    *,
    spec: str,
    devices: Sequence[str] = (),
    model_options: Mapping[str, Any],
    output: str | None = None,
    loader: str | None = None,
    **keywords: Any,
) -> CommandResult[Plan] | int:
    """Tune a workload, in several processes for DDP, and save its plan if an output was given."""
    asked = checked_arguments(spec, model_options, {**_one_machine(spec, devices), **keywords})
    _check_output(output)
    lengths = {"lengths": addon("lengths_in")(keywords["lengths"])} if "lengths" in keywords else {}
    folder = Path.cwd()
    if asked.num_processes > 1:
        from autosplit.cli.torchrun_job import run_together

        with stop_like_ctrl_c():  # torchrun has its own handlers while the ranks run
            return run_together(manner.words, asked.num_processes)
    with progress(manner) as report, stop_like_ctrl_c():
        source = asked.source()
        fit = addon("loader_fit")(loader) if loader is not None else lambda plan: plan
        isolated = {"isolate": True} if asked.isolate else {}
        called = {name: value for name, value in asked.keywords.items() if name != "isolate"}
        plan, interrupted = _tuned(spec, source, {**called, **lengths, **isolated}, report, fit)
    if asked.is_rank and not speaks():
        return 0
    not_saved = next((one for one in plan.notes if one.kind == NOT_SAVED), None)
    if not_saved is not None:
        note(f"warning: {not_saved}", manner)  # stdout may be a pipe, so its notes may not be seen
    saved = None if not interrupted or plan.path is None else str(plan.path)
    unsaved: list[Problem] = []
    if output is not None:
        if Path.cwd() != folder:  # the workload's code changed the folder
            output = str(folder / output)
        with collected(unsaved):
            plan.save(output)
            saved = output
    problems = [*([_interruption(saved)] if interrupted else []), *unsaved]
    return CommandResult(plan, report_of_plan(plan, _origin(plan, asked, saved), manner), problems)


def _check_output(output: str | None) -> None:
    """Raise InputError before the user's file is run, which may take long."""
    if output is None or not Path(output).exists():
        return
    if Path(output).is_dir():
        raise InputError(f"--output {output} is a folder, not a file. Write --output {Path(output) / 'plan.json'}.")
    if not Path(output).is_file():
        raise InputError(
            f"--output {output} is not a regular file. Name a file, or leave the option out and print the plan with "
            "--json."
        )
    try:
        Plan.load(output)
    except PlanError:
        raise InputError(
            f"--output {output} exists and is not a plan. autosplit did not replace it. Choose another name."
        ) from None


def _interruption(saved: str | None) -> Problem:
    where = f"saved as {saved}" if saved else "not saved (--output PATH saves it)"
    text = f"The search was interrupted. The best plan so far is shown and {where}."
    return Problem(f"{text} Run the command again to finish the search.", EXIT_INTERRUPTED)


def _one_machine(spec: str, devices: Sequence[str]) -> dict[str, str]:
    if len(devices) > 1:
        several = shlex.join(word for one in devices for word in ("--devices", one))
        raise InputError(
            f"You gave --devices {len(devices)} times, but tune plans for one machine. To compare machines, run "
            f"autosplit compare {shlex.quote(spec)} {several}"
        )
    return {"devices": devices[0]} if devices else {}


def _tuned(
    spec: str,
    workload: object,
    keywords: Mapping[str, Any],
    report: Callable[[Progress], None],
    fit: Callable[[Plan], Plan],
) -> tuple[Plan, bool]:
    """Tune, then fit the plan to the loader. Return the plan, or the best plan until Ctrl-C and True."""
    best: Plan | None = None
    try:
        best = tuned_quietly(spec, workload, **keywords, progress=report)
        return fit(best), False
    except KeyboardInterrupt as error:
        # TuningInterrupted has the best plan so far. An earlier KeyboardInterrupt has no plan.
        best = getattr(error, "plan", best)
        if best is None:
            raise
        return best, True


def _origin(plan: Plan, asked: Arguments, saved: str | None) -> Origin:
    keywords = {name: value for name, value in asked.keywords.items() if name not in {"devices", "profile"}}
    flags = flags_of({**keywords, **asked.model_options})
    command = shlex.join(["python", "-m", "autosplit", "tune", asked.spec, "--devices", "cuda", *flags])
    return Origin(saved or (None if plan.path is None else shown_by(Path(plan.path))), command)
