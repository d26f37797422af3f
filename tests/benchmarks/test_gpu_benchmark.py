"""The script for a GPU machine: every stage runs on an emulated device, and a failing stage ends only itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import emulated
import pytest
from folders import BENCHMARKS, ROOT
from marks import for_release

sys.path.insert(0, str(BENCHMARKS))
import gpu

SLEEPS = "import time; time.sleep(600)"


def child(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


@pytest.mark.parametrize(
    ("code", "limit_s", "status"),
    [("pass", 60, "done"), ("raise SystemExit(2)", 60, "crashed"), (SLEEPS, 0, "out of time")],
)
def test_how_a_stage_ends(code, limit_s, status):
    process = child(code)
    assert gpu._status_of(process, time.monotonic() + limit_s) == status
    assert process.poll() is not None


def test_every_predicted_setting_was_predicted():
    gpus = json.loads(gpu.PREDICTIONS.read_text(encoding="utf-8"))["gpus"]
    assert list(gpus) == ["H100-80GB", "H200"]
    for known in gpus.values():
        assert len(known) == 19
        assert [name for name, one in known.items() if "error" in one] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(emulated.wanted(), reason="starts its own emulated devices")
@pytest.mark.parametrize("names", [("doctor",), for_release([stage.name for stage in gpu.STAGES])])
def test_stages_end_on_an_emulated_device(names, tmp_path):
    try:
        emulated.built_library()
    except emulated.NoCompiler as error:
        pytest.skip(str(error))
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--small", "--budget-factor", "20", "--limit-s", "1700"]
    command += ["--only", *names]
    environment = {**os.environ, "EMULATED_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True, check=False
    )
    found = json.loads(output.read_text(encoding="utf-8"))
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert list(stages) == list(names), done.stderr[-2000:]
    assert {name: stage["status"] for name, stage in stages.items() if stage["status"] != "done"} == {}, done.stdout
    assert [name for name, stage in stages.items() if not stage["findings"]] == []
    findings = [finding for stage in stages.values() for finding in stage["findings"]]
    assert [finding for finding in findings if finding["verdict"] == "error"] == []
    of_ranks = stages["ranks"]["findings"] if "ranks" in stages else []
    assert [finding for finding in of_ranks if finding["verdict"] != "holds"] == []
