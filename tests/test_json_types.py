"""``--json`` prints the documented types for every command."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import msgspec
import pytest
from examined import CARD, examined
from folders import ROOT
from handmade import made_ceiling, made_plan
from marks import for_release

import autosplit.tools.inventory
from autosplit.cli.main import main
from autosplit.cli.parser import commands
from autosplit.plan.plan import Plan
from autosplit.probe import find_ceiling, gradient_check
from autosplit.probe.check_result import Check
from autosplit.profiles.store import store
from autosplit.tools import doctor
from autosplit.tools.inventory import DeviceReport
from autosplit.tuning import tune

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def made():
    """Return the script that makes the documents."""
    spec = importlib.util.spec_from_file_location("docs_make", DOCS / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan_of(page: str) -> dict:
    """Return the plan that the page of the JSON shows."""
    return json.loads(page.split("```json\n")[1].split("```", maxsplit=1)[0])


def test_the_documents_are_those_that_the_code_makes(made):
    page = (DOCS / "json.md").read_text(encoding="utf-8")
    assert page == made.page(plan_of(page)), "run python docs/make.py"
    assert len(page.split()) < 1000, "json-schema.json describes the keys"
    assert json.loads((DOCS / "json-schema.json").read_text()) == made.schema(), "run python docs/make.py"


def test_the_plan_on_the_page_is_one_of_this_version(made):
    page = (DOCS / "json.md").read_text(encoding="utf-8")
    shown = plan_of(page)
    assert json.loads(Plan.from_json(json.dumps(shown)).to_json()) == shown
    read = msgspec.json.decode(json.dumps(shown), type=made.ANSWERS["tune"])
    assert json.loads(msgspec.json.encode(read)) == shown
    whole = made.schema()
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator({"$defs": whole["$defs"], **whole["commands"]["tune"]}).validate(shown)


@pytest.mark.slow
def test_the_plan_on_the_page_is_what_its_command_prints(made):
    """Simulated figures are the same on every machine, up to rounding."""
    texts = plan_of((DOCS / "json.md").read_text(encoding="utf-8")), made.example()
    assert texts[0].keys() == texts[1].keys()
    shown, printed = (Plan.from_json(json.dumps(text)) for text in texts)
    assert (shown.split, shown.ceilings) == (printed.split, printed.ceilings)
    assert printed.samples_per_s == pytest.approx(shown.samples_per_s, rel=1e-6)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_shows_the_examples_as_they_stand(made, page):
    """Code hosts do not know the site's includes, so readers there saw the line with the file's name."""
    text = page.read_text(encoding="utf-8")
    assert made.with_scripts(text) == text, "run python docs/make.py"
    assert "--8<--" not in text


@pytest.mark.slow
def test_the_page_of_the_commands_is_made_from_their_helps(made):
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert page == made.command_line(), "run python docs/make.py"
    general, *sections = page.split("\n## autosplit ")
    for section in sections:
        name = section.split("\n")[0]
        flags = {flag for option in made._options(made._help(name)) for flag in re.findall(r"--[\w-]+", option)[:1]}
        assert [flag for flag in flags if flag not in section + general] == [], f"options of {name} are missing"


def test_every_command_has_the_same_flags_and_an_answer(capsys, made):
    for name in commands():
        assert main([*name.split(), "--help"]) == 0
        help_text = capsys.readouterr().out
        assert all(f"  {flag} " in help_text for flag in ("--json", "--quiet", "--verbose")), name


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Replace slow functions by fakes, and write a workload and a plan into the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch, autosplit\nworkload = autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3))\n"
    )
    Path("nets.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    plan = made_plan((100, 156), checks=(Check("gradient", 0.0, None, depends=False),))
    plan.save("plan.json")
    store("ab" * 16, plan)
    Path("models.txt").write_text("train.py  # the only one\n")
    Path("data.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\nloader = DataLoader(torch.zeros(64, 3), batch_size=8)\n"
    )
    report = DeviceReport(0, 1, "NVIDIA H100", 80 * 2**30, 70 * 2**30, 2**30, "GPU-1", visible=True)
    monkeypatch.setattr(autosplit.tools.inventory, "survey_devices", lambda: ((report,), ("a note",)))
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: examined(CARD))
    monkeypatch.setattr(tune, "tune", lambda *_, **__: plan)
    ceiling = made_ceiling("cpu:0", 7, 2**20, points=((4, 100, True), (8, 150, False)))
    monkeypatch.setattr(find_ceiling, "find_ceiling", lambda *_, **__: ceiling)
    monkeypatch.setattr(gradient_check, "check", lambda _: plan.checks)


LINES = {
    "devices": "devices",
    "doctor": "doctor",
    "init": "init nets.py:make",
    "tune": "tune train.py --devices sim:2xRTX3090",
    "compare": "compare train.py --devices sim:2xRTX3090 --devices sim:L4 --price L4=0.8",
    "compare --models": "compare --models models.txt --devices sim:L4 --price L4=0.8",
    "measure": "measure train.py --devices sim:RTX3090 --split 4",
    "probe": "probe train.py --devices cpu:1MiB",
    "check": "check train.py",
    "loader": "loader data.py",
    "show": "show plan.json",
    "profiles": "profiles",
    "profiles list": "profiles list",
    "profiles show": "profiles show abab",
    "profiles path": "profiles path abab",
    "profiles remove": "profiles remove abab",
    "report": "report plan.json",
    "export": "export plan.json --to torchrun",
    "launch": "launch --plan plan.json",
}


@pytest.mark.parametrize("command", [for_release(line) if line == "loader" else line for line in LINES])
def test_what_is_printed_is_of_the_documented_type(stand_ins, capsys, made, command):
    """Exactly the documented keys and types: reading the value as that type and writing it again gives the same."""
    if command == "report":
        pytest.importorskip("vl_convert")
    words = LINES[command].split()
    words = [*words, "--json", "train.py", "--epochs", "3"] if command == "launch" else [*words, "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    read = msgspec.json.decode(out, type=made.ANSWERS[command])
    assert json.loads(msgspec.json.encode(read)) == json.loads(out)
