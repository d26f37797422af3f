"""CUDA's operators in traces of fake CPU tensors."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from marks import for_release
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit.runtime.protocol import StepShape
from autosplit.sim import cuda_functions
from autosplit.sim.cuda_functions import CudaFunctions
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.op_recorder import OpRecorder
from autosplit.sim.tracer import make_tracer
from autosplit.torch_versions import has_autocast
from autosplit.workload.workload import Workload


def test_autocast_runs_norms_and_sums_in_float32():
    half = torch.randn(4, 8).to(torch.bfloat16)
    with CudaFunctions(GpuKernels()):
        assert F.softmax(half, dim=-1).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for found in (F.layer_norm(half, (8,)), half.softmax(-1), half.sum(), half.pow(2), half.exp()):
                assert found.dtype is torch.float32
            assert F.linear(half, torch.randn(3, 8)).dtype is torch.bfloat16
            assert F.gelu(half).dtype is torch.bfloat16


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


class Recomputing(nn.Module):
    """Two checkpointed layers of self-attention with dropout."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first = nn.Linear(64, 64)  # a reentrant checkpoint needs an input with a gradient
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, values):
        values = self.first(values)
        for layer in self.layers:
            if self.reentrant is None:
                values = layer(values)
            else:
                values = checkpoint(layer, values, use_reentrant=self.reentrant)
        return values


@pytest.mark.parametrize(
    ("precision", "reentrant"),
    [("none", True), for_release("bf16", False), for_release("none", False), for_release("bf16", True)],
)
def test_a_checkpoint_recomputes_what_its_forward_computed(precision, reentrant):
    """GPT-2 and BERT with gradient checkpointing raised an error, because the recomputation saved the CPU's tensors.

    A reentrant checkpoint recomputed with the CPU's attention, without a message: 2.35 times the memory.
    """

    def traced(model):
        batch = (torch.randn(4, 128, 64), torch.zeros(4))
        tracer, why_real = make_tracer(Workload(model, batch, loss_fn=squares, precision=precision), like_gpu=True)
        assert why_real is None
        names = Counter()
        with mock.patch.object(
            OpRecorder, "on_op", lambda _, __, func, *___: names.update([func.overloadpacket.__name__])
        ):
            few, many = (tracer.trace(StepShape(((n,),))).parts[0].activations_bytes for n in (8, 16))
        return (many - few) / 8, names

    recomputed_bytes, names = traced(Recomputing(reentrant=reentrant))
    kept_bytes, once = traced(Recomputing(reentrant=None))
    assert recomputed_bytes < 0.75 * kept_bytes
    for name in once:
        if "attention" in name or name in ("native_dropout", "native_layer_norm"):
            times = 1 if name.endswith("backward") else 2
            assert names[name] == times * once[name], name


def squares(outputs, _):
    return outputs.float().square().mean()


def test_a_function_that_asks_in_another_one_runs_once():
    """BEiT raised an error, because `torch.meshgrid` called itself forever."""
    with fake_mode(), CudaFunctions(GpuKernels()):
        rows, columns = torch.meshgrid(torch.empty(3), torch.empty(4), indexing="ij")
    assert rows.shape == columns.shape == (3, 4)


# The lists of autocast

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

LISTS = {
    "AT_FORALL_FP32": cuda_functions.FLOAT32_NAMES,
    "AT_FORALL_FP32_SET_OPT_DTYPE": cuda_functions.FLOAT32_RESULT_NAMES,
    "AT_FORALL_PROMOTE": cuda_functions.PROMOTED_NAMES,
}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch was installed without its headers")
@pytest.mark.parametrize("macro", LISTS)
def test_the_names_are_those_of_torchs_header(macro):
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(rf"#define {macro}\(_\)(.*)", text)
    if found is None:
        pytest.skip(f"the header of torch {torch.__version__} has no list {macro}")
    names = set(re.findall(r"_\((\w+)[,)]", found[1]))
    assert names
    ours = {name for name in LISTS[macro] if name != "rms_norm" or has_autocast("rms_norm")}
    assert names == ours
