"""Every test that needs an accelerator, run on emulated ones: each file in a process of its own, the core in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import emulated
import pytest
import torch
from folders import TESTS

MARKED = re.compile(r"\bpytest\.mark\.gpu\b")

CORE = (
    "test_emulated_devices.py::TestAllocator",  # first: nothing is cached yet
    "runtime/test_accelerator.py::TestOneDevice::test_the_full_device_is_named_and_the_next_step_runs",
    "runtime/test_accelerator.py::TestOneDevice::test_a_measured_step",
    "parallel/test_balanced_gpus.py",
    "parallel/test_persistent_replicas.py",
    "devices/test_peer_copy_check.py",
)
"""What is used of two devices in every training: a process that loads torch for each file would take a minute."""

MARKED_FILES = (p for p in TESTS.rglob("test_*.py") if MARKED.search(p.read_text(encoding="utf-8")))
FILES = sorted({str(path.relative_to(TESTS)) for path in MARKED_FILES} - set(CORE))


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Build the library before a test waits for it. It needs `torch.accelerator.memory`, which came with torch 2.9."""
    if find_spec("torch.accelerator.memory") is None:
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.memory, which the emulated devices need")
    try:
        emulated.built_library()
    except emulated.NoCompiler as error:
        pytest.skip(str(error))


pytestmark = pytest.mark.skipif(emulated.wanted(), reason="runs on the emulated devices already")


@pytest.mark.timeout(600)
def test_the_core_on_two_emulated_devices(tmp_path):
    run_on_two(CORE, "gpu", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_on_two_emulated_devices(name, tmp_path):
    run_on_two([name], "gpu", tmp_path)


def run_on_two(names: Sequence[str], marks: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *names, "-m", marks, "-n", "0", "-q", "--no-header", "--tb=short"],
        cwd=TESTS,
        env={**os.environ, "EMULATED_DEVICES": "2", "EMULATED_MEMORY": str(tmp_path / "memory")},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-12_000:] + child.stderr[-2000:]
