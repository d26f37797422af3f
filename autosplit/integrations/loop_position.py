"""Infer the current micro-batch of an accelerate loop from its calls, and check how the loop accumulates.

    accelerator.accumulate    each entry is the next micro-batch
    a step at every batch     each backward is the next micro-batch; the optimizer steps at the end of the plan's step
    a step at every k-th      the same, if accelerate divides the loss and k is the plan's; otherwise an InputError

Each backward must use the weight of its micro-batch. A loop may draw one micro-batch before each backward, or all of an
optimizer step before its first backward. Any other pattern raises InputError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autosplit.errors import InputError
from autosplit.integrations.weighted_backward import Weighed

_CURE = (
    "write `with accelerator.accumulate(model):` around each micro-batch, with optimizer.step() in it every time, "
    "and do not divide the loss, because accelerator.backward weights it"
)


class LoopPosition:
    """Follow the position of a loop in the optimizer steps of a `SharesLoader`.

    Args:
        divides: Whether the script gave accelerate its number of accumulation steps. accelerate then divides the loss,
            so a loop that accumulates by hand does not divide it again.
        drop_gradients: Clears the gradients of an optimizer step that the loop did not finish.
    """

    def __init__(self, *, divides: bool, drop_gradients: Callable[[], None]) -> None:
        self._divides = divides
        self._drop_gradients = drop_gradients
        self._drawn: deque[Weighed] = deque()
        self._at: Weighed | None = None
        self._iterations = 0  # number of loader iterations that have begun
        self._iteration = 0  # the iteration that yields the micro-batches of this optimizer step
        self._is_over = False  # whether the loader has ended
        self._is_ahead = False  # a whole optimizer step was drawn before its first backward
        self._is_within = False  # the loop is inside accumulate()
        self._was_entered = False  # accumulate() began this micro-batch
        self._has_run = False  # the backward of this micro-batch has run
        self._has_stepped = False  # optimizer.step() was called after that backward
        self._steps_seldom = False  # an earlier micro-batch of this optimizer step had no optimizer.step()
        self._steps_always = False  # an earlier micro-batch of this optimizer step had an optimizer.step()
        self._cleared_early: Weighed | None = None  # the last micro-batch whose gradients were cleared too early

    @property
    def at(self) -> Weighed | None:
        """The micro-batch that is running or ran last. None outside of a `SharesLoader`."""
        return None if self._is_over else self._at

    @property
    def newest(self) -> Weighed | None:
        """The micro-batch of the script's newest outputs, even if its backward has not run."""
        return self._drawn[-1] if self._drawn and not self._is_ahead else self.at

    @property
    def is_in_mid_step(self) -> bool:
        """Whether the gradients contain only a part of an optimizer step."""
        return self.at is not None and not self.at.ends_step

    @property
    def has_begun(self) -> bool:
        """Whether a `SharesLoader` was ever iterated."""
        return self._iterations > 0

    def clear_early(self) -> None:
        """Record that `zero_grad` of an optimizer was called after a backward, but before its step.

        A further backward of the micro-batch then has no gradients of earlier micro-batches.
        """
        at = self.at
        if at is not None and at.length > 1 and self._has_run and (self._is_within or at.ends_step):
            self._cleared_early = at

    def refuse_early_clear(self, one: Weighed) -> None:
        """Raise InputError if gradients were cleared between two backwards of a micro-batch."""
        if self._cleared_early is one:
            raise InputError(
                "optimizer.zero_grad() was called between two backwards of a micro-batch, which would discard earlier "
                "micro-batches of the plan's step. Call it after optimizer.step(). In a GAN, freeze the discriminator "
                "in the generator's backward: discriminator.requires_grad_(False).",
            )

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad` must keep the gradients, because they belong to the running optimizer step."""
        return self._is_within and self.at is not None and self.at.position > 0 and not self._has_run

    @property
    def begins_step(self) -> bool:
        """Whether the gradients belong to the previous optimizer step, because no backward of this step has run."""
        return self._is_within and self.at is not None and self.at.position == 0 and not self._has_run

    def begin(self) -> int:
        """Begin an iteration of a loader. Clear the gradients of an unfinished optimizer step.

        Raises:
            InputError: The micro-batches of the last step have run, but `optimizer.step()` was not called.
        """
        try:
            self._check_before()
        finally:
            if self._at is not None and not (self._at.ends_step and self._has_stepped):
                self._drop_gradients()
            self._drawn.clear()
            self._at, self._is_over, self._is_ahead = None, False, False
        self._iterations += 1
        return self._iterations

    def draw(self, one: Weighed, iteration: int) -> None:
        """Record that a loader yields a micro-batch.

        Raises:
            InputError: Another loader's optimizer step is unfinished, or batches drawn ahead have not run yet.
        """
        if one.position == 0:
            self._iteration = iteration
        elif iteration != self._iteration:
            raise InputError(
                f"Batch {one.position + 1} of an optimizer step was drawn after a batch of another loader. "
                f"Expected all {one.length} batches of a step in a row. Finish the step of one loader before you "
                "draw from another.",
            )
        if self._is_ahead and self._drawn:
            raise InputError(
                f"A batch was drawn while {len(self._drawn)} of the optimizer step's {self._drawn[0].length} "
                "batches had not run. Draw all accelerator.gradient_accumulation_steps batches of a step before "
                "its first backward, or one before each backward. Skip no batch (to resume: "
                "accelerator.skip_first_batches).",
            )
        self._is_ahead = False
        self._drawn.append(one)

    def end(self) -> None:
        """End the loader's iteration."""
        self._is_over = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark the block as inside accumulate(). Begin the next micro-batch, unless the block is nested."""
        outer, self._is_within = self._is_within, True
        try:
            if self._drawn and not outer:
                self._advance(entered=True)
            yield
        finally:
            self._is_within = outer

    def run(self) -> Weighed | None:
        """Record a backward and return its micro-batch. Return None outside of a `SharesLoader`."""
        if not self._is_within:
            if self._drawn:
                self._advance(entered=False)
            elif self._is_ahead and self._has_run:
                raise InputError(
                    "There were more backwards than batches drawn for this optimizer step. Expected one backward "
                    "per batch. Add up the losses of a batch before accelerator.backward.",
                )
        self._has_run = True
        return self.at

    def step(self, *, runs: bool = False) -> None:
        """Record a call of `optimizer.step()`, which has no effect within an optimizer step of the plan.

        Args:
            runs: Whether the optimizer got a closure, so it runs the backward itself.

        Raises:
            InputError: The gradients are not weighted, or contain only a part of the plan's step.
        """
        if self._at is None and not self._drawn:
            return
        behind = not self._is_within and bool(self._drawn) and not self._is_ahead
        if not runs and (behind or not self._has_run):
            raise InputError(
                "optimizer.step() was called after a batch without accelerator.backward, which weights the loss by "
                "the plan's split. Write accelerator.backward(loss) instead of loss.backward().",
            )
        assert self._at is not None, "`run` sets it"
        if self._steps_seldom and not self._was_entered and not self._at.ends_step:
            raise InputError(
                f"optimizer.step() was called after {self._at.position + 1} micro-batches, but the plan's step has "
                f"{self._at.length}. Call it after the last one: count to accelerator.gradient_accumulation_steps, "
                f"or {_CURE}.",
            )
        self._has_stepped = True

    def _advance(self, *, entered: bool) -> None:
        one = self._drawn[0]
        if not self._is_ahead and len(self._drawn) > 1:
            self._is_ahead = one.position == 0 and len(self._drawn) == one.length
            if not self._is_ahead:
                raise InputError(
                    f"{len(self._drawn)} batches were drawn, and the first has not run. Draw one batch before each "
                    f"backward, or all {one.length} of an optimizer step before the first backward. Draw from one "
                    "loader, and skip no batch (to resume: accelerator.skip_first_batches).",
                )
        self._check_before()
        if one.position == 0:
            self._steps_seldom = self._steps_always = False
        self._at = self._drawn.popleft()
        self._was_entered, self._has_run, self._has_stepped, self._is_over = entered, False, False, False

    def _check_before(self) -> None:
        """Raise InputError if the optimizer did not step at the end of a plan's step, or on manual accumulation."""
        if self._at is None or self._was_entered or not self._has_run:
            return
        if self._at.ends_step:
            if not self._has_stepped:
                raise InputError(
                    f"The plan's step of {self._at.length} micro-batches ended without optimizer.step(). Call it "
                    f"after the last one: count to accelerator.gradient_accumulation_steps, or {_CURE}.",
                )
            return
        self._steps_always |= self._has_stepped
        self._steps_seldom |= not self._has_stepped
        if self._steps_seldom and (self._steps_always or not self._divides):
            raise InputError(
                "The loop accumulates gradients itself: it ran a backward without optimizer.step(), outside of "
                "accelerator.accumulate. If the loop divides the loss, the loss would be divided twice. Use "
                f"accumulate(): {_CURE}. If the loop does not divide the loss, pass gradient_accumulation_steps= "
                "to the Accelerator.",
            )
