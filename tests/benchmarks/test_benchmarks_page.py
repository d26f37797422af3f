"""The page of benchmarks is generated from the committed results."""

from __future__ import annotations

import runpy

from folders import BENCHMARKS, DOCS


def test_the_page_is_made_from_the_results_that_are_committed() -> None:
    made = runpy.run_path(str(DOCS / "benchmarks.py"))["page"]()
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == made, "run python docs/benchmarks.py"
    for results in BENCHMARKS.glob("results/*.json"):
        assert f"`python benchmarks/{results.stem}.py`, 20" in made, "no figure without its command and date"
