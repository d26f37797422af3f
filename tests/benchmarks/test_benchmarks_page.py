"""The pages of benchmarks are generated from the committed results."""

from __future__ import annotations

import re
import runpy

import pytest
from folders import BENCHMARKS, DOCS


def made(name: str) -> dict:
    return runpy.run_path(str(DOCS / f"{name}.py"))


@pytest.mark.parametrize("name", ["benchmarks", "measurements"])
def test_the_page_is_made_from_the_results_that_are_committed(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert page == made(name)["page"](), f"run python docs/{name}.py"


def test_every_result_has_its_command_and_date() -> None:
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    for results in BENCHMARKS.glob("results/*.json"):
        assert f"`python benchmarks/{results.stem}.py`, 20" in page, "no figure without its command and date"


def test_the_first_page_has_one_chart_and_seven_figures() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^!\[", page, re.MULTILINE)) == 1
    assert len(re.findall(r"^\| \[", page, re.MULTILINE)) == 7
    for command in re.findall(r"`python benchmarks/(\w+)\.py`", page):
        assert (BENCHMARKS / f"{command}.py").exists()


def test_the_chart_shows_the_committed_shares() -> None:
    picture = (DOCS / "pictures" / "estimators.svg").read_text(encoding="utf-8")
    shares = made("benchmarks")["estimators"]()
    assert next(iter(shares)) == "autosplit"
    for tool, share in shares.items():
        assert f">{tool}</text>" in picture
        assert f">{100 * share:.0f}</text>" in picture, "run python docs/pictures.py estimators"
