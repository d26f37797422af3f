"""Run a copy of a workload to get its gradient of a batch: whole, split over devices, or accumulated. Disable dropout.

Each run starts with the same parameters, buffers and random numbers, and without gradients. No parameter is updated, so
the gradient of one optimizer does not depend on the update of another.
"""

from __future__ import annotations

import copy
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.accelerators import accelerator_in_use
from autosplit.parallel.loss_weights import Reduce
from autosplit.parallel.replicate import BufferCopies, moving_buffers
from autosplit.probe.label_counts import CrossEntropies, CrossEntropy, LabelMean, label_means
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.tracked_step import wrapper_for
from autosplit.workload.batch_layout import BatchLayout
from autosplit.workload.model_call import on_first_device, training_loss
from autosplit.workload.models import Models
from autosplit.workload.tree import map_tensors
from autosplit.workload.workload import Workload

Gradients = dict[str, Tensor]
"""The gradient at each step of each optimizer, as one row. A workload without `step` has only `GRADIENT`."""

GRADIENT = "gradient"

_SCALE = 0.7
"""Scale of a loss that changes how its gradient is rounded. A power of two would not."""


class TooDearError(Exception):
    """A run took longer than its limit, or would need too much memory."""


class _Quiet(CrossEntropies):
    """Disable dropout in all functions of torch while it is active. Raise TooDearError after the deadline."""

    def __init__(self, deadline_s: float | None) -> None:
        super().__init__()
        self.deadline_s = deadline_s

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Functions without tensors must not raise, because some of them switch gradients on again at the end of
        # no_grad. Nor must the clean-up after the first TooDearError be interrupted.
        may_fail = any(isinstance(value, Tensor) for value in args) and not isinstance(sys.exc_info()[1], TooDearError)
        if may_fail and self.deadline_s is not None and time.monotonic() > self.deadline_s:
            raise TooDearError
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if _DROPOUT.fullmatch(name) or name == "native_dropout":
            given = args[0] if args else named["input"]
            return (given, torch.ones_like(given, dtype=torch.bool)) if name == "native_dropout" else given
        if name in _RECURRENT:  # Dropout is the only positional float.
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        elif name in _WITH_DROPOUT:
            position = _WITH_DROPOUT[name]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                named["dropout_p"] = 0.0
        return super().__torch_function__(func, types, args, named)


_DROPOUT = re.compile("(feature_)?(alpha_)?dropout([123]d)?_?")
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_WITH_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of `dropout_p` among the positional arguments."""

_DROPPING = re.compile("drop|stochasticdepth", re.IGNORECASE)
"""Class names of layers that drop values without a dropout function: DropPath, DropBlock2d, StochasticDepth."""


class QuietCopy:
    """A copy of a workload on the CPU with one batch, which can be split over two devices.

    Attributes:
        saved_bytes: Bytes that autograd saved for the backward in the last run of the whole batch.
        state: The buffers after the last run, by path.
        label_means: The counts that each cross entropy of the whole batch may be averaged over.
    """

    def __init__(self, workload: Workload, batch: Any, dtype: torch.dtype, shares: tuple[int, int]) -> None:
        # Without `step`, no optimizer runs. Drop the optimizer, because a copy of a live optimizer would copy its
        # state.
        quiet = replace(
            workload,
            precision="none",
            loss_fn=_loss_in(workload.loss_fn, dtype),
            optimizer=None if workload.step is None else workload.optimizer,
        )
        self.dtype, self.shares = dtype, shares
        self.saved_bytes, self.seconds = 0, 0.0
        self.state: dict[str, Tensor] = {}
        self.label_means: list[LabelMean] = []
        self.trainee = training_copy(quiet, device=torch.device("cpu"))
        try:
            for module in self.trainee.models.modules:
                _in_dtype(module, dtype)
                for part in module.modules():
                    if _DROPPING.search(type(part).__name__) and next(part.parameters(), None) is None:
                        part.training = False
            self._seen: Gradients = {}
            for name, optimizer in self._named_optimizers():
                self._record(name, optimizer)
        except BaseException:
            self.trainee.restore()
            raise
        # Keep `Whole` marks, so that these tensors are not cut.
        self.batch = map_tensors(
            lambda t: t.detach().to("cpu", dtype if t.is_floating_point() else None), batch, keeps_marks=True
        )
        self.workload = quiet
        self._parameters = [p for p in self.trainee.parameters() if p.requires_grad]

    def close(self) -> None:
        """Restore the live model if it was not copied, and free the memory that the copy used on a GPU."""
        self.trainee.restore()
        if (accelerator := accelerator_in_use()) is not None:
            accelerator.empty_cache()

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """Every module with its path. With several models, the path begins with the model's name."""
        return [
            (".".join(filter(None, (prefix, path))), module)
            for prefix, model in zip(self.trainee.models.names, self.trainee.models.modules, strict=True)
            for path, module in model.named_modules()
        ]

    def whole(self, *, seed: int = 0, scale: float = 1.0, limit_s: float | None = None) -> Gradients:
        """Return the gradient of the whole batch."""
        self.saved_bytes = 0
        begin_s = time.monotonic()
        deadline_s = None if limit_s is None else begin_s + limit_s
        with self._alike(seed, deadline_s) as seen, self._counting_saved():
            gradients = self._run(self.trainee.models, self.batch, scale=scale)
        self.label_means = [*label_means(seen, self.batch)]
        self.seconds = time.monotonic() - begin_s
        return gradients

    def again(self) -> Gradients:
        """Return the gradient of the whole batch with other random numbers and other rounding."""
        if self.workload.step is not None:
            return self.whole(seed=1)
        return {GRADIENT: self.whole(seed=1, scale=_SCALE)[GRADIENT] / _SCALE}

    def split(self, reduce: Reduce | None = None) -> Gradients:
        """Return the gradient of the batch split over two devices, as `Plan.wrap` splits it."""

        def wrapped(module: nn.Module) -> nn.Module:
            wrapper = wrapper_for(self.workload, self.shares)(module)
            wrapper.reduce = reduce or wrapper.reduce
            return wrapper

        with self._alike():
            return self._run(self.trainee.wrapped(wrapped), self.batch)

    def parts(self) -> list[Gradients]:
        """Return the gradients of two micro-batches, without weights."""
        with self._alike():
            return [self._run(self.trainee.models, micro_batch) for micro_batch in self.micro_batches]

    @property
    def micro_sizes(self) -> tuple[int, int]:
        """Number of samples of each micro-batch. The last micro-batch is smaller, as in a plan."""
        return max(self.shares), min(self.shares)

    @property
    def micro_batches(self) -> list[Any]:
        """The micro-batches."""
        return BatchLayout.of(self.batch, sum(self.shares), self.workload.batch_dim).cut(self.micro_sizes)

    def _run(self, models: Models, batch: Any, *, scale: float = 1.0) -> Gradients:
        workload, self._seen = self.workload, {}
        for parameter in self._parameters:
            parameter.grad = None
        if workload.step is None:
            loss = training_loss(workload, models.given, batch)
            self.trainee.outside.refuse(loss, workload, self.trainee.models.modules, batch)
            (loss * scale).backward()
        else:
            workload.step(models.given, self.trainee.optimizers.given, on_first_device(batch, models))
        found = self._seen or {GRADIENT: _gradient_of(self._parameters)}
        for parameter in self._parameters:
            parameter.grad = None
        return found

    @contextmanager
    def _alike(self, seed: int = 0, deadline_s: float | None = None) -> Iterator[list[CrossEntropy]]:
        """Run with the same buffers and random numbers. Record the buffers at the end, and the cross entropies."""
        before = torch.get_default_dtype()
        _seed(seed)
        with ExitStack() as stack:
            for module in self.trainee.models.modules:
                stack.enter_context(BufferCopies(moving_buffers(module)))
            torch.set_default_dtype(self.dtype)  # Tensors made in the forward must match the parameters.
            stack.callback(torch.set_default_dtype, before)
            yield stack.enter_context(_Quiet(deadline_s)).seen
            self.state = {path: buffer.clone() for path, buffer in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self.modules:
            for name, buffer in module.named_buffers(recurse=False):
                yield ".".join(filter(None, (path, name))), buffer

    @contextmanager
    def _counting_saved(self) -> Iterator[None]:
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
            if storage is not None and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.saved_bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def _record(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        steps = 0

        def step(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
            nonlocal steps
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            steps = 1 if name not in self._seen else steps + 1
            subject = name if steps == 1 else f"{name}, step {steps}"
            self._seen[subject] = _gradient_of(parameters)
            return loss

        optimizer.step = step  # type: ignore[method-assign]  # a copy that is dropped after the check

    def _named_optimizers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        if self.trainee.workload.step is None:
            return
        given, models = self.trainee.optimizers, self.trainee.models
        named = zip(models.names, models.modules, strict=True) if isinstance(models.given, Mapping) else ()
        owners = {id(p): name for name, model in named for p in model.parameters()}
        for name, optimizer in zip(given.names, given.items, strict=True):
            held = {owners.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
            owner = held.pop() if len(held) == 1 and not isinstance(given.given, Mapping) else None
            yield f"{GRADIENT} of optimizer {name or 0}{'' if owner is None else f' ({owner})'}", optimizer


def _gradient_of(parameters: Iterable[Tensor]) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for p in parameters]
    real = (torch.view_as_real(part) if part.is_complex() else part for part in parts)
    return torch.cat([part.reshape(-1).double() for part in real])


def relative(found: Gradients, whole: Gradients) -> dict[str, float]:
    """Return ``|found - whole| / |whole|`` for each gradient.

    The result is infinite if there is no gradient to compare, or if the difference is not finite.
    """
    errors = {}
    for subject, gradient in whole.items():
        other = found.get(subject)
        if other is None or other.shape != gradient.shape:
            errors[subject] = math.inf
            continue
        size = float(gradient.norm()) or float(other.norm())
        error = float((other - gradient).norm()) / size if size else 0.0
        errors[subject] = math.inf if math.isnan(error) else error
    return errors


def _seed(seed: int) -> None:
    """Seed the generators that a workload may use. `torch.manual_seed` is not used, because it would also seed CUDA."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    # Do not use module.to(dtype), because it also converts complex parameters.
    if dtype == torch.float64:
        module.double()
    else:
        module.float()


def _loss_in(loss_fn: Any, dtype: torch.dtype) -> Any:
    """Copy a loss that is a module, so that its weights have the outputs' dtype. Return other losses unchanged."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    try:
        copied = copy.deepcopy(loss_fn).to("cpu")
    except Exception:  # noqa: BLE001  # some modules can't be copied
        return loss_fn
    _in_dtype(copied, dtype)
    return copied
