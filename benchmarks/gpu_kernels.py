"""The stage of `gpu.py` that compares the memory of single modules on CUDA with what `sim:` traces for them.

`sim:` traces a step with the operators of the CPU. CUDA chooses other kernels for some modules, which save other
tensors. For each module this stage records CUDA's attention kernels and the bytes per sample, measured and traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_checks import CUDA, DEVICE, _shape, _worker
from gpu_findings import KIND, MIB, checked
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import Workload
from autosplit.sim.simulated import traced_peaks
from autosplit.sim.tracer import make_tracer
from autosplit.workload.batch import resize
from autosplit.workload.workload import PRECISIONS

WITHIN = 0.05
"""Traced and measured bytes per sample agree if they are within this share of each other."""

SAMPLES = (8, 24)
NAMED = ("dot_product", "attention", "softmax", "dropout", "norm", "lstm", "gru", "rnn")
"""Only operators whose names have one of these are recorded."""


@dataclass(frozen=True)
class Case:
    """A module with its input's shape per sample."""

    name: str
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    precision: str = "none"
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


class Attends(nn.Module):
    """Attention of one layer, by `scaled_dot_product_attention`."""

    def __init__(
        self,
        heads: int = 8,
        head_dim: int = 64,
        *,
        groups: int = 1,
        dropout: float = 0.0,
        causal: bool = True,
        bias: str = "",
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.groups = heads, head_dim, groups
        self.dropout, self.causal, self.bias = dropout, causal and not bias, bias
        width = heads * head_dim
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width // groups)
        self.table = nn.Parameter(torch.zeros(heads, 256, 256)) if bias == "trained" else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the module."""
        count, length, _ = x.shape
        q = self.q(x).view(count, length, self.heads, self.head_dim).transpose(1, 2)
        kv = self.kv(x).view(count, length, 2, self.heads // self.groups, self.head_dim).permute(2, 0, 3, 1, 4)
        mask = None
        if self.table is not None:
            mask = self.table[None, :, :length, :length].to(q.dtype)
        elif self.bias == "mask":
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(
            q, kv[0], kv[1], mask, self.dropout, is_causal=self.causal, enable_gqa=self.groups > 1
        )
        return y.transpose(1, 2).reshape(count, length, -1)


class Calls(nn.Module):
    """A function of a linear layer's output."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module."""
        return self.function(self.linear(x))


class First(nn.Module):
    """The first output of a module that returns several, called with its input once or three times."""

    def __init__(self, module: nn.Module, times: int = 1, **options: Any) -> None:
        super().__init__()
        self.module, self.times, self.options = module, times, options

    def forward(self, x: Tensor) -> Tensor:
        """Run the module."""
        return self.module(*([x] * self.times), **self.options)[0]


def _attention() -> list[Case]:
    found = []
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for name, options in (
            ("", {}),
            ("dropout", {"dropout": 0.1}),
            ("grouped queries", {"groups": 4}),
            ("mask", {"bias": "mask"}),
            ("trained bias", {"bias": "trained"}),
            ("head dimension 80", {"head_dim": 80}),
            ("head dimension 60", {"head_dim": 60}),
            ("head dimension 60, mask", {"head_dim": 60, "bias": "mask"}),
            ("head dimension 256", {"heads": 2, "head_dim": 256}),
        ):
            width = options.get("heads", 8) * options.get("head_dim", 64)
            title = ", ".join(["attention", kind, *([name] if name else [])])
            found.append(Case(title, partial(Attends, **options), (256, width), dtype=dtype))
    return found


def _others() -> list[Case]:
    multihead = partial(nn.MultiheadAttention, 256, 4, batch_first=True)
    found = []
    for precision in ("none", "bf16"):
        kind = "fp32" if precision == "none" else "bf16 autocast"
        modules: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
            "MultiheadAttention": (lambda: First(multihead(), 3), (128, 256)),
            "MultiheadAttention without weights": (lambda: First(multihead(), 3, need_weights=False), (128, 256)),
            "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), (128, 256)),
            "LayerNorm": (lambda: nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)), (128, 256)),
            "RMSNorm": (lambda: nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256)), (128, 256)),
            "Dropout": (lambda: nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.1)), (128, 256)),
            "log_softmax": (lambda: Calls(lambda x: x.log_softmax(-1), 1024), (64, 1024)),
            "logsigmoid": (lambda: Calls(F.logsigmoid, 1024), (64, 1024)),
            "logsumexp": (lambda: Calls(lambda x: x.logsumexp(-1, keepdim=True) * x, 1024), (64, 1024)),
            "normalize": (lambda: Calls(lambda x: F.normalize(x, dim=-1), 1024), (64, 1024)),
            "LSTM": (lambda: First(nn.LSTM(128, 128, 2, batch_first=True)), (64, 128)),
            "GRU": (lambda: First(nn.GRU(128, 128, batch_first=True)), (64, 128)),
            "Conv2d and BatchNorm2d": (
                lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)),
                (16, 32, 32),
            ),
            "upsampled": (
                lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.Upsample(scale_factor=2.0, mode="bilinear")),
                (8, 34, 34),
            ),
        }
        found += [Case(f"{name}, {kind}", module, shape, precision) for name, (module, shape) in modules.items()]
        group = lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32))  # noqa: E731
        found.append(Case(f"GroupNorm in channels_last, {kind}", group, (16, 32, 32), precision, channels_last=True))
    return found


class _Operators(TorchDispatchMode):
    """Records the operators that matter here, and what each allocates while it runs and frees before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.temporary_bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if any(word in name for word in NAMED):
            self.names[name] = None
        before = int(CUDA.memory_allocated(DEVICE))
        CUDA.reset_peak_memory_stats(DEVICE)
        outputs = func(*args, **(kwargs or {}))
        kept = max(before, int(CUDA.memory_allocated(DEVICE)))
        if (size := int(CUDA.max_memory_allocated(DEVICE)) - kept) > 0:
            self.temporary_bytes[name] = max(size, self.temporary_bytes.get(name, 0))
        return outputs


def kernels_stage(*, small: bool) -> None:
    """Compare every module's bytes per sample on the GPU with the traced ones."""
    cases = [*_others(), *_attention()]
    for case in cases[:: 15 if small else 1]:
        checked(f"kernels of {case.name}", partial(_compared, case))


def _compared(case: Case) -> tuple[bool | None, dict[str, Any]]:
    torch.manual_seed(0)
    module = case.module().to(case.dtype)
    inputs = torch.randn(4, *case.shape).to(case.dtype)
    if case.channels_last:
        module, inputs = module.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    loss = lambda outputs, _targets: outputs.float().square().mean()  # noqa: E731
    workload = Workload(
        module, (inputs, torch.zeros(4)), loss_fn=loss, optimizer=torch.optim.SGD, precision=case.precision
    )
    worker = _worker(workload)
    measured = [worker.peaks(_shape(size))[0] for size in SAMPLES]
    worker.close()
    tracer, why_real = make_tracer(workload, like_gpu=True)
    traced = [traced_peaks(tracer, _shape(size))[0] for size in SAMPLES]
    slope = (traced[1] - traced[0]) / max(1, measured[1] - measured[0])
    operators = _operators(module, resize(workload.sample_batch, SAMPLES[1], 0)[0], case.precision)
    figures = {
        "operators": list(operators.names),
        "temporary_bytes": operators.temporary_bytes,
        "measured_mib": [round(size / MIB, 3) for size in measured],
        "traced_mib": [round(size / MIB, 3) for size in traced],
        "bytes per sample traced/measured": round(slope, 3),
        "traced with real tensors": why_real,
    }
    return (abs(slope - 1) <= WITHIN if KIND == "cuda" else None), figures


def _operators(module: nn.Module, inputs: Tensor, precision: str) -> _Operators:
    """Return the operators that a forward and backward runs on the GPU; the first run leaves its workspaces."""
    dtype = PRECISIONS[precision]
    module, inputs = module.to(DEVICE), inputs.to(DEVICE)
    for _ in range(2):
        with _Operators() as seen:
            with torch.autocast(KIND, dtype=dtype, enabled=dtype is not None):
                outputs = module(inputs)
            outputs.float().square().mean().backward()
    return seen
