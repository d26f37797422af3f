"""Write a workload file for the model in a user's file, with a sample batch and a loss.

If the file has a DataLoader, its first batch is the sample batch. Otherwise the inputs are guessed: the model runs each
candidate, and its output determines targets and loss.

    first layer           candidates for one sample
    Conv2d(3, ...)        float (3, 224, 224), (3, 64, 64), (3, 32, 32), (3, 28, 28)
    Linear(20, ...)       float (20,), (16, 20)
    Embedding(500, ...)   tokens below 500: (128,), (64,), (16,), (8,)
    LSTM(20, ...)         float (16, 20)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autosplit.errors import InputError, users_errors
from autosplit.files import READ_BY_ALL, replace_file
from autosplit.workload.from_file import load_module, required_arguments, split_spec
from autosplit.workload.model_call import needed_inputs

BATCH_SIZE = 8
"""Number of samples in the file's sample batch."""

_FIRST_LAYERS = 4
"""`init` guesses the inputs of so many layers. The first registered layer is not always the first to run."""


@dataclass(frozen=True)
class StartingWorkload:
    """A workload file that was written for a model.

    Attributes:
        path: The file.
        model: The class, or the function that makes the model.
        inputs: Python expression for the inputs of the sample batch.
        targets: Python expression for its targets. None if the model returns its loss, or if `inputs` is a whole batch
            of the file's DataLoader.
        loss_fn: Python expression for the loss. None if the model returns its loss.
        is_guess: Whether the sample batch is guessed. False if it is the first batch of the file's DataLoader.
    """

    path: str
    model: str
    inputs: str
    targets: str | None
    loss_fn: str | None
    is_guess: bool


@dataclass(frozen=True)
class Sample:
    """The inputs or the targets of one sample: random floats, or random whole numbers below `high`."""

    shape: tuple[int, ...]
    high: int | None = None

    def batch(self, n: int) -> torch.Tensor:
        """Return a random batch of n samples."""
        return torch.randn(n, *self.shape) if self.high is None else torch.randint(self.high, (n, *self.shape))

    def code(self) -> str:
        """Return the Python expression for a batch."""
        shape = (BATCH_SIZE, *self.shape)
        if self.high is None:
            return f"torch.randn({', '.join(map(str, shape))})"
        return f"torch.randint({self.high}, {shape})"


def write_workload(
    spec: str, *, shape: tuple[int, ...] | None = None, output: str | None = None, force: bool = False
) -> StartingWorkload:
    """Write a file with a workload for the model that a spec names.

    Args:
        spec: ``FILE[:NAME]`` or ``package.module[:NAME]``. NAME is a model class, or a function that returns a model.
            Default: the last class of the file that needs no arguments.
        shape: Shape of one sample's inputs. Default: guessed from the first layers of the model.
        output: The file to write. Default: ``workload.py`` next to FILE.
        force: Whether to replace an existing file.

    Raises:
        InputError: The file has no such model, the file to write exists, or the model's forward accepts
            none of the tried inputs.
    """
    place, name = split_spec(spec, "")
    is_file = place.endswith(".py")
    path = Path(output) if output is not None else (Path(place).parent if is_file else Path()) / "workload.py"
    if path.exists() and not force:
        raise InputError(
            f"{path} exists. Expected a new file. Choose another file with --output, or replace it with --force.",
        )
    if is_file and not Path(place).stem.isidentifier():
        raise InputError(
            f"{place} can't be imported, because {Path(place).stem!r} is not a Python name. Rename the file.",
        )
    module = load_module(place)
    name = name or _model_in(module, place)
    with users_errors(place):
        model = getattr(module, name)()
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{place}:{name} returned a {type(model).__name__}. Expected a subclass of torch.nn.Module, or a function "
            "that returns a module. Name the class or function as FILE:NAME.",
        )
    batch = _batch_of_loader(module, model) if shape is None else None
    batch = batch or _guessed_batch(model, shape, place)
    source = Path(place).stem if is_file else place
    folder = Path(place).resolve().parent if is_file else Path.cwd()
    added = () if folder == path.resolve().parent else ("import sys", "", f"sys.path.insert(0, {str(folder)!r})", "")
    replace_file(path, "\n".join([*_lines(source, name, batch, added), ""]), mode=READ_BY_ALL)
    loss = None if batch.loss is None else batch.loss.name
    return StartingWorkload(str(path), name, batch.inputs, batch.targets, loss, is_guess=not batch.names)


@dataclass(frozen=True)
class _Loss:
    """A loss in the file. `keyword` is the argument of `Workload`, and `lines` define the loss."""

    name: str
    keyword: str = "loss_fn"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Batch:
    inputs: str
    targets: str | None
    loss: _Loss | None
    names: tuple[str, ...] = ()


def _batch_of_loader(module: ModuleType, model: nn.Module) -> _Batch | None:
    """Return the first batch of the file's DataLoader, with the file's own loss, or None without a DataLoader."""
    loader = next((name for name, value in vars(module).items() if isinstance(value, DataLoader)), None)
    if loader is None:
        return None
    batch = f"next(iter({loader}))"
    with users_errors(loader):
        first = next(iter(getattr(module, loader)))
    needed = needed_inputs(model)
    for keyword, names in (("compute_loss", ("compute_loss",)), ("loss_fn", ("loss_fn", "criterion"))):
        for name in names:
            if callable(getattr(module, name, None)):
                call = _call_of(name, needed, first) if keyword == "loss_fn" else None
                return _Batch(batch, None, call or _Loss(name, keyword), (loader, name))
    is_pair = isinstance(first, (tuple, list)) and len(first) == 2 and isinstance(first[0], torch.Tensor)
    if len(needed) > 1 or not is_pair:
        return _Batch(batch, None, None, (loader,))  # The model returns its loss.
    with torch.no_grad(), users_errors(type(model).__name__):
        output = model.eval()(first[0][:2])
    high = None if first[0].is_floating_point() else 1
    return _Batch(batch, None, _targets_and_loss(Sample(tuple(first[0].shape[1:]), high), output)[1], (loader,))


def _call_of(loss_fn: str, needed: list[str], batch: Any) -> _Loss | None:
    """Return a `compute_loss` for a batch that is not a pair of one input and its targets. Otherwise return None.

    The targets are the part of the batch that the model does not need. If it needs all, they are the last input.
    """
    if isinstance(batch, Mapping) and {*needed} <= batch.keys():
        others = [name for name in batch if name not in needed]
        inputs, parts = [f"batch[{name!r}]" for name in needed], [f"batch[{name!r}]" for name in others]
        lines = []
    elif isinstance(batch, (tuple, list)) and 1 < len(needed) <= len(batch) <= len(needed) + 1:
        inputs, parts = needed, ["targets"] * (len(batch) - len(needed))
        lines = [f"    {', '.join([*inputs, *parts])} = batch"]
    else:
        return None
    if len(parts) > 1:
        return None
    return _Loss(
        "compute_loss",
        "compute_loss",
        (
            "",
            "",
            "def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:",
            '    """Return the mean loss of a batch. Check that the last argument is what the loss compares with."""',
            *lines,
            f"    return {loss_fn}(model({', '.join(inputs)}), {(parts or inputs)[-1]})",
        ),
    )


def _guessed_batch(model: nn.Module, shape: tuple[int, ...] | None, place: str) -> _Batch:
    inputs, output = _first_that_runs(model, shape, place)
    targets, loss = _targets_and_loss(inputs, output)
    return _Batch(inputs.code(), None if targets is None else targets.code(), loss)


def _model_in(module: ModuleType, place: str) -> str:
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    }
    names = [name for name, value in own.items() if not required_arguments(value)]
    if names:
        return names[-1]
    found = "; ".join(f"{name} needs {', '.join(required_arguments(value))}" for name, value in own.items())
    raise InputError(
        f"{place} has no torch.nn.Module class that can be created without "
        f"arguments{f' ({found})' if found else ''}. Write a function that returns the model, and name the function: "
        f"autosplit init {place}:make_model",
    )


def _candidates(model: nn.Module, shape: tuple[int, ...] | None) -> Iterator[Sample]:
    layers = (layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False)))
    for _, layer in zip(range(_FIRST_LAYERS), layers, strict=False):
        if isinstance(layer, nn.Embedding):
            shapes = [(128,), (64,), (16,), (8,)] if shape is None else [shape]
            yield from (Sample(one, layer.num_embeddings) for one in shapes)
        elif shape is None:
            yield from map(Sample, _float_shapes(layer))
    if shape is not None:
        yield Sample(shape)


def _float_shapes(layer: Any) -> list[tuple[int, ...]]:
    if isinstance(layer, nn.Conv1d):
        return [(layer.in_channels, size) for size in (1024, 16_000)]
    if isinstance(layer, nn.Conv2d):
        return [(layer.in_channels, size, size) for size in (224, 64, 32, 28)]
    if isinstance(layer, nn.Conv3d):
        return [(layer.in_channels, 16, size, size) for size in (112, 32)]
    if isinstance(layer, nn.Linear):
        return [(layer.in_features,), (16, layer.in_features)]
    if isinstance(layer, nn.RNNBase):
        return [(16, layer.input_size)]
    if isinstance(layer, nn.MultiheadAttention):
        return [(16, layer.embed_dim)]
    return []


def _first_that_runs(model: nn.Module, shape: tuple[int, ...] | None, place: str) -> tuple[Sample, Any]:
    model.eval()
    tried: list[str] = []
    for sample in _candidates(model, shape):
        try:
            with torch.no_grad():
                return sample, model(sample.batch(2))
        except Exception as error:  # noqa: BLE001  # any error of the model means a different shape
            tried.append(f"{sample.shape}: {str(error).splitlines()[0][:100] if str(error) else type(error).__name__}")
    errors = f" ({'; '.join([*dict.fromkeys(tried)][-3:])})" if tried else ""
    raise InputError(
        f"autosplit could not guess inputs for the forward of {type(model).__name__}{errors}. Pass the shape of one "
        f"sample, as in autosplit init {place} --input 3,32,32. If the forward takes several inputs, define a "
        "DataLoader and a compute_loss(model, batch) in the file. autosplit then takes its first batch as the sample "
        "batch.",
    )


_TOKEN_LOSS = _Loss(
    "token_loss",
    lines=(
        "",
        "",
        "def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:",
        "    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    ),
)


def _targets_and_loss(inputs: Sample, output: Any) -> tuple[Sample | None, _Loss | None]:
    """Return targets and a loss for the output of two samples. Return None for both if the output has a loss."""
    if getattr(output, "loss", None) is not None:
        return None, None
    if not isinstance(output, torch.Tensor) or output.dim() < 1 or len(output) != 2:
        kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"The model returns {kind}. Expected one tensor with a row per sample. Write the workload by hand, with "
            "compute_loss=: see docs/tuning.md.",
        )
    shape = tuple(output.shape[1:])
    if inputs.high is not None and len(shape) == 2:
        return Sample(shape[:1], shape[1]), _TOKEN_LOSS
    if len(shape) in (1, 3) and shape[0] > 1 and shape != inputs.shape:
        return Sample(shape[1:], shape[0]), _Loss("nn.CrossEntropyLoss()")
    return Sample(shape), _Loss("nn.MSELoss()")


def _lines(source: str, name: str, batch: _Batch, added: tuple[str, ...]) -> list[str]:
    loss = batch.loss
    own = loss is not None and loss.name in batch.names
    imports = ["from typing import Any", ""] if loss is not None and loss.name == "compute_loss" and not own else []
    imports += ["import torch", *(["from torch import nn"] if loss is not None and not own else [])]
    sample = batch.inputs
    lines = []
    if not batch.names:
        lines = [f"    inputs = {batch.inputs}  # a batch of your data: next(iter(loader))"]
        lines += [] if batch.targets is None else [f"    targets = {batch.targets}"]
        sample = "inputs" if batch.targets is None else "(inputs, targets)"
    given = "" if loss is None else f", {loss.keyword}={loss.name}"
    return [
        '"""What autosplit tunes. The sample batch should look like your data."""',
        "",
        *added,
        *imports,
        f"from {source} import {', '.join(dict.fromkeys((name, *batch.names)))}",
        "",
        "import autosplit",
        *(() if loss is None else loss.lines),
        "",
        "",
        "def workload() -> autosplit.Workload:",
        '    """Return the model, a sample batch, the loss and the optimizer."""',
        *lines,
        f"    return autosplit.Workload({name}(), {sample}{given}, optimizer=torch.optim.AdamW)",
    ]
