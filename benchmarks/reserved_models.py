"""Build the training steps of `published_reserved.csv`: the models, their losses and the loops around them.

Each builder follows the script of its source. Models have random weights and need no memory. Three choices of a script
change the peak: its copies of logits, when it frees gradients, and which variables it keeps for the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from published import _declare_torchvision
from reserved_gpt import Gpt
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.low_bit_adamw import LowBitAdamW
from autosplit.sim.nf4_linear import quantize_linear
from autosplit.workload.workload import Workload

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """A published figure. Empty fields of the table are 0.

    Attributes:
        simulated: The GPU's name in autosplit's catalogue. An A100 where the source names no GPU.
        precision: The dtype of the weights, and of autocast if it differs: "fp32", "fp16 autocast", "bf16 + autocast".
        size: Tokens, or pixels of a side.
        kind: "reserved" is torch.cuda.max_memory_reserved, "process" is the memory that the driver reports.
        context_mib: The memory of the CUDA context, for "process".
        half: "tuned" or "kept apart".
        needs: Why the row is not compared.
    """

    source: str
    model: str
    card: str
    simulated: str
    precision: str
    optimizer: str
    recipe: str
    batch: int
    size: int
    lora: int
    accumulation: int
    allocator: str
    kind: str
    context_mib: int
    reserved_gb: float
    allocated_gb: float
    half: str
    needs: str

    @property
    def weights(self) -> torch.dtype:
        """Return the dtype of the weights."""
        first, _, rest = self.precision.partition(" ")
        return torch.float32 if rest == "autocast" else DTYPES[first]

    @property
    def autocast(self) -> str:
        """Return autosplit's name of the precision of autocast, or "none"."""
        first, _, rest = self.precision.partition(" ")
        return first if rest else "none"


def _eight_bits(parameters: Any) -> torch.optim.Optimizer:
    return LowBitAdamW(parameters)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    # The AdamW of transformers updates one parameter after the other.
    "AdamW loop": partial(torch.optim.AdamW, foreach=False),
    "Adam 8 bits": _eight_bits,
    "Adafactor": _adafactor,
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "none": partial(torch.optim.SGD, lr=0.01),
}


def workload(row: Row) -> Workload:
    """Build the training step of a row, without memory."""
    _declare_torchvision()  # transformers imports it if it is installed
    return BUILDERS[row.recipe](row)


def _built(build: Callable[[], Any], row: Row) -> Any:
    return built_without_memory(lambda: build().to(row.weights), fake_mode())


# Loops


def _loop(
    loss_of: Callable[[Any, Any], tuple[Any, Tensor]], row: Row, *, zeroing: str
) -> Callable[[Any, Any, Any], None]:
    """Return two iterations of a loop. The second starts with the memory that the first left.

    Args:
        loss_of: Returns the outputs, which the loop keeps until the next forward has ended, and the loss.
        zeroing: When gradients are freed: "before" the forward, or "between" it and the backward. "kept" sets them to
            zero after the update.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        kind = next(model.parameters()).device.type
        for _ in range(2):
            if zeroing == "before":
                optimizer.zero_grad()
            with torch.autocast(kind, dtype=DTYPES.get(row.autocast), enabled=row.autocast != "none"):
                outputs, loss = loss_of(model, batch)
            if zeroing == "between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if zeroing == "kept":
                optimizer.zero_grad(set_to_none=False)
        del outputs

    return step


def _classified(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, classes = batch
    logits = model(images)
    return logits, F.cross_entropy(logits, classes)


class _Cast(nn.Module):
    """Convert images to the dtype of the weights, as Fabric does. The loop keeps the images of its loader."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(images.to(next(self.model.parameters()).dtype))
        return logits


# Images


def _vision_model(row: Row) -> nn.Module:
    import torchvision

    if row.model == "mnasnet":
        return torchvision.models.MNASNet(alpha=1.0, num_classes=10)
    model: nn.Module = torchvision.models.get_model(row.model, weights=None)
    if row.model.startswith("vit"):
        model.heads.head = nn.Linear(model.heads.head.in_features, 10)
    return _Cast(model) if row.precision == "bf16" else model


def _images(row: Row) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, row.size, row.size), torch.zeros(2, dtype=torch.long)


def _image_loop(row: Row, *, distributed: bool = False) -> Workload:
    """Return a loop that frees gradients between forward and backward. DDP's buckets exist next to the gradients."""

    def build() -> nn.Module:
        model = _vision_model(row)
        if distributed:
            model.register_buffer("buckets", torch.zeros(sum(parameter.numel() for parameter in model.parameters())))
        return model

    model = _built(build, row)
    step = _loop(_classified, row, zeroing="between")
    return Workload(model, _images(row), step=step, optimizer=OPTIMIZERS[row.optimizer])


def _image_step(row: Row) -> Workload:
    """Return a step that frees gradients after the update."""
    model = _built(partial(_vision_model, row), row)
    return Workload(
        model, _images(row), loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[row.optimizer], precision=row.autocast
    )


# Language models of 2022 and 2023, and a model from a book


def _gpt(row: Row, **options: bool) -> Workload:
    model = _built(partial(Gpt, **options), row)
    tokens = torch.zeros(2, row.size, dtype=torch.long)
    return Workload(model, (tokens, tokens), loss_fn=_flat_loss, optimizer=OPTIMIZERS[row.optimizer])


def _flat_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _classifier(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")


def _text_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    outputs = model(**batch)
    return outputs, outputs.loss


def _distilbert(row: Row) -> Workload:
    import transformers

    model = _built(lambda: _classifier(transformers.DistilBertConfig()), row)
    words, mask = (torch.ones(2, row.size, dtype=torch.long) for _ in range(2))
    batch = {"input_ids": words, "attention_mask": mask, "labels": torch.zeros(2, dtype=torch.long)}
    step = _loop(_text_loss, row, zeroing="between")
    return Workload(model, batch, step=step, optimizer=OPTIMIZERS[row.optimizer])


def _bert(row: Row, *, checkpointed: bool = False) -> Workload:
    """Return a step of the Trainer of 2022, which sets gradients to zero and checkpoints with re-entrance."""
    import transformers

    def build() -> Any:
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        model = _classifier(transformers.BertConfig(**large))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        return model

    batch = {"input_ids": torch.ones(2, row.size, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
    step = _loop(_text_loss, row, zeroing="kept")
    return Workload(_built(build, row), batch, step=step, optimizer=OPTIMIZERS[row.optimizer])


# Losses of causal language models


def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return logits


def _shifted_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), batch["labels"][..., 1:].flatten())


def _loss_in_model(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as models of transformers computed it before 4.46: float32 logits replace the others."""
    logits = _logits(model, batch).float()
    return _shifted_loss(logits, batch)


def _loss_of_function(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as the function of transformers 4.48 computes it, next to the logits of the model."""
    logits = _logits(model, batch)
    return _shifted_loss(logits.float(), batch)


def _loss_without_copy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a model that does not convert its logits, such as GPTBigCode in transformers 4.48."""
    logits = _logits(model, batch)
    return _shifted_loss(logits, batch)


def _loss_with_outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a loop that keeps the logits during the backward, and frees them before the next forward."""
    logits = _logits(model, batch).float()
    loss = _shifted_loss(logits, batch)
    loss.outputs = logits  # type: ignore[attr-defined]
    return loss


# Causal language models


def _llama(width: int, inner: int, layers: int, heads: int, groups: int, words: int, **other: Any) -> Callable[[], Any]:
    def config() -> Any:
        import transformers

        return transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=words,
            **other,
        )

    return config


def _santacoder() -> Any:
    import transformers

    return transformers.GPTBigCodeConfig(
        n_embd=2048, n_layer=24, n_head=16, n_inner=8192, n_positions=2048, vocab_size=49280
    )


def _power_lm() -> Any:
    import transformers

    return transformers.GraniteConfig(
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=40,
        num_attention_heads=36,
        num_key_value_heads=36,
        vocab_size=49152,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000),
    "openbuddy-7b": _llama(4096, 14336, 32, 32, 8, 36608),
    "yi-6b": _llama(4096, 11008, 32, 32, 4, 64000),
    "yi-34b": _llama(7168, 20480, 60, 56, 8, 64000),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "santacoder": _santacoder,
    "powerlm-3b": _power_lm,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
INNER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Tuning:
    """How a script trains a causal language model.

    Attributes:
        loss: The source's loss.
        reentrant: Whether layers are checkpointed, and how: with re-entrance or without it. None: they are not.
        targets: Names of the layers with an adapter.
        quantized: Whether the frozen linear layers have 4 bits.
        norms: The dtype of normalisations, if it is not that of the weights.
        adapters: The dtype of the adapters.
        adapter: The name of peft's configuration, and its settings.
        masked: Whether the batch has a mask.
        cached: Whether the model returns its keys and values, as it does unless a script disables it.
    """

    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    reentrant: bool | None = True
    targets: tuple[str, ...] = ATTENTION
    dropout: float = 0.1
    quantized: bool = False
    norms: torch.dtype | None = None
    adapters: torch.dtype = torch.float32
    adapter: tuple[str, dict[str, Any]] | None = None
    masked: bool = False
    cached: bool = False


def _causal_model(tuning: Tuning, row: Row) -> tuple[Any, dict[str, Tensor]]:
    """Return the model and a batch."""
    import transformers

    def build() -> Any:
        config = CONFIGS[row.model]()
        config.use_cache = tuning.cached
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(row.weights)
        if tuning.reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": tuning.reentrant})
        if tuning.quantized:
            quantize_linear(model)
        return _adapted(model, tuning, row)

    words = torch.ones(2, row.size, dtype=torch.long)
    batch = {"input_ids": words, "labels": words} | ({"attention_mask": words} if tuning.masked else {})
    return built_without_memory(build, fake_mode()), batch


def _causal(tuning: Tuning, row: Row) -> Workload:
    """Return a step that frees gradients after the update."""
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[row.optimizer], "precision": row.autocast}
    return Workload(*_causal_model(tuning, row), compute_loss=tuning.loss, **options)


def _adapted(model: Any, tuning: Tuning, row: Row) -> Any:
    import peft

    name, settings = tuning.adapter or ("LoraConfig", {"target_modules": list(tuning.targets), "r": row.lora})
    if name == "LoraConfig":
        settings = {"lora_dropout": tuning.dropout, "r": row.lora, **settings}
    if tuning.adapter or row.lora:
        if tuning.reentrant:
            model.enable_input_require_grads()
        # peft casts adapters of bfloat16 layers to float32 by default.
        casts = tuning.adapters == torch.float32
        model = peft.get_peft_model(model, getattr(peft, name)(**settings), autocast_adapter_dtype=casts)
        for parameter in () if casts else model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(tuning.adapters)
    if tuning.norms is not None:
        for part, module in model.named_modules():
            if "norm" in part or isinstance(module, nn.LayerNorm):
                module.to(tuning.norms)
    return model


# One layer


class _Head(nn.Module):
    """The output layer of a language model, and the hidden states that reach it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.zeros(tokens, 4096))
        self.head = nn.Linear(4096, 151936, bias=False)

    def forward(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the loss."""
        logits = self.head(self.hidden)
        return logits, F.cross_entropy(logits, labels.flatten())


def _head_step(model: Any, optimizer: Any, labels: Tensor) -> None:
    """Run forward and backward with the logits in a variable. There is no update."""
    del optimizer
    logits, loss = model(labels)
    loss.backward()
    del logits


def _head(row: Row) -> Workload:
    labels = torch.zeros(1, row.size, dtype=torch.long)
    model = _built(partial(_Head, row.size), row)
    return Workload(model, labels, step=_head_step, optimizer=OPTIMIZERS[row.optimizer])


def _causal_loop(adapter: tuple[str, dict[str, Any]] | None, row: Row) -> Workload:
    """Return a loop that keeps the model's outputs until the next forward has ended."""
    tuning = Tuning(_loss_of_function, reentrant=None, dropout=0.0, adapter=adapter, masked=True, cached=True)
    step = _loop(_text_loss, row, zeroing="before")
    return Workload(*_causal_model(tuning, row), step=step, optimizer=OPTIMIZERS[row.optimizer])


def _peft(name: str, *targets: str, **settings: Any) -> Callable[[Row], Workload]:
    """Return a builder for an adapter of peft."""
    chosen = {**settings, **({"target_modules": list(targets)} if targets else {})}
    return partial(_causal_loop, (name, chosen))


_QUERIES = ("q_proj", "v_proj")
BUILDERS: dict[str, Callable[[Row], Workload]] = {
    "image loop": _image_loop,
    "image loop, 4 processes": partial(_image_loop, distributed=True),
    "image step": _image_step,
    "book": partial(_gpt, buffered=True),
    "book, mask made": _gpt,
    "book, own classes": partial(_gpt, native=True),
    "book, flash": partial(_gpt, native=True, fused=True),
    "text loop": _distilbert,
    "trainer 2022": _bert,
    "trainer 2022, checkpointed": partial(_bert, checkpointed=True),
    "swift": partial(_causal, Tuning(_loss_in_model, targets=ATTENTION[:3], dropout=0.05, adapters=torch.bfloat16)),
    "fsdp_qlora": partial(_causal, Tuning(_loss_with_outputs, targets=INNER, quantized=True, adapters=torch.bfloat16)),
    "fsdp_lora": partial(_causal, Tuning(_loss_with_outputs, targets=INNER, adapters=torch.bfloat16)),
    "trainer 4.48": partial(_causal, Tuning(_loss_of_function)),
    "trainer 4.48, nf4, norms in fp32": partial(
        _causal, Tuning(_loss_of_function, quantized=True, norms=torch.float32)
    ),
    "trainer 4.48, nf4": partial(_causal, Tuning(_loss_of_function, quantized=True)),
    "trainer, loss in bf16": partial(_causal, Tuning(_loss_without_copy, targets=("c_attn",))),
    "trainer, loss in bf16, nf4": partial(_causal, Tuning(_loss_without_copy, targets=("c_attn",), quantized=True)),
    "trainer 4.45": partial(_causal, Tuning(_loss_in_model)),
    "trainer 4.45, nf4, norms in fp32": partial(_causal, Tuning(_loss_in_model, quantized=True, norms=torch.float32)),
    "trainer 4.45, nf4": partial(_causal, Tuning(_loss_in_model, quantized=True)),
    "peft full": partial(_causal_loop, None),
    "peft lora": _peft("LoraConfig", *_QUERIES),
    "peft lora mlp": _peft("LoraConfig", "up_proj", "gate_proj", "down_proj"),
    "peft dora": _peft("LoraConfig", *_QUERIES, use_dora=True),
    "peft ia3": _peft("IA3Config", "k_proj", "v_proj", "down_proj", feedforward_modules=["down_proj"]),
    "peft norms": _peft("LNTuningConfig", "input_layernorm", "post_attention_layernorm", "norm"),
    "peft vera": _peft("VeraConfig", *_QUERIES, r=256),
    "head": _head,
}
