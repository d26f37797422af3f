"""Add LoRA to a model by peft, and quantise the frozen weights for QLoRA."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError, WorkloadError, one_line, shown
from autosplit.sim.nf4_linear import quantize_linear

QUANTIZED = ("nf4", "nf4-single")
"""Formats of frozen weights: NF4 with double quantisation, and NF4 with scales in float32."""

_TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}
"""peft's task types. With a classifier's type, peft also trains the classifier's last layer."""


@dataclass(frozen=True)
class Lora:
    """The settings of LoRA, named as in `peft.LoraConfig`.

    Args:
        alpha: The product is scaled by ``alpha / r``.
        dropout: The dropout of the adapters' inputs.
        targets: Names of the layers that get an adapter, or ``"all-linear"``. Default: peft's choice for the
            architecture.
        quantize: ``"nf4"`` or ``"nf4-single"`` for QLoRA. Default: the frozen weights keep their dtype.
    """

    r: int = 8
    alpha: float = 8
    dropout: float = 0.0
    targets: str | tuple[str, ...] | None = None
    quantize: str | None = None

    @classmethod
    def of(cls, text: str) -> Lora:
        """Read settings from text such as ``"r=16,targets=q_proj+v_proj,quantize=nf4"``.

        Raises:
            InputError: A setting is unknown, or its value is out of range.
        """
        given: dict[str, Any] = {}
        for item in str(text).split(","):
            name, _, value = item.strip().partition("=")
            if name not in _CONVERTERS or name in given:
                raise _wrong(f"has {shown(item)}")
            try:
                given[name] = _CONVERTERS[name](value)
            except ValueError:
                raise _wrong(f"has {shown(item)}") from None
        found = cls(**given)
        if found.r < 1 or not 0 <= found.dropout < 1:
            raise _wrong(f"is {shown(text)}")
        if found.quantize not in {None, *QUANTIZED}:
            raise _wrong(f"has the quantisation {shown(found.quantize)}")
        return found

    def added_to(self, model: Any, task: str) -> tuple[nn.Module, str]:
        """Add adapters to a model of transformers, and freeze its weights. Return the model and a note.

        Raises:
            WorkloadError: peft is not installed, or finds no layer for an adapter.
        """
        peft = peft_library()
        if self.quantize:
            dtype = model.dtype if model.dtype.itemsize == 2 else torch.bfloat16  # compute float32 weights in bfloat16
            quantize_linear(model, double=self.quantize == "nf4", compute_dtype=dtype)
        targets = list(self.targets) if isinstance(self.targets, tuple) else self.targets
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            task_type=_TASK_TYPES.get(task),
        )
        try:
            with warnings.catch_warnings():  # peft 0.21.2 reads a name that transformers 5.23 deprecates
                warnings.simplefilter("ignore", FutureWarning)
                adapted: nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:  # The model has no such layer, or peft does not know its architecture.
            raise WorkloadError(
                f"peft can't add LoRA to {type(model).__name__}: {one_line(error)}. Expected names of the model's "
                "layers. Pass targets=all-linear, or other names.",
            ) from None
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        frozen = "frozen weights are in NF4" if self.quantize else "other weights are frozen"
        return adapted, f"LoRA of rank {self.r} trains {trained / 1e6:.1f} million weights: {frozen}"


def _names(text: str) -> str | tuple[str, ...]:
    names = tuple(filter(None, text.split("+")))
    if not names:
        raise ValueError(text)
    return text if text == "all-linear" else names


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "r": int,
    "alpha": float,
    "dropout": float,
    "targets": _names,
    "quantize": str,
}


def _wrong(what: str) -> InputError:
    return InputError(
        f"lora {what}. Expected settings such as r=16,alpha=32,dropout=0.05,targets=all-linear,quantize=nf4. Several "
        f"targets are joined by +, as in q_proj+v_proj. quantize is {' or '.join(QUANTIZED)}.",
    )


def peft_library() -> Any:
    """Import peft.

    Raises:
        WorkloadError: peft is missing, or its import fails.
    """
    try:
        return importlib.import_module("peft")
    except Exception as error:  # If transformers has another version, peft's own imports raise several kinds of errors.
        raise WorkloadError(
            f"peft can't be imported ({one_line(error)}). lora= needs it to add the adapters. "
            "Install it: pip install peft",
            code="package-missing",
        ) from error
