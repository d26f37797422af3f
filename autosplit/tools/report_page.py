"""Write a plan as one HTML file with charts, tables and all settings to copy. The page needs no network.

The page shows the recommended strategy, and one line about the other. See `plan.record` for the recommendation.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from autosplit.cli.pasted_code import paste_lines
from autosplit.errors import InputError
from autosplit.files import what_stands_at, write_for_all
from autosplit.plan.layout import Layout, Seat
from autosplit.plan.plan import Plan
from autosplit.plan.record import reduce_of
from autosplit.plan.redact import shareable
from autosplit.plan.rows import PlanRows, explained_lines, rows_of, runs_of
from autosplit.probe.check_result import error_text
from autosplit.text import counted_text, percent_text, rate_text, request_text, size_text, tuple_text, visible
from autosplit.tools.canvas import check_installed
from autosplit.tools.charts import MEMORY_PARTS, known_parts
from autosplit.tools.report_charts import HATCH, charts_of

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


def _values(plan: Plan, made: Iterator[tuple[str, str]]) -> dict[str, object]:
    rows = rows_of(plan)
    layout, charts, numbers = rows.layout, charts_of(plan), dict(rows.numbers)
    model = plan.workload.get("model")
    gain = [("gain", numbers.pop("gain"))] if "gain" in numbers else []
    steps, throughput = ((name, numbers.pop(name)) for name in ("accumulation_steps", "throughput"))
    batches = _batches(layout) or [("batch_size", numbers.pop("batch_size"))]
    for name in ("split", "gpu0_bsz"):  # they are in a table and among the settings
        numbers.pop(name, None)
    return {
        "plan": plan,
        "equal": rows.equal,
        "columns": rows.columns,
        "devices": rows.devices,
        "explained": _explained(rows),
        "title": f"autosplit: {model}" if isinstance(model, str) and model else "autosplit",
        "cards": [*_strategy(plan, rows), *gain, throughput, *batches, steps],
        "other_numbers": [*numbers.items(), *made],
        "charts": {chart.name: chart for chart in charts},
        "memory": [chart.name for chart in charts if chart.name.startswith("line")],
        "throughput": [chart.name for chart in charts if chart.name in ("rates", "trials", "landscape")],
        "specs": {chart.name: chart.spec for chart in charts},
        "part_names": [label for _, label, _ in MEMORY_PARTS],
        "parts": list(_part_rows(layout)) if any(map(known_parts, layout.seats)) else [],
        "checks": list(_check_rows(plan)),
        "notes": [*map(str, rows.notes), *rows.remarks],
        "trials": list(_trial_rows(plan)),
        "settings": list(_settings(plan)),
        "code": "\n".join(paste_lines(plan)),
    }


def _strategy(plan: Plan, rows: PlanRows) -> Iterator[tuple[str, str]]:
    """Yield the recommended strategy, with one line about the other."""
    if rows.strategy:
        yield "strategy", rows.strategy
    elif len(plan.devices) > 1 and plan.recommended.strategy == "ddp":
        yield "strategy", "DDP (autosplit launch)"
    elif len(plan.devices) > 1:
        predicted = " (predicted)" if plan.ddp is not None and not plan.ddp.measured else ""
        others = [f"DDP{predicted}: {line}" for line in rows.other[1][-1:]]
        yield "strategy", ". ".join(["BalancedDataParallel (plan.wrap)", *others])


def _batches(layout: Layout) -> list[tuple[str, str]]:
    """Return the batch size of each group of equal devices. For one device or many groups, return an empty list."""
    runs = list(runs_of(layout, layout.split))
    if len(layout.seats) == 1 or len(runs) > MOST_CARDS:
        return []
    return [(name, counted_text(samples, "sample") + " each" * (count > 1)) for name, count, samples in runs]


def _explained(rows: PlanRows) -> list[str]:
    """Return the reasons. The comparisons with other options are in a chart, all in one sentence."""
    explanation = replace(rows.explanation, even=None, even_measured=None, alone=())
    return [*rows.unused, *explained_lines(explanation), *rows.limits]


def _made(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the request, the machine, the versions and the dates."""
    if plan.request:
        yield "requested", request_text(plan.request) or "only the defaults"
    runs = runs_of(plan.main, [size_text(device.memory_bytes) for device in plan.devices])
    yield "machine", ", ".join(f"{name}: {size}{' each' if count > 1 else ''}" for name, count, size in runs)
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


def _part_rows(layout: Layout) -> Iterator[tuple[str, ...]]:
    def cells(seat: Seat) -> tuple[str, ...]:
        parts, device = known_parts(seat), seat.device
        sizes = ("unknown" if parts is None else _size(getattr(parts, name)) for name, _, _ in MEMORY_PARTS)
        reserve = max(0, device.memory_bytes - device.capacity_bytes)
        return (*sizes, _size(reserve), _size(max(0, device.capacity_bytes - seat.peak_bytes)))

    for name, _, found in runs_of(layout, map(cells, layout.seats)):
        yield name, *found


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
    layout = plan.recommended
    several, is_ddp, split = len(layout.seats) > 1, layout.strategy == "ddp", tuple_text(layout.split)
    if several:
        yield "batch_size by rank" if is_ddp else "split", split
    if several and not is_ddp:
        yield "gpu0_bsz", f"{layout.split[0]}"
        reduce = f', reduce="{reduce_of(plan)}"' if reduce_of(plan) not in (None, "samples") else ""
        dim = f", dim={plan.batch_dim}" if plan.batch_dim else ""
        yield (
            "only the wrapper",
            f"autosplit.BalancedDataParallel({layout.split[0]}, model{dim}, split={split}{reduce})",
        )
    for name in ("batch_size", "accumulation_steps", "effective_batch_size"):
        yield name, f"{getattr(layout, name)}"
    yield "precision", plan.precision
    if plan.checkpointed:
        yield "checkpointed layers", ", ".join(plan.checkpointed)
    if several and is_ddp:
        options = ", ".join(f"{name}={value}" for name, value in layout.options.keywords().items())
        yield "options", f"DistributedDataParallel(model, {options})"
        devices = shlex.quote(",".join(str(device.index) for device in layout.devices))
        if all(device.kind == "cuda" for device in layout.devices):
            yield "devices", f"CUDA_VISIBLE_DEVICES={devices}"
