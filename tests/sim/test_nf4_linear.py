from __future__ import annotations

import pytest
import torch
from raised import raises
from torch import nn
from torch.nn import functional as F

from autosplit.errors import WorkloadError
from autosplit.sim.nf4_linear import Nf4Linear

INPUTS, OUTPUTS = 300, 77


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


@pytest.mark.parametrize("double", [False, True])
def test_the_bytes_are_those_of_bitsandbytes(layer, double):
    """Sizes and packed bytes were compared with `bitsandbytes.functional.quantize_4bit` 0.50.2 on this weight."""
    found = Nf4Linear(layer, double=double)
    assert found.weight.dtype is torch.uint8
    assert found.weight.shape == (INPUTS * OUTPUTS // 2, 1)
    assert found.scales.shape == (361,)  # blocks of 64
    assert found.scales.dtype is (torch.uint8 if double else torch.float32)
    assert (found.steps is None) is not double
    assert found.steps is None or found.steps.shape == (2,)  # groups of 256


@pytest.mark.parametrize("double", [False, True])
def test_a_restored_weight_is_near_the_original(layer, double):
    found = Nf4Linear(layer, double=double, compute_dtype=torch.float32).restored()
    scale = layer.weight.detach().abs().max()
    # Half of NF4's widest gap, 0.304 of the scale, and a little for double quantisation.
    assert (found - layer.weight).abs().max() < 0.16 * scale
    assert F.cosine_similarity(found.flatten(), layer.weight.flatten(), dim=0) > 0.99


def test_the_gradient_is_that_of_the_restored_weight_and_nothing_is_saved(layer):
    quantised = Nf4Linear(layer, compute_dtype=torch.float32)
    x = torch.randn(5, INPUTS, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = quantised(x)
    assert not saved
    (found,) = torch.autograd.grad(out.square().sum(), x)
    expected = F.linear(x, quantised.restored(), layer.bias)
    assert torch.allclose(out, expected)
    assert torch.allclose(found, torch.autograd.grad(expected.square().sum(), x)[0], rtol=1e-4, atol=1e-5)


def test_a_gpu_is_refused(layer):
    with raises(WorkloadError):
        Nf4Linear(layer)(torch.empty(2, INPUTS, device="meta"))
