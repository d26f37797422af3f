"""The copy between devices: its values, its gradients, and its observers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from autosplit.devices.transfer import active_placement, transfer, transfer_into
from autosplit.runtime.memory_tracker import Tracker


def two_devices(**kwargs) -> Tracker:
    return Tracker(["first", "second"], [None, None], **kwargs)


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3).t(), torch.arange(3.0).expand(4, 3), torch.zeros(0, 3), torch.tensor(2.0)],
    ids=["transposed", "expanded", "empty", "scalar"],
)
def test_copies_any_layout_as_its_fake_does(tensor):
    copy = transfer(tensor, 0, 1, "input")
    assert torch.equal(copy, tensor)
    with FakeTensorMode() as mode:
        fake = transfer(mode.from_tensor(tensor), 0, 1, "input")
    assert (fake.shape, fake.stride(), fake.dtype) == (copy.shape, copy.stride(), copy.dtype)
    assert fake.untyped_storage().nbytes() == copy.untyped_storage().nbytes()


def test_gradients():
    tensor = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: transfer(x, 0, 1, "input") ** 2, tensor)
    assert gradgradcheck(lambda x: transfer(x, 0, 1, "input") ** 3, tensor)


def test_nothing_is_followed_outside_a_tracker():
    assert active_placement() is None
    with two_devices() as tracker:
        assert active_placement() is tracker
        with two_devices() as inner:
            assert active_placement() is inner
        assert active_placement() is tracker
    assert active_placement() is None


class Seen:
    def __init__(self):
        self.transfers = []

    def on_op(self, device, func, args, kwargs, outputs, known):
        pass

    def on_transfer(self, source, destination, nbytes, purpose):
        self.transfers.append((source, destination, nbytes, purpose))


def test_charges_the_destination_and_returns_the_gradient():
    seen = Seen()
    tensor = torch.rand(256, requires_grad=True)
    with two_devices(observer=seen) as tracker:
        tracker.adopt(tensor, 0)
        copy = transfer(tensor, 0, 1, "parameter")
        assert tracker.device_of(copy) == 1
        assert tracker.live_bytes == [1024, 1024]
        (copy * 2).sum().backward()
        assert tracker.device_of(tensor.grad) == 0
    assert seen.transfers == [(0, 1, 1024, "parameter"), (1, 0, 1024, "parameter")]


def test_into_a_block_takes_no_memory():
    seen = Seen()
    with two_devices(observer=seen) as tracker:
        block, tensor = torch.zeros(256), torch.ones(128)
        tracker.adopt(block, 0)
        tracker.adopt(tensor, 1)
        transfer_into(block.narrow(0, 128, 128), tensor, 1, 0, "output")
        assert tracker.peak_bytes == [1024, 512]
    assert block.sum() == 128
    assert seen.transfers == [(1, 0, 512, "output")]
