"""What the loss of a transformers model is a mean over, read from the code of its head.

A head computes its loss inside `forward`: by `self.loss_function`, or by criteria of torch's that it makes there.
Which labels that averages over differs from head to head (shifted by one or not, with an ignored label or without,
divided by `num_items_in_batch` or deaf to it), and no attribute of the model says it; its source does. What that
leaves open stays open: then there is no `HeadLoss`. transformers is never imported: whoever has such a model has it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["HeadLoss", "head_of", "is_integer", "is_kind", "loss_of", "parameters_of"]

Averaged = Literal["samples", "labels", "next labels", "spans", "sum"]


@dataclass(frozen=True)
class HeadLoss:
    """What a head's loss is a mean over.

    Args:
        over: ``"labels"`` that are not ignored, ``"next labels"`` (the first of each sequence has nothing to
            predict it from), ``"spans"`` (starts and ends that lie inside the input), ``"samples"``; ``"sum"`` is
            no mean.
        ignored: The label that does not count.
        divides: The head adds up and divides by `num_items_in_batch` itself where a call has it.
        adds_router_loss: A loss of the routers comes on top, which no weighting makes exact.
    """

    over: Averaged
    ignored: int = -100
    divides: bool = False
    adds_router_loss: bool = False


# What each of transformers' loss functions averages over; "classes" is decided by the problem and the labels.
_LOSS_FUNCTIONS: dict[str, Averaged | Literal["classes", "ctc"]] = {
    "ForCausalLMLoss": "next labels",
    "ForMaskedLMLoss": "labels",
    "ForTokenClassification": "labels",
    "ForSemanticSegmentationLoss": "labels",
    "ForSequenceClassificationLoss": "classes",
    "ForQuestionAnsweringLoss": "spans",
    "ForCTCLoss": "ctc",
}
_IGNORED_BY_DEFAULT = {"ForSemanticSegmentationLoss": 255}
_CRITERIA = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss")
_ROUTER_LOSSES = ("load_balancing_loss_func", "router_z_loss_func")

_LOSS_NAME = re.compile(r"loss|criterion|cross_entropy", re.IGNORECASE)
# The labels as they came, whatever their shape, dtype and device.
_PLAIN_LABELS = re.compile(r"labels(\.(view|reshape)\([\w.* ,-]*\)|\.(squeeze|contiguous|long)\(\)|\.to\([\w.]+\))*")


def is_kind(kind: type, package: str, name: str) -> bool:
    """Tell whether a class is, or descends from, one of a package's classes, without importing the package."""
    return any(
        base.__name__ == name and (base.__module__ == package or base.__module__.startswith(f"{package}."))
        for base in kind.__mro__
    )


def head_of(module: nn.Module) -> nn.Module | None:
    """Find the transformers model that a module is, or that it hands its whole call to.

    Args:
        module: Any module.

    Returns:
        The model; None where there is none, or where the module does more than to call it.
    """
    while not is_kind(type(module), "transformers", "PreTrainedModel"):
        children = list(module.named_children())
        if len(children) != 1:
            return None
        name, child = children[0]
        forward = _forward_of(type(module))
        if forward is None or not forward.hands_on_to(name):
            return None
        module = child
    return module


def loss_of(head: nn.Module, named: Mapping[str, Any]) -> HeadLoss | None:
    """Say what a head's loss is a mean over in one call.

    Args:
        head: A transformers model.
        named: The arguments of the call, by name.

    Returns:
        What it averages over, or None where the code of its forward does not say.
    """
    forward = _forward_of(type(head))
    if forward is None or forward.changes_labels:
        return None
    own = [call for call in forward.losses if call.name not in _ROUTER_LOSSES]
    by_function = [call for call in own if call.function == "self.loss_function"]
    if by_function:
        answers = {_by_loss_function(head, call, named) for call in by_function}
        found = answers.pop() if by_function == own and len(answers) == 1 else None
    else:
        found = _by_criteria(head, own, forward.criteria_names, named)
    if found is not None and len(own) < len(forward.losses) and _wants_router_loss(head, named):
        return replace(found, adds_router_loss=True)
    return found


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names under which a module takes its positional arguments, as far as its code says."""
    forward = _forward_of(type(module))
    return forward.parameters if forward is not None else ()


def is_integer(value: object) -> bool:
    """Tell whether a value is a tensor of whole numbers, as class labels are."""
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )


# Reading a forward


@dataclass(frozen=True)
class _Call:
    """A call in a forward, as it is written; ``**kwargs`` is the keyword None."""

    function: str
    args: tuple[str, ...]
    keywords: dict[str | None, str]

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]


@dataclass(frozen=True)
class _Forward:
    """What a forward's source says about its loss."""

    parameters: tuple[str, ...]
    losses: tuple[_Call, ...]
    others: tuple[_Call, ...]
    criteria_names: frozenset[str]
    changes_labels: bool

    def hands_on_to(self, child: str) -> bool:
        """Tell whether it only calls the child, with what it was called with."""
        calls = [call for call in self.others if call.function in (f"self.{child}", f"self.{child}.forward")]
        untouched = not (self.losses or self.changes_labels)
        return bool(calls) and untouched and all(None in call.keywords for call in calls)


_forwards: dict[type[nn.Module], _Forward | None] = {}


def _forward_of(kind: type[nn.Module]) -> _Forward | None:
    """Read a class's forward, once; None where it has no source."""
    if kind not in _forwards:
        try:
            source = inspect.getsource(inspect.unwrap(kind.forward))
            tree = ast.parse(textwrap.dedent(source)).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            tree = None
        _forwards[kind] = _read(tree) if isinstance(tree, ast.FunctionDef) else None
    return _forwards[kind]


def _read(tree: ast.FunctionDef) -> _Forward:
    calls = [_written(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assigned = list(_assigned_in(tree))
    return _Forward(
        parameters=tuple(item.arg for item in (*tree.args.posonlyargs, *tree.args.args)[1:]),
        losses=tuple(call for call in calls if _LOSS_NAME.search(call.name)),
        others=tuple(call for call in calls if not _LOSS_NAME.search(call.name)),
        criteria_names=frozenset(
            ast.unparse(target)
            for target, value in assigned
            if isinstance(value, ast.Call) and _written(value).name in _CRITERIA
        ),
        changes_labels=any(_changes_labels(target, value) for target, value in assigned),
    )


def _written(call: ast.Call) -> _Call:
    return _Call(
        function=ast.unparse(call.func),
        args=tuple(ast.unparse(item) for item in call.args),
        keywords={item.arg: ast.unparse(item.value) for item in call.keywords},
    )


def _assigned_in(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield what is assigned to, with its new value; None where it is changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, node.value
        elif isinstance(node, ast.AugAssign):
            yield node.target, None


def _changes_labels(target: ast.expr, value: ast.expr | None) -> bool:
    """Tell whether an assignment makes `labels` anything but the labels as they came."""
    if isinstance(target, ast.Subscript):
        return ast.unparse(target.value) == "labels"
    names = {item.id for item in ast.walk(target) if isinstance(item, ast.Name)}
    return "labels" in names and (value is None or not _PLAIN_LABELS.fullmatch(ast.unparse(value)))


def _wants_router_loss(head: nn.Module, named: Mapping[str, Any]) -> bool:
    asked = named.get("output_router_logits")
    if asked is not None:
        return bool(asked)
    config: Any = head.config
    configs = (config, config.get_text_config())
    return any(bool(getattr(item, "output_router_logits", False)) for item in configs)


# Heads with a loss function of transformers'


def _by_loss_function(head: nn.Module, call: _Call, named: Mapping[str, Any]) -> HeadLoss | None:
    function: Any = head.loss_function
    name = getattr(function, "__name__", "")
    over = _LOSS_FUNCTIONS.get(name)
    if over is None or not function.__module__.startswith("transformers."):
        return None  # the user's own
    if over == "ctc":
        return _ctc_loss(head)
    given = call.keywords
    divides = None in given or "num_items_in_batch" in given
    if over == "spans":
        return HeadLoss("spans", divides=divides) if _has_spans(named) else None
    if not any(_PLAIN_LABELS.fullmatch(text) for text in (*call.args, *given.values())):
        return None
    if "shift_labels" in given:
        if not _PLAIN_LABELS.fullmatch(given["shift_labels"]):
            return None
        over = "labels"
    written = given.get("ignore_index", str(_IGNORED_BY_DEFAULT.get(name, -100)))
    ignored = _number(head, written)
    if ignored is None or (None in given and "ignore_index" in named):
        return None
    labels = named.get("labels")
    found = _by_problem(head, labels) if over == "classes" else _by_labels(over, labels)
    if found is None or found.over == "samples":
        return found
    return replace(found, ignored=ignored, divides=divides)


def _ctc_loss(head: nn.Module) -> HeadLoss | None:
    # torch's mean divides each sample's loss by the length of its target, then averages over samples.
    reduction = getattr(head.config, "ctc_loss_reduction", None)
    return {"mean": HeadLoss("samples"), "sum": HeadLoss("sum")}.get(str(reduction))


def _number(head: nn.Module, text: str) -> int | None:
    """Evaluate `-100` or `self.config.some_index`."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    in_config = re.fullmatch(r"self\.config\.(\w+)", text)
    found = getattr(head.config, in_config[1], None) if in_config else None
    return found if isinstance(found, int) else None


# Heads that make their criteria themselves


def _by_criteria(
    head: nn.Module, calls: list[_Call], criteria_names: frozenset[str], named: Mapping[str, Any]
) -> HeadLoss | None:
    made = [call for call in calls if call.name in _CRITERIA]
    applied = [call for call in calls if call.name not in _CRITERIA]
    kept = [_kept_criterion(head, call) for call in applied if call.function not in criteria_names]
    targets = {call.args[1] if len(call.args) == 2 and not call.keywords else "" for call in applied}
    if not targets or None in kept or not all(_is_plain_mean(call) for call in made):
        return None
    kinds = {call.name for call in made} | ({"CrossEntropyLoss"} if kept else set())
    written = {call.keywords.get("ignore_index", "-100") for call in made if call.name == "CrossEntropyLoss"}
    written |= {str(criterion.ignore_index) for criterion in kept if criterion is not None}
    if "CrossEntropyLoss" not in kinds or len(written) != 1:
        return None
    if targets == {"start_positions", "end_positions"} and _has_spans(named):
        return HeadLoss("spans") if written == {"ignored_index"} else None
    ignored = _number(head, written.pop())
    if ignored is None or not all(_PLAIN_LABELS.fullmatch(target) for target in targets):
        return None
    labels = named.get("labels")
    found = _by_problem(head, labels) if "MSELoss" in kinds else _by_labels("labels", labels)
    return found if found is None else replace(found, ignored=ignored)


def _kept_criterion(head: nn.Module, call: _Call) -> nn.CrossEntropyLoss | None:
    """Return the criterion that a head made when it was built, if it is a plain one."""
    kept = getattr(head, call.function.removeprefix("self."), None) if call.function.startswith("self.") else None
    plain = isinstance(kept, nn.CrossEntropyLoss) and kept.reduction == "mean" and kept.weight is None
    return kept if isinstance(kept, nn.CrossEntropyLoss) and plain else None


def _is_plain_mean(made: _Call) -> bool:
    return (
        not made.args
        and not made.keywords.keys() - {"ignore_index", "reduction"}
        and (made.keywords.get("reduction", "'mean'") == "'mean'")
    )


# What both kinds decide by the labels


def _has_spans(named: Mapping[str, Any]) -> bool:
    return all(isinstance(named.get(name), Tensor) for name in ("start_positions", "end_positions"))


def _by_labels(over: Averaged, labels: object) -> HeadLoss | None:
    if is_integer(labels):
        return HeadLoss(over)
    return HeadLoss("samples") if isinstance(labels, Tensor) else None


def _by_problem(head: nn.Module, labels: object) -> HeadLoss | None:
    """Decide as sequence classification does between regression, one class of many, and many at once."""
    config: Any = head.config
    problem = getattr(config, "problem_type", None)
    if problem is None:
        problem = "regression" if config.num_labels == 1 else "by labels"
    if problem in ("regression", "multi_label_classification"):
        return HeadLoss("samples") if isinstance(labels, Tensor) else None
    return _by_labels("labels", labels)
