"""Define the results of the gradient check: plain values, with figures and advice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EXACT = 1e-6
"""Relative difference below which an error is printed as a number instead of in percent."""


@dataclass(frozen=True)
class Check:
    """One result of the gradient check: whether splitting the batch changes one part of the training.

    Attributes:
        subject: The part of the training that was checked: ``"gradient"``, ``"loss"``, ``"BatchNorm2d at features.1"``,
            ``"gradient of optimizer 0"``, ``"state in queue"`` (a buffer).
        split_error: Relative difference (0.1 for 10%) of the gradient, or of a buffer. The whole sample batch is
            compared with the same batch split unevenly over two devices. None if it was not compared, or is not finite.
            In a plan, differences within rounding are 0.
        accumulation_error: The same difference for two uneven micro-batches, accumulated with the weights of
            `plan.steps` and of DDP ranks.
        depends: Whether the subject changes when the batch is split.
        advice: The recommended change. Empty if none is needed.
        remark: A remark on the figures. Empty if there is none.
        reduce: For ``"gradient"`` and a loss that the model computes itself: the unit over which `plan.wrap` averages
            the devices' losses. ``"samples"``, ``"tokens"`` (labels that are not -100) or ``"next tokens"`` (tokens
            without the first of each sequence). The check takes it from the cross entropy of the sample batch's
            `labels`. None if there is none. Then `plan.wrap` averages over samples.
        count: For ``"loss"``: a Python expression for the divisor of the mean loss of a micro-batch `batch`, for
            ``plan.steps(loader, count=lambda batch: ...)``. None if the loss is a mean over samples, or if the divisor
            is unknown.
    """

    subject: str
    split_error: float | None
    accumulation_error: float | None
    depends: bool
    advice: str = ""
    remark: str = ""
    reduce: Literal["samples", "tokens", "next tokens"] | None = None
    count: str | None = None

    @property
    def most(self) -> float:
        """The larger of the two differences. An unknown difference counts as 0."""
        return max(self.split_error or 0.0, self.accumulation_error or 0.0)

    def __str__(self) -> str:
        verdict = "changes" if self.depends else "stays the same"
        split, accumulated = error_text(self.split_error), error_text(self.accumulation_error)
        found = f"{self.subject} {verdict} when the batch is split (over devices: {split}, accumulated: {accumulated})"
        more = " ".join(filter(None, (self.advice, self.remark)))
        return f"{found}. {more}" if more else found


_PLACE = r"batch(?:\[(?:\d{1,9}|'[^'\\]*'|\"[^\"\\]*\")\]|\.[A-Za-z]\w*){0,20}(?:\[:, 1:\])?"
_WEIGHTS = r"(?:loss_fn\.weight|class_weights)"
_COUNT = re.compile(
    rf"(?:int|float)\({_PLACE}\.sum\(\)\)"
    rf"|int\(\({_PLACE} != -?\d+\)\.sum\(\)\)"
    rf"|float\({_WEIGHTS}\[{_PLACE}\[{_PLACE} != -?\d+\]\]\.sum\(\)\)"
)


def is_count_expression(text: str) -> bool:
    """Return whether a string is a Python expression that the gradient check could have written to count a `batch`.

    A plan from a file is untrusted, and its count is printed as code to paste.
    """
    return text.isprintable() and _COUNT.fullmatch(text) is not None


def changed(checks: Iterable[Check]) -> list[Check]:
    """Return the checks whose subject changes: checks with advice first, then the largest difference first."""
    found = [check for check in checks if check.depends]
    return sorted(found, key=lambda check: (not check.advice, -check.most))


def error_text(error: float | None) -> str:
    """Format a relative difference, as ``2e-16`` or, if it is large, in percent. None becomes ``not checked``."""
    if error is None:
        return "not checked"
    if error == 0:
        return "no difference"
    if error < EXACT:
        return f"{error:.0e}"
    return f"{100 * error:.0f} % off" if error >= 0.1 else f"{100 * error:.2g} % off"
