"""Jobs over two machines: torchrun on both, unequal splits, and the effects of a machine's crash.

The machines are namespaces of this machine (tests/machines.py). They share its disk, like machines with a shared file
system. Everything else is separate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import distant_training
import pytest
import torch
from ddp_jobs import make_plan
from distant_training import BATCH_SIZES, EFFECTIVE_BATCH_SIZE, EPOCHS, NUM_SAMPLES, SAVED_EVERY
from machines import Machine, Machines, missing
from marks import for_release

from autosplit.plan.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 200
"""Timeout for work of 15 seconds on a quiet machine."""

PORT = "29500"
"""The network is private, so any port is free."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Machines(tmp_path) as both:
        yield both


def by_c10d(machines: Machines, machine: Machine) -> list[str]:
    """Rendezvous in torchrun on machine-a. The ranks use the machines' names."""
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines.a.address}:{PORT}", "--rdzv-id", "job"]


def by_number(machines: Machines, machine: Machine) -> list[str]:
    """Rendezvous at rank 0's address, with given machine numbers."""
    return ["--master-addr", machines.a.address, "--master-port", PORT, "--node-rank", str(int(machine is machines.b))]


MEETINGS = {"c10d": by_c10d, "static": by_number}


def start_training(
    machines: Machines, machine: Machine, meeting: str, *death: str, restarts: int = 0, **variables: str
) -> subprocess.Popen[str]:
    """Start one machine's torchrun on tests/distant_training.py, with its own copy of the plan."""
    make_plan(BATCH_SIZES, EFFECTIVE_BATCH_SIZE).save(machine.folder / "plan.json")
    options = ["--nnodes", "2", "--max-restarts", str(restarts), *MEETINGS[meeting](machines, machine)]
    script = [str(Path(distant_training.__file__).absolute()), str(checkpoint_of(machines)), *death]
    if meeting == "c10d":
        launch = ["-m", "autosplit", "launch", "--plan", "plan.json", *options]
        return machine.start(sys.executable, *launch, *script, **variables)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", *options]
    return machine.start(sys.executable, *torchrun, *script, AUTOSPLIT_PROFILE="plan.json", **variables)


def checkpoint_of(machines: Machines) -> Path:
    return machines.a.folder.parent / "last.pt"


def start_both(machines: Machines, meeting: str, *death_of_b: str, **options: Any) -> list[subprocess.Popen[str]]:
    return [
        start_training(machines, machines.a, meeting, **options),
        start_training(machines, machines.b, meeting, *death_of_b, **options),
    ]


def codes(machines: Machines, agents: list[subprocess.Popen[str]]) -> list[int]:
    """Wait for both machines' torchruns to end."""
    try:
        return [agent.wait(LIMIT_S) for agent in agents]
    except subprocess.TimeoutExpired:
        pytest.fail(f"a machine has not ended after {LIMIT_S} s; {said(machines)}")


def said(machines: Machines) -> str:
    return "\n".join(
        f"{machine.name} said {machine.log.read_text(encoding='utf-8', errors='replace')[-4000:]}"
        for machine in (machines.a, machines.b)
    )


def attempts(machine: Machine) -> list[list[dict[str, Any]]]:
    """Return the recorded steps of each process on that machine, in order."""
    lines = [json.loads(line) for line in (machine.folder / "steps.jsonl").read_text().splitlines()]
    return [list(group) for _, group in groupby(lines, key=lambda line: line["pid"])]


def assert_trained_as_one_device(machines: Machines) -> None:
    expected = distant_training.trained_on_one_device()
    for machine in (machines.a, machines.b):
        got = torch.load(machine.folder / "weights.pt")
        assert (got - expected).abs().max() < 1e-9 * expected.abs().max(), machine.name


def assert_went_on_from(machines: Machines, begun: int, died: int) -> None:
    """Check that a second process trained from step `begun` on, and that both together used all samples once."""
    taken: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for rank, machine in enumerate((machines.a, machines.b)):
        first, second = attempts(machine)
        assert [line["done"] for line in first] == list(range(died))
        assert [line["done"] for line in second] == list(range(begun, 6 * EPOCHS))
        for line in (*first[:begun], *second):
            assert line["rank"] == rank
            taken[line["epoch"]].update(line["samples"])
    assert taken == {epoch: Counter(range(NUM_SAMPLES)) for epoch in range(EPOCHS)}


# ------------------------------------------------------------------------------------------------------ machines


# -------------------------------------------------------------------------------------------------------- tuning

BUDGETS = ("20KiB", "13KiB")
"""Budgets for the model's step: a few samples fit on machine-b, all sixteen on machine-a."""


def start_tuning(machines: Machines, machine: Machine, meeting: str, budget: str) -> subprocess.Popen[str]:
    """Start one machine's torchrun on a joint search. Each machine names its own devices."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    workload = f"{Path(distant_training.__file__).absolute()}:workload"
    asked = ["--effective-batch-size", str(EFFECTIVE_BATCH_SIZE), "--n-trials", "3", "--output", "plan.json"]
    command = ["-m", "autosplit", "tune", workload, "--strategy", "ddp", "--devices", f"cpu:{budget}", *asked]
    return machine.start(sys.executable, *torchrun, *MEETINGS[meeting](machines, machine), *command)


def start_by_what_is_remembered(machines: Machines, machine: Machine, *death: str) -> subprocess.Popen[str]:
    """Train without a named plan. The machine has a matching profile."""
    options = ["--nnodes", "2", "--max-restarts", "1", *MEETINGS["static"](machines, machine)]
    script = [str(Path(distant_training.__file__).absolute()), str(checkpoint_of(machines)), *death]
    return machine.start(sys.executable, "-m", "autosplit", "launch", *options, *script)


def test_two_machines_tune_together_then_train_and_go_on_after_one_was_killed(machines):
    both = (machines.a, machines.b)
    tuning = [start_tuning(machines, one, "static", budget) for one, budget in zip(both, BUDGETS, strict=True)]
    assert codes(machines, tuning) == [0, 0], said(machines)
    plan, copy = (Plan.load(machine.folder / "plan.json") for machine in both)
    assert plan == copy
    assert plan.ddp.measured
    assert plan.effective_batch_size == EFFECTIVE_BATCH_SIZE
    assert plan.machine["ranks_per_machine"] == [1, 1]
    large, small = (seat.ceiling for seat in plan.ddp.seats)
    assert large.capacity_bytes > small.capacity_bytes
    assert small.batch_size < large.batch_size == EFFECTIVE_BATCH_SIZE
    assert all(1 <= seat.samples <= seat.ceiling.batch_size for seat in plan.ddp.seats)
    assert all(len(list((machine.folder / "cache" / "profiles").glob("*.json"))) == 1 for machine in both)

    death = ("--dies", "worker", "--at", str(DIES_AT))
    training = [start_by_what_is_remembered(machines, *pair) for pair in ((machines.a,), (machines.b, *death))]
    assert codes(machines, training) == [0, 0], said(machines)
    assert_went_on_from(machines, BEGUN, DIES_AT)
    assert_trained_as_one_device(machines)


# ------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("meeting", ["c10d", for_release("static")])
def test_two_machines_train_as_one_device_does(machines, meeting):
    assert codes(machines, start_both(machines, meeting)) == [0, 0], said(machines)
    assert_trained_as_one_device(machines)
    for rank, (machine, share) in enumerate(zip((machines.a, machines.b), BATCH_SIZES, strict=True)):
        (lines,) = attempts(machine)
        full = EFFECTIVE_BATCH_SIZE // sum(BATCH_SIZES) * share
        assert [(line["rank"], len(line["samples"])) for line in lines[:5]] == [(rank, full)] * 5


# ------------------------------------------------------------------------------------------------------ resuming

DIES_AT = 10
BEGUN = DIES_AT // SAVED_EVERY * SAVED_EVERY
assert BEGUN % 6, "in mid-epoch"


@pytest.mark.release  # after a tuning, a worker is killed, too
def test_a_worker_that_is_killed_is_started_again_and_goes_on_in_mid_epoch(machines):
    agents = start_both(machines, "c10d", "--dies", "worker", "--at", str(DIES_AT), restarts=1)
    assert codes(machines, agents) == [0, 0], said(machines)
    assert_went_on_from(machines, BEGUN, DIES_AT)
    assert_trained_as_one_device(machines)


@pytest.mark.release  # the job that tunes is started again after a machine was killed, too
def test_a_machine_that_dies_ends_the_job_which_goes_on_when_it_is_started_again(machines):
    death = ("--dies", "machine", "--at", str(DIES_AT))
    of_a, of_b = codes(machines, start_both(machines, "c10d", *death))
    assert of_a == 1, said(machines)
    assert of_b == -9
    assert codes(machines, start_both(machines, "c10d", *death)) == [0, 0], said(machines)
    assert_went_on_from(machines, BEGUN, DIES_AT)
    assert_trained_as_one_device(machines)


def test_a_machine_that_comes_back_joins_the_job_that_waits_for_it(machines):
    """torch shares torchrun's store with its workers and does not tell a newcomer the store's address."""
    death = ("--dies", "machine", "--at", str(DIES_AT))
    options: dict[str, Any] = {"restarts": 1, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    on_a, on_b = start_both(machines, "c10d", *death, **options)
    assert on_b.wait(LIMIT_S) == -9, said(machines)
    on_b = start_training(machines, machines.b, "c10d", *death, **options)
    assert codes(machines, [on_a, on_b]) == [0, 0], said(machines)
    assert_went_on_from(machines, BEGUN, DIES_AT)
    assert_trained_as_one_device(machines)


# ----------------------------------------------------------------------------------------------------- addresses


@pytest.fixture
def as_debian_installs_them(tmp_path: Path) -> Iterator[Machines]:
    """Each machine resolves its own name to 127.0.1.1, so the other machine gets that address."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Machines(tmp_path, own_name_is_loopback=True) as both:
        yield both


def test_naming_the_interface_helps(as_debian_installs_them):
    machines = as_debian_installs_them
    agents = start_both(machines, "static", GLOO_SOCKET_IFNAME="wire")
    assert codes(machines, agents) == [0, 0], said(machines)
    assert_trained_as_one_device(machines)
