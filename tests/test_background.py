"""Tests that press Ctrl-C also pass if a shell starts pytest in the background, where SIGINT is ignored."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from folders import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no shell that ignores SIGINT in the background"),
]

IGNORED = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
PRESSES_CTRL_C = [
    "tests/runtime/test_interrupts.py::test_one_that_was_held_back_is_one",  # in a process that the test starts
    "tests/runtime/test_child_process.py::test_ctrl_c_ends_it",  # in pytest's own
]


def in_background(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the background of a shell without job control. Such a shell makes it ignore SIGINT."""
    command = ["sh", "-c", '"$@" & wait $!', "sh", sys.executable, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_ctrl_c_reaches_tests_that_a_shell_started_in_the_background(workers):
    assert in_background("-c", IGNORED).stdout == "True\n"
    done = in_background("-m", "pytest", "-p", "no:cacheprovider", "-n", workers, *PRESSES_CTRL_C)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PRESSES_CTRL_C)} passed" in done.stdout
