"""`isolate=True` in a script: the child process does not run the script a second time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from marks import for_release

pytestmark = pytest.mark.slow

SCRIPT = """
import torch, autosplit
from torch import nn
print("this line runs", flush=True)
class Net(nn.Linear): pass
def tune(kind, **keywords):
    batch = torch.randn(8, 8), torch.randint(2, (8,))
    try:
        autosplit.tune(kind(8, 2), batch, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, devices="cpu:64MiB",
                       isolate=True, max_batch_size=8, n_trials=1, profile="off")
        print(kind.__name__, "tuned")
    except autosplit.AutosplitError as error:
        assert "Net is defined in the main script" in str(error), error
        assert "if __name__ == '__main__'" in str(error), error
        print(kind.__name__, "refused")
"""
BARE = "tune(nn.Linear)\ntune(Net)\n"
GUARDED = "if __name__ == '__main__':\n    tune(Net)\n"


def lines_of(folder: Path, *words: str, stdin: str | None = None) -> list[str]:
    """Run Python, and return the lines that the script prints in any of its processes."""
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": packages},
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a child process writes its output there
        text=True,
        timeout=300,
        check=True,
    )
    told = ("this line runs", "tuned", "refused")
    return [line for line in ran.stdout.splitlines() if line.endswith(told)]


@pytest.mark.parametrize("how", ["file", "-c", "module", for_release("stdin"), for_release("package")])
def test_a_script_without_a_guard_runs_once(how, tmp_path):
    """Files, downloads and training before `tune` were repeated in the child process."""
    text = SCRIPT + BARE
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__init__.py", "package/train.py", "package/__main__.py"):
        (tmp_path / name).write_text("" if "init" in name else text)
    words = {"file": ["train.py"], "-c": ["-c", text], "module": ["-m", "package.train"], "package": ["-m", "package"]}
    found = lines_of(tmp_path, *words.get(how, []), stdin=text if how == "stdin" else None)
    assert found == ["this line runs", "Linear tuned", "Net refused"]


def test_a_class_of_a_script_with_a_guard_can_be_tuned(tmp_path):
    """The child imports the script for the class, and runs nothing below the guard."""
    (tmp_path / "train.py").write_text(SCRIPT + GUARDED)
    assert lines_of(tmp_path, "train.py") == ["this line runs", "this line runs", "Net tuned"]


def test_a_call_outside_the_guard_is_refused_at_once(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT + "tune(Net)\n" + GUARDED.replace("tune(Net)", "pass"))
    assert lines_of(tmp_path, "train.py") == ["this line runs", "Net refused"]
