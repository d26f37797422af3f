"""Compare several models on several machines, as a table in Markdown or HTML with the measured error of each number."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.probe.request import LARGEST_LOOKED_AT
from autosplit.sim.compare import ComparedMachine, Comparison
from autosplit.text import rate_text

MARK = "written by autosplit compare"
"""Text near the beginning of each table. A file that contains it may be replaced."""

TITLE = "Models and machines"


@dataclass(frozen=True)
class ErrorBand:
    """The measured error of predicted samples/s for one kind of model.

    Attributes:
        kind: The models that were measured.
        median: Half of the predictions are off by at most this fraction.
        p90: 90% of the predictions are off by at most this fraction.
    """

    kind: str
    median: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.0%}, 90%: {self.p90:.0%}"


IMAGES = ErrorBand("image models", 0.06, 0.19)
"""Errors of 320 steps in fp16 on an RTX 3090, not used in fitting (benchmarks/results/published.json)."""

TOKENS = ErrorBand("transformers", 0.04, 0.14)
"""Errors of 22 steps in fp32 on H100, A100, V100 and L4 (benchmarks/results/published.json)."""

HEADINGS = ("model", "machine", "largest batch", "precision", "samples/s", "error", "cost of 1M samples")


def error_band(sample_batch: Any) -> ErrorBand | None:
    """Return the measured error for the kind of model that has such a sample batch, or None if nothing was measured."""
    from autosplit.workload.tree import tensors_of

    tensors = [*tensors_of(sample_batch)]
    if any(tensor.is_floating_point() and tensor.dim() == 4 for tensor in tensors):
        return IMAGES
    if any(not tensor.is_floating_point() and tensor.dim() == 2 for tensor in tensors):
        return TOKENS
    return None


@dataclass(frozen=True)
class ComparedModel:
    """A model with its machines.

    Attributes:
        name: The spec of the model.
        comparison: None if the model was not compared.
        failure: Why the model was not compared, or an empty string.
        error: The measured error of predictions for this kind of model. None if it is unknown.
    """

    name: str
    comparison: Comparison | None
    failure: str = ""
    error: ErrorBand | None = None

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table's row of each machine, with the columns of `HEADINGS`."""
        if self.comparison is None:
            yield (self.name, f"not compared: {self.failure}", *[""] * (len(HEADINGS) - 2))
            return
        for machine in self.comparison.machines:
            yield (self.name, machine.devices, *_figures(machine, self.error))
        for spec in self.comparison.not_compared:
            yield (self.name, spec, "not compared", *[""] * (len(HEADINGS) - 3))


def _figures(machine: ComparedMachine, error: ErrorBand | None) -> tuple[str, ...]:
    if machine.plan is None:
        return ("does not fit", *[""] * (len(HEADINGS) - 3))
    cost = machine.cost_per_million_samples
    off = str(error or "unknown") if machine.predicted else "measured"
    return (
        str(sum(machine.plan.ceilings)),
        machine.plan.precision,
        rate_text(machine.plan.samples_per_s).removesuffix(" samples/s"),
        off,
        "" if cost is None else f"{cost:.4g}",
    )


def notes_of(models: Iterable[ComparedModel]) -> list[str]:
    """Return the notes under a table: the meaning of its columns, and the measured errors."""
    machines = [machine for model in models if model.comparison for machine in model.comparison.machines]
    most = f"{LARGEST_LOOKED_AT:,}"
    notes = [
        (
            "Largest batch is the number of samples per forward that fit on all devices together. autosplit tried at "
            f"most {most} per device."
        )
    ]
    if any(machine.predicted for machine in machines):
        notes.append(
            "Error has two percentages, from published measurements of such models. Half of the predicted samples/s "
            "were off by at most the first, and 90% by at most the second."
        )
        notes.extend(SIMULATED_ERRORS)
    return notes


def as_markdown(models: Iterable[ComparedModel]) -> str:
    """Return the table in Markdown."""
    models = list(models)
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(row for model in models for row in model.rows())]
    lines = [f"| {' | '.join(map(_markdown_cell, row))} |" for row in rows]
    notes = [f"- {note}" for note in notes_of(models)]
    return "\n".join([f"<!-- {MARK} -->", f"# {TITLE}", "", *lines, "", *notes, ""])


def _markdown_cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{mark}"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em}}table{{border-collapse:collapse}}
th,td{{border:1px solid #bbb;padding:.3em .6em;text-align:left}}</style></head>
<body><h1>{title}</h1>
<table><thead>{head}</thead>
<tbody>
{body}
</tbody></table>
<ul>
{notes}
</ul></body></html>
"""


def as_html(models: Iterable[ComparedModel]) -> str:
    """Return the table as one HTML page without scripts. All text is escaped."""
    models = list(models)

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return _PAGE.format(
        mark=MARK,
        title=TITLE,
        head=row(HEADINGS, "th"),
        body="\n".join(row(cells, "td") for model in models for cells in model.rows()),
        notes="\n".join(f"<li>{html.escape(note)}</li>" for note in notes_of(models)),
    )


FORMATS: Mapping[str, Any] = {"markdown": as_markdown, "html": as_html}
"""Functions that write a table, by the name of the format."""
