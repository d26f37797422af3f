"""What is shared has the plan's numbers, and nothing of whose they are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from handmade import made_plan
from hypothesis import given
from hypothesis import strategies as st

from autosplit.cli.main import main
from autosplit.plan.plan import Plan
from autosplit.plan.redact import shareable, without_private

UUID = "3f2a91c0-1a2b-4c3d-8e4f-0123456789ab"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("from the profile /home/ann/.cache/autosplit/profiles/ab.json: nothing", "from the profile [path]: nothing"),
        ("/home/ann lee/plans/a b.json is ignored", "[path] b.json is ignored"),
        ("'/home/ann lee/plan.json', /root, (/data/x)", "'[path]', [path], ([path])"),
        ("~/plans/a.json, ~ann/b.json", "[path], [path]"),
        (r"C:\Users\Ann Lee\plan.json or d:/x/y", "[path] or [path]"),
        (r"\\server\share\ann: no", "[path]: no"),
        ("../../ann/x.py: no", "[path]: no"),
        ("HOME=/home/ann", "HOME=[path]"),
        ("../secret/x.json, runs/a.json and ./runs of 3", "[path], [path] and [path] of 3"),
        ("'runs/ann/study.db' is full; see ann\\train.py:12", "'[path]' is full; see [path]:12"),
        (f"cuda:0 is GPU-{UUID}, the plan's was {UUID}", "cuda:0 is [uuid], the plan's was [uuid]"),
        (f"MIG-GPU-{UUID}/1/0 and MIG-{UUID}", "[uuid] and [uuid]"),
        (f"cuda:0 is {UUID.replace('-', '')}, not GPU-{UUID.replace('-', '')}", "cuda:0 is [uuid], not [uuid]"),
        ("pid 4711 and process 812 died", "[process] and [process] died"),
        ("storage is 'mysql://ann:secret@db.corp/x' (denied)", "storage is '[url]' (denied)"),
        ("sqlite:////home/ann lee/study.db", "[url]"),
        ("https://ann:secret@host/x", "[url]"),
        ("https://host/x?token=y", "[url]"),
        ("file:///home/ann/x", "[url]"),
    ],
)
def test_what_is_left_out(text, shown):
    assert without_private(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "12 samples/s and/or 3 / 4, (1/2), 2 processes, process 1 of 2, 5 % off",
        "sim:2xA100-40GB+1xRTX3090, cuda:0, cpu:1GiB,cpu:2GiB, NVIDIA GeForce RTX 3090",
        "see https://pytorch.org/docs/stable/ddp.html; GPU-bound; train.py: line 3",
        "BatchNorm2d at features.1: freeze it",
        "a" * 32,
        f"moved aside as {'a' * 32}.bad, of digest {'b' * 64}",
        "12 of 36.json, 1/2.5 samples/s.json5, bf16/fp16.",
    ],
)
def test_what_stays(text):
    assert without_private(text) == text


@given(
    st.lists(
        st.sampled_from(
            ["/home/ann", " ", "~/x", UUID, "a://b", "runs/a.json", "c:\\", "..", "/", "[path]", ":", "pid 77"]
        )
    )
)
def test_once_is_enough(parts):
    once = without_private("".join(parts))
    assert without_private(once) == once
    assert "/home/ann" not in once


@pytest.mark.parametrize(
    "part", ["/", "/a", "/a b", "a ", "~", "x://", "\\\\", "../", "GPU-a", "a/", "a.py/", "a", "a:", "pid  "]
)
def test_no_text_takes_long(part):
    without_private(part * 50_000 + "!")  # a pattern that goes back and forth would never end


PRIVATE = f"/home/ann/x of GPU-{UUID}, pid 4711, redis://:secret@host"


def private_plan() -> Plan:
    plan = made_plan((100, 156))
    ceilings = [replace(device.ceiling, notes=(PRIVATE,)) for device in plan.devices]
    return replace(
        plan,
        devices=tuple(
            replace(device, uuid=f"GPU-odd_{i}", driver="580", ceiling=ceiling)
            for i, (device, ceiling) in enumerate(zip(plan.devices, ceilings, strict=True))
        ),
        trials=(*plan.trials[:1], replace(plan.trials[1], failure=PRIVATE)),
        ddp=replace(plan.ddp, reason=PRIVATE),
        machine={"devices": [{"name": PRIVATE}], PRIVATE: 1},
        workload={"model": PRIVATE, "nested": {"a": [PRIVATE, 3]}},
        notes=(PRIVATE, "cuda:0 is GPU-odd_1"),
    )


def assert_shared(text: str) -> None:
    assert not [one for one in ("ann", UUID, "odd_", "4711", "secret", "host") if one in text]


def test_a_plan_keeps_its_numbers_alone():
    plan = private_plan()
    shared = shareable(plan)
    assert_shared(shared.to_json())
    assert (shared.split, shared.ceilings, shared.trials[0]) == (plan.split, plan.ceilings, plan.trials[0])
    assert shared.machine["devices"] == [{"name": "[path] of [uuid], [process], [url]"}]
    assert shared.workload["nested"]["a"][1] == 3
    assert [device.driver for device in shared.devices] == ["580", "580"]
    assert shareable(shared) == shared
    assert plan == private_plan()
    assert Plan.from_json(shared.to_json()) == shared


def test_a_plan_without_any_stays_as_it_is():
    plan = made_plan((100, 156))
    assert shareable(plan) == plan


def test_show_as_json_is_made_to_be_shared(tmp_path, capsys):
    path = tmp_path / "plan.json"
    private_plan().save(path)
    assert main(["show", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert_shared(out)
    assert json.loads(out) == shareable(private_plan()).to_dict()
    assert UUID in path.read_text()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["/" * 60_000, "../" * 20_000, "/home/" * 10_000, "a" * 60_000, "c:" + "\\" * 60_000])
def test_a_text_made_to_take_long_takes_no_time(text):
    assert len(without_private(text)) <= 21_000


def test_who_holds_a_lock_is_left_out_with_the_host():
    assert without_private("process 12345 on node7 tunes the same") == "[process] tunes the same"


def test_a_password_with_quotes_takes_no_part_of_the_url_along():
    assert without_private("mysql+pymysql://u:p'q@host/d and more") == "[url] and more"
