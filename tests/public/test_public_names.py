"""The public names, and the rule of this folder: its tests use no other names of autosplit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folders import TESTS

import autosplit

HERE = Path(__file__).parent


def is_private(name: str) -> bool:
    """Return whether a dotted name is autosplit's and none of its public names."""
    package, *parts = name.split(".")
    if package != "autosplit" or not parts:
        return False
    if parts[0] == "ddp":
        return parts[1:] != [] and parts[1] not in autosplit.ddp.__all__
    if parts[0] == "integrations":
        return len(parts) < 2 or any(part.startswith("_") for part in parts)
    return parts[0] not in autosplit.__all__


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of autosplit in a file: imported, taken from the package, or in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            yield from [name] if is_private(name) and node.attr not in ("integrations", "__all__") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (
                word for word in node.value.split(":") if re.fullmatch(r"autosplit(\.\w+)+", word) and is_private(word)
            )


def helpers_of(path: Path) -> set[Path]:
    """Return the files of tests/ that a file imports, with those that they import."""
    found: set[Path] = set()
    left = [path]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in filter(None, modules):
                helper = TESTS / f"{module}.py"
                if helper.exists() and helper not in found:
                    found.add(helper)
                    left.append(helper)
    return found


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.name)
def test_the_tests_here_and_their_helpers_use_public_names_only(path):
    for file in (path, *helpers_of(path)):
        assert list(private_names(ast.parse(file.read_text(encoding="utf-8")))) == [], file.name


# The name is short because this file is checked by its own rule.
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import PKG.solve.split", "PKG.solve.split"),
        ("from PKG.errors import InputError", "PKG.errors.InputError"),
        ("from PKG import oom", "PKG.oom"),
        ("from PKG.ddp import context", "PKG.ddp.context"),
        ("from PKG.integrations.accelerate import _seen", "PKG.integrations.accelerate._seen"),
        ("PKG.tuning", "PKG.tuning"),
        ("patch.setattr('PKG.tuning.session', 1)", "PKG.tuning.session"),
        ("mark('ignore::PKG.parallel.balanced.Odd')", "PKG.parallel.balanced.Odd"),
        ("def late():\n    from PKG.text import shown", "PKG.text.shown"),
    ],
)
def test_the_rule_finds_private_names(line, found):
    assert list(private_names(ast.parse(line.replace("PKG", "autosplit")))) == [found.replace("PKG", "autosplit")]


@pytest.mark.parametrize(
    "line",
    [
        "import autosplit",
        "from autosplit import Plan, ddp",
        "from autosplit.ddp import setup",
        "from autosplit.integrations.transformers import Trainer",
        "import autosplit.integrations.transformers",
        "autosplit.tune(model)",
        "run('autosplit show')",
        "isinstance(name, 'autosplit.Plan')",
        "import torch.nn",
    ],
)
def test_the_rule_lets_public_names_pass(line):
    assert list(private_names(ast.parse(line))) == []


@pytest.mark.whole
@pytest.mark.parametrize("name", autosplit.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(autosplit, name)
    assert name in dir(autosplit)
    assert isinstance(value, str) or value.__doc__


@pytest.mark.parametrize("name", autosplit.ddp.__all__)
def test_every_name_for_ranks_is_there_and_documented(name):
    assert getattr(autosplit.ddp, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        getattr(autosplit, "tun" + "es")


def test_the_error_for_a_removed_name_names_its_replacement():
    removed = "find_executable_batch_size"
    with pytest.raises(AttributeError, match=rf"Use accelerate\.utils\.{removed}"):
        getattr(autosplit, removed)


@pytest.mark.parametrize("kind", [autosplit.AutosplitError, autosplit.OutOfMemoryError])
def test_every_error_has_a_base_that_is_public(kind):
    assert issubclass(kind, autosplit.AutosplitError)
    assert kind.exit_code in (2, 3)


def test_running_out_of_memory_is_torchs_own_error_too():
    assert issubclass(autosplit.OutOfMemoryError, torch.OutOfMemoryError)
