"""``autosplit compare --models``: several models in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from folders import ROOT
from handmade import made_plan

from autosplit.cli.main import main
from autosplit.errors import InputError
from autosplit.oom import DoesNotFitError
from autosplit.sim.compare_models import IMAGES, TOKENS
from autosplit.sim.compare_models_command import lines_in
from autosplit.tuning import tune

NAME = "a<b>|c.py"
SCRIPT = """import autosplit, torch
workload = autosplit.Workload(torch.nn.Conv2d(3, 1, 1), torch.randn(4, 3, 8, 8))
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Write two workloads and the file that names them, with two wrong lines between them."""
    monkeypatch.chdir(tmp_path)
    Path(NAME).write_text(SCRIPT)
    Path("fine.py").write_text(SCRIPT)
    Path("models.txt").write_text(f"# two models\n\n'{NAME}'  # odd\nno_such.py\nfine.py --size 3\nfine.py\n")

    def tuned(workload, *, devices, **_):
        workload()
        if devices == "sim:T4":
            raise DoesNotFitError("too small", device="sim:0", requested_bytes=2, capacity_bytes=1)
        return made_plan((64,), kind="sim", samples_per_s=50.0)

    monkeypatch.setattr(tune, "tune", tuned)
    return ["compare", "--models", "models.txt", "--devices", "sim:L4", "--devices", "sim:T4", "--price", "L4=0.9"]


def test_wrong_lines_are_reported_and_the_others_are_compared(models, capsys):
    assert main(models) == 2
    out, err = capsys.readouterr()
    rows = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert rows[0].startswith("| a&lt;b&gt;\\|c.py | sim:L4 | ")
    assert rows[0].endswith("| none | 50 | 6%, 90%: 19% | 5 |")
    assert rows[1].startswith("| a&lt;b&gt;\\|c.py | sim:T4 | does not fit |")
    assert rows[-2].startswith("| fine.py | sim:L4 |")
    first, second = err.splitlines()
    assert first.startswith("error: models.txt, line 4: 'no_such.py' is not compared: ")
    assert second.startswith("error: models.txt, line 5: 'fine.py' is not compared: '--size 3' is not an option")


def test_html_escapes_names_and_is_replaced_only_by_another_table(models, capsys):
    assert main([*models, "-o", "table.html"]) == 2
    page = Path("table.html").read_text()
    assert "<td>a&lt;b&gt;|c.py</td><td>sim:L4</td>" in page
    assert NAME not in page
    assert main([*models, "--output", "table.html", "--format", "markdown"]) == 2
    assert Path("table.html").read_text().startswith("<!-- written by autosplit compare -->")
    Path("notes.html").write_text("mine")
    capsys.readouterr()
    assert main([*models, "-o", "notes.html"]) == 2
    assert "autosplit compare did not write it. The file was not replaced" in capsys.readouterr().err
    assert Path("notes.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "--devices", "sim:L4"], "needs either a workload or --models FILE"),
        (["compare", "--models", "none.txt", "--devices", "sim:L4"], "--models none.txt can't be read"),
        (["compare", "--models", "models.txt", "--devices", "sim:L4", "--format", "pdf"], "--format is 'pdf'"),
    ],
)
def test_bad_arguments(models, capsys, arguments, said):
    Path("empty.txt").write_text("# nothing\n")
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_no_model_fits(models, capsys):
    Path("models.txt").write_text("fine.py\n")
    assert main(["compare", "--models", "models.txt", "--devices", "sim:T4", "--quiet"]) == 3
    assert "No model fits any machine" in capsys.readouterr().err


def test_an_interrupt_keeps_the_finished_models(models, capsys, monkeypatch):
    first = tune.tune

    def interrupted(workload, *, devices, **keywords):
        if devices == "sim:T4":
            raise tune.TuningInterrupted(None)
        return first(workload, devices=devices, **keywords)

    monkeypatch.setattr(tune, "tune", interrupted)
    assert main([*models, "--json"]) == 4
    found = json.loads(capsys.readouterr().out)["models"]
    assert found[0]["comparison"]["not_compared"] == ["sim:T4"]
    assert [one["failure"] for one in found[1:]] == ["interrupted"] * 3


def test_lines_have_options_and_comments(tmp_path):
    path = tmp_path / "models.txt"
    path.write_text("hf:gpt2 --seq-len 1024 --task causal-lm # long\n\ntimm:x --image-size\n'open\n")
    one, two, three = lines_in(str(path))
    assert (one.spec, one.options) == ("hf:gpt2", {"seq_len": 1024, "task": "causal-lm"})
    assert one.place.endswith("line 1")
    assert "'--image-size' is not an option with its value" in two.failure
    assert "Close the quote" in three.failure
    with pytest.raises(InputError, match="can't be read"):
        lines_in(str(tmp_path))


def test_the_errors_are_those_that_were_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text(encoding="utf-8"))["step times"]
    halves = [found[f"timm RTX3090 fp16 {layout} held out"] for layout in ("nchw", "nhwc")]
    for band, rows in ((IMAGES, halves), (TOKENS, [found["transformers, all cards"]])):
        for share in ("median", "p90"):
            assert f"{getattr(band, share):.0%}" == f"{max(row[share] for row in rows):.0%}"
