"""Cut an epoch into micro-batches, and each micro-batch into a part per rank."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from autosplit.errors import InputError, shown, warn_user
from autosplit.parallel.awaited_update import LoopWithoutSteps
from autosplit.parallel.hidden_sampler import Draws, begin_draws
from autosplit.solve.split import accumulation_steps, micro_batch_sizes, short_split, whole_number

MOST_EPOCHS = 2**32
"""Largest epoch."""

_TYPES = {int: "a whole number", bool: "True or False", str: "a string"}


class LeftOutWarning(UserWarning):
    """A batch sampler has fewer samples than the data set, so the last samples are never trained on."""


def _no_more_than(name: str, number: int, most: int) -> int:
    if number > most:
        raise InputError(f"{name} is {shown(number)}. Expected a whole number of at most {most}.")
    return number


@dataclass(frozen=True)
class StepSchedule:
    """Describe one optimizer step.

    Attributes:
        micro_batch_sizes: Samples of each micro-batch on this rank.
        num_samples: Samples of the whole step, over all ranks.
        splits: Samples per device of each micro-batch. None if the plan's proportions apply.
    """

    micro_batch_sizes: tuple[int, ...]
    num_samples: int
    splits: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class RankSlice:
    """Select one rank's part of every micro-batch.

    Attributes:
        batch_sizes: Each rank's samples of a full micro-batch, 0 or more. `short_split` splits smaller micro-batches in
            nearly the same proportions, and avoids single samples on ranks that have more in a full micro-batch.
    """

    rank: int
    batch_sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks that train on each micro-batch."""
        return len(self.batch_sizes)

    @property
    def batch_size(self) -> int:
        """Samples of a full micro-batch over all ranks."""
        return sum(self.batch_sizes)

    def size_of(self, num_samples: int) -> int:
        """Return this rank's number of samples in a micro-batch of `num_samples`."""
        return short_split(num_samples, self.batch_sizes)[self.rank]

    def part_of(self, batch: list[int]) -> list[int]:
        """Return this rank's part of a micro-batch.

        If the part is empty, return the first one or two samples of the micro-batch, which get the weight 0. The rank
        must still run the backward, because DDP synchronises the gradients there. Two samples are returned if the rank
        has two or more in a full micro-batch, because BatchNorms can't train on one.
        """
        whole = len(batch) == self.batch_size
        sizes = self.batch_sizes if whole else short_split(len(batch), self.batch_sizes)
        begin = sum(sizes[: self.rank])
        return batch[begin : begin + sizes[self.rank]] or batch[: min(2, self.batch_sizes[self.rank] or 1)]


class ScheduledBatchSampler(Sampler[list[int]]):
    """Yield micro-batches that add up to optimizer steps of exactly `effective_batch_size` samples.

    Every sample is yielded once per epoch. The last micro-batch of a step, and the last step of the epoch, may be
    smaller. Pass the sampler to a ``DataLoader`` as `batch_sampler`.

    Args:
        batch_size: Samples per micro-batch over all devices.
        shuffle: Whether to draw a new order for each epoch. `steps` counts the epochs, unless `set_epoch` chooses one.
        seed: The order depends only on `seed` plus the epoch. The global random state is neither read nor changed.
        drop_last: Whether to drop the last step of the epoch if it has fewer samples.
        order: Returns the order of an epoch, instead of a random permutation. It must contain every sample once and be
            the same on every rank.
        rank_slice: The part of every micro-batch to yield, for a rank of a DDP job. None for the whole micro-batch.

    Attributes:
        unlike_lengths: Whether micro-batches with the same number of samples may need different amounts of memory.
        keeps_effective: Whether all steps have `effective_batch_size` samples, except the last of an epoch.
        has_weights: Whether the loop outside of `steps` weights the losses, as the loops of other tools do.

    Raises:
        InputError: A number is not whole or below its minimum.
    """

    unlike_lengths = False
    keeps_effective = True
    has_weights = False

    def __init__(
        self,
        num_samples: int | Sized,
        batch_size: int,
        effective_batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        order: Callable[[int], Sequence[int]] | None = None,
        rank_slice: RankSlice | None = None,
    ) -> None:
        given: Any = num_samples
        # A 0-dimensional tensor is a number, although it has __len__.
        is_dataset = isinstance(given, Sized) and not isinstance(given, str) and getattr(given, "ndim", 1) > 0
        length = len(given) if is_dataset else given
        self.num_samples = whole_number("num_samples", length, minimum=1)
        self.batch_size = whole_number("batch_size", batch_size, minimum=1)
        self.effective_batch_size = whole_number("effective_batch_size", effective_batch_size, minimum=1)
        self.shuffle = bool(shuffle)
        self.seed = _no_more_than("seed", whole_number("seed", seed), 2**64 - 1)
        self.drop_last = drop_last
        if drop_last and self.num_samples < self.effective_batch_size:
            raise InputError(
                f"drop_last=True leaves no step: the dataset has {self.num_samples} samples, and a step has "
                f"{self.effective_batch_size}. Expected at least one step. Tune for a smaller effective_batch_size, or "
                "leave drop_last out.",
            )
        self._draw = order
        self.rank_slice = RankSlice(0, (self.batch_size,)) if rank_slice is None else rank_slice
        self.epoch = 0
        self._is_chosen = False
        self._consumed = 0
        self._awaited: tuple[int, Callable[[], bool]] | None = None
        self._detects_updates = True
        self._start_step = 0
        self._is_resumed = False
        self._is_in_steps = False

    @property
    def schedule(self) -> tuple[StepSchedule, ...]:
        """The optimizer steps of the whole epoch, in order."""
        return self._schedule_of_epoch(self.epoch)

    def _schedule_of_epoch(self, epoch: int) -> tuple[StepSchedule, ...]:  # noqa: ARG002  # all epochs are equal
        full_steps, short = divmod(self.num_samples, self.effective_batch_size)
        full = self._step_of(self.effective_batch_size)
        last = (self._step_of(short),) if short and not self.drop_last else ()
        return (full,) * full_steps + last

    @property
    def samples_consumed(self) -> int:
        """Samples of this epoch, over all ranks, in optimizer steps that have updated the parameters.

        An optimizer step counts when `optimizer.step()` has run. If a loop's updates cannot be detected, the step
        counts right after its last backward.
        """
        counts = self._awaited is not None and (not self._detects_updates or self._awaited[1]())
        return self._consumed + (self._awaited[0] if self._awaited is not None and counts else 0)

    @samples_consumed.setter
    def samples_consumed(self, samples: int) -> None:
        self._consumed, self._awaited = samples, None

    @property
    def start_step(self) -> int:
        """The optimizer step at which the next iteration begins: 0, or the step after a resumed position."""
        return self._start_step

    def refuse_single_samples(self, split: Sequence[int], least: int) -> None:
        """Raise InputError if a device would train on too few samples in any forward of the epoch.

        Args:
            least: Smallest number of samples on which the model can train: 2 if a BatchNorm gets one value per sample.
        """
        for step in (*self.schedule[:1], *self.schedule[-1:]):
            last = micro_batch_sizes(step.num_samples, self.batch_size)[-1]
            shares = short_split(last, split)
            if any(0 < share < least for share in shares):
                raise InputError(
                    f"The last forward of an optimizer step of {step.num_samples} samples has {last}, split "
                    f"{shares}. Expected 0 or at least {least} on each device, because the plan's BatchNorms need "
                    "that many. Pass drop_last=True, or use a different number of samples.",
                )

    def check_sizes(self, batch_size: int, effective_batch_size: int) -> None:
        """Raise InputError if the sampler has other sizes."""
        for name, wanted, has in (
            ("batch_size", batch_size, self.batch_size),
            ("effective_batch_size", effective_batch_size, self.effective_batch_size),
        ):
            if wanted != has:
                raise InputError(
                    f"{name} is {wanted}, but the loader's batch sampler was made for {has}. Expected the same. "
                    "Make both from one plan.",
                )

    def check_dataset(self, dataset: Any) -> None:
        """Compare the number of samples of this sampler with that of the data set.

        Raises:
            InputError: The data set has fewer samples.

        Warns:
            LeftOutWarning: The data set has more samples.
        """
        if not hasattr(dataset, "__len__") or len(dataset) == self.num_samples:
            return
        text = (
            f"The batch sampler was made for {self.num_samples} samples, but the data set has {len(dataset)}. Pass "
            "batch_sampler(len(dataset))"
        )
        if len(dataset) < self.num_samples:
            raise InputError(text)
        text += f", or a Subset if the other {len(dataset) - self.num_samples} are not for training"
        warn_user(text, LeftOutWarning)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more. It determines the order of the next iteration.

        Raises:
            InputError: `epoch` is negative or not a whole number.
        """
        self._go_to(_no_more_than("epoch", whole_number("epoch", epoch), MOST_EPOCHS))
        self._is_chosen = True

    def _go_to(self, epoch: int) -> None:
        before, self.epoch = self.epoch, epoch
        if epoch != before:
            self.samples_consumed = self._start_step = 0
            self._is_resumed = False

    def resume(self, samples_consumed: int) -> None:
        """Start the next iteration in the middle of an interrupted epoch.

        Args:
            samples_consumed: Samples of this epoch in finished optimizer steps. Leave out samples that were only drawn.

        Raises:
            InputError: `samples_consumed` is negative, more than the epoch has, or inside an optimizer step.
        """
        samples = whole_number("samples_consumed", samples_consumed)
        self._start_step = self._step_after(samples, self.epoch)
        self.samples_consumed = samples
        self._is_resumed = True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the end of its last finished optimizer step, for a checkpoint."""
        return {**self._order_facts(), "epoch": self.epoch, "samples_consumed": self.samples_consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at the epoch and position of another sampler's state.

        Batch sizes and ranks may have changed, if the consumed samples still end at an optimizer step.

        Raises:
            InputError: The state belongs to a different order of samples, or ends inside an optimizer step.
        """
        self.check_state_dict(state)
        self._go_to(state["epoch"])
        self.resume(state["samples_consumed"])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise InputError if `load_state_dict` would reject a state."""
        facts = self._order_facts()
        known = state if isinstance(state, Mapping) else {}
        lacks = [name for name in (*facts, "epoch", "samples_consumed") if name not in known]
        if lacks:
            raise InputError(
                f"The sampler's state has no {', '.join(lacks)}. Pass the dict that state_dict() returned.",
            )
        for name, own in (*facts.items(), ("epoch", 0), ("samples_consumed", 0)):
            if type(state[name]) is not type(own):  # comparing a tensor would raise, and True equals 1
                raise InputError(
                    f"The sampler's state has {name} {shown(state[name])}. Expected {_TYPES[type(own)]}. Pass the dict "
                    "that state_dict() returned.",
                )
        wrong = [
            f"{name} {shown(state[name])} instead of {facts[name]}" for name in facts if state[name] != facts[name]
        ]
        wrong += ["batches of similar length"] if "batches" in state and "batches" not in facts else []
        if wrong:
            raise InputError(
                f"The sampler's state belongs to a different order of samples: {', '.join(wrong)}. Create the sampler "
                "with the arguments that it had, or begin a new epoch.",
            )
        epoch = _no_more_than("epoch", whole_number("epoch", state["epoch"]), MOST_EPOCHS)
        self._step_after(state["samples_consumed"], epoch)

    def begin_epoch(self) -> None:
        """Advance to the next epoch if this one has finished steps, and `set_epoch` was not called.

        An epoch that a loop left early is over, as with a DataLoader. Its unfinished samples come in another order in
        the next epoch. A resumed epoch goes on until its first step has finished, also if a batch was drawn before.
        """
        self._go_to(self._next_epoch())
        self._start_step = self._resumed_step(self.epoch)
        self._is_chosen = False
        self._detects_updates = self._is_in_steps = True

    def _next_epoch(self) -> int:
        is_whole = 0 < sum(step.num_samples for step in self.schedule) <= self.samples_consumed
        is_over = is_whole or (self.samples_consumed > 0 and not self._is_resumed)
        return self.epoch + (is_over and not self._is_chosen)

    def _resumed_step(self, epoch: int) -> int:
        is_ahead = self._is_resumed and epoch == self.epoch
        return self._step_after(self.samples_consumed, epoch) if is_ahead else 0

    def steps_ahead(self) -> int:
        """Return the number of optimizer steps in the next iteration by `steps`."""
        epoch = self._next_epoch()
        return len(self._schedule_of_epoch(epoch)) - self._resumed_step(epoch)

    def consume(self, num_samples: int, has_updated: Callable[[], bool]) -> None:
        """Count the samples of an optimizer step whose last backward has run.

        Args:
            has_updated: Returns whether the optimizer has updated the parameters. A checkpoint before the update must
                resume with this step, so its samples do not count yet.
        """
        self.settle()
        self._awaited, self._is_resumed = (num_samples, has_updated), False

    def settle(self) -> None:
        """Count the last optimizer step, even if its update was not detected."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._consumed += awaited[0]
            self._detects_updates = awaited[1]()

    def _step_after(self, consumed: int, epoch: int) -> int:
        whole_number("samples_consumed", consumed)
        ends = [0, *itertools.accumulate(step.num_samples for step in self._schedule_of_epoch(epoch))]
        if consumed > ends[-1]:
            raise InputError(
                f"samples_consumed is {consumed}, but an epoch has {ends[-1]} samples. Expected the number of "
                "samples consumed in the current epoch. Subtract the samples of finished epochs, and pass the "
                "current epoch to set_epoch.",
            )
        finished = bisect.bisect_right(ends, consumed) - 1
        if ends[finished] != consumed:
            raise InputError(
                f"samples_consumed is {consumed}, which is inside an optimizer step. Expected the end of a step. "
                f"Resume from the last finished step, {ends[finished]}.",
            )
        return finished

    def common_facts(self) -> dict[str, Any]:
        """Return the facts about the next epoch that must be equal on all ranks of a job."""
        return {
            **self._order_facts(),
            "drop_last": self.drop_last,
            "epoch": self.epoch,
            "samples_consumed": self.samples_consumed,
            "is resumed": self._is_resumed,
            "epoch is set": self._is_chosen,
            **({} if self._draw is None else {"digest of the order": self._digest_of_order()}),
        }

    def _digest_of_order(self) -> str:
        """Return a digest of the next epoch's order, which a user's sampler may draw differently on each rank."""
        order = ",".join(map(str, self._order(self._next_epoch())))
        return hashlib.blake2b(order.encode(), digest_size=8).hexdigest()

    def _order_facts(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def __len__(self) -> int:
        full_steps, short = divmod(self.num_samples, self.effective_batch_size)
        last = accumulation_steps(short, self.batch_size) if short and not self.drop_last else 0
        return full_steps * accumulation_steps(self.effective_batch_size, self.batch_size) + last

    def __iter__(self) -> Iterator[list[int]]:
        # This must be a generator. A DataLoader with workers creates two iterators and draws only from the second.
        # So use the resumed position at the first draw.
        start_step, self._start_step = self._start_step, 0
        order = self._order(self.epoch)
        accumulation = accumulation_steps(self.effective_batch_size, self.batch_size)
        unequal = self._unequal_parts()
        loop = None if self._is_in_steps or (accumulation == 1 and not unequal) else LoopWithoutSteps(unequal)
        draws = self._draws_outside_steps()
        for number, step in enumerate(self.schedule[start_step:], start_step):
            if loop is not None:
                loop.steps_begun += 1
            first = number * self.effective_batch_size
            drawn = order[first : first + step.num_samples]
            indices = drawn.tolist() if isinstance(drawn, torch.Tensor) else [*drawn]
            sizes = micro_batch_sizes(step.num_samples, self.batch_size)
            for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
                part = self.rank_slice.part_of(indices[end - size : end])
                if draws is not None:
                    draws.add(len(part))
                yield part
                if loop is not None and loop.is_wrong(accumulation):
                    loop = None

    def _unequal_parts(self) -> str:
        """Describe the ranks, or the micro-batches of a step, that have different numbers of samples.

        Empty if there are none, or if the loop weights them.
        """
        if self.has_weights:
            return ""
        for step in (*self.schedule[:1], *self.schedule[-1:]):
            sizes = micro_batch_sizes(step.num_samples, self.batch_size)
            splits = (short_split(size, self.rank_slice.batch_sizes) for size in {*sizes})
            if ranks := next((split for split in splits if len({*split}) > 1), None):
                return f"The ranks have {', '.join(map(str, ranks))}"
            if len({*sizes}) > 1:
                return f"The micro-batches of a step have {sizes[0]} and {sizes[-1]}"
        return ""

    def _draws_outside_steps(self) -> Draws | None:
        is_in_steps, self._is_in_steps = self._is_in_steps, False
        return None if is_in_steps else begin_draws(self)

    def _order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        if not self.shuffle:
            return range(self.num_samples)
        if self._draw is not None:
            return self._draw(epoch)
        generator = torch.Generator().manual_seed((self.seed + epoch) % 2**64)
        return torch.randperm(self.num_samples, generator=generator)

    def _step_of(self, num_samples: int) -> StepSchedule:
        sizes = micro_batch_sizes(num_samples, self.batch_size)
        return StepSchedule(tuple(map(self.rank_slice.size_of, sizes)), num_samples)
