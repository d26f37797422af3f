"""Run a training step on tracked devices. The CPU computes, and the tracker charges each device for its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autosplit.devices.transfer import HOST
from autosplit.errors import WorkloadError
from autosplit.runtime.memory_tracker import Left, Tracker
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.trainee import CPU, Trainee
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload

if TYPE_CHECKING:
    from autosplit.parallel.balanced import BalancedDataParallel

T = TypeVar("T")

MOST_TO_SETTLE = 4
"""Maximum number of steps until memory must settle, so that a step leaves no more bytes than it found."""


def wrapper_for(
    workload: Workload, split: tuple[int, ...], devices: Sequence[torch.device] = (CPU,)
) -> Callable[[nn.Module], BalancedDataParallel]:
    """Return a function that wraps a model so that its batch is split over devices. A single device gets all parts."""

    def wrapped(module: nn.Module) -> BalancedDataParallel:
        from autosplit.parallel.balanced import BalancedDataParallel  # a stored plan runs no step

        return BalancedDataParallel(
            None,
            module,
            [*devices] * (len(split) // len(devices)),
            dim=workload.batch_dim,
            split=split,
            reduce="sum" if workload.loss_reduction == "sum" else "samples",
        )

    return wrapped


def bucket_bytes(trainee: Trainee) -> int:
    """Return the bytes of DDP's gradient buckets, which contain all gradients during the whole step."""
    return sum(parameter.numel() * parameter.element_size() for parameter in _trainable(trainee))


def _trainable(trainee: Trainee) -> list[nn.Parameter]:
    return [p for module in trainee.models.modules for p in module.parameters() if p.requires_grad]


def gradients_are_views(shape: StepShape) -> bool:
    """Return whether a rank's gradients are views of DDP's buckets (`DdpOptions.gradient_as_bucket_view`).

    DDP creates the views in the backward that synchronises. Gradients of earlier micro-steps are separate tensors
    (torch 2.13), so an accumulating rank needs memory for both.
    """
    return shape.num_ranks > 1 and len(shape.splits) == 1 and not shape.accumulates


@contextmanager
def move_gradients_into(buckets: Tensor, trainee: Trainee) -> Iterator[None]:
    """Copy each gradient into DDP's buckets when it arrives, and make it a view of them (`bucket_bytes` bytes)."""
    start = 0
    with ExitStack() as hooks:
        # Sort by element size, so that the offset of each view is a multiple of its element size.
        for parameter in sorted(_trainable(trainee), key=lambda p: -p.element_size()):
            end = start + parameter.numel() * parameter.element_size()
            view = buckets[start:end].view(parameter.dtype).view(parameter.shape)
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(_move_into, view)))
            start = end
        yield


def _move_into(view: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None and not parameter.grad.is_sparse:
        parameter.grad = view.copy_(parameter.grad)


def run_placed(
    trainee: Trainee,
    shape: StepShape,
    tracker: Tracker,
    mark: Callable[[str], None],
    *,
    update: Callable[[], None] | None = None,
    held: Iterable[nn.Parameter] = (),
) -> tuple[int, ...]:
    """Run one optimizer step under a tracker, and return each device's peak, in bytes.

    `held` are parameters with a gradient from earlier micro-steps. Replicas of a balanced step have them, too.
    """
    sizes = [sum(split) for split in shape.splits]
    evaluates = shape.arrangement == "eval"
    if evaluates and "eval" in trainee.workload.held:  # evaluation must fit in addition to the training state
        trainee.begin_state()
    with_state = shape.updates and (not evaluates or "eval" in trainee.workload.held)
    models = trainee.wrapped(wrapper_for(trainee.workload, shape.splits[0], [trainee.device]))
    try:
        with trainee.making:
            batches = trainee.batches(sizes)
            for parameter in held:
                parameter.grad = trainee.zero_gradient(parameter)
            with tracker, trainee.draws.in_step():
                trainee.adopt_on(tracker, with_state=with_state)
                tracker.adopt_left(trainee.left, 0)
                found_bytes = tracker.live_bytes[0]
                if held and shape.arrangement == "balanced":
                    mark("broadcast")
                    for wrapper in models.modules if any(shape.splits[0][1:]) else ():
                        cast("BalancedDataParallel", wrapper).hold_gradients(shape.splits[0], held)
                # If only one micro-step of an accumulating step runs, double the total, so that its loss gets a partial
                # weight.
                total = 2 * sum(sizes) if shape.accumulates else None
                with _ddp_buckets(shape, trainee, tracker):
                    if evaluates:
                        trainee.evaluate(models, batches[0])
                    else:
                        trainee.step(
                            models, batches, sizes, mark, updates=shape.updates, update=update, num_samples=total
                        )
                peaks = tuple(tracker.peak_bytes)
                if shape.updates and not evaluates:
                    trainee.left = _left_by(trainee, tracker)
            trainee.grown_bytes = _standing_bytes(trainee) - found_bytes if shape.updates else 0
            trainee.peak_bytes = peaks[0]
            return peaks
    finally:
        for wrapper in models.modules:
            wrapper.zero_grad(set_to_none=True)  # otherwise later steps add to these gradients


def run_until_settled(trainee: Trainee, run: Callable[[], T]) -> T:
    """Run steps until a step leaves no more bytes on the first device than it found. The first creates optimizer state.

    If random numbers decide which layers run, try the highest and the lowest numbers. Later steps use the numbers with
    the higher peak.

    Raises:
        WorkloadError: No step settles, so no batch size fits permanently.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainee.optimizers.items):
        raise WorkloadError(
            "The optimizer is LBFGS. Its memory changes from step to step while its history fills, so autosplit "
            "can't guarantee that a batch fits. Try the largest batch yourself, or plan with another optimizer.",
        )
    found, peak_bytes = _run_until_settled(trainee, run), trainee.peak_bytes
    if trainee.draws.count:
        trainee.draws.turn()
        other = _run_until_settled(trainee, run)
        if trainee.peak_bytes > peak_bytes:
            return other
        trainee.draws.turn()
    return found


def _run_until_settled(trainee: Trainee, run: Callable[[], T]) -> T:
    state_bytes = 0
    for _ in range(MOST_TO_SETTLE):
        before_bytes, state_bytes = state_bytes, _optimizer_bytes(trainee)
        found = run()
        if trainee.grown_bytes <= 0:
            return found
    stepped = {id(p) for one in trainee.optimizers.items for group in one.param_groups for p in group["params"]}
    left_out = [p for p in _trainable(trainee) if id(p) not in stepped]
    if trainee.workload.step is None and left_out:
        raise WorkloadError(
            f"{len(left_out)} parameters get a gradient but are not in the optimizer, so nothing clears their "
            f"gradients. The first has the shape {tuple(left_out[0].shape)}. Give the optimizer "
            "model.parameters(), or call requires_grad_(False) on parameters that you do not train.",
        )
    if _optimizer_bytes(trainee) > state_bytes > before_bytes:
        names = " and ".join(type(optimizer).__name__ for optimizer in trainee.optimizers.items)
        whose, how = f"The state of {names}", "Pass an optimizer whose state has a fixed size"
    else:
        whose, how = "Memory of the model or the step", "Allocate its full size at once, or clear it in every step"
    raise WorkloadError(
        f"{whose} grows from step to step, by {trainee.grown_bytes} bytes in the last of {MOST_TO_SETTLE}. So no "
        f"batch fits for long. Each step must free the memory that it took. {how}.",
    )


def _optimizer_bytes(trainee: Trainee) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in trainee.held()["optimizer"])


def _standing_bytes(trainee: Trainee) -> int:
    with Tracker(["device 0"], [None]) as tracker:
        trainee.adopt_on(tracker)
        tracker.adopt_left(trainee.left, 0)
        return tracker.live_bytes[0]


def _left_by(trainee: Trainee, tracker: Tracker) -> Left:
    for kind, tensors in trainee.held().items():
        for tensor in tensors:
            tracker.classify(tensor, kind)
    if tracker.left_on(0):
        gc.collect()  # free tensors that only a reference cycle keeps alive
    return tracker.left_on(0)


@contextmanager
def _ddp_buckets(shape: StepShape, trainee: Trainee, tracker: Tracker) -> Iterator[None]:
    """Charge device 0 for DDP's gradient buckets while a step runs. A single rank has none."""
    if shape.num_ranks == 1:
        yield
        return
    buckets = torch.empty(bucket_bytes(trainee), dtype=torch.uint8, device=trainee.parameters()[0].device)
    tracker.adopt(buckets, 0)
    tracker.classify(buckets, "gradients")
    with move_gradients_into(buckets, trainee) if gradients_are_views(shape) else nullcontext():
        yield


@contextmanager
def adopting_optimizers(tracker: Tracker) -> Iterator[None]:
    """Charge existing optimizer state when the optimizer steps. Each state tensor is on its parameter's device."""

    def adopt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            device = tracker.device_of(parameter) if isinstance(parameter, Tensor) else HOST
            for value in tensors_of(state) if device != HOST else ():
                if value.dim() > 0:
                    tracker.adopt(value, device)

    with register_optimizer_step_pre_hook(adopt):
        yield
