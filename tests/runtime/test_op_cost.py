"""The kernels of ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.runtime.op_cost import op_cost

aten = torch.ops.aten


def convolved(conv: nn.Conv2d, images: torch.Tensor):
    """Return the kernels of a convolution's forward, and of its backward."""
    options = (conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups)
    forward = (images, conv.weight, conv.bias, *options)
    outputs = aten.convolution(*forward)
    backward = (outputs, images, conv.weight, [len(conv.bias)], *options, [True, True, True])
    grads = aten.convolution_backward(*backward)
    return (
        op_cost(aten.convolution.default, forward, {}, outputs),
        op_cost(aten.convolution_backward.default, backward, {}, grads),
    )


@pytest.mark.parametrize(
    ("groups", "size", "kind"), [(1, 3, "convolution"), (1, 1, "pointwise"), (4, 3, "grouped"), (16, 3, "depthwise")]
)
def test_a_convolution_is_a_product_forward_and_two_back(groups, size, kind):
    conv = nn.Conv2d(16, 16, size, padding=size // 2, groups=groups)
    forward, backward = convolved(conv, torch.randn(2, 16, 8, 8))
    flops = 2 * 2 * 8 * 8 * 16 * (16 // groups) * size**2
    assert [cost.kind for cost in forward] == [kind]
    assert [cost.kind for cost in backward] == [kind, f"{kind}_weight", "reduction"]
    assert [cost.flops for cost in (*forward, *backward)] == [flops, flops, flops, 0]
    for cost in (*forward, *backward[:2]):
        rows, columns, inner, count = cost.product
        assert 2 * rows * columns * inner * count == flops
    # The host starts one op, whatever kernels it has.
    assert [cost.part for cost in backward] == ["forward", "none", "none"]


def test_images_with_channels_beside_each_other_have_kernels_of_their_own():
    images = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    forward, _ = convolved(nn.Conv2d(16, 16, 3, groups=16), images)
    assert [cost.kind for cost in forward] == ["depthwise_channels"]


def test_half_images_in_planes_are_laid_out_anew_for_tensor_cores():
    conv = nn.Conv2d(16, 16, 3).to(torch.bfloat16)
    planes = torch.randn(2, 16, 8, 8).to(torch.bfloat16)
    assert [cost.kind for cost in convolved(conv, planes)[0]] == ["convolution", "layout"]
    channels = planes.to(memory_format=torch.channels_last)
    assert [cost.kind for cost in convolved(conv, channels)[0]] == ["convolution"]


def test_what_is_expanded_is_read_once():
    row = torch.randn(1, 1000)
    outputs = torch.randn(500, 1000)
    (cost,) = op_cost(aten.add.Tensor, (outputs, row.expand(500, 1000)), {}, outputs)
    assert cost.nbytes == 2 * outputs.nbytes + row.nbytes
