"""Finding this process's rank, GPU and plan: from torchrun's variables, from Slurm's, and from the machine."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from fake_gpus import FakeCuda, cards
from handmade import on_devices
from raised import raises
from torch import distributed as dist

from autosplit import ddp
from autosplit.ddp.device import agreed_backend, card_of, device_for
from autosplit.ddp.rendezvous import Place, _agreed_round, place_here
from autosplit.devices.accelerator import Visible
from autosplit.devices.spec import parse_devices
from autosplit.errors import DeviceError, InputError, PlanError
from autosplit.plan.other_model import OtherModelWarning
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import NEWEST_VARIABLE, PLAN_VARIABLE
from autosplit.profiles import store as profiles
from autosplit.profiles.key import machine_of
from autosplit.profiles.validity import usable_here

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AUTOSPLIT_PROFILE")
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Remove all variables of torchrun and Slurm."""
    for name in (*NAMES, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class TestPlaces:
    def test_torchrun(self, monkeypatch):
        address = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        set_all(monkeypatch, {"RANK": "3", "WORLD_SIZE": "4", **local, **address})
        place = place_here()
        assert place == Place(3, 4, 1, 2)
        assert place.beside() == range(2, 4)

    def test_slurm_on_one_node(self, monkeypatch):
        set_all(monkeypatch, {**SLURM, "SLURM_LOCALID": "2", "SLURM_STEP_NUM_NODES": "1"})
        place = place_here()
        assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (2, 4, 2, 4)
        host, port = place.address.split(":")
        assert host == "127.0.0.1"
        assert 1024 < int(port) < 32_768, "below those that systems hand out"
        monkeypatch.setenv("SLURM_PROCID", "3")
        assert place_here().address == place.address

    def test_slurm_on_several(self, monkeypatch):
        set_all(monkeypatch, {**SLURM, "SLURM_STEP_NUM_NODES": "2"})
        with raises(InputError):
            place_here()
        set_all(monkeypatch, {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"})
        assert place_here() == Place(2, 4, 0, None, "node1:1234")

    @pytest.mark.parametrize(
        ("variables", "count"),
        [
            ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1(x2)", "SLURM_NODEID": "2"}, 3),
            (
                {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NTASKS_PER_NODE": "2"},
                None,
            ),  # the step's number, not the job's
            ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ],
    )
    def test_slurm_tells_how_many_ranks_a_node_has(self, variables, count, monkeypatch):
        """Without it, ranks of the first node checked the second node's GPUs, and chose another back end."""
        where = {"SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
        set_all(monkeypatch, {**SLURM, **where, **variables})
        place = place_here()
        assert place.local_world_size == count
        assert place.beside() == range(2, min(4, 2 + (count or 4)))

    def test_a_batch_script_of_slurms_is_one_process(self, monkeypatch):
        """It sees the job's tasks, and would wait for processes that do not exist."""
        set_all(monkeypatch, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"})
        assert place_here() == Place(0, 1)

    @pytest.mark.parametrize(
        "variables",
        [
            {"RANK": "2", "WORLD_SIZE": "2"},
            {"RANK": "1"},
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        ],
    )
    def test_a_bad_environment(self, variables, monkeypatch):
        set_all(monkeypatch, variables)
        with raises(InputError):
            place_here()


class Meeting:
    """Ranks that use one store, each in a thread with its own connection."""

    def __init__(self, port: int, world_size: int) -> None:
        self.port, self.world_size = port, world_size
        self.rounds: dict[int, str] = {}
        self.threads: list[threading.Thread] = []

    def start(self, rank: int) -> None:
        self.threads.append(threading.Thread(target=self._meet, args=(rank,), daemon=True))
        self.threads[-1].start()

    def _meet(self, rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        self.rounds[rank] = _agreed_round(store, Place(rank, self.world_size), 60.0)

    def agreed(self) -> str:
        for thread in self.threads:
            thread.join(60)
        assert self.rounds.keys() == set(range(self.world_size))
        (name,) = set(self.rounds.values())
        return name


@pytest.fixture
def agents_store(monkeypatch) -> Any:
    """The store of a torchrun, which outlives its workers."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class TestRounds:
    def met(self, store: Any, *order: int) -> str:
        meeting = Meeting(store.port, len(order))
        for rank in order:
            meeting.start(rank)
            time.sleep(0.2)  # so it has checked before the next one comes; the result does not depend on this
        return meeting.agreed()

    @pytest.mark.parametrize("order", [(2, 1, 0)])
    def test_restarted_ranks_agree_on_a_new_one_whoever_comes_first(self, agents_store, order):
        assert len({self.met(agents_store, *order) for _ in range(3)}) == 3

    @pytest.mark.slow
    def test_one_that_nobody_came_to_is_left(self, agents_store):
        """Rank 0 was killed while it waited, and again when one of the others had come."""
        for greeted in ((), (1,)):
            agents_store.set("round", "an earlier one")
            for rank in greeted:
                agents_store.set(f"an earlier one/{rank}", "a word")
            assert self.met(agents_store, 1, 2, 0) != "an earlier one"


CARDS = tuple(Visible(name, f"GPU-{number}") for number, name in enumerate(("A100", "L4", "A100", "L4")))


def plan_for(*labels: str, cards: tuple[Visible, ...] = CARDS) -> Plan:
    """A plan whose ranks are on these cards of that machine."""
    plan = make_plan((4,) * len(labels), device="cuda:{}")
    devices = (
        replace(device, label=label, name=cards[int(label[-1])].name, uuid=cards[int(label[-1])].uuid)
        for device, label in zip(plan.devices, labels, strict=True)
    )
    return on_devices(plan, *devices)


def places(plan: Plan, visible: tuple[Visible, ...], world_size: int = 0) -> list[str]:
    world_size = world_size or len(plan.ddp.seats)
    return [str(device_for(plan, Place(rank, world_size, rank, world_size), visible)) for rank in range(world_size)]


class TestDevices:
    def test_a_card_is_known_by_its_uuid(self):
        plan = plan_for("cuda:0", "cuda:1", "cuda:3")
        assert places(plan, CARDS) == ["cuda:0", "cuda:1", "cuda:3"]
        assert places(plan, CARDS[::-1]) == ["cuda:3", "cuda:2", "cuda:0"]

    def test_a_twin_has_the_same_names(self):
        plan = plan_for("cuda:0", "cuda:1", "cuda:2", "cuda:3")
        twin = tuple(Visible(name, f"GPU-twin{number}") for number, name in enumerate(("L4", "A100", "A100", "L4")))
        assert places(plan, twin) == ["cuda:1", "cuda:0", "cuda:2", "cuda:3"]

    def test_each_process_may_have_been_given_its_own(self):
        plan = plan_for("cuda:0", "cuda:2")
        assert str(device_for(plan, Place(1, 2, 1, 2), (Visible("A100", None),))) == "cuda:0"
        assert str(device_for(plan, Place(1, 2, 1, 2), (CARDS[2],))) == "cuda:0"
        # Slurm assigned the GPUs in another order than when the plan was made.
        assert str(device_for(plan, Place(1, 2, 1, 2), (CARDS[0],))) == "cuda:0"

    def test_ranks_that_share_a_card_share_it_on_a_twin_too(self):
        plan = plan_for("cuda:0", "cuda:2", "cuda:0")
        twin = tuple(Visible("A100", f"GPU-twin{number}") for number in range(2))
        assert places(plan, twin) == ["cuda:0", "cuda:1", "cuda:0"]

    def test_a_card_that_is_not_there(self):
        plan = plan_for("cuda:0", "cuda:1")
        with raises(DeviceError, "cuda:1", "L4", "cuda:0 A100"):
            device_for(plan, Place(1, 2, 1, 2), CARDS[:1])
        with raises(DeviceError, "none"):
            device_for(plan, Place(1, 2, 1, 2), ())


def chosen(monkeypatch: pytest.MonkeyPatch, plan: Plan, cards: list[str]) -> list[str]:
    """Return each rank's choice of back end, or its error, if its GPU is in `cards`."""
    store = dist.HashStore()
    for rank, card in enumerate(cards):  # as on the other ranks when rank 0 asks
        store.set(f"card/{rank}", card)
    found = []
    for rank, card in enumerate(cards):
        monkeypatch.setattr("autosplit.ddp.device.card_of", lambda _device, card=card: card)
        try:
            found.append(agreed_backend(store, Place(rank, len(cards)), torch.device("cuda", 0), plan))
        except DeviceError as error:
            found.append(str(error))
    return found


class TestBackends:
    """All ranks must choose the same back end by their GPUs. With different choices they wait forever."""

    @pytest.fixture(autouse=True)
    def _nccl(self, monkeypatch):
        """As in a build of torch for CUDA."""
        monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "nccl")

    def test_ranks_that_each_see_one_card_have_four_of_them(self, monkeypatch):
        """With ``srun --gpus-per-task=1`` all labels are cuda:0. They counted as one GPU, and gloo was chosen."""
        plan = plan_for("cuda:0", "cuda:0", "cuda:0", "cuda:0")
        assert chosen(monkeypatch, plan, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]) == ["nccl"] * 4

    def test_ranks_that_share_a_card_as_the_plan_has_it_use_gloo(self, monkeypatch):
        assert chosen(monkeypatch, plan_for("cuda:0", "cuda:0"), ["GPU-a", "GPU-a"]) == ["gloo"] * 2

    def test_ranks_that_were_to_have_a_card_each_do_not_share_one(self, monkeypatch):
        """Each rank sees one GPU. Only all ranks together can find out that it is the same GPU."""
        plan = plan_for("cuda:0", "cuda:1", "cuda:2")
        for said in chosen(monkeypatch, plan, ["GPU-0", "GPU-1", "GPU-0"]):
            assert said.startswith("Ranks 0 and 2 both see only one GPU, the same one. The plan expects a separate GPU")

    def test_gloo_where_torch_was_built_without_nccl(self, monkeypatch):
        monkeypatch.setattr(dist, "is_backend_available", lambda _name: False)
        assert chosen(monkeypatch, plan_for("cuda:0", "cuda:1"), ["GPU-a", "GPU-b"]) == ["gloo"] * 2

    def test_a_card_is_known_by_its_uuid_and_else_by_its_place(self, monkeypatch):
        monkeypatch.setattr("socket.gethostname", lambda: "node1")
        for with_uuid, known in ((True, "GPU-00000001-0000-0000-0000-000000000000"), (False, "node1 cuda:1")):
            fake = FakeCuda(cards("A100", "L4"), with_uuid=with_uuid)
            fake.get_device_properties = lambda device, of=fake.get_device_properties: of(device.index)
            monkeypatch.setattr("autosplit.ddp.device.backend", lambda _kind, fake=fake: fake)
            assert card_of(torch.device("cuda", 1)) == known


def remembered(key: str, spec: str = "cpu:1GiB", **changes: Any) -> Plan:
    devices = parse_devices(spec)
    plan = make_plan((4,) * len(devices), machine=machine_of(devices), workload={"model": "Net"}, **changes)
    profiles.store(key, plan)
    return plan


class TestRememberedPlans:
    def test_the_only_one_that_this_job_can_use(self):
        plan = remembered("a1")
        remembered("a2", "cpu:1GiB,cpu:2GiB")  # for two ranks
        remembered("a3", complete=False)
        remembered("a4", "sim:RTX3090", device="sim:{}")
        elsewhere = make_plan((4,), machine={**plan.machine, "torch": "1.0"})
        profiles.store("a5", elsewhere)
        with ddp.setup() as ctx:
            assert ctx.plan == plan

    def test_of_several_it_is_the_newest_and_rank_0_prints_which(self, capfd):
        older = remembered("a1")
        newest = remembered("a2", "cpu:2GiB")
        os.utime(profiles.profile_paths()[-1], (1, 1))
        with ddp.setup() as ctx:
            assert ctx.plan == newest != older
        key = profiles.profile_paths()[0].stem
        assert f"the newest of several saved plans for this machine: {key[:12]} (Net" in capfd.readouterr().err

    def test_a_model_of_another_size_is_told_of_its_own_plan(self):
        remembered("a1")
        os.utime(profiles.profile_paths()[0], (1, 1))
        net = torch.nn.Linear(3, 2)
        plan = remembered("a2", "cpu:2GiB")
        profiles.store("a3", replace(plan, workload={"model": "Other", "parameters": 8}))
        os.utime(profiles.profile_paths()[-1], (2, 2))
        profiles.store("a4", replace(plan, workload={"model": "Net", "parameters": 7}))
        with ddp.setup() as ctx, pytest.raises(InputError, match="autosplit launch --plan a3 SCRIPT"):
            ctx.wrap(net)

    @pytest.mark.parametrize("named", ["in the script", "by hand"])
    def test_a_named_plan_of_another_model_is_only_a_warning(self, named, monkeypatch, tmp_path):
        plan = replace(remembered("a1"), workload={"model": "Net", "parameters": 7})
        plan.save(tmp_path / "plan.json")
        if named != "in the script":
            monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
        warned = pytest.warns(OtherModelWarning, match="with 7 parameters, but this Linear has 8")
        with ddp.setup(plan if named == "in the script" else None) as ctx, warned:
            ctx.wrap(torch.nn.Linear(3, 2))

    def test_a_plan_of_another_model_that_launch_chose_is_an_error(self, monkeypatch, tmp_path):
        """`launch` took the newest plan of any model, and trained on with a warning."""
        plan = replace(remembered("a1"), workload={"model": "Net", "parameters": 7})
        plan.save(tmp_path / "plan.json")
        monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
        monkeypatch.setenv(NEWEST_VARIABLE, "1")
        with ddp.setup() as ctx, raises(InputError, "newest-plan-of-other-model", "7", "8"):
            ctx.wrap(torch.nn.Linear(3, 2))

    def test_variants_of_one_tuning_are_one_plan(self, capfd):
        """One tuning saves a plan for each of its variants, and the fastest last. The user has nothing to choose."""
        layers = ("every layer", "every 2", None)
        plan = remembered("a1")
        for number, one in enumerate(layers):
            workload = {"model": "Net"} if one is None else {"model": "Net", "checkpointing": one}
            newest = replace(plan, workload=workload)
            os.utime(profiles.store(f"b{number}", newest), (2e9 + number, 2e9 + number))
        with ddp.setup() as ctx:
            assert ctx.plan == newest
        assert "saved plans for this machine" not in capfd.readouterr().err

    def test_a_card_that_is_not_here_is_none(self):
        remembered("a1", "sim:RTX3090", device="sim:{}")
        card = {"kind": "cuda", "name": "H100", "memory_gib": 80, "count": 1}
        profiles.store("a2", make_plan((4,), machine={**machine_of(parse_devices("cpu")), "devices": [card]}))
        profiles.store("a3", make_plan((4,), machine={**machine_of(parse_devices("cpu")), "devices": "odd"}))
        assert [*usable_here()] == []
        with raises(PlanError, "no-profile-matches", " and 1 process"):
            ddp.setup().__enter__()
