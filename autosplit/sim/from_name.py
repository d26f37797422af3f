"""Build a workload from a model's name: a config.json of transformers, or a model of timm or torchvision.

Weights are random and nothing is downloaded, because memory and time depend only on shapes.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.errors import AutosplitError, InputError, WorkloadError, one_line, shown
from autosplit.sim.lora import Lora, peft_library
from autosplit.sim.low_bit_adamw import named_optimizer
from autosplit.workload.workload import Workload

SAMPLES = 4
"""Number of samples in the batch. The gradient check needs at least this many."""

DEFAULT_SEQ_LEN = 512
DEFAULT_IMAGE_SIZE = 224

MOST_CONFIG_BYTES = 2**20
"""Largest number of bytes to read from a config.json. Published files have a few KiB."""

MOST_LAYERS = 10_000
"""Largest number of layers to build. With more, the modules themselves would fill the memory."""

CLASSES_OF_TASKS = {
    "causal-lm": {"CAUSAL_LM": "AutoModelForCausalLM"},
    "masked-lm": {"MASKED_LM": "AutoModelForMaskedLM"},
    "seq2seq": {"SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM"},
    "classification": {
        "SEQUENCE_CLASSIFICATION": "AutoModelForSequenceClassification",
        "IMAGE_CLASSIFICATION": "AutoModelForImageClassification",
    },
    "token-classification": {"TOKEN_CLASSIFICATION": "AutoModelForTokenClassification"},
}
"""For each task: transformers' mapping from model types to classes, and the auto class that uses the mapping."""

TASKS = tuple(CLASSES_OF_TASKS)


@dataclass(frozen=True)
class ModelParts:
    """A model with random weights, its sample batch and its loss."""

    model: nn.Module
    sample_batch: Any
    loss_fn: Callable[[Any, Tensor], Tensor] | None
    assumed: tuple[str, ...]


def workload_from_name(
    name: str,
    *,
    seq_len: int | None = None,
    image_size: int | None = None,
    task: str | None = None,
    lora: str | None = None,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> Workload:
    """Build a workload from a model's name, with random weights and a batch that includes labels.

    Nothing is downloaded, and code that a configuration names does not run. For ``sim:`` devices, pass `tune` a
    function that calls this function, so that a large model is built without allocating its memory::

        autosplit.tune(lambda: autosplit.workload_from_name("hf:llama/config.json"), devices="sim:8xA100-80GB")

    Args:
        name: ``"hf:PATH"`` (a config.json of transformers, or its folder), ``"timm:NAME"`` or ``"torchvision:NAME"``.
            Weights have the configuration's dtype, except that bfloat16 replaces float16.
        seq_len: Tokens of a sample, without padding. Default: 512, or the number of positions if the model has fewer.
        image_size: Height and width in pixels. Default: the model's own size.
        task: ``"causal-lm"``, ``"masked-lm"``, ``"seq2seq"``, ``"classification"`` or ``"token-classification"``.
            Default: the task of the configuration's first architecture.
        lora: For ``hf:PATH``: settings of LoRA, such as ``"r=16,alpha=32,targets=all-linear"``. peft adds the adapters,
            and all other weights are frozen. With ``quantize=nf4`` they are stored as bitsandbytes stores them (QLoRA).
        optimizer: As in `Workload`, or a name of transformers' option `optim`: ``"adamw_torch"``, ``"adamw_8bit"``,
            ``"paged_adamw_8bit"`` or ``"paged_adamw_32bit"``. Default: AdamW.
        **options: Other arguments of `Workload`.

    Raises:
        InputError: No such model exists. Or its configuration is not supported (unknown type, custom code, quantised
            weights). Or the sequence or the image is too large for the model.
        WorkloadError: The library that defines the model is not installed.
    """
    parts = model_by_name(name, seq_len=seq_len, image_size=image_size, task=task, lora=lora)()
    made = named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    given = {"optimizer": made, "loss_fn": parts.loss_fn, "assumed": parts.assumed, **options}
    return Workload(parts.model, parts.sample_batch, **given)


def model_by_name(
    spec: str,
    *,
    seq_len: int | None = None,
    image_size: int | None = None,
    task: str | None = None,
    lora: str | None = None,
) -> Callable[[], ModelParts]:
    """Return the function that builds the model and its batch. See `workload_from_name`."""
    scheme, _, name = str(spec).partition(":")
    for option, value in (("seq_len", seq_len), ("image_size", image_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(
                f"{option} is {value!r}. Expected a whole number of 1 or more, such as 224.",
            )
    if task is not None and task not in TASKS:
        raise InputError(f"task is {shown(task)}. Expected one of {', '.join(TASKS)}.")
    if scheme == "hf":
        adapters = None if lora is None else Lora.of(lora)
        return _of_transformers(Path(name), seq_len=seq_len, image_size=image_size, task=task, lora=adapters)
    only = "an image classifier, which has only the option image_size"
    _refuse_options(spec, only, seq_len=seq_len, task=task, lora=lora)
    if scheme == "timm":
        return _of_timm(name, image_size)
    if scheme == "torchvision":
        return _of_torchvision(name, image_size)
    raise InputError(
        f"{shown(spec)} names no model. Expected hf:PATH of a config.json, timm:NAME or torchvision:NAME.",
    )


def _refuse_options(what: str, kind: str, **options: object) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"{' and '.join(given)} can't be set for {what}, because it is {kind}. Leave it out.",
        )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # torchvision raises RuntimeError if it was built for another torch
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        why = "is not installed" if missing else f"can't be imported ({one_line(error)})"
        raise WorkloadError(
            f"{name} {why}, but autosplit needs it to build the model. Install the release for this torch version: "
            f"pip install {name}",
            code="package-missing",
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    try:
        from huggingface_hub import constants
    except ImportError:  # Without huggingface_hub, no library can connect.
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _raised_as_input(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except AutosplitError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())  # transformers' messages have several lines
        raise WorkloadError(f"{what}: {type(error).__name__}: {message[:300].rstrip('.')}. {advice}.") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"The nearest are {', '.join(near)}" if near else "Check its spelling"


# ----------------------------------------------------------------------------------------------------- transformers


def _of_transformers(
    path: Path, *, seq_len: int | None, image_size: int | None, task: str | None, lora: Lora | None
) -> Callable[[], ModelParts]:
    try:
        path = path / "config.json" if path.is_dir() else path
        values = _config_values(path)
    except OSError as error:
        raise InputError(f"{path} can't be read: {one_line(error)}. Expected a config.json.") from None
    _library("transformers")
    if lora is not None:
        peft_library()  # report a missing package before a model is built
    config = _config(path, values)
    task, auto_class = _task_of(path, config, values.get("architectures"), task)
    if auto_class == "AutoModelForImageClassification":
        _refuse_options(str(path), "an image classifier", seq_len=seq_len)
        batch = partial(_pixel_batch, path, image_size)
    else:
        _refuse_options(str(path), "a text model", image_size=image_size)
        _check_seq_len(path, seq_len, _positions(config))
        batch = partial(_token_batch, path, task, seq_len)
    adapt = None if lora is None else partial(lora.added_to, task=task)
    return partial(_build_of_transformers, path, config, auto_class, batch, adapt)


def _config_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            f"{path} does not exist. Expected a model's config.json, or a folder that contains it. autosplit "
            "downloads nothing. Save the file, and pass its path.",
        )
    with path.open("rb") as file:
        text = file.read(MOST_CONFIG_BYTES + 1)
    if len(text) > MOST_CONFIG_BYTES:
        raise InputError(
            f"{path} has more than {MOST_CONFIG_BYTES} bytes. Expected a model's config.json.",
        )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not JSON: {one_line(error)}. Expected a model's config.json. Save it again.",
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(
            f"{path} has no model_type. Expected a config.json that transformers saved.",
        )
    if values.get("auto_map"):
        raise InputError(
            f"{path} names its own code (auto_map), which autosplit does not run. Expected a model of transformers. "
            "Remove auto_map to use transformers' own model of that type, or write a file with a workload().",
        )
    if values.get("quantization_config"):
        raise InputError(
            f"{path} has quantised weights ({_quantization(values['quantization_config'])}). autosplit can predict "
            "neither their memory nor their time. Remove quantization_config. For weights in bitsandbytes' NF4, add "
            "--lora r=16,quantize=nf4.",
        )
    return values


def _quantization(config: object) -> str:
    return str(config.get("quant_method", "of an unnamed method"))[:40] if isinstance(config, dict) else "not readable"


def _config(path: Path, values: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{path} has the model type {shown(kind)}, which this version of transformers does not have. Expected "
            f"one of its {len(CONFIG_MAPPING.keys())}. {_nearest(kind, CONFIG_MAPPING.keys())}. Or upgrade "
            "transformers.",
        )
    with _raised_as_input(f"{path} is not a configuration of a {kind}", "Expected a file that transformers saved"):
        config: Any = CONFIG_MAPPING[kind].from_dict(_without_kernels(values))
        text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(
            f"{path} has {layers} layers. Expected at most {MOST_LAYERS}. Correct num_hidden_layers.",
        )
    config.architectures = config.architectures or []  # transformers iterates over this list
    # Training does not use the cache. Without this line, the cache would count as an output to gather.
    config.use_cache = False
    return config


def _without_kernels(value: Any) -> Any:
    """Remove the choice of kernels, which may name code on the hub. transformers' default choice runs instead."""
    if not isinstance(value, dict):
        return value
    return {name: _without_kernels(item) for name, item in value.items() if not name.endswith("_implementation")}


def _task_of(path: Path, config: Any, architectures: object, asked: str | None) -> tuple[str, str]:
    """Return the requested task, or the architecture's task by default, and the class that builds the task's model."""
    from transformers.models.auto import modeling_auto

    found = {}
    for task, classes in CLASSES_OF_TASKS.items():
        for mapping, auto_class in classes.items():
            names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").get(config.model_type, ())
            found.update(dict.fromkeys((names,) if isinstance(names, str) else names, (task, auto_class)))
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if asked is None and isinstance(first, str) and first in found:
        return found[first]
    of_task = dict(found.values())
    if asked in of_task:
        return str(asked), of_task[asked]
    if not of_task:
        raise InputError(
            f"{path} has the model type {config.model_type}, which has none of the tasks {', '.join(TASKS)}. Write "
            "a Python file with a workload().",
        )
    if asked is not None:
        raise InputError(
            f"{config.model_type} of {path} has no model for the task {asked}. Expected {' or '.join(of_task)}.",
        )
    raise InputError(
        f"{path} names {f'the architecture {shown(first)}' if first else 'no architecture'}. Expected an "
        f"architecture for {' or '.join(of_task)}. Choose one with --task {next(iter(of_task))} (task=).",
    )


def _build_of_transformers(
    path: Path,
    config: Any,
    auto_class: str,
    batch: Callable[[nn.Module], tuple[Any, tuple[str, ...]]],
    adapt: Callable[[nn.Module], tuple[nn.Module, str]] | None,
) -> ModelParts:
    import transformers

    dtype = config.dtype or torch.float32
    assumed: tuple[str, ...] = ()
    if dtype is torch.float16:
        dtype = torch.bfloat16  # bfloat16 has the same size, and optimizers diverge with float16 weights
        assumed = (
            (
                f"{path.name} has float16 weights, which diverge in training. The plan assumes bfloat16, which has the "
                "same size"
            ),
        )
    elif dtype is not torch.float32:
        assumed = (
            f"weights, gradients and optimizer states are {str(dtype).removeprefix('torch.')}, as in {path.name}",
        )
    with _offline(), _raised_as_input(f"No model can be built from {path}", "Correct the configuration"):
        model = getattr(transformers, auto_class).from_config(config, dtype=dtype)
        sample_batch, more = batch(model)
    if adapt is not None:
        model, adapters = adapt(model)
        more = (*more, adapters)
    return ModelParts(model, sample_batch, None, (*assumed, *more))


def _positions(config: Any) -> int | None:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _positions_left(model: nn.Module) -> int | None:
    """Return the usable positions of a padded position table such as RoBERTa's, which start after the padding index."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and "position" in name and part.padding_idx is not None:
            return part.num_embeddings - part.padding_idx - 1
    return None


def _check_seq_len(path: Path, seq_len: int | None, most: int | None) -> None:
    if seq_len is not None and most is not None and seq_len > most:
        raise InputError(
            f"seq_len {seq_len} is more than the {most} positions of {path}. Pass a smaller seq_len, or change "
            "max_position_embeddings in a copy of the file.",
        )


def _token_batch(path: Path, task: str, seq_len: int | None, model: Any) -> tuple[Any, tuple[str, ...]]:
    config, text = model.config, model.config.get_text_config()
    most = _positions_left(model) or _positions(config)
    _check_seq_len(path, seq_len, most)
    length = seq_len or min(DEFAULT_SEQ_LEN, most or DEFAULT_SEQ_LEN)
    tokens = torch.randint(0, text.vocab_size, (SAMPLES, length))
    if task == "classification":
        labels = _class_labels(config)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a decoder with a classifier uses the last token that is not padding
    elif task == "token-classification":
        labels = torch.randint(0, config.num_labels, (SAMPLES, length))
    else:
        labels = torch.randint(0, text.vocab_size, (SAMPLES, length))
        if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # labels are shifted by one token and need a first token
    assumptions = (
        ()
        if seq_len
        else ((f"The plan assumes sequences of {length} tokens. Set a different length with --seq-len (seq_len=)."),)
    )
    return {"input_ids": tokens, "labels": labels}, assumptions


def _class_labels(config: Any) -> Tensor:
    if getattr(config, "problem_type", None) is None:  # otherwise some models infer it from the labels
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    if config.problem_type == "single_label_classification":
        return torch.randint(0, config.num_labels, (SAMPLES,))
    return torch.rand(SAMPLES) if config.num_labels == 1 else torch.rand(SAMPLES, config.num_labels)


def _pixel_batch(path: Path, image_size: int | None, model: Any) -> tuple[Any, tuple[str, ...]]:
    config = model.config
    own = getattr(config, "image_size", None) or DEFAULT_IMAGE_SIZE
    pixels, assumptions = _images(path.name, own, image_size, model, channels=getattr(config, "num_channels", 3))
    return {"pixel_values": pixels, "labels": _class_labels(config)}, assumptions


# ----------------------------------------------------------------------------------------------------------- images


def _of_timm(name: str, image_size: int | None) -> Callable[[], ModelParts]:
    timm = _library("timm")
    if not timm.is_model(name):
        raise InputError(
            f"timm has no model {shown(name)}. Expected one of its {len(timm.list_models())}. "
            f"{_nearest(name, timm.list_models())}.",
        )

    def build() -> ModelParts:
        with _offline(), _raised_as_input(f"timm can't build {name}", "Choose a classifier"):
            model = timm.create_model(name, pretrained=False)
        channels, *own = model.pretrained_cfg["input_size"]
        return _classifier(f"timm:{name}", own, image_size, model, channels)

    return build


def _of_torchvision(name: str, image_size: int | None) -> Callable[[], ModelParts]:
    models = _library("torchvision").models
    known = models.list_models(module=models)  # excludes detection, segmentation and video models
    if name not in known:
        raise InputError(
            f"torchvision has no classifier {shown(name)}. Expected one of its {len(known)}. {_nearest(name, known)}.",
        )

    def build() -> ModelParts:
        with warnings.catch_warnings():  # GoogLeNet warns about its future weight initialisation
            warnings.simplefilter("ignore", FutureWarning)
            model = models.get_model(name, weights=None)
        # Prefer the model's `image_size`, because its pretrained weights may be for images of a different size.
        own = getattr(model, "image_size", None) or models.get_model_weights(name).DEFAULT.transforms().crop_size
        return _classifier(f"torchvision:{name}", own, image_size, model, 3)

    return build


def _classifier(spec: str, own: Any, image_size: int | None, model: Any, channels: int) -> ModelParts:
    pixels, assumptions = _images(spec, own, image_size, model, channels=channels)
    labels = torch.randint(0, getattr(model, "num_classes", 1000), (SAMPLES,))
    return ModelParts(model, (pixels, labels), class_loss, assumptions)


def class_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy of a classifier's logits, plus the losses of auxiliary heads."""
    heads = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return torch.stack([F.cross_entropy(logits, labels) for logits in heads if logits is not None]).sum()


def _images(
    what: str, own: Any, image_size: int | None, model: Any, *, channels: int
) -> tuple[Tensor, tuple[str, ...]]:
    sides = [*own] * (2 // len(own)) if isinstance(own, (list, tuple)) else [own, own]
    asked = sides if image_size is None else [image_size, image_size]
    pixels = torch.randn(SAMPLES, channels, *asked)
    size = " x ".join(map(str, sides))
    if asked != sides:
        advice = f"Expected a size that the model accepts, such as its own, {size}. Leave image_size out"
        with (
            _raised_as_input(f"{what} can't use images of {image_size} x {image_size} pixels", advice),
            torch.no_grad(),
        ):
            model.eval()
            model(pixels[:1])
            model.train()
    assumptions = f"The plan assumes images of {size} pixels. Set a different size with --image-size (image_size=)."
    return pixels, (assumptions,) if image_size is None else ()


def named_workload(spec: str, options: dict[str, Any]) -> Callable[[], Workload]:
    """Return a function that builds the workload of a model's name. Raise InputError for a wrong name or option."""
    scheme, _, name = spec.partition(":")
    if scheme == "hf":  # Then the path is valid in any folder.
        # The shell does not expand ~ after a colon. Use os.path.expanduser, because Path.expanduser raises an error for
        # unknown users.
        home = os.path.expanduser(name)  # noqa: PTH111
        spec = f"hf:{Path(home).absolute()}"
    checked = dict(options)
    if "optimizer" in checked:
        named_optimizer(checked.pop("optimizer"))
    model_by_name(spec, **checked)
    return partial(workload_from_name, spec, **options)
