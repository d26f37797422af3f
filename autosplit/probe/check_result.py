"""The results of the gradient check: plain values, each with its figures and what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EXACT = 1e-6
"""A relative difference below this is shown as it is, a larger one in percent."""


@dataclass(frozen=True)
class Check:
    """One result of the gradient check: whether something changes when the batch is split.

    Attributes:
        subject: What it is: ``"gradient"``, ``"loss"``, ``"model"``, ``"batch"``, ``"BatchNorm2d at features.1"``,
            ``"gradient of optimizer 0"``, ``"state in queue"`` (a buffer).
        split_error: Relative difference (0.1 for 10 %) between the whole sample batch and the same batch split
            unevenly over two devices: of the gradient, or of a BatchNorm's output. None where it was not compared,
            or is not finite. In a plan 0 where it is no more than rounding.
        accumulation_error: The same, for two uneven micro-batches that are accumulated as `plan.steps` does, and as the
            ranks of DDP weigh theirs.
        depends: Whether it changes with the split.
        advice: What to do; empty where there is nothing to do.
        remark: What else is to be known of the figures; empty for nothing.
        reduce: Of ``"gradient"``: what a loss that the model takes itself is a mean over, found by leaving some of the
            sample batch's `labels` out, and how `plan.wrap` combines the devices' losses: by ``"samples"``, by
            ``"tokens"`` (labels that are not -100), or by ``"next tokens"`` (without the first of each sequence). None
            where none of them makes it exact, or there are no labels: then by samples.
        count: Of ``"loss"``: Python that counts in a micro-batch `batch` what the loss divides by, for
            ``plan.steps(loader, count=lambda batch: ...)``. None if the loss is a mean over samples, or is not known.
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
        """The larger of both differences, as far as they are known."""
        return max(self.split_error or 0.0, self.accumulation_error or 0.0)

    def __str__(self) -> str:
        """Say it in one line."""
        verdict = "changes" if self.depends else "stays the same"
        split, accumulated = error_text(self.split_error), error_text(self.accumulation_error)
        said = f"{self.subject} {verdict} when the batch is split (over devices: {split}, accumulated: {accumulated})"
        more = "; ".join(filter(None, (self.advice, self.remark)))
        return f"{said}: {more}" if more else said


def is_count_expression(text: str) -> bool:
    """Return whether a text is Python that the gradient check could have written to count a `batch`.

    A plan may come from anybody, and its count is shown as code to paste. It may only look into the batch, compare, and
    call `int`, `float` and `sum`.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    is_canonical = ast.unparse(tree).replace(" ", "") == text.replace(" ", "")  # without comments and line breaks
    return is_canonical and len(text) <= _LONGEST_COUNT and all(map(_is_harmless, ast.walk(tree)))


_LONGEST_COUNT = 400
_HARMLESS = (
    *(ast.Expression, ast.Compare, ast.NotEq, ast.Subscript, ast.Slice, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub),
)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        is_sum = isinstance(called, ast.Attribute) and called.attr == "sum" and not node.args
        is_number = isinstance(called, ast.Name) and called.id in ("int", "float") and len(node.args) == 1
        return (is_sum or is_number) and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in ("batch", "loss_fn", "class_weights", "int", "float")
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("_")
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, str) and str(node.value).isprintable()
    return isinstance(node, _HARMLESS)


def changed(checks: Iterable[Check]) -> list[Check]:
    """Return what splitting changes: first what there is something to do about, of it first what changes the most."""
    found = [check for check in checks if check.depends]
    return sorted(found, key=lambda check: (not check.advice, -check.most))


def error_text(error: float | None) -> str:
    """Write a relative difference for reading: ``68 % off``, ``2e-16``, ``not checked``."""
    if error is None:
        return "not checked"
    if error == 0:
        return "no difference"
    if error < EXACT:
        return f"{error:.0e}"
    return f"{100 * error:.0f} % off" if error >= 0.1 else f"{100 * error:.2g} % off"
