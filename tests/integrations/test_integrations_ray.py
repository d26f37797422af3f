"""Ray Train: plans, unequal batches, nodes that leave and join, and an elastic job. The workers are real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import EXAMPLES, ROOT, TESTS
from marks import FOR_RELEASE

from autosplit import Plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray starts workers slowly on a busy machine
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray (the extra `ray`)"),
]

LARGE, SMALL = 2**20, 2**19
"""The memory budgets of the two nodes."""


SETTINGS = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # default 2; each report waits for the next check
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",  # default 60; the wait for resources of a node that was killed
    "RAY_health_check_period_ms": "500",  # default 3000
    "RAY_health_check_failure_threshold": "2",  # default 5; each check of a killed node fails at once
    "RAY_health_check_timeout_ms": "60000",  # default 10000; a living node answers late on a busy machine
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # default 1; a further process for each job
    "RAY_worker_niceness": "0",  # default 15; the tests that run at the same time would leave the workers no time
}
"""Ray's settings for an early detection of killed nodes and of reports, and for a busy machine."""


def run(script: Path, *arguments: str) -> str:
    """Run a script in a separate process, because Ray leaves threads and sockets open."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), **SETTINGS}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def log_of(folder: Path, weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return a line for each step of each worker of a training that has the weights of one process.

    Each step counts once: the workers wait for Ray to register its checkpoint before a node leaves or joins.
    """
    for name, value in torch.load(folder / "weights.pt").items():
        torch.testing.assert_close(value, weights[name], atol=1e-12, rtol=0)
    log = [json.loads(line) for line in (folder / "log").read_text(encoding="utf-8").splitlines()]
    steps: dict[int, list[int]] = {}
    for line in log:
        steps.setdefault(line["done"], []).extend(line["ids"])
    assert [len(steps[step]) for step in sorted(steps)] == [48, 48, 48, 48, 8] * 2
    for epoch in (range(1, 6), range(6, 11)):
        assert sorted(number for step in epoch for number in steps[step]) == list(range(200))
    return log


def test_nodes_that_leave_and_join_change_no_weight(tmp_path: Path) -> None:
    """Tune over two nodes of different memory, and train with batches (9, 3). The second node is killed in step 7.

    An elastic job has one worker from step 7, and two again from step 9. For a release, another node first replaces the
    second at once.
    """
    run(TESTS / "ray_jobs.py", str(tmp_path))
    found = torch.load(tmp_path / "found.pt")
    plan = Plan.from_json(found["plan"])
    assert sorted(device.memory_bytes for device in plan.devices) == [SMALL, LARGE]
    assert plan.ddp.measured
    assert plan.effective_batch_size == 48

    # Each worker has the batch size of its device, before and after the failure.
    if FOR_RELEASE:
        log = log_of(tmp_path / "replaced", found["weights"])
        assert {(line["memory"], line["size"]) for line in log} == {(LARGE, 9), (SMALL, 3)}

    log = log_of(tmp_path / "elastic", found["weights"])
    for steps, start, sizes in (
        (range(1, 7), 0, {(LARGE, 9), (SMALL, 3)}),
        (range(7, 9), 6, {(LARGE, *found["alone"])}),
        (range(9, 11), 8, {(LARGE, 9), (SMALL, 3)}),
    ):
        lines = [line for line in log if line["done"] in steps]
        assert {line["start"] for line in lines} == {start}
        assert {(line["memory"], line["size"]) for line in lines} == sizes

    codes, messages = zip(*found["errors"], strict=True)
    assert codes == ("DoesNotFitError", "InputError")
    ranks = r"0 is cpu with 1 MiB on node \S+, 1 is cpu with 512 KiB on node \S+\.$"
    assert re.search(rf"\nReported by rank [01]\. Ranks: {ranks}", messages[0])
    assert re.search(r"node \S+ is 2048MiB", messages[1])
    a100, v100 = ({"ray.io/accelerator-type": name} for name in ("A100", "V100"))
    either = {"ray.io/accelerator-type": "in(A100,V100)"}
    assert found["selectors"] == [[a100, v100], [{"gpu": "a100-40"}, v100], either, either]
    assert len(found["refused"]) == 3
    assert "sharded" in found["refused"][2]


def test_the_example_runs() -> None:
    printed = run(EXAMPLES / "train_ray.py")
    assert re.search(r"split \(\d+, \d+\) = \d+ samples per forward", printed)
    loss = re.search(r"^loss (\d\.\d+), the checkpoint is in ", printed, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 4.0  # before training it is above ln(90), which is 4.5
