"""Commands stay fast with many saved profiles, because they read only the profiles that they use.

With 1,000 profiles, `autosplit profiles` took 5 s instead of 0.4 s, `launch --print` 3.2 s, and `tune` of a new
workload twice its time. Each of these read all files. The tests count the profiles that are opened.
"""

from __future__ import annotations

import builtins
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.cli.main import main

MANY = 120


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Save a profile and many older copies of it. Return a function that tunes, and the list of opened profiles."""
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(tmp_path))

    def tune(effective_batch_size: int) -> Any:
        sample = torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)
        net = nn.Linear(8, 2)
        return autosplit.tune(
            net,
            sample,
            nn.CrossEntropyLoss(),
            devices="cpu:64MiB",
            effective_batch_size=effective_batch_size,
            n_trials=1,
        )

    saved = Path(tune(16).path)
    for _ in range(MANY):
        copy = saved.with_name(f"{secrets.token_hex(16)}.json")
        copy.write_bytes(saved.read_bytes())
        os.utime(copy, (1, 1))
    opened: list[Path] = []
    plain_open = builtins.open

    def noted_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(os.fsdecode(file)) if not isinstance(file, int) else None
        if path is not None and path.parent == saved.parent and path.suffix == ".json":
            opened.append(path)
        return plain_open(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", noted_open)
    return tune, opened


def test_a_new_plan_reads_the_newest_profile_at_most(tuned):
    """The log names the part of the key in which the newest profile differs."""
    tune, opened = tuned
    plan = tune(8)
    assert plan.effective_batch_size == 8
    assert len(set(opened) - {Path(plan.path)}) <= 1


def test_the_table_of_profiles_reads_what_it_prints(tuned, capsys):
    """The table has the newest 50. The JSON has all."""
    _, opened = tuned
    assert main(["profiles"]) == 0
    text = capsys.readouterr().out
    assert f"{MANY + 1 - 50} older profiles not shown. autosplit profiles --json lists all." in text
    assert len(set(opened)) == 50
    opened.clear()
    assert main(["profiles", "--json"]) == 0
    assert len(set(opened)) == MANY + 1


def test_damaged_profiles_of_other_workloads_are_not_noticed(tuned, recwarn):
    tune, opened = tuned
    folder = Path(tune(16).path).parent
    for path in folder.glob("*.json"):
        if path.stat().st_mtime == 1:
            path.write_text("{")
            os.utime(path, (1, 1))
    opened.clear()
    assert tune(16).notes[0].kind == "from-profile"
    assert not [one for one in recwarn if ".json" in str(one.message)]
    assert not list(folder.glob("*.bad"))
    assert len(set(opened)) == 1
