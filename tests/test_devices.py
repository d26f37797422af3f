"""Devices: sizes, the grammar of specs, the catalogue; CUDA and NVML through fakes in place of the two seams."""

from __future__ import annotations

import importlib.metadata
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit import devices
from autosplit.devices import (
    MAX_DEVICES,
    Device,
    catalog_names_near,
    gpu_catalog,
    list_devices,
    parse_bytes,
    parse_devices,
    parse_reserve,
    reserve_bytes,
    survey_devices,
)
from autosplit.errors import DeviceError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 2**30
CARD_NAMES = tuple(gpu_catalog())
NEW_ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


# ---------------------------------------------------------------------------------------------- fakes of the seams


class NVMLError(Exception):
    """As in pynvml: the base of every error."""


@dataclass
class FakeCard:
    """One card, with what CUDA and NVML would each say of it."""

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


@dataclass
class FakeCuda:
    """torch.cuda, as far as it is asked."""

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
        return SimpleNamespace(name=card.name, total_memory=card.total, **uuid, **pci)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        card = self.cards[index]
        if "mem_get_info" in card.fails:
            raise card.fails["mem_get_info"]
        return card.total - card.others - card.own, card.total

    def memory_reserved(self, index: int) -> int:
        return self.cards[index].own


@dataclass
class FakeNvml:
    """pynvml, as far as it is asked; a card's `fails` names the functions that raise."""

    cards: list[FakeCard]
    driver: str | bytes = "580.65.06"
    NVML_TEMPERATURE_GPU: int = 0
    nvmlMemory_v2: int = 2
    asked_versions: list[int | None] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable:
        answers = {
            "nvmlDeviceGetName": lambda card: card.name.encode(),
            "nvmlDeviceGetUUID": lambda card: card.nvml_uuid or f"GPU-{card.uuid}",
            "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(domain=0, bus=card.bus, device=0),
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=37),
            "nvmlDeviceGetTemperature": lambda _, sensor: 55,
            "nvmlDeviceGetPowerUsage": lambda _: 123_400,
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

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
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
    """Put a fake CUDA and a fake NVML in place of the real ones."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(cuda: FakeCuda | str, nvml: FakeNvml | str = "no NVML") -> None:
        monkeypatch.setattr(devices, "_cuda", lambda: (None, cuda) if isinstance(cuda, str) else (cuda, ""))
        monkeypatch.setattr(devices, "_nvml", lambda: (None, nvml) if isinstance(nvml, str) else (nvml, ""))
        monkeypatch.setattr(devices, "_pynvml_distribution_note", lambda: None)

    return install


def cards(*names: str) -> list[FakeCard]:
    return [FakeCard(name=name, uuid=f"{i:08x}-0000-0000-0000-000000000000", bus=i + 1) for i, name in enumerate(names)]


# --------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("7", 7),
        ("7B", 7),
        ("1KiB", 1024),
        ("600MiB", 600 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 gib ", 2 * GIB),
        ("1TiB", 2**40),
        ("1KB", 1000),
        ("2MB", 2_000_000),
        ("80GB", 80_000_000_000),
        ("0.1GiB", GIB // 10),
    ],
)
def test_parse_bytes(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e3MiB", "1.GiB", ".5GiB", "1GIBS", "1 2GiB", "nan", "٣GiB", "9" * 5000]
)
def test_parse_bytes_refuses(text):
    with pytest.raises(InputError, match="expected a number") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 300


@given(st.integers(0, 10**12), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_parse_bytes_is_exact(number, unit):
    factor = (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]) if unit != "B" else 1
    assert parse_bytes(f"{number}{unit}") == number * factor


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(None, None), (0, 0), (5, 5), (0.0, 0.0), (0.25, 0.25), ("5%", 0.05), ("0.05", 0.05), ("1GiB", GIB), ("0", 0)],
)
def test_parse_reserve(value, parsed):
    result = parse_reserve(value)
    assert result == parsed
    assert type(result) is type(parsed)
    assert parse_reserve(result) == parsed


@pytest.mark.parametrize(
    "value", [-1, -0.1, 1.0, 2.5, float("nan"), float("inf"), True, "-1GiB", "100%", "-5%", "x", "", [1]]
)
def test_parse_reserve_refuses(value):
    with pytest.raises(InputError, match=re.escape("expected bytes (1GiB) or a share")):
        parse_reserve(value)


def test_reserve_defaults():
    assert reserve_bytes(None, Device("cuda", 0, "x", 1000)) == 50
    assert reserve_bytes(None, Device("cpu", 0, "cpu", 1000)) == 0
    assert reserve_bytes(None, parse_devices("sim:T4")[0]) == 0


def test_reserve_that_leaves_nothing():
    device = parse_devices("cpu:1GiB")[0]
    with pytest.raises(InputError, match=re.escape("keeps 1 GiB free of the 1 GiB on cpu:0")):
        reserve_bytes("1GiB", device)
    assert reserve_bytes(GIB - 1, device) == GIB - 1


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 2**45))
def test_a_share_is_rounded_up(share, capacity):
    device = Device("cuda", 0, "x", capacity)
    try:
        kept = reserve_bytes(share, device)
    except InputError:
        assert share * capacity > capacity - 1
    else:
        assert kept == math.ceil(share * capacity) < capacity


# ----------------------------------------------------------------------------------------------------- catalogue


@pytest.mark.parametrize("name", CARD_NAMES)
def test_every_row_is_complete_and_plausible(name):
    spec = gpu_catalog()[name]
    major = int(spec.compute_capability.split(".")[0])
    assert re.fullmatch(r"[0-9]{1,2}\.[0-9]", spec.compute_capability)
    assert re.fullmatch(r"[A-Za-z0-9-]+", name)
    assert spec.name == name
    assert spec.source.startswith("NVIDIA ")
    assert len(spec.source) > 15
    assert 8 * GIB <= spec.memory_bytes <= 200 * GIB
    assert 2e11 <= spec.memory_bytes_per_s <= 1e13
    assert 1e10 <= spec.link_bytes_per_s <= 1e12
    assert 1e-6 <= spec.launch_s <= 5e-5
    assert all(1e11 < peak < 5e15 for peak in spec.peak_flops.values())
    tensor_dtypes = {"tf32", "bfloat16"} if major >= 8 else set()
    assert set(spec.peak_flops) == {"float32", "float16", "float64"} | tensor_dtypes
    assert spec.peak_flops["float64"] < spec.peak_flops["float32"] <= spec.peak_flops["float16"]
    if major >= 8:
        peaks = spec.peak_flops
        assert peaks["bfloat16"] == peaks["float16"]
        assert peaks["float32"] <= peaks["tf32"]
        # Half of the float16 rate on every generation that has it.
        assert peaks["tf32"] == pytest.approx(peaks["float16"] / 2, rel=0.02)


def test_the_catalogue_has_the_cards_it_must_have():
    wanted = (
        "GTX1080Ti P100 V100-16GB V100-32GB TITAN-RTX RTX2080Ti T4 RTX3060 RTX3070 RTX3080-10GB RTX3090 RTX3090Ti A10 "
        "A30 A40 A100-40GB A100-80GB RTX-A4000 RTX-A6000 RTX4070 RTX4080 RTX4090 RTX-6000-Ada L4 L40S H100-80GB "
        "H100-PCIe H200 GH200-96GB RTX5080 RTX5090 B200"
    )
    assert set(wanted.split()) <= set(CARD_NAMES)


def test_names_stay_apart_when_normalised():
    assert len({devices._normal(name) for name in CARD_NAMES}) == len(CARD_NAMES)
    # A digit and an x in front would be read as a count.
    assert not any(re.match(r"[0-9.]+\s*[xX*]", name) for name in CARD_NAMES)


def test_specs_can_be_hashed_pickled_and_shown():
    (device,) = parse_devices("sim:RTX3090")
    assert hash(device) == hash(pickle.loads(pickle.dumps(device)))
    assert asdict(device)["spec"]["peak_flops"]["float16"] == pytest.approx(71.2e12)


def test_names_near():
    assert catalog_names_near("RTX3091")[0] == "RTX3090"
    assert "RTX3080-10GB" in catalog_names_near("3080")
    assert catalog_names_near("") == ()


# --------------------------------------------------------------------------------------------------- the grammar


def test_simulated_cards():
    parsed = parse_devices("sim:2xA100-40GB+1xRTX3090")
    assert [device.label for device in parsed] == ["sim:0", "sim:1", "sim:2"]
    assert [device.name for device in parsed] == ["A100-40GB", "A100-40GB", "RTX3090"]
    assert [device.capacity_bytes for device in parsed] == [40 * GIB, 40 * GIB, 24 * GIB]
    assert all(device.budgeted and device.spec is gpu_catalog()[device.name] for device in parsed)


def test_lowered_memory():
    parsed = parse_devices("sim:3xRTX3090@10GiB+T4")
    assert [device.capacity_bytes for device in parsed] == [10 * GIB] * 3 + [16 * GIB]
    assert parsed[0].spec.memory_bytes == 24 * GIB


@pytest.mark.parametrize(
    "spelling", ["RTX3090", "rtx3090", "RTX 3090", "rtx-3090", "rtx_3090", "NVIDIA GeForce RTX 3090", "GeForce RTX3090"]
)
def test_spellings_of_a_card(spelling):
    assert parse_devices(f"sim:{spelling}")[0].name == "RTX3090"
    assert len(parse_devices(f" SIM: 2 x {spelling} ")) == 2


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(CARD_NAMES), st.integers(1, 8)), min_size=1, max_size=5))
def test_simulated_specs_round_trip(items):
    parsed = parse_devices("sim:" + "+".join(f"{count}x{name}@{gib}GiB" for count, name, gib in items))
    expected = [(name, gib * GIB) for count, name, gib in items for _ in range(count)]
    assert [(device.name, device.capacity_bytes) for device in parsed] == expected
    assert [device.index for device in parsed] == list(range(len(expected)))
    assert parse_devices(parsed) == parsed


def test_budgets():
    parsed = parse_devices("cpu:2GiB, cpu:600MiB")
    assert [(device.label, device.capacity_bytes, device.budgeted) for device in parsed] == [
        ("cpu:0", 2 * GIB, True),
        ("cpu:1", 600 * 2**20, True),
    ]


def test_plain_cpu(monkeypatch):
    monkeypatch.setattr(devices, "_available_host_bytes", lambda: 1001)
    for spec in ("cpu", " CPU ", torch.device("cpu"), [torch.device("cpu")], ["cpu"]):
        assert parse_devices(spec) == (Device("cpu", 0, "cpu", 800),)
    assert parse_devices("cpu")[0].label == "cpu"


def test_sequences_and_devices_are_renumbered():
    parsed = parse_devices(["sim:T4", "sim:2xRTX3090"])
    assert [device.label for device in parsed] == ["sim:0", "sim:1", "sim:2"]
    assert parse_devices(parsed[1:])[0].label == "sim:0"
    assert parse_devices(parsed[0]) == (parsed[0],)


BAD_SPECS = {
    "": "empty item",
    " ": "empty item",
    "cpu:1GiB,": "empty item",
    "gpu": "did you mean 'cuda'",
    "simm:T4": "did you mean 'sim'",
    "tpu": "did you mean 'cpu'",
    "0": "write 'cuda:0'",
    "RTX3090": "write 'sim:RTX3090'",
    "mps": "device 'mps' is unknown",
    "cpu:0": "expected at least one byte",
    "cpu:0GiB": "expected at least one byte",
    "cpu:1": "has no unit",
    "cpu:": "expected a size",
    "cpu:-1GiB": "expected a size",
    "cpu:2GiB,1GiB": "write 'cpu:1GiB'",
    "cpu,cpu": "expected it alone",
    "cpu,cpu:1GiB": "expected it alone",
    "cpu:1GiB,sim:T4": "mixes cpu and sim",
    "sim": "names no card",
    "sim:": "names no card",
    "sim:A100": "may be any of A100-40GB, A100-80GB",
    "sim:H100": "may be any of H100-80GB, H100-PCIe",
    "sim:RTX3091": "RTX3090",
    "sim:3080": "RTX3080-10GB",
    "sim:xyz": "not in the catalogue",
    "sim:0xRTX3090": "count '0'",
    "sim:000xRTX3090": "count '000'",
    "sim:-1xRTX3090": "count '-1'",
    "sim:1.5xRTX3090": "count '1.5'",
    "sim:2x": "without a card",
    "sim:T4+": "without a card",
    "sim:T4,T4": "write '+T4'",
    "sim:T4@": "expected a size",
    "sim:T4@0GiB": "expected at least one byte",
    "sim:T4@8": "has no unit",
    "sim:T4@17GiB": "expected at most the 16 GiB of a T4",
    f"sim:{MAX_DEVICES + 1}xT4": f"over {MAX_DEVICES}",
    "sim:600xT4+600xT4": f"over {MAX_DEVICES}",
    "sim:600xT4,sim:600xT4": f"over {MAX_DEVICES}",
    "sim:" + "9" * 5000 + "xT4": f"over {MAX_DEVICES}",
    "cpu:" + "9" * 5000 + "GiB": "expected a size",
    ",".join(["cpu:1B"] * (MAX_DEVICES + 1)): f"over {MAX_DEVICES}",
}


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS.items(), ids=[spec[:24] for spec in BAD_SPECS])
def test_bad_specs(spec, message):
    with pytest.raises(DeviceError) as caught:
        parse_devices(spec)
    text = str(caught.value)
    assert message in text
    assert "expected" in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("spec", [[], (), [3], 3, [None], {"cuda": 1}.values(), [torch.device("meta")]])
def test_bad_sequences(spec):
    with pytest.raises(DeviceError, match="expected 'cuda'"):
        parse_devices(spec)


@given(st.text(max_size=30))
def test_any_text_is_devices_or_a_device_error(text):
    for spec in (text, f"sim:{text}", f"cpu:{text}"):
        message = ""
        try:
            assert parse_devices(spec)
        except DeviceError as error:
            message = str(error)
        assert "\n" not in message


def test_the_largest_spec_is_read():
    assert len(parse_devices(f"sim:{MAX_DEVICES}xT4")) == MAX_DEVICES


# ---------------------------------------------------------------------------------------------------------- CUDA


def test_cuda_specs(machine):
    machine(FakeCuda(cards("a", "b", "c")), FakeNvml([], driver=b"580.1"))
    assert [device.label for device in parse_devices("cuda")] == ["cuda:0", "cuda:1", "cuda:2"]
    assert parse_devices(None) == parse_devices("cuda") == list_devices()
    for spec in ("cuda:2,0", "cuda:2, cuda:0", ["cuda:2", torch.device("cuda", 0)], [torch.device("cuda:2"), "cuda:0"]):
        assert [device.index for device in parse_devices(spec)] == [2, 0]
    (device,) = parse_devices(torch.device("cuda", 1))
    assert (device.name, device.uuid, device.driver) == ("b", "GPU-00000001-0000-0000-0000-000000000000", "580.1")
    assert not device.budgeted
    assert parse_devices(parse_devices("cuda:2,0"))[0].index == 2


def test_cuda_capacity_is_what_others_leave(machine):
    machine(FakeCuda([FakeCard(total=24 * GIB, others=5 * GIB, own=3 * GIB)]))
    (device,) = list_devices()
    assert device.capacity_bytes == 19 * GIB
    assert device.driver is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cuda:0,0", "names cuda:0 twice"),
        ("cuda,cuda:1", "names cuda:1 twice"),
        ("cuda:2", "cuda:0 to cuda:1"),
        ("cuda:-1", "cuda:0 to cuda:1"),
        ("cuda:", "cuda:0 to cuda:1"),
        ("cuda:x", "cuda:0 to cuda:1"),
        ("cuda:" + "1" * 5000, "cuda:0 to cuda:1"),
        ("cuda:0,cpu", "mixes cpu and cuda"),
        ("cuda:0,sim:T4", "mixes cuda and sim"),
        ("cuda:0,,1", "empty item"),
    ],
)
def test_bad_cuda_specs(machine, spec, message):
    machine(FakeCuda(cards("a", "b")))
    with pytest.raises(DeviceError, match=message) as caught:
        parse_devices(spec)
    assert len(str(caught.value)) < 400


def test_without_a_gpu(machine):
    machine("no driver", "no NVML")
    for spec in ("cuda", "cuda:0", torch.device("cuda", 0)):
        with pytest.raises(DeviceError, match=r"no driver.*'cpu'.*'sim:'"):
            parse_devices(spec)
    for found in (list_devices(), parse_devices(None)):
        assert [device.label for device in found] == ["cpu"]
    assert survey_devices() == ((), ("no driver", "no NVML"))


def test_the_real_seams_never_raise(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cuda, why = devices._cuda()
    assert (cuda is None) == bool(why)
    nvml, why = devices._nvml()
    assert (nvml is None) == bool(why)
    survey_devices()


def test_a_gpu_that_does_not_answer(machine):
    broken = FakeCard(fails={"mem_get_info": RuntimeError("CUDA error: unspecified launch failure\nmore lines")})
    machine(FakeCuda([broken]))
    with pytest.raises(DeviceError, match="unspecified launch failure") as caught:
        parse_devices("cuda:0")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "arches", "build"),
    [
        ((8, 6), NEW_ARCHES, None),
        ((8, 9), NEW_ARCHES, None),  # sm_86 runs on 8.9
        ((12, 1), NEW_ARCHES, None),
        ((13, 0), NEW_ARCHES, None),  # from PTX
        ((8, 0), ["sm_86"], "cu126"),  # not on a lower minor version
        ((6, 1), NEW_ARCHES, "cu126"),
        ((7, 0), NEW_ARCHES, "at most 2.14"),
        ((6, 1), ["sm_50", "sm_60", "sm_70"], None),
        ((12, 0), ["sm_80", "sm_86", "sm_90"], "cu128"),
        ((10, 0), ["sm_90", "sm_90a"], "cu128"),
        ((9, 0), ["sm_90a"], None),
        ((12, 1), ["sm_120a"], "cu128"),
        ((12, 1), ["sm_120f"], None),
        ((3, 5), NEW_ARCHES, "from source"),
        ((9, 0), [], None),
        ((9, 0), ["gfx90a"], None),
    ],
)
def test_architectures(capability, arches, build):
    problem = devices._missing_arch(capability, arches)
    if build is None:
        assert problem is None
    else:
        assert build in problem
        assert f"{capability[0]}.{capability[1]}" in problem


def test_an_unsupported_card_is_named_when_it_is_chosen(machine):
    old = FakeCard(name="GTX 1080 Ti", capability=(6, 1), uuid="old", bus=7)
    machine(FakeCuda([*cards("RTX 3090"), old]))
    for spec in ("cuda", "cuda:1", None):
        with pytest.raises(DeviceError, match=r"cuda:1.*GTX 1080 Ti.*6\.1.*cu126.*use 'cuda:0'"):
            parse_devices(spec)
    assert [device.index for device in parse_devices("cuda:0")] == [0]
    reports, _ = survey_devices()
    assert reports[0].notes == ()
    assert "cu126" in reports[1].notes[0]


def test_several_mig_instances_are_refused(machine, monkeypatch):
    machine(FakeCuda(cards("NVIDIA A100-SXM4-40GB MIG 1g.5gb")))
    assert len(parse_devices("cuda")) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    with pytest.raises(DeviceError, match="2 MIG instances are visible"):
        parse_devices("cuda")
    assert any("several MIG instances" in note for note in survey_devices()[1])


# ------------------------------------------------------------------------------------------------------ the survey


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
    assert (row.utilization_percent, row.temperature_c, row.power_w) == (37, 55, 123.4)
    assert row.uuid == f"GPU-{slow.uuid}"
    assert "CUDA_VISIBLE_DEVICES='1,2': cuda:0 is physical 2, cuda:1 is physical 1" in notes


def test_the_order_is_noted_where_it_differs(machine):
    first, second = cards("GTX 1660", "RTX 4090")
    machine(FakeCuda([second, first]), FakeNvml([first, second]))
    _, notes = survey_devices()
    assert notes[0] == "CUDA_VISIBLE_DEVICES is not set: cuda:0 is physical 1, cuda:1 is physical 0"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes[1]


def test_matched_by_pci_address_without_a_uuid(machine):
    first, second = cards("a", "b")
    machine(FakeCuda([second, first], with_uuid=False), FakeNvml([first, second]))
    reports, _ = survey_devices()
    assert [report.physical_index for report in reports] == [1, 0]
    assert reports[0].uuid == f"GPU-{second.uuid}"


def test_a_gpu_that_nvml_does_not_know(machine):
    machine(FakeCuda([FakeCard(uuid="x", bus=1)]), FakeNvml([FakeCard(uuid="y", bus=2)]))
    reports, notes = survey_devices()
    assert [(r.logical_index, r.physical_index) for r in reports] == [(0, None), (None, 0)]
    assert any("NVML knows no GPU" in note for note in reports[0].notes)
    assert any("cuda:0 is an unknown GPU" in note for note in notes)


NVML_FUNCTIONS = [
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses",
    "memory_v1",
    "memory_v2",
    "handle",
]


@pytest.mark.parametrize("function", NVML_FUNCTIONS)
@pytest.mark.parametrize(
    "error", [NVMLError("Not Supported"), NVMLError("Unknown Error"), AttributeError("old binding")]
)
def test_every_nvml_failure_is_a_note(machine, function, error):
    card = FakeCard(fails={function: error}, others=GIB)
    machine(FakeCuda([card]), FakeNvml([card]))
    reports, notes = survey_devices()
    assert [report.logical_index for report in reports] == [0]
    assert reports[0].name == card.name
    assert reports[0].used_by_others_bytes == GIB
    silent = {"memory_v1", "memory_v2", "nvmlDeviceGetMigMode"}
    assert function in silent or any(str(error) in note for note in (*reports[0].notes, *notes))


def test_the_first_memory_version_where_the_second_fails(machine):
    card = FakeCard(fails={"memory_v2": NVMLError("Unknown Error")}, others=GIB)
    nvml = FakeNvml([card])
    machine("no CUDA", nvml)
    (report,), notes = survey_devices()
    assert nvml.asked_versions == [2, None]
    assert (report.used_by_others_bytes, report.visible, report.logical_index) == (2 * GIB - GIB, False, None)
    assert notes == ("no CUDA", "CUDA_VISIBLE_DEVICES is not set: no GPU is visible to this process")


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
    assert report.utilization_percent is None
    assert any("MIG is on" in note for note in report.notes)


def test_cuda_alone(machine, monkeypatch):
    machine(FakeCuda([FakeCard(others=GIB)]), "no NVML")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (report,), notes = survey_devices()
    assert (report.logical_index, report.physical_index, report.used_by_others_bytes) == (0, None, GIB)
    assert report.temperature_c is None
    assert notes == ("no NVML", "CUDA_VISIBLE_DEVICES='3': 1 visible, their physical numbers are unknown without NVML")


def test_a_lost_gpu_does_not_hide_the_others(machine):
    lost, fine = cards("a", "b")
    lost.fails = {"handle": NVMLError("GPU is lost"), "properties": RuntimeError("device lost")}
    machine(FakeCuda([lost, fine]), FakeNvml([lost, fine]))
    reports, notes = survey_devices()
    assert [report.name for report in reports] == ["unknown GPU", "b"]
    assert "physical GPU 0 unknown: GPU is lost" in notes
    assert "properties unknown: device lost" in reports[0].notes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver"),
        ("NVMLError_DriverNotLoaded", "not loaded"),
        ("NVMLError_NoPermission", "no permission"),
        ("NVMLError_LibRmVersionMismatch", "reboot"),
        ("NVMLError_Unknown", "does not start (Unknown Error)"),
    ],
)
def test_an_nvml_that_does_not_start(monkeypatch, name, words):
    def fail() -> None:
        raise type(name, (NVMLError,), {})("Unknown Error")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    nvml, why = devices._nvml()
    assert nvml is None
    assert words in why


def test_nvml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml, why = devices._nvml()
    assert nvml is None
    assert "pip install nvidia-ml-py" in why


def test_the_old_pynvml_distribution_is_noted(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"pynvml": "11.5.0"}[name])
    assert "pip uninstall pynvml" in devices._pynvml_distribution_note()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert devices._pynvml_distribution_note() is None


# --------------------------------------------------------------------------------------------------- host memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemFree: 100 kB\nMemAvailable:    1000 kB\n"}


def test_memory_without_a_cgroup(tmp_path):
    assert devices._available_host_bytes(write(tmp_path, MEMINFO)) == 1000 * 1024


def test_memory_in_cgroups_of_version_2(tmp_path):
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "5\n",
            "sys/fs/cgroup/a/memory.max": "500000\n",
            "sys/fs/cgroup/a/memory.current": "200000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 1\nactive_file 3\ninactive_file 50000\n",
        },
    )
    assert devices._available_host_bytes(root) == 500000 - 150000


def test_memory_in_cgroups_of_version_1(tmp_path):
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job/1\n0::/\n",
            "sys/fs/cgroup/memory/job/1/memory.limit_in_bytes": "300000\n",
            "sys/fs/cgroup/memory/job/1/memory.usage_in_bytes": "100000\n",
            "sys/fs/cgroup/memory/job/1/memory.stat": "inactive_file 1\ntotal_inactive_file 40000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
        },
    )
    assert devices._available_host_bytes(root) == 300000 - 60000


def test_memory_in_a_container_that_sees_only_its_own_cgroup(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "700000", "sys/fs/cgroup/memory.current": "800000"}
    root = write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/elsewhere/x\n", **files})
    assert devices._available_host_bytes(root) == 0


def test_memory_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": -1}.__getitem__)
    assert devices._available_host_bytes(tmp_path) == 500 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert devices._available_host_bytes(tmp_path) == 4 * GIB


# -------------------------------------------------------------------------------------------------------- the rest


def test_neither_torch_nor_nvml_is_loaded_for_simulated_and_processor_devices():
    code = (
        "import sys; from autosplit.devices import parse_devices\n"
        "parse_devices('sim:2xRTX3090'); parse_devices('cpu:1GiB'); parse_devices('cpu')\n"
        "print([name for name in ('torch', 'pynvml', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_on_a_real_gpu():
    found = list_devices()
    assert [device.index for device in found] == list(range(torch.cuda.device_count()))
    names = [(device.name, device.uuid, device.driver) for device in found]
    assert [(device.name, device.uuid, device.driver) for device in parse_devices("cuda")] == names
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    assert 0 < found[0].capacity_bytes <= total_bytes
    assert abs(found[0].capacity_bytes - free_bytes) < GIB
    reports, _ = survey_devices()
    visible = [report for report in reports if report.visible]
    assert [report.logical_index for report in visible] == [device.index for device in found]
    assert [report.uuid for report in visible] == [device.uuid for device in found]
    assert all(report.total_bytes > 0 for report in visible)
