"""The catalogue: every row is plausible, all spellings find their GPU, and unknown names get suggestions."""

from __future__ import annotations

import re

import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from raised import raises

from autosplit.devices import catalog
from autosplit.devices.catalog import catalog_names_near, find_card, gpu_catalog, mentions_card, shown, unmeasured_rates
from autosplit.errors import DeviceError

GIB = 2**30
CARD_NAMES = tuple(gpu_catalog())
SMALL = {"RTX3050-Laptop", "RTX3060-Laptop", "RTX4050-Laptop"}
LARGE = {"B300", "GB300", "MI325X", "MI350X", "MI355X"}
SLOW = {"Jetson-AGX-Orin-64GB"}
FULL_FLOAT64 = {"MI250X", "MI300X", "MI325X", "Max-1550"}
SLOW_TENSOR_CORES = {"RTX5090-D", "RTX5090-D-V2"}
"""GPUs whose figures are outside of the bounds that all others keep."""


@pytest.mark.parametrize("name", CARD_NAMES)
def test_every_row_is_complete_and_plausible(name):
    spec = gpu_catalog()[name]
    vendor = spec.source.split()[0]
    assert vendor in {"NVIDIA", "AMD", "Intel"}
    assert (spec.compute_capability is not None) == (vendor == "NVIDIA")  # ROCm's numbers are not CUDA's
    major = int((spec.compute_capability or "8.0").split(".")[0])
    assert re.fullmatch(r"[A-Za-z0-9-]+", name)
    assert spec.name == name
    assert len(spec.source) > 15
    # Exceptions are named, so that a wrong figure of any other GPU is found.
    assert (spec.memory_bytes >= 8 * GIB) != (name in SMALL)
    assert (spec.memory_bytes <= 200 * GIB) != (name in LARGE)
    assert 4 * GIB <= spec.memory_bytes <= 300 * GIB
    assert spec.memory_bytes_per_s >= (1.9e11 if name in SMALL else 2e11)
    assert spec.memory_bytes_per_s <= 1e13
    assert 5e9 <= spec.link_bytes_per_s <= 1e12
    assert 1e-6 <= spec.launch_s <= 5e-5
    assert all((8e10 if name in SLOW else 1e11) < peak < 5e15 for peak in spec.peak_flops.values())
    tensor_dtypes = {"tf32", "bfloat16"} if major >= 8 else set()
    if vendor != "NVIDIA":
        tensor_dtypes -= {"tf32"}  # their libraries do not use it by default
    assert set(spec.peak_flops) == {"float32", "float16", "float64"} | tensor_dtypes
    peaks = spec.peak_flops
    assert peaks["float32"] <= peaks["float16"]
    assert (peaks["float64"] < peaks["float32"]) != (name in FULL_FLOAT64)
    assert peaks["float64"] <= peaks["float32"]
    if major >= 8:
        assert peaks["bfloat16"] == peaks["float16"]
    if "tf32" in peaks:
        assert (peaks["float32"] <= peaks["tf32"]) != (name in SLOW_TENSOR_CORES)
        # Half of the float16 rate on every generation with this type.
        assert peaks["tf32"] == pytest.approx(peaks["float16"] / 2, rel=0.02)


@pytest.mark.smoke
def test_the_catalogue_has_the_gpus_that_users_have():
    wanted = (
        "GTX1080Ti P100 V100-16GB V100-32GB TITAN-RTX RTX2080Ti T4 T4G RTX3060 RTX3060Ti RTX3070 RTX3080-10GB RTX3090 "
        "RTX3090Ti A10 A10G A30 A40 A100-40GB A100-80GB A800-80GB RTX-A4000 RTX-A6000 RTX4060Ti-16GB RTX4070 RTX4070Ti "
        "RTX4080 RTX4090 RTX4090-D RTX-6000-Ada L4 L20 L40 L40S H100-80GB H100-PCIe H200 H20 H800 GH200-96GB RTX5050 "
        "RTX5060 RTX5060Ti-8GB RTX5060Ti-16GB RTX5070 RTX5070Ti RTX5080 RTX5090 RTX5090-D RTX5090-D-V2 RTX-PRO-6000 "
        "RTX-PRO-6000-Server B200 B300 GB200 GB300 GB10 Jetson-AGX-Orin-64GB RTX3050-Laptop RTX3060-Laptop "
        "RTX3070-Laptop RTX3080-Laptop-16GB RTX4050-Laptop RTX4060-Laptop RTX4070-Laptop RTX4080-Laptop RTX4090-Laptop "
        "RTX5060-Laptop RTX5070-Laptop RTX5070Ti-Laptop RTX5080-Laptop RTX5090-Laptop MI250X MI300X MI325X MI350X "
        "MI355X RX7900XTX RX9070 RX9070XT Strix-Halo Arc-B580 Max-1550"
    )
    assert set(wanted.split()) <= set(CARD_NAMES)


@pytest.mark.parametrize(
    ("name", "gb_per_s"), [("V100-16GB", 12.6), ("A100-80GB", 25.2), ("H100-80GB", 50.4), ("MI300X", 25.2)]
)
def test_copies_from_the_host_have_the_rate_of_the_gpus_pci_express(name, gb_per_s):
    assert find_card(name).host_bytes_per_s == pytest.approx(gb_per_s * 1e9)


def test_a_gpu_with_the_hosts_memory_gets_the_part_that_a_cpu_gets():
    integrated = find_card("GB10")
    assert integrated.usable_bytes == pytest.approx(0.8 * (integrated.memory_bytes - integrated.context_bytes), abs=512)


class TestUnmeasuredRates:
    def test_the_gpu_that_was_measured_is_named(self):
        assert unmeasured_rates([find_card("RTX3090"), find_card("H100-80GB")]) == ""
        text = unmeasured_rates(map(find_card, ("GB300", "GB300", "RTX4080", "B300")))
        assert text.startswith("autosplit has no measured kernel rates for GB300 (GB200), RTX4080 (A100 and H100). ")
        assert find_card("GB300").sustained == find_card("GB200").sustained
        assert find_card("T4G").memory_power == find_card("T4").memory_power

    def test_gpus_without_known_kernels_are_named(self):
        assert unmeasured_rates([find_card("MI300X")]).startswith("autosplit traces memory and attention for MI300X")
        assert "MI250X (MI300X)" in unmeasured_rates([find_card("MI250X")])


def test_the_page_lists_every_gpu():
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    assert [name for name in CARD_NAMES if f"`{name}`" not in page] == []


def test_names_stay_apart_when_normalised():
    assert len({catalog._normal(name) for name in CARD_NAMES}) == len(CARD_NAMES)
    # A digit and an x at the beginning would look like a count.
    assert not any(re.match(r"[0-9.]+\s*[xX*]", name) for name in CARD_NAMES)


def test_names_near():
    assert catalog_names_near("RTX3091")[0] == "RTX3090"
    assert "RTX3080-10GB" in catalog_names_near("3080")
    assert catalog_names_near("") == ()


@pytest.mark.parametrize("name", CARD_NAMES)
def test_a_card_is_found_by_its_spellings(name):
    spellings = (name, name.lower(), name.replace("-", " "), name.replace("-", "_"), f"NVIDIA GeForce {name}")
    assert all(find_card(spelling) is gpu_catalog()[name] for spelling in spellings)
    assert all(mentions_card(f"2 of {spelling}!") for spelling in spellings)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX3060-Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Radeon(TM) 8060S Graphics", "Strix-Halo"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc-B580"),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_reports(reported, name):
    """On the first real GPU, an H100, `doctor` found no row and compared no rate with the catalogue."""
    assert find_card(reported).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A100", "matches several GPUs: A100-40GB, A100-80GB"),
        ("RTX3091", "Expected a name such as RTX3090"),
        ("", "Expected a name such as A100-40GB, RTX3090"),
        ("no\nsuch card", "Expected a name such as"),
        ("x" * 5000, "Expected a name such as"),
    ],
)
def test_a_card_that_is_not_found(name, message):
    with pytest.raises(DeviceError, match=message) as caught:
        find_card(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_error_on_an_unknown_gpu_has_the_row_and_the_command_that_writes_it():
    with raises(DeviceError, "`python -m autosplit doctor --save gpus.toml`") as caught:
        find_card("RTX 6090")
    assert "[cards.RTX-6090]" in str(caught.value)


@given(st.one_of(st.text(), st.lists(st.text()), st.binary(max_size=200)))
def test_what_is_shown_stays_on_one_short_line(value):
    assert "\n" not in shown(value)
    assert len(shown(value)) <= 80
    assert shown(value) == repr(value) or "..." in shown(value)


class TestCardsOfOnesOwn:
    CARD = (
        "[cards.My-Card]\nmemory_gib = 12.5\ntflops = { float32 = 10, float16 = 20, float64 = 0.5 }\n"
        'memory_gb_per_s = 500\nlink = "pcie4"\ncompute_capability = "8.9"\nsource = "measured here"\n'
    )

    def given(self, monkeypatch, tmp_path, content: str | bytes) -> None:
        path = tmp_path / "cards.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        monkeypatch.setenv("AUTOSPLIT_GPUS", str(path))

    def test_are_added(self, monkeypatch, tmp_path):
        self.given(monkeypatch, tmp_path, self.CARD)
        card = find_card("mycard")
        assert (card.name, card.memory_bytes, card.launch_s) == ("My-Card", 25 * GIB // 2, 5e-6)
        assert card.link_bytes_per_s == find_card("RTX-A5000").link_bytes_per_s
        assert len(gpu_catalog()) == len(CARD_NAMES) + 1

    def test_a_slower_host_is_that_of_all_gpus_but_those_with_an_own_time(self, monkeypatch, tmp_path):
        memory_bytes = find_card("H200").usable_bytes
        own = self.CARD.replace("[cards.My-Card]", "[cards.My-Card]\nlaunch_s = 3e-6")
        self.given(monkeypatch, tmp_path, "[defaults]\nlaunch_s = 8e-6\n" + own)
        assert [find_card(name).launch_s for name in ("H200", "RTX3090", "My-Card")] == [8e-6, 8e-6, 3e-6]
        assert find_card("H200").usable_bytes == memory_bytes

    def test_take_the_place_of_a_known_one(self, monkeypatch, tmp_path):
        self.given(monkeypatch, tmp_path, self.CARD.replace("My-Card", "rtx-3090") + "[links]\npcie4 = 1e9\n")
        assert (find_card("RTX 3090").memory_bytes, find_card("RTX3090").link_bytes_per_s) == (25 * GIB // 2, 1e9)
        assert len(gpu_catalog()) == len(CARD_NAMES)
        monkeypatch.delenv("AUTOSPLIT_GPUS")
        assert find_card("RTX3090").memory_bytes == 24 * GIB

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (CARD[:60], ""),
            (CARD.replace("12.5", "-1"), ">= 1e-06"),
            (CARD.replace("12.5", "nan"), ">= 1e-06"),
            (CARD.replace("12.5", "1e30"), "<= "),
            (CARD.replace("12.5", "9" * 5000), ""),
            (CARD.replace("12.5", "2026-01-01"), "Expected `float`"),
            (CARD.replace("12.5", "12.5\nmemory_gb = 3"), "memory_gb"),
            (CARD.replace("float32 = 10,", ""), "no tflops of float32"),
            (CARD.replace("pcie4", "pci\\u001b[2J"), "has the link 'pci\\x1b[2J'"),
            (CARD.replace("8.9", "eight"), "matching regex"),
            (CARD + 'sustained_of = "RTX1"\n', "sustained_of = 'RTX1'. Expected a GPU of the catalogue"),
            (CARD.replace("My-Card", '"../x"'), "matching regex"),
            (CARD.replace("My-Card", '"2xA"'), "matching regex"),
            (CARD + CARD.replace("My-Card", "MY_CARD"), "two GPUs have names that differ only"),
            (CARD + CARD, ""),
            ("cards = 3", "Expected `object`"),
            ("run = 'rm'", "run"),
            ("a = " + "[" * 100_000, ""),
            (b"\xff\xfe", "utf-8"),
            (b" " * (2**20 + 1), "larger than 1 MiB"),
        ],
    )
    def test_are_refused_by_name(self, monkeypatch, tmp_path, content, reason):
        self.given(monkeypatch, tmp_path, content)
        with pytest.raises(DeviceError, match=re.escape(reason) or None) as caught:
            gpu_catalog()
        assert str(caught.value).startswith(f"The file {tmp_path}/cards.toml of AUTOSPLIT_GPUS can't be used (")
        assert "Expected a file like" in str(caught.value)
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("place", ["missing", "folder", "device"])
    def test_what_is_no_file_is_named(self, monkeypatch, tmp_path, place):
        path = {"missing": tmp_path / "nowhere", "folder": tmp_path, "device": "/dev/zero"}[place]
        monkeypatch.setenv("AUTOSPLIT_GPUS", str(path))
        with raises(DeviceError):
            gpu_catalog()
