"""Broken copies between GPUs are found before training."""

from __future__ import annotations

import threading

import pytest
import torch
from gpus import COUNT, card
from raised import raises

from autosplit.devices import peer_copy_check
from autosplit.devices.peer_copy_check import check_links
from autosplit.errors import DeviceError

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


class Machine:
    """Fake copies of tensors with known devices. Some links are broken."""

    def __init__(self, broken=(), arrives=torch.zeros_like):
        self.broken = set(broken)
        self.arrives = arrives
        self.copies = []
        self._places = []  # a list, because tensors compare by value and ids are reused

    def place(self, tensor):
        return next((place for held, place in self._places if held is tensor), CPU)

    def copied(self, tensor, device):
        source = self.place(tensor)
        way = (source, device)
        if CPU not in way:
            self.copies.append((source.index, device.index))
        copy = self.arrives(tensor) if (source.index, device.index) in self.broken else tensor.clone()
        self._places.append((copy, device))
        return copy


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(peer_copy_check, "_sound", set())


@pytest.fixture
def machine(monkeypatch):
    def build(*args, **kwargs):
        made = Machine(*args, **kwargs)
        monkeypatch.setattr(peer_copy_check, "_copied", made.copied)
        return made

    return build


def test_sound_links_are_checked_both_ways(machine):
    sound = machine()
    check_links(GPUS)
    assert sound.copies == [(0, 1), (1, 0), (0, 2), (2, 0)]


def test_a_link_is_checked_once(machine):
    sound = machine()
    check_links(GPUS[:2])
    check_links(GPUS[:2])
    check_links(GPUS)
    assert sound.copies == [(0, 1), (1, 0), (0, 2), (2, 0)]


@pytest.mark.parametrize(
    "devices",
    [[], [CPU, CPU], GPUS[:1], [GPUS[0]] * 3, [torch.device("cpu", 0)]],
    ids=lambda devices: str(len(devices)),
)
def test_nothing_to_check(machine, devices):
    sound = machine()
    check_links(devices)
    assert sound.copies == []


@pytest.mark.parametrize(("way", "named"), [((0, 2), "from cuda:0 to cuda:2"), ((2, 0), "from cuda:2 to cuda:0")])
def test_zeros_are_named_with_the_pair(machine, way, named):
    machine(broken=[way])
    with pytest.raises(DeviceError) as caught:
        check_links(GPUS)
    message = str(caught.value)
    assert named in message
    assert "arrived as zeros" in message
    assert "IOMMU" in message
    assert "CUDA_VISIBLE_DEVICES" in message
    assert "\n" not in message


def test_garbage_is_counted(machine):
    def flipped(tensor):
        copy = tensor.clone()
        copy[7:9] = -1
        return copy

    machine(broken=[(0, 1)], arrives=flipped)
    with raises(DeviceError):
        check_links(GPUS)


def test_memory_that_held_the_last_tensor_fools_nobody(machine):
    """A copy that did nothing left an earlier tensor in place, so the second check passed."""
    held = []

    def stale(tensor):
        held.append(tensor.clone())
        return held[-2] if len(held) > 1 else torch.zeros_like(tensor)

    machine(broken=[(0, 1)], arrives=stale)
    for _ in range(3):
        with raises(DeviceError):
            check_links(GPUS)


def test_a_broken_link_is_checked_again(machine):
    mended = machine(broken=[(0, 1)])
    with pytest.raises(DeviceError):
        check_links(GPUS[:2])
    mended.broken.clear()
    check_links(GPUS[:2])
    assert mended.copies == [(0, 1), (0, 1), (1, 0)]


def test_a_default_device_stays_out_of_it(machine):
    """`torch.device("meta")` as a context changes the device of new tensors. The sent tensor must still be known."""
    machine()
    with torch.device("meta"):
        check_links(GPUS)


def test_threads_check_a_link_once(machine):
    sound = machine()
    threads = [threading.Thread(target=check_links, args=(GPUS[:2],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sound.copies == [(0, 1), (1, 0)]


@pytest.mark.gpu
def test_the_gpus_here_are_sound():
    check_links([card(index) for index in range(COUNT)])
