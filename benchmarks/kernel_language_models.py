"""Cases for `cuda_kernels.py` that are language, speech and protein models of transformers, with few layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from kernel_case import Case
from torch import Tensor
from torch.nn import functional as F

from autosplit import Workload
from autosplit.workload.checkpointing import AUTO, Checkpointing

BATCH = 4
VOCABULARY = 2048
LENGTH = 256
WIDTH = 768
SAMPLES = (32, 64)
PRECISIONS = ("bf16", "none")

CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
CLASSIFIER = "AutoModelForSequenceClassification"
SEQ2SEQ = "AutoModelForSeq2SeqLM"


def _codes(length: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def _tokens(length: int = LENGTH, *, mask: bool = False, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    batch = {"input_ids": _codes(length, vocabulary), "labels": _codes(length, vocabulary)}
    return {**batch, "attention_mask": torch.ones(BATCH, length, dtype=torch.long)} if mask else batch


def _classified() -> dict[str, Tensor]:
    return {"input_ids": _codes(LENGTH), "labels": torch.randint(2, (BATCH,))}


def _spoken() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 32000), "labels": torch.randint(1, 30, (BATCH, 20))}


def _transcribed() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 80, 3000), "labels": torch.randint(1000, (BATCH, 128))}


@dataclass(frozen=True)
class Family:
    """One model of transformers with random weights.

    Attributes:
        config: The class of its configuration.
        options: Arguments of the configuration.
        model: The class of the model, or one of transformers' Auto classes.
        enables_checkpointing: Call `gradient_checkpointing_enable()` before training.
        checkpointing: Passed to `Workload`.
        loss_for_cuda: Computes the model's loss without reading values of tensors, see `Case.build_for_cuda`.
        vocabulary: The argument of the configuration that sets the size of the vocabulary.
    """

    name: str
    config: str
    options: dict[str, Any]
    model: str = CAUSAL
    batch: Callable[[], Any] = _tokens
    precisions: tuple[str, ...] = PRECISIONS
    samples: tuple[int, int] = SAMPLES
    enables_checkpointing: bool = False
    checkpointing: Checkpointing | None = None
    every_capability: bool = False
    loss_for_cuda: Callable[[Any, Any], Tensor] | None = None
    vocabulary: dict[str, int] = field(default_factory=lambda: {"vocab_size": VOCABULARY})

    def workload(self, precision: str, *, for_cuda: bool = False) -> Workload:
        """Build the model.

        Raises:
            ImportError: transformers is not installed.
        """
        import transformers

        config = getattr(transformers, self.config)(**self.vocabulary, **self.options)
        config.use_cache = False
        kind = getattr(transformers, self.model)
        model = (kind.from_config if hasattr(kind, "from_config") else kind)(config).train()
        if self.enables_checkpointing:
            model.gradient_checkpointing_enable()
        loss = self.loss_for_cuda if for_cuda else None
        options = {"precision": precision, "compute_loss": loss, "checkpointing": self.checkpointing}
        return Workload(model, self.batch(), **options)

    def cases(self) -> Iterator[Case]:
        """Yield the family in each precision."""
        for precision in self.precisions:
            yield Case(
                f"{self.name} [{precision}]",
                partial(self.workload, precision),
                self.samples,
                needs=("transformers",),
                every_capability=self.every_capability,
                build_for_cuda=partial(self.workload, precision, for_cuda=True) if self.loss_for_cuda else None,
            )


_WIDE = {"hidden_size": WIDTH, "num_attention_heads": 12, "num_hidden_layers": 2}
_LLAMA = {**_WIDE, "intermediate_size": 2048}
_GROUPED = {**_LLAMA, "num_key_value_heads": 4}
_GEMMA = {**_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256}
_BERT = {**_WIDE, "intermediate_size": 3072}
_DEBERTA_V3 = {
    **_BERT,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1,
    "position_biased_input": False,
}
_MODERN_BERT = {
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_T5 = {"num_layers": 2, "decoder_start_token_id": 0}
_MARIAN = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 512,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_ESM = {
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "hidden_size": 320,
    "num_attention_heads": 20,
    "intermediate_size": 1280,
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
}
_SPEECH = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_EAGER = {"attn_implementation": "eager"}


class _CtcAllocations(torch.autograd.Function):
    """Allocate what CUDA's `ctc_loss` allocates (aten/src/ATen/native/cuda/LossCTC.cu).

    torch has no fake `ctc_loss`, because the sizes of its outputs depend on the lengths of the targets.
    """

    @staticmethod
    def forward(ctx: Any, log_probabilities: Tensor, targets: Tensor) -> Tensor:
        """Allocate the loss and `log_alpha`."""
        length, count, _ = log_probabilities.shape
        log_alpha = log_probabilities.new_empty(count, length, 2 * targets.shape[1] + 1)
        ctx.save_for_backward(log_probabilities, log_alpha)
        return log_probabilities.new_empty(count)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Allocate `log_beta` and the gradient."""
        log_probabilities, log_alpha = ctx.saved_tensors
        log_beta = torch.empty_like(log_alpha)
        gradient = torch.empty_like(log_probabilities)
        del log_beta
        return gradient, None


def _ctc_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the CTC loss of transformers' speech models, without reading the labels."""
    logits = model(batch["input_values"]).logits
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return _CtcAllocations.apply(log_probabilities, batch["labels"]).sum()


_masked_tokens = partial(_tokens, mask=True)

ENCODERS = (
    Family("BERT", "BertConfig", {"num_hidden_layers": 2}, MASKED, every_capability=True),
    Family("BERT, mask", "BertConfig", {"num_hidden_layers": 2}, MASKED, _masked_tokens),
    Family("BERT, classifier", "BertConfig", {"num_hidden_layers": 2}, CLASSIFIER, _classified),
    Family("RoBERTa", "RobertaConfig", {"num_hidden_layers": 2}, MASKED),
    Family("DistilBERT", "DistilBertConfig", {"n_layers": 2}, MASKED),
    Family("ALBERT", "AlbertConfig", _BERT, MASKED),
    Family("ELECTRA", "ElectraConfig", {"num_hidden_layers": 2}, MASKED),
    Family("DeBERTa-v2", "DebertaV2Config", _BERT, MASKED),
    Family("DeBERTa-v3", "DebertaV2Config", _DEBERTA_V3, MASKED),
    Family("ModernBERT", "ModernBertConfig", _MODERN_BERT, MASKED),
    Family("XLNet", "XLNetConfig", {"n_layer": 2, "d_model": WIDTH, "n_head": 12, "d_inner": 3072}, "XLNetLMHeadModel"),
    Family("ESM", "EsmConfig", _ESM, MASKED, partial(_tokens, vocabulary=30), vocabulary={"vocab_size": 33}),
)

ENCODER_DECODERS = (
    Family("T5", "T5Config", _T5, SEQ2SEQ, every_capability=True),
    Family("T5, no dropout", "T5Config", {**_T5, "dropout_rate": 0.0}, SEQ2SEQ),
    Family("T5, gated", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, SEQ2SEQ),
    Family("T5, eager", "T5Config", {**_T5, **_EAGER}, SEQ2SEQ),
    Family("BART", "BartConfig", {"encoder_layers": 2, "decoder_layers": 2}, SEQ2SEQ),
    Family("Marian", "MarianConfig", _MARIAN, SEQ2SEQ),
)

DECODERS = (
    Family("GPT-2", "GPT2Config", {"n_layer": 2}, every_capability=True),
    Family("GPT-2, mask", "GPT2Config", {"n_layer": 2}, batch=_masked_tokens),
    Family("GPT-2, eager", "GPT2Config", {"n_layer": 2, **_EAGER}),
    Family("OPT", "OPTConfig", {"num_hidden_layers": 2}),
    Family("BLOOM", "BloomConfig", {"n_layer": 2, "hidden_size": WIDTH, "n_head": 12}),
    Family("GPT-NeoX", "GPTNeoXConfig", _BERT),
    Family("GPT-J", "GPTJConfig", {"n_layer": 2, "n_embd": WIDTH, "n_head": 12, "rotary_dim": 32}),
    Family("Falcon", "FalconConfig", _WIDE),
    Family("Llama", "LlamaConfig", _LLAMA),
    Family("Llama, eager", "LlamaConfig", {**_LLAMA, **_EAGER}),
    Family("Llama, grouped queries", "LlamaConfig", _GROUPED, every_capability=True),
    Family("Llama, grouped queries, mask", "LlamaConfig", _GROUPED, batch=_masked_tokens),
    Family("Qwen2", "Qwen2Config", {**_LLAMA, "num_key_value_heads": 2}),
    Family("Qwen3", "Qwen3Config", {**_GROUPED, "head_dim": 64}),
    Family("Mistral", "MistralConfig", {**_GROUPED, "sliding_window": 128}),
    Family("Mixtral", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma", "GemmaConfig", {**_GEMMA, "num_key_value_heads": 1}),
    Family("Gemma 2", "Gemma2Config", _GEMMA),
    Family("Gemma 3", "Gemma3TextConfig", _GEMMA),
    Family("Phi", "PhiConfig", _LLAMA),
    Family("Phi-3", "Phi3Config", {**_LLAMA, "pad_token_id": 0}),
    Family("OLMo 2", "Olmo2Config", _LLAMA),
    Family("StableLM", "StableLmConfig", {**_LLAMA, "num_key_value_heads": 12}),
    Family(
        "Mamba",
        "MambaConfig",
        {"hidden_size": 256, "num_hidden_layers": 1},
        batch=partial(_tokens, 32),
        precisions=("bf16",),
    ),
)

_MEDIUM = {"n_layer": 2, "n_embd": 1024, "n_head": 16}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

LONG = (
    Family("GPT-2 medium, 1024 tokens", "GPT2Config", _MEDIUM, batch=partial(_tokens, 1024), samples=(8, 16)),
    Family(
        "GPT-2 medium, 1024 tokens, no dropout",
        "GPT2Config",
        {**_MEDIUM, **_NO_DROPOUT},
        batch=partial(_tokens, 1024),
        samples=(8, 16),
    ),
    Family("BERT, 512 tokens", "BertConfig", {"num_hidden_layers": 2}, MASKED, partial(_tokens, 512), samples=(16, 32)),
    Family(
        "Llama, grouped queries, 2048 tokens", "LlamaConfig", _GROUPED, batch=partial(_tokens, 2048), samples=(4, 8)
    ),
    Family(
        "Qwen3, 4096 tokens", "Qwen3Config", {**_GROUPED, "head_dim": 64}, batch=partial(_tokens, 4096), samples=(4, 8)
    ),
)

_TO_CHECKPOINT = (
    ("GPT-2", "GPT2Config", {"n_layer": 2}, CAUSAL),
    ("BERT", "BertConfig", {"num_hidden_layers": 2}, MASKED),
    ("T5", "T5Config", _T5, SEQ2SEQ),
    ("Llama", "LlamaConfig", _GROUPED, CAUSAL),
)

CHECKPOINTED = (
    *(
        Family(f"{name}, gradient_checkpointing_enable()", config, options, model, enables_checkpointing=True)
        for name, config, options, model in _TO_CHECKPOINT
    ),
    *(
        Family(
            f"{name}, Workload(checkpointing=)", config, options, model, checkpointing=Checkpointing((AUTO,), every=1)
        )
        for name, config, options, model in _TO_CHECKPOINT
    ),
)

_ctc_family = partial(Family, batch=_spoken, samples=(8, 16), vocabulary={}, loss_for_cuda=_ctc_loss)

SPEECH = (
    Family(
        "Whisper",
        "WhisperConfig",
        {"encoder_layers": 2, "decoder_layers": 2},
        "WhisperForConditionalGeneration",
        _transcribed,
        vocabulary={"vocab_size": 51865},
    ),
    _ctc_family("wav2vec2", "Wav2Vec2Config", _SPEECH, "Wav2Vec2ForCTC"),
    _ctc_family("HuBERT", "HubertConfig", _SPEECH, "HubertForCTC"),
)


def language_cases() -> Iterator[Case]:
    """Yield the cases that are language, speech and protein models."""
    for family in (*ENCODERS, *ENCODER_DECODERS, *DECODERS, *LONG, *CHECKPOINTED, *SPEECH):
        yield from family.cases()
