"""Build a model or workload with real memory, and stop if it grows too large.

Building without allocating memory makes torch load its compiler, which takes as long as loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autosplit.runtime.tensor_parts import tensors_among
from autosplit.torch_versions import default_device

T = TypeVar("T")

FACTORIES = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.empty_strided, torch.normal),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.arange, torch.linspace, torch.logspace),
        *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
    }
)
"""Functions that make tensors of a size given by their arguments. They also work on the meta device."""


class TooLarge(BaseException):  # not an Exception, so that `except Exception` in user code does not catch it
    """Raised when a model under construction exceeds its memory limit or uses a device other than the CPU."""


def built_within(build: Callable[[], T], most_bytes: int) -> T:
    """Call a function, and stop it if its tensors exceed a total size. Freed tensors count, too.

    For factories such as `torch.zeros`, check the size before memory is allocated. For other functions, check it
    afterwards.

    Raises:
        TooLarge: The tensors are larger, or are on a device other than the CPU.
    """
    bound = _Bound(most_bytes)
    with restored_settings():
        with bound:
            built = build()
        if bound.passed:  # the function caught TooLarge and continued
            bound.end()
    return built


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore torch's default dtype, default device and grad mode if the block raises.

    The caller runs the interrupted code again, whose own settings would then count as the user's defaults.
    """
    dtype, device, has_gradients = torch.get_default_dtype(), default_device(), torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        if default_device() != device:
            torch.set_default_device(device)
        raise


class _Bound(TorchFunctionMode):
    """Set `passed` and raise TooLarge if tensors take more than `most_bytes`, or are not on the CPU."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.passed = False
        self._most_bytes = self._left_bytes = most_bytes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func in FACTORIES and _planned_bytes(func, args, options) > self._most_bytes:
            self.end()
        given = [tensor.untyped_storage() for tensor in _dense((*args, *options.values()))]
        if any(storage.nbytes() > self._most_bytes for storage in given):  # for example, tensors loaded from a file
            self.end()
        known = {storage.data_ptr() for storage in given}
        result = func(*args, **options)
        if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors_among((result,))):
            self.end()
        made = (tensor for tensor in _dense((result,)) if tensor.untyped_storage().data_ptr() not in known)
        self._left_bytes -= sum(tensor.nbytes for tensor in made)
        if self._left_bytes < 0:
            self.end()
        return result

    def end(self) -> NoReturn:
        self.passed = True
        raise TooLarge(f"its tensors take more than {self._most_bytes} bytes, or are not on the CPU")


def _planned_bytes(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the bytes that a factory is about to allocate on the CPU. 0 if they are unknown."""
    sized_by = {name: value for name, value in options.items() if name not in {"generator", "pin_memory", "out"}}
    try:
        place = options.get("device") or (args[0].device if func.__name__.startswith("new_") else default_device())
        if torch.device(place).type != "cpu" or options.get("layout", torch.strided) is not torch.strided:
            return 0
        return int(func(*args, **{**sized_by, "device": "meta"}).nbytes)
    except (RuntimeError, TypeError, ValueError):
        return 0


def _dense(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for tensor in tensors_among(values):
        is_dense = not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_nested
        if is_dense and tensor.device.type == "cpu":
            yield tensor
