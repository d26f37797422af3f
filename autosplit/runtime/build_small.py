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
    with settings_kept_on_failure():
        with bound:
            built = build()
        if bound.passed:  # the function caught TooLarge and continued
            bound.end()
    return built


@contextmanager
def settings_kept_on_failure() -> Iterator[None]:
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
        place = _place_asked_for(func, args, options)
        if place not in {None, "cpu", "meta"}:
            self.end()
        if func in FACTORIES and place == "cpu" and _planned_bytes(func, args, options) > self._most_bytes:
            self.end()
        given = [tensor.untyped_storage() for tensor in _dense((*args, *options.values()))]
        if any(storage.nbytes() > self._most_bytes for storage in given):  # for example, tensors loaded from a file
            self.end()
        known = {storage.data_ptr() for storage in given}
        result = func(*args, **options)
        made = (tensor for tensor in _dense((result,)) if tensor.untyped_storage().data_ptr() not in known)
        self._left_bytes -= sum(tensor.nbytes for tensor in made)
        if self._left_bytes < 0:
            self.end()
        return result

    def end(self) -> NoReturn:
        self.passed = True
        raise TooLarge(f"its tensors take more than {self._most_bytes} bytes, or are not on the CPU")


def _place_asked_for(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    asked = [options.get("device"), *(args[1:] if func is Tensor.to else ())]
    if asked[0] is None and func in FACTORIES:
        asked[0] = args[0].device if func.__name__.startswith("new_") else default_device()
    if func is Tensor.cuda or any(type(one) is int for one in asked):  # an integer is a GPU index
        return "cuda"
    return next((torch.device(one).type for one in asked if isinstance(one, (str, torch.device))), None)


def _planned_bytes(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    drawn_apart = {name: value for name, value in options.items() if name not in {"generator", "pin_memory", "out"}}
    if options.get("layout", torch.strided) is not torch.strided:
        return 0
    try:
        return int(func(*args, **{**drawn_apart, "device": "meta"}).nbytes)
    except (RuntimeError, TypeError, ValueError):
        return 0


def _dense(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            is_dense = isinstance(item, Tensor) and not is_lazy(item) and item.layout is torch.strided
            if is_dense and item.device.type == "cpu" and not item.is_nested:
                yield item
