"""Write a plan as one HTML file with charts, tables and all settings to copy. The page needs no network.

Vega draws the charts in the browser. Its source is in the page. The content security policy allows only this script and
our style sheet, by their hashes, and forbids the page to load anything. jinja2 escapes all values.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autosplit.cli import plan_report
from autosplit.cli.pasted_code import paste_lines
from autosplit.errors import InputError
from autosplit.extras.report_charts import HATCH, charts_of
from autosplit.files import what_stands_at
from autosplit.plan.canvas import check_installed
from autosplit.plan.charts import MEMORY_PARTS, known_parts
from autosplit.plan.exported import write
from autosplit.plan.plan import Plan
from autosplit.plan.record import reduce_of
from autosplit.plan.redact import shareable
from autosplit.probe.check_result import error_text
from autosplit.text import rate_text, size_text, tuple_text, visible

_FOLDER = Path(__file__).parent / "templates"

_MARK = '<meta name="generator" content="autosplit report">'
"""Tag near the beginning of a page that identifies it as written by autosplit."""

_MARKED_WITHIN = 512

HEADLINE = ("gain", "throughput", "split", "batch_size", "accumulation_steps", "gpu0_bsz")
"""The gain, the throughput, and the numbers that the user sets."""


def write_page(plan: Plan, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a plan's page atomically. Replace only an earlier report, or any file with `force`."""
    check_page(path, force=force)
    write(Path(path), page_of(plan), f"the report {path}")


def check_page(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise InputError if `write_page` would fail. Call this before long work."""
    _check_packages()
    target = Path(path)
    stands = what_stands_at(target)
    if stands is not None:
        raise InputError(
            f"{target} is {stands}, not a new file or an earlier report. Choose another path with -o PATH.",
            code="report-not-a-file",
        )
    if not target.parent.is_dir():
        raise InputError(
            f"The folder of {target} does not exist. Create {target.parent}, or choose another folder.",
            code="report-folder",
        )
    if force or not target.exists():
        return
    with suppress(OSError), target.open("rb") as file:
        if _MARK.encode() in file.read(_MARKED_WITHIN):
            return
    raise InputError(
        f"{target} exists and is not an autosplit report. Choose another path with -o PATH, or replace the file with "
        "--force.",
        code="report-exists",
    )


def _check_packages() -> None:
    check_installed("jinja2", "the report")
    check_installed("vl_convert", "the report", "vl-convert-python")


def page_of(plan: Plan) -> str:
    """Return a plan's page."""
    _check_packages()
    import jinja2
    import vl_convert

    shown = shareable(plan)  # Only this redacted plan reaches the page.
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
    return template.render(_values(shown), policy=policy, mark=_MARK, css=css, script=script, hatch=HATCH)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _values(plan: Plan) -> dict[str, object]:
    explanation = plan.explain()
    charts = charts_of(plan, explanation)
    model = plan.workload.get("model")
    numbers = dict(plan_report.all_numbers(plan))
    shown = {name: numbers.pop(name) for name in HEADLINE if name in numbers}
    shown["throughput"] = shown["throughput"].removesuffix(" (simulated)")
    ranks = list(_rank_rows(plan))
    return {
        "plan": plan,
        "columns": plan_report.device_columns(plan),
        "devices": list(plan_report.device_cells(plan)),
        "explained": plan_report.explained_lines(explanation),
        "ddp_heading": plan_report.ddp_heading(explanation),
        "title": f"autosplit: {model}" if isinstance(model, str) and model else "autosplit",
        "headline": shown,
        "other_numbers": [*numbers.items(), *_made(plan)],
        "charts": {chart.name: chart for chart in charts},
        "specs": {chart.name: chart.spec for chart in charts if chart.spec},
        "lines": [chart.name for chart in charts if chart.name.startswith("line")],
        "part_names": [label for _, label, _ in MEMORY_PARTS],
        "parts": list(_part_rows(plan)) if any(known_parts(device) for device in plan.devices) else [],
        "checks": list(_check_rows(plan)),
        "ranks": ranks,
        "ddp": plan_report.ddp_lines(plan)[-1:] if ranks else plan_report.ddp_lines(plan),  # the rest is a table
        "trials": list(_trial_rows(plan)),
        "settings": list(_settings(plan)),
        "code": "\n".join(paste_lines(plan)),
    }


def _made(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.request:
        yield "requested", plan_report.request_text(plan.request) or "only the defaults"
    names = {"autosplit": "autosplit", "torch": "torch", "cuda": "CUDA"}
    versions = [f"{name} {plan.machine[part]}" for part, name in names.items() if plan.machine.get(part) is not None]
    if versions:
        yield "made with", ", ".join(versions)


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


def _rank_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for rank in plan.ddp.ranks if len(plan.devices) > 1 else ():
        numbers = (rank.batch_size, rank.accumulation_steps, rank.ceiling.batch_size)
        yield f"{rank.rank}", rank.device, *(f"{number:,}" for number in numbers), size_text(rank.peak_bytes)


def _trial_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for trial in plan.trials:
        split = tuple_text(trial.split) if len(trial.split) > 1 else f"{trial.batch_size}"
        rate = "failed" if trial.samples_per_s is None else rate_text(trial.samples_per_s).removesuffix(" samples/s")
        yield f"{trial.number}", split, f"{trial.accumulation_steps}", rate, trial.failure or ""


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    several = len(plan.devices) > 1
    if several:
        yield "split", tuple_text(plan.split)
        yield "gpu0_bsz", f"{plan.gpu0_bsz}"
    yield "batch_size", f"{plan.batch_size}"
    yield "accumulation_steps", f"{plan.accumulation_steps}"
    yield "effective_batch_size", f"{plan.effective_batch_size}"
    if several and plan.region is not None:
        reduce = f', reduce="{reduce_of(plan)}"' if reduce_of(plan) not in (None, "samples") else ""
        dim = f", dim={plan.batch_dim}" if plan.batch_dim else ""
        call = f"({plan.gpu0_bsz}, model{dim}, split={tuple_text(plan.split)}{reduce})"
        yield "only the wrapper", f"autosplit.BalancedDataParallel{call}"
    yield "precision", plan.precision
    if plan.checkpointed:
        yield "checkpointed layers", ", ".join(plan.checkpointed)
    if several and plan.ddp.ranks:
        yield "DDP: batch_size by rank", ", ".join(f"{rank.batch_size}" for rank in plan.ddp.ranks)
        yield "DDP: accumulation_steps", f"{plan.ddp.ranks[0].accumulation_steps}"
        options = ", ".join(f"{name}={value}" for name, value in plan.ddp.options.keywords().items())
        yield "DDP: options", f"DistributedDataParallel(model, {options})"
        devices = shlex.quote(",".join(str(device.index) for device in plan.devices))
        if all(device.kind == "cuda" for device in plan.devices):
            yield "devices", f"CUDA_VISIBLE_DEVICES={devices}"
