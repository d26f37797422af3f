"""Device inventory: CUDA's and NVML's views of the GPUs combined, with fakes for both."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from fake_gpus import GIB, FakeCard, FakeCuda, cards, installer, stand_in

from autosplit.devices.accelerator import Found
from autosplit.devices.spec import list_devices
from autosplit.tools import inventory
from autosplit.tools.inventory import survey_devices

if TYPE_CHECKING:
    from collections.abc import Callable


class NVMLError(Exception):
    """As in pynvml: the base of every error."""


@dataclass
class FakeNvml:
    """A fake pynvml with the functions that the package calls. A GPU's `fails` names the functions that raise."""

    cards: list[FakeCard]
    driver: str = "580.65.06"
    nvmlMemory_v2: int = 2
    asked_versions: list[int | None] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable:
        answers = {
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetUUID": lambda card: card.nvml_uuid or f"GPU-{card.uuid}",
            "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(domain=0, bus=card.bus, device=0),
            "nvmlDeviceGetMigMode": lambda card: [int(card.mig), int(card.mig)],
            "nvmlDeviceGetComputeRunningProcesses": lambda card: [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=card.own),
                SimpleNamespace(pid=1, usedGpuMemory=card.others),
            ],
        }
        if name not in answers:
            raise AttributeError(name)

        def call(card: FakeCard, *args: object) -> object:
            if name in card.fails:
                raise card.fails[name]
            return answers[name](card, *args)

        return call

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        card = self.cards[index]
        if "handle" in card.fails:
            raise card.fails["handle"]
        return card

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> SimpleNamespace:
        self.asked_versions.append(version)
        failure = card.fails.get("memory_v2" if version else "memory_v1")
        if failure:
            raise failure
        used = card.others + card.own
        return SimpleNamespace(total=card.total, free=card.total - used, used=used)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setattr(inventory, "_pynvml_distribution_note", lambda: None)
    return installer(monkeypatch)


def test_mixed_cards_in_differing_orders(machine, monkeypatch):
    fast, slow, hidden = cards("RTX 4090", "GTX 1660", "T4")
    slow.others, slow.own = 2 * GIB, GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    machine(FakeCuda([fast, slow]), FakeNvml([hidden, slow, fast]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    reports, notes = survey_devices()
    assert [(r.logical_index, r.physical_index, r.name, r.visible) for r in reports] == [
        (0, 2, "RTX 4090", True),
        (1, 1, "GTX 1660", True),
        (None, 0, "T4", False),
    ]
    row = reports[1]
    assert (row.used_by_others_bytes, row.free_bytes, row.total_bytes) == (2 * GIB, 21 * GIB, 24 * GIB)
    assert row.uuid == f"GPU-{slow.uuid}"
    assert "CUDA_VISIBLE_DEVICES='1,2': cuda:0 is physical 2, cuda:1 is physical 1" in notes


NVML_FUNCTIONS = [
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses",
    "memory_v1",
    "handle",
]


@pytest.mark.parametrize("function", NVML_FUNCTIONS)
@pytest.mark.parametrize("error", [NVMLError("Not Supported"), AttributeError("old binding")])
def test_every_nvml_failure_is_a_note(machine, function, error):
    card = FakeCard(fails={function: error}, others=GIB)
    machine(FakeCuda([card]), FakeNvml([card]))
    reports, notes = survey_devices()
    assert [report.logical_index for report in reports] == [0]
    assert reports[0].name == card.name
    assert reports[0].used_by_others_bytes == GIB
    silent = {"memory_v1", "memory_v2", "nvmlDeviceGetMigMode"}
    assert function in silent or any(str(error) in note for note in (*reports[0].notes, *notes))


def test_unified_memory_is_asked_of_cuda(machine):
    failure = NVMLError("Not Supported")
    card = FakeCard(name="NVIDIA GB10", others=4 * GIB, fails={"memory_v1": failure, "memory_v2": failure})
    machine(FakeCuda([card]), FakeNvml([card]))
    (report,), _ = survey_devices()
    assert (report.total_bytes, report.free_bytes, report.used_by_others_bytes) == (24 * GIB, 20 * GIB, 4 * GIB)
    card.fails["mem_get_info"] = RuntimeError("CUDA error")
    (report,), _ = survey_devices()
    assert (report.total_bytes, report.free_bytes, report.used_by_others_bytes) == (24 * GIB, None, None)
    assert any("free memory unknown" in note for note in report.notes)


def test_wsl_does_not_say_what_processes_hold(machine, monkeypatch):
    card = FakeCard(others=3 * GIB, own=GIB)
    nvml = FakeNvml([card])
    processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None), SimpleNamespace(pid=1, usedGpuMemory=None)]
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", lambda self, handle: processes, raising=False)
    machine(FakeCuda([card]), nvml)
    (report,), _ = survey_devices()
    assert report.used_by_others_bytes == 3 * GIB
    assert any("Windows and WSL" in note for note in report.notes)


def test_a_mig_instance_keeps_the_memory_that_cuda_says(machine):
    whole = FakeCard(name="NVIDIA A100-SXM4-40GB", uuid="whole", bus=3, total=40 * GIB, mig=True)
    part = FakeCard(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid="part", bus=3, total=5 * GIB, capability=(8, 0))
    machine(FakeCuda([part]), FakeNvml([whole]))
    (report,), _ = survey_devices()
    assert (report.physical_index, report.total_bytes, report.free_bytes) == (0, 5 * GIB, 5 * GIB)
    assert any("MIG is on" in note for note in report.notes)


def test_cuda_alone(machine, monkeypatch):
    machine(FakeCuda([FakeCard(others=GIB)]), "no NVML")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (report,), notes = survey_devices()
    assert (report.logical_index, report.physical_index, report.used_by_others_bytes) == (0, None, GIB)
    assert notes == ("no NVML", "CUDA_VISIBLE_DEVICES='3': 1 visible. Their physical numbers are unknown without NVML.")


def test_a_lost_gpu_does_not_hide_the_others(machine):
    lost, fine = cards("a", "b")
    lost.fails = {"handle": NVMLError("GPU is lost"), "properties": RuntimeError("device lost")}
    machine(FakeCuda([lost, fine]), FakeNvml([lost, fine]))
    reports, notes = survey_devices()
    assert [report.name for report in reports] == ["unknown GPU", "b"]
    assert "physical GPU 0 unknown: GPU is lost" in notes
    assert "properties unknown: device lost" in reports[0].notes


def test_an_unsupported_card_is_noted(machine):
    old = FakeCard(name="GTX 1080 Ti", capability=(6, 1), uuid="old", bus=7)
    machine(FakeCuda([*cards("RTX 3090"), old]))
    reports, _ = survey_devices()
    assert reports[0].notes == ()
    assert "cu126" in reports[1].notes[0]


def test_several_mig_instances_are_noted(machine, monkeypatch):
    machine(FakeCuda(cards("NVIDIA A100-SXM4-40GB MIG 1g.5gb")))
    assert not any("several MIG instances" in note for note in survey_devices()[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    assert any("several MIG instances" in note for note in survey_devices()[1])


def test_a_gpu_with_the_hosts_memory_has_what_the_host_has_available(monkeypatch):
    """CUDA counts the page cache as used, so `devices` and `doctor` reported that other processes hold it."""
    fake = FakeCuda([FakeCard(name="NVIDIA GB10", total=120 * GIB, others=100 * GIB, integrated=True)])
    stand_in(monkeypatch, accelerators=lambda _kind=None: Found(fake, "cuda"), nvml=lambda: (None, ""))
    monkeypatch.setattr(inventory, "available_host_bytes", lambda: 110 * GIB)
    (report,), _ = survey_devices()
    assert (report.free_bytes, report.used_by_others_bytes) == (110 * GIB, 10 * GIB)
    assert "it uses the host's memory" in report.notes


@pytest.mark.gpu
def test_on_a_real_gpu():
    found = list_devices()
    reports, _ = survey_devices()
    visible = [report for report in reports if report.visible]
    assert [report.logical_index for report in visible] == [device.index for device in found]
    assert [report.uuid for report in visible] == [device.uuid for device in found]
    assert all(report.total_bytes > 0 for report in visible)
