from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import made_plan, solved_plan
from noted import noted
from pages import Reader
from raised import raises

pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from autosplit.cli.main import main
from autosplit.errors import InputError
from autosplit.extras import report_page as pages
from autosplit.extras.report_charts import Chart
from autosplit.extras.report_page import page_of, write_page
from autosplit.plan.record import DdpPlan
from autosplit.plan.redact import LEFT_OUT
from autosplit.probe.check_result import Check
from autosplit.profiles.store import store

NAMES = ("devices", "line0", "trials", "landscape", "rates")


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the charts and Vega, which takes seconds to load. Other tests cover them."""
    charts = tuple(Chart(name, f"title of {name}", f"said of {name}") for name in NAMES)
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda script: script)
    monkeypatch.setattr(pages, "charts_of", lambda plan, explanation: charts)


def test_a_page_of_a_whole_plan_allows_one_script_and_loads_nothing():
    text = page_of(solved_plan())
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert set(json.loads(data)) == {"devices", "line0", "line1", "trials", "landscape", "rates"}
    bare = text.replace(data, "").replace(script, "")
    read = Reader(bare)
    assert read.open == []
    assert not {"iframe", "object", "img", "form"} & set(read.tags)
    assert not [one for one in read.attributes if one[1] in {"style", "src"} or one[1].startswith("on")]
    assert not re.search(r"https?://|//[a-z]", bare)
    assert {value for _, name, value in read.attributes if name == "data-chart"} == set(json.loads(data))
    ids = [value for _, name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    (policy,) = (value for _, name, value in read.attributes if name == "content" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert f"; script-src 'sha256-{digest}'; img-src data:;" in policy
    assert "unsafe" not in policy


def test_names_in_charts_cannot_end_their_script(monkeypatch):
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda script: script)
    plan = solved_plan()
    hostile = "</script><script>alert(1)</script>\u202e"
    text = page_of(replace(plan, devices=tuple(replace(device, label=hostile) for device in plan.devices)))
    data, _ = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert hostile[:-1] in json.dumps(json.loads(data))
    assert "\u202e" not in json.dumps(json.loads(data), ensure_ascii=False)


@pytest.mark.usefixtures("undrawn")
class TestWords:
    @pytest.mark.smoke
    def test_the_numbers_tables_and_settings(self):
        texts = Reader(page_of(solved_plan())).texts
        for text in (
            "autosplit: Net",
            "(100, 156)",
            "10,234 samples/s",
            "1.31 times the even split (128, 128)",
            "cuda:0 RTX 3090",
            "18.0 of 23.0 GiB (78%)",
            "12 GiB",
            "BatchNorm2d at 1",
            "50 % off",
            "freeze it",
            LEFT_OUT.text,
            "autosplit.BalancedDataParallel(100, model, split=(100, 156))",
            "128, 128",
            "cuda:1",
        ):
            assert text in texts, text
        assert any("model = plan.wrap(model)" in text for text in texts)
        assert "Simulated." not in texts

    def test_simulated_and_interrupted_plans_say_so_first(self):
        texts = Reader(page_of(made_plan(kind="sim", complete=False))).texts
        assert texts.index("Simulated.") < texts.index("Interrupted.") < texts.index("split")
        assert any("autosplit tune FILE --devices cuda" in text for text in texts)

    def test_what_is_not_known_is_said_and_not_made_up(self):
        plan = made_plan(ddp=DdpPlan((), 0.0, "cuda:1 can't hold a rank"))
        texts = " ".join(Reader(page_of(plan)).texts)
        assert "The parts of the peak memory are unknown" in texts
        assert "The check whether splitting changes the training was not run." in texts
        assert "cuda:1 can't hold a rank" in texts

    def test_what_was_asked_for_and_what_answered_stand_in_the_head(self):
        """Pages showed neither, so two pages could not be compared."""
        request = {"devices": ["cuda:0"], "reserve": "5%", "strategy": "auto", "effective_batch_size": [256, 512]}
        machine = {"devices": [], "autosplit": "1.0", "torch": "2.13.0", "cuda": None}
        texts = Reader(page_of(solved_plan(request={**request, "name": None}, machine=machine))).texts
        assert texts[texts.index("requested") + 1] == "reserve 5%, effective_batch_size 256:512"
        assert texts[texts.index("made with") + 1] == "autosplit 1.0, torch 2.13.0"
        assert texts.index("made with") < texts.index("Devices")
        assert not {"requested", "made with"} & set(Reader(page_of(made_plan())).texts)

    def test_the_ranks_of_ddp_are_told_once(self):
        texts = Reader(page_of(solved_plan())).texts
        assert any(text.startswith("together ") for text in texts)
        assert not any("batch_size 128, accumulation_steps 2" in text for text in texts)

    def test_one_device_has_neither_split_nor_ranks(self):
        texts = Reader(page_of(made_plan((256,)))).texts
        assert not {"split", "gpu0_bsz", "DDP: batch_size by rank"} & set(texts)
        assert {"batch_size", "256"} <= set(texts)

    def test_words_of_others_stay_words(self, monkeypatch):
        monkeypatch.setattr("autosplit.extras.report_page.shareable", lambda plan: plan)  # some of it looks like a path
        hostile = "</style><script>alert('1')</script>\"><img src=x onerror=y>{{ 7*7 }}\x00\x1b[31m\u202e&amp;"
        plan = solved_plan(
            notes=noted(hostile),
            checks=(Check(hostile, 0.5, None, True, hostile, hostile),),
            workload={"model": hostile},
        )
        trials = tuple(replace(trial, failure=hostile) if trial.failure else trial for trial in plan.trials)
        devices = tuple(replace(device, name=hostile, label=hostile) for device in plan.devices)
        text = page_of(replace(plan, trials=trials, devices=devices))
        read = Reader(text)
        assert read.open == []
        assert read.tags.count("script") == 2  # the page's own
        assert "img" not in read.tags
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert sum("<script>alert('1')</script>\"><img src=x onerror=y>{{ 7*7 }}" in said for said in read.texts) > 6
        assert "49" not in "".join(read.texts)

    def test_a_model_that_is_no_name_is_left_out(self):
        assert "<title>autosplit</title>" in page_of(made_plan(workload={"model": ["x"]}))

    def test_paths_uuids_and_keys_are_not_in_it(self):
        plan = solved_plan()
        devices = tuple(replace(device, uuid="GPU-secret", driver="580.1") for device in plan.devices)
        text = page_of(replace(plan, devices=devices, workload={"model": "Net", "model_text": "digest-of-it"}))
        assert not re.search("GPU-secret|digest-of-it", text)


@pytest.mark.usefixtures("undrawn")
class TestWriting:
    def test_a_report_is_replaced_and_nothing_is_left_beside_it(self, tmp_path):
        path = tmp_path / "report.html"
        write_page(made_plan(), path)
        write_page(made_plan((1, 2)), path)
        assert "(1, 2)" in path.read_text(encoding="utf-8")
        assert list(tmp_path.iterdir()) == [path]

    def test_another_file_is_replaced_only_by_force(self, tmp_path):
        path = tmp_path / "thesis.html"
        path.write_text("<!doctype html>mine")
        with raises(InputError, "report-exists"):
            write_page(made_plan(), path)
        assert path.read_text() == "<!doctype html>mine"
        write_page(made_plan(), path, force=True)
        assert "autosplit report" in path.read_text(encoding="utf-8")

    @pytest.mark.parametrize(("where", "said"), [("", "report-not-a-file"), ("missing/report.html", "report-folder")])
    def test_a_place_that_can_not_be_written_is_named(self, tmp_path, where, said):
        with raises(InputError, said):
            write_page(made_plan(), tmp_path / where)

    @pytest.mark.parametrize(
        ("module", "said"), [("jinja2", "pip install jinja2"), ("vl_convert", "pip install vl-convert-python")]
    )
    def test_a_missing_package_is_named_with_the_command_that_installs_it(self, tmp_path, monkeypatch, module, said):
        monkeypatch.setitem(sys.modules, module, None)
        with raises(InputError, "package-missing", said):
            write_page(made_plan(), tmp_path / "report.html")


@pytest.mark.usefixtures("undrawn")
class TestCommand:
    @pytest.fixture(autouse=True)
    def _in_a_folder_with_a_plan(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        made_plan().save("plan.json")

    def test_it_writes_the_page_and_says_where(self, capsys):
        assert main(["report", "plan.json", "-o", "page.html"]) == 0
        assert Path("page.html").is_file()
        out = capsys.readouterr()
        assert (out.out, out.err) == ("", "wrote page.html\n")

    def test_quiet_says_nothing(self, capsys):
        assert main(["report", "plan.json", "--quiet"]) == 0
        assert Path("report.html").is_file()
        assert capsys.readouterr() == ("", "")

    def test_json_is_alone_on_stdout(self, capsys):
        assert main(["report", "plan.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"path": "report.html"}

    def test_a_dash_is_stdout(self, capfdbinary):
        assert main(["report", "plan.json", "-o", "-"]) == 0
        assert capfdbinary.readouterr().out.startswith(b"<!doctype html>")
        assert not Path("report.html").exists()

    def test_by_default_the_newest_profile_and_by_its_key_any(self):
        store("ab" * 16, made_plan((33, 44)))
        newest = store("cd" * 16, made_plan((55, 66)))
        os.utime(newest, (2_000_000_000, 2_000_000_000))
        assert main(["report", "--quiet"]) == 0
        assert "(55, 66)" in Path("report.html").read_text(encoding="utf-8")
        assert main(["report", "abab", "--quiet"]) == 0
        assert "(33, 44)" in Path("report.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["plan.json", "-o", "-", "--json"], "both print to stdout"),
            (["missing.json"], "missing.json can't be read"),
            ([], "No plan is saved as a profile"),
            (["plan.json", "-o", "plan.json"], "is not an autosplit report"),
        ],
    )
    def test_what_can_not_be_done_is_said_on_one_line(self, arguments, said, capsys):
        assert main(["report", *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
