"""Compare predictions for compiled language models with published steps of H100 and A100.

    python benchmarks/published_compiled.py [--output FILE]

Each step is predicted twice: eager, and compiled with `FUSED_SHARE`. Steps with torch 2.5 or later, or with an early
torch 2.0, gave that fraction: it is fitted to them. Steps with torch 2.4 were not used. Each GPU computes the same, and
all-reduce is left out, because the measured jobs hide it behind the backward. Models have random weights, and AdamW
replaces Muon and SOAP. The published steps include the optimizer.

Sources: github.com/KellerJordan/modded-nanogpt, records/track_1_short (logs of October 2024);
github.com/karpathy/nanochat, dev/LOG.md; github.com/foundation-model-stack/fms-fsdp, README.md;
github.com/pytorch/torchtune, README.md (November 2024); github.com/karpathy/nanoGPT, README.md (December 2022).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from answer import of_this_run
from published_language import CONFIGS
from speedrun_gpt import SpeedrunGpt
from torch import nn

from autosplit.devices.catalog import find_card
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Tracer
from autosplit.workload.compiled import FUSED_SHARE
from autosplit.workload.workload import Workload

RESULTS = Path(__file__).parent / "results" / "published_compiled.json"


@dataclass(frozen=True)
class Step:
    """A published step of one GPU.

    Attributes:
        build: Makes the model.
        precision: A precision of `Workload`, or ``"bf16 weights"``.
        batch: Samples per forward.
        step_s: Measured time, or 0 if only the memory was published.
        memory_gb: Measured memory in 10^9 bytes, or 0.
        fitted: Whether `FUSED_SHARE` was fitted to the step.
    """

    name: str
    gpu: str
    build: Callable[[], nn.Module]
    precision: str
    batch: int
    accumulation_steps: int
    length: int
    step_s: float
    torch: str
    fitted: bool
    memory_gb: float = 0.0


def _llama(name: str, attention: str = "sdpa") -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention)
    return model


_gpt2 = partial(_llama, "gpt2", "eager")
_modern = partial(SpeedrunGpt, 768, 12, 6, 50304, 1024, tied=True)
_billion = partial(SpeedrunGpt, 1536, 52, 12, 50304, 1024, tied=True)
_nanochat_12 = partial(SpeedrunGpt, 768, 12, 6, 65536, 2048, tied=False)
_nanochat_26 = partial(SpeedrunGpt, 1664, 26, 13, 65536, 2048, tied=False)
_tokens_per_gpu = 630_000 / 8

STEPS = (
    Step("modded-nanogpt 124M", "H100-80GB", _modern, "bf16", 64, 1, 1024, 0.14182, "2.5", fitted=True),
    Step("modded-nanogpt 124M", "H100-80GB", _modern, "bf16", 64, 1, 1024, 0.17889, "2.4", fitted=False),
    Step("modded-nanogpt 1.5B", "H100-80GB", _billion, "bf16", 12, 5, 1024, 1.71917, "2.4", fitted=False),
    Step(
        "nanochat d26", "H100-80GB", _nanochat_26, "bf16", 16, 2, 2048, 32 * 2048 / _tokens_per_gpu, "2.9", fitted=True
    ),
    Step("nanochat d12", "H100-80GB", _nanochat_12, "bf16", 32, 1, 2048, 0.0, "2.9", fitted=False, memory_gb=34),
    Step(
        "Llama 2 7B, FSDP",
        "A100-80GB",
        partial(_llama, "llama-2-7b"),
        "bf16 weights",
        2,
        1,
        4096,
        2 * 4096 / 4550,
        "not stated",
        fitted=True,
    ),
    Step(
        "Llama 3.2 3B",
        "A100-80GB",
        partial(_llama, "llama-3.2-3b"),
        "bf16 weights",
        2,
        1,
        4096,
        0.9104,
        "2.6 nightly",
        fitted=True,
        memory_gb=54.8,
    ),
    Step("nanoGPT 124M", "A100-40GB", _gpt2, "bf16", 12, 1, 1024, 0.135, "2.0 nightly", fitted=True),
)


NOT_COMPARED = {
    "modded-nanogpt, December 2024 and later": "FlexAttention over packed documents, 8-bit matrix products from 2025",
    "llm.c": "not torch",
    "nanochat d26 in fp8, Megatron-Bridge's data-parallel rows": "8-bit matrix products",
    "Megatron-Bridge's mixtures of experts": "expert parallelism",
    "fms-fsdp Llama 2 13B to 70B": "selective checkpointing, whose layers are not stated",
    "Stable Diffusion 2 on 32 to 256 A100, BERT on 4 to 64 GPUs": "several machines, whose links are not stated",
}
"""Published steps that can't be predicted, with the reason."""


def compare(step: Step) -> dict[str, Any]:
    """Predict a step, eager and compiled, and return the figures next to the published ones."""
    own_dtype = step.precision == "bf16 weights"
    model = built_without_memory(lambda: step.build().bfloat16() if own_dtype else step.build(), fake_mode())
    codes = torch.zeros(2, step.length, dtype=torch.long)
    options: dict[str, Any] = {"precision": "none" if own_dtype else step.precision, "optimizer": torch.optim.AdamW}
    if isinstance(model, SpeedrunGpt):
        workload = Workload(model, (codes, codes), compute_loss=lambda net, batch: net(*batch), **options)
    else:
        workload = Workload(model, {"input_ids": codes, "labels": codes}, **options)
    tracer = Tracer(workload, fake=True, like_gpu=True, kernels=GpuKernels.of(find_card(step.gpu).compute_capability))
    shape = StepShape(((step.batch,),) * step.accumulation_steps)
    devices = parse_devices(f"sim:{step.gpu}")
    eager, compiled = (
        SimulatedWorker(devices, (2**60,), tracer, fused_share=share).measure(shape) for share in (1.0, FUSED_SHARE)
    )
    found: dict[str, Any] = {"model": step.name, "gpu": step.gpu, "torch": step.torch, "fitted": step.fitted}
    found |= {"predicted eager s": round(eager.seconds, 4), "predicted compiled s": round(compiled.seconds, 4)}
    if step.step_s:
        found |= {"measured s": round(step.step_s, 4), "compiled ratio": round(compiled.seconds / step.step_s, 3)}
        found["eager ratio"] = round(eager.seconds / step.step_s, 3)
    if step.memory_gb:
        found |= {"measured GB": step.memory_gb, "memory ratio": round(eager.peak_bytes[0] / 1e9 / step.memory_gb, 3)}
    return found


def main() -> None:
    """Compare all steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    found = [compare(step) for step in STEPS]
    errors = [abs(one["compiled ratio"] - 1) for one in found if one["fitted"]]
    report = {
        **of_this_run(),
        "fused share": FUSED_SHARE,
        "steps": found,
        "not compared": NOT_COMPARED,
        "median error of fitted steps": round(statistics.median(errors), 3),
        "worst error of fitted steps": round(max(errors), 3),
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
