"""The core passes its tests without the folders of `sim`, `tools` and `integrations`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from marks import FOR_RELEASE

AROUND = ("sim", "tools", "integrations")
BRIEF = ("cli", "devices", "plan")
"""Packages that look for functions of the packages around, and whose quick tests are brief. All of these run here.

Of the others the smoke tests run, and for a release all quick tests. tests/test_layers.py checks the imports of all.
"""

OTHERS = ("ddp", "parallel", "probe", "profiles", "public", "runtime", "solve", "tuning", "workload")
LIMIT_S = 2400


def copy_of_the_core(folder: Path) -> None:
    """Copy what the tests need, without the packages around the core and their tests."""
    for name in ("autosplit", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, folder)
    for name in AROUND:
        shutil.rmtree(folder / "autosplit" / name)
        shutil.rmtree(folder / "tests" / name)


def run_tests(folder: Path, marks: str, packages: tuple[str, ...]) -> None:
    words = ["-m", "pytest", "-q", "-n", "0", "--no-header", "--tb=short", "-m", marks]
    done = subprocess.run(
        [sys.executable, *words, *(f"tests/{name}" for name in packages)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_core_passes_its_tests_alone(tmp_path: Path) -> None:
    copy_of_the_core(tmp_path)
    run_tests(tmp_path, "not slow and not whole", BRIEF)
    run_tests(tmp_path, "not slow and not whole" if FOR_RELEASE else "smoke and not whole", OTHERS)
