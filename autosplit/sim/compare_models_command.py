"""Run ``autosplit compare --models FILE``: tune several models for several machines, and write one table."""

from __future__ import annotations

import shlex
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autosplit.cli.options import MODEL, Option
from autosplit.cli.output import EXIT_INTERRUPTED, EXIT_MISFIT, CommandResult, Manner, Problem, note, progress
from autosplit.cli.workload_arguments import is_model_name, isolates, sendable, tuned_quietly, workload_of_spec
from autosplit.errors import AutosplitError, InputError, shown
from autosplit.files import read_bounded, write_for_all
from autosplit.sim.comparison_types import SCHEMA_VERSION, ComparedModels
from autosplit.tuning.progress import Progress, part_of

if TYPE_CHECKING:
    from autosplit.plan.plan import Plan
    from autosplit.sim.compare import AskedMachine
    from autosplit.sim.compare_models import ComparedModel

_MOST_BYTES = 2**20

_SUFFIXES = {".md": "markdown", ".markdown": "markdown", ".html": "html", ".htm": "html"}

_OPTIONS = {option.names[0]: option for option in map(Option._make, MODEL.items())}


@dataclass(frozen=True)
class Line:
    """A line of the file of models."""

    place: str
    spec: str
    options: Mapping[str, Any]
    failure: str = ""


def lines_in(path: str) -> list[Line]:
    """Read a file with one model per line: a spec, and its options if it has any. A line may end with a # comment.

    Raises:
        InputError: The file can't be read, or contains no model. A wrong line is returned with its failure.
    """
    try:
        texts = read_bounded(path, _MOST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--models {path} can't be read ({reason}). Name a text file with one model per line."
        ) from error
    found = [_line(f"{path}, line {number}", text) for number, text in enumerate(texts, 1)]
    lines = [line for line in found if line.spec]
    if not lines:
        raise InputError(f"--models {path} contains no model. Write one per line, such as timm:resnet50.")
    return lines


def _line(place: str, text: str) -> Line:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:  # a quote without its end
        return Line(place, text.strip(), {}, f"{error}. Close the quote.")
    spec, options = "".join(words[:1]), {}
    for name, value in zip(words[1::2], [*words[2::2], None], strict=False):
        try:
            options[_OPTIONS[name].keyword] = _OPTIONS[name].read(value or "")
        except (KeyError, ArgumentTypeError):
            known = ", ".join(_OPTIONS)
            wrong = " ".join(filter(None, (name, value)))
            return Line(place, spec, {}, f"{shown(wrong)} is not an option with its value. Expected one of {known}.")
    return Line(place, spec, options)


def compare_models(
    manner: Manner,
    models: str,
    *,
    devices: Sequence[str] = (),
    price: Sequence[tuple[str, float]] = (),
    format_: str | None = None,
    output: str | None = None,
    model_options: Mapping[str, Any],
    **keywords: Any,
) -> CommandResult[ComparedModels] | int:
    """Tune each model for each machine. If a model fails, report it and compare the others."""
    from autosplit.sim.compare import ComparisonInterrupted, asked_machines
    from autosplit.sim.compare_models import FORMATS, ComparedModel

    kind = format_ or _SUFFIXES.get(Path(output or "").suffix.lower(), "markdown")
    if kind not in FORMATS:
        raise InputError(f"--format is {shown(kind)}. Expected one of {', '.join(FORMATS)}.")
    _check_output(output)
    machines = asked_machines(devices, price, keywords)
    lines = lines_in(models)
    time_limit_s = keywords.pop("time_limit_s", None)
    ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    found: list[ComparedModel] = []
    interrupted = False
    with progress(manner) as report:
        for number, line in enumerate(lines):
            left_s = None if ends_s is None else max(1e-3, (ends_s - time.monotonic()) / (len(lines) - number))
            part = part_of(report, number, len(lines), line.spec)
            try:
                found.append(_compared(line, machines, part, left_s, model_options, keywords))
            except ComparisonInterrupted as interrupt:
                found.append(ComparedModel(line.spec, interrupt.comparison, "interrupted"))
                found.extend(ComparedModel(one.spec, None, "interrupted") for one in lines[number + 1 :])
                interrupted = True
                break
    if output is not None:
        write_for_all(Path(output), FORMATS[kind](found), f"--output {output}")
        note(f"wrote {output}", manner)
    text = FORMATS[kind](found) if output is None else ""
    values = {"schema_version": SCHEMA_VERSION, "models": found}
    value = msgspec.convert(values, ComparedModels, from_attributes=True)
    return CommandResult(value, text, _problems(found, interrupted=interrupted))


def _problems(found: Sequence[ComparedModel], *, interrupted: bool) -> list[Problem]:
    if interrupted:
        text = "The comparison was interrupted, so only the finished models are shown. Run the command again for all"
        return [Problem(f"{text} models.", EXIT_INTERRUPTED)]
    if all(model.comparison is not None and model.comparison.best is None for model in found):
        return [Problem("No model fits any machine.", EXIT_MISFIT)]
    return [Problem(model.failure, InputError.exit_code) for model in found if model.comparison is None]


def _compared(
    line: Line,
    machines: Sequence[AskedMachine],
    report: Callable[[Progress], None],
    time_limit_s: float | None,
    model_options: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> ComparedModel:
    from autosplit.sim.compare import compared
    from autosplit.sim.compare_models import ComparedModel, ErrorBand, error_band

    if line.failure:
        return _left_out(line, line.failure)
    bands: list[ErrorBand | None] = []
    try:
        options = {**model_options, **line.options} if is_model_name(line.spec) else line.options
        workload: Any = workload_of_spec(line.spec, **options)

        def seen() -> Any:
            built = workload() if callable(workload) else workload
            bands.append(error_band(built.sample_batch))
            return built

        def tune_one(machine: AskedMachine, timed: Mapping[str, Any]) -> Plan:
            isolated = isolates(keywords.get("isolate"), machine.devices)
            source = sendable(line.spec, workload, isolate=True) if isolated else seen
            return tuned_quietly(line.spec, source, devices=machine.spec, **{**keywords, **timed, "isolate": isolated})

        comparison = compared(machines, tune_one, time_limit_s=time_limit_s, progress=report)
    except AutosplitError as error:
        return _left_out(line, str(error))
    return ComparedModel(line.spec, comparison, error=bands[0] if bands else None)


def _left_out(line: Line, why: str) -> ComparedModel:
    from autosplit.sim.compare_models import ComparedModel

    wrong = InputError(f"{line.place}: {shown(line.spec)} is not compared: {why}")
    return ComparedModel(line.spec, None, str(wrong))


def _check_output(output: str | None) -> None:
    from autosplit.sim.compare_models import MARK

    if output is None:
        return
    target = Path(output)
    if not target.parent.is_dir():
        raise InputError(f"The folder of --output {output} does not exist. Create {target.parent}.")
    if target.exists() and not (target.is_file() and MARK.encode() in target.read_bytes()[:512]):
        raise InputError(
            f"--output {output} exists, but autosplit compare did not write it. The file was not replaced. Choose "
            "another name."
        )
