"""Cut a micro-batch that ran out of memory into two parts, and run the parts instead.

A backward that fails may have updated only some of the gradients. Two rules apply:

- A gradient that did not exist before is dropped. The parts compute it again.
- A gradient that the backward added to is complete, because autograd adds to a leaf once per backward. The parts do
  not add to it again.

gradient of   before   whole, failed      first half   second half
weight 1      g        + w  (added)       + 0          + 0
weight 2      g                           + a          + b           a + b = w
weight 3      -        w   (dropped)      a            + b
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autosplit.accelerators import accelerator_in_use
from autosplit.autograd_graph import graph_nodes
from autosplit.errors import advise, warn_user
from autosplit.notes import Note
from autosplit.oom import is_oom, scarcity
from autosplit.parallel.batch_counts import Count, counted
from autosplit.parallel.parts import OnOom, Part, check_on_oom
from autosplit.rng import RngState
from autosplit.workload.batch_layout import BatchLayout, read_batch

_log = logging.getLogger(__name__)

CUTS_UNTIL_LOWERED = 3
"""Number of out-of-memory errors at a batch size, after which micro-batches of that size are cut before they run."""

SHARE_UNTIL_LOWERED = 0.25
"""The fraction of runs at a batch size that must also have failed. A failed run costs up to a whole run, and two halves
cost a few tenths more than one run."""


class CutWarning(UserWarning):
    """A micro-batch ran out of memory and was cut."""


@dataclass(eq=False, kw_only=True)
class Cuts:
    """Cut the micro-batches of a run, and learn which sizes to cut before they run.

    Args:
        least: The smallest number of samples of a part.
        count: Returns the weight of a part. Default: the number of samples.
        note: Called once with a note when micro-batches begin to be cut before they run.
        lowers: Whether memory depends only on the number of samples. Then sizes that ran out of memory several times
            are cut before they run.

    Attributes:
        most_samples: Micro-batches with more samples are cut before they run. None for no limit.
        count_cut: The number of out-of-memory errors.
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

    def attempt(self, part: Part) -> Attempt:
        """Return an attempt to run a part."""
        return Attempt(part, self)

    def parts_of(self, batch: Any, size: float) -> list[Part]:
        """Return the micro-batch in parts of at most `most_samples` samples."""
        part = Part(batch, size)
        samples = self.samples_of(part) if self.most_samples is not None and size else 0
        if self.most_samples is None or samples <= self.most_samples:
            return [part]
        number = -(-samples // self.most_samples)
        return self._cut(part, samples, [samples * i // number for i in range(number + 1)])

    def halves(self, part: Part, added: Sequence[Tensor], why: str) -> list[Part]:
        """Cut a part that ran out of memory into two. Warn the first time.

        Args:
            why: The cause and advice, if memory other than the part's own was too large. Empty otherwise.
        """
        samples = self.samples_of(part)
        self.count_cut += 1
        self._failures[samples] += 1
        said = f"A micro-batch of {samples} samples ran out of memory and was cut in two"
        if self.count_cut == 1:
            norms = ", except that BatchNorms normalise over each part" if self.least > 1 else ""
            advice = why or "Tune again with samples as large as these, or with a larger reserve="
            warn_user(f"{said}. The gradient stays the same{norms}. {advice}.", CutWarning)
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
        """Return the number of samples of a part."""
        return read_batch(part.batch, self.dim).size

    def count_run(self, part: Part) -> None:
        """Count a run of a part, whether it fails or not."""
        self._runs[self.samples_of(part)] += 1

    def _lower(self, most_samples: int) -> None:
        is_first = self.most_samples is None
        self.most_samples = min(most_samples, self.most_samples or most_samples)
        if is_first and self.note is not None:
            text = (
                f"In training, micro-batches of {max(self._failures)} samples ran out of memory and were cut to "
                f"{most_samples} samples. Tune again with samples as large as those of the training."
            )
            self.note(Note("cut-in-training", text))

    def _cut(self, part: Part, samples: int, ends: list[int]) -> list[Part]:
        sizes = tuple(end - begin for begin, end in itertools.pairwise(ends))
        batches = BatchLayout.of(part.batch, samples, self.dim).cut(sizes)
        if not part.size:
            counts: Iterable[float] = [0] * len(sizes)
        else:
            counts = sizes if self.count is None else [counted(self.count, batch) for batch in batches]
        return [Part(batch, count, part.added) for batch, count in zip(batches, counts, strict=True)]


_CUTS: WeakKeyDictionary[Any, Cuts] = WeakKeyDictionary()


def cuts_for(loader: Any, on_oom: OnOom, **arguments: Any) -> Cuts | None:
    """Return a loader's `Cuts`, the same in every epoch, or None if `on_oom` is "raise"."""
    check_on_oom(on_oom)
    return None if on_oom == "raise" else cuts_of_loader(loader, **arguments)


def cuts_of_loader(loader: Any, **arguments: Any) -> Cuts:
    """Return a loader's `Cuts`, the same in every epoch."""
    cuts = Cuts(**arguments, lowers=not getattr(getattr(loader, "batch_sampler", None), "unlike_lengths", False))
    try:
        return _CUTS.setdefault(loader, cuts)
    except TypeError:  # a list, for example, cannot be a weak key, so each epoch gets new cuts
        return cuts


class Attempt:
    """Run a part that may run out of memory.

    Attributes:
        has_failed: Whether the part ran out of memory. The caller must then run its `halves`.
        has_backward: Whether the backward has finished, so the gradients are complete.
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
        """Run the part inside the `with` block. Catch out-of-memory errors if smaller parts can help."""
        try:
            with _left_out(self.part.added):
                yield
        except Exception as error:
            if not is_oom(error):
                raise
            self._fail(error)

    def backward(self, run: Callable[[], object], loss: Tensor) -> None:
        """Run the backward of a loss. If it runs out of memory, drop the incomplete gradients."""
        gradients = AddedGradients(loss)
        try:
            run()
        except Exception as error:
            if is_oom(error):
                self._added, self._hides = gradients.drop_begun(), gradients.hides
                if not loss._is_view():
                    loss.detach_()  # the loop's variable would keep the graph in memory until the next loss
            raise
        self.has_backward = True

    def _fail(self, error: Exception) -> None:
        samples, advice = self._cuts.samples_of(self.part), ""
        if self.has_backward:
            advice = "the backward had run already, so a smaller micro-batch does not help"
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
        """Free memory, restore the random state, and return the two halves.

        Call this after the error is gone, because its traceback keeps tensors in memory.
        """
        gc.collect()
        accelerator = accelerator_in_use()
        if accelerator is not None:
            accelerator.empty_cache()
        self._rng.put_back()
        return self._cuts.halves(self.part, self._added, self._why)


class AddedGradients:
    """Record the gradients that the backward of a loss may add to, before the backward runs.

    Attributes:
        hides: Whether the graph contains reentrant checkpointing, which builds parts of the graph in the backward.
        leaves: The tensors whose gradients the backward adds to.
    """

    def __init__(self, loss: Tensor) -> None:
        nodes = list(graph_nodes(loss.grad_fn))
        self.hides = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
        self.leaves = [node.variable for node in nodes if hasattr(node, "variable")]  # of each AccumulateGrad
        self._before = [(leaf.grad, None if leaf.grad is None else leaf.grad._version) for leaf in self.leaves]

    def drop_begun(self) -> list[Tensor]:
        """Drop the gradients that the backward created. Return the tensors whose gradients it added to."""
        _wait_for_workers(leaf.device for leaf in self.leaves)
        added = []
        for leaf, (grad, version) in zip(self.leaves, self._before, strict=True):
            if leaf.grad is not grad:
                leaf.grad = grad
            elif grad is not None and grad._version != version:
                added.append(leaf)
        return added


def _wait_for_workers(devices: Iterable[torch.device]) -> None:
    """Wait for autograd's thread of each device. It may still be busy after another thread failed."""
    for device in set(devices):
        if device.type != "cpu":
            torch.zeros((), device=device, requires_grad=True).mul(1).backward()


@contextmanager
def _left_out(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as hooks:
        for tensor in tensors:
            hooks.enter_context(tensor.register_hook(torch.zeros_like))
        yield


def run_in_parts(cuts: Cuts, batch: Any, size: float, run: Callable[[Part, Attempt], Tensor]) -> list[Tensor]:
    """Run a micro-batch, and cut each part that runs out of memory. Return the results of all parts.

    Args:
        size: The weight of the micro-batch in the optimizer step. `cuts` divides it among the parts.
        run: Runs a part. It must call the `backward` of the attempt.
    """
    parts, results = cuts.parts_of(batch, size), []
    while parts:
        attempt = Attempt(parts.pop(0), cuts)
        with attempt.running():
            results.append(run(attempt.part, attempt))
        if attempt.has_failed:
            parts[:0] = attempt.halves()
    return results
