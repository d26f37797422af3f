"""Cut a micro-batch that ran out of memory in two, so that its parts are run in its place.

A backward that breaks off has added to some gradients and not to others. Those that it began are dropped. Those that it
added to are complete, since autograd adds to a leaf once in a backward; the parts leave them out.

gradient of   before   whole, broke off   first half   second half
weight 1      g        + w  (added)       + 0          + 0
weight 2      g                           + a          + b           a + b = w
weight 3      -        w   (dropped)      a            + b
"""

from __future__ import annotations

import gc
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autosplit.accelerators import accelerator_in_use
from autosplit.errors import InputError, advise
from autosplit.notes import Note
from autosplit.oom import is_oom, scarcity
from autosplit.parallel.batch_counts import Count, counted
from autosplit.rng import RngState
from autosplit.workload.batch import batch_size_of, chunk

_log = logging.getLogger(__name__)

OnOom = Literal["raise", "cut"]

CUTS_UNTIL_LOWERED = 3
"""Micro-batches of a size that have run out before those of that size are cut before they run."""

SHARE_UNTIL_LOWERED = 0.25
"""The share of them that has: a run that breaks off costs up to a whole one, two halves some tenths more than one."""


class CutWarning(UserWarning):
    """A micro-batch ran out of memory and was cut."""


@dataclass(frozen=True, eq=False)
class Part:
    """A micro-batch, or a part of one.

    Attributes:
        size: What it counts for, in samples or in whatever its mean loss averages over.
        added: Tensors whose gradients have this part already.
    """

    batch: Any
    size: float
    added: tuple[Tensor, ...] = ()


@dataclass(eq=False, kw_only=True)
class Cuts:
    """The cuts of a run: how micro-batches are cut, and from which size on they are cut before they run.

    Args:
        least: The fewest samples that a part may have.
        count: What a part counts for; by default its samples.
        note: Told once, in a sentence, when micro-batches begin to be cut before they run.
        lowers: As many samples take as much memory in any micro-batch, so that those of a size that ran out of it
            several times are cut before they run.

    Attributes:
        most_samples: Micro-batches of more samples are cut before they run; None for no bound.
        count_cut: Micro-batches and parts of them that ran out of memory.
    """

    dim: int = 0
    least: int = 1
    count: Count | None = None
    note: Callable[[Note], None] | None = None
    lowers: bool = True
    most_samples: int | None = field(default=None, init=False)
    count_cut: int = field(default=0, init=False)
    _runs: Counter[int] = field(default_factory=Counter, init=False)
    _failures: Counter[int] = field(default_factory=Counter, init=False)

    def parts_of(self, batch: Any, size: float) -> list[Part]:
        """Return a micro-batch as it is, or cut where as many samples are known to run out."""
        part = Part(batch, size)
        samples = self.samples_of(part) if self.most_samples is not None and size else 0
        if self.most_samples is None or samples <= self.most_samples:
            return [part]
        number = -(-samples // self.most_samples)
        return self._cut(part, samples, [samples * i // number for i in range(number + 1)])

    def halves(self, part: Part, added: Sequence[Tensor], why: str) -> list[Part]:
        """Return the two parts of what ran out of memory, and warn of it once.

        Args:
            added: Tensors whose gradients have all of it already.
            why: What kept memory from it, and what to do; empty where it was the samples themselves.
        """
        samples = self.samples_of(part)
        self.count_cut += 1
        self._failures[samples] += 1
        said = f"a micro-batch of {samples} samples ran out of memory and was cut in two"
        if self.count_cut == 1:
            norms = "; its BatchNorms normalise over each part" if self.least > 1 else ""
            advice = why or "tune again with samples as large as these, or with a larger reserve="
            warnings.warn(f"{said}, the gradient stays the same{norms}; {advice}", CutWarning, stacklevel=4)
        else:
            _log.info("%s", said)
        half = (samples + 1) // 2
        failures = self._failures[samples]
        if (
            self.lowers
            and not why
            and failures >= CUTS_UNTIL_LOWERED
            and failures >= SHARE_UNTIL_LOWERED * self._runs[samples]
        ):
            self._lower(half)
        whole = Part(part.batch, part.size, (*part.added, *added))
        return self._cut(whole, samples, [0, half, samples])

    def samples_of(self, part: Part) -> int:
        """Count the samples of a part."""
        return batch_size_of(part.batch, self.dim)

    def count_run(self, part: Part) -> None:
        """Count a run of a part, whether it fails or not."""
        self._runs[self.samples_of(part)] += 1

    def _lower(self, most_samples: int) -> None:
        is_first = self.most_samples is None
        self.most_samples = min(most_samples, self.most_samples or most_samples)
        if is_first and self.note is not None:
            text = (
                f"in training, micro-batches of {max(self._failures)} samples ran out of memory and were cut to "
                f"{most_samples} samples; tune again with samples as large as those of the training"
            )
            self.note(Note("cut-in-training", text))

    def _cut(self, part: Part, samples: int, ends: list[int]) -> list[Part]:
        sizes = tuple(end - begin for begin, end in itertools.pairwise(ends))
        batches = chunk(part.batch, sizes, self.dim, samples)
        if not part.size:
            counts: Iterable[float] = [0] * len(sizes)
        else:
            counts = sizes if self.count is None else [counted(self.count, batch) for batch in batches]
        return [Part(batch, count, part.added) for batch, count in zip(batches, counts, strict=True)]


_CUTS: WeakKeyDictionary[Any, Cuts] = WeakKeyDictionary()


def cuts_for(loader: Any, on_oom: OnOom, **arguments: Any) -> Cuts | None:
    """Return the `Cuts` of a loader's run, which go on from epoch to epoch; None where errors are to be raised."""
    if on_oom not in ("raise", "cut"):
        raise InputError(
            f"on_oom is {on_oom!r}; expected 'raise' or 'cut'; 'cut' runs such a micro-batch in parts", code="on-oom"
        )
    if on_oom == "raise":
        return None
    cuts = Cuts(**arguments, lowers=not getattr(getattr(loader, "batch_sampler", None), "unlike_lengths", False))
    try:
        return _CUTS.setdefault(loader, cuts)
    except TypeError:  # a list or the like: no two epochs are known to be of one run
        return cuts


class Attempt:
    """A run of a part that may run out of memory.

    Attributes:
        has_failed: Whether it has; its halves are to be run in its place.
        has_backward: Whether its backward has run, and its gradients are whole.
    """

    def __init__(self, part: Part, cuts: Cuts) -> None:
        self.part, self._cuts = part, cuts
        self.has_failed = self.has_backward = False
        cuts.count_run(part)
        self._rng = RngState()
        self._added: list[Tensor] = []
        self._hides = False
        self._why = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the part within; an out-of-memory error ends the block, unless cutting does not help."""
        try:
            with _left_out(self.part.added):
                yield
        except Exception as error:
            if not is_oom(error):
                raise
            self._fail(error)

    def backward(self, run: Callable[[], object], loss: Tensor) -> None:
        """Run the backward of a loss; where it runs out, drop what it began."""
        gradients = AddedGradients(loss)
        try:
            run()
        except Exception as error:
            if is_oom(error):
                self._added, self._hides = gradients.drop_begun(), gradients.hides
                if not loss._is_view():
                    loss.detach_()  # the loop's own variable would hold the graph, and its memory, until the next loss
            raise
        self.has_backward = True

    def _fail(self, error: Exception) -> None:
        samples, advice = self._cuts.samples_of(self.part), ""
        if self.has_backward:
            advice = "the backward had run before, so that no smaller micro-batch helps"
        elif samples < 2 * self._cuts.least:
            advice = f"a part of {samples} {'sample' if samples == 1 else 'samples'} can't be cut any further"
        elif self._hides:
            advice = "with reentrant checkpointing a micro-batch can't be cut: pass use_reentrant=False"
        if advice:
            advise(error, advice)
            raise error
        self._why = scarcity()
        self.has_failed = True

    def halves(self) -> list[Part]:
        """Return the parts to be run in its place, when nothing refers to the error any more."""
        gc.collect()
        accelerator = accelerator_in_use()
        if accelerator is not None:
            accelerator.empty_cache()
        self._rng.put_back()
        return self._cuts.halves(self.part, self._added, self._why)


class AddedGradients:
    """The gradients that the backward of a loss may add to, as they were before it.

    Attributes:
        hides: Whether parts of the graph are made only in the backward (reentrant checkpointing), so that not all
            gradients are known.
    """

    def __init__(self, loss: Tensor) -> None:
        self.hides = False
        self._before = [
            (leaf, leaf.grad, None if leaf.grad is None else leaf.grad._version) for leaf in self._leaves_of(loss)
        ]

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that the backward adds to."""
        return [leaf for leaf, _, _ in self._before]

    def drop_begun(self) -> list[Tensor]:
        """Drop the gradients that the backward began, and return the tensors of those that it added to."""
        _wait_for_workers(leaf.device for leaf, _, _ in self._before)
        added = []
        for leaf, grad, version in self._before:
            if leaf.grad is not grad:
                leaf.grad = grad
            elif grad is not None and grad._version != version:
                added.append(leaf)
        return added

    def _leaves_of(self, loss: Tensor) -> Iterator[Tensor]:
        open_nodes = [loss.grad_fn]
        seen = set(open_nodes)
        while open_nodes:
            node = open_nodes.pop()
            if node is None:
                continue
            if hasattr(node, "variable"):  # AccumulateGrad
                yield node.variable
            self.hides |= node.name() == "CheckpointFunctionBackward"
            for other, _ in node.next_functions:
                if other not in seen:
                    seen.add(other)
                    open_nodes.append(other)


def _wait_for_workers(devices: Iterable[torch.device]) -> None:
    """Wait until autograd's thread of each device has ended what it was doing when another one's failed."""
    for device in set(devices):
        if device.type != "cpu":
            torch.zeros((), device=device, requires_grad=True).mul(1).backward()


@contextmanager
def _left_out(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leave tensors' gradients as they are in the backwards within."""
    with ExitStack() as hooks:
        for tensor in tensors:
            hooks.enter_context(tensor.register_hook(torch.zeros_like))
        yield


def run_in_parts(cuts: Cuts, batch: Any, size: float, run: Callable[[Part, Attempt], Tensor]) -> list[Tensor]:
    """Run a micro-batch by a function, and what runs out of memory of it in two parts; return its results.

    Args:
        size: What the micro-batch counts for, of which each part gets its own.
        run: Runs a part; its backward is the attempt's.
    """
    parts, results = cuts.parts_of(batch, size), []
    while parts:
        attempt = Attempt(parts.pop(0), cuts)
        with attempt.running():
            results.append(run(attempt.part, attempt))
        if attempt.has_failed:
            parts[:0] = attempt.halves()
    return results
