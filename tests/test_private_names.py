"""docs/private-names.md lists every private name of torch that the package uses, with its modules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import folders
import pytest
import torch

from autosplit import torch_versions

ROOT = folders.ROOT / "autosplit"
TABLE = folders.ROOT / "docs" / "private-names.md"

OF_OTHERS = frozenset(
    {
        *("_exit", "_fields", "_replace"),  # Python
        *("_add_dataloader", "_dataloaders", "_non_blocking", "_optimizers", "_remove_dataloader", "_schedulers"),
        *("_set_sync_gradients", "_is_accelerate_prepared", "_original_forward"),  # accelerate
        *("_get_num_items_in_batch", "_gradient_checkpointing_func", "_loss_shifts_labels", "_n_gpu"),  # transformers
        "_gpu_name_to_accelerator_type",  # ray
        *("_prepare_inputs", "_checkpointed_class"),  # the last is our own
    }
)
"""Private names that belong to other packages, or to objects that the package makes itself."""

BY_NAME = frozenset({"attrgetter", "delattr", "getattr", "hasattr", "private", "setattr"})
"""Functions that take the name of an attribute."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of attributes and methods that the classes of a module define."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    yield node.attr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a node reads or imports from elsewhere."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for alias in node.names:
            if any(map(is_private, f"{node.module}.{alias.name}".split("."))):
                yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls", "super()"}:
        if is_private(node.attr):
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
        for argument in node.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and is_private(argument.value):
                yield argument.value


def used(root: Path) -> dict[str, set[str]]:
    """Map each private name of torch to the modules that use it."""
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in root.rglob("*.py")}
    needed = {name for _, names in torch_versions._NEEDED for name in names.split()}
    own = {name for tree in trees.values() for name in own_names(tree)} - needed
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for name in (name for node in ast.walk(tree) for name in names_in(node)):
            if name not in own | OF_OTHERS:
                found[name].add(module)
    return dict(found)


def listed() -> dict[str, set[str]]:
    """Return the table: each name with the modules of its row."""
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", TABLE.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`([\w./]+)`", modules)) for name, modules in rows}


def test_the_table_lists_every_private_name_of_torch():
    found, table = used(ROOT), listed()
    assert {name: sorted(modules) for name, modules in found.items()} == {
        name: sorted(modules) for name, modules in table.items()
    }


def test_operators_are_looked_up_by_name():
    """Operators that an older torch lacks are left out. As attributes they would raise at import."""
    tree = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path, nodes in tree.items()
        for node in ast.walk(nodes)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("aten") and is_private(node.attr)
    }
    assert not found


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch._utils import _take_tensors", "torch._utils._take_tensors"),
        ("torch._foreach_add_([], 1)", "_foreach_add_"),
        ("getattr(state, '_fsdp_param_group', None)", "_fsdp_param_group"),
        ("private(wrapped, '_comm_hooks')", "_comm_hooks"),
    ],
)
def test_the_scan_sees_a_private_name(tmp_path, line, name):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "new.py").write_text(line)
    assert used(tmp_path) == {name: {"parallel/new.py"}}


def test_a_missing_name_without_a_fallback_is_named():
    with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)} has no _gone, which autosplit needs"):
        torch_versions.check_private_names(((torch.Tensor, "_version _gone"),))


def test_a_missing_attribute_of_an_object_is_named():
    with pytest.raises(RuntimeError, match=r"has no list\._gone, which autosplit needs here"):
        torch_versions.private([], "_gone")
