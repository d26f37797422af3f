"""A plan from a stranger: each of its texts and numbers is changed, and no output of autosplit may carry the change."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ddp_jobs import make_plan
from error_types import PlanError
from plans import simulated_plan
from shell import autosplit

from autosplit import AutosplitError, Plan

yaml = pytest.importorskip("yaml")

FORMATS = ("transformers", "accelerate", "lightning", "torchrun", "slurm", "trainjob", "skypilot", "env", "json")
CONTROLS = ("a\ntouch X\n", "a\rb", "a\tb: 1", "\x1b[2J", "\x7f", "\x9b2J", "\u2028touch X", "\u202etxt.exe")
TEXTS = (
    "$(touch X)`touch X`",
    "';touch X;'",
    '";touch X;"',
    "#: {{x}} - [a, b]: & *c !!python/object:x",
    "</script><script>alert(1)</script>",
    "no",
    "\U0001f600\xa0\\",
)
NUMBERS = (10**400, -(10**30), -1, 2**63, 1e300, float("inf"), float("nan"), True, "1", None, [[]], {})


def filled(plan: Plan) -> dict[str, Any]:
    """Return a plan's JSON with a text in each place that can have one."""
    plain = plan.to_dict()
    for layout in plain["layouts"]:
        seat = layout["seats"][0]
        seat["device"] |= {"uuid": "GPU-1", "driver": "550.1", "rates": "published", "attention": ["flash"]}
        seat["ceiling"]["notes"] = [{"kind": "process-lost", "text": "a note"}]
    return plain | {
        "machine": {"devices": [{"kind": "cuda", "name": "a GPU", "count": 2}], "torch": "2.6", "cuda": "12.4"},
        "workload": {"model": "Net", "parameters": 10, "optimizer": "0a", "loss_scope": "sample", "precision": None},
        "request": {"strategy": "auto", "name": "mine", "reserve": "5%", "devices": ["cuda:0"], "max_batch_size": 64},
        "notes": [{"kind": "note", "text": "a sentence"}],
        "checks": [
            {
                "subject": "loss",
                "split_error": 0.5,
                "accumulation_error": 0.5,
                "depends": True,
                "advice": "weigh it",
                "remark": "a remark",
                "count": "int((batch[1] != -100).sum())",
            }
        ],
        "trials": [
            {
                "number": 0,
                "gpu0_bsz": 8,
                "batch_size": 16,
                "accumulation_steps": 1,
                "split": [8, 8],
                "failure": "out of memory",
            }
        ],
    }


RANKS = make_plan((8, 8), 16, device="cuda:{}", capacity_bytes=1 << 30)
PLAIN = filled(replace(RANKS, layouts=(replace(RANKS.main, strategy="balanced"), RANKS.main)))
SEAT = ("layouts", 0, "seats", 0)


def leaves(value: Any, kind: type | tuple[type, ...], place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each text or number in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, kind, (*place, key))
    if isinstance(value, kind):
        yield place


def changed(plain: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(plain)
    inner: Any = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


def loaded(plain: dict[str, Any]) -> Plan | None:
    """Return the plan, or None if it was refused with a typed error that can be printed."""
    try:
        return Plan.from_json(json.dumps(plain))
    except PlanError as error:
        refused = str(error)
    assert refused.isprintable()
    return None


def calls(text: str) -> list[str]:
    return sorted(ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def exported(plan: Plan, to: str, path: Path) -> Any:
    """Return an export, or the message of a typed error."""
    try:
        return plan.export(to, path=path)
    except AutosplitError as error:
        return str(error)


def bash(script: str, folder: Path) -> None:
    """Run a script in a folder that has no program but `touch`."""
    nothing = {"PATH": str(folder / "bin")}
    subprocess.run(["/bin/bash", "-c", script], cwd=folder, env=nothing, capture_output=True, check=False)


def assert_harmless(plan: Plan, folder: Path) -> None:
    """Convert a plan to everything, run the shell scripts, and read the files as their tools do."""
    for to in FORMATS:
        found = exported(plan, to, folder / "a plan $(touch X).json")
        if isinstance(found, str):
            assert found.replace("\xa0", " ").isprintable()
            continue
        assert all(line.isprintable() for line in found.text.split("\n"))
        if to in ("slurm", "env", "torchrun"):
            bash(found.text.replace(sys.executable, "true"), folder)
            assert not (folder / "X").exists()
        elif to in ("trainjob", "skypilot"):
            written = list(yaml.safe_load_all(found.text))
            assert written == (found.settings["manifests"] if to == "trainjob" else [found.settings])
        elif to == "json":
            assert json.loads(found.text) == found.settings
        else:
            assert calls(found.text) == calls(Plan.from_json(json.dumps(PLAIN)).export(to).text)
    page = plan._repr_html_()
    assert "<script>alert" not in page
    for text in (str(plan), repr(plan), str(plan.explain())):
        assert text.replace("\n", "").replace("\xa0", " ").isprintable()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program `touch`, and no other program."""
    (tmp_path / "run" / "bin").mkdir(parents=True)
    (tmp_path / "run" / "bin" / "touch").write_text('#!/bin/bash\necho >"$1"\n')
    (tmp_path / "run" / "bin" / "touch").chmod(0o755)
    return tmp_path / "run"


PLACES = [*leaves(PLAIN, str)]


def test_the_plan_without_a_change_is_loaded_and_exported(folder):
    plan = loaded(PLAIN)
    assert plan is not None
    assert_harmless(plan, folder)
    assert len(PLACES) > 40
    bash("echo $(touch X)", folder)
    assert (folder / "X").exists(), "or no test here would notice a command that runs"


def test_control_characters_are_refused_in_every_text():
    """A GPU's name with a line end wrote a line into the Slurm script, which bash ran."""
    sentences = {"text", "failure", "advice", "remark", "reason"}
    for place in PLACES:
        for text in CONTROLS:
            allowed = place[-1] in sentences and text.replace("\n", "").replace("\t", "").isprintable()
            assert (loaded(changed(PLAIN, place, text)) is not None) == allowed, (place, text)


def test_control_characters_are_refused_in_keys_and_unknown_fields():
    for name in ("machine", "workload", "request"):
        for text in CONTROLS:
            assert loaded(PLAIN | {name: PLAIN[name] | {text: 1}}) is None
    assert loaded(PLAIN | {"later": ["a\x1bb"]}) is None


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_of_a_plan_runs_or_breaks_an_export(text, folder):
    for place in PLACES:
        plan = loaded(changed(PLAIN, place, text))
        if plan is not None:
            assert_harmless(plan, folder)


def test_names_that_mean_something_to_yaml_stay_texts(folder):
    """SkyPilot's file could not be parsed, and a TrainJob got a line of the plan."""
    for name in ("A100: 2", "on", "#x", "&a", "!!int", "a'b\"c", "\U0001f600", "1e3", "~", "- x", "{", "x: |"):
        plain = copy.deepcopy(PLAIN)
        for layout in plain["layouts"]:
            for seat in layout["seats"]:
                seat["device"]["name"] = name
        plan = loaded(plain)
        assert plan is not None
        assert_harmless(plan, folder)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("precision",), "fp8"),
        (("loss_reduction",), "max"),
        (("called_with",), "call"),
        (("layouts", 0, "strategy"), "fsdp"),
        ((*SEAT, "device", "kind"), "cuda/x"),
        ((*SEAT, "device", "attention"), ["slow"]),
        ((*SEAT, "ceiling", "role"), "boss"),
        ((*SEAT, "ceiling", "limited_by"), "luck"),
        (("checks", 0, "reduce"), "words"),
        (("request", "strategy"), "fsdp"),
        (("workload", "precision"), "fp8"),
        (("workload", "loss_scope"), "world"),
        (("workload", "loss_reduction"), ["mean"]),
    ],
)
def test_an_unknown_value_is_refused_with_the_value(place, value):
    """A plan with any text as its precision was loaded, and `show --code` printed bf16."""
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(changed(PLAIN, place, value)))
    told = value[0] if isinstance(value, list) else value
    assert told in str(caught.value)
    assert "xpected" in str(caught.value)


def test_numbers_are_refused_or_harmless():
    for place in leaves(PLAIN, (int, float)):
        for number in NUMBERS:
            plan = loaded(changed(PLAIN, place, number))
            if plan is not None:
                assert str(plan.explain())
                plan.to_json()
    assert loaded(json.loads(json.dumps(PLAIN).replace('"batch_size": 16', '"batch_size": 1e999'))) is None


def test_deep_nesting_is_refused():
    for levels in (40, 500, 100_000):
        text = json.dumps(PLAIN | {"machine": {"a": "HERE"}}).replace('"HERE"', "[" * levels + "]" * levels)
        with pytest.raises(PlanError):
            Plan.from_json(text)


@pytest.mark.whole
@pytest.mark.parametrize("to", ["slurm", "env", "torchrun", "skypilot"])
def test_a_path_with_a_control_character_is_not_exported(to):
    plan = loaded(PLAIN)
    assert plan is not None
    with pytest.raises(AutosplitError, match="control character"):
        plan.export(to, path="a\x1b[2J\nb/plan.json")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["cuda", "sim"])
def test_no_text_of_a_plan_reaches_the_terminal_or_a_page(of, tmp_path, monkeypatch):
    """Every text that a plan may have is hostile at once, and every command prints it."""
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(tmp_path / "cache"))
    plain = PLAIN if of == "cuda" else filled(simulated_plan()) | {"trials": []}
    evil = "".join(TEXTS)
    for place in leaves(plain, str):
        text = evil + "\n\t" if place[-1] in ("text", "failure", "advice", "remark", "reason") else evil
        hostile = changed(plain, place, text)
        plain = hostile if loaded(hostile) is not None else plain
    assert evil in plain["layouts"][0]["seats"][0]["device"]["name"]
    made = tmp_path / "made"
    made.mkdir()
    (made / "plan.json").write_text(json.dumps(plain))
    (tmp_path / "cache" / "profiles").mkdir(parents=True)
    (tmp_path / "cache" / "profiles" / f"{'a' * 32}.json").write_text(json.dumps(plain))
    commands = [("show", *flags) for flags in ((), ("--details",), ("--code",), ("--json",))]
    commands += [("report", "--output", "page.html", "--force"), *(("export", "--to", to) for to in FORMATS)]
    for command, *flags in commands:
        ran = autosplit(command, "plan.json", *flags, folder=made)
        assert ran.code in (0, 2), (command, flags, ran.err)
        assert (ran.out + ran.err).replace("\n", "").isprintable(), (command, flags)
        if "--json" in flags:
            json.loads(ran.out)
        if "--code" in flags and of == "cuda":
            assert "alert" not in "".join(calls(ran.out))
    for words in (("launch", "--plan", "plan.json", "--print", "train.py"), ("profiles",), ("profiles", "--json")):
        ran = autosplit(*words, folder=made)
        assert (ran.out + ran.err).replace("\n", "").isprintable(), words
    assert "<script>alert" not in (made / "page.html").read_text()
    assert not (made / "X").exists()
