"""Processes that tune the same workload all tune, and one file results. Killed processes leave nothing.

Importing torch takes seconds, so one process imports it and forks the others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from events import until
from noted import kinds, noted
from saved_profiles import saved_profiles

from autosplit.plan.plan import Plan

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

COUNT = 2
KILLS = 60


def workload() -> Any:
    import torch

    from autosplit.workload.workload import Workload

    return Workload(torch.nn.Linear(4, 1), torch.zeros(4, 4), optimizer=torch.optim.SGD)


def tuned(**options: Any) -> Plan:
    from autosplit.tuning.tune import tune

    small: dict[str, Any] = {"devices": "sim:1xRTX3090", "effective_batch_size": 16, "max_batch_size": 16}
    return tune(workload(), **{**small, "n_trials": 2, "progress": lambda _: None, **options})


def forked(run: Callable[[], None]) -> int:
    """Run a function in a new process."""
    pid = os.fork()
    if not pid:
        try:
            run()
        except BaseException:  # noqa: BLE001 (whatever it is, it must not go on as the parent)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def counting_searches(path: Path, *, after: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Append each search's process id to a file. A search begins after a condition holds."""
    from autosplit.tuning import search as searching

    real = searching.search

    def search(*args: Any, **options: Any) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        until(after)
        real(*args, **options)

    searching.search = search
    try:
        yield
    finally:
        searching.search = real


def searches(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------- scenarios, in a forking process


def two_at_once(folder: Path) -> Any:
    """Tune in two processes, and record their plans and the saved ones. No search begins before both processes do."""
    begun = folder / "searches"

    def work(number: int) -> Callable[[], None]:
        return lambda: tuned(seed=number).save(folder / f"{number}.json")

    with counting_searches(begun, after=lambda: len(searches(begun)) == COUNT):
        codes = [ended(pid) for pid in [forked(work(number)) for number in range(COUNT)]]
    left = [path.name for path in saved_profiles()[0][0].parent.iterdir()]
    return {"codes": codes, "left": left, "saved": [plan and plan.to_json() for _, plan in saved_profiles()]}


def kills(folder: Path) -> Any:
    """Kill processes at random moments while they tune again or write. Check their files afterwards."""
    from autosplit.profiles import store as profiles

    moments = random.Random(0)
    begun_s = time.monotonic()
    old = tuned(name="killed", profile="refresh")
    took_s = time.monotonic() - begun_s
    ((path, _),) = saved_profiles()
    killed, versions = 0, set()

    def writer(number: int) -> Callable[[], None]:
        def run() -> None:
            for repeat in range(10_000):
                profiles.store(path.stem, replace(old, notes=noted(f"{number} {repeat} " * 20_000)))

        return run

    def refresher() -> None:
        tuned(name="killed", profile="refresh")

    while killed < KILLS:
        tunes = killed % 3 == 0
        pids = [forked(refresher)] if tunes else [forked(writer(number)) for number in range(2)]
        if not tunes:
            until_replaced(path)
        time.sleep(moments.uniform(0, 1.1 * took_s) if tunes else moments.uniform(0, 0.15))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed += sum(ended(pid) == -signal.SIGKILL for pid in pids)
        plan = Plan.from_json(path.read_bytes())
        versions.add(plan.notes[-1].text[:20] if plan.notes else "")
        assert replace(plan, notes=old.notes) == old, "neither the old profile nor a new one"
        profiles._sweep(path, 0.0)
        left = sorted(found.name for found in path.parent.iterdir())
    again = tuned(name="killed")
    return {
        "killed": killed,
        "left": left,
        "hit": again.notes[0].kind == "from-profile",
        "versions": len(versions),
    }


def until_replaced(path: Path) -> None:
    before = path.stat().st_ino
    until(lambda: path.stat().st_ino != before)


def run_scenarios(names: str, folder: str) -> None:
    """Run scenarios, each with a separate cache, in a process that imports torch before it forks."""
    import torch

    import autosplit.tuning.tune  # noqa: F401

    torch.set_num_threads(1)
    tuned(profile="off")  # what torch loads late
    for name in names.split():
        own = Path(folder, name)
        own.mkdir()
        os.environ["AUTOSPLIT_CACHE_DIR"] = str(own / "cache")
        try:
            found = globals()[name](own)
        except Exception:  # noqa: BLE001 (the test that reads it shows it)
            found = traceback.format_exc()
        Path(folder, f"{name}.json").write_text(json.dumps(found))


def run_apart(names: str, folder: Path, limit_s: float) -> Path:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_tuning_at_once as t; "
    code += f"t.run_scenarios({names!r}, {str(folder)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def found_in(name: str, folder: Path) -> Any:
    found = json.loads((folder / f"{name}.json").read_text())
    assert not isinstance(found, str), found
    return found


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.whole
def test_two_processes_tune_and_one_file_results(tmp_path):
    found = found_in("two_at_once", run_apart("two_at_once", tmp_path, 100))
    assert found["codes"] == [0] * COUNT
    ((saved,), (name,)) = found["saved"], found["left"]
    plans = [Plan.load(tmp_path / "two_at_once" / f"{number}.json") for number in range(COUNT)]
    assert all(plan.complete and plan.trials and "from-profile" not in kinds(plan.notes) for plan in plans)
    assert saved in [plan.to_json() for plan in plans]
    assert name.endswith(".json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments_they_leave_a_whole_profile(tmp_path):
    found = found_in("kills", run_apart("kills", tmp_path, 580))
    assert found["killed"] >= 50
    assert found["hit"]
    (name,) = found["left"]
    assert name.endswith(".json")
    assert found["versions"] > 3  # some were killed after they had replaced the file
