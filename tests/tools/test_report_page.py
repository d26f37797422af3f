from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import changed_seats, led_by_ddp, made_plan, only_ddp, solved_plan, without_ddp
from noted import noted
from pages import Reader
from raised import raises

pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from autosplit.cli.main import main
from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_devices
from autosplit.plan.redact import REMOVED
from autosplit.tools import report_page as pages
from autosplit.tools.report_charts import Chart
from autosplit.tools.report_page import page_of, write_page

HEAD = ("requested", "machine", "made with", "plan saved", "page written")
NAMES = ("devices", "line0", "trials", "landscape", "rates")


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the charts and Vega, which takes seconds to load. Other tests cover them."""
    charts = tuple(Chart(name, f"title of {name}", f"said of {name}", {}) for name in NAMES)
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda script: script)
    monkeypatch.setattr(pages, "charts_of", lambda plan: charts)


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
    hostile = "</script><script>alert(1)</script>\u202e"
    text = page_of(with_devices(solved_plan(), lambda _, device: replace(device, label=hostile)))
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
            "cuda:0 RTX 3090",
            "100 samples",
            "9,000 ± 2.0%",
            "18.0 of 23.0 GiB (78%)",
            "12 GiB",
            "BatchNorm2d at 1",
            "50 % off",
            "freeze it",
            "a note",
            "autosplit.BalancedDataParallel(100, model, split=(100, 156))",
            "cuda:1",
        ):
            assert text in texts, text
        assert any("model = plan.wrap(model)" in text for text in texts)
        assert "Simulated." not in texts

    def test_what_is_not_known_is_said_and_not_made_up(self):
        plan = without_ddp(solved_plan(checks=()), "cuda:1 can't hold a rank")
        plan = changed_seats(plan, lambda _, seat: replace(seat, memory=None))
        texts = " ".join(Reader(page_of(plan)).texts)
        assert "The parts of the peak memory are unknown" in texts
        assert "The check whether splitting changes the training was not run." in texts
        assert "cuda:1 can't hold a rank" in texts

    def test_what_was_asked_for_and_what_answered_stand_in_the_head(self, tmp_path):
        """Pages had no request, date or machine, so two pages could not be compared."""
        request = {"devices": ["cuda:0"], "reserve": "5%", "strategy": "auto", "effective_batch_size": [256, 512]}
        machine = {"devices": [], "autosplit": "1.0", "torch": "2.13.0", "cuda": None}
        plan = solved_plan(request={**request, "name": None}, machine=machine)
        plan = with_devices(plan, lambda _, device: replace(device, driver="580.1"))
        plan.save(tmp_path / "plan.json")
        os.utime(tmp_path / "plan.json", (2_000_000_000, 2_000_000_000))
        texts = Reader(page_of(Plan.load(tmp_path / "plan.json"))).texts
        head = {name: texts[texts.index(name) + 1] for name in HEAD}
        assert head.pop("page written").endswith(f" UTC with Python {platform.python_version()}")
        assert head == {
            "requested": "reserve 5%, effective_batch_size 256:512",
            "machine": "cuda:0 to 1 RTX 3090: 24 GiB each",
            "made with": "autosplit 1.0, torch 2.13.0, driver 580.1",
            "plan saved": "2033-05-18 03:33 UTC",
        }
        assert texts.index("page written") < texts.index("Devices")
        assert not {"requested", "made with", "plan saved"} & set(Reader(page_of(made_plan())).texts)

    def test_the_gain_is_over_the_even_split_and_the_fastest_device_alone(self):
        """The page had the gain over an even split that was slower than one device."""
        texts = Reader(page_of(solved_plan())).texts
        gain = texts[texts.index("gain") + 1]
        assert re.fullmatch(r"1\.31 times the even split \(128, 128\), [\d.]+ times cuda:0 alone", gain)
        assert not any("The plan is " in text for text in texts), "gains over one of both"

    def test_if_ddp_is_faster_the_page_is_about_ddp(self):
        """The page recommended DDP, and its cards, table, settings and code were for BalancedDataParallel."""
        texts = Reader(page_of(led_by_ddp(solved_plan(), 150, 106))).texts
        strategy = texts[texts.index("strategy") + 1]
        assert strategy == "DDP (autosplit launch): 2.00 times BalancedDataParallel, 10,234 samples/s"
        assert texts[texts.index("gain") + 1].startswith("2.05 times equal ranks (predicted), ")
        assert texts[texts.index("throughput") + 1] == "20,469 samples/s (predicted)"
        assert texts[texts.index("cuda:0 RTX 3090") + 1] == "150 samples"
        assert {"batch_size by rank", "(150, 106)"} <= set(texts)
        assert "with autosplit.ddp.setup() as ctx:" in "\n".join(texts)
        only_for_a_split = r"gpu0_bsz|plan\.wrap|autosplit\.BalancedDataParallel|could not be traced"
        assert not [text for text in texts if re.search(only_for_a_split, text)]

    def test_a_plan_only_for_ddp_has_no_word_about_a_split_forward(self):
        """Pages of `strategy="ddp"` explained gpu0_bsz, and printed the call of BalancedDataParallel."""
        texts = Reader(page_of(only_ddp(led_by_ddp(solved_plan()), cost=None, even_samples_per_s=None))).texts
        assert texts[texts.index("strategy") + 1] == "DDP (autosplit launch)"
        assert not [text for text in texts if re.search(r"gpu0_bsz|plan\.wrap|BalancedDataParallel", text)]

    def test_notes_and_errors_stay_and_only_paths_go(self):
        """A page replaced all notes by a sentence that they are left out."""
        notes = noted("/home/ann/net.py needs 3.2 GiB more, +/- 4%")
        failed = replace(solved_plan().trials[1], failure="cuda:1: tried 2 GiB in /home/ann/net.py")
        plan = solved_plan(kind="sim", notes=notes, trials=(solved_plan().trials[0], failed))
        text = page_of(plan)
        texts = Reader(text).texts
        assert f"{REMOVED} needs 3.2 GiB more, +/- 4%" in texts
        assert f"cuda:1: tried 2 GiB in {REMOVED}" in texts
        assert set(SIMULATED_ERRORS) <= set(texts)
        assert "ann" not in text.partition("<h1>")[2].partition("<script")[0].split("/")


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
        with raises(InputError):
            write_page(made_plan(), path)
        assert path.read_text() == "<!doctype html>mine"
        write_page(made_plan(), path, force=True)
        assert "autosplit report" in path.read_text(encoding="utf-8")

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

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["plan.json", "-o", "-", "--json"], "both print to stdout"),
            (["plan.json", "-o", "plan.json"], "is not an autosplit report"),
        ],
    )
    def test_what_can_not_be_done_is_said_on_one_line(self, arguments, said, capsys):
        assert main(["report", *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
