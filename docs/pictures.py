"""Draw docs/pictures/*.svg: python docs/pictures.py. It needs the extra `report` and no GPU, and takes half a minute.

The pictures of README are charts of the plan in its example. The pictures of "How it works" are charts of a plan for
the same GPUs with less memory, whose ceilings limit the batch, and of one tracked training step on the CPU. Each
picture has the report's colours for light and dark pages.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import vl_convert

import autosplit
from autosplit.extras.report_charts import CONFIG, HATCH, charts_of
from autosplit.runtime.memory_tracker import Entry, Tracker
from autosplit.workload.from_file import load_workload

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
STYLE = ROOT / "autosplit" / "extras" / "templates" / "report.css"
EXAMPLE = str(ROOT / "examples" / "char_gpt.py")
PICTURES = {
    ("sim:1xRTX4090+1xRTX3060", 16384): {"devices": "split", "rates": "gain"},
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
    for place, (kind, _, nbytes, _) in enumerate(entries, 1):
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


def main() -> None:
    """Draw the pictures."""
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, dict[str, Any]] = {"tracker": tracker_chart(followed_step())}
    for (devices, size), names in PICTURES.items():
        workload = load_workload(EXAMPLE)
        plan = autosplit.tune(workload, devices=devices, effective_batch_size=size, profile="off")
        charts = charts_of(plan, plan.explain())
        found |= {names[chart.name]: chart.spec for chart in charts if chart.name in names and chart.spec}
    for name, spec in found.items():
        (FOLDER / f"{name}.svg").write_text(picture(spec) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
