"""Errors have codes and notes have kinds, and nothing else reads their texts."""

from __future__ import annotations

import ast
import functools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import DOCS, ROOT

from autosplit.errors import AutosplitError, InputError, UserCodeError
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.runtime.child_process import ChildLostError  # noqa: F401  # a subclass

MODULES = sorted((ROOT / "autosplit").rglob("*.py"))
MESSAGES = r"str\(error.*\)(\.lower\(\))?|(\w+\.)?(note|message|text|failure|reason)"
"""Expressions that are the text of an error or a note."""

TEXTS = {"cause", "error", "failure", "message", "misfit", "note", "notes", "reason", "said", "text", "why"}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def is_a_text(node: ast.expr) -> bool:
    """Return whether an expression is a text of several characters, or a name."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and len(node.value) > 2
    return isinstance(node, ast.Name | ast.JoinedStr)


def test_the_page_lists_the_codes() -> None:
    """About 20 codes, which a program can act on. There were 485, and nobody read them."""
    given = {
        word.value.value
        for path in MODULES
        for call in calls(path)
        for word in call.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    of_classes = {one.code for one in _with_subclasses(AutosplitError)} - {AutosplitError.code}
    listed = re.findall(
        r"^\| `([a-z-]+)` \| `", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {*listed} == given | of_classes
    assert len(listed) <= 20


def _with_subclasses(kind: type[AutosplitError]) -> Iterator[type[AutosplitError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


def test_kinds_are_words_with_hyphens() -> None:
    kinds = {
        call.args[0].value
        for path in MODULES
        for call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id == "Note" and isinstance(call.args[0], ast.Constant)
    }
    assert len(kinds) > 40
    assert [one for one in kinds if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(one))] == []


def test_no_code_branches_on_the_text_of_a_note_or_an_error_of_ours() -> None:
    """`note.startswith("...")` decided the output, so no sentence could be rewritten."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in MODULES
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"startswith", "endswith"}
        if ast.unparse(call.func.value).rpartition(".")[2].strip("()") in TEXTS
    ]
    assert found == []


def test_messages_are_searched_only_where_torch_or_a_tool_wrote_them() -> None:
    """Torch raises a plain RuntimeError for many things, so its text is the only sign."""
    found = {
        (str(path.relative_to(ROOT / "autosplit")), ast.unparse(node.left))
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and is_a_text(node.left)
        if re.fullmatch(MESSAGES, ast.unparse(node.comparators[0]))
    }
    assert found == {
        ("errors.py", "'backward through the graph a second time'"),  # autograd's
        ("errors.py", "'in replica'"),  # of torch's parallel_apply
        ("errors.py", "'tensors to be on the same device'"),  # of torch's operators
        ("errors.py", "text"),  # the lack of a device
        ("parallel/parallel_apply.py", "f'in replica {position} on device'"),  # of torch's parallel_apply
        ("sim/data_dependent.py", "text"),  # of operators without a fake version
        ("workload/model_call.py", "'argument'"),  # of Python's calls
        ("workload/model_call.py", "'positional argument'"),
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a", code="b-c"), "b-c"),
        (AutosplitError("a"), "error"),
        (UserCodeError("a", ("frame",)), "user-code"),
        (OutOfMemoryError("a", device="cpu"), "out-of-memory"),
        (DoesNotFitError("a", code="b-c"), "b-c"),
    ],
)
def test_a_code_passes_to_another_process(error: AutosplitError, code: str) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), there.code) == (type(error), "a", code)
