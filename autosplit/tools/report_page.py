"""Write a plan as one HTML file with charts, tables and all settings to copy. The page needs no network.

The page shows the recommended strategy, and one line about the other. See `plan.strategy` for the recommendation.
Vega draws the charts in the browser. Its source is in the page. The content security policy allows only this script and
our style sheet, by their hashes, and forbids the page to load anything. jinja2 escapes all values.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from autosplit.cli import plan_report
from autosplit.cli.pasted_code import paste_lines
from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.errors import InputError
from autosplit.files import what_stands_at, write_for_all
from autosplit.plan.explain import with_explanation
from autosplit.plan.plan import Plan
from autosplit.plan.record import reduce_of
from autosplit.plan.redact import shareable
from autosplit.plan.strategy import recommended_plan
from autosplit.probe.check_result import error_text
from autosplit.text import counted_text, percent_text, rate_text, size_text, tuple_text, visible
from autosplit.tools.canvas import check_installed
from autosplit.tools.charts import MEMORY_PARTS, known_parts
from autosplit.tools.report_charts import HATCH, charts_of, name_of, runs_of

_FOLDER = Path(__file__).parent / "templates"

_MARK = '<meta name="generator" content="autosplit report">'
"""Tag near the beginning of a page that identifies it as written by autosplit."""

_MARKED_WITHIN = 512

MOST_CARDS = 6
"""Largest number of groups of equal devices that have a card. The table of devices has all."""


def write_page(plan: Plan, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a plan's page atomically. Replace only an earlier report, or any file with `force`."""
    check_page(path, force=force)
    write_for_all(Path(path), page_of(plan), f"the report {path}")


def check_page(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise InputError if `write_page` would fail. Call this before long work."""
    _check_packages()
    target = Path(path)
    stands = what_stands_at(target)
    if stands is not None:
        raise InputError(
            f"{target} is {stands}, not a new file or an earlier report. Choose another path with -o PATH.",
        )
    if not target.parent.is_dir():
        raise InputError(
            f"The folder of {target} does not exist. Create {target.parent}, or choose another folder.",
        )
    if force or not target.exists():
        return
    with suppress(OSError), target.open("rb") as file:
        if _MARK.encode() in file.read(_MARKED_WITHIN):
            return
    raise InputError(
        f"{target} exists and is not an autosplit report. Choose another path with -o PATH, or replace the file with "
        "--force.",
    )


def _check_packages() -> None:
    check_installed("jinja2", "the report")
    check_installed("vl_convert", "the report", "vl-convert-python")


def page_of(plan: Plan) -> str:
    """Return a plan's page."""
    _check_packages()
    import jinja2
    import vl_convert

    css, own_script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    script = vl_convert.javascript_bundle(own_script)  # Vega, and our script that uses Vega
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        # Replace invisible characters in strings. Strings marked as safe have a different type and were made here.
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    policy = (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = environment.get_template("report.html.j2")
    values = _values(shareable(plan), made=_made(plan))  # Only the redacted plan reaches the page.
    return template.render(values, policy=policy, mark=_MARK, css=css, script=script, hatch=HATCH)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _values(both: Plan, made: Iterator[tuple[str, str]]) -> dict[str, object]:
    plan = with_explanation(recommended_plan(both))
    charts = charts_of(both)
    model = plan.workload.get("model")
    numbers = dict(plan_report.all_numbers(plan, both.trials))
    gain = [("gain", numbers.pop("gain"))] if "gain" in numbers else []
    steps, throughput = ((name, numbers.pop(name)) for name in ("accumulation_steps", "throughput"))
    batches = _batches(plan) or [("batch_size", numbers.pop("batch_size"))]
    for name in ("split", "gpu0_bsz"):  # they are in a table and among the settings
        numbers.pop(name, None)
    return {
        "plan": plan,
        "equal": plan_report.EQUAL_DEVICES if plan_report.are_equal(plan) else "",
        "columns": plan_report.device_columns(plan),
        "devices": list(_rows(plan, plan_report.device_cells(plan))),
        "explained": _explained(plan),
        "title": f"autosplit: {model}" if isinstance(model, str) and model else "autosplit",
        "cards": [*_strategy(both), *gain, throughput, *batches, steps],
        "other_numbers": [*numbers.items(), *made],
        "charts": {chart.name: chart for chart in charts},
        "memory": [chart.name for chart in charts if chart.name.startswith("line")],
        "throughput": [chart.name for chart in charts if chart.name in ("rates", "trials", "landscape")],
        "specs": {chart.name: chart.spec for chart in charts},
        "part_names": [label for _, label, _ in MEMORY_PARTS],
        "parts": list(_rows(plan, _part_rows(plan))) if any(known_parts(device) for device in plan.devices) else [],
        "checks": list(_check_rows(plan)),
        "notes": [*map(str, plan.notes), *(SIMULATED_ERRORS if plan.simulated else ())],
        "trials": list(_trial_rows(both)),
        "settings": list(_settings(plan)),
        "code": "\n".join(paste_lines(both)),
    }


def _strategy(both: Plan) -> Iterator[tuple[str, str]]:
    """Yield the recommended strategy, with one line about the other."""
    yield from plan_report.strategies(both)
    if both.fastest is None and len(both.devices) > 1:
        if both.region is None:
            yield "strategy", "DDP (autosplit launch)"
            return
        predicted = " (predicted)" if both.ddp.ranks and not both.ddp.measured else ""
        others = [f"DDP{predicted}: {line}" for line in plan_report.ddp_lines(both)[-1:]]
        yield "strategy", ". ".join(["BalancedDataParallel (plan.wrap)", *others])


def _batches(plan: Plan) -> list[tuple[str, str]]:
    """Return the batch size of each group of equal devices. For one device or many groups, return an empty list."""
    runs = list(runs_of(plan.devices, plan.split))
    if len(plan.devices) == 1 or len(runs) > MOST_CARDS:
        return []
    return [(name_of(run), counted_text(share, "sample") + " each" * (len(run) > 1)) for run, share in runs]


def _rows(plan: Plan, rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of devices. Consecutive devices with equal cells have one row."""
    names, figures = zip(*((name, tuple(cells)) for name, *cells in rows), strict=True)
    place = 0
    for run, cells in runs_of(plan.devices, figures):
        yield name_of(run) if len(run) > 1 else names[place], *cells
        place += len(run)


def _explained(plan: Plan) -> list[str]:
    """Return the reasons. The comparisons with other options are in a chart, all in one sentence."""
    explanation = replace(plan.explain(), even=None, even_measured=None, alone=())
    lines = plan_report.explained_lines(explanation)
    return [*plan_report.unused_lines(plan), *lines, *plan_report.limit_lines(plan)]


def _made(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the request, the machine, the versions and the dates."""
    if plan.request:
        yield "requested", plan_report.request_text(plan.request) or "only the defaults"
    runs = runs_of(plan.devices, [size_text(device.memory_bytes) for device in plan.devices])
    yield "machine", ", ".join(f"{name_of(run)}: {size}{' each' if len(run) > 1 else ''}" for run, size in runs)
    names = {"autosplit": "autosplit", "torch": "torch", "cuda": "CUDA"}
    versions = [f"{name} {plan.machine[part]}" for part, name in names.items() if plan.machine.get(part) is not None]
    versions += dict.fromkeys(f"driver {device.driver}" for device in plan.devices if device.driver)
    if versions:
        yield "made with", ", ".join(versions)
    with suppress(OSError):
        if plan.path is not None:
            yield "plan saved", _date_text(plan.path.stat().st_mtime)
    yield "page written", f"{_date_text(time.time())} with Python {platform.python_version()}"


def _date_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _part_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for device in plan.devices:
        parts = known_parts(device)
        sizes = ("unknown" if parts is None else _size(getattr(parts, name)) for name, _, _ in MEMORY_PARTS)
        reserve = max(0, device.memory_bytes - device.capacity_bytes)
        free = max(0, device.capacity_bytes - device.peak_bytes)
        yield device.label, *sizes, _size(reserve), _size(free)


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "none"


def _check_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for check in sorted(plan.checks, key=lambda check: not check.depends):
        more = " ".join(filter(None, (check.advice, check.remark)))
        errors = error_text(check.split_error), error_text(check.accumulation_error)
        yield check.subject, *errors, "yes" if check.depends else "no", more


def _trial_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for trial in plan.trials:
        split = tuple_text(trial.split) if len(trial.split) > 1 else f"{trial.batch_size}"
        rate = "failed" if trial.samples_per_s is None else rate_text(trial.samples_per_s).removesuffix(" samples/s")
        rate += f" ± {percent_text(trial.error_share)}" if trial.error_share else ""
        yield f"{trial.number}", split, f"{trial.accumulation_steps}", rate, trial.failure or ""


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    several, is_ddp = len(plan.devices) > 1, plan.region is None
    if several:
        yield "batch_size by rank" if is_ddp else "split", tuple_text(plan.split)
    if several and not is_ddp:
        yield "gpu0_bsz", f"{plan.gpu0_bsz}"
        reduce = f', reduce="{reduce_of(plan)}"' if reduce_of(plan) not in (None, "samples") else ""
        dim = f", dim={plan.batch_dim}" if plan.batch_dim else ""
        call = f"({plan.gpu0_bsz}, model{dim}, split={tuple_text(plan.split)}{reduce})"
        yield "only the wrapper", f"autosplit.BalancedDataParallel{call}"
    for name in ("batch_size", "accumulation_steps", "effective_batch_size", "precision"):
        yield name, f"{getattr(plan, name)}"
    if plan.checkpointed:
        yield "checkpointed layers", ", ".join(plan.checkpointed)
    if several and is_ddp:
        options = ", ".join(f"{name}={value}" for name, value in plan.ddp.options.keywords().items())
        yield "options", f"DistributedDataParallel(model, {options})"
        devices = shlex.quote(",".join(str(device.index) for device in plan.devices))
        if all(device.kind == "cuda" for device in plan.devices):
            yield "devices", f"CUDA_VISIBLE_DEVICES={devices}"
