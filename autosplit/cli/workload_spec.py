"""Load the workload that a spec names: a Python file, a module, or a model's name such as ``timm:resnet18``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autosplit.addons import addon
from autosplit.errors import InputError
from autosplit.workload.from_file import load_workload

if TYPE_CHECKING:
    from autosplit.workload.workload import Workload

_MODEL_PREFIXES = ("hf:", "timm:", "torchvision:")


def is_model_name(spec: str) -> bool:
    """Return whether a spec names a model, which needs no file."""
    return spec.startswith(_MODEL_PREFIXES)


def workload_of_spec(spec: str, **options: Any) -> Workload | Callable[[], Workload]:
    """Return the workload that a spec names, or a function that builds it.

    The function can be sent to another process, so the caller decides where the model is built.

    Args:
        spec: A file or a module, as for `load_workload`, or a model's name, as for `workload_from_name`.
        **options: Options of `workload_from_name`, such as `seq_len`. They are not allowed for a file.
    """
    if is_model_name(spec):
        return addon("named_workload")(spec, options)  # type: ignore[no-any-return]
    if options:
        raise InputError(
            f"{' and '.join(options)} can't be set for {spec}, because its workload has its own sample batch. These "
            "options are for hf:PATH, timm:NAME and torchvision:NAME. Leave them out.",
        )
    return load_workload(spec)


def built_workload(spec: str, **options: Any) -> Workload:
    """Load and build the workload that a spec names. Another process can unpickle and call this function."""
    from autosplit.workload.workload import Workload

    found = workload_of_spec(spec, **options)
    return found if isinstance(found, Workload) else found()
