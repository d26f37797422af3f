"""Describe a training step: a model, a sample batch, a loss, an optimizer and a precision.

`autosplit.runtime.trainee` copies the model and runs the copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autosplit.errors import InputError, WorkloadError
from autosplit.text import counted_text
from autosplit.workload.batch import COLLATED, MadeBatches, is_list_of_samples
from autosplit.workload.batch_layout import read_batch
from autosplit.workload.checkpointing import Checkpointing
from autosplit.workload.models import Models, Several
from autosplit.workload.sample_batch import largest_batch
from autosplit.workload.tree import shapes_text

PRECISIONS = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The autocast dtype of each precision. `fp16` also uses a GradScaler."""

_OTHER_NAMES = {
    **dict.fromkeys(("float32", "fp32", "32", torch.float32), "none"),
    **dict.fromkeys(("bfloat16", torch.bfloat16), "bf16"),
    **dict.fromkeys(("float16", "half", "16", torch.float16), "fp16"),
}


COPYING = ("resume", "save")
"""Roles of `find_ceiling` that keep copies on the device during a training step."""


def precision_name(value: Any) -> Any:
    """Return autosplit's name of a precision, for torch's dtype or name. Return any other value unchanged."""
    return _OTHER_NAMES.get(value, value) if isinstance(value, (str, torch.dtype)) else value


ModelFactory = Callable[[], Any]
MakeBatch = Callable[[int], Any]


@dataclass(frozen=True, eq=False)
class Workload:
    """A training step for which autosplit finds a plan.

    The type of the batch decides how the model is called: a tensor as ``model(x)``, a mapping as ``model(**batch)``, a
    tuple or list as ``model(*batch)``. With `loss_fn` the batch is a pair ``(inputs, targets)`` and the loss is
    ``loss_fn(model(inputs), targets)``. Without it, the loss is the output's ``.loss``, or a scalar output, or the mean
    of its floating-point tensors. The plan has a note if the mean is used.

    Args:
        model: A module, or a function that returns a module. With `step`, several modules in a tuple, list or mapping.
            For ``sim:`` devices, a function avoids allocating the parameters. autosplit runs a copy of the model.
        sample_batch: One batch of training data. Batches of other sizes repeat its samples.
        loss_fn: ``loss_fn(outputs, targets) -> Tensor`` with one element.
        compute_loss: ``compute_loss(model, batch) -> Tensor``, which replaces all the rules above. The batch is on the
            first device.
        step: ``step(models, optimizers, batch) -> None``, which replaces the whole optimizer step, for several models
            and optimizers. Such a step can't accumulate gradients.
        optimizer: A class (``torch.optim.AdamW``), a factory that is called with the trainable parameters, or an
            optimizer object, which is copied and never stepped. With `step`, pass a sequence or mapping with one for
            each model. Default: AdamW, with a note in the plan.
        precision: ``"none"`` (the default), ``"bf16"`` or ``"fp16"``.
        loss_reduction: How the loss combines the samples of a batch: ``"mean"`` or ``"sum"``.
        loss_scope: ``"sample"`` if each sample's loss is independent of the other samples. ``"batch"`` if it depends on
            the whole batch (contrastive losses). Gradients are then not accumulated.
        batch_dim: The batch dimension of every tensor that contains samples.
        make_batch: ``make_batch(n) -> batch``. Pass it if repeating samples is not enough, or for lists of images,
            graphs, packed sequences. On one device, or with DDP, no tensor of its batches needs a batch dimension,
            because nothing is cut.
        evaluate: ``evaluate(model, batch) -> Any``, such as a call of `generate` or a metric. It runs in evaluation
            mode without gradients in ``find_ceiling(role="eval")``. Default: the model's forward, or `compute_loss`.
        held: What each step also holds: ``"resume"``, ``"save"`` or ``"eval"``, see `find_ceiling`. Or ``"forward"`` if
            only a forward without gradients runs. autosplit sets it.
        checkpointing: The layers that are checkpointed. `tune_best` sets them.

    Raises:
        WorkloadError: The arguments do not describe a training step.
    """

    model: nn.Module | ModelFactory | Sequence[nn.Module] | Mapping[str, nn.Module]
    sample_batch: Any
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    _: KW_ONLY
    compute_loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[Any, Any, Any], Any] | None = None
    optimizer: Any = None
    precision: str | None = None
    loss_reduction: str = "mean"
    loss_scope: str = "sample"
    batch_dim: int = 0
    make_batch: MakeBatch | None = None
    evaluate: Callable[[Any, Any], Any] | None = None
    held: tuple[str, ...] = ()
    checkpointing: Checkpointing | None = None
    assumed: tuple[str, ...] = ()
    fits: InitVar[Any] = None
    sample_batch_size: int = field(init=False, repr=False)
    made: MadeBatches | None = field(init=False, repr=False, default=None)

    def __post_init__(self, fits: Any) -> None:
        if fits is not None:
            raise WorkloadError(
                f"fits={fits!r:.80} was removed. Ask for one role at a time: find_ceiling(workload, role='resume'), "
                "'save' or 'eval'."
            )
        object.__setattr__(self, "precision", precision_name(self.precision) or "none")
        _expect("precision", self.precision, tuple(PRECISIONS), " 'none' is fp32, or the precision of the model.")
        _expect("loss_reduction", self.loss_reduction, ("mean", "sum"))
        _expect("loss_scope", self.loss_scope, ("sample", "batch"))
        given = [name for name in ("loss_fn", "compute_loss", "step") if getattr(self, name) is not None]
        if len(given) > 1:
            raise WorkloadError(
                f"{' and '.join(given)} are given. Expected at most one of them. Leave the others out.",
            )
        for name in (*given, "make_batch", "evaluate"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{name} is {value!r}. Expected a function. Pass one, or leave the argument out.",
                )
            if isinstance(value, type) and issubclass(value, nn.Module):
                raise WorkloadError(
                    f"{name} is the class {value.__name__}. Expected a function of outputs and targets. Pass "
                    f"an instance, {value.__name__}().",
                )
        if isinstance(self.batch_dim, bool) or not isinstance(self.batch_dim, int) or self.batch_dim < 0:
            raise WorkloadError(f"batch_dim is {self.batch_dim!r}. Expected a dimension, 0 or more.")
        if self.step is not None and (self.evaluate is not None or "eval" in self.held):
            raise WorkloadError(
                "Evaluation can't be planned with step=, a whole optimizer step. Expected one model and its loss. "
                "Leave evaluate= out.",
            )
        self._check_models()
        self._check_checkpointing()
        if isinstance(self.sample_batch, (DataLoader, Dataset)):
            raise WorkloadError(
                f"sample_batch is a {type(self.sample_batch).__name__}. Expected one batch as training sees it. Pass "
                "next(iter(loader)), or a Workload.from_loader(loader, model=model).",
            )
        self._check_pair()
        if self.make_batch is not None:
            self._count_made(self.make_batch)
        else:
            object.__setattr__(self, "sample_batch_size", read_batch(self.sample_batch, self.batch_dim).size)

    def _check_pair(self) -> None:
        is_pair = isinstance(self.sample_batch, (tuple, list)) and len(self.sample_batch) == 2
        if self.loss_fn is not None and not is_pair:
            pair = "such a pair, ((a, b), targets) if the model takes two inputs"
            raise WorkloadError(
                f"loss_fn is given, but the sample batch is a {type(self.sample_batch).__name__}. Expected a pair "
                f"(inputs, targets). Pass {COLLATED if is_list_of_samples(self.sample_batch) else pair}, or "
                "compute_loss=(model, batch) -> loss.",
            )
        if self.loss_fn is not None and isinstance(self.sample_batch[1], Tensor) and self.sample_batch[1].dim() == 0:
            raise WorkloadError(
                "The targets of the sample batch are a single number. Expected a batch of samples. To make a batch of "
                "one sample, pass (inputs.unsqueeze(0), targets.unsqueeze(0)).",
            )

    def _count_made(self, make_batch: MakeBatch) -> None:
        made = MadeBatches.of(make_batch, self.batch_dim)
        batch, size, assumed = made.sample_batch(make_batch, self.sample_batch)
        fields = {"sample_batch": batch, "sample_batch_size": size, "made": made}
        for name, value in {**fields, "assumed": tuple(dict.fromkeys((*self.assumed, *assumed)))}.items():
            object.__setattr__(self, name, value)

    def _check_checkpointing(self) -> None:
        if self.checkpointing is None:
            return
        if not isinstance(self.checkpointing, Checkpointing):
            raise WorkloadError(
                f"checkpointing is {self.checkpointing!r}. Expected a Checkpointing object, which tune_best makes. "
                "Pass checkpointing= to tune_best.",
            )
        if modules_of(self):
            self.checkpointing.check(modules_of(self))

    @classmethod
    def from_loader(
        cls,
        loader: Iterable[Any],
        *,
        model: nn.Module | ModelFactory | Sequence[nn.Module] | Mapping[str, nn.Module],
        batches: int = 32,
        batch_dim: int = 0,
        **options: Any,
    ) -> Workload:
        """Describe a training step whose sample batch is the largest of several batches from a loader.

        If samples differ in length, a batch is padded to its longest sample, which determines its memory. So the batch
        with the most elements per sample becomes the sample batch. The plan is valid up to this length::

            workload = Workload.from_loader(loader, model=model, loss_fn=loss_fn, batches=200)
            plan = autosplit.tune(workload)

        The loader and random states stay unchanged. Only a plain iterator loses the batches that are drawn.

        Args:
            loader: An iterable of training batches.
            batches: Number of batches to draw; default 32. More batches find longer samples.
            **options: The other arguments of `Workload`.

        Raises:
            WorkloadError: No sample was drawn, or a batch has no batch size: it is a list of samples of different
                lengths, a PackedSequence, or a nested tensor.
        """
        return cls(model, largest_batch(loader, batches, batch_dim), batch_dim=batch_dim, **options)

    @classmethod
    def from_name(cls, name: str, **_options: Any) -> NoReturn:
        """Raise InputError, because `autosplit.workload_from_name` has replaced this method."""
        raise InputError(
            f"Workload.from_name({name!r}) was removed. Use autosplit.workload_from_name with the same arguments.",
        )

    def _check_models(self) -> None:
        if isinstance(self.model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise WorkloadError(
                f"model is wrapped in {type(self.model).__name__}. Expected the model itself, which the plan wraps "
                "later. Pass model.module.",
            )
        if isinstance(self.model, (nn.Module, tuple, list, Mapping)):
            models = Models.of(self.model)
            are_modules = models.modules and all(isinstance(one, nn.Module) for one in models.modules)
            if not isinstance(self.model, nn.Module) and (self.step is None or not are_modules):
                raise WorkloadError(
                    f"model is a {type(self.model).__name__} of {[type(one).__name__ for one in models.modules]}. "
                    "Expected the model first, then the sample batch. Several nn.Modules need step=.",
                )
            return
        if isinstance(self.model, torch.Tensor):
            raise WorkloadError(
                f"model is a tensor of shape {tuple(self.model.shape)}. Expected the model first, then the sample "
                "batch. Swap the arguments.",
            )
        if not callable(self.model):
            raise WorkloadError(
                f"model is {self.model!r:.80}. Expected an nn.Module, or a function that returns one. "
                "Pass the model as the first argument.",
            )
        if isinstance(self.model, type):
            _refuse_arguments_of(self.model)


def copying(held: Sequence[str]) -> tuple[str, ...]:
    """Return the roles that keep copies on the device during a training step."""
    return tuple(name for name in held if name in COPYING)


def models_of(workload: Workload) -> Models | None:
    """Return the model, or the models. None if `model` is a function."""
    model = workload.model
    return Models.of(model) if isinstance(model, (nn.Module, tuple, list, Mapping)) else None


def why_single(workload: Workload) -> str | None:
    """Return the reason why an optimizer step can't have several micro-steps, or None if it can."""
    if workload.step is not None:
        return "a custom step can't be accumulated"
    if workload.loss_scope == "batch":
        return "a loss over the whole batch (loss_scope='batch') can't be accumulated"
    return None


def modules_of(workload: Workload) -> tuple[nn.Module, ...]:
    """Return the model in a tuple, or the models. Empty if `model` is a function."""
    models = models_of(workload)
    return () if models is None else models.modules


def optimizers_of(workload: Workload) -> Several[Any]:
    """Return the optimizer argument of each model: a class, a factory or an optimizer object."""
    default = torch.optim.AdamW if workload.step is None else ()
    return Several.of(default if workload.optimizer is None else workload.optimizer)


def sample_text(workload: Workload) -> str:
    """Describe the sample batch for error messages. Include `batch_dim`, which may cause the error."""
    counted = counted_text(workload.sample_batch_size, "sample")
    if workload.make_batch is None:
        counted += f" along dimension {workload.batch_dim}"
    if isinstance(workload.model, type):
        counted = f"with {workload.model.__name__}(), an instance of the class that was passed as the model, {counted}"
    return f"The workload on its own sample batch ({counted} of {shapes_text(workload.sample_batch)})"


def made_batch(workload: Workload, n: int) -> Any:
    """Return `make_batch(n)`.

    Raises:
        WorkloadError: The batch has a different number of samples.
    """
    assert workload.make_batch is not None
    assert workload.made is not None
    batch = workload.make_batch(n)
    size = workload.made.count(batch)
    if size not in (n, None):
        raise WorkloadError(
            f"make_batch({n}) returned {size} samples. Expected {n}. Return exactly that many.",
        )
    return batch


def autocast(workload: Workload, device_type: str) -> AbstractContextManager[Any]:
    """Return the autocast context for a forward and its loss."""
    dtype = PRECISIONS[workload.precision or "none"]
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def _refuse_arguments_of(model: type) -> None:
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise WorkloadError(
            f"model is the class {model.__name__}, which needs arguments ({error}). Expected an nn.Module. "
            f"Pass an instance, {model.__name__}(...).",
        ) from None
    except ValueError:  # the class has no signature
        return


def _expect(name: str, value: Any, allowed: tuple[str, ...], advice: str = "") -> None:
    if value not in allowed:
        raise WorkloadError(f"{name} is {value!r}. Expected one of {', '.join(map(repr, allowed))}.{advice}")
