"""Yield a micro-batch that ran out of memory again, as two micro-batches of the same optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.gradient_average import apart, average_gradients, refuse_meeting
from autosplit.errors import InputError
from autosplit.integrations.process_share import Share
from autosplit.integrations.weighted_backward import Weighed
from autosplit.parallel.batch_counts import Count, count_samples, counted
from autosplit.parallel.parts import OnOom, Part
from autosplit.tools.oom_cuts import Attempt, Cuts, cuts_for


class CutBatches:
    """Run the micro-batches of an accelerate loop, and cut the micro-batches that run out of memory.

    Args:
        sums: Whether the loss is a sum, so parts keep the whole weight.
    """

    def __init__(self, cuts: Cuts, *, sums: bool) -> None:
        self._cuts, self._sums = cuts, sums
        self._part: Part | None = None
        self._attempt: Attempt | None = None
        self._wrapped: list[DistributedDataParallel] = []

    @classmethod
    def of_share(cls, share: Share, on_oom: OnOom, owner: object, count: Count | None) -> CutBatches | None:
        """Return an instance for this process, or None if `on_oom` is "raise"."""
        cuts = cuts_for(owner, on_oom, count=count, **share.cut_options)
        return None if cuts is None else cls(cuts, sums=share.plan.loss_reduction == "sum")

    def watch(self, model: nn.Module) -> None:
        """Register a model. Raise InputError if `average_gradients` cannot replace its synchronisation."""
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                refuse_meeting(part)
                self._wrapped.append(part)

    @property
    def has_failed(self) -> bool:
        """Whether the last micro-batch ran out of memory. The loop then yields its halves next."""
        return self._attempt is not None and self._attempt.has_failed

    def walk(self, walked: Iterable[Weighed]) -> Iterator[Weighed]:
        """Yield micro-batches. After a failure, yield the two halves."""
        position = more = 0
        for one in walked:
            if one.position == 0:
                position = more = 0
            size = counted(self._cuts.count or count_samples, one.batch) if one.weight else 0
            parts = self._cuts.parts_of(one.batch, size)
            more += len(parts) - 1
            while parts:
                self._part, self._attempt = parts.pop(0), None
                share = self._part.size / size if size and not self._sums else 1.0
                yield one._replace(
                    batch=self._part.batch, weight=one.weight * share, position=position, length=one.length + more
                )
                attempt: Attempt | None = self._attempt
                if attempt is None:
                    raise InputError(
                        "on_oom is 'cut', and a batch was drawn before the previous batch had run. Draw each batch "
                        "only when it runs. If a batch does not fit, autosplit draws it again in parts. Write "
                        "`with accelerator.accumulate(model):` around each batch.",
                    )
                if attempt.has_failed:
                    parts[:0] = attempt.halves()
                    more += 1
                else:
                    position += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the `with` block run the last yielded micro-batch without synchronising gradients.

        Nested blocks do nothing.
        """
        part, self._part = self._part, None
        if part is None:
            yield
            return
        self._attempt = Attempt(part, self._cuts)
        with self._attempt.running(), ExitStack() as stack:
            for wrapped in self._wrapped:
                stack.enter_context(apart(wrapped))
            yield

    def backward(self, run: Callable[[], object], loss: Tensor, *, ends_step: bool) -> None:
        """Run a micro-batch's backward. After the last of a step, average the processes' gradients."""
        if self._attempt is None or self._attempt.has_backward:
            raise InputError(
                "on_oom is 'cut', and accelerator.backward was called outside of accelerator.accumulate, or twice "
                "in it. Expected one call in each accumulate(), because a micro-batch may run in parts. Add the losses "
                "up before the call.",
            )
        self._attempt.backward(run, loss)
        for wrapped in self._wrapped if ends_step else []:
            average_gradients(wrapped)


def refuse_gathering() -> None:
    """Raise InputError for collectives within an optimizer step. Some processes may run extra micro-batches there."""
    raise InputError(
        "on_oom is 'cut', and the processes gather inside an optimizer step. Each process may run a different number "
        "of parts there. Call accelerator.gather when accelerator.sync_gradients is True, or after the epoch.",
    )
