"""Draws docs/pictures/*.svg from a plan: python docs/pictures.py [PLAN.json].

Without a plan it tunes the README's example for the README's cards, which takes no card. A picture has its own colours
for light and dark pages, those of the report.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import autosplit
from autosplit.plan.charts import charts_of
from autosplit.plan.plan import Plan
from autosplit.workload.from_file import load_workload

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
STYLE = ROOT / "autosplit" / "cli" / "templates" / "report.css"
PICTURES = {"devices": "split", "rates": "gain"}
"""The charts of the report that are pictures of their own."""


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


def main() -> None:
    """Draw the pictures."""
    if len(sys.argv) > 1:
        plan = Plan.load(sys.argv[1])
    else:
        source = load_workload(str(ROOT / "examples" / "char_gpt.py"))
        plan = autosplit.tune(source, devices="sim:1xRTX3090+1xRTX2080Ti", effective_batch_size=1024, profile="off")
    FOLDER.mkdir(exist_ok=True)
    for chart in charts_of(plan, plan.explain()):
        if chart.name in PICTURES:
            (FOLDER / f"{PICTURES[chart.name]}.svg").write_text(picture(chart.svg) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
