"""Run one optimizer step of exactly E samples, micro-batch by micro-batch.

Each micro-batch's mean loss is weighted by its fraction of the step's samples. So the gradient is exact. A
`BalancedDataParallel` keeps its replicas until the last micro-batch of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.autograd_graph import graph_leaves
from autosplit.errors import InputError
from autosplit.parallel.accumulation import Accumulation, WatchedParameter
from autosplit.parallel.awaited_update import AwaitedUpdate, parameters_updated_since, updates_so_far
from autosplit.parallel.moved_batch import to_device
from autosplit.parallel.parts import Attempt, Cuts, Part
from autosplit.parallel.step_listener import NoiseEstimate, StepListener

_MISSING = object()


@dataclass(eq=False)
class _MicroBatch:
    """The micro-batch, or the part of a cut micro-batch, that a step runs.

    Attributes:
        part: The part that `attempt` has to run, or None.
        meets: Whether the ranks synchronise in its backward.
    """

    samples: int  # 0 if this rank runs samples of another rank
    size: float
    part: Part | None
    meets: bool
    gathers: bool = False
    is_open: bool = True
    had_backward: bool = False
    attempt: Attempt | None = None
    failed: Attempt | None = None


class OptimizerStep:
    """Run one optimizer step. Iterate over it for its micro-batches, and call `backward` once for each.

    `backward` multiplies the mean loss of a micro-batch by its weight: its samples divided by the step's samples. The
    sum of the gradients is then the gradient of the mean over the whole step. In a DDP job, the weight is also
    multiplied by `num_ranks`, because DDP averages the gradients of the ranks.

    Args:
        counts: The divisor of each micro-batch's mean loss, usually its number of samples.
        count: The sum of the divisors over all ranks. Default: the sum of `counts`.
        num_samples: The number of samples over all ranks. Default: the sum of `samples`.
        num_ranks: The number of ranks whose gradients are averaged in the step's last backward.
        samples: This rank's samples of each micro-batch. A rank with 0 samples runs samples of another rank. Default:
            `counts`.
        splits: See `StepSchedule.splits`.

    Attributes:
        num_samples: The step's samples, over all ranks.
        count: The number by which the step's mean loss is divided, over all ranks: the sum of what `count=` of `steps`
            returned, such as tokens. Without `count=`, it equals `num_samples`.
        micro_batch_sizes: This rank's samples of each micro-batch.
        index: The step's number in the epoch, from 0.
        num_ranks: The number of ranks.
        listeners: The objects that the step calls for each micro-batch, in order.
        noise_scale: The estimate that was passed to `steps`.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        counts: Sequence[float],
        *,
        index: int = 0,
        count: float | None = None,
        num_samples: int | None = None,
        num_ranks: int = 1,
        samples: Sequence[int] | None = None,
        splits: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._counts, self._splits = tuple(counts), splits
        self.count = sum(counts) if count is None else count
        self.micro_batch_sizes = tuple(map(int, counts)) if samples is None else tuple(samples)
        self.num_samples = sum(self.micro_batch_sizes) if num_samples is None else num_samples
        self.num_ranks = num_ranks
        self.index = index
        self.listeners: list[StepListener] = []
        self.cuts: Cuts | None = None
        self.noise_scale: NoiseEstimate | None = None
        self.device: torch.device | str | int | None = None
        self.awaited = AwaitedUpdate()
        self._batches = iter(batches)
        self._drawn = 0
        self._now: _MicroBatch | None = None
        self._loss: torch.Tensor | None = None
        self._has_seen_loss = self._has_ended = False
        self._watched: WatchedParameter | None = None
        self._updates: int | None = None

    def __len__(self) -> int:
        return len(self.micro_batch_sizes)

    @property
    def weight(self) -> float:
        """The factor of the current micro-batch's mean loss: its count / the step's `count` * the number of ranks.

        Raises:
            InputError: No micro-batch was drawn yet.
        """
        if self._now is None:
            raise InputError(
                f"Optimizer step {self.index} has no current micro-batch. Write `for batch in step:` first.",
            )
        if not self.count:
            return 0.0
        return self._now.size * self.num_ranks / self.count

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is running."""
        return self._now is not None and self._now.is_open

    @property
    def counts_here(self) -> bool:
        """Whether the current samples count. False while this rank runs another rank's samples, with weight 0."""
        return self._now is None or not self._now.is_open or self._now.samples > 0

    def expect_gather(self) -> None:
        """Run this micro-batch's backward even with weight 0, because all ranks gather gradients in it."""
        if self._now is not None:
            self._now.gathers = self._now.is_open

    @property
    def loss(self) -> float:
        """The mean loss over the micro-batches of the step so far. Reading it waits for the device.

        In a DDP job, this is the mean over the rank's own samples.
        """
        own = sum(self._counts) * self.num_ranks
        return float(self._loss) * (self.count / own) if own and self._loss is not None else 0.0

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Multiply the current micro-batch's mean loss by its weight, and run the backward pass.

        If the weight is 0, no backward runs, because the mean is 0/0 and would make all gradients NaN. If the ranks
        synchronise in this micro-batch, the rank runs the backward of another rank's sample with zeroed gradients.

        Args:
            loss: The mean loss of the micro-batch, one number.
            scaler: Scales the weighted loss, for fp16.

        Raises:
            InputError: `loss` is not one number, no micro-batch was drawn, or its backward has run already.
        """
        weight, now = self.weight, self._now
        assert now is not None, "`weight` raises outside of a micro-batch"
        self._check_loss(loss)
        if now.had_backward:
            raise InputError(
                f"step.backward was called twice for {self._place()}. Expected one call, on the sum of the losses. "
                "If a GAN needs two, call (loss_d * step.weight).backward() for the first.",
            )
        self._check_parameters()
        self._check_updates(loss)
        if weight and not self._has_seen_loss:
            self._has_seen_loss = True
            parted = None if self.cuts is None or now.attempt is None else self.cuts.samples_of(now.attempt.part)
            samples = now.samples if parted is None else parted
            for listener in self.listeners:
                listener.first_loss(loss, samples, weight)
        if self.cuts is not None and now.attempt is None:
            raise InputError(
                f"step.backward was called outside of an attempt for {self._place()}, but on_oom is 'cut'. Put the "
                "forward and step.backward(loss) into `with step.attempt():`.",
            )
        now.had_backward = True  # also if the backward fails: gradients may be incomplete, so it cannot run again
        if not weight and not ((now.meets or now.gathers) and self.num_ranks > 1):
            if scaler is not None:
                scaler.scale(loss.new_zeros(()))  # creates the scale, which scaler.step() needs
            return
        watched = WatchedParameter.of(loss)
        weighted, before = loss * weight, updates_so_far()
        scaled = weighted if scaler is None else scaler.scale(weighted)
        for listener in self.listeners:
            listener.begin_backward(scaled)
        with self._around_backward(now, scaled, weight, scaler):
            scaled.backward() if now.attempt is None else now.attempt.backward(scaled.backward, loss)
        self._watched = watched if (goes_on := self._drawn < len(self)) else None
        self._updates = before
        if watched is not None:
            watched.end_backward(self._place(), may_update=not goes_on)
        self.awaited.expect(before, watched, may_skip=scaler is not None)
        if weight:
            own = weighted.detach().reshape(())
            # Add in place, because plans count the memory of only one loss.
            self._loss = own if self._loss is None else self._loss.add_(own)

    def _around_backward(
        self, now: _MicroBatch, scaled: torch.Tensor, weight: float, scaler: torch.amp.GradScaler | None
    ) -> AbstractContextManager[None]:
        if weight and any(listener.needs_gradients for listener in self.listeners):
            scale = 1.0 if scaler is None else scaler.scale(scaled.detach().new_ones(()))
            return self._around("recorded", scaled, now.size, weight, scale)
        # If the ranks gather outputs, keep the gradients that other ranks' losses have for this rank's samples.
        return nullcontext() if weight or (now.gathers and self.counts_here) else self._around("silenced")

    @contextmanager
    def _around(self, method: str, *args: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(getattr(listener, method)(*args))
            yield

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the current micro-batch. If it runs out of memory, the loop yields it again in two parts.

            for step in plan.steps(loader, on_oom="cut"):
                for inputs, targets in step:
                    with step.attempt():
                        step.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        An out-of-memory error ends the block but not the loop. The parts start from the same random state, and the
        gradient of the step does not change. Do not keep outputs of the model after the block, because the parts need
        their memory. With ``on_oom="raise"`` the block does nothing.

        Raises:
            OutOfMemoryError: torch's error, if the micro-batch is too small to be cut, or if the model uses reentrant
                checkpointing, which hides the gradients that are complete.
        """
        if self.cuts is None:
            yield
            return
        now = self._now
        if now is None or now.part is None:
            raise InputError(
                f"An attempt began without a current micro-batch in optimizer step {self.index}. Begin it inside "
                "`for batch in step:`.",
            )
        attempt = now.attempt = self.cuts.attempt(now.part)
        try:
            with attempt.running():
                yield
        finally:
            now.attempt = now.part = None
        if attempt.has_failed:
            now.failed, now.had_backward = attempt, True
            for listener in self.listeners:
                listener.spoil()

    def check_finished(self) -> None:
        """Raise InputError if the backward of a micro-batch of the step has not run."""
        self._check_backward()
        if self._drawn < len(self):
            raise InputError(
                f"Optimizer step {self.index} was left after {self._drawn} of {len(self)} micro-batches. Expected "
                "all of them, because the gradient lacks the others. Run the inner loop to its end.",
            )
        if not self._has_ended:
            raise InputError(
                f"The loop over optimizer step {self.index} did not ask for a batch after the last, so the step is not "
                "complete. Expected a loop to the end. Write `for batch in step:`. In zip(), put the step first, or "
                "pass strict=True.",
            )

    def __iter__(self) -> Iterator[Any]:
        if self._drawn:
            raise InputError(
                f"Optimizer step {self.index} was iterated a second time, but its batches are gone. Take the next "
                "step from steps().",
            )
        accumulation = Accumulation()
        for number, size in enumerate(self._counts):
            batch = next(self._batches, _MISSING)
            if batch is _MISSING:
                raise InputError(
                    f"The loader ended after {self._drawn} of the {len(self)} micro-batches of optimizer step "
                    f"{self.index}. Expected as many as in the schedule of its sampler. Pass the loader that has "
                    "this sampler.",
                )
            self._drawn += 1
            accumulation.split = None if self._splits is None else self._splits[number]
            parts = [Part(batch, size)] if self.cuts is None else self.cuts.parts_of(batch, size)
            del batch  # otherwise this frame would keep the batch in memory while the loader makes the next
            while parts:
                part, is_last = parts.pop(0), self._drawn == len(self) and not parts
                opinions = [listener.draw(is_last) for listener in self.listeners]
                meets = next((meets for meets in opinions if meets is not None), is_last)
                part_to_run = None if self.cuts is None else part
                now = self._now = _MicroBatch(self.micro_batch_sizes[number], part.size, part_to_run, meets)
                apart = nullcontext() if size else self._around("uncounted", not now.samples)
                # If micro-batches may be cut or norms are measured, reduce the gradients in every micro-step.
                # Gradients that stay on other devices would be wrong after a cut, and missing in the norms.
                gives_up = self.cuts is not None or any(listener.needs_gradients for listener in self.listeners)
                with accumulation.running(is_last=is_last or gives_up), apart:
                    yield part.batch if self.device is None else to_device(part.batch, self.device)
                now.is_open = False
                if now.failed is not None:
                    parts[:0] = now.failed.halves()
                    now.failed = None
                self._check_backward()
                self._check_parameters()
                del part
        accumulation.finish()
        for listener in self.listeners:
            listener.finish(self.count)
        self._has_ended = True

    def _check_backward(self) -> None:
        if self._now is not None and not self._now.had_backward:
            raise InputError(
                f"{self._place()} had no backward. Expected one for each micro-batch. Loop over each step with "
                "`for batch in step:`, and call step.backward(loss) once in the loop.",
            )

    def _check_parameters(self) -> None:
        change = self._watched.change() if self._watched is not None else ""
        if change:
            self._refuse_change(change)

    def _check_loss(self, loss: object) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
            raise InputError(
                f"step.backward got a loss of {found} for {self._place()}. Expected a tensor of one element. Pass the "
                "mean loss of the micro-batch.",
            )

    def _check_updates(self, loss: torch.Tensor) -> None:
        """Raise InputError if gradients were cleared, or the loss's parameters updated, after an earlier backward."""
        if self._watched is not None and self._watched.is_zeroed():
            self._refuse_change("gradients were set to zero")
        updated = [] if self._updates is None else [*parameters_updated_since(self._updates)]
        if updated and {*map(id, updated)} & {*map(id, graph_leaves(loss))}:
            self._refuse_change("parameters were changed")

    def _refuse_change(self, change: str) -> None:
        raise InputError(
            f"{change} before {self._place()}, so the step's gradient would be incomplete. Call "
            "optimizer.step() and optimizer.zero_grad() once, after all micro-batches.",
        )

    def _place(self) -> str:
        return f"micro-batch {self._drawn} of {len(self)} in optimizer step {self.index}"
