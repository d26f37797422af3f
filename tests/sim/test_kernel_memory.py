"""Memory inside CUDA kernels: the formulas against an H100's figures, and how the tracker charges them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from folders import BENCHMARKS
from torch import Tensor, nn
from torch.nn import functional as F
from traced_memory import traced_parts

from autosplit import Workload, torch_versions
from autosplit.devices.catalog import gpu_catalog
from autosplit.runtime.memory_tracker import rounded
from autosplit.runtime.protocol import StepShape
from autosplit.sim import kernel_memory
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.kernel_memory import Block, temporary_blocks, workspaces
from autosplit.sim.simulated import traced_peaks
from autosplit.sim.trace_tracker import TraceTracker
from autosplit.sim.tracer import Tracer
from autosplit.torch_versions import cublas_workspace_bytes, cublaslt_workspace_bytes

aten = torch.ops.aten

H100, A100, RTX4090, T4 = (GpuKernels(capability) for capability in (90, 80, 89, 75))
SAMPLES, LENGTH = 24, 256
"""The batch whose operators benchmarks/gpu_kernels.py recorded, and the length of its sequences."""

KEPT_WHOLE = 2**20 + 512
"""CUDA's allocator gives a block whole if at most 1 MiB of it would be left; `sum` also takes 512 bytes of counters."""


def results(stage: str) -> dict[str, dict[str, Any]]:
    stages = json.loads((BENCHMARKS / "results" / "gpu" / "h100.json").read_text(encoding="utf-8"))["stages"]
    return {one["name"]: one for each in stages if each["name"] == stage for one in each["findings"]}


KERNELS = {
    name.removeprefix("kernels of "): found["temporary_bytes"]
    for name, found in results("kernels").items()
    if "temporary_bytes" in found
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_of(count: int, heads: int, width: int, dtype: torch.dtype, *, padded: bool = False) -> Tensor:
    """Return queries in a linear layer's layout. Padding puts the heads before the length."""
    if padded:
        return meta(count, heads, LENGTH, width, dtype=dtype)
    return meta(count, LENGTH, heads, width, dtype=dtype).transpose(1, 2)


def backward(query: Tensor, key: Tensor | None = None, *, dropout: float = 0.0, bias: bool = False) -> tuple[Any, ...]:
    """Return the arguments of the memory-efficient backward. Other backwards have the same first arguments."""
    key = query if key is None else key
    return query, query, key, key, query, None, None, None, None, dropout, [True] * 3 + [bias], True


def efficient(query: Tensor, kernels: GpuKernels = H100, **options: Any) -> tuple[Block, ...]:
    func = aten._scaled_dot_product_efficient_attention_backward.default
    return temporary_blocks(func, backward(query, **options), None, kernels)


def cudnn(query: Tensor) -> tuple[Block, ...]:
    func = aten._scaled_dot_product_cudnn_attention_backward.default
    return temporary_blocks(func, backward(query), None, H100)


def flash(query: Tensor, key: Tensor | None = None) -> tuple[Block, ...]:
    func = aten._scaled_dot_product_flash_attention_backward.default
    return temporary_blocks(func, backward(query, key), None, H100)


def summed(values: Tensor, over: Sequence[int] = (0,), kernels: GpuKernels = H100) -> tuple[Block, ...]:
    return temporary_blocks(aten.sum.dim_IntList, (values, list(over), True), None, kernels)


def total(blocks: Sequence[Block]) -> int:
    return sum(rounded(block.limited_bytes) for block in blocks)


def formula(name: str, operator: str) -> int:
    """Return the formula's result for an operator in a case of benchmarks/gpu_kernels.py."""
    dtype = torch.float32 if "fp32" in name else torch.bfloat16
    width = next((width for width in (60, 80, 256) if f"head dimension {width}" in name), 64)
    heads = 2 if width == 256 else 8
    if operator == "sum.dim_IntList":  # the bias of keys and values together
        return total(summed(meta(SAMPLES * LENGTH, 2 * heads * width)))
    if operator == "_softmax_backward_data.default":  # autocast computes softmax in float32
        scores = meta(SAMPLES, heads, LENGTH, LENGTH)
        return total(temporary_blocks(aten._softmax_backward_data.default, (scores, scores, -1, dtype), None, H100))
    if operator == "_safe_softmax.default":
        scores = meta(SAMPLES, heads, LENGTH, LENGTH)
        return total(temporary_blocks(aten._safe_softmax.default, (scores, -1), scores, H100))
    query = heads_of(SAMPLES, heads, width, dtype)
    if operator == "_scaled_dot_product_efficient_attention_backward.default":
        return total(efficient(query))
    if operator == "_scaled_dot_product_cudnn_attention_backward.default":
        return total(cudnn(query))
    assert operator == "_scaled_dot_product_flash_attention_backward.default"
    return total(flash(heads_of(SAMPLES, heads, 64, dtype, padded=True)))  # torch pads 60 to 64


FIGURES = {
    (name, operator): nbytes
    for name, found in KERNELS.items()
    for operator, nbytes in found.items()
    if nbytes > 4096  # `mean` takes 2 KiB, cuDNN's forward 512 bytes
}


@pytest.mark.parametrize(("name", "operator"), FIGURES)
def test_the_formulas_are_what_an_h100_took(name, operator):
    assert 0 <= FIGURES[name, operator] - formula(name, operator) <= KEPT_WHOLE


def test_most_formulas_are_what_an_h100_took_to_the_byte():
    left = [nbytes - formula(*key) for key, nbytes in FIGURES.items()]
    assert len(left) > 40
    assert sum(one <= 512 for one in left) > 0.8 * len(left)


def at_sizes(build: Callable[[int], tuple[Block, ...]]) -> None:
    """Assert that each block is the same at every batch, or exactly proportional to it."""
    one, *others = (build(count) for count in (2, 8, 1031))
    for count, blocks in zip((8, 1031), others, strict=True):
        assert len(blocks) == len(one) > 0
        for block, other in zip(blocks, one, strict=True):
            assert block.limits == other.limits
            assert block.nbytes == other.nbytes or 2 * block.nbytes == count * other.nbytes


@pytest.mark.parametrize("kernels", [H100, A100, RTX4090, T4])
@pytest.mark.parametrize("width", [24, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_efficient_backward_is_affine_in_the_batch(kernels, width, dtype, dropout):
    at_sizes(lambda count: efficient(heads_of(count, 3, width, dtype), kernels, dropout=dropout))


def test_all_others_are_affine_in_the_batch():
    half = torch.float16
    at_sizes(lambda count: cudnn(heads_of(count, 3, 72, half)))
    at_sizes(lambda count: flash(heads_of(count, 6, 72, half), heads_of(count, 2, 72, half)))
    at_sizes(lambda count: summed(meta(count, 200, 768), (0, 1)))
    at_sizes(lambda count: summed(meta(count, 32, 56, 56).to(memory_format=torch.channels_last), (0, 2, 3)))
    softmax, embedding = aten._softmax_backward_data.default, aten.embedding_dense_backward.default
    at_sizes(lambda count: temporary_blocks(softmax, (meta(count, 7, 33),) * 2, None, H100))
    at_sizes(lambda count: temporary_blocks(aten._safe_softmax.default, (None, -1), meta(count, 7, 33), H100))
    rows = lambda count: (meta(count, 5, 33), meta(count, 5, dtype=torch.int64), 1000)
    at_sizes(lambda count: temporary_blocks(embedding, rows(count), None, H100))
    wide = lambda count: heads_of(count, 3, 256, half)
    forward = aten._scaled_dot_product_efficient_attention.default
    at_sizes(lambda count: temporary_blocks(forward, (wide(count),) * 3, None, H100))


def test_flash_adds_up_the_gradients_of_grouped_queries():
    query, key = heads_of(4, 8, 64, torch.float16), heads_of(4, 2, 64, torch.float16)
    plain, grouped = flash(query), flash(query, key)
    assert grouped == (*plain, *[Block(4 * 8 * LENGTH * 64 * 2)] * 2)


class TestSums:
    def test_groups_are_bounded_by_the_gpu(self):
        """See Note [Temporary blocks]."""
        sizes = {rows: summed(meta(rows, 1024))[0].limited_bytes for rows in (1020, 1021, 6144, 16_896, 100_000)}
        assert sizes == {
            1020: 0,
            1021: 1021 * 8192,
            6144: 96 * 2**19,
            16_896: 264 * 2**19,
            100_000: 264 * 2**19,
        }

    def test_a_convolution_sums_the_gradient_of_its_bias(self):
        grad = meta(8, 64, 32, 32).to(memory_format=torch.channels_last)
        args = (grad, grad, *[None] * 7, 1)
        made = [temporary_blocks(aten.convolution_backward.default, args, (None, None, b), H100) for b in (grad, None)]
        assert made == [summed(grad, (0, 2, 3)), ()]
        assert made[0]


def test_the_largest_gpus_of_the_catalogue_are_known():
    for spec in gpu_catalog().values():
        if spec.compute_capability is None:  # a GPU of AMD or Intel
            continue
        capability = round(10 * float(spec.compute_capability))
        if spec.multiprocessors is not None and capability in kernel_memory._GPUS:
            assert spec.multiprocessors <= kernel_memory._GPUS[capability][0], spec.name


class TestWorkspaces:
    def test_are_those_of_torchs_source(self, monkeypatch):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        monkeypatch.setattr(torch_versions.torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
        assert [cublas_workspace_bytes(one) / 2**20 for one in (75, 80, 89, 90, 100)] == [8.125] * 3 + [32, 8.125]
        assert cublaslt_workspace_bytes() == 2**20
        monkeypatch.setattr(torch_versions.torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
        assert [cublas_workspace_bytes(one) / 2**20 for one in (89, 90, 100, 120)] == [8.125, 32, 32, 32]
        assert cublaslt_workspace_bytes() == 0

    def test_are_as_large_as_the_environment_has_them(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
        assert cublas_workspace_bytes(90) == 2 * 4096 * 1024 + 8 * 16 * 1024

    def test_of_cublaslt_are_for_products_with_a_bias(self, monkeypatch):
        monkeypatch.setattr(kernel_memory, "cublaslt_workspace_bytes", lambda: 2**20)
        product = (meta(4, 4), meta(4, 4))
        assert set(workspaces(aten.addmm.default, (meta(4), *product), H100)) == {"cublas", "cublasLt"}
        assert set(workspaces(aten.addmm.default, (meta(4, 4), *product), H100)) == {"cublas"}
        assert set(workspaces(aten.bmm.default, product, H100)) == {"cublas"}


WORKSPACE = cublas_workspace_bytes(90)


class TestTracker:
    def test_temporary_blocks_count_for_the_peak_and_are_gone(self):
        scores = torch.rand(8, 64)
        with TraceTracker(1, kernels=H100) as seen:
            for each in (scores,):
                seen.adopt(each, 0)
            before = seen.live_bytes[0]
            made = aten._softmax_backward_data(scores, scores, -1, torch.float32)
            assert seen.live_bytes[0] == before + rounded(made.nbytes)
            assert seen.peak_bytes[0] == before + rounded(made.nbytes) + rounded(scores.nbytes)
            assert [one.nbytes for one in seen.bounded_entries()[-2:]] == [scores.nbytes, -scores.nbytes]
            assert seen.peak_account(0) == {"activations": seen.peak_bytes[0]}

    def test_a_workspace_counts_from_the_start_of_the_step(self):
        """The peak may come before the first product, because an earlier step has left the workspace."""
        large, small = torch.rand(2**20), torch.rand(8, 8)
        with TraceTracker(1, kernels=H100) as seen:
            seen.adopt(large, 0)
            seen.adopt(small, 0)
            (large + 1).sum()
            assert seen.peak_bytes[0] < 9 * 2**20
            small @ small
            assert seen.peak_bytes[0] == 8 * 2**20 + 2 * 512 + WORKSPACE
            assert sum(seen.peak_account(0).values()) == seen.peak_bytes[0]


def perceptron(width: int, depth: int = 4) -> Workload:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    batch = torch.randn(8, width), torch.randint(10, (8,))
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=torch.optim.Adam)


def traced(workload: Workload, kernels: GpuKernels | None) -> Tracer:
    return Tracer(workload, fake=True, like_gpu=True, kernels=kernels)


def test_a_perceptron_is_predicted_as_an_h100_measured_it():
    """Without inner memory the predictions were 78% and 85%: `mlp fp32, Adam` in benchmarks/gpu_models.py."""
    found = results("steps")["step of mlp fp32, Adam"]
    traces = AffineTraces(traced(perceptron(2048), H100))
    peaks = [traced_peaks(traces, StepShape(((count,),)))[0] / 2**20 for count in found["samples"]]
    own_mib = cublaslt_workspace_bytes() / 2**20  # measured with torch 2.11
    assert [peak + 1 - own_mib for peak in peaks] == pytest.approx(found["allocated_mib"], abs=0.1)


class TestTraces:
    @pytest.mark.parametrize("arrangement", ["balanced", "rank"])
    @pytest.mark.parametrize("count", [2, 1000, 3000, 30_000])
    def test_one_trace_predicts_blocks_at_every_batch(self, arrangement, count):
        """A sum of 1,000 rows needs no memory. With 3,000 rows it needs memory per row, with 30,000 a maximum."""
        shape = StepShape(((count,),), arrangement, 2 if arrangement == "rank" else 1)
        predicted = AffineTraces(traced(perceptron(512, 2), H100))
        assert traced_parts(predicted, shape) == traced_parts(traced(perceptron(512, 2), H100), shape)
        assert not predicted.given_up
