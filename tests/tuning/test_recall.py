"""A saved plan after changes: other GPUs, less memory, an unusable cache, another name."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpus import GIB, FakeCuda, cards, stand_in
from handmade import changed_plan, changed_seats
from marks import slow
from noted import kinds
from raised import raises
from saved_profiles import saved_profiles
from torch import nn
from workloads import with_loss

from autosplit.cli.main import main
from autosplit.devices import device as devices
from autosplit.devices import spec as specs
from autosplit.devices.accelerator import Found
from autosplit.devices.spec import parse_devices
from autosplit.errors import InputError
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.solve_again import resolve
from autosplit.probe import request
from autosplit.probe.gradient_check import not_checked
from autosplit.profiles import key
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey
from autosplit.profiles.store import NOT_SAVED
from autosplit.runtime import prepare as staging
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.protocol import Measurement, StepMemory, StepShape
from autosplit.solve.change import Change
from autosplit.solve.memory import Ceiling
from autosplit.tuning import recall as recalling
from autosplit.tuning.process import Process, Processes, alone
from autosplit.tuning.recall import FoundPlan
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

OPTIONS: dict[str, Any] = {"effective_batch_size": 16, "max_batch_size": 16, "n_trials": 1}
SIM: dict[str, Any] = {"devices": "sim:1xRTX3090", **OPTIONS}


@pytest.fixture
def no_search(monkeypatch) -> Callable[[], None]:
    """From here on, allow only the steps of a plan to be measured."""

    def begin() -> None:
        def fail(*_args: object, **_options: object) -> None:
            raise AssertionError("a remembered plan needs no search")

        monkeypatch.setattr("autosplit.tuning.search.Search", fail)

    return begin


def bias() -> Workload:
    """A model with almost nothing to trace."""
    return Workload(nn.Linear(4, 1), torch.zeros(4, 4), optimizer=torch.optim.SGD)


def wide() -> Workload:
    """A model whose samples take more memory than its parameters."""
    model = nn.Sequential(nn.Linear(4, 512), nn.GELU(), nn.Linear(512, 1))
    return Workload(model, torch.zeros(4, 4), optimizer=torch.optim.SGD)


def kept_plan() -> Plan:
    ((_, plan),) = saved_profiles()
    assert plan is not None
    return plan


# ----------------------------------------------------------------------------------------------------- other machines


class TwinWorker(CpuWorker):
    """Runs the steps of fake GPUs on the CPU, and measures peaks like a GPU."""

    ran: list[tuple[tuple[int, ...], ...]]
    most_samples = 1000

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        self.ran.append(shape.splits)
        if max(map(max, shape.splits)) > self.most_samples:
            raise OutOfMemoryError("cuda:0 ran out of memory", device="cuda:0", device_index=0)
        peaks = super().peaks(shape)
        if any(peak > most for peak, most in zip(peaks, self.capacities_bytes, strict=True)):
            raise OutOfMemoryError("a card ran out of memory", device="cuda:0", device_index=0)
        return peaks

    def memory(self, shape: StepShape) -> StepMemory:
        peaks = self.peaks(shape)
        return StepMemory(peaks, peaks)

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        peaks = self.peaks(shape)
        return replace(super().measure(shape, budget_s=budget_s), peak_bytes=peaks)


@pytest.fixture
def twins(monkeypatch) -> Callable[..., list[Any]]:
    """Act as a machine with two GPUs. Called again, act as an identical machine except for the given changes."""
    ran: list[tuple[tuple[int, ...], ...]] = []

    def local_worker(found: Any, capacities_bytes: Any, workload: Workload, most: int, closing: Any) -> TwinWorker:
        trainee = staging.training_copy(workload, device=torch.device("cpu"))
        closing.callback(trainee.restore)
        worker = TwinWorker(found, capacities_bytes, trainee, most)
        worker.ran = ran
        return worker

    def be(serial: int, driver: str = "580", others: int = 0) -> list[Any]:
        two = cards("NVIDIA A100", "NVIDIA A100")
        for card in two:
            card.uuid, card.others = f"{serial}-{card.uuid}", others
        nvml = SimpleNamespace(nvmlSystemGetDriverVersion=lambda: driver)
        stand_in(monkeypatch, accelerators=lambda kind=None: Found(FakeCuda(two), "cuda"), nvml=lambda: (nvml, ""))
        ran.clear()
        return ran

    monkeypatch.setattr(staging, "_local_worker", local_worker)
    monkeypatch.setattr(key, "_total_bytes", lambda _device: 24 * GIB)
    return be


@pytest.mark.whole
def test_what_was_not_checked_is_said_of_a_remembered_plan_too(monkeypatch, no_search):
    """Once, on a busy machine, a plan was saved without checks forever. It now reports this, and how to get them."""

    def too_dear(_workload, rebuild=None) -> tuple[tuple[()], tuple[Note, ...]]:
        return (), (not_checked("a forward of 4 samples takes over 2 s"),)

    monkeypatch.setattr("autosplit.probe.gradient_check.checks_for", too_dear)
    first = tune(bias, **SIM)
    no_search()
    again = tune(bias, **SIM)
    assert (first.checks, again.checks) == ((), ())
    for plan in (first, again):
        assert any(note.kind == "not-checked" and "takes over 2 s" in note.text for note in plan.notes)
    assert "from-profile" in kinds(again.notes)


def test_a_plan_serves_the_twins_of_its_machine_after_one_step(twins, no_search):
    twins(1)
    first = tune(wide(), devices="cuda", **OPTIONS)
    no_search()
    ran = twins(1)
    again = tune(wide(), devices="cuda", **OPTIONS)
    assert ran == []
    assert again.notes[0].kind == "from-profile"
    ran = twins(2, "590")
    twin = tune(wide(), devices="cuda", **OPTIONS)
    assert [splits[0] for splits in ran] == [first.split]
    said = (
        "The saved plan was confirmed by one step: tuned on other GPUs of the same model (cuda:0, cuda:1); tuned with "
        "driver 580, now 590."
    )
    assert twin.notes[0] == Note("confirmed-by-one-step", said)
    assert (twin.split, twin.samples_per_s, twin.trials) == (first.split, first.samples_per_s, first.trials)
    assert {device.driver for device in twin.devices} == {"590"}
    assert all("GPU-2" in str(device.uuid) for device in twin.devices)
    ran = twins(2, "590")
    assert tune(wide(), devices="cuda", **OPTIONS).notes[0].kind == "from-profile"
    assert ran == []


def test_a_twin_on_which_the_step_does_not_fit_tunes_anew(twins, monkeypatch):
    twins(1)
    first = tune(wide(), devices="cuda", **OPTIONS)
    twins(2)
    most = max(first.split) - 1  # the times of the CPU choose the split, so no number is known beforehand
    monkeypatch.setattr(TwinWorker, "most_samples", most)
    anew = tune(wide(), devices="cuda", **OPTIONS)
    assert max(anew.split) <= most
    assert anew.notes[0].kind == "tuned-again"
    assert "(cuda:0, cuda:1), and one step ran out of" in anew.notes[0].text
    assert kept_plan().split == anew.split


def test_less_free_memory_on_the_cards_is_solved_again_and_confirmed(twins, no_search, monkeypatch):
    twins(1)
    monkeypatch.setattr(devices, "_ACCELERATOR_RESERVE", 0.0)
    first = tune(wide(), devices="cuda", **{**OPTIONS, "effective_batch_size": 512, "max_batch_size": 512})
    peaks = [seat.peak_bytes for seat in first.main.seats]
    no_search()
    ran = twins(1, others=24 * GIB - max(peaks) + 100 * 2**10)
    short = tune(wide(), devices="cuda", **{**OPTIONS, "effective_batch_size": 512, "max_batch_size": 512})
    assert short.notes[0].kind == "less-memory"
    assert "does not fit now (cuda:" in short.notes[0].text
    assert ran
    assert ran[0][0] == short.split
    assert short.split != first.split
    assert short.effective_batch_size == 512
    assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in short.main.seats)
    assert kept_plan().split == first.split
    twins(1)
    assert (
        tune(wide(), devices="cuda", **{**OPTIONS, "effective_batch_size": 512, "max_batch_size": 512}).notes[0].kind
        == "from-profile"
    )


# -------------------------------------------------------------------------------------------------------- less memory


@pytest.fixture
def _steady_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes 1 ms and a sample 1 us. On a busy machine, measured times favoured the smallest batch."""

    def measure(_self: CpuWorker, shape: StepShape, *, budget_s: float) -> Measurement:
        assert budget_s > 0
        return Measurement(1e-3 * len(shape.splits) + 1e-6 * sum(map(sum, shape.splits)), update_s=1e-4)

    monkeypatch.setattr(CpuWorker, "measure", measure)


@pytest.mark.usefixtures("_steady_times")
def test_less_free_memory_of_a_processor_is_solved_again(monkeypatch, no_search):
    options: dict[str, Any] = {"devices": "cpu", "effective_batch_size": 64, "max_batch_size": 64, "n_trials": 3}
    first = tune(wide(), **options)
    path = saved_profiles()[0][0]
    before, peak = path.read_bytes(), first.main.seats[0].peak_bytes
    no_search()
    monkeypatch.setattr(specs, "available_host_bytes", lambda: peak)
    second = tune(wide(), **options)
    assert "cpu may use" in str(second.notes[0])
    assert second.notes[0].kind == "less-memory"
    assert second.batch_size < first.batch_size
    assert second.effective_batch_size == 64
    assert second.main.seats[0].peak_bytes <= second.devices[0].capacity_bytes < peak
    assert second.ddp.split[0] == second.batch_size
    assert path.read_bytes() == before
    assert "less-memory" not in kinds(tune_with_memory(monkeypatch, 2**34, **options).notes)


def tune_with_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int, **options: Any) -> Plan:
    monkeypatch.setattr(specs, "available_host_bytes", lambda: nbytes)
    return tune(wide(), **options)


@pytest.mark.usefixtures("_steady_times")
def test_where_the_fits_have_no_answer_it_is_tuned_anew_and_said_so(monkeypatch):
    options: dict[str, Any] = {"devices": "cpu", "effective_batch_size": 64, "max_batch_size": 64, "n_trials": 1}
    first = tune(wide(), **options)
    ((path, _),) = saved_profiles()
    # A plan of an older version has no fits.
    changed_plan(first, cost=None, notes=()).save(path)
    anew = tune_with_memory(monkeypatch, first.main.seats[0].peak_bytes, **options)
    assert anew.notes[0].kind == "tuned-again"
    assert "no split fits according to its measurements" in anew.notes[0].text
    assert anew.batch_size < first.batch_size
    assert kept_plan().batch_size == anew.batch_size


def request_for(spec: str, effective: int | None, **options: Any) -> request.Request:
    return request.checked_request(devices=parse_devices(spec), effective_batch_size=effective, **options)


@pytest.mark.parametrize(
    ("make", "cards_", "effective", "strategy", "share"),
    [
        *(
            slow(*case)
            for case in (
                (wide, "2xRTX3090", 512, "auto", 0.6),
                (wide, "2xRTX3090", 512, "ddp", 0.6),
                (with_loss, "1xRTX3090+1xRTX2080Ti", 300, "auto", 0.9),
            )
        ),
    ],
)
def test_a_plan_for_less_memory_fits_and_is_about_as_fast_as_one_that_is_tuned_for_it(
    make, cards_, effective, strategy, share
):
    """Simulated: the trace of a step is exact, and a step that does not fit raises."""
    options = {"effective_batch_size": effective, "profile": "off", "strategy": strategy, "max_batch_size": 1024}
    spec = "+".join(f"{one}@{{}}KiB" for one in cards_.split("+"))

    def on(kib: int) -> str:
        return "sim:" + spec.format(*(kib for _ in cards_.split("+")))

    whole = tune(make, devices=on(8000), **options)
    most = max(seat.peak_bytes for seat in whole.main.seats)
    fixed = max(seat.ceiling.fixed_bytes for seat in whole.main.seats)
    kib = int(fixed + share * (most - fixed)) // 1024
    lowered = request_for(on(kib), effective, strategy=strategy, max_batch_size=1024)
    key = ProfileKey({}, {}, {})
    with Process(alone(lowered, {}), lambda _number: make) as process:
        processes = Processes(process)
        processes.ask(Process.build)
        processes.prepare(lowered, key)
        found = FoundPlan(whole, Path("ab12.json"), short="less memory is free")
        again, _ = recalling.confirm_or_solve_again(key, lowered, found, processes)
    assert again is not None
    assert again != whole
    assert all(seat.peak_bytes <= seat.device.capacity_bytes == kib * 1024 for seat in again.main.seats)
    assert again.effective_batch_size == (effective or again.batch_size)
    assert Plan.from_json(again.to_json()) == again
    assert again.explain().sentences
    anew = tune(make, devices=on(kib), **options)
    assert (
        again.samples_per_s >= 0.7 * anew.samples_per_s
    )  # the worst seen was 0.8, for small steps, which fits predict badly


@pytest.mark.whole
def test_a_smaller_plan_leaves_room_for_what_its_line_misses():
    """A linear fit gave 60 samples 448256 of 448265 bytes. The step took 448512, and everything was tuned again."""
    plan = tune(bias(), devices="sim:2xRTX3090", effective_batch_size=64, strategy="ddp", profile="off")
    points = ((32, 274432, False), (64, 473088, False))
    ceiling = Ceiling("sim:0", "rank", 64, "max_batch_size", 75776, 6208, 473088, 2**30, points=points)
    plan = changed_seats(plan, lambda _, seat: replace(seat, ceiling=ceiling))
    again = resolve(plan, Change(capacities_bytes=(448265,) * 2))
    assert again is not None
    assert {*again.ddp.ceilings} == {59}


# -------------------------------------------------------------------------------------------------------------- misses


@pytest.mark.whole
def test_a_plan_of_another_request_under_a_key_is_foreign():
    tune(bias(), **SIM)
    ((path, plan),) = saved_profiles()
    assert plan is not None
    assert plan.request == request_for("sim:1xRTX3090", 16, max_batch_size=16).facts()
    replace(plan, request={**plan.request, "strategy": "ddp"}).save(path)
    assert "it is for another request (strategy differ" in tune(bias(), **SIM).notes[0].text


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.whole
def test_plans_of_several_names_are_kept_apart():
    plans = {name: tune(bias(), **{**SIM, "seed": seed}, name=name) for seed, name in enumerate((None, "a", "ü b"))}
    kept = [plan for _, plan in saved_profiles()]
    assert sorted(str(plan and plan.request["name"]) for plan in kept) == ["None", "a", "ü b"]
    assert {json.loads(plan.to_json())["request"]["name"] for plan in plans.values()} == {None, "a", "ü b"}


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\x1b[31mb", "x" * 65, "\ud800", 7, b"a"])
def test_a_name_that_can_not_be_shown_is_refused(name, cache_dir):
    with raises(InputError, "64"):
        tune(bias(), **SIM, name=name)
    assert not cache_dir.exists()


# ------------------------------------------------------------------------------------------------ unusable caches


@contextmanager
def _without_room() -> Iterator[None]:
    """No file can grow, as on a full disk."""
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def _refusing(code: int, *names: str) -> Iterator[None]:
    """Make system calls on files of the cache fail."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            real = getattr(os, name)

            def call(path: Any, *args: Any, _real: Any = real, **options: Any) -> Any:
                if isinstance(path, (str, Path)) and f"{os.environ['AUTOSPLIT_CACHE_DIR']}/profiles" in str(path):
                    raise OSError(code, os.strerror(code), str(path))
                return _real(path, *args, **options)

            patch.setattr(os, name, call)
        yield


def a_file_in_its_place(cache_dir: Path) -> None:
    cache_dir.write_text("a file where a folder should be")


def in_proc(_: Path) -> None:
    os.environ["AUTOSPLIT_CACHE_DIR"] = "/proc/self/nowhere"


def of_an_unknown_user(_: Path) -> None:
    os.environ["AUTOSPLIT_CACHE_DIR"] = "~nobody-of-this-name/cache"


USELESS = {
    "a file in its place": (a_file_in_its_place, None),
    "in /proc": (in_proc, None),
    "an unknown home": (of_an_unknown_user, None),
    "full": (None, _without_room),
    "read-only": (None, lambda: _refusing(errno.EROFS, "mkdir")),
    "no right to write": (
        lambda path: (path / "profiles").mkdir(parents=True),
        lambda: _refusing(errno.EACCES, "open"),
    ),
}


@pytest.mark.whole
@pytest.mark.skipif(os.name != "posix", reason="by what POSIX systems do")
@pytest.mark.parametrize("name", USELESS)
def test_a_cache_of_no_use_costs_one_note(name, cache_dir, monkeypatch):
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(cache_dir))
    usual = tune(bias(), **SIM, profile="off")
    prepare, within = USELESS[name]
    if prepare is not None:
        prepare(cache_dir)
    with within() if within is not None else _refusing(0):
        plan = tune(bias(), **SIM)
    assert plan.notes[: len(usual.notes)] == usual.notes
    (said,) = plan.notes[len(usual.notes) :]
    assert said.kind == NOT_SAVED
    assert "expected " in said.text.lower()
    assert "\n" not in said.text
    assert replace(plan, notes=(), request={}, checks=()) == replace(usual, notes=(), request={}, checks=())


@pytest.mark.whole
def test_without_a_home_no_folder_is_made_in_this_one(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOSPLIT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # HOME is not set, and the user has no entry
    plan = tune(bias(), **SIM)
    assert plan.notes[-1].kind == NOT_SAVED
    assert "AUTOSPLIT_CACHE_DIR is None and the home directory is unknown" in plan.notes[-1].text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.whole
def test_the_command_line_says_it_in_one_line(cache_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(cache_dir))
    cache_dir.write_text("a file where a folder should be")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom autosplit import Workload\n"
        "workload = Workload(nn.Linear(4, 1), torch.zeros(4, 4), optimizer=torch.optim.SGD)\n"
    )
    arguments = ["tune", str(script), "--devices", "sim:1xRTX3090", "--max-batch-size", "16", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"warning: The plan is not saved: {cache_dir / 'profiles'}")
    assert Plan.from_json(out).batch_size > 0


@pytest.mark.whole
def test_what_a_killed_writer_left_behind_is_removed_by_the_next(cache_dir):
    plan = tune(bias(), **SIM)
    ((path, _),) = saved_profiles()
    left_over = path.with_name(f".{path.name}.0123456789abcdef")
    left_over.write_text("{")
    profiles.store(path.stem, plan)
    assert left_over.exists(), "a writer may be at it"
    os.utime(left_over, (0, 0))
    profiles.store(path.stem, plan)
    assert not left_over.exists()
    assert NOT_SAVED not in kinds(plan.notes)


def test_that_no_gpu_was_found_is_said_to_whoever_named_no_device_and_not_remembered(monkeypatch):
    """The note was saved with the plan. Callers who named the CPU got it, and callers who named no device did not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"max_batch_size": 4, "n_trials": 1}
    model, batch = torch.nn.Linear(4, 4), torch.zeros(4, 4)
    for named in (None, "cpu", None):
        plan = tune(model, batch, compute_loss=lambda model, batch: model(batch).sum(), devices=named, **options)
        assert sum("No GPU is visible" in str(note) for note in plan.notes) == (named is None)


@pytest.mark.whole
def test_ranks_that_begin_to_accumulate_keep_room_for_their_gradients():
    """Equal ranks got 30 of 64 samples in two forwards. The second forward ran out of memory, for the gradients."""
    plan = tune(bias(), devices="sim:2xRTX3090", effective_batch_size=64, strategy="ddp", profile="off")
    points = ((32, 274432, False), (64, 473088, False))
    ceiling = Ceiling("sim:0", "rank", 64, "max_batch_size", 75776, 6208, 473088, 2**30, points=points)
    assert plan.accumulation_steps == 1
    capacity_bytes, gradients_bytes = 265000, 37376
    plan = changed_seats(plan, lambda _, seat: replace(seat, ceiling=ceiling))
    again = resolve(plan, Change(capacities_bytes=(capacity_bytes,) * 2, waiting_bytes=gradients_bytes))
    assert again is not None
    assert again.ddp.accumulation_steps == 2
    for seat in again.ddp.seats:
        needed_bytes = ceiling.bytes_at(seat.samples) + gradients_bytes
        assert seat.peak_bytes == needed_bytes < capacity_bytes
        assert seat.samples <= seat.ceiling.batch_size <= (capacity_bytes - gradients_bytes - 75776) // 6208
