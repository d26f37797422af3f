"""Several processes tune the same workload: one searches, and all get its plan. Killed processes leave nothing.

Importing torch takes seconds, so one process imports it and forks the others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from events import until
from noted import noted
from ranks import once
from saved_profiles import saved_profiles

from autosplit.plan.plan import Plan

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

COUNT = 8
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
    from autosplit.tuning import session

    real = session.search

    def search(*args: Any, **options: Any) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        until(after)
        real(*args, **options)

    session.search = search
    try:
        yield
    finally:
        session.search = real


def searches(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------- scenarios, in a forking process


def eight_at_once(folder: Path) -> Any:
    """Start the processes together, and record their plans."""
    gate = os.pipe()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            os.read(gate[0], 1)
            heard: list[str] = []

            def hear(progress: Any) -> None:
                heard.append(f"{progress.stage}: {progress.message}")
                if progress.stage == "waiting":
                    (folder / "waiting").touch()

            plan = tuned(progress=hear)
            (folder / f"{number}.json").write_text(plan.to_json())
            (folder / f"{number}.heard").write_text("\n".join(heard))

        return run

    # The search begins once another process waits for it.
    with counting_searches(folder / "searches", after=(folder / "waiting").exists):
        pids = [forked(work(number)) for number in range(COUNT)]
        os.write(gate[1], b"x" * COUNT)
        codes = [ended(pid) for pid in pids]
    return {"codes": codes, "pids": pids, "searched": searches(folder / "searches")}


def a_holder_that_fails(folder: Path) -> Any:
    """Kill a searching process, interrupt the next, and let a third fail. Each time the next waiter tunes."""
    from autosplit.tuning import session

    real, told = session.search, folder / "begun"

    def hanging(*args: Any, **options: Any) -> None:
        begun = len(searches(told))
        with told.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if begun in {0, 1}:
            time.sleep(600)
        if begun == 2:
            raise ValueError("a bug")
        real(*args, **options)

    session.search = hanging

    def run() -> None:
        try:
            plan = tuned(name="fails")
        except KeyboardInterrupt:
            os._exit(4)
        except ValueError:
            os._exit(5)
        assert len(plan.trials) >= 1

    pids, codes = [], []
    for number in range(4):
        pids.append(forked(run))
        if number == 0:
            until(lambda: len(searches(told)) == 1)
    order = pids[:1]
    os.kill(pids[0], signal.SIGKILL)
    codes.append(ended(pids[0]))
    until(lambda: len(searches(told)) == 2)
    order.append(searches(told)[1])
    os.kill(order[1], signal.SIGINT)
    codes.append(ended(order[1]))
    rest = [pid for pid in pids if pid not in order]
    codes += [ended(pid) for pid in rest]
    session.search = real
    return {"codes": codes, "begun": len(searches(told))}


def interrupted_while_waiting(folder: Path) -> Any:
    """Press Ctrl-C in a waiting command. The process that it waits for continues."""
    from autosplit.cli.main import main
    from autosplit.tuning import session

    script = folder / "script.py"
    script.write_text(
        "import torch\nfrom autosplit import Workload\n"
        "workload = Workload(torch.nn.Linear(4, 1), torch.zeros(4, 4), optimizer=torch.optim.SGD)\n"
    )
    arguments = ["tune", str(script), "--devices", "sim:1xRTX3090", "--effective-batch-size", "16", "--n-trials", "2"]
    real, go_on, said = session.search, folder / "go on", folder / "said"

    def slow(*args: Any, **options: Any) -> None:
        (folder / "searching").touch()
        until(go_on.exists)
        real(*args, **options)

    def waiter() -> None:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 2)
        os._exit(main(arguments))

    session.search = slow
    holder = forked(lambda: os._exit(main([*arguments, "--json"])))
    until((folder / "searching").exists)
    waiting = forked(waiter)
    until(lambda: said.exists() and "Waiting for its plan" in said.read_text())
    os.kill(waiting, signal.SIGINT)
    code = ended(waiting)
    go_on.touch()
    session.search = real
    return {"waiter": code, "holder": ended(holder), "holder_pid": holder, "said": said.read_text()}


def threads(folder: Path) -> Any:
    """Tune the same workload in threads of one process."""
    plans: list[Plan] = []
    with counting_searches(folder / "threads"):
        begun = [threading.Thread(target=lambda: plans.append(tuned(name="threads"))) for _ in range(3)]
        for one in begun:
            one.start()
        for one in begun:
            one.join()
    bare = [replace(plan, notes=()).to_dict() for plan in plans]
    return {"plans": len(plans), "equal": bare[0] == bare[1] == bare[2], "searched": len(searches(folder / "threads"))}


def turns_and_time_outs(_folder: Path) -> Any:
    """Keep the lock in another process, and record the processes that wait for it."""
    from autosplit.profiles import store as profiles
    from autosplit.profiles.tuning_lock import Turn
    from autosplit.tuning import recall as recalling

    name = "held"
    tuned(name=name)
    ((path, _),) = [(path, plan) for path, plan in saved_profiles() if plan and plan.request["name"] == name]
    ready, end = os.pipe(), os.pipe()

    def hold() -> None:
        with Turn(profiles.turn_path(path.stem), limit_s=9.0, tell=print) as turn:
            turn.wait()
            os.write(ready[1], b"x")
            os.read(end[0], 1)

    holder = forked(hold)
    os.read(ready[0], 1)
    found = {"auto": tuned(name=name).notes[0].kind, "off": len(tuned(name=name, profile="off").notes)}
    real, recalling.wait_limit_s = recalling.wait_limit_s, lambda _remaining_s: 0.3
    before = path.stat().st_ino
    found["refresh"] = tuned(name=name, profile="refresh").notes[0].text
    found["replaced"] = path.stat().st_ino != before
    found["holder"] = holder
    recalling.wait_limit_s = real
    os.write(end[1], b"x")
    ended(holder)
    return found


def kills(folder: Path) -> Any:
    """Kill processes at random moments while they tune again or write. Check their files afterwards."""
    from autosplit.profiles import store as profiles
    from autosplit.profiles.tuning_lock import Turn

    moments = random.Random(0)
    begun_s = time.monotonic()
    old = tuned(name="killed", profile="refresh")
    took_s = time.monotonic() - begun_s
    ((path, _),) = saved_profiles()
    killed, waited, most_left, versions = 0, [], 0, set()

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
        with Turn(profiles.turn_path(path.stem), limit_s=0.0, tell=print) as turn:
            turn.wait()
            waited.append(not turn.held)
        profiles._sweep(path, 0.0)
        left = sorted(found.name for found in path.parent.iterdir())
        most_left = max(most_left, len(left))
    again = tuned(name="killed")
    return {
        "killed": killed,
        "stale": sum(waited),
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


@pytest.mark.slow
def test_one_of_eight_searches_and_all_have_its_plan(tmp_path):
    found = found_in("eight_at_once", run_apart("eight_at_once", tmp_path, 280))
    tmp_path = tmp_path / "eight_at_once"
    assert found["codes"] == [0] * COUNT
    assert len(found["searched"]) == 1
    plans = [Plan.load(tmp_path / f"{number}.json") for number in range(COUNT)]
    assert len({replace(plan, notes=()).to_json() for plan in plans}) == 1
    heard = {pid: (tmp_path / f"{number}.heard").read_text() for number, pid in enumerate(found["pids"])}
    searcher = found["searched"][0]
    assert "waiting" not in heard.pop(searcher)
    others = [text for text in heard.values() if text]
    assert all(text.count("waiting: ") == 1 for text in others)
    assert any(f"waiting: Process {searcher} has been tuning the same workload since " in text for text in others)
    assert sum(plan.notes[0].kind == "from-profile" for plan in plans) == COUNT - 1


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> Path:
    names = "a_holder_that_fails interrupted_while_waiting threads turns_and_time_outs kills"
    return once(tmp_path_factory, "tuning_at_once", lambda folder: run_apart(names, folder, 580))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_when_a_holder_is_killed_interrupted_or_fails_the_next_one_tunes(scenarios):
    found = found_in("a_holder_that_fails", scenarios)
    assert found["codes"][0] == -signal.SIGKILL
    assert found["codes"][1] == 4
    assert sorted(found["codes"][2:]) == [0, 5]
    assert found["begun"] == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_while_waiting_is_exit_code_4_and_the_holder_goes_on(scenarios):
    found = found_in("interrupted_while_waiting", scenarios)
    assert (found["waiter"], found["holder"]) == (4, 0)
    notice, *rest = found["said"].splitlines()
    assert notice.startswith(f"Process {found['holder_pid']} has been tuning the same workload since ")
    assert notice.endswith(". --profile off does not wait.")
    assert rest == ["error: The command was interrupted before any plan was found. Run it again."]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_of_one_process_share_a_search(scenarios):
    assert found_in("threads", scenarios) == {"plans": 3, "equal": True, "searched": 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_who_waits_and_for_how_long(scenarios):
    found = found_in("turns_and_time_outs", scenarios)
    assert found["auto"] == "from-profile"  # a valid plan needs no wait
    assert found["refresh"].startswith(f"Process {found['holder']} has been tuning the same workload since ")
    assert found["refresh"].endswith("This process stopped waiting at its time limit, and tuned the workload itself.")
    assert found["replaced"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments_they_leave_a_whole_profile_and_no_lock(scenarios):
    found = found_in("kills", scenarios)
    assert found["killed"] >= 50
    assert found["stale"] == 0
    assert found["hit"]
    key = found["left"][0].partition(".")[0]
    assert found["left"] == [f"{key}.json", f"{key}.tuning.lock"]
    assert found["versions"] > 3  # some were killed after they had replaced the file
