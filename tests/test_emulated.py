"""Run every test that needs an accelerator on emulated devices, in five processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import emulated
import pytest
import torch
from folders import TESTS

MARKED = re.compile(r"\bpytest\.mark\.gpu\b")

MARKED_FILES = (p for p in TESTS.rglob("test_*.py") if MARKED.search(p.read_text(encoding="utf-8")))
FILES = sorted(str(path.relative_to(TESTS)) for path in MARKED_FILES)
WITH_RANKS = [name for name in FILES if name.startswith(("ddp/", "integrations/", "tools/test_ddp_"))]
ALONE = ("probe/test_emulated_ceilings.py", "runtime/test_child_worker.py", "sim/test_caching_allocator.py")
"""Files that compare all memory of a device, so nothing may run before them in their process."""

OTHERS = sorted({*FILES} - {*WITH_RANKS, *ALONE}, key=lambda name: (name != "test_emulated_devices.py", name))
GROUPS = {  # the tests of the allocator come first, because nothing is cached then
    "others": OTHERS,
    "ranks": WITH_RANKS,
    **{name: [name] for name in ALONE},
}


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Build the library before a test waits for it. It needs `torch.accelerator.memory`, which came with torch 2.9."""
    if find_spec("torch.accelerator.memory") is None:
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.memory, which the emulated devices need")
    try:
        emulated.built_library()
    except emulated.NoCompiler as error:
        pytest.skip(str(error))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(emulated.wanted(), reason="runs on the emulated devices already"),
]


@pytest.mark.parametrize("group", GROUPS)
def test_on_two_emulated_devices(group, tmp_path):
    words = [*GROUPS[group], "-m", "gpu", "-n", "0", "-q", "--no-header", "--tb=short"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=TESTS,
        env={**os.environ, "EMULATED_DEVICES": "2", "EMULATED_MEMORY": str(tmp_path / "memory")},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-12_000:] + child.stderr[-2000:]
