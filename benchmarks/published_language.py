"""Compare simulated GPUs with published steps of language models in bfloat16: step times and peak memory.

    python benchmarks/published_language.py [--output FILE]

The table is `published_language.csv`. Each row names its source. Rows that need torch.compile, FlexAttention or FSDP
are listed and not compared, because simulated steps are eager and each device holds the whole model. Models have random
weights. A ratio is predicted / published. "allocated" memory is torch.cuda.max_memory_allocated. "reserved" memory
includes the gaps of the allocator, and "VRAM" a CUDA context of 512 MiB, too. "exceeded" is the memory of a GPU that
was not enough. Nothing is fitted to these rows.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.devices.catalog import find_card
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.nf4_linear import quantize_linear
from autosplit.sim.simulated import SimulatedWorker, attention_of
from autosplit.sim.tracer import Tracer
from autosplit.workload.workload import Workload

TABLE = Path(__file__).with_name("published_language.csv")
RESULTS = Path(__file__).parent / "results" / "published_language.json"
CONTEXT_BYTES = 512 * 2**20
"""Memory of a CUDA context, as in `published_reserved.csv`. The catalogue leaves more memory free."""


def _llama(width: int, inner: int, layers: int, heads: int, groups: int, words: int, **other: Any) -> Any:
    """Return a configuration of Llama. `groups` are the heads of keys and values."""
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=words,
        **other,
    )


CONFIGS = {
    # nanoGPT has no dropout, and its vocabulary is rounded up to a multiple of 64.
    "gpt2": transformers.GPT2Config(vocab_size=50304, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt2-medium": transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "tiny-llama": _llama(2048, 5632, 22, 32, 4, 32000),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000),  # Its window of 4,096 tokens is never full here.
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
}
OWN_LOSS = ("karpathy", "Lightning-AI")
"""Sources that compute the cross entropy themselves. The loss of transformers converts the logits to float32 first."""


class Lora(nn.Module):
    """A frozen linear layer with a trained product of two small ones, as litgpt adds it to queries and values."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the product of the small layers to the output of the frozen one."""
        return self.base(x) + self.up(self.down(self.dropout(x)))


@dataclass(frozen=True)
class Row:
    """A published step. Empty fields of the table are 0."""

    source: str
    model: str
    card: str
    simulated: str
    precision: str
    attention: str
    batch: int
    accumulation: int
    size: int
    lora: int
    recipe: str
    step_s: float
    peak_gb: float
    memory: str
    needs: str


def rows() -> list[Row]:
    """Read the table."""
    numbers = {"batch": int, "accumulation": int, "size": int, "lora": int, "step_s": float, "peak_gb": float}
    with TABLE.open(encoding="utf-8") as file:
        return [
            Row(**{**row, **{name: convert(row[name] or 0) for name, convert in numbers.items()}})
            for row in csv.DictReader(file)
        ]


def workload(row: Row) -> Workload:
    """Build the training step of a row, without memory."""

    def model() -> nn.Module:
        build = transformers.AutoModelForCausalLM.from_config
        built: nn.Module = build(CONFIGS[row.model], attn_implementation=row.attention)
        if row.recipe:
            return _adapted_by_peft(built.to(torch.bfloat16), row)
        if row.lora:
            _add_lora(built, row.lora)
        return built.to(torch.bfloat16) if row.precision == "bf16" else built

    tokens = torch.zeros(2, row.size, dtype=torch.long)
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, fused=True) if row.model == "gpt2-medium" else torch.optim.AdamW,
        "precision": "bf16" if row.precision == "bf16 autocast" else "none",
    }
    built = built_without_memory(model, fake_mode())
    if row.recipe:
        return Workload(
            built, {"input_ids": tokens, "labels": tokens}, compute_loss=RECIPES[row.recipe].loss, **options
        )
    if row.source.removeprefix("github:").startswith(OWN_LOSS):
        return Workload(built, ({"input_ids": tokens}, tokens), loss_fn=_next_token_loss, **options)
    return Workload(built, {"input_ids": tokens, "labels": tokens}, **options)


def _add_lora(model: Any, rank: int) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = Lora(attention.q_proj, rank), Lora(attention.v_proj, rank)


def _adapted_by_peft(model: Any, row: Row) -> nn.Module:
    """Add peft's adapters to a model whose layers are checkpointed and, for QLoRA, quantised."""
    import peft

    recipe = RECIPES[row.recipe]
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.quantized:
        quantize_linear(model)
    config = peft.LoraConfig(r=row.lora, lora_dropout=recipe.dropout, target_modules=list(recipe.targets))
    # The Trainer of transformers casts under autocast, so its adapters are float32. fsdp_qlora casts all to bfloat16.
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype="autocast" in row.precision)
    for parameter in adapted.parameters():
        if parameter.requires_grad and "autocast" not in row.precision:
            parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


def _loss_of_2024(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as Llama of transformers 4.38 computes it, with a copy of all logits but the last ones."""
    logits = model(input_ids=batch["input_ids"]).logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), batch["labels"][..., 1:].flatten())


def _loss_with_outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the same loss. The loop of fsdp_qlora keeps the logits until the next micro-batch."""
    logits = model(input_ids=batch["input_ids"]).logits.float()
    shifted = logits[..., :-1, :].contiguous()
    loss = F.cross_entropy(shifted.flatten(0, 1), batch["labels"][..., 1:].flatten())
    loss.outputs = logits  # type: ignore[attr-defined]
    return loss


@dataclass(frozen=True)
class Recipe:
    """What a source's script does, except for the columns of the table."""

    quantized: bool
    dropout: float
    targets: tuple[str, ...]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


_INNER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
RECIPES = {
    # LLaMA-Factory's defaults: double quantisation, checkpointed layers, adapters on every linear layer of a block.
    "qlora trainer": Recipe(True, 0.0, (*_INNER, "o_proj"), _loss_of_2024),
    # The defaults of fsdp_qlora's train.py.
    "qlora loop": Recipe(True, 0.1, _INNER, _loss_with_outputs),
    "lora loop": Recipe(False, 0.1, _INNER, _loss_with_outputs),
}


def _next_token_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _adapters(row: Row) -> str:
    kind = "QLoRA" if row.recipe.startswith("qlora") else "LoRA"
    tokens = f", {row.size} tokens" if row.recipe else ""
    return f", {kind} of rank {row.lora}{tokens}" if row.lora else ""


def compare(row: Row) -> dict[str, Any]:
    """Predict a row's step, and return it next to the published numbers."""
    devices = parse_devices(f"sim:{row.simulated}")
    kernels = GpuKernels.of(find_card(row.simulated).compute_capability)
    tracer = Tracer(workload(row), fake=True, like_gpu=True, kernels=kernels)
    worker = SimulatedWorker(devices, (2**60,), tracer)
    shape = StepShape(((row.batch,),) * row.accumulation)
    found = worker.measure(shape)
    report: dict[str, Any] = {
        "model": row.model,
        "card": row.card,
        "precision": row.precision + _adapters(row),
        "attention": ", ".join(attention_of(tracer, devices)[0]) or row.attention,
    }
    if row.step_s:
        report |= {"published s": row.step_s, "predicted s": round(found.seconds, 4)}
        report["time ratio"] = round(found.seconds / row.step_s, 3)
    if row.peak_gb:
        context_bytes = CONTEXT_BYTES if row.memory in {"VRAM", "exceeded"} else 0
        (parts,) = worker.predicted(shape)
        gaps_bytes = parts.untraced_bytes if row.memory == "allocated" else 0
        predicted_gb = (parts.total_bytes - gaps_bytes + context_bytes) / 1e9
        report |= {f"published GB {row.memory}": row.peak_gb, "predicted GB": round(predicted_gb, 2)}
        report["memory ratio"] = round(predicted_gb / row.peak_gb, 3)
    return {**report, "source": row.source}


def main() -> None:
    """Compare all rows that an eager step on whole models can be compared with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    report = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
        "compared": [compare(row) for row in rows() if not row.needs],
        "not compared": [f"{row.model} on {row.card}: needs {row.needs}" for row in rows() if row.needs],
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
