"""Profiles from untrusted authors never cause a traceback, a hang, a half-used plan or a file elsewhere."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade import GIB, made_plan, made_ranks
from harmless import assert_harmless
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from noted import noted
from saved_profiles import saved_profiles
from workloads import mlp

from autosplit import tune
from autosplit.cli.main import main
from autosplit.errors import PlanError
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_layouts
from autosplit.probe.check_result import Check
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey
from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.step_time import Cost, Residual, StepTime, TimeCurve

KEY = "0123456789abcdef"
MACHINE = {"devices": [{"kind": "sim", "name": "RTX3090", "count": 2}], "torch": "2.13", "cuda": None}
WORKLOAD = {"model": "Net", "parameters": 1000, "loss_fn": None}
WANTED = ProfileKey(MACHINE, WORKLOAD, {})


def full_plan() -> Plan:
    """Return a plan that uses every part of the JSON format."""
    curves = tuple(TimeCurve(((1, 0.01), (50, 0.03), (200, 0.1 + 0.01 * i))) for i in range(2))
    step_time = StepTime(curves, (0.0, 0.002), (0.0, 1e-5), 0.001, adds_up=False)
    residual = Residual((3, 4), 1, 0.05, 0.051)
    # Small, so that explaining it takes milliseconds.
    region = Region(MemoryFit(float(GIB), 2.0**26, 2.0**20), 24 * GIB, 3, (4,), 7)
    return made_plan(
        (3, 4),
        kind="sim",
        effective=7,
        cost=Cost(step_time, 0.001, (residual,)),
        region=region,
        effective_batch_sizes=(7, 7),
        max_batch_size=600,
        sample_batch_size=64,
        checks=(Check("gradient", 0.5, None, depends=True, advice="freeze it"),),
        machine=MACHINE,
        workload=WORKLOAD,
        notes=noted("a sentence — with “Unicode”"),
    )


PLAN = full_plan()
TEXT = PLAN.to_json()
PLAIN = PLAN.to_dict()
OLD = {
    **json.loads((Path(__file__).parents[1] / "plan_of_version_2.json").read_text(encoding="utf-8")),
    "machine": MACHINE,
    "workload": WORKLOAD,
}
"""A plan with schema_version 2, which `Plan.from_json` converts."""


# Hostile files

RAW_PREFIX = "@raw "
RAW = ("NaN", "Infinity", "-Infinity", "1e400", "9" * 5000, "9" * 400, "1e-400", "[" * 50 + "]" * 50, "0x10", "'a'")
"""Values that `json.dumps` would not write."""

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**53, 2**62 - 1, 2**62, 2**63, 2**64, 10**18, -(2**63)]),
    st.sampled_from([-1.0, -0.0, 0.5, 5e-324, 1e-300, 1e18, 1e300, 1.7e308]),
    st.sampled_from(["", "x", "cpu", "sim", "memory", "\x1b[2J\x9b\u202e", "/etc/passwd", "../../../x", "A" * 5000]),
    st.sampled_from([[], {}, [[]], [1, 2], [0, 256], [256], {"a": {"b": []}}, [1, 2, 3], ["a"]]),
    st.sampled_from([RAW_PREFIX + text for text in RAW]),
)


@st.composite
def truncated(draw) -> bytes:
    content = TEXT.encode()
    return content[: draw(st.integers(0, len(content)))]


@st.composite
def flipped(draw) -> bytes:
    content = bytearray(TEXT.encode())
    for _ in range(draw(st.integers(1, 3))):
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


@st.composite
def changed(draw) -> bytes:
    """Replace or remove values in a plan, at any depth. Sometimes the same number replaces many values."""
    plain: Any = copy.deepcopy(draw(st.sampled_from([PLAIN, OLD])))
    for _ in range(draw(st.integers(1, 3))):
        node, key = plain, draw(st.sampled_from(sorted(plain)))
        while isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 3)):
            node = node[key]
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        how = draw(st.integers(0, 5))
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, list):
            node.extend([node[key]] * draw(st.sampled_from([1, 3, 200])))
        elif how == 2 and isinstance(node[key], (int, float)):
            node[key] = node[key] * draw(st.sampled_from([-1, 2, 0.5, 10**6, 10**12, 1e-9]))
        else:
            node[key] = copy.deepcopy(draw(VALUES))  # the drawn plan may be changed, so draw a fresh plan
    text = json.dumps(plain)
    for raw in RAW:
        text = text.replace(json.dumps(RAW_PREFIX + raw), raw)
    return text.encode()


@st.composite
def grown(draw) -> bytes:
    """Change sizes consistently to absurd values, so checks of single fields pass."""
    try:
        return grown_plan(draw).to_json().encode()
    except PlanError:  # too large to create here
        reject()


def grown_plan(draw) -> Plan:
    factor = draw(st.sampled_from([1, 2, 1000, 10**6, 10**9, 10**12, 10**15]))
    devices = draw(st.sampled_from([1, 2, 3, 40, 300]))
    forwards = draw(st.sampled_from([1, 2, 100, 10**5, 10**12]))
    share = 10 * factor
    plan = made_plan((share,) * devices, kind="sim", effective=share * devices * forwards)
    slope = draw(st.sampled_from([1e-300, 1e-9, 1e-3, 1e9, 1e16]))
    curves = tuple(TimeCurve(((1, slope), (2, slope * (2 + i)))) for i in range(devices))
    times = StepTime(curves, (0.0,) * devices, (0.0,) * devices, draw(st.sampled_from([0.0, 1e18])), adds_up=False)
    plane = MemoryFit(0.0, draw(st.sampled_from([0.0, 5e-324, 1.0, 1e18])), draw(st.sampled_from([0.0, 1e18])))
    ceilings = plan.ceilings
    region = Region(plane, 2**61, ceilings[0], ceilings[1:], sum(ceilings))
    sizes = draw(st.sampled_from([None, (1, 10**17), (plan.effective_batch_size,) * 2]))
    if sizes is not None and not sizes[0] <= plan.effective_batch_size <= sizes[1]:
        sizes = None
    cost, rates = Cost(times, draw(st.sampled_from([0.0, 1e18]))), st.sampled_from([5e-324, 1.0, 1e18])
    main = replace(
        plan.main,
        cost=cost,
        region=draw(st.sampled_from([None, region])),
        samples_per_s=draw(rates),
        even_samples_per_s=draw(st.sampled_from([None, 5e-324, 1e18])),
    )
    ranks = made_ranks(plan.devices, plan.split, plan.effective_batch_size, cost=cost, samples_per_s=draw(rates))
    return with_layouts(replace(plan, effective_batch_sizes=sizes, trials=()), main, ranks)


def versioned(version: object) -> bytes:
    return json.dumps({**PLAIN, "schema_version": version}).encode()


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return TEXT.replace('"model": "Net"', f'"model": {opening * levels}1{closing * levels}').encode()


OTHERS = st.sampled_from(
    [
        b"",
        b"null",
        b"\x00" * 100,
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        TEXT.encode().replace("“".encode(), b"\xff"),
        TEXT.replace("a sentence", "\\ud800").encode(),
        TEXT.replace('"samples": 3', '"samples": 7, "samples": 3').encode(),
        TEXT.replace('"samples": 3', '"samples": 3, "samples": 7').encode(),
        json.dumps(OLD).encode(),
        b"[" * 100_000,
        b'{"schema_version": 1, "machine": ' + b'{"a":' * 100_000,
        b'{"schema_version": 2, "machine": ' + b'{"a":' * 100_000,
        b'{"schema_version": 3, "machine": ' + b'{"a":' * 100_000,
        *(nested(levels) for levels in (20, 40, 900, 5000)),
        *(nested(levels, '{"a":', "}") for levels in (20, 40, 900)),
        *(versioned(version) for version in (-1, 0, 1, 2, 4, 99, 2**40, 2**70, "1", None, 1.5, True, [1])),
        b" " * (profiles.MAX_FILE_BYTES + 1),
        TEXT.encode() + b" " * 10_000,
        TEXT.encode() * 2,
    ]
)
CASES = st.one_of(truncated(), flipped(), changed(), changed(), changed(), OTHERS)


# Expected results


def shown(*arguments: str) -> tuple[int, str]:
    """Run a command line, and check that what it prints is harmless."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    assert_harmless(out.getvalue())
    assert_harmless(err.getvalue())
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue()


def is_whole(plan: Plan) -> bool:
    """Return whether an accepted plan is usable: its JSON is a plan, and it can be explained."""
    again = Plan.from_json(plan.to_json())
    return again == plan and sum(plan.split) == plan.batch_size and bool(str(plan.explain()))


@pytest.fixture
def ground(tmp_path, monkeypatch) -> Path:
    """A folder with a cache, and with other files that the cache must not touch."""
    (tmp_path / "cache" / "profiles").mkdir(parents=True)
    PLAN.save(tmp_path / "outside" / "plan.json")
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def emptied(folder: Path) -> Path:
    """Remove the files of the case before."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


def each(case: bytes, ground: Path, *, shows: bool = True) -> None:
    """Run `find`, and sometimes `show`, on a case."""
    outside = ground / "outside"
    path = emptied(ground / "cache" / "profiles") / f"{KEY}.json"
    path.write_bytes(case)
    try:
        named = Plan.load(path)  # named as the user's own profile
    except PlanError as error:
        assert_harmless(str(error), lines=False)
        named = None
    if shows:
        code, out = shown("show", str(path))
        assert (code, bool(out)) == ((0, True) if named is not None else (2, False))
        code, out = shown("show", KEY, "--json")
        assert (code, bool(out)) == ((0, True) if named is not None else (2, False))
        assert named is None or is_whole(named)
    found = profiles.find(KEY, WANTED)
    if found.plan is None:
        (note,) = found.notes
        assert str(note).startswith(f"The profile {path} was ignored: it")
        assert "\n" not in note.text
        bad = path.with_suffix(".bad")
        assert os.path.lexists(bad) != os.path.lexists(path)
        assert os.path.lexists(bad) == str(note).endswith(f" It was renamed to {KEY}.bad.")
        assert os.path.lexists(bad) or "it is for another" in note.text
        assert profiles.find(KEY, WANTED).plan is None
    else:
        assert found.plan == named
        assert (found.plan.machine, found.plan.workload) == (MACHINE, WORKLOAD)
    assert [(one.name, one.read_text()) for one in outside.iterdir()] == [("plan.json", TEXT + "\n")]
    assert {one.name for one in ground.iterdir()} == {"outside", "cache"}
    assert {one.name for one in (ground / "cache").iterdir()} == {"profiles"}
    assert {one.suffix for one in path.parent.iterdir()} <= {".json", ".bad", ".lock"}


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


sometimes = st.sampled_from([False] * 15 + [True])


@examples(500)
@given(case=CASES, shows=sometimes)
def test_nothing_comes_of_a_hostile_profile(case, shows, ground):
    each(case, ground, shows=shows)


@examples(10)
@given(case=grown())
def test_nothing_comes_of_sizes_that_nobody_has(case, ground):
    each(case, ground)


# End to end


@pytest.mark.whole
def test_a_spoiled_profile_is_tuned_for_again():
    first = tune(mlp(), devices="sim:1xRTX3090", max_batch_size=64)
    (path,) = (path for path, _ in saved_profiles())
    path.write_bytes(path.read_bytes()[:1000])
    again = tune(mlp(), devices="sim:1xRTX3090", max_batch_size=64)
    (note,) = (note for note in again.notes if note.kind == "profile-ignored")
    assert "it is not a plan" in note.text
    assert str(note).endswith(f"It was renamed to {path.stem}.bad.")
    assert replace(again, notes=first.notes) == first
    assert os.path.lexists(path.with_suffix(".bad"))
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    third = tune(mlp(), devices="sim:1xRTX3090", max_batch_size=64)
    assert str(third.notes[0]).startswith(f"From the profile {path.stem[:12]}")
