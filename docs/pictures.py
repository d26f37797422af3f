"""Draw docs/pictures/*.svg: python docs/pictures.py [NAME ...]. It needs the extra `report` and no GPU.

The pictures of README are charts of the plan in its example. The pictures of "How it works" are charts of a plan for
the same GPUs with less memory, whose ceilings limit the batch, and of one tracked training step on the CPU. The picture
of "Benchmarks" has committed results. Each picture has the report's colours for light and dark pages. All of them take
half a minute.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vl_convert

import autosplit
from autosplit.runtime.memory_tracker import Entry, Tracker
from autosplit.text import counted_text
from autosplit.tools.report_charts import CONFIG, HATCH, charts_of
from autosplit.workload.from_file import load_workload

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
STYLE = ROOT / "autosplit" / "tools" / "templates" / "report.css"
EXAMPLE = str(ROOT / "examples" / "char_gpt.py")
PICTURES = {
    ("sim:1xRTX4090+1xRTX3060", 16384): {"rates": "gain"},
    ("sim:1xRTX3090@1GiB+1xRTX2080Ti@512MiB", 1024): {"line0": "ceiling", "landscape": "landscape", "trials": "search"},
}
"""The charts of the report that become pictures, by the devices and the effective batch size of the plan."""

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations and others",
}
"""The tracker's kinds of storages, with their labels."""

WIDTH = 400

LEAST_SEEN_MIB = 0.1
"""Changes below a pixel are not drawn: the peak is 200 times as much."""


def variables() -> tuple[str, str]:
    """Return the report's colours in light and in dark."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    return light, dark


def picture(spec: dict[str, Any]) -> str:
    """Draw a chart as an SVG file with the report's colours."""
    light, dark = variables()
    style = (
        f"<style>svg{{{light} background:var(--paper)}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
        f"<defs>{HATCH}</defs>"
    )
    svg = vl_convert.vegalite_to_svg({**spec, "width": WIDTH, "autosize": "pad"})
    return svg.replace(">", f">{style}", 1)


def followed_step() -> tuple[Entry, ...]:
    """Track the first training step of README's example on the CPU, with AdamW and 8 samples."""
    workload: autosplit.Workload = load_workload(EXAMPLE)()
    model, (inputs, targets), loss_fn = workload.model, workload.sample_batch, workload.loss_fn
    assert loss_fn is not None
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = Tracker(["cpu:0"], [None], accounts=True)
    with tracker:
        for tensor in (*model.parameters(), *model.buffers(), inputs, targets):
            tracker.adopt(tensor, 0)
        for parameter in model.parameters():
            tracker.classify(parameter, "parameters")
        loss_fn(model(inputs), targets).backward()
        for parameter in model.parameters():
            tracker.classify(parameter.grad, "gradients")
        optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                tracker.classify(value, "optimizer")
        return tracker.entries()


def tracker_chart(entries: tuple[Entry, ...]) -> dict[str, Any]:
    """Describe the memory in use while the storages of a step are allocated and released."""
    held: Counter[str] = Counter()
    seen = dict.fromkeys(KINDS, 0.0)
    values = [{"x": 0, "kind": KINDS[kind], "y": 0.0} for kind in KINDS]
    for place, (kind, _, nbytes) in enumerate(entries, 1):
        held[kind if kind in KINDS else "activations"] += nbytes
        now = {name: held[name] / 2**20 for name in KINDS}
        if max(abs(now[name] - seen[name]) for name in KINDS) >= LEAST_SEEN_MIB:
            seen = now
            values += [{"x": place, "kind": KINDS[name], "y": round(mib, 2)} for name, mib in now.items()]
    colors = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c5)"]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": f"Memory of a training step with {len(entries):,} allocations and releases.",
        "height": 260,
        "data": {"values": values},
        "mark": "area",
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "storages that were allocated or released"},
            "y": {"field": "y", "type": "quantitative", "title": "memory, MiB"},
            "color": {"field": "kind", "scale": {"domain": list(KINDS.values()), "range": colors}},
        },
        "config": CONFIG,
    }


METHODS = {
    "ours": "autosplit",
    "lightning_power": "Lightning, doubling",
    "lightning_binsearch": "Lightning, bisection",
    "accelerate": "accelerate, halving",
}
"""Methods of benchmarks/results/ceilings.json that are drawn, with their labels."""


def largest_batch_chart() -> dict[str, Any]:
    """Describe the measured seconds and out-of-memory errors of methods that find the largest batch."""
    path = ROOT / "benchmarks" / "results" / "ceilings.json"
    medians = json.loads(path.read_text(encoding="utf-8"))["cpu"]["medians"]
    found = [(label, medians[name]) for name, label in METHODS.items()]
    texts = {label: f"{row['seconds']:.1f} s, {counted_text(row['ooms'], 'error')}" for label, row in found}
    title = "seconds to find the largest batch"
    return bars({label: row["seconds"] for label, row in found}, texts, title=title, most=13)


def estimators_chart() -> dict[str, Any]:
    """Describe how many published largest batches each tool predicts."""
    shares: dict[str, float] = runpy.run_path(str(ROOT / "docs" / "benchmarks.py"))["estimators"]()
    percents = {tool: round(100 * share) for tool, share in shares.items()}
    return bars(
        percents, {tool: str(one) for tool, one in percents.items()}, title="correct largest batches, %", most=100
    )


def bars(values: dict[str, float], texts: dict[str, str], *, title: str, most: float) -> dict[str, Any]:
    """Describe a bar for each tool, with a text at its end. autosplit's bar has another colour."""
    color = {"condition": {"test": "datum.tool == 'autosplit'", "value": "var(--c1)"}, "value": "var(--c5)"}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": title,
        "height": 30 * len(values),
        "data": {"values": [{"tool": tool, "value": value, "text": texts[tool]} for tool, value in values.items()]},
        "encoding": {
            "y": {"field": "tool", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "value", "type": "quantitative", "title": title, "scale": {"domain": [0, most]}},
        },
        "layer": [
            {"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": {"color": color}},
            {"mark": {"type": "text", "align": "left", "dx": 4}, "encoding": {"text": {"field": "text"}}},
        ],
        "config": CONFIG,
    }


def main(names_asked: list[str]) -> None:
    """Draw the pictures of these names, or all of them."""
    FOLDER.mkdir(exist_ok=True)
    found = {"estimators": estimators_chart(), "largest_batch": largest_batch_chart()}
    if not names_asked or not {*names_asked} <= {*found}:
        found |= plan_charts()
    for name in names_asked or found:
        (FOLDER / f"{name}.svg").write_text(picture(found[name]) + "\n", encoding="utf-8")


def plan_charts() -> dict[str, dict[str, Any]]:
    """Describe the charts of the examples' plans, and of a tracked step."""
    found: dict[str, dict[str, Any]] = {"tracker": tracker_chart(followed_step())}
    for (devices, size), names in PICTURES.items():
        workload = load_workload(EXAMPLE)
        plan = autosplit.tune(workload, devices=devices, effective_batch_size=size, profile="off")
        if "landscape" in names:  # "How it works" explains the search, which runs BalancedDataParallel
            plan = replace(plan, layouts=(plan.main,))
        found |= {names[chart.name]: chart.spec for chart in charts_of(plan) if chart.name in names}
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
