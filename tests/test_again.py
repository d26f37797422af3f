"""A gate's stage runs its failed tests again, alone (.ci/again). It passes if they pass then, and names them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT, TESTS
from marks import for_release

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the gate is a bash script")

CI = ROOT / ".ci"
PRELUDE = """\
import os, pytest
from pathlib import Path

HERE = Path(__file__).parent
FIRST = not (HERE / "second").exists()

def test_passes():
    pass
"""
FLAKY = """
@pytest.mark.parametrize("spaces", ["a b"])
def test_flaky(spaces):
    (HERE / "second").touch()
    assert not FIRST
"""
FAILS = """
def test_fails():
    (HERE / "second").touch()
    assert False
"""
CRASHES_ONCE = """
def test_crashes():
    (HERE / "second").touch()
    if FIRST:
        os._exit(3)
"""
BAD_TEARDOWN = """
@pytest.fixture
def bad():
    (HERE / "second").touch()
    yield
    assert False

def test_bad_teardown(bad):
    pass
"""
# Name: (the tiny suite, a second file of it, xdist workers, the stage's exit code, the flaky tests).
SUITES = {
    "a crash of a worker": (PRELUDE + CRASHES_ONCE, "", 1, 0, ["test_crashes"]),
    "a crash of pytest": (PRELUDE + CRASHES_ONCE, "", 0, 3, []),
    "a flaky test and a failing test": (PRELUDE + FLAKY + FAILS, "", 0, 1, ["test_flaky[a b]"]),
    "a teardown that always fails": (PRELUDE + BAD_TEARDOWN, "", 0, 1, []),
    # With workers, pytest runs the other file and exits with 1, as if tests had failed.
    "a collection error": (PRELUDE + FLAKY, "raise RuntimeError", 1, 1, []),
}

IN_GATE = ("a flaky test and a failing test", "a crash of a worker", "a collection error")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in IN_GATE else for_release(name) for name in SUITES])
def test_a_stage_passes_if_its_failed_tests_pass_alone(name, tmp_path):
    suite, other, workers, code, flaky = SUITES[name]
    (tmp_path / "tests").mkdir()
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "test_tiny.py").write_text(suite)
    (tmp_path / "tests" / "test_other.py").write_text(other)
    stage = f'set -euo pipefail; python -m pytest -n {workers} | tee log || bash "{CI / "again"}" $? tiny; echo went on'
    done = subprocess.run(
        ["bash", "-c", stage], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.endswith("went on\n") is (code == 0)
    told = tmp_path / "flaky"
    assert (told.read_text() if told.exists() else "") == "".join(f"tiny: tests/test_tiny.py::{one}\n" for one in flaky)
    assert not (tmp_path / "failed").exists(), "a later stage would take it for its own"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a stage: this Python comes first, and the tiny suite finds what conftest.py imports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "AUTOSPLIT_FAILED_TESTS": str(folder / "failed"),
        "AUTOSPLIT_FLAKY_TESTS": str(folder / "flaky"),
    }


@pytest.mark.parametrize("script", ["run", "smoke"])
def test_every_stage_of_the_gate_runs_its_failed_tests_again(script):
    lines = (CI / script).read_text(encoding="utf-8").replace("|\n", "|").splitlines()
    stages = [line for line in lines if "-m pytest" in line]
    assert stages
    assert [line for line in stages if not re.search(r' \|\| bash (\.ci/again|"\$again") \$\? \w+$', line)] == []
