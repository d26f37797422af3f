"""Copies between GPUs in a forward without kept replicas, on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from balanced_models import MODELS, TOLERANCE, assert_same_gradients, inputs_of, loss_of
from torch import nn

from autosplit.parallel import tensor_copies as copies
from autosplit.parallel.parallel_apply import _outputs_of_gpus
from autosplit.parallel.replicate import replicate
from autosplit.parallel.tensor_copies import GpuCopies

CPUS = (torch.device("cpu"),) * 3
SPLITS = [(4, 6, 6), (0, 8, 8), (4, 0, 12), (0, 0, 16)]


class Comm:
    """torch.nn.parallel.comm, on CPU tensors: the first of the devices gets the tensors themselves."""

    def __init__(self):
        self.reduced = 0

    def broadcast_coalesced(self, tensors, devices):
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        return [real, *([tensor.clone() for tensor in real] for _ in devices[1:])]

    def reduce_add_coalesced(self, inputs, destination):
        assert all(grad.layout is torch.strided and not grad.is_complex() for grads in inputs for grad in grads)
        self.reduced += len(inputs[0])
        return [sum(grads) for grads in zip(*inputs, strict=True)]


@pytest.fixture
def comm(monkeypatch):
    def apply(replicas, args, kwargs, devices):
        return [replica(*a, **k) for replica, a, k in zip(replicas, args, kwargs, strict=True)]

    monkeypatch.setattr(nn.parallel, "parallel_apply", apply)
    stand_in = Comm()
    monkeypatch.setattr(copies, "comm", stand_in)
    return stand_in


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def run(module, inputs, split):
    active = [index for index, share in enumerate(split) if share]
    chunks = [((part,), {}) for part in inputs.split([share for share in split if share])]
    return torch.cat(_outputs_of_gpus(module, CPUS, active, chunks, None))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_module(name, split, comm):
    make, shape = MODELS[name]
    torch.set_default_dtype(torch.float64)
    reference, module = make(), make()
    module.load_state_dict(reference.state_dict())
    inputs = inputs_of(shape, torch.float64)
    loss_of(reference(inputs)).backward()
    loss_of(run(module, inputs, split)).backward()
    assert_same_gradients(module, reference, TOLERANCE[torch.float64])
    assert {n: p.grad.layout for n, p in module.named_parameters() if p.grad is not None} == {
        n: p.grad.layout for n, p in reference.named_parameters() if p.grad is not None
    }


def test_what_is_frozen_gets_no_gradient_anywhere(comm):
    """torch's Broadcast makes zeros of the size of every frozen weight, on each GPU and once more on the first."""
    module = nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 3))
    module[0].requires_grad_(False)
    loss_of(run(module, torch.randn(16, 5), (4, 6, 6))).backward()
    assert comm.reduced == 2


def test_a_gpu_used_twice_has_buffers_of_its_own(comm):
    """torch returns a buffer unchanged if it is the only one of its dtype. Both replicas counted the same batches
    twice.
    """
    module = nn.BatchNorm1d(2)
    first, second = replicate(module, [0, 1], GpuCopies(CPUS[:2]))
    assert first.num_batches_tracked is module.num_batches_tracked
    second.num_batches_tracked.add_(1)
    second.running_mean.add_(1)
    assert module.num_batches_tracked == 0
    assert not module.running_mean.any()


def test_many_small_tensors_travel_together(monkeypatch):
    """600 parameters to each of seven cards were 0.2 s of launches in every step."""
    moved, sent = copies._moved, []
    monkeypatch.setattr(copies, "_moved", lambda tensors, device: sent.append(len(tensors)) or moved(tensors, device))
    between = GpuCopies(CPUS)
    small, large = [torch.full((256,), float(i)) for i in range(600)], torch.ones(copies.BUCKET_BYTES // 4)
    blocks = [torch.zeros_like(tensor) for tensor in (*small, large)]
    between.copy_all_into(blocks, (*small, large), 1)
    assert sent == [600, 1]
    assert all(torch.equal(block, tensor) for block, tensor in zip(blocks, (*small, large), strict=True))
    home = dict(between.bring_all(blocks, 1))
    assert sent == [600, 1] * 2
    assert all(torch.equal(home[i], block) for i, block in enumerate(blocks))
