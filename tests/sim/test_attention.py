"""The attention back end of each GPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from folders import BENCHMARKS
from torch.nn import functional as F

from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.attention import AttentionCall, chosen_backend
from autosplit.sim.cuda_functions import CudaFunctions
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import make_tracer
from autosplit.torch_versions import cudnn_attention_rules
from autosplit.workload.workload import Workload

sys.path.insert(0, str(BENCHMARKS))
from attention_choices import RESULTS, random_calls, tensors_of

CHOICES = json.loads(RESULTS.read_text(encoding="utf-8"))
"""Choices of torch versions by compute capability, as the first letters of back ends."""


@pytest.mark.parametrize(
    ("version", "capability"), [(version, capability) for version, found in CHOICES.items() for capability in found]
)
def test_the_choice_is_that_of_torch(monkeypatch, version, capability):
    monkeypatch.setattr("autosplit.sim.attention.cudnn_attention_rules", lambda: cudnn_attention_rules(version))
    kernels = GpuKernels.of(capability)
    with fake_mode():
        found = [chosen_backend(_call_of(one), kernels)[0] for one in random_calls()]
    assert found == CHOICES[version][capability].split()


def _call_of(call):
    inputs, mask = tensors_of(call, "cpu")
    is_grouped = call["heads"][0] != call["heads"][1]
    return AttentionCall.of(inputs, mask, call["dropout"], causal=call["is_causal"], grouped=is_grouped)


class Attending(torch.nn.Module):
    """Queries, keys and values of one sequence, and attention with dropout over them."""

    def __init__(self, dropout=0.1, groups=4):
        super().__init__()
        self.dropout, self.groups = dropout, groups
        self.project = torch.nn.Linear(64, 64 + 2 * 16 * groups)

    def forward(self, values):
        sizes = [64, 16 * self.groups, 16 * self.groups]
        query, key, value = (
            one.unflatten(-1, (-1, 16)).transpose(1, 2) for one in self.project(values).split(sizes, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, enable_gqa=self.groups < 4)


def workload(precision="bf16", **options):
    def loss_fn(outputs, _):
        return outputs.float().square().mean()

    return Workload(
        Attending(**options), (torch.randn(4, 256, 64), torch.zeros(4)), loss_fn=loss_fn, precision=precision
    )


def bytes_per_sample(given, capability, *, kind="activations_bytes"):
    tracer, why_real = make_tracer(given, like_gpu=True, kernels=GpuKernels.of(capability))
    assert why_real is None
    few, many = (getattr(tracer.trace(StepShape(((n,),))).parts[0], kind) for n in (4, 8))
    return (many - few) / 4, set(tracer.attention.values())


def test_dropout_takes_no_more_than_none_in_flash_attention():
    """The CPU's attention with dropout predicted 2.8 times the memory for a GPT-2 of 1,024 tokens."""
    with_dropout, chosen = bytes_per_sample(workload(), "8.0")
    without, _ = bytes_per_sample(workload(dropout=0.0), "8.0")
    assert chosen == {"flash"}
    assert with_dropout == pytest.approx(without, rel=0.01)


def test_grouped_queries_in_float32_take_the_scores():
    """Qwen3 in float32 was predicted at a quarter of its memory, so its plan ran out of memory."""
    grouped, chosen = bytes_per_sample(workload("none", dropout=0.0, groups=2), "8.0")
    fused, _ = bytes_per_sample(workload("none", dropout=0.0), "8.0")
    assert chosen == {"math"}
    scores_bytes = 4 * 256 * 256 * 4
    assert grouped > fused + scores_bytes


def test_each_gpu_of_a_machine_runs_its_own_attention():
    """A T4 has no flash attention, so its math back end keeps the scores. The A100 keeps none."""
    tracer, _ = make_tracer(workload(), like_gpu=True, kernels=GpuKernels.of("8.0"))

    def peaks(spec):
        devices = parse_devices(spec)
        return SimulatedWorker(devices, (2**60,) * len(devices), tracer).peaks(StepShape(((8, 8),)))

    mixed, turned = peaks("sim:1xA100-40GB+1xT4"), peaks("sim:1xT4+1xA100-40GB")
    alike, others = peaks("sim:2xA100-40GB"), peaks("sim:2xT4")
    assert mixed == (alike[0], others[1])
    assert turned == (others[0], alike[1])
    assert alike[1] < others[1]


def test_the_user_may_rule_back_ends_out():
    with fake_mode(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        query = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        with CudaFunctions(GpuKernels()) as functions:
            F.scaled_dot_product_attention(query, query, query)
    assert set(functions.calls.values()) == {"math"}


def test_attention_on_another_device_is_left_to_torch():
    """A fake of the meta device has no autocast: asking for it raised torch's RuntimeError."""
    with fake_mode(), CudaFunctions(GpuKernels()) as functions:
        query = torch.empty(2, 4, 128, 64, device="meta")
        assert F.scaled_dot_product_attention(query, query, query).device.type == "meta"
    assert not functions.calls
