"""The log of all steps, and the effect of --quiet and --verbose on stderr."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from handmade import made_plan

import autosplit
from autosplit.cli.main import main
from autosplit.tuning import tune

WORKLOAD = "import torch, autosplit\nworkload = autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3))\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WORKLOAD)
    return str(path)


def test_python_and_the_command_line_show_the_same(script, capsys, caplog):
    """Every step of a tuning and its ceilings, with its outcome and reason."""
    asked = {"devices": "cpu:8MiB,cpu:4MiB", "effective_batch_size": 8, "n_trials": 1}
    with caplog.at_level(logging.DEBUG, logger="autosplit"):
        autosplit.tune(torch.nn.Linear(3, 1), torch.randn(4, 3), **asked, profile="off")
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    flags = ["--devices", asked["devices"], "--effective-batch-size", "8", "--n-trials", "1", "--no-isolate"]
    assert main(["tune", script, *flags, "--profile", "off", "--verbose", "--json"]) == 0
    shown = capsys.readouterr().err
    assert all(re.match(r" +\d+\.\d\d s  ", line) for line in shown.splitlines())
    for pattern in (
        r"profile [0-9a-f]{32}: not there",
        r"ran \(8, 0\) as balanced: .+ on cpu:0",
        r"cpu:0 as primary: the ceiling is 8 samples, limited by max_batch_size, a step of it ran: ",
        r"timed \(8, 0\) as rank: [\d,.]+ ms, plus or minus [\d,.]+ ms, in \d+ repeats",
        r"trial 0, split \(\d, \d\) x 1 \(the solver's best configuration and its neighbours\): [\d,.]+ samples/s, ",
        r"trial 0 is the fastest",
    ):
        assert any(re.match(pattern, text) for text in texts), pattern
        assert re.search(pattern, shown), pattern
    assert not caplog.records, "shown once, and not by the root's handlers as well"
    assert logging.getLogger("autosplit").handlers == []


def test_other_ranks_say_which_they_are(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(tune, "tune", lambda *_, **__: logging.getLogger("autosplit").warning("mine") or made_plan())
    assert main(["tune", script, "--json"]) == 0
    assert capsys.readouterr().err == "rank 1: mine\n"


def test_quiet_and_verbose_are_one_or_the_other(capsys):
    assert main(["tune", "x.py", "--quiet", "--verbose"]) == 2
    assert "--quiet and --verbose are given together. Choose one of them" in capsys.readouterr().err
