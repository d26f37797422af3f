"""Devices: sizes and the grammar of specs, with fakes for CUDA and NVML."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from fake_gpus import GIB, NEW_ARCHES, FakeCard, FakeCuda, cards, installer, stand_in
from gpus import COUNT, KIND
from hypothesis import given
from hypothesis import strategies as st
from raised import raises

from autosplit.accelerators import backend
from autosplit.devices import accelerator, host_memory
from autosplit.devices import spec as specs
from autosplit.devices.accelerator import DeviceWarning, Found, Visible, indices_here
from autosplit.devices.catalog import gpu_catalog
from autosplit.devices.device import MAX_DEVICES, Device, parse_bytes, parse_reserve, reserve_bytes, size_text
from autosplit.devices.spec import list_devices, parse_devices
from autosplit.errors import DeviceError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CARD_NAMES = tuple(gpu_catalog())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable:
    return installer(monkeypatch)


# --------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("600MiB", 600 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 gib ", 2 * GIB),
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
    with raises(InputError) as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 300


@given(st.integers(0, 10**12), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_parse_bytes_is_exact(number, unit):
    factor = (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]) if unit != "B" else 1
    assert parse_bytes(f"{number}{unit}") == number * factor


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (None, None),
        (0, 0),
        (0.25, 0.25),
        ("5%", 0.05),
        ("1GiB", GIB),
        ("0", 0),
    ],
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
    with raises(InputError):
        parse_reserve(value)


@pytest.mark.parametrize(("value", "size"), [(2, "2GiB or 2%"), ("10", "10GiB or 10%"), (1023, "1023GiB")])
def test_a_reserve_whose_unit_was_forgotten_is_refused(value, size):
    """``--reserve 10`` kept ten bytes free."""
    with raises(InputError, str(value), str(size)):
        parse_reserve(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (600 * 2**20, "600 MiB"),
        (47 * 2**29, "23.5 GiB"),
        (24 * GIB + 1, "24 GiB"),
        (-(3 * 2**29), "-1.5 GiB"),
        (123456 * 2**40, "123456 TiB"),
    ],
)
def test_size_text(nbytes, text):
    assert size_text(nbytes) == text


@given(st.integers(0, 2**60))
def test_size_text_is_read_back_within_its_digits(nbytes):
    assert parse_bytes(size_text(nbytes)) == pytest.approx(nbytes, rel=6e-4, abs=1)


def test_reserve_defaults():
    assert reserve_bytes(None, Device("cuda", 0, "x", 1000)) == 50
    assert reserve_bytes(None, Device("cpu", 0, "cpu", 1000)) == 0
    assert reserve_bytes(None, parse_devices("sim:T4")[0]) == 0


def test_reserve_that_leaves_nothing():
    device = parse_devices("cpu:1GiB")[0]
    with raises(InputError, "1 GiB", "cpu:0"):
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


# --------------------------------------------------------------------------------------------------- the grammar


def test_simulated_cards():
    parsed = parse_devices("sim:2xA100-40GB+1xRTX3090")
    assert [device.label for device in parsed] == ["sim:0", "sim:1", "sim:2"]
    assert [device.name for device in parsed] == ["A100-40GB", "A100-40GB", "RTX3090"]
    assert [device.capacity_bytes for device in parsed] == [device.spec.usable_bytes for device in parsed]
    assert [device.spec.memory_bytes for device in parsed] == [40 * GIB, 40 * GIB, 24 * GIB]
    assert all(device.budgeted and device.spec is gpu_catalog()[device.name] for device in parsed)


def test_specs_can_be_hashed_pickled_and_shown():
    (device,) = parse_devices("sim:RTX3090")
    assert hash(device) == hash(pickle.loads(pickle.dumps(device)))
    assert asdict(device)["spec"]["peak_flops"]["float16"] == pytest.approx(71.2e12)


def test_lowered_memory():
    parsed = parse_devices("sim:3xRTX3090@10GiB+T4")
    assert [device.capacity_bytes for device in parsed] == [10 * GIB] * 3 + [gpu_catalog()["T4"].usable_bytes]
    assert parsed[0].spec.memory_bytes == 24 * GIB


def test_case_spaces_and_the_brand_do_not_matter():
    assert [device.name for device in parse_devices(" SIM: 2 x NVIDIA GeForce rtx 3090 ")] == ["RTX3090"] * 2


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
    monkeypatch.setattr(specs, "available_host_bytes", lambda: 1001)
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
    "cpu:1GiB,": "empty item",
    "gpu": "Did you mean 'cuda'",
    "simm:T4": "Did you mean 'sim'",
    "0": "write 'cuda:0'",
    "RTX3090": "write 'sim:RTX3090'",
    "mps": "Device 'mps' is not available",
    "meta": "Device 'meta' is unknown",
    "cpu:0": "has no unit",
    "cpu:0GiB": "is less than one byte",
    "cpu:": "is not a size",
    "cpu:2GiB,1GiB": "write 'cpu:1GiB'",
    "cpu,cpu:1GiB": "next to other devices",
    "cpu:1GiB,sim:T4": "mixes cpu and sim",
    "sim": "names no GPU",
    "sim:A100": "matches several GPUs: A100-40GB, A100-80GB",
    "sim:RTX3091": "RTX3090",
    "sim:xyz": "not in the catalogue of",
    "sim:2RTX3090": "GPU '2RTX3090' contains a count",
    "sim:T4+RTX 3090x2@8GiB": "write 'sim:2xRTX 3090'",
    "sim:0xRTX3090": "count '0'",
    "sim:1.5xRTX3090": "count '1.5'",
    "sim:2x": "without a GPU",
    "sim:T4+": "without a GPU",
    "sim:T4,T4": "write '+T4'",
    "sim:T4@8": "has no unit",
    "sim:T4@17GiB": "is more than the 16 GiB of a T4",
    f"sim:{MAX_DEVICES + 1}xT4": f"more than {MAX_DEVICES}",
    "sim:600xT4,sim:600xT4": f"more than {MAX_DEVICES}",
    "sim:" + "9" * 5000 + "xT4": f"more than {MAX_DEVICES}",
    "cpu:" + "9" * 5000 + "GiB": "is not a size",
    ",".join(["cpu:1B"] * (MAX_DEVICES + 1)): f"more than {MAX_DEVICES}",
}


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS.items(), ids=[spec[:24] for spec in BAD_SPECS])
def test_bad_specs(spec, message):
    with pytest.raises(DeviceError) as caught:
        parse_devices(spec)
    text = str(caught.value)
    assert message.lower() in text.lower()
    assert ". " in text, "there is no next step"
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("spec", [[], (), [None], [True], {"sim:T4": 4}, [torch.device("meta")]])
def test_bad_sequences(spec):
    with pytest.raises(DeviceError, match="Expected 'auto', 'cuda'"):
        parse_devices(spec)


def test_numbers_are_those_of_visible_gpus(monkeypatch):
    """nn.DataParallel takes ``device_ids=[0, 2]``."""
    stand_in(monkeypatch, accelerators=lambda kind=None: Found(FakeCuda(cards("A100", "T4", "A100")), kind or "cuda"))
    assert [device.label for device in parse_devices([0, 2])] == ["cuda:0", "cuda:2"]
    with raises(DeviceError, "cuda:3"):
        parse_devices([0, 3])
    with raises(DeviceError, "'cuda:2'", "'cuda:0,1'"):
        parse_devices(2)


@given(st.text(max_size=30))
def test_any_text_is_devices_or_a_device_error(text):
    for spec in (text, f"sim:{text}", f"cpu:{text}"):
        message = ""
        try:
            assert parse_devices(spec)
        except DeviceError as error:
            message = str(error)
        assert "\n" not in message


# ---------------------------------------------------------------------------------------------------------- CUDA


def test_cuda_specs(machine):
    machine(FakeCuda(cards("a", "b", "c")), SimpleNamespace(nvmlSystemGetDriverVersion=lambda: "580.1"))
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


def test_memory_that_is_the_hosts_has_what_the_host_could_free(machine, monkeypatch):
    """A driver reports free memory without the page cache that the system would release."""
    monkeypatch.setattr(accelerator, "available_host_bytes", lambda: 90 * GIB)
    machine(FakeCuda([FakeCard(total=120 * GIB, others=80 * GIB, own=1 * GIB, integrated=True)]))
    (device,) = parse_devices("cuda")
    assert (device.capacity_bytes, device.integrated) == (73 * GIB, True)


@pytest.mark.parametrize(
    "spec",
    [
        "cuda:0,0",
        "cuda,cuda:1",
        "cuda:2",
        "cuda:x",
        "cuda:" + "1" * 5000,
        "cuda:0,cpu",
        "cuda:0,sim:T4",
        "cuda:0,,1",
    ],
)
def test_bad_cuda_specs(machine, spec):
    machine(FakeCuda(cards("a", "b")))
    with raises(DeviceError) as caught:
        parse_devices(spec)
    assert len(str(caught.value)) < 400


def test_without_a_gpu(machine):
    machine("no driver", "no NVML")
    for spec in ("cuda", "cuda:0", torch.device("cuda", 0)):
        with raises(DeviceError, "no driver"):
            parse_devices(spec)
    for found in (list_devices(), parse_devices(None)):
        assert [device.label for device in found] == ["cpu"]


def test_a_gpu_that_does_not_answer(machine):
    broken = FakeCard(fails={"mem_get_info": RuntimeError("CUDA error: unspecified launch failure\nmore lines")})
    machine(FakeCuda([broken]))
    with raises(DeviceError) as caught:
        parse_devices("cuda:0")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "arches", "build"),
    [
        ((8, 9), NEW_ARCHES, None),  # sm_86 runs on 8.9
        ((13, 0), NEW_ARCHES, None),  # from PTX
        ((8, 0), ["sm_86"], "cu126"),  # not on a lower minor version
        ((6, 1), NEW_ARCHES, "cu126"),
        ((7, 0), NEW_ARCHES, "at most 2.14"),
        ((9, 0), ["sm_90a"], None),
        ((12, 1), ["sm_120a"], "cu128"),
        ((3, 5), NEW_ARCHES, "from source"),
        ((9, 0), [], None),
    ],
)
def test_architectures(capability, arches, build):
    problem = accelerator._missing_arch(capability, arches)
    if build is None:
        assert problem is None
    else:
        assert build in problem
        assert f"{capability[0]}.{capability[1]}" in problem


def test_an_unsupported_card_is_named_when_it_is_chosen(machine):
    old = FakeCard(name="GTX 1080 Ti", capability=(6, 1), uuid="old", bus=7)
    machine(FakeCuda([*cards("RTX 3090"), old]))
    for spec in ("cuda", "cuda:1", None):
        with raises(DeviceError, "1", "GTX 1080 Ti"):
            parse_devices(spec)
    assert [device.index for device in parse_devices("cuda:0")] == [0]


def test_several_mig_instances_are_refused(machine, monkeypatch):
    machine(FakeCuda(cards("NVIDIA A100-SXM4-40GB MIG 1g.5gb")))
    assert len(parse_devices("cuda")) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    with raises(DeviceError, "2"):
        parse_devices("cuda")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver"),
        ("NVMLError_LibRmVersionMismatch", "Reboot"),
        ("NVMLError_Unknown", "does not start (Unknown Error)"),
    ],
)
def test_an_nvml_that_does_not_start(monkeypatch, name, words):
    def fail() -> None:
        raise type(name, (Exception,), {})("Unknown Error")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    nvml, why = accelerator.started_nvml()
    assert nvml is None
    assert words in why


def test_nvml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml, why = accelerator.started_nvml()
    assert nvml is None
    assert "pip install nvidia-ml-py" in why


# --------------------------------------------------------------------------------------------------- host memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemFree: 100 kB\nMemAvailable:    1000 kB\n"}


def test_memory_without_a_cgroup(tmp_path):
    assert host_memory.available_host_bytes(write(tmp_path, MEMINFO)) == 1000 * 1024


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
    assert host_memory.available_host_bytes(root) == 500000 - 150000


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
    assert host_memory.available_host_bytes(root) == 300000 - 60000


def test_memory_in_a_container_that_sees_only_its_own_cgroup(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "700000", "sys/fs/cgroup/memory.current": "800000"}
    root = write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/elsewhere/x\n", **files})
    assert host_memory.available_host_bytes(root) == 0


def test_memory_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": -1}.__getitem__)
    assert host_memory.available_host_bytes(tmp_path) == 500 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert host_memory.available_host_bytes(tmp_path) == 4 * GIB


# -------------------------------------------------------------------------------------------------------- the rest


def test_neither_torch_nor_nvml_is_loaded_for_simulated_and_processor_devices():
    code = (
        "import sys; from autosplit.devices.spec import parse_devices\n"
        "parse_devices('sim:2xRTX3090'); parse_devices('cpu:1GiB'); parse_devices('cpu')\n"
        "print([name for name in ('torch', 'pynvml', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_context_is_made_where_nvml_tells_what_is_free(machine):
    """Asking CUDA takes 0.2 to 0.8 GB of each GPU. Eight ranks with eight GPUs took it 64 times."""
    card = FakeCard(total=24 * GIB, others=3 * GIB, own=GIB, uuid="a")
    card.fails["mem_get_info"] = AssertionError("a context was made")
    asked = []

    def memory(handle: str, version: int | None = None) -> SimpleNamespace:
        asked.append((handle, version))
        return SimpleNamespace(free=20 * GIB)

    nvml = SimpleNamespace(
        nvmlMemory_v2=2,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
    )
    machine(FakeCuda([card]), nvml)
    (device,) = parse_devices("cuda")
    assert device.capacity_bytes == 21 * GIB
    assert device.driver == "580.65.06"
    assert asked == [("GPU-a", 2)]


def test_one_card_that_does_not_answer_is_left_out_where_all_are_meant(machine):
    """A GPU in exclusive use by another process ended `devices="cuda"` on a machine with seven free GPUs."""
    first, busy, last = cards("A", "B", "C")
    busy.fails["mem_get_info"] = RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
    machine(FakeCuda([first, busy, last]))
    for find in (list_devices, parse_devices, lambda: parse_devices("auto"), lambda: parse_devices("cuda")):
        with pytest.warns(
            DeviceWarning,
            match=r"'cuda:1' does not report .* busy or unavailable\).* autosplit does not use this device",
        ):
            assert [device.name for device in find()] == ["A", "C"]
    with raises(DeviceError):
        parse_devices("cuda:0,1")


def test_an_accelerator_that_is_no_gpu_of_cudas(monkeypatch):
    found = Found(FakeCuda(cards("Intel Max", "Intel Max")), "xpu")
    stand_in(monkeypatch, accelerators=lambda kind=None: found, nvml=lambda: pytest.fail("NVML is CUDA's"))
    for spec in (None, "auto", "xpu", "xpu:0,1", ["xpu:0", torch.device("xpu", 1)]):
        assert [device.label for device in parse_devices(spec)] == ["xpu:0", "xpu:1"]
    assert reserve_bytes(None, parse_devices("xpu:0")[0]) == math.ceil(0.05 * 24 * GIB)


THERE = [Visible("RTX 3090", "GPU-a"), Visible("RTX 2080 Ti", "GPU-b"), Visible("RTX 3090", "GPU-c")]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ([("RTX 2080 Ti", "GPU-b"), ("RTX 3090", "GPU-a")], [1, 0]),
        ([("RTX 3090", "GPU-x"), ("RTX 3090", "GPU-y"), ("RTX 2080 Ti", "GPU-z")], [0, 2, 1]),  # a twin
        ([("RTX 3090", None)], [0]),
        ([("RTX 3090", "GPU-c"), ("RTX 3090", "GPU-x")], [2, None]),
        ([("RTX 2080 Ti", "GPU-x"), ("RTX 2080 Ti", "GPU-y")], [1, None]),
        ([("T4", "GPU-x")], [None]),
    ],
)
def test_a_plans_cards_are_found_by_uuid_or_on_a_twin_by_name(wanted, indices):
    assert indices_here([Visible(*one) for one in wanted], THERE) == indices


@pytest.mark.gpu
def test_on_a_real_gpu():
    found = list_devices()
    assert [device.index for device in found] == list(range(COUNT))
    names = [(device.name, device.uuid, device.driver) for device in found]
    assert [(device.name, device.uuid, device.driver) for device in parse_devices(KIND)] == names
    free_bytes, total_bytes = backend(KIND).mem_get_info(0)
    assert 0 < found[0].capacity_bytes <= total_bytes
    assert abs(found[0].capacity_bytes - free_bytes) < GIB
