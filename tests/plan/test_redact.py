"""Shared plans have all figures of the plan, and nothing about its owner."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from handmade import changed_seats, made_plan
from noted import noted

from autosplit.cli.main import main
from autosplit.notes import Note
from autosplit.plan.plan import Plan
from autosplit.plan.redact import REMOVED, redacted, shareable

UUID = "3f2a91c0-1a2b-4c3d-8e4f-0123456789ab"
PRIVATE = f"/home/ann/x of GPU-{UUID}, pid 4711, redis://:secret@host"


def private_plan() -> Plan:
    plan = made_plan((100, 156))
    plan = changed_seats(
        plan,
        lambda place, seat: replace(
            seat,
            device=replace(seat.device, uuid=f"GPU-odd_{place}", driver="580"),
            ceiling=replace(seat.ceiling, notes=noted(PRIVATE)),
        ),
    )
    trials = (*plan.trials[:1], replace(plan.trials[1], failure=PRIVATE))
    return replace(plan, trials=trials, notes=noted(PRIVATE, "cuda:0 is GPU-odd_1"))


def assert_shared(text: str) -> None:
    assert not [one for one in ("ann", UUID, "odd_", "4711", "secret", "host") if one in text]


def test_a_plan_keeps_its_numbers_alone():
    plan = private_plan()
    shared = shareable(plan)
    assert_shared(shared.to_json())
    assert (shared.split, shared.ceilings, shared.trials[0]) == (plan.split, plan.ceilings, plan.trials[0])
    assert (shared.machine, shared.workload, shared.checks) == (plan.machine, plan.workload, plan.checks)
    assert shared.trials[1].failure == redacted(PRIVATE)
    assert [note.text for note in shared.notes] == [redacted(PRIVATE), f"cuda:0 is {REMOVED}"]
    assert [device.driver for device in shared.devices] == ["580", "580"]
    assert shareable(shared) == shared
    assert plan == private_plan()
    assert Plan.from_json(shared.to_json()) == shared


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (
            "4 GiB/s, 1/2 of 4,096 / B, 0.5/1.5 samples/s, +/- 3%",
            "4 GiB/s, 1/2 of 4,096 / B, 0.5/1.5 samples/s, +/- 3%",
        ),
        ("The profile /home/ann lee/x.json has 3 trials", f"The profile {REMOVED} has 3 trials"),
        ("/data/x: 12/15 samples fit. 4 GiB/s", f"{REMOVED}: 12/15 samples fit. 4 GiB/s"),
        (r"C:\Users\Ann Lee\net.py: 200 samples/s", f"{REMOVED}: 200 samples/s"),
        ("nets/net.py:12 reads 3 values", f"{REMOVED}:12 reads 3 values"),
        ("Process 123 on node17 waited 40 s", f"{REMOVED} waited 40 s"),
    ],
)
def test_a_sentence_loses_its_paths_and_keeps_its_figures(text, shared):
    """All notes were left out, and with them figures that readers of the page need."""
    assert redacted(text) == shared
    assert redacted(shared) == shared


def test_notes_keep_their_kinds_so_that_the_printed_code_stays_right():
    """Without the note "loss-assumed", the page's code expected a loss function that the script does not have."""
    plan = replace(made_plan((100, 156)), notes=(Note("loss-assumed", "/home/ann/net.py has no loss"),))
    assert shareable(plan).notes == (Note("loss-assumed", f"{REMOVED} has no loss"),)


def test_show_as_json_is_made_to_be_shared(tmp_path, capsys):
    path = tmp_path / "plan.json"
    private_plan().save(path)
    assert main(["show", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert_shared(out)
    assert json.loads(out) == shareable(private_plan()).to_dict()
    assert UUID in path.read_text()
