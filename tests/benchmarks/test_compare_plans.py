"""The comparison of saved plans: figures without noise must be equal, and figures that depend on times may differ."""

from __future__ import annotations

import json
import runpy
import sys

import ddp_jobs
import pytest
from folders import BENCHMARKS

SIMULATED, MEASURED = "sim: an MLP", "cpu: an MLP"


@pytest.fixture(scope="module")
def bench() -> dict:
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / "compare_plans.py"))
    finally:
        sys.path[:] = path
        for name in {"plan_cases", "char_gpt"} - modules:
            del sys.modules[name]


@pytest.fixture
def compare(bench, tmp_path, monkeypatch, capsys):
    """Return a function that saves figures of two runs, compares them, and returns the exit code and the output."""

    def run(old: dict, new: dict, *words: str) -> tuple[int, str]:
        files = [tmp_path / "old.json", tmp_path / "new.json"]
        for file, plans in zip(files, (old, new), strict=True):
            file.write_text(bench["saved_text"](plans), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["compare_plans.py", "compare", *map(str, files), *words])
        return bench["main"](), capsys.readouterr().out

    return run


def saved(bench, **changes) -> dict:
    """Return the figures of a handmade plan, as a file has them."""
    found = bench["plan_figures"](ddp_jobs.make_plan((4, 2), 12))
    return json.loads(json.dumps({**found, **changes}))


@pytest.mark.parametrize(("figure", "other"), [("samples_per_s", 11.0), ("split", [3, 3])])
def test_every_figure_of_a_simulated_plan_counts(bench, compare, figure, other):
    code, output = compare({SIMULATED: saved(bench)}, {SIMULATED: saved(bench, **{figure: other})})
    assert code == 1
    assert f"differs  {SIMULATED}\n         {figure}: " in output
    assert output.endswith(f" -> {json.dumps(other)}\n1 differs\n")


def test_the_split_of_budgets_depends_on_times_and_their_ceilings_do_not(bench, compare):
    old = {MEASURED: saved(bench)}
    noise = {"split": [3, 3], "samples_per_s": 11.0}
    code, output = compare(old, {MEASURED: saved(bench, **noise)})
    assert (code, output) == (
        0,
        f"noise    {MEASURED}\n         depends on times: split, samples_per_s x1.10\n1 noise\n",
    )
    code, output = compare(old, {MEASURED: saved(bench, ceilings=[], **noise)})
    assert code == 1
    assert "\n         ceilings: [[" in output


def test_scripts_and_helpers_of_tests_have_different_names() -> None:
    """Both folders are on the import path. `plans.py` was in both, and tests imported the wrong one."""
    names = {path.name for path in BENCHMARKS.glob("*.py")}
    assert names.isdisjoint(path.name for path in BENCHMARKS.parent.glob("tests/**/*.py"))
