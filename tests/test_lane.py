"""The lane script (.ci/lane): its output if tests pass, fail, or the versions cannot be installed. No network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from folders import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("timeout") is None, reason="the lane is a bash script that uses `timeout`"
)

# A fake Python. It creates a virtual environment of itself, and records the arguments of pip and pytest.
INTERPRETER = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) eval "$PIP" ;;
    "-m pytest "*) eval "$PYTEST" ;;
    *) echo "torch 1.2.3 optuna 4.5.6" ;;
esac
"""

PYTEST_CALL = "-m pytest tests/public"


@pytest.fixture
def lane(tmp_path, monkeypatch):
    """Return a function that runs a lane with other commands in place of pip and pytest."""
    interpreter = tmp_path / "fake_python"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    calls = tmp_path / "calls"

    def run(pip: str, tests: str = "exit 0", *, words: tuple[str, ...] = ("old", "constraints.txt"), limit_s: int = 60):
        environment = {
            **os.environ,
            "PYTHON": str(interpreter),
            "CALLS": str(calls),
            "PIP": pip,
            "PYTEST": tests,
            "TMPDIR": str(temporary),
            "AUTOSPLIT_LANE_LIMIT_S": str(limit_s),
        }
        words = ("bash", str(ROOT / ".ci" / "lane"), *words)
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert not list(temporary.iterdir()), "the environment is deleted"
        return done.returncode, done.stdout.splitlines()[-1], calls.read_text().splitlines()

    return run


def test_it_passes_if_the_tests_pass(lane):
    code, said, calls = lane("exit 0")
    assert code == 0
    assert said.startswith("lane old: passed (torch 1.2.3 optuna 4.5.6, installed in ")
    assert calls[1] == f"-m pip install --no-compile -c {ROOT / 'constraints.txt'} -e .[test]"
    assert calls[-1] == PYTEST_CALL


def test_it_fails_if_a_test_fails(lane):
    code, said, _ = lane("exit 0", "exit 1")
    assert code == 1
    assert said.startswith("lane old: FAILED: pytest exited with 1 (torch 1.2.3")


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (
            "echo 'ERROR: No matching distribution found for torch==9.9'; exit 1",
            "the installation failed (ERROR: No matching distribution found for torch==9.9)",
        ),
    ],
)
def test_it_is_skipped_if_a_version_can_not_be_installed(lane, pip, reason):
    code, said, calls = lane(pip)
    assert (code, said) == (75, f"lane old: SKIPPED: {reason}")
    assert PYTEST_CALL not in calls


def test_it_is_skipped_if_the_index_does_not_answer(lane):
    code, said, calls = lane("exec sleep 600", limit_s=1)
    assert (code, said) == (75, "lane old: SKIPPED: the installation took longer than 1 s")
    assert PYTEST_CALL not in calls


def test_bounds_that_contradict_each_other_are_a_failure(lane):
    code, said, _ = lane("echo 'ERROR: ResolutionImpossible: for help visit'; exit 1")
    assert (code, said) == (1, "lane old: FAILED: pyproject.toml does not allow the versions of constraints.txt")
