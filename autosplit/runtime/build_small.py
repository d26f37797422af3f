"""Build a model or workload with its memory, for as long as it stays small.

To build without memory, torch loads its compiler, which takes as long as torch itself.
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
"""Functions that make tensors of a size that is among their arguments, on the meta device, too."""


class TooLarge(BaseException):  # no error: a signal, which code that catches every Exception lets through
    """Raised where a model that is built grows past its bound, or beyond this machine's own memory."""


def built_within(build: Callable[[], T], most_bytes: int) -> T:
    """Call a function for as long as the tensors that it makes add up to no more, those that it drops included.

    The size of what is drawn or filled is known before it takes its memory; all else counts once it is there.

    Raises:
        TooLarge: They are larger, or on another device than the processor.
    """
    bound = _Bound(most_bytes)
    with settings_kept_on_failure():
        with bound:
            built = build()
        if bound.passed:  # by code that goes on after whatever happens
            bound.end()
    return built


@contextmanager
def settings_kept_on_failure() -> Iterator[None]:
    """Put torch's default dtype, default device and grad mode back where code is left that will be called again.

    Left while it had changed one of them, it would take that for what was there before.
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
    """Counts the bytes of the tensors that torch's functions return; `passed` where they are too many, or elsewhere."""

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
        if any(storage.nbytes() > self._most_bytes for storage in given):  # of a file that was read
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
        raise TooLarge(f"its tensors take more than {self._most_bytes} bytes, or are not the processor's")


def _place_asked_for(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """Return the type of device on which a tensor is to be; None where nothing says so."""
    asked = [options.get("device"), *(args[1:] if func is Tensor.to else ())]
    if asked[0] is None and func in FACTORIES:
        asked[0] = args[0].device if func.__name__.startswith("new_") else default_device()
    if func is Tensor.cuda or any(type(one) is int for one in asked):  # by the number of a GPU
        return "cuda"
    return next((torch.device(one).type for one in asked if isinstance(one, (str, torch.device))), None)


def _planned_bytes(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the bytes of what a factory will make; none where it says itself what is wrong, or makes no dense one."""
    drawn_apart = {name: value for name, value in options.items() if name not in {"generator", "pin_memory", "out"}}
    if options.get("layout", torch.strided) is not torch.strided:
        return 0
    try:
        return int(func(*args, **{**drawn_apart, "device": "meta"}).nbytes)
    except (RuntimeError, TypeError, ValueError):
        return 0


def _dense(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the processor's dense tensors among some values, and in the lists among them."""
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            is_dense = isinstance(item, Tensor) and not is_lazy(item) and item.layout is torch.strided
            if is_dense and item.device.type == "cpu" and not item.is_nested:
                yield item
