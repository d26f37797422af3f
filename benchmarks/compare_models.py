"""Predict the largest batch and the samples/s of well-known models on twelve GPUs, for the page of benchmarks.

    python benchmarks/compare_models.py [--models N] [--output FILE]

The models have random weights and the published hyperparameters. Image models train in fp16 autocast with SGD and
momentum on their usual image size. BERT and GPT-2 train in bf16 autocast, the others with weights in bfloat16, all with
AdamW. Nothing is downloaded. The script needs transformers and torchvision (``pip install --no-deps
torchvision==0.28.0``). Models in the output file are kept if the versions are the same.

`autosplit compare --models FILE --price GPU=MONEY` makes such a table for your models with your prices.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from published import _class_loss, _declare_torchvision

import autosplit
from autosplit.sim.compare_models import error_band

RESULTS = Path(__file__).parent / "results" / "compare_models.json"

GPUS = (
    "T4",
    "V100-16GB",
    "RTX3090",
    "RTX4090",
    "RTX5090",
    "A10",
    "L4",
    "L40S",
    "A100-40GB",
    "A100-80GB",
    "H100-80GB",
    "H200",
)

PRICES = {
    "T4": (0.59, "Modal, May 2026"),
    "V100-16GB": (0.79, "Lambda, September 2026, machine of 8"),
    "RTX4090": (0.74, "RunPod secure, September 2026"),
    "A10": (1.29, "Lambda, September 2026"),
    "L4": (0.80, "Modal, May 2026"),
    "L40S": (1.09, "RunPod secure, September 2026"),
    "A100-40GB": (1.99, "Lambda, September 2026, machine of 8"),
    "A100-80GB": (1.59, "RunPod secure, September 2026"),
    "H100-80GB": (3.49, "RunPod secure, September 2026"),
    "H200": (4.59, "RunPod secure, September 2026"),
}
"""On-demand prices in USD per hour of one GPU, with the provider and the month. No price was found for the others.

From the providers' pages, as copied by techbytes.app (Modal, 2026-05-07), api-evangelist/lambda-labs (2026-09-20) and
tgarg01/silybench-data (RunPod, 2026-09-25).
"""


def _image_model(name: str, size: int) -> autosplit.Workload:
    _declare_torchvision()
    import torchvision

    batch = torch.zeros(2, 3, size, size), torch.zeros(2, dtype=torch.long)
    momentum = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    model = torchvision.models.get_model(name, weights=None)
    return autosplit.Workload(model, batch, loss_fn=_class_loss, optimizer=momentum, precision="fp16")


def _language_model(kind: str, tokens: int, precision: str, dtype: torch.dtype, **config: Any) -> autosplit.Workload:
    _declare_torchvision()  # transformers imports it
    import transformers

    cls, settings = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    }[kind]
    model = cls(settings(**config)).to(dtype)
    ids = torch.zeros(2, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return autosplit.Workload(model, batch, optimizer=torch.optim.AdamW, precision=precision)


_QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}

MODELS: dict[str, Callable[[], autosplit.Workload]] = {
    "ResNet-50, 224 px": partial(_image_model, "resnet50", 224),
    "GPT-2, 1024 tokens": partial(_language_model, "gpt2", 1024, "bf16", torch.float32),
    "ViT-B/16, 224 px": partial(_image_model, "vit_b_16", 224),
    "BERT-base, 512 tokens": partial(_language_model, "bert", 512, "bf16", torch.float32),
    "Llama-3.2-1B, 2048 tokens": partial(_language_model, "llama", 2048, "none", torch.bfloat16, **_LLAMA_1B),
    "Qwen3-0.6B, 2048 tokens": partial(_language_model, "qwen3", 2048, "none", torch.bfloat16, **_QWEN3),
    "ConvNeXt-T, 224 px": partial(_image_model, "convnext_tiny", 224),
    "EfficientNetV2-S, 384 px": partial(_image_model, "efficientnet_v2_s", 384),
    "Swin-T, 224 px": partial(_image_model, "swin_t", 224),
    "Llama-3.1-8B, 2048 tokens": partial(_language_model, "llama", 2048, "none", torch.bfloat16, **_LLAMA_8B),
}
"""The models, with the hyperparameters of their published configurations."""


def compared(source: Callable[[], autosplit.Workload]) -> dict[str, Any]:
    """Return the predictions for one model on each GPU."""
    bands = []

    def seen() -> autosplit.Workload:
        built = source()
        bands.append(error_band(built.sample_batch))
        return built

    found = autosplit.compare(
        seen, devices=[f"sim:{gpu}" for gpu in GPUS], n_trials=1, strategy="balanced", profile="off"
    )
    gpus: dict[str, Any] = {}
    for machine in found.machines:
        plan = machine.plan
        known = {"largest batch": sum(plan.ceilings), "samples/s": round(plan.samples_per_s, 3)} if plan else None
        gpus[machine.devices.removeprefix("sim:")] = known
    return {"error": str(bands[0]), "gpus": {gpu: gpus[gpu] for gpu in GPUS}}


def main() -> None:
    """Predict each model, and write the results after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first of them")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {
            "torch": str(torch.__version__),
            **{name: importlib.metadata.version(name) for name in ("transformers", "torchvision")},
        },
        "prices": {gpu: {"usd per hour": usd, "source": source} for gpu, (usd, source) in PRICES.items()},
        "models": {},
    }
    if options.output.exists():
        known = json.loads(options.output.read_text())
        if known["versions"] == report["versions"]:
            report["models"] = known["models"]
    for name, source in list(MODELS.items())[: options.models]:
        if name not in report["models"]:
            report["models"][name] = compared(source)
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            print(name, report["models"][name], flush=True)


if __name__ == "__main__":
    main()
