"""Run ``autosplit tune``: tune a workload or read its profile, print the plan and save it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.addons import addon
from autosplit.cli.named_plan import shown_by
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed, note, print_plan, progress, speaks
from autosplit.cli.pasted_code import Origin
from autosplit.cli.stop_signals import stop_like_ctrl_c
from autosplit.cli.workload_arguments import (
    as_rank,
    check_before_running,
    flags_of,
    isolates,
    loaded,
    ranks_to_start,
    tuned_quietly,
)
from autosplit.errors import InputError, PlanError
from autosplit.launcher import end_with_launcher
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
    **keywords: Any,
) -> int:
    """Tune a workload, print its plan, and save it if an output was given."""
    end_with_launcher()
    keywords = {**_one_machine(spec, devices), **keywords}
    check_before_running(keywords, output)
    lengths = {"lengths": addon("lengths_in")(keywords["lengths"])} if "lengths" in keywords else {}
    folder = Path.cwd()
    together, keywords = as_rank(keywords)
    if (count := ranks_to_start(keywords, together=together)) > 1:
        from autosplit.cli.torchrun_job import run_together

        asked = {**keywords, **model_options, **({} if output is None else {"output": output})}
        with stop_like_ctrl_c():  # torchrun has its own handlers while the ranks run
            return run_together(["tune", spec, *flags_of(asked), *manner.flags()], count)
    with progress(manner) as report, stop_like_ctrl_c():
        isolate = isolates(keywords.get("isolate"), keywords.get("devices"), together=together)
        _, source = loaded(spec, model_options, together=together, isolate=isolate)
        fit = _fit_to(keywords.pop("loader", None))
        called = {keyword: value for keyword, value in keywords.items() if keyword != "isolate"}
        called |= {**lengths, **({"isolate": True} if isolate else {})}
        plan, interrupted = _tuned(source, spec, called, report, fit)
    if together and not speaks():
        return 0 if interrupted is None else EXIT_INTERRUPTED
    not_saved = next((one for one in plan.notes if one.kind == NOT_SAVED), None)
    if not_saved is not None:
        note(f"warning: {not_saved}", manner)  # stdout may be a pipe, so its notes may not be seen
    saved = None if interrupted is None or plan.path is None else str(plan.path)
    unsaved: PlanError | None = None
    if output is not None:
        if Path.cwd() != folder:  # the workload's code changed the folder
            output = str(folder / output)
        try:
            plan.save(output)
            saved = output
        except PlanError as error:
            unsaved = error
    if interrupted is not None:
        where = f"saved as {saved}" if saved else "not saved (--output PATH saves it)"
        text = (
            f"The search was interrupted. The best plan so far is shown and {where}. Run the command again to "
            "finish the search."
        )
        failed(text, EXIT_INTERRUPTED)
    print_plan(plan, _origin(spec, plan, keywords, model_options, saved), manner)
    if unsaved is not None:
        raise unsaved  # raise only after the plan is printed
    return 0 if interrupted is None else EXIT_INTERRUPTED


def _one_machine(spec: str, devices: Sequence[str]) -> dict[str, str]:
    if len(devices) > 1:
        several = shlex.join(word for one in devices for word in ("--devices", one))
        raise InputError(
            f"You gave --devices {len(devices)} times, but tune plans for one machine. To compare machines, run "
            f"autosplit compare {shlex.quote(spec)} {several}",
        )
    return {"devices": devices[0]} if devices else {}


def _fit_to(spec: str | None) -> Callable[[Plan], Plan]:
    """Return a function that fits a plan to the DataLoader of a file. The DataLoader is loaded and checked now."""
    return addon("loader_fit")(spec) if spec is not None else lambda plan: plan


def _tuned(
    workload: object,
    spec: str,
    keywords: Mapping[str, Any],
    report: Callable[[Progress], None],
    fit: Callable[[Plan], Plan],
) -> tuple[Plan, KeyboardInterrupt | None]:
    """Tune, then fit the plan to the loader. If Ctrl-C comes, return the best plan so far and the interrupt."""
    best: Plan | None = None
    try:
        best = tuned_quietly(spec, workload, **keywords, progress=report)
        return fit(best), None
    except KeyboardInterrupt as error:
        # TuningInterrupted has the best plan so far. An earlier KeyboardInterrupt has no plan.
        best = getattr(error, "plan", best)
        if best is None:
            raise
        return best, error


def _origin(
    spec: str,
    plan: Plan,
    keywords: Mapping[str, Any],
    model_options: Mapping[str, Any],
    saved: str | None,
) -> Origin:
    elsewhere = {keyword: value for keyword, value in keywords.items() if keyword not in {"devices", "profile"}}
    flags = flags_of({**elsewhere, **model_options})
    command = shlex.join(["python", "-m", "autosplit", "tune", spec, "--devices", "cuda", *flags])
    return Origin(saved or (None if plan.path is None else shown_by(Path(plan.path))), command)
