"""Provide a trainable copy of a workload: its models, its optimizers and its training step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosplit.devices.transfer import Placement, adopt_module
from autosplit.errors import OWN_FOLDER, AutosplitError, WorkloadError, advise
from autosplit.rng import ExtremeDraws
from autosplit.torch_versions import scale_each
from autosplit.workload.batch import resize
from autosplit.workload.model_call import OutsideParameters, call_model, on_first_device, training_loss
from autosplit.workload.models import Models, Several
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload, autocast, copying, made_batch

CPU = torch.device("cpu")

LOSS_SCALE = 1.0
"""Loss scale of fp16. A larger scale needs the same memory and kernels, but often overflows in the first steps.

After an overflow, the scaler skips the optimizer, whose state could then not be measured.
"""


@dataclass
class Trainee:
    """Models and optimizers that a training step may change.

    Attributes:
        device: The device that the copy reports.
        making: Context in which tensors are made.
        restore: Restores the live model if this trainee uses its memory.
        left: Storages that remain on the first device between steps.
        grown_bytes: Bytes on the first device after the last step, minus the bytes before it.
        outside: Refuses a loss that trains tensors outside of the models.
        copies: Second copies for the workload's `fits`, from the second step on: parameters and buffers, and optimizer
            state.
    """

    workload: Workload
    models: Models
    optimizers: Several[torch.optim.Optimizer]
    making: AbstractContextManager[Any] = field(default_factory=nullcontext)
    scaler: torch.amp.GradScaler | None = None
    restore: Callable[[], None] = lambda: None
    left: Sequence[weakref.ref[torch.UntypedStorage]] = ()
    grown_bytes: int = 0
    peak_bytes: int = 0
    device: torch.device = CPU
    draws: ExtremeDraws = field(default_factory=ExtremeDraws)
    copies: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())
    outside: OutsideParameters = field(default_factory=OutsideParameters)
    _ran: set[int] = field(default_factory=set)
    _updated: bool = False
    _has_stepped: bool = False

    def batch(self, n: int) -> Any:
        """Make a batch of `n` samples. Shared tensors are marked as `Whole`."""
        return self._made(n)

    def _made(self, n: int) -> Any:
        workload = self.workload
        if workload.make_batch is not None:
            return made_batch(workload, n)
        return resize(workload.sample_batch, n, workload.batch_dim)

    def zero_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like a parameter."""
        return torch.zeros_like(parameter)

    def batches(self, sizes: Sequence[int]) -> list[Any]:
        """Return a batch of each size. Equal sizes share one batch."""
        made = {size: self.batch(size) for size in dict.fromkeys(sizes)}
        return [made[size] for size in sizes]

    def parameters(self) -> list[nn.Parameter]:
        """Return the models' parameters, tied parameters once."""
        return list({id(p): p for module in self.models.modules for p in module.parameters()}.values())

    def wrapped(self, wrap: Callable[[nn.Module], nn.Module]) -> Models:
        """Return the models, each in a wrapper."""
        return self.models.map(wrap)

    def adopt_on(self, placement: Placement, *, with_state: bool = True) -> None:
        """Charge parameters, buffers and, with `with_state`, the optimizer state to the first device of a step."""
        for module in self.models.modules:
            adopt_module(placement, module, 0)
        if with_state:
            for value in self.copies[0]:
                placement.adopt(value, 0)
            for value in (*self._state(), *self.copies[1]):
                if value.dim() > 0:  # scalars are on the host
                    placement.adopt(value, 0)

    def _state(self) -> list[Tensor]:
        return [value for optimizer in self.optimizers.items for value in state_tensors(optimizer)]

    def _copy_what_has_to_fit(self) -> None:
        wanted = copying(self.workload.held)
        if self.copies[0] or not wanted:
            return
        held = self.held()
        state = held["optimizer"] if "save" in wanted else []
        with torch.no_grad(), self.making:
            self.copies = tuple(t.detach().clone() for t in held["parameters"]), tuple(t.clone() for t in state)

    def held(self) -> dict[Literal["parameters", "gradients", "optimizer"], list[Tensor]]:
        """Return the tensors of the models and optimizers by kind. Buffers count as parameters."""
        parameters = self.parameters()
        buffers = [buffer for module in self.models.modules for buffer in module.buffers()]
        return {
            "parameters": [*parameters, *buffers, *self.copies[0]],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": [*self._state(), *self.copies[1]],
        }

    def step(
        self,
        models: Models,
        batches: Sequence[Any],
        sizes: Sequence[int],
        mark: Callable[[str], None] = lambda _phase: None,
        *,
        updates: bool = True,
        update: Callable[[], None] | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Run one optimizer step.

        Args:
            sizes: Samples in each micro-batch. They weight a mean loss.
            mark: Called when a phase begins: ``"micro"`` for each micro-step, ``"update"`` for the optimizer.
            update: Replaces `Trainee.update`. A custom step does not use it.
            num_samples: Samples of the whole step, if these micro-batches are only a part of it.
        """
        workload = self.workload
        device_type = self.models.device_type
        if updates and self._has_stepped:
            self._copy_what_has_to_fit()
        if workload.step is not None:
            assert len(batches) == 1, "a custom step can't be accumulated"
            mark("micro")
            with autocast(workload, device_type):
                workload.step(models.given, self.optimizers.given, on_first_device(batches[0], models))
            mark("update")
        else:
            # `loss` stays alive until the next micro-step, like the variable of a training loop.
            from autosplit.parallel.accumulation import Accumulation  # a stored plan runs no step

            accumulation = Accumulation()
            total = num_samples or sum(sizes)
            for position, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
                mark("micro")
                with accumulation.running(is_last=position == len(batches) - 1):
                    with autocast(workload, device_type), self._advising_pairs(models, size):
                        loss = training_loss(workload, models.given, batch)
                    if len(batches) == 1 and num_samples is None:  # replicas that are kept have leaves of their own
                        self.outside.refuse(loss, workload, self.models.modules, batch)
                    if workload.loss_reduction == "mean":  # weight by samples, as `plan.steps` does
                        loss = loss * (size / total)
                    self._scaled(loss).backward()
            accumulation.finish()
            mark("update")
            if updates:
                (update or self.update)()
        for optimizer in self.optimizers.items:
            optimizer.zero_grad(set_to_none=True)
        self._has_stepped |= updates

    @contextmanager
    def _advising_pairs(self, models: Models, size: int) -> Iterator[None]:
        """Advise to make a pair one sample, if all sizes that ran have a divisor that the failed size lacks."""
        try:
            yield
        except Exception as error:
            is_theirs = not isinstance(error, (AutosplitError, torch.OutOfMemoryError))
            own = self.workload.sample_batch_size
            if is_theirs and own not in self._ran and size != own:
                with suppress(Exception):
                    training_loss(self.workload, models.given, self.batch(own))
                    self._ran.add(own)
            if is_theirs and own in self._ran and size % math.gcd(*self._ran):
                advise(
                    error,
                    f"it ran with {own} samples, but not with {size}. If a batch "
                    "must be even (pairs, two views), make each pair one sample: a batch of shape (n, 2, ...), and "
                    "batch.flatten(0, 1) in the model. If not, fix it and run again, or check batch_dim",
                )
            raise
        self._ran.add(size)

    def _scaled(self, loss: Tensor) -> Tensor:
        if self.workload.precision != "fp16":
            return loss
        # A traced copy has no scaler, because fake tensors have no infinities. Do its arithmetic without its check.
        return loss * LOSS_SCALE if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Update the parameters with the optimizers, through the gradient scaler for fp16."""
        for optimizer in self.optimizers.items:
            if self.scaler is not None:
                self.scaler.step(optimizer)
                if not self._updated and not optimizer.state:
                    optimizer.step()  # the scaler skips a loss that is infinite at any scale, but state is needed
                continue
            if self.workload.precision == "fp16":
                grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                if grads:
                    scale_each(grads, 1.0 / LOSS_SCALE)
            optimizer.step()
        self._updated = True
        if self.scaler is not None:
            self.scaler.update()

    def outputs(self, samples: int) -> Any:
        """Return the model's outputs for a batch of this many samples."""
        return call_model(self.models.given, on_first_device(self.batch(samples), self.models))

    def begin_state(self) -> bool:
        """Create optimizer state with a zero-gradient step. Return False if there was state already."""
        optimizers = self.optimizers.items
        if any(optimizer.state for optimizer in optimizers):
            return False
        with self.making:
            for optimizer in optimizers:
                trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                try:
                    for parameter in trained:
                        nothing = self.zero_gradient(parameter)
                        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # rejects dense gradients
                        parameter.grad = nothing.to_sparse(1) if is_sparse else nothing
                    optimizer.step()
                finally:
                    optimizer.zero_grad(set_to_none=True)
        self._copy_what_has_to_fit()
        return True

    def end_state(self, parameters: Collection[nn.Parameter]) -> None:
        """Delete the optimizer state of all parameters except these."""
        known = set(map(id, parameters))
        for optimizer in self.optimizers.items:
            for parameter in [one for one in optimizer.state if id(one) not in known]:
                del optimizer.state[parameter]

    def evaluate(self, models: Models, batch: Any) -> Any:
        """Run one forward in evaluation mode without gradients, and return its outputs.

        Raises:
            WorkloadError: The workload has a custom `step`, so its forward is unknown.
        """
        if self.workload.step is not None:
            raise WorkloadError(
                "The workload has step=, which is a whole optimizer step. Expected one model and a loss to evaluate. "
                "Pass a Workload of the model alone.",
            )
        modes = [(module, module.training) for model in self.models.modules for module in model.modules()]
        inputs = batch[0] if self.workload.loss_fn is not None else batch
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad(), autocast(self.workload, self.models.device_type):
                if self.workload.evaluate is not None:  # it may call methods that a wrapper lacks
                    return self.workload.evaluate(self.models.given, on_first_device(batch, self.models))
                if self.workload.compute_loss is not None:  # only this function calls the model correctly
                    return self.workload.compute_loss(models.given, on_first_device(batch, models))
                return call_model(models.given, inputs)
        finally:
            for module, training in modes:
                module.training = training


def ran_a_step(trace: TracebackType | None) -> bool:
    """Return whether the workload's own code raised an exception during training."""
    stepped, innermost = False, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = code.co_filename
        stepped = stepped or code in _STEPPING
        trace = trace.tb_next
    return stepped and not innermost.startswith(OWN_FOLDER)


_STEPPING = {Trainee.step.__code__, Trainee.evaluate.__code__, Trainee.outputs.__code__, Trainee.batch.__code__}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [tensor for state in optimizer.state.values() for tensor in tensors_of(state)]
