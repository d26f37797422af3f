"""Load the workload of a spec: ``FILE[:NAME]`` or ``package.module[:NAME]``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError, UserCodeError, users_errors

if TYPE_CHECKING:
    from autosplit.workload.workload import Workload

DEFAULT_NAME = "workload"

_EXPECTED = (
    "Expected a Python file that has a workload, FILE[:NAME], or package.module[:NAME], or a model as hf:PATH, "
    "timm:NAME or torchvision:NAME."
)


class Loaded:
    """A function that returns a workload, with its spec. Unpickling loads the spec again.

    Attributes:
        spec: The spec with the absolute path of the file, so that it is valid in any folder.
    """

    def __init__(self, spec: str, value: Workload | Callable[[], Any]) -> None:
        place, name = split_spec(spec)
        self.spec = f"{Path(place).resolve() if _is_file_spec(place) else place}:{name}"
        self._value = value

    def __call__(self) -> Workload:
        """Call the function and return its workload. Raise InputError if it returns something else."""
        from autosplit.workload.workload import Workload

        value = self._value if isinstance(self._value, Workload) else self._value()
        if not isinstance(value, Workload):
            raise InputError(
                f"{self.spec} returned {_type_name(value)}. Expected an autosplit.Workload. Return one from it.",
            )
        return value

    def __reduce__(self) -> tuple[Callable[[str], Workload | Callable[[], Workload]], tuple[str]]:
        return load_workload, (self.spec,)


def load_workload(spec: str) -> Workload | Callable[[], Workload]:
    """Run the file or import the module that a spec names, and return its workload.

    A file runs under a separate module name, never as ``__main__``. Its folder stays on ``sys.path``, because functions
    of the file may import neighbouring modules later.

    Args:
        spec: ``"train.py"``, ``"train.py:small"``, ``"package.module:small"``. The default name is ``workload``.

    Returns:
        A `Workload`. If the name is a function that returns a workload, a `Loaded`, which can be sent to another
        process.
    """
    place, name = split_spec(spec)
    return _named(load_module(place), name, place)


def load_module(place: str) -> ModuleType:
    """Run a file, or import a module by its name. See `load_workload`."""
    return _run_file(Path(place)) if _is_file_spec(place) else _import_module(place)


def load_loader(spec: str) -> Any:
    """Run the file of a spec, ``FILE[:NAME]``, and return its DataLoader. See `load_workload`.

    The default name is ``loader``.
    """
    place, name = split_spec(spec, "loader")
    module = load_module(place)
    if not hasattr(module, name):
        raise InputError(
            f"{place} has no {name!r}. Expected a DataLoader of that name, or a function that returns one. Define it, "
            f"or write {place}:NAME.",
        )
    value = getattr(module, name)
    with users_errors(spec):
        return value() if inspect.isfunction(value) else value


def split_spec(spec: str, default: str = DEFAULT_NAME) -> tuple[str, str]:
    """Split ``FILE[:NAME]`` into file and name."""
    place, colon, name = spec.rpartition(":")
    if not colon or not (name.isidentifier() or Path(place).exists()):
        return spec, default
    if not name.isidentifier():
        raise InputError(
            f"{name!r} in {spec!r} is not a Python name. {_EXPECTED} After the colon, write the workload's name in "
            "the file.",
        )
    return place, name


def _is_file_spec(place: str) -> bool:
    dotted = all(part.isidentifier() for part in place.split("."))
    return place.endswith(".py") or not dotted or Path(place).exists()


def _run_file(path: Path) -> ModuleType:
    _check_file(path)
    resolved = path.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:8]
    name = f"autosplit_file_{digest}_{''.join(c if c.isalnum() else '_' for c in resolved.stem)}"
    loader_spec = importlib.util.spec_from_file_location(name, resolved)
    assert loader_spec is not None, resolved  # the suffix is .py
    assert loader_spec.loader is not None, resolved
    module = importlib.util.module_from_spec(loader_spec)
    _put_on_path(resolved.parent)
    # Do this before the module runs, because dataclasses and pickle look the module up here.
    sys.modules[name] = module
    try:
        with users_errors(str(path)):
            loader_spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path} is a folder. {_EXPECTED} {_nearest_files(path, path.name)}")
    if not path.is_file():
        folder = path.parent
        if not folder.is_dir():
            beside = map(str, folder.parent.glob(f"*/{path.name}"))
            near = difflib.get_close_matches(str(path), beside, n=1)
            advice = f"Did you mean {near[0]}?" if near else "Check the path."
            raise InputError(f"{path} does not exist, nor does its folder. {_EXPECTED} {advice}")
        raise InputError(f"{path} does not exist. {_EXPECTED} {_nearest_files(folder, path.name)}")
    if path.suffix != ".py":
        raise InputError(
            f"{path} is not a .py file. {_EXPECTED} {_nearest_files(path.parent, path.name)}",
        )


def _nearest_files(folder: Path, name: str) -> str:
    try:
        found = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".py")
    except OSError:
        return "Check the path."
    near = difflib.get_close_matches(name, found, n=3, cutoff=0.5) or found[:5]
    where = "This folder" if folder == Path() else str(folder)
    return f"{where} has {', '.join(near)}." if near else f"{where} has no Python files. Check the path."


def _import_module(dotted: str) -> ModuleType:
    """Import a module by name. First put the current folder on ``sys.path``, as ``python -m`` does."""
    _put_on_path(Path.cwd())
    importlib.invalidate_caches()
    neither = InputError(
        f"There is no file and no module {dotted}. {_EXPECTED} {_nearest_files(Path(), f'{dotted}.py')}",
    )
    package, _, within = dotted.partition(".")
    found = importlib.util.find_spec(package) if within else None
    if found is not None and found.submodule_search_locations is None:
        raise neither  # "train.txt" must not import a train.py
    try:
        with users_errors(dotted):
            return importlib.import_module(dotted)
    except UserCodeError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name and f"{dotted}.".startswith(f"{missing.name}."):
            raise neither from None
        raise


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _named(module: ModuleType, name: str, place: str) -> Workload | Loaded:
    from autosplit.workload.workload import Workload

    where = f"{place}:{name}"
    if not hasattr(module, name):
        raise InputError(
            f"{place} has no {name!r}. {_EXPECTED} {_suggestion(place, name, _candidates(module))}",
        )
    value: Any = getattr(module, name)
    if isinstance(value, Workload):
        return value
    # An nn.Module is callable, too, but a call runs its forward.
    if not callable(value) or inspect.isclass(value) or hasattr(value, "named_parameters"):
        raise InputError(
            f"{where} is of type {_type_name(value)}. Expected an autosplit.Workload or a function that returns one. "
            f"{_suggestion(place, name, _candidates(module))}",
        )
    needed = required_arguments(value)
    if needed:
        raise InputError(
            f"{where} needs the arguments {', '.join(needed)}. Expected a function without required arguments. "
            "Give them defaults.",
        )
    return Loaded(where, value)


def _type_name(value: object) -> str:
    return "class" if inspect.isclass(value) else type(value).__name__


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature. The later call reports missing arguments
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _candidates(module: ModuleType) -> list[str]:
    from autosplit.workload.workload import Workload

    found = []
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        function = own and inspect.isfunction(value) and not required_arguments(value)
        if isinstance(value, Workload) or (function and not name.startswith("_")):
            found.append(name)
    return sorted(found)


def _suggestion(place: str, name: str, candidates: Iterable[str]) -> str:
    names = [candidate for candidate in candidates if candidate != name]
    near = difflib.get_close_matches(name, names, n=3) or names[:8]
    if not near:
        return (
            f"autosplit ran {place} to look for one. autosplit init {place} writes a file with a workload for its "
            f"model. Or add these lines to {place}, with your own model, batch and loss:\n"
            f"    import autosplit\n    {DEFAULT_NAME} = autosplit.Workload(model, (inputs, targets), loss_fn)"
        )
    return f"It has {', '.join(near)}: write {place}:{near[0]}."
