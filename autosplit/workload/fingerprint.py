"""Describe a Python value as plain JSON that is the same in every process, to compare workloads.

A tensor is described by shape and dtype, not by values. Functions and classes are described by their compiled code and
the objects that it uses, and objects by class and attributes.

The description includes everything that may matter. If equal workloads get different descriptions, a search is
repeated. If different workloads get the same description, the plan is wrong.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from autosplit.errors import is_installed

_DEPTH = 16
_VALUES = 20_000  # in total, to stay fast if a function refers to a large data set
_ITEMS = 256  # largest number of items of a container in a description
_CHARACTERS = 1000  # largest number of characters of a string in a description
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, str)
_RECORDS = (SimpleNamespace, argparse.Namespace)  # standard-library containers for the user's values
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def digest_of(plain: object) -> str:
    """Return 32 hexadecimal digits for dicts, lists, numbers and strings. The order of keys has no effect."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def qualified_name(kind: Any) -> str:
    """Return the name of a function or class. Prefix its module if that belongs to an installed package.

    The user's files get no prefix, because a file is ``__main__`` if it is run and has another name if it is imported.
    """
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None) or type(kind).__qualname__
    return f"{module}.{name}" if isinstance(module, str) and _is_library(module) else str(name)


def _is_library(module: str) -> bool:
    """Return whether a module belongs to Python, torch or an installed package, not to the user."""
    root = module.partition(".")[0]
    if root == "torch" or root in sys.stdlib_module_names:
        return True
    path = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(path, str) and is_installed(path)


def shape_of(tensor: Any) -> str | None:
    """Return a tensor's or an array's dtype and shape, such as ``"torch.float32(3, 4)"``. None for other values."""
    try:
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    except RuntimeError:  # torch's lazy parameters have no shape yet
        return "lazy"
    if dtype is None or not isinstance(shape, tuple):
        return None
    return f"{dtype}({', '.join(map(str, shape))})"


class Describer:
    """Describe values as plain JSON. Use one describer per value, because it numbers objects."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}
        self._left = _VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the description of any value."""
        self._left -= 1
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return repr(value)  # text, because JSON has no NaN
        if isinstance(value, (str, bytes)):
            return [len(value), repr(value[:_CHARACTERS])]
        shape = None if isinstance(value, type) else shape_of(value)
        if shape is not None:
            return shape
        if depth >= _DEPTH or self._left <= 0:
            return qualified_name(type(value))
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = (len(self._seen), value)  # keep the value alive, so no other object gets its id
        return self._compound(value, depth + 1)

    def _compound(self, value: Any, depth: int) -> Any:
        if callable(getattr(value, "named_modules", None)) and not isinstance(value, type):
            return [self.tree(value, depth), tensors_in(value), text_of(value)]
        if isinstance(value, (tuple, list)):
            return [qualified_name(type(value)), len(value), *(self.of(item, depth) for item in value[:_ITEMS])]
        if isinstance(value, (set, frozenset)):
            # The order of a set changes from process to process.
            members = None if len(value) > _VALUES else digest_of(sorted(map(_text, value)))
            return [qualified_name(type(value)), len(value), members]
        if isinstance(value, (Mapping, UserDict)):
            pairs = [[str(key), self.of(item, depth)] for key, item in list(value.items())[:_ITEMS]]
            return [qualified_name(type(value)), len(value), pairs]
        if isinstance(value, functools.partial):
            return ["partial", *(self.of(part, depth) for part in (value.func, value.args, value.keywords))]
        if isinstance(value, type):
            return self._class(value, depth)
        if isinstance(getattr(value, "__code__", None), CodeType):
            return self._function(value, depth)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        name = qualified_name(kind)
        method = getattr(value, "__func__", None)
        if method is not None:
            return [name, self.of(method, depth), self.of(value.__self__, depth)]
        if is_dataclass(value):
            return [name, {field.name: self.of(getattr(value, field.name, None), depth) for field in fields(value)}]
        if isinstance(value, ModuleType):
            return value.__name__
        described: list[Any] = [name]
        if kind.__module__ == "torch":  # a dtype, layout or device. The index of a device does not matter
            described.append(str(value.type) if kind.__name__ == "device" else str(value))
        described += [qualified_name(value), self.of(kind, depth), _plain_attributes(value)]
        others = self._other_attributes(value, depth)
        return [*described, others] if others else described

    def _other_attributes(self, value: Any, depth: int) -> dict[str, Any]:
        """Describe attributes that are not plain values, if the user can set them.

        For an object of a library, describe only public containers of plain values. Its other attributes may differ in
        each process.
        """
        others = {name: item for name, item in _attributes(value).items() if not isinstance(item, _PLAIN)}
        if _extends_library(type(value)):
            others = {name: item for name, item in others.items() if name[:1] != "_"}
        if _is_library(type(value).__module__) and not isinstance(value, _RECORDS):
            others = {name: item for name, item in others.items() if _is_plain(item)}
        return {name: self.of(item, depth) for name, item in others.items()}

    def _function(self, function: Any, depth: int) -> Any:
        code = function.__code__
        described = [
            qualified_name(function),
            _code(code),
            self.of(function.__defaults__, depth),
            self.of(function.__kwdefaults__, depth),
            [self.of(item, depth) for item in _cells(function)],
        ]
        if _is_library(str(function.__globals__.get("__name__"))):  # a wrapper has the `__module__` of what it wraps
            return described
        return [*described, {name: self.of(item, depth) for name, item in _globals_of(function).items()}]

    def _class(self, kind: type, depth: int) -> Any:
        name = qualified_name(kind)
        if _is_library(kind.__module__):
            return name
        members = {}
        for key, member in sorted(vars(kind).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            is_code = isinstance(getattr(function, "__code__", None), CodeType)
            if is_code or not key.startswith("__"):
                members[key] = self.of(function, depth)
        return [name, members, [self.of(base, depth) for base in kind.__bases__]]

    def tree(self, module: Any, depth: int = 0) -> list[Any]:
        """Describe each module of a model by its class and attributes."""
        lines: list[Any] = []
        for name, part in module.named_modules():
            self._seen.setdefault(id(part), (len(self._seen), part))
            line = [name, qualified_name(type(part)), self.of(type(part), depth + 1), _plain_attributes(part)]
            others = self._others_of_module(part, depth + 1)
            if module.training and not part.training:  # frozen by eval()
                others["training"] = False
            lines.append([*line, others] if others else line)
            config = getattr(part, "config", None)  # the architecture of Hugging Face models
            if config is not None:
                lines.append(_plain_attributes(config))
        return lines

    def _others_of_module(self, module: Any, depth: int) -> dict[str, Any]:
        """Describe other attributes that affect a module's output: hooks, and a replaced `forward`.

        For a user's class, describe all attributes. For a library's class, its `repr` and its parameters are enough.
        """
        own, extends = not _is_library(type(module).__module__), _extends_library(type(module))
        others: dict[str, Any] = {}
        for name, item in _attributes(module).items():
            if name in _HOOKS:
                if item:
                    others[name] = [self.of(hook, depth) for hook in item.values()]
            elif name == "_compiled_call_impl":
                others[name] = item is not None
            elif extends and name[:1] == "_":
                continue
            elif name == "forward" or (own and name not in _modules_own() and not isinstance(item, _PLAIN)):
                others[name] = self.of(item, depth)
        return others


def tensors_in(module: Any) -> list[Any]:
    """Return each parameter's and buffer's name, dtype and shape, and whether a parameter is trained."""
    parameters = [[name, shape_of(tensor), bool(tensor.requires_grad)] for name, tensor in module.named_parameters()]
    return [*parameters, *([name, shape_of(tensor)] for name, tensor in module.named_buffers())]


def text_of(module: Any) -> str:
    """Return the `repr` of a model, with its memory addresses removed. If it raises an error, return the class name."""
    try:
        return _ADDRESS.sub("0x", repr(module))
    except Exception:  # noqa: BLE001 (a user's extra_repr may raise anything, and a report must not fail for it)
        return qualified_name(type(module))


def _attributes(value: Any) -> dict[str, Any]:
    return {str(name): item for name, item in getattr(value, "__dict__", {}).items()}


def _extends_library(kind: type) -> bool:
    """Return whether a class has a base from an installed package, whose private attributes are ignored."""
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__ if _is_library(base.__module__))
    return any(root != "torch" and root not in sys.stdlib_module_names for root in roots)


def _plain_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, bools or strings.

    `training` is left out, because `tree` adds it if it matters. Values that differ in each process are left out, too:
    hashes of transformers, and the number that torch's compiler gives a module.
    """
    describer = Describer()
    return {
        name: describer.of(item)
        for name, item in _attributes(value).items()
        if isinstance(item, _PLAIN) and name != "training" and not name.endswith(("_hash", "_torchdynamo_wrapper_id"))
    }


def _is_plain(value: Any, depth: int = 0) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return True
    if depth > _DEPTH or not isinstance(value, (tuple, list, set, frozenset, Mapping)):
        return False
    items = list(value.values() if isinstance(value, Mapping) else value)[:_ITEMS]
    return all(_is_plain(item, depth + 1) for item in items)


@functools.lru_cache(maxsize=1)
def _modules_own() -> frozenset[str]:
    from torch import nn

    return frozenset(vars(nn.Module()))


def _code(code: CodeType) -> str:
    parts = [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_argcount]
    return digest_of([*parts, *(_text(constant) for constant in code.co_consts)])


def _text(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # its order changes from process to process
        return str(sorted(map(_text, value)))
    if isinstance(value, tuple):
        return str([_text(item) for item in value])
    if value is None or isinstance(value, (*_PLAIN, bytes, complex, slice, type(...))):
        return repr(value)
    return qualified_name(value if isinstance(value, type) else type(value))


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _globals_of(function: Any) -> dict[str, Any]:
    known = function.__globals__
    return {name: known[name] for name in sorted(_names(function.__code__)) if name in known}


def named_by(function: Any) -> list[Any]:
    """Return the objects that a function uses: its defaults, its closure, and the globals of a user's function."""
    own = () if _is_library(str(function.__globals__.get("__name__"))) else _globals_of(function).values()
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *_cells(function), *own]


def _cells(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            yield None
