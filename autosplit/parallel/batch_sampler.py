"""Cut an epoch into micro-batches: the batch sampler of a plan, and what of each step is one rank's."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from autosplit.errors import InputError, shown
from autosplit.solve.split import accumulation_steps, micro_batch_sizes, short_split, whole_number


class LeftOutWarning(UserWarning):
    """A batch sampler was made for fewer samples than the data set has: the last of them are never trained on."""


@dataclass(frozen=True)
class StepSchedule:
    """One optimizer step.

    Attributes:
        micro_batch_sizes: Samples that each of its micro-batches counts for, on this rank.
        num_samples: Samples of the whole step, over all its micro-batches and all ranks.
        splits: Samples per device of each micro-batch, where they are not in the plan's proportions.
    """

    micro_batch_sizes: tuple[int, ...]
    num_samples: int
    splits: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class RankSlice:
    """The part of every micro-batch that one rank takes: the ranks' parts lie side by side, in the order of the ranks.

    Attributes:
        rank: From 0.
        batch_sizes: For every rank, its samples of a full micro-batch, 0 or more. A smaller micro-batch is split in
            the same proportions, as far as no rank gets a single sample that has more of a full one (`short_split`).
    """

    rank: int
    batch_sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks share a micro-batch."""
        return len(self.batch_sizes)

    @property
    def batch_size(self) -> int:
        """Samples of a full micro-batch over all ranks."""
        return sum(self.batch_sizes)

    def size_of(self, num_samples: int) -> int:
        """Return how many samples of a micro-batch are this rank's."""
        return short_split(num_samples, self.batch_sizes)[self.rank]

    def part_of(self, batch: list[int]) -> list[int]:
        """Return this rank's part of a micro-batch.

        A rank without a share gets the first samples, to be counted as nothing: it has to run the forward and the
        backward all the same, because the ranks' gradients meet there. One, or two where its full share is as many:
        on fewer a BatchNorm may not train.
        """
        whole = len(batch) == self.batch_size
        sizes = self.batch_sizes if whole else short_split(len(batch), self.batch_sizes)
        begin = sum(sizes[: self.rank])
        return batch[begin : begin + sizes[self.rank]] or batch[: min(2, self.batch_sizes[self.rank] or 1)]


class ScheduledBatchSampler(Sampler[list[int]]):
    """Hands out an epoch as micro-batches that add up to optimizer steps of exactly `effective_batch_size` samples.

    Every sample comes once an epoch. Each optimizer step is cut into micro-batches of `batch_size`, the last of them
    smaller where it doesn't divide; the last step of the epoch, where samples run short, is cut by the same rule. Give
    it to a ``DataLoader`` as `batch_sampler`.

    Args:
        batch_size: Samples per forward over all devices.
        shuffle: Whether to draw a new order for each epoch, which `steps` counts unless `set_epoch` chooses it;
            otherwise the dataset's own order.
        seed: The order depends on `seed` plus the epoch only. The generator is this sampler's own, so that no global
            random state is read or changed.
        drop_last: Whether to leave out the last step of the epoch where it is short of samples.
        order: Draws the order of an epoch in place of a permutation: every sample once, the same on every rank.
        rank_slice: Which part of every micro-batch to hand out, for a rank of a DDP job; None for all of it. All ranks
            draw the same order and hand out equally many micro-batches; see `RankSlice.part_of` for an empty part.

    Attributes:
        unlike_lengths: Whether as many samples may take another memory in another micro-batch.

    Raises:
        InputError: A number is not whole or below its minimum.
    """

    unlike_lengths = False

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        effective_batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        order: Callable[[int], Sequence[int]] | None = None,
        rank_slice: RankSlice | None = None,
    ) -> None:
        self.num_samples = whole_number("num_samples", num_samples, minimum=1)
        self.batch_size = whole_number("batch_size", batch_size, minimum=1)
        self.effective_batch_size = whole_number("effective_batch_size", effective_batch_size, minimum=1)
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed)
        self.drop_last = drop_last
        self._draw = order
        self.rank_slice = RankSlice(0, (self.batch_size,)) if rank_slice is None else rank_slice
        self.epoch = 0
        self._is_chosen = False
        self._consumed = 0
        self._awaited: tuple[int, Callable[[], bool]] | None = None
        self._detects_updates = True
        self._start_step = 0

    @property
    def schedule(self) -> tuple[StepSchedule, ...]:
        """The optimizer steps of the whole epoch, in order."""
        return self._schedule_of_epoch(self.epoch)

    def _schedule_of_epoch(self, epoch: int) -> tuple[StepSchedule, ...]:  # noqa: ARG002  # all are alike
        full_steps, short = divmod(self.num_samples, self.effective_batch_size)
        full = self._step_of(self.effective_batch_size)
        last = (self._step_of(short),) if short and not self.drop_last else ()
        return (full,) * full_steps + last

    @property
    def samples_consumed(self) -> int:
        """Samples of this epoch, over all ranks, in optimizer steps that have updated the parameters.

        Samples that loader workers have drawn ahead do not count. Between its last backward and `optimizer.step()`, an
        optimizer step does not count either. In a loop whose updates can't be detected, it counts at once.
        """
        counts = self._awaited is not None and (not self._detects_updates or self._awaited[1]())
        return self._consumed + (self._awaited[0] if self._awaited is not None and counts else 0)

    @samples_consumed.setter
    def samples_consumed(self, samples: int) -> None:
        self._consumed, self._awaited = samples, None

    @property
    def start_step(self) -> int:
        """The optimizer step at which the next iteration begins: 0, except once after `resume`."""
        return self._start_step

    def refuse_single_samples(self, split: Sequence[int], least: int) -> None:
        """Refuse an epoch in which a device would train on too few samples, before it begins.

        Args:
            split: Samples per device, or rank, in a full forward.
            least: The fewest that the model trains on: 2 where a BatchNorm sees one value per sample.
        """
        for step in (*self.schedule[:1], *self.schedule[-1:]):
            last = micro_batch_sizes(step.num_samples, self.batch_size)[-1]
            shares = short_split(last, split)
            if any(0 < share < least for share in shares):
                raise InputError(
                    f"the last forward of an optimizer step of {step.num_samples} samples has {last}, split {shares}; "
                    f"expected none or {least} and more on each device, since the plan's BatchNorms train on no fewer; "
                    "pass drop_last=True, or take another number of samples",
                    code="batchnorm-last-forward",
                )

    def check_sizes(self, batch_size: int, effective_batch_size: int) -> None:
        """Raise InputError if the sampler was made for other sizes; `steps` calls it."""
        for name, wanted, has in (
            ("batch_size", batch_size, self.batch_size),
            ("effective_batch_size", effective_batch_size, self.effective_batch_size),
        ):
            if wanted != has:
                raise InputError(
                    f"{name} is {wanted}, but the loader's batch sampler was made for {has}; expected the same; make "
                    "both from one plan",
                    code="sampler-sizes",
                )

    def check_dataset(self, dataset: Any) -> None:
        """Compare the samples that are handed out with those that there are; `steps` does it.

        Raises:
            InputError: The data set has fewer.

        Warns:
            LeftOutWarning: It has more: the others never come.
        """
        if not hasattr(dataset, "__len__") or len(dataset) == self.num_samples:
            return
        said = (
            f"the batch sampler was made for {self.num_samples} samples, and the data set has {len(dataset)}; expected "
            "as many; pass batch_sampler(len(dataset))"
        )
        if len(dataset) < self.num_samples:
            raise InputError(said, code="dataset-size")
        said += f", or a Subset where the other {len(dataset) - self.num_samples} are not to be trained on"
        warnings.warn(said, LeftOutWarning, stacklevel=4)  # at whoever called plan.steps or ctx.steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more, and with it the order that the next iteration draws, if it shuffles.

        Raises:
            InputError: `epoch` is negative or not a whole number.
        """
        self._go_to(whole_number("epoch", epoch))
        self._is_chosen = True

    def _go_to(self, epoch: int) -> None:
        before, self.epoch = self.epoch, epoch
        if epoch != before:
            self.samples_consumed = self._start_step = 0

    def resume(self, samples_consumed: int) -> None:
        """Let the next iteration, and only that one, begin where an interrupted epoch left off.

        Count what the optimizer has consumed; loader workers draw ahead, so what was drawn is more.

        Args:
            samples_consumed: Samples of this epoch that finished optimizer steps have consumed.

        Raises:
            InputError: It is negative, more than the epoch has, or within an optimizer step.
        """
        self._start_step = self._step_after(samples_consumed, self.epoch)
        self.samples_consumed = samples_consumed

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, for a checkpoint: after an optimizer step that `steps` walked, the end of it."""
        return {**self._order_facts(), "epoch": self.epoch, "samples_consumed": self.samples_consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where another sampler was, in its epoch.

        Batch sizes and ranks may be others than they were, if the samples consumed end an optimizer step here, too.

        Raises:
            InputError: The state is of another order of samples, or ends within an optimizer step.
        """
        self.check_state_dict(state)
        self._go_to(state["epoch"])
        self.resume(state["samples_consumed"])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make sure that a state can be loaded, and load nothing."""
        facts = self._order_facts()
        known = state if isinstance(state, Mapping) else {}
        lacks = [name for name in (*facts, "epoch", "samples_consumed") if name not in known]
        if lacks:
            raise InputError(
                f"the sampler's state has no {', '.join(lacks)}; expected what state_dict() returned; pass that",
                code="sampler-state-lacks",
            )
        wrong = [f"{name} {shown(state[name])} for {facts[name]}" for name in facts if state[name] != facts[name]]
        wrong += ["batches of like length"] if "batches" in state and "batches" not in facts else []
        if wrong:
            raise InputError(
                f"the sampler's state is of another order of samples: {', '.join(wrong)}; expected the same; make "
                "the sampler as it was, or begin the epoch anew",
                code="sampler-state-differs",
            )
        self._step_after(state["samples_consumed"], whole_number("epoch", state["epoch"]))

    def begin_epoch(self) -> None:
        """Go on to the next epoch where this one is consumed, and none was chosen since; `steps` does it."""
        if not self._is_chosen and 0 < sum(step.num_samples for step in self.schedule) <= self.samples_consumed:
            self._go_to(self.epoch + 1)
        self._is_chosen = False
        self._detects_updates = True

    def consume(self, num_samples: int, has_updated: Callable[[], bool]) -> None:
        """Count the samples of an optimizer step; `steps` calls it after the last backward.

        Args:
            has_updated: Returns whether the update of that step has come. Before that, the samples do not count: a
                checkpoint with the weights of before the update must resume with this step.
        """
        self.settle()
        self._awaited = num_samples, has_updated

    def settle(self) -> None:
        """Count the last optimizer step, whether its update was seen or not; `steps` calls it before the next step."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._consumed += awaited[0]
            self._detects_updates = awaited[1]()

    def _step_after(self, samples_consumed: int, epoch: int) -> int:
        """Return the optimizer step that begins where so many samples of an epoch have been consumed."""
        consumed = whole_number("samples_consumed", samples_consumed)
        ends = [0, *itertools.accumulate(step.num_samples for step in self._schedule_of_epoch(epoch))]
        if consumed > ends[-1]:
            raise InputError(
                f"samples_consumed is {consumed}, but an epoch has {ends[-1]}; expected samples of the current epoch; "
                "subtract the finished epochs and pass their number to set_epoch",
                code="samples-consumed-range",
            )
        finished = bisect.bisect_right(ends, consumed) - 1
        if ends[finished] != consumed:
            raise InputError(
                f"samples_consumed is {consumed}; expected the end of an optimizer step; resume from the last finished "
                f"step, {ends[finished]}",
                code="samples-consumed-inside-step",
            )
        return finished

    def common_facts(self) -> dict[str, Any]:
        """Return the facts about the coming epoch that must be equal on all ranks of a job."""
        return {
            **self._order_facts(),
            "drop_last": self.drop_last,
            "epoch": self.epoch,
            "samples_consumed": self.samples_consumed,
            "start_step": self._start_step,
            "epoch is set": self._is_chosen,
        }

    def _order_facts(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def __len__(self) -> int:
        """Count the micro-batches of a whole epoch."""
        full_steps, short = divmod(self.num_samples, self.effective_batch_size)
        last = accumulation_steps(short, self.batch_size) if short and not self.drop_last else 0
        return full_steps * accumulation_steps(self.effective_batch_size, self.batch_size) + last

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because a DataLoader with workers asks for two iterators and draws from the second only:
        # the resumed position is spent at the first draw.
        start_step, self._start_step = self._start_step, 0
        order = self._order(self.epoch)
        for number, step in enumerate(self.schedule[start_step:], start_step):
            first = number * self.effective_batch_size
            part = order[first : first + step.num_samples]
            indices = part.tolist() if isinstance(part, torch.Tensor) else [*part]
            sizes = micro_batch_sizes(step.num_samples, self.batch_size)
            for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
                yield self.rank_slice.part_of(indices[end - size : end])

    def _order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        if not self.shuffle:
            return range(self.num_samples)
        if self._draw is not None:
            return self._draw(epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def _step_of(self, num_samples: int) -> StepSchedule:
        sizes = micro_batch_sizes(num_samples, self.batch_size)
        return StepSchedule(tuple(map(self.rank_slice.size_of, sizes)), num_samples)
