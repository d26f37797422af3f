"""The cache: equal workloads have equal keys, different ones different keys, and no file can do harm."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from handmade import changed_seats
from plans import MIB, make_plan, simulated_plan
from raised import raises
from saved_profiles import saved_profiles
from torch import nn

from autosplit import Workload
from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import ProfileError
from autosplit.plan.layout import Seat
from autosplit.plan.record import with_devices
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey, machine_of, workload_of
from autosplit.profiles.store import find, store
from autosplit.profiles.validity import differing_facts, memory_shortfall

GIB = 2**30
KEY = "0123456789abcdef"
MACHINE = {"devices": [{"kind": "cpu", "name": "cpu", "count": 2}], "torch": "2.13"}
WORKLOAD = {"model": "Net", "parameters": 3}
PLAN = make_plan(machine=MACHINE, workload=WORKLOAD)
WIDTH = 8


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 1, *, trained: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.requires_grad_(trained)
        self.checkpointing = False
        self.mode = "a"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            # A set is a constant whose order changes between processes.
            inputs = layer(inputs) if self.mode in {"a", "b", "c"} else layer(inputs).relu()
        return inputs


@dataclass
class Batch:
    x: torch.Tensor
    scale: int = 1


class HeldLoss:
    """A loss with an attribute that is neither a number nor a string."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()


def build() -> Net:
    return Net(WIDTH)


def workload(model=None, batch=None, **options) -> Workload:
    return Workload(Net() if model is None else model, torch.zeros(4, 8) if batch is None else batch, **options)


def put(content: bytes | str, key: str = KEY) -> Path:
    path = profiles.profiles_folder() / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def search_for(key: str = KEY, machine=MACHINE, described=WORKLOAD) -> profiles.Found:
    return find(key, ProfileKey(machine, described, {}))


def ignored(path: Path, **options) -> str:
    """Check that the file is named and ignored. Return the reason."""
    found = search_for(**options)
    assert found.plan is None
    assert found.path == path
    (note,) = found.notes
    assert note.kind == "profile-ignored"
    assert note.text.startswith(f"The profile {path} was ignored: ")
    assert "expected" in note.text.lower()
    assert ".." not in note.text.replace("...", "")
    assert "\n" not in note.text
    return note.text


class TestMachine:
    def test_free_memory_of_a_gpu_is_not_in_it(self):
        def gpu(free: int, index: int = 0) -> Device:
            return Device("cuda", index, "NVIDIA A100", free, uuid=f"GPU-{free}", driver=str(free))

        some = machine_of([gpu(40 * GIB), gpu(39 * GIB + 900 * MIB, 1)])
        assert some == machine_of([gpu(40 * GIB - 50 * MIB), gpu(40 * GIB + 90 * MIB, 1)])
        assert some["devices"] == [{"kind": "cuda", "name": "NVIDIA A100", "memory_gib": 40, "count": 2}]
        assert some != machine_of([gpu(80 * GIB), gpu(80 * GIB, 1)])

    def test_settings_of_the_allocator_are_in_it(self, monkeypatch):
        """A plan for `sim:` was found again after `expandable_segments` had changed what fits."""
        gpus, cpus = parse_devices("sim:2xL4"), parse_devices("cpu:1GiB")
        before, unchanged = machine_of(gpus), machine_of(cpus)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert machine_of(gpus) == {**before, "allocator": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
        assert machine_of(cpus) == unchanged

    def test_memory_that_others_use_is_not_in_it(self, monkeypatch):
        @dataclass
        class Properties:
            total_memory: int = 40 * GIB

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
        busy, idle = (Device("cuda", 0, "NVIDIA A100", free * GIB) for free in (3, 39))
        assert machine_of([busy]) == machine_of([idle])

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("cpu", "cpu:1GiB"),
            ("cpu:1GiB,cpu:2GiB", "cpu:2GiB,cpu:1GiB"),
            ("sim:1xA100-40GB", "sim:2xA100-40GB"),
            ("sim:1xRTX3090+1xA100-40GB", "sim:1xA100-40GB+1xRTX3090"),
        ],
    )
    def test_kind_capacity_count_and_order_are(self, one, other):
        first, second = (machine_of(parse_devices(spec)) for spec in (one, other))
        assert first != second
        assert ProfileKey(first, {}, {}).digest != ProfileKey(second, {}, {}).digest


def first_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def second_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().mean()


PAIR = (torch.zeros(4, 8), torch.zeros(4, 8))
CHECKPOINTED = Net()
CHECKPOINTED.checkpointing = True
FROZEN_FIRST = Net(depth=2)
FROZEN_FIRST.layers[0].requires_grad_(False)
TRAINED = nn.Linear(8, 8)


class TestWorkload:
    @pytest.mark.parametrize(
        "make",
        [
            workload,
            lambda: workload(build),
            lambda: workload(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=WIDTH)),
            lambda: workload(optimizer=torch.optim.Adam(TRAINED.parameters(), amsgrad=True)),
            lambda: workload(batch=Batch(torch.zeros(4, 8))),
            lambda: workload([Net(), Net()], step=lambda models, optimizers, batch: None),
        ],
    )
    def test_is_the_same_each_time_and_plain_json(self, make):
        first, second = workload_of(make()), workload_of(make())
        assert first == second
        assert json.loads(json.dumps(first)) == first

    @pytest.mark.parametrize(
        "other",
        [
            lambda: workload(Net(depth=2)),
            lambda: workload(Net(trained=False)),
            lambda: workload(CHECKPOINTED),
            lambda: workload(build),
            lambda: workload(batch=torch.zeros(5, 8)),
            lambda: workload(batch={"inputs": torch.zeros(4, 8)}),
            lambda: workload(precision="bf16"),
            lambda: workload(loss_scope="batch"),
            lambda: workload(batch_dim=1),
            lambda: workload(optimizer=torch.optim.SGD),
            lambda: workload(make_batch=lambda n: torch.zeros(n, 8)),
        ],
    )
    def test_differs_where_something_that_matters_does(self, other):
        assert workload_of(workload()) != workload_of(other())

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"loss_fn": first_loss}, {"loss_fn": second_loss}),
            ({"loss_fn": nn.CrossEntropyLoss()}, {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}),
            ({"loss_fn": functools.partial(first_loss)}, {"loss_fn": functools.partial(second_loss)}),
            ({"batch": Batch(torch.zeros(4, 8), 1)}, {"batch": Batch(torch.zeros(4, 8), 2)}),
            (
                {"optimizer": torch.optim.SGD(TRAINED.parameters(), momentum=0.9)},
                {"optimizer": torch.optim.SGD(TRAINED.parameters())},
            ),
        ],
    )
    def test_options_differ(self, one, other):
        first, second = (workload(**{"batch": PAIR, **options}) for options in (one, other))
        assert workload_of(first) != workload_of(second)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((1, 2), (1, 3)),
            ({"rates": [1, 2]}, {"rates": [1, 4]}),
            (nn.functional.relu, nn.functional.gelu),
            (torch.float16, torch.float32),
            (first_loss, second_loss),
            ([nn.Linear(8, 8)], [nn.Linear(8, 80)]),
        ],
    )
    def test_what_objects_and_modules_hold_matters(self, one, other):
        """A loss that contains a network, or a module with another activation, did not change the key."""

        def with_module(held) -> Workload:
            model = Net()
            model.held = held
            return workload(model)

        def with_loss(held) -> Workload:
            return workload(compute_loss=HeldLoss(held))

        def with_constant(held) -> Workload:
            return workload(compute_loss=lambda model, batch: model(batch).sum() * len(vars(held)))

        def with_class(held) -> Workload:
            kind = type("Kind", (HeldLoss,), {"of_class": held})
            return workload(compute_loss=kind(None))

        for make in (with_module, with_loss, with_constant, with_class):
            assert workload_of(make(one)) != workload_of(make(other))
            assert workload_of(make(one)) == workload_of(make(one))

    def test_hooks_and_what_replaces_a_forward_matter(self):
        def hooked(model: nn.Module) -> nn.Module:
            model.register_forward_hook(lambda module, inputs, outputs: outputs.clone())
            return model

        def replaced(model: nn.Module) -> nn.Module:
            model.forward = lambda inputs: inputs * 2
            return model

        def compiled(model: nn.Module) -> nn.Module:
            model._compiled_call_impl = model.forward  # as model.compile() leaves it, which takes seconds
            return model

        made = [make(nn.Linear(8, 8)) for make in (lambda model: model, hooked, replaced, compiled)]
        assert len({json.dumps(workload_of(workload(model))) for model in made}) == len(made)

    def test_on_which_device_a_loss_computes_does_not_matter(self):
        """Each rank has another device, but all describe the same workload."""
        first, second = (workload(compute_loss=HeldLoss(torch.device("cuda", index))) for index in (0, 1))
        assert workload_of(first) == workload_of(second)

    def test_numbers_in_tensors_and_learning_rates_do_not_matter(self):
        torch.manual_seed(5)
        rates = [torch.optim.SGD(TRAINED.parameters(), lr=rate) for rate in (0.1, 0.2)]
        assert workload_of(workload(Net())) == workload_of(workload(Net().eval(), torch.ones(4, 8)))
        assert workload_of(workload(optimizer=rates[0])) == workload_of(workload(optimizer=rates[1]))

    def test_a_constant_that_a_factory_reads_matters(self, monkeypatch):
        before = workload_of(workload(build))
        monkeypatch.setattr(sys.modules[__name__], "WIDTH", 16)
        assert workload_of(workload(build)) != before

    def test_a_static_method_may_be_of_any_kind(self):
        """A static method that is not a Python function, such as torch.dot, raised AttributeError."""

        class Loss:
            combined = staticmethod(torch.dot)

            def __call__(self, outputs, targets):
                return self.combined(outputs.flatten(), targets.flatten())

        batch = (torch.zeros(4, 8), torch.zeros(4, 2))
        of_class, of_function = (workload_of(workload(batch=batch, loss_fn=loss)) for loss in (Loss(), first_loss))
        assert of_class != of_function

    def test_the_code_of_a_class_that_a_factory_names_matters(self, monkeypatch):
        before = workload_of(workload(build)), workload_of(workload())
        monkeypatch.setattr(Net, "forward", lambda self, inputs: self.layers[0](inputs))
        assert workload_of(workload(build)) != before[0]
        assert workload_of(workload()) != before[1]

    def test_what_a_closure_holds_matters(self):
        def factory_of(width: int):
            return lambda: Net(width)

        assert workload_of(workload(factory_of(8))) == workload_of(workload(factory_of(8)))
        assert workload_of(workload(factory_of(8))) != workload_of(workload(factory_of(9)))

    def test_a_factory_is_not_called(self):
        def factory() -> nn.Module:
            raise AssertionError("called")

        described = workload_of(workload(factory))
        assert described["parameters"] is None
        assert "factory" in described["model"]

    def test_models_of_any_kind_are_described(self):
        class Odd(nn.Module):
            def extra_repr(self) -> str:
                raise RuntimeError("no words")

        with torch.device("meta"):
            meta = Net()
        assert workload_of(workload(meta))["parameters"] == 72
        assert workload_of(workload(nn.LazyLinear(3)))["parameters"] is None
        assert workload_of(workload(Odd()))["parameters"] == 0

    def test_an_address_in_a_models_text_does_not_matter(self):
        class Addressed(nn.Module):
            def extra_repr(self) -> str:
                return f"{object()!r}"

        kept = [Addressed(), object(), Addressed()]
        assert workload_of(workload(kept[0])) == workload_of(workload(kept[2]))

    @pytest.mark.slow
    def test_is_the_same_in_every_process(self):
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}; import test_store as t, json\n"
            "w = [t.workload(), t.workload(t.build), t.workload(batch=t.PAIR, loss_fn=t.first_loss)]\n"
            "w.append(t.workload(compute_loss=t.HeldLoss([{'a', 'b', 'c'}, t.torch.relu])))\n"
            "print(json.dumps([t.workload_of(one) for one in w]))"
        )
        here = [workload(), workload(build), workload(batch=PAIR, loss_fn=first_loss)]
        here.append(workload(compute_loss=HeldLoss([{"c", "b", "a"}, torch.relu])))
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
        )
        assert json.loads(run.stdout) == [workload_of(one) for one in here]


class TestKey:
    def test_each_part_counts(self):
        request = {"effective_batch_size": 512, "reserve": None}
        keys = {
            ProfileKey(MACHINE, WORKLOAD, request).digest,
            ProfileKey({**MACHINE, "torch": "2.14"}, WORKLOAD, request).digest,
            ProfileKey(MACHINE, {**WORKLOAD, "parameters": 4}, request).digest,
            ProfileKey(MACHINE, WORKLOAD, {**request, "effective_batch_size": 256}).digest,
            ProfileKey(MACHINE, WORKLOAD, {**request, "name": "mine"}).digest,
        }
        assert len(keys) == 5
        assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


class TestStoreAndFind:
    def test_finds_what_was_stored(self, cache_dir):
        path = store(KEY, PLAN)
        assert path == cache_dir / "profiles" / f"{KEY}.json"
        assert search_for() == profiles.Found(PLAN, path, ())

    def test_the_users_cache_directory_is_the_default(self, monkeypatch):
        monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", "")
        assert profiles.profiles_folder().parent.name.lower().startswith("autosplit")

    def test_a_cache_that_can_not_be_written_is_named(self, cache_dir):
        cache_dir.write_text("a file where a folder should be")
        with raises(ProfileError):
            store(KEY, PLAN)
        assert search_for().plan is None

    def test_processes_that_store_at_once_leave_one_whole_file(self, cache_dir):
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "from dataclasses import replace; from noted import noted; from plans import make_plan\n"
            "from autosplit.profiles.store import store\n"
            f"[store({KEY!r}, replace(make_plan(), notes=noted(sys.argv[1] * 20_000))) for _ in range(10)]"
        )
        writers = [subprocess.Popen([sys.executable, "-c", code, name], env=os.environ) for name in "abcd"]
        assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
        ((path, plan),) = saved_profiles()
        assert plan is not None
        assert plan.notes[0].text in {name * 20_000 for name in "abcd"}
        assert {found.suffix for found in path.parent.iterdir()} == {".json"}

    def test_lists_the_newest_first_and_what_can_not_be_read(self):
        paths = [store(key, PLAN) for key in ("aa", "bb")] + [put("{", "cc")]
        for seconds, path in zip((2000, 3000, 1000), paths, strict=True):
            os.utime(path, (seconds, seconds))
        assert saved_profiles() == ((paths[1], PLAN), (paths[0], PLAN), (paths[2], None))


class TestHostileFiles:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (PLAN.to_json()[:400], "is not a plan"),
            (PLAN.to_json().replace("12.5", "1e999"), "is not a plan"),
            (PLAN.to_json().replace('"peak_bytes": 41943040', '"peak_bytes": -1'), "peak_bytes is -1"),
            (b"[" * 1_000_000, "is not a plan"),
            (b" " * (16 * MIB + 1), "larger than 16"),
        ],
    )
    def test_are_named_and_moved_aside(self, content, reason):
        path = put(content)
        assert saved_profiles() == ((path, None),)
        note = ignored(path)
        assert reason in note
        assert str(note).endswith(f"It was renamed to {KEY}.bad.")
        bad = path.with_suffix(".bad")
        assert bad.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert search_for() == profiles.Found(None, path, ())
        store(KEY, PLAN)
        assert search_for().plan == PLAN

    def test_a_folder_is_ignored(self, cache_dir):
        path = cache_dir / "profiles" / f"{KEY}.json"
        path.mkdir(parents=True)
        (path / "own.txt").write_text("mine")
        assert saved_profiles() == ((path, None),)
        assert "it can't be read (Is a directory). Expected a file. Delete it" in ignored(path)
        assert (path / "own.txt").read_text() == "mine"

    def test_files_are_their_owners_alone(self, tmp_path, monkeypatch):
        monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(tmp_path / "new" / "cache"))
        path = store(KEY, PLAN)
        assert {found.stat().st_mode & 0o777 for found in path.parent.iterdir()} == {0o600}
        folders = (path.parent, path.parent.parent, path.parent.parent.parent)
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


class TestForeignPlans:
    def test_of_another_machine(self):
        note = ignored(store(KEY, PLAN), machine={**MACHINE, "torch": "2.14"})
        assert "another machine (torch differ" in note

    def test_of_another_workload(self):
        assert "another workload (model, parameters" in ignored(store(KEY, PLAN), described={"model": "Other"})

    @pytest.mark.parametrize("plan", [PLAN, replace(simulated_plan(), machine=MACHINE, workload=WORKLOAD)])
    def test_from_simulated_cards_for_real_ones_and_the_other_way_round(self, plan):
        real, simulated = MACHINE, {"devices": [{"kind": "sim", "name": "RTX3090", "count": 2}], "torch": "2.13"}
        asked, stored = (real, plan) if plan.simulated else (simulated, replace(plan, machine=simulated))
        assert "its devices differ from its machine's" in ignored(store(KEY, stored), machine=asked)


class TestWhatHasChanged:
    DEVICES = (Device("cpu", 0, "cpu", 64 * MIB, True), Device("cpu", 1, "cpu", 64 * MIB, True))

    def test_memory_that_is_short_names_the_device(self):
        said = memory_shortfall(PLAN, self.DEVICES, (40 * MIB, 30 * MIB))
        assert "cpu:1 may use 30 MiB, and its 4 samples need 40 MiB" in said
        assert "cpu:0" not in said

    def test_a_little_less_memory_on_a_card_is_the_reserves(self):
        """A plan at its limit was solved again if a MiB was missing."""
        cards = tuple(Device("cuda", i, "A100", 64 * MIB) for i in (0, 1))
        assert memory_shortfall(PLAN, cards, (40 * MIB, int(39.7 * MIB))) is None
        assert "cuda:1 may use 39 MiB" in memory_shortfall(PLAN, cards, (40 * MIB, 39 * MIB))
        assert "cpu:1 may use" in memory_shortfall(PLAN, self.DEVICES, (40 * MIB, 40 * MIB - 1))

    def test_other_cards_and_another_driver_are_said_once(self):
        def gpus(uuid: str, driver: str) -> tuple[Device, ...]:
            return tuple(Device("cuda", i, "A100", GIB, uuid=f"{uuid}{i}", driver=driver) for i in (0, 1))

        def planned(index: int, seat: Seat) -> Seat:
            gpu = gpus("GPU-a", "570")[index]
            device = replace(seat.device, kind="cuda", uuid=gpu.uuid, driver=gpu.driver)
            return replace(seat, device=device, peak_bytes=MIB)

        plan = changed_seats(PLAN, planned)
        assert differing_facts(plan, gpus("GPU-a", "570"), (70 * MIB,) * 2) == ()
        assert differing_facts(plan, gpus("GPU-b", "580"), (70 * MIB,) * 2) == (
            "tuned on other GPUs of the same model (cuda:0, cuda:1)",
            "tuned with driver 570, now 580",
        )

    @pytest.mark.parametrize(("free_mib", "in_use", "tight"), [(64, 0, False), (60, 0, True), (60, 1, False)])
    def test_what_is_free_has_to_hold_the_process_too(self, free_mib, in_use, tight, monkeypatch):
        """The process's context takes some of the free memory. A plan at its limit was reused and ran out of memory."""
        monkeypatch.setattr("torch.cuda.memory_stats", lambda _index: {"allocation.all.allocated": in_use})
        ceiling = replace(PLAN.main.seats[0].ceiling, capacity_bytes=58 * MIB)  # of 64 MiB, 6 of them for the context
        plan = with_devices(PLAN, lambda _, device: replace(device, kind="cuda"))
        plan = changed_seats(plan, lambda _, seat: replace(seat, ceiling=ceiling, peak_bytes=58 * MIB))
        gpus = tuple(Device("cuda", i, "A100", GIB) for i in (0, 1))
        said = ("tuned with more free memory (cuda:1)",) if tight else ()
        assert differing_facts(plan, gpus, (64 * MIB, free_mib * MIB)) == said
