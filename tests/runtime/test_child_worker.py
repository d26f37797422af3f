"""Real steps in a separate process, and a probe whose process dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import emulated
import pytest
import torch
from deadly import dead_on_arrival, deadly
from marks import for_release
from noted import kinds
from raised import raises
from workloads import small

from autosplit.accelerators import accelerator_kind
from autosplit.devices.spec import parse_devices
from autosplit.errors import AutosplitError, InputError, UserCodeError
from autosplit.oom import OutOfMemoryError
from autosplit.probe import gradient_runs, prober, request
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.runtime import child_process
from autosplit.runtime import child_worker as isolated
from autosplit.runtime.child_process import ChildLostError, LostCauseError
from autosplit.runtime.child_worker import ChildWorker, StepLostError
from autosplit.runtime.prepare import Built, build, prepare
from autosplit.runtime.protocol import StepShape
from autosplit.solve import optuna_search
from autosplit.tuning.tune import tune

CPU = parse_devices("cpu:1MiB")
CAPACITIES = (CPU[0].capacity_bytes,)


def rank(n: int) -> StepShape:
    return StepShape(((n,),), "rank")


def child_worker_of(source, devices, capacities_bytes, closing):
    return prepare(Built(source, small()), devices, capacities_bytes, closing, largest_batch=512, isolate=True).worker


@pytest.fixture
def start():
    """Start the process for a workload's steps."""
    with ExitStack() as closing:
        yield lambda source: child_worker_of(source, CPU, CAPACITIES, closing)
    assert multiprocessing.active_children() == []


# Real processes


@pytest.mark.slow
def test_it_measures_what_is_measured_here_and_goes_on_after_a_death(start):
    source = partial(deadly, "kill", 100)
    with ExitStack() as closing:
        here = prepare(build(source, CPU), CPU, CAPACITIES, closing, largest_batch=512).worker
        there = start(source)
        assert there.exact == here.exact
        assert [there.peaks(rank(n)) for n in (4, 9)] == [here.peaks(rank(n)) for n in (4, 9)]
        assert there.measure(rank(4), budget_s=0.01).seconds > 0
        with pytest.raises(StepLostError, match=r"100 samples was killed by SIGKILL"):
            there.peaks(rank(100))
        assert there.peaks(rank(99)) == here.peaks(rank(99))
        assert len(there.notes) == 1


@pytest.mark.slow
def test_a_death_before_the_first_step_is_no_lack_of_memory(start):
    with raises(AutosplitError) as told:
        start(dead_on_arrival).peaks(rank(4))
    assert not isinstance(told.value, OutOfMemoryError)


def test_what_can_not_be_sent_is_refused():
    with raises(InputError):
        tune(small(loss_fn=lambda y, _: y.mean()), devices="cpu:1MiB", isolate=True, profile="off")


@pytest.mark.slow
def test_the_live_model_stays_where_it_is(start):
    """multiprocessing's own pickling would move its tensors to shared memory."""
    workload = small(loss_fn=torch.nn.functional.cross_entropy)
    before = {name: tensor.data_ptr() for name, tensor in workload.model.state_dict(keep_vars=True).items()}
    start(workload).peaks(StepShape(((4,),)))
    after = workload.model.state_dict(keep_vars=True)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before
    assert not any(tensor.is_shared() for tensor in after.values())


# The worker's rules, with a fake process


class FakeChild:
    """Returns prepared results, and records its calls."""

    def __init__(self, make):
        self.answers, self.calls, self.starts, self.takes_s = [], [], [], 0.0
        FakeChild.last = self

    def start(self):
        pass

    def close(self):
        pass

    def get_ready(self, limit_s):
        self.starts.append(limit_s)

    def call(self, name, *args, limit_s):
        if name == "capacities":
            return 2**20, 2**20
        self.calls.append((name, *args, limit_s))
        clock.now += self.takes_s
        answer = self.answers.pop(0) if self.answers else (1,)
        if isinstance(answer, BaseException):
            raise answer
        return answer, 1


class clock:
    now = 1000.0

    @staticmethod
    def monotonic():
        return clock.now


KILLED = "was killed by SIGKILL"


def killed():
    return ChildLostError(KILLED)


def hung():
    return ChildLostError("did not answer within 10 s and was stopped", hung=True)


@pytest.fixture
def worker(monkeypatch):
    """A worker of two devices with a fake process and a stopped clock."""
    monkeypatch.setattr(isolated, "Child", FakeChild)
    monkeypatch.setattr(isolated, "time", clock)
    clock.now = 1000.0

    def of(deadline_s=None):
        devices = parse_devices("cpu:1MiB,cpu:1MiB")
        made = ChildWorker(lambda: None, devices, deadline_s=deadline_s)
        return made, FakeChild.last

    return of


def limits(child):
    return [call[-1] for call in child.calls]


def test_what_a_process_died_of_is_not_run_again(worker):
    apart, child = worker()
    child.answers = [(1,), killed()]
    apart.peaks(rank(4))
    for _ in range(2):
        with pytest.raises(StepLostError, match=r"8 samples was killed by SIGKILL"):
            apart.peaks(rank(8))
    assert len(child.calls) == 2
    apart.measure(rank(8), budget_s=1.0)  # a second call gets a second chance


@pytest.mark.parametrize(
    ("split", "device", "index"), [((0, 8), "cpu:1", 1), ((8, 0), "cpu:0", 0), ((8, 4), None, None)]
)
def test_a_lost_step_names_its_device_where_that_is_known(worker, split, device, index):
    apart, child = worker()
    child.answers = [killed()]
    with pytest.raises(OutOfMemoryError) as caught:
        apart.peaks(StepShape((split,)))
    assert (caught.value.device, caught.value.device_index) == (device, index)
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_a_new_process_may_start_its_devices_and_copy_the_model_there(worker):
    """After a hang, the next process had 3 s for its first call. CUDA's start and a large copy take longer."""
    apart, child = worker()
    apart.devices = tuple(replace(device, kind="cuda") for device in apart.devices)
    child.takes_s, child.answers = 0.01, [(1,), hung()]
    apart.peaks(rank(4))
    with pytest.raises(StepLostError):
        apart.peaks(rank(64))
    apart.peaks(rank(32))
    apart.peaks(rank(33))
    assert limits(child) == [600, 600, 10, 3]


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason=f"torch {torch.__version__} has no fp32_precision (2.9 has)"
)
def test_what_a_process_set_of_torch_holds_in_the_other():
    """torch rejects its old float32 precision switch after the new switch was used. No process could start."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        settings = isolated._settings()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    try:
        isolated._take_over(settings)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize(
    ("change", "undo", "seen"),
    [
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
            torch.is_deterministic_algorithms_warn_only_enabled,
        ),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            lambda: not torch.backends.cuda.flash_sdp_enabled(),
        ),
        (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1), lambda: torch.get_num_threads() == 2),
    ],
)
def test_switches_of_kernels_hold_in_the_other_process(change, undo, seen):
    try:
        change()
        settings = isolated._settings()
        undo()
        assert not seen()
        isolated._take_over(settings)
        assert seen()
    finally:
        undo()


# Conversion of errors in the process


class Failing:
    """A worker on a GPU whose steps raise the next prepared error."""

    devices = (replace(CPU[0], kind="cuda", index=1),)
    steps = 0

    def __init__(self, *errors):
        self.errors = list(errors)

    def peaks(self, shape):
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return (1,)


def served(monkeypatch, *errors, is_lost=False):
    """Serve a worker here. Its GPU answers or not."""

    def synchronize(index):
        assert index == 1
        if is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return isolated._Served(partial(Failing, *errors), isolated._settings())


def test_an_error_after_which_cuda_answers_no_more_costs_the_process(monkeypatch):
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")
    with pytest.raises(
        LostCauseError, match=r"^lost the CUDA device: RuntimeError: CUDA error: device-side assert triggered$"
    ):
        served(monkeypatch, error, is_lost=True).run("peaks", (rank(4),), {})


def test_every_way_to_run_out_of_memory_is_one(monkeypatch):
    errors = (RuntimeError("CUDA error: out of memory"), MemoryError(), RuntimeError("std::bad_alloc"))
    worker = served(monkeypatch, *errors)
    for _ in errors:
        with pytest.raises(OutOfMemoryError, match=r"^Out of memory: "):
            worker.run("peaks", (rank(4),), {})


def test_what_may_mean_memory_means_it_after_a_step_that_ran(monkeypatch):
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    worker = served(monkeypatch, error, None, error)
    with pytest.raises(RuntimeError) as caught:
        worker.run("peaks", (rank(4),), {})
    assert caught.value is error
    worker.run("peaks", (rank(4),), {})
    with pytest.raises(OutOfMemoryError):
        worker.run("peaks", (rank(4),), {})


@pytest.mark.gpu
def test_a_failed_assertion_in_a_kernel_costs_one_call():
    devices = parse_devices(f"{accelerator_kind()}:0")
    with ExitStack() as closing:
        worker = child_worker_of(partial(deadly, "kernel assertion", 64), devices, (2**30,), closing)
        before = worker.peaks(rank(4))
        with pytest.raises(StepLostError, match=f"lost the {accelerator_kind().upper()} device"):
            worker.peaks(rank(64))
        assert worker.peaks(rank(4)) == before


@pytest.mark.gpu
@pytest.mark.skipif(accelerator_kind() != "emu", reason="counts contexts, which only emulated devices tell")
def test_the_other_processs_context_is_no_room_for_its_steps():
    """Free memory before CUDA started counted as available. On small devices that took the whole reserve."""
    device_bytes, context_bytes, reserve_bytes = 160 * 2**20, 48 * 2**20, 2**20
    before = emulated.library.emu_context_bytes()
    with emulated.memory(device_bytes):
        emulated.set_context_bytes(context_bytes)
        try:
            torch.emu.mem_get_info(0)  # this process has one, too
            torch.emu.empty_cache()
            free_bytes = parse_devices("emu:0")[0].capacity_bytes
            found = find_ceiling(partial(deadly, "nothing"), "emu:0", reserve=reserve_bytes, isolate=True)
        finally:
            emulated.set_context_bytes(before)
    assert found.capacity_bytes == free_bytes - context_bytes - reserve_bytes


# Tuning and probing whose process dies

ARGUMENTS = {"devices": "cpu:80KiB", "effective_batch_size": 256, "n_trials": 1, "profile": "off", "isolate": True}


@pytest.mark.slow
def test_tuning_apart_finds_what_tuning_here_finds():
    source = partial(deadly, "nothing")
    apart, here = tune(source, **ARGUMENTS), tune(source, **{**ARGUMENTS, "isolate": False})
    assert apart.ceilings == here.ceilings
    # Times differ between runs, and so do the notes about them.
    notes = [[note for note in plan.notes if note.kind != "times-disagree"] for plan in (apart, here)]
    assert notes[0] == notes[1]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", for_release("exit"), "host memory"])
def test_tuning_finds_the_largest_batch_that_a_process_survives(end):
    plan = tune(partial(deadly, end, 40), **ARGUMENTS)
    assert plan.ceilings == (39,)
    assert plan.batch_size <= 39
    assert all(trial.failure is None for trial in plan.trials)
    assert ("process-lost" in kinds(plan.notes)) is (end != "host memory")


@pytest.mark.slow
@pytest.mark.parametrize("find", [tune, find_ceiling])
@pytest.mark.parametrize(("end", "message"), [("raise", "ZeroDivisionError: boom"), ("sys.exit", "SystemExit: 3")])
def test_what_the_users_code_raises_is_theirs(find, end, message):
    keywords = ARGUMENTS if find is tune else {"device": "cpu:80KiB", "isolate": True}
    with pytest.raises(UserCodeError, match=message) as caught:
        find(partial(deadly, end, 10), **keywords)
    assert "deadly.py" in caught.value.frames[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_that_is_killed_at_any_call_costs_that_call(monkeypatch):
    """Each tuning ends with a plan, or with an error that names the process. Nothing is left behind."""
    names: list[str] = []
    killed: list[str] = []
    place = 0
    real = child_process.Child.call

    def call(child, name, *args, limit_s):
        names.append(name)
        if len(names) == place:
            killed.append(name)
            child.get_ready(limit_s)
            os.kill(child.pid, signal.SIGKILL)
        return real(child, name, *args, limit_s=limit_s)

    monkeypatch.setattr(child_process.Child, "call", call)
    workload = deadly("nothing")
    before = [parameter.clone() for parameter in workload.model.parameters()]
    tune(workload, **ARGUMENTS)
    count, ended = len(names), []
    assert {"capacities", "run", "ask"} <= {*names}
    for place in (1, 2, 3, 5, count // 2, 3 * count // 4):  # the last calls depend on the measured times
        names.clear()
        killed.clear()
        try:
            plan = tune(workload, **ARGUMENTS)
        except AutosplitError as error:
            ended.append(str(error))
        else:
            assert {"process-lost", "not-checked"} & {note.kind for note in plan.notes}, place
        assert len(killed) == 1, place
        assert multiprocessing.active_children() == []
        assert all(map(torch.equal, workload.model.parameters(), before))
    assert len(ended) <= 1, "only a process without a workload ends the tuning"
    assert all("killed by SIGKILL" in error for error in ended)


@pytest.fixture
def only_hanging_takes_time(monkeypatch, tmp_path):
    """Let time limits count only the time of a step that hangs, and let that time pass at once."""
    now_s, wait = 0.0, child_process.wait

    def waited(objects, limit_s):
        nonlocal now_s
        hangs = any((tmp_path / str(child.pid)).exists() for child in multiprocessing.active_children())
        ready = wait(objects, 0 if hangs else limit_s)
        now_s += limit_s if hangs and not ready else 0.0
        return ready

    monkeypatch.setenv("HANGING_FOLDER", str(tmp_path))
    monkeypatch.setattr(child_process, "wait", waited)
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=time.perf_counter)
    for module in (child_process, isolated, gradient_runs, optuna_search, prober, request):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.slow
def test_a_probe_that_hangs_ends_with_its_time_limit(only_hanging_takes_time):
    ceiling = find_ceiling(partial(deadly, "hang", 40), "cpu:80KiB", isolate=True, time_limit_s=24)
    assert ceiling.batch_size == 39
    assert "process-lost" in kinds(ceiling.notes)
    assert only_hanging_takes_time.monotonic() <= 24


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_workload_that_always_dies_is_told_of(end):
    with pytest.raises(AutosplitError, match="died in each of its first 3 calls"):
        tune(partial(deadly, end, 1), **ARGUMENTS)


@pytest.mark.slow
def test_hanging_steps_end_with_the_time_limit(only_hanging_takes_time):
    with raises(AutosplitError, "The time limit is over and 5 steps have hung"):
        tune(partial(deadly, "hang", 40), **ARGUMENTS, time_limit_s=20)
    assert only_hanging_takes_time.monotonic() < 30
