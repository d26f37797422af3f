"""The micro-batch that an accelerate loop is at, and whether it accumulates right, told by what it calls and when.

    accelerator.accumulate    each entry is the next micro-batch
    a step at every batch     each backward is the next micro-batch; the optimizer steps at the end of the plan's step
    a step at every k-th      the same, where accelerate divides the loss and k is the plan's; refused elsewhere

A weight belongs to a micro-batch: the first backward after two were drawn is not that of the one drawn last. One
micro-batch is drawn before its backward, or all of an optimizer step before the first; whoever draws otherwise may skip
some as well as look ahead, and is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autosplit.errors import InputError
from autosplit.integrations.weighted_backward import Weighed

_CURE = (
    "write `with accelerator.accumulate(model):` around each micro-batch, with optimizer.step() in it every time, and "
    "divide no loss: accelerator.backward weights it"
)


class LoopPosition:
    """The place of a loop in the optimizer steps of a loader of shares.

    Args:
        divides: The script has given accelerate its number of accumulation steps, by which accelerate divides the loss;
            a loop that accumulates by hand does not divide it again.
        drop_gradients: Drops those of an optimizer step that the loop has left in its middle.
    """

    def __init__(self, *, divides: bool, drop_gradients: Callable[[], None]) -> None:
        self._divides = divides
        self._drop_gradients = drop_gradients
        self._drawn: deque[Weighed] = deque()
        self._at: Weighed | None = None
        self._iterations = 0  # of loaders, begun so far
        self._iteration = 0  # the one that this optimizer step is drawn from
        self._is_over = False  # the loader has ended
        self._is_ahead = False  # a whole optimizer step was drawn before its first backward
        self._is_within = False  # accumulate() is open
        self._was_entered = False  # accumulate() began this micro-batch
        self._has_run = False  # this micro-batch had a backward
        self._has_stepped = False  # optimizer.step() was called after it
        self._steps_seldom = False  # of this optimizer step, a micro-batch before had no optimizer.step()
        self._steps_always = False  # ... and a micro-batch before had one

    @property
    def at(self) -> Weighed | None:
        """The micro-batch that runs or ran last; None outside of a loader of shares."""
        return None if self._is_over else self._at

    @property
    def newest(self) -> Weighed | None:
        """The micro-batch that the script's outputs are of, be it before its backward or without any."""
        return self._drawn[-1] if self._drawn and not self._is_ahead else self.at

    @property
    def is_in_mid_step(self) -> bool:
        """Whether gradients are those of a part of an optimizer step."""
        return self.at is not None and not self.at.ends_step

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients are those of micro-batches before, in an optimizer step that ends with this one."""
        return self._is_within and self.at is not None and self.at.position > 0 and not self._has_run

    @property
    def begins_step(self) -> bool:
        """Whether the gradients are those of an optimizer step that is over, before the first backward of the next."""
        return self._is_within and self.at is not None and self.at.position == 0 and not self._has_run

    def begin(self) -> int:
        """Begin a loader's iteration, and drop what is left of another; refuse it where a whole step was not taken."""
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
        """Note that a micro-batch is handed out; refuse one out of turn, or amid another loader's optimizer step."""
        if one.position == 0:
            self._iteration = iteration
        elif iteration != self._iteration:
            raise InputError(
                f"batch {one.position + 1} of an optimizer step was drawn after one of another loader; expected the "
                f"{one.length} of a step after each other; finish a loader's step before another is drawn from",
                code="loaders-interleaved",
            )
        if self._is_ahead and self._drawn:
            raise InputError(
                f"a batch was drawn while {len(self._drawn)} of the optimizer step's {self._drawn[0].length} are yet "
                "to run; expected all of a step before its first backward, or one before each; draw "
                "accelerator.gradient_accumulation_steps of them at once, and skip none (to resume: "
                "accelerator.skip_first_batches)",
                code="batches-drawn-early",
            )
        self._is_ahead = False
        self._drawn.append(one)

    def end(self) -> None:
        """End the loader's iteration."""
        self._is_over = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Be within accumulate(): its entry is the next micro-batch; one within another is the same."""
        outer, self._is_within = self._is_within, True
        try:
            if self._drawn and not outer:
                self._advance(entered=True)
            yield
        finally:
            self._is_within = outer

    def run(self) -> Weighed | None:
        """Note a backward, and return the micro-batch that it is of; None outside of a loader of shares."""
        if not self._is_within:
            if self._drawn:
                self._advance(entered=False)
            elif self._is_ahead and self._has_run:
                raise InputError(
                    "there were more backwards than batches drawn for this optimizer step; expected one for each; add "
                    "up the losses of a batch before accelerator.backward",
                    code="too-many-backwards",
                )
        self._has_run = True
        return self.at

    def step(self, *, runs: bool = False) -> None:
        """Note that the optimizer is asked to step, which in mid-step it will not.

        Refuse a step with gradients that are not weighted, or of a part of the plan's step. An optimizer that `runs`
        the backward itself steps before it has run.
        """
        if self._at is None and not self._drawn:
            return
        behind = not self._is_within and bool(self._drawn) and not self._is_ahead
        if not runs and (behind or not self._has_run):
            raise InputError(
                "optimizer.step() was called after a batch that accelerator.backward has not run; expected it, because "
                "it weights the loss by the plan's shares; write accelerator.backward(loss) for loss.backward()",
                code="step-before-backward",
            )
        assert self._at is not None, "it has run"
        if self._steps_seldom and not self._was_entered and not self._at.ends_step:
            raise InputError(
                f"optimizer.step() was called after {self._at.position + 1} micro-batches, and the plan's step has "
                f"{self._at.length}; expected it after the last; count by accelerator.gradient_accumulation_steps, or "
                f"{_CURE}",
                code="step-too-early",
            )
        self._has_stepped = True

    def _advance(self, *, entered: bool) -> None:
        one = self._drawn[0]
        if not self._is_ahead and len(self._drawn) > 1:
            self._is_ahead = one.position == 0 and len(self._drawn) == one.length
            if not self._is_ahead:
                raise InputError(
                    f"{len(self._drawn)} batches were drawn, and the first of them is yet to run; expected one drawn "
                    f"before each backward, or the {one.length} of an optimizer step before the first; draw from one "
                    "loader, and skip none (to resume: accelerator.skip_first_batches)",
                    code="batches-drawn-ahead",
                )
        self._check_before()
        if one.position == 0:
            self._steps_seldom = self._steps_always = False
        self._at = self._drawn.popleft()
        self._was_entered, self._has_run, self._has_stepped, self._is_over = entered, False, False, False

    def _check_before(self) -> None:
        """Look at the micro-batch that is left: did the optimizer step where the plan's step ended?"""
        if self._at is None or self._was_entered or not self._has_run:
            return
        if self._at.ends_step:
            if not self._has_stepped:
                raise InputError(
                    f"the plan's step of {self._at.length} micro-batches has ended without optimizer.step(); expected "
                    f"it after the last of them; count by accelerator.gradient_accumulation_steps, or {_CURE}",
                    code="step-missing",
                )
            return
        self._steps_always |= self._has_stepped
        self._steps_seldom |= not self._has_stepped
        if self._steps_seldom and (self._steps_always or not self._divides):
            raise InputError(
                "the loop accumulates by hand: there was a backward without optimizer.step(), outside of "
                "accelerator.accumulate, and a loss that it divides would be divided twice; expected accumulate(); "
                f"{_CURE}; or, of a loop that divides none, pass gradient_accumulation_steps= to the Accelerator",
                code="accumulated-by-hand",
            )
