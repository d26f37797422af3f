"""Draw docs/pictures/*.svg: python docs/pictures.py. It needs no GPU, and takes half a minute.

The pictures of README are charts of the plan in its example. The pictures of "How it works" are charts of a plan for
the same GPUs with less memory, whose ceilings limit the batch, and of one tracked training step on the CPU. Each
picture has the report's colours for light and dark pages.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch

import autosplit
from autosplit.plan.canvas import Canvas, Chart, drawn
from autosplit.plan.charts import charts_of
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
"""The charts of the report that are pictures of their own, by the devices and the effective batch size of the plan."""

KINDS = {"parameters": "c1", "gradients": "c2", "optimizer": "c3", "activations": "c5"}
"""Kinds of storages that the tracker tells apart, with their colours."""

LEAST_SEEN_MIB = 0.1
"""Changes below a pixel are not drawn: the peak is 200 times as much."""


def variables() -> tuple[str, str]:
    """Return the report's colours in light and in dark."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    return light, dark


def picture(svg: str) -> str:
    """Make a file of its own of a chart in a page."""
    light, dark = variables()
    style = (
        f"<style>svg{{{light} font-family:system-ui,sans-serif;background:var(--paper)}}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    )
    return re.sub(
        r"^<svg ", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ', svg
    ).replace(">", f">{style}", 1)


def followed_step() -> tuple[Entry, ...]:
    """Follow a training step of README's example on the processor, AdamW's first, of 8 samples."""
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


def tracker_chart(entries: tuple[Entry, ...]) -> Chart:
    """Draw what a device holds as the storages of a step come and go."""
    held: Counter[str] = Counter()
    places, heights = [0], {kind: [0.0] for kind in KINDS}
    for place, (kind, _, nbytes, _) in enumerate(entries, 1):
        held[kind if kind in KINDS else "activations"] += nbytes
        if max(abs(held[name] / 2**20 - values[-1]) for name, values in heights.items()) >= LEAST_SEEN_MIB:
            places.append(place)
            for name, values in heights.items():
                values.append(held[name] / 2**20)

    def draw(canvas: Canvas) -> None:
        colors = [canvas.colors[color] for color in KINDS.values()]
        labels = ["parameters", "gradients", "optimizer state", "activations and others"]
        canvas.axes.stackplot(places, *heights.values(), colors=colors, labels=labels, linewidth=0)
        canvas.axes.set_xlim(0, places[-1])
        canvas.finish("storages that came or went", "memory, MiB", 2)

    peak = max(sum(values) for values in zip(*heights.values(), strict=True))
    text = f"Memory of a training step with {len(entries):,} allocations and releases. The peak is {peak:.0f} MiB."
    return drawn("tracker", "Memory in a step", text, 300, draw)


def main() -> None:
    """Draw the pictures."""
    FOLDER.mkdir(exist_ok=True)
    found = {"tracker": tracker_chart(followed_step())}
    for (devices, size), names in PICTURES.items():
        workload = load_workload(EXAMPLE)
        plan = autosplit.tune(workload, devices=devices, effective_batch_size=size, profile="off")
        found |= {names[chart.name]: chart for chart in charts_of(plan, plan.explain()) if chart.name in names}
    for name, chart in found.items():
        assert chart.svg, chart.text
        (FOLDER / f"{name}.svg").write_text(picture(chart.svg) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
