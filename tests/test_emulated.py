"""Every test that needs an accelerator, run on emulated ones: each file in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import emulated
import pytest

HERE = Path(__file__).parent
MARKED = re.compile(r"\bpytest\.mark\.gpu\b")
FILES = sorted(path.name for path in HERE.glob("test_*.py") if MARKED.search(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Build it once, before anything waits for it."""
    try:
        emulated.built_library()
    except emulated.NoCompiler as error:
        pytest.skip(str(error))


pytestmark = pytest.mark.skipif(emulated.wanted(), reason="runs on the emulated devices already")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_on_two_emulated_devices(name, tmp_path):
    run_on_two(name, "gpu and not slow", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_slow_ones_on_two_emulated_devices(name, tmp_path):
    run_on_two(name, "gpu and slow", tmp_path)


def run_on_two(name: str, marks: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "pytest", name, "-m", marks, "-n", "0", "-q", "--no-header", "--tb=short"],
        cwd=HERE,
        env={**os.environ, "EMULATED_DEVICES": "2", "EMULATED_MEMORY": str(tmp_path / "memory")},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    none_there = child.returncode == 5  # pytest's word for: no test of this file was selected
    assert child.returncode == 0 or none_there, child.stdout[-12_000:] + child.stderr[-2000:]
