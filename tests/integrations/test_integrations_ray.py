"""Ray Train: plans, unequal batches, a node that is killed and replaced, and an elastic job. The workers are real."""

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

from autosplit import Plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray starts workers slowly on a busy machine
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray (the extra `ray`)"),
]

LARGE, SMALL = 2**20, 2**19
"""The memory budgets of the two nodes."""


def run(script: Path, *arguments: str) -> str:
    """Run a script in a separate process, because Ray leaves threads and sockets open."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def job(name: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a job of ray_jobs. Return what it found, and a line for each step of each worker."""
    run(TESTS / "ray_jobs.py", name, str(folder))
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return torch.load(folder / "found.pt"), [json.loads(line) for line in lines]


def assert_trained_as_one_process(folder: Path) -> None:
    done = run(TESTS / "ray_jobs.py", "compared", str(folder))
    assert float(done.split()[-1]) <= 1e-12


def samples_of(log: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the samples of each optimizer step over all workers. A repeated step has each sample twice."""
    found: dict[int, list[int]] = {}
    for line in log:
        found.setdefault(line["done"], []).extend(line["ids"])
    return found


def test_a_killed_and_replaced_node_changes_no_weight(tmp_path: Path) -> None:
    """Tune over two nodes of different memory, train with batches (9, 3), and lose the second node in step 7."""
    found, log = job("replaced_node", tmp_path)
    plan = Plan.from_json(found["plan"])
    assert sorted(device.memory_bytes for device in plan.devices) == [SMALL, LARGE]
    assert plan.ddp.measured
    assert plan.effective_batch_size == 48
    assert found["errors"] == ["workload-function", "ray-memory-label", "ray-tune-option"]
    # Each worker has the batch size of its device, before and after the failure.
    assert {(line["memory"], line["size"]) for line in log} == {(LARGE, 9), (SMALL, 3)}
    steps = samples_of(log)
    assert sorted(steps) == list(range(1, 11))
    for epoch in (range(1, 6), range(6, 11)):
        assert sorted({number for step in epoch for number in steps[step]}) == list(range(200))
        assert sum(len(set(steps[step])) for step in epoch) == 200
    assert_trained_as_one_process(tmp_path)


def test_an_elastic_job_goes_on_with_fewer_nodes(tmp_path: Path) -> None:
    """The plan is solved again for the first node alone, with the same samples in each optimizer step."""
    found, log = job("fewer_nodes", tmp_path)
    assert {line["memory"] for line in log} == {LARGE, SMALL}
    alone = [line for line in log if line["memory"] == LARGE and line["size"] > 9]
    assert max(line["done"] for line in log if line["memory"] == SMALL) == 6
    assert [len(line["ids"]) for line in alone][-4:] == [48, 48, 48, 8]
    assert_trained_as_one_process(tmp_path)
    a100, v100 = ({"ray.io/accelerator-type": name} for name in ("A100", "V100"))
    elastic = {"ray.io/accelerator-type": "in(A100,V100)"}
    assert found["selectors"] == [[a100, v100], [{"gpu": "a100-40"}, v100], elastic]


def test_the_example_runs() -> None:
    printed = run(EXAMPLES / "train_ray.py")
    assert re.search(r"split \(\d+, \d+\) = \d+ samples per forward", printed)
    loss = re.search(r"^loss (\d\.\d+), the checkpoint is in ", printed, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 4.0  # before training it is above ln(90), which is 4.5
