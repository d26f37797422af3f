"""CUDA's autocast and dropout on the processor."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from autosplit.runtime.cuda_functions import CudaFunctions
from autosplit.runtime.fake_copy import fake_mode
from autosplit.runtime.gpu_kernels import GpuKernels


def test_norms_and_sums_are_in_float32_inside_autocast_alone():
    half = torch.randn(4, 8).to(torch.bfloat16)
    with CudaFunctions(GpuKernels()):
        assert F.softmax(half, dim=-1).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for found in (F.layer_norm(half, (8,)), half.softmax(-1), half.sum(), half.pow(2), half.exp()):
                assert found.dtype is torch.float32
            assert F.linear(half, torch.randn(3, 8)).dtype is torch.bfloat16
            assert F.gelu(half).dtype is torch.bfloat16


def test_a_fake_softmax_reads_halves_and_writes_float32_in_one_kernel():
    ops = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            return func(*args, **(kwargs or {}))

    with fake_mode(), CudaFunctions(GpuKernels()), torch.autocast("cpu", dtype=torch.float16):
        values = nn.Linear(8, 8)(torch.randn(4, 8))
        with Log():
            values.softmax(-1).backward(torch.ones(4, 8))
    names = [op.__name__ for op in ops]
    assert "_softmax.default" in names
    assert "_softmax_backward_data.default" in names
    assert "_to_copy.default" not in names[: names.index("_softmax_backward_data.default")]


def test_dropout_keeps_a_byte_of_each_value():
    values = torch.randn(4, 8, requires_grad=True)
    kept = []
    with (
        CudaFunctions(GpuKernels()) as functions,
        torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor),
    ):
        for unchanged in (F.dropout(values, 0.0), F.dropout(values, 0.5, training=False)):
            assert torch.equal(unchanged, values)
        assert not functions.needed
        dropped = nn.Dropout(0.5)(values)
        assert functions.needed
    assert [tensor.dtype for tensor in kept] == [torch.bool]
    assert torch.equal(dropped, values * kept[0] * 2)
