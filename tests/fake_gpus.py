"""Fake GPUs: the parts of torch.cuda that the package calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autosplit.devices import accelerator, spec
from autosplit.devices.accelerator import Found

GIB = 2**30
NEW_ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@dataclass
class FakeCard:
    """A GPU with the values that CUDA and NVML report for it."""

    name: str = "NVIDIA GeForce RTX 3090"
    uuid: str = "00000000-0000-0000-0000-000000000000"
    bus: int = 1
    capability: tuple[int, int] = (8, 6)
    total: int = 24 * GIB
    others: int = 0
    own: int = 0
    fails: dict[str, Exception] = field(default_factory=dict)
    mig: bool = False
    nvml_uuid: str | None = None
    integrated: bool = False


@dataclass
class FakeCuda:
    """The parts of torch.cuda that the package calls."""

    cards: list[FakeCard]
    arches: list[str] = field(default_factory=lambda: list(NEW_ARCHES))
    with_uuid: bool = True

    def device_count(self) -> int:
        return len(self.cards)

    def is_initialized(self) -> bool:
        return True

    def get_arch_list(self) -> list[str]:
        return self.arches

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.cards[index].capability

    def get_device_properties(self, index: int) -> SimpleNamespace:
        card = self.cards[index]
        if "properties" in card.fails:
            raise card.fails["properties"]
        pci = {"pci_domain_id": 0, "pci_bus_id": card.bus, "pci_device_id": 0}
        uuid = {"uuid": card.uuid} if self.with_uuid else {}
        integrated = {"is_integrated": int(card.integrated)}
        return SimpleNamespace(name=card.name, total_memory=card.total, **uuid, **pci, **integrated)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        card = self.cards[index]
        if "mem_get_info" in card.fails:
            raise card.fails["mem_get_info"]
        return card.total - card.others - card.own, card.total

    def memory_reserved(self, index: int) -> int:
        return self.cards[index].own


def cards(*names: str) -> list[FakeCard]:
    return [FakeCard(name=name, uuid=f"{i:08x}-0000-0000-0000-000000000000", bus=i + 1) for i, name in enumerate(names)]


def stand_in(monkeypatch: pytest.MonkeyPatch, *, accelerators: Any = None, nvml: Any = None) -> None:
    """Replace torch's back end and NVIDIA's NVML by fakes in all modules that use them."""
    inventory = sys.modules.get("autosplit.tools.inventory")  # absent in tests of the core alone
    for module in (accelerator, spec, inventory):
        for name, fake in (("accelerator_at", accelerators), ("started_nvml", nvml)):
            if fake is not None and hasattr(module, name):
                monkeypatch.setattr(module, name, fake)


def installer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace CUDA and NVML by fakes. A text instead of a fake is the reason why there is none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(cuda: FakeCuda | str, nvml: Any = "no NVML") -> None:
        found = Found(None, "cuda", cuda) if isinstance(cuda, str) else Found(cuda, "cuda")
        told = (None, nvml) if isinstance(nvml, str) else (nvml, "")
        stand_in(monkeypatch, accelerators=lambda kind=None: found, nvml=lambda: told)

    return install
