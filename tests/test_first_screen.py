"""Every figure on README's first screen is computed from a committed measurement, or printed by its command."""

from __future__ import annotations

import json
import re
from typing import Any

from folders import DOCS, README, ROOT

RESULTS = ROOT / "benchmarks" / "results"
SCREEN = README[: README.index("## In a script")]
WORDS = " ".join(SCREEN.split())
TABLE = SCREEN.split("```\n")[-2]
"""The output of the first command."""


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def findings(name: str, stage: str) -> list[dict[str, Any]]:
    (found,) = [one for one in result(name)["stages"] if one["name"] == stage]
    return [one for one in found["findings"] if "steps" in one or "memory predicted/measured" in one]


def rates_in(picture: str) -> list[float]:
    """Return the samples/s of a picture, each once and in order."""
    svg = (DOCS / "pictures" / f"{picture}.svg").read_text(encoding="utf-8")
    return list(dict.fromkeys(float(rate.replace(",", "")) for rate in re.findall(r">([\d,]+) samples/s", svg)))


def test_the_largest_batch() -> None:
    measured = result("ceilings")["cpu"]
    ours, halving = (measured["medians"][name] for name in ("ours", "accelerate"))
    assert f"exact in **{ours['seconds']:.1f} s**, no out-of-memory error" in WORDS
    assert (ours["exact_share"], ours["most_ooms"]) == (1, 0)
    assert f"(`find_executable_batch_size`): {halving['seconds']:.1f} s, {halving['ooms']} errors" in WORDS
    assert f"medians of {len(measured['cases'])} cases" in WORDS


def test_errors_on_gpus() -> None:
    errors = [one["errors"] for gpu in ("h100", "h200") for one in findings(f"gpu/{gpu}", "ceilings")]
    assert len(errors) == 12
    assert f"the search had at most {max(errors)} out-of-memory errors" in WORDS


def test_published_batches() -> None:
    found = result("rivals")["errors"]
    inside = sorted(((one["inside"], name) for name, one in found.items()), reverse=True)
    (ours, first), (next_best, second) = inside[:2]
    assert (first, second) == ("autosplit", "MemTracker")
    assert f"**{ours:.0%}** of {found['autosplit']['brackets']} published largest batches" in WORDS
    assert f"the next tool, MemTracker: {next_best:.0%}" in WORDS


def test_the_memory_of_steps_on_the_h200() -> None:
    ratios = [one["memory predicted/measured"][1] for one in findings("gpu/h200_before", "steps")]
    inside = sum(abs(ratio - 1) <= 0.01 for ratio in ratios)
    assert f"The memory of {inside} of {len(ratios)} training steps on the H200 was within 1%" in WORDS


def test_mixed_gpus_have_both_baselines() -> None:
    """The headline compared with a split that is slower than one GPU alone. tests/test_readme.py runs the command."""
    gain = re.search(r"^gain +([\d.]+) times equal ranks, ([\d.]+) times sim:0 alone$", TABLE, re.MULTILINE)
    assert gain is not None
    assert "sim:0 RTX4090" in TABLE
    assert f"**{gain[1]} times** equal batches, {gain[2]} times the RTX 4090 alone (simulated)" in WORDS
    index = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    said = (
        f"DDP with unequal batch sizes trains {gain[1]} times as many samples/s as with equal ones, and {gain[2]} times"
    )
    assert f"{said} as many as the RTX 4090 alone (simulated)" in index


def test_the_picture_has_the_figures_of_the_table() -> None:
    """The picture was of another run: 47,463 samples/s next to a table of 47,485."""
    throughput = re.search(r"^throughput +([\d,]+) samples/s \(simulated\)$", TABLE, re.MULTILINE)
    other = re.search(r"times BalancedDataParallel, ([\d,]+) samples/s$", TABLE, re.MULTILINE)
    gain = re.search(r"^gain +([\d.]+) times equal ranks, ([\d.]+) times sim:0 alone$", TABLE, re.MULTILINE)
    assert throughput is not None
    assert other is not None
    assert gain is not None
    shown, plan = rates_in("gain"), float(throughput[1].replace(",", ""))
    assert shown[0] == plan
    assert float(other[1].replace(",", "")) in shown
    ratios = [f"{plan / rate:.2f}" for rate in shown]
    assert gain[1] in ratios
    assert gain[2] in ratios


def test_no_other_figure_is_on_the_first_screen() -> None:
    """A new figure needs a test here. Numbers of the commands, of GPUs' names and of versions are no results."""
    body = SCREEN[SCREEN.index("autosplit finds") :]
    text = re.sub(r"```.*?```|\]\(.*?\)|`.*?`|!\[.*?\]|RTX \d+|H\d00", "", body, flags=re.DOTALL)
    figures = set(re.findall(r"(?<![\w.])\d[\d.,]*\d|(?<![\w.])\d(?![\w.])", text))
    known = {"0.9", "7.6", "18", "95", "21", "76", "2.04", "1.32", "13", "3", "17", "1", "15", "9"}
    assert figures <= known, figures - known
