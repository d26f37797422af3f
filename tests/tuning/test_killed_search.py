"""A killed search resumes: it repeats no finished trial, and ends with the same plan."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from folders import TESTS

SCRIPT = """
import json, sys
from autosplit import tune
from autosplit.tuning import session
from autosplit.solve.trial import configuration_of
sys.path.insert(0, {tests!r})
from workloads import char_gpt

real = session.Session._evaluate

def evaluate(self, number, configuration):
    c = configuration
    with open({log!r}, "a") as log:
        log.write(json.dumps([c.gpu0_bsz, c.batch_size, c.accumulation_steps]) + "\\n")
    return real(self, number, configuration)

session.Session._evaluate = evaluate
plan = tune(
    char_gpt(), devices="sim:1xRTX3090@250MiB+1xRTX2080Ti@200MiB", effective_batch_size=300, storage={storage!r},
    profile="off", n_trials=16, seed=5,
)
plan.save({plan!r})
"""


def begun(folder: Path, *, storage: Path) -> subprocess.Popen:
    """Start a tuning in a new process that records every configuration that it runs."""
    script = SCRIPT.format(
        tests=str(TESTS),
        log=str(folder / "log"),
        storage=f"sqlite:///{storage}",
        plan=str(folder / "plan.json"),
    )
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", script])


def logged(folder: Path) -> list[tuple[int, ...]]:
    log = folder / "log"
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def finished(storage: Path) -> set[tuple[int, ...]]:
    """Return the configurations of the study's trials. A completed tuning keeps none."""
    if not storage.exists():
        return set()
    names = optuna.get_all_study_names(f"sqlite:///{storage}")
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    studies = [optuna.load_study(study_name=name, storage=f"sqlite:///{storage}") for name in names]
    kept = [
        trial
        for study in studies
        for trial in study.get_trials(states=states)
        if trial.number >= study.user_attrs.get("ended_at", 0)
    ]
    return {tuple(trial.params[key] for key in ("gpu0_bsz", "batch_size", "accumulation_steps")) for trial in kept}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments_it_repeats_nothing_and_ends_at_the_same_plan(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert begun(whole, storage=whole / "study.db").wait() == 0
    moments, storage = random.Random(0), parts / "study.db"
    killed, code = 0, None
    while code is None:
        before, running = finished(storage), len(logged(parts))
        process = begun(parts, storage=storage)
        # Kill it in its ceilings before any trial, then in later trials. The last run is not killed.
        wanted = running + moments.randrange(4)
        while killed < 4 and process.poll() is None and len(logged(parts)) < wanted:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.2))
        if killed < 4 and process.poll() is None:
            process.kill()
            killed += 1
        status = process.wait()
        code = None if status == -signal.SIGKILL else status
        assert not before & set(logged(parts)[running:]), "a finished trial was run again"
    assert code == 0
    assert killed > 0
    ended, uninterrupted = (json.loads((folder / "plan.json").read_text()) for folder in (parts, whole))
    assert ended["trials"] == uninterrupted["trials"]
    trials, ceilings = (note for note in ended["notes"] if note["kind"].endswith("-from-storage"))
    assert trials["text"].startswith(f"{len(before)} of {len(ended['trials'])} trials ")
    assert ceilings["kind"] == "ceilings-from-storage"
    ended["notes"] = [note for note in ended["notes"] if note not in (trials, ceilings)]
    for plan in (ended, uninterrupted):
        del plan["checks"]  # the number of samples depends on the machine's speed
    assert ended == uninterrupted
