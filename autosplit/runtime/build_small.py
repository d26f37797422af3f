"""Build a model or workload with its memory, for as long as it stays small.

To build without memory, torch loads its compiler, which takes as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from math import prod
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

__all__ = ["TooLarge", "built_within", "settings_kept_on_failure"]

T = TypeVar("T")

FACTORIES = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.empty_strided, torch.normal),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.arange, torch.linspace, torch.logspace),
        *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
    }
)
"""Functions that make tensors of a size that is among their arguments, on the meta device, too."""

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts that have no places of each value in each dimension."""


class TooLarge(BaseException):  # no error: a signal, which code that catches every Exception lets through
    """Raised where a model that is built grows past its bound, or beyond this machine's own memory."""


def built_within(build: Callable[[], T], most_bytes: int) -> T:
    """Call a function for as long as the tensors that it makes add up to no more, those that it drops included.

    The size of what is drawn or filled is known before it takes its memory. What torch does not show (a file that is
    read) counts once it is there.

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
    dtype, device, has_gradients = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        if torch.get_default_device() != device:
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
        given = [*_tensors((*args, *options.values()))]
        known = {_address(tensor) for tensor in given}
        if _asks_for_elsewhere(func, args, options) or _foreseen_bytes(func, args, options, given) > self._most_bytes:
            self.end()
        result = func(*args, **options)
        for tensor in _tensors((result,)):
            if tensor.device.type not in {"cpu", "meta"}:
                self.end()
            if tensor.device.type == "cpu" and _address(tensor) not in known:
                self._left_bytes -= _bytes_of(tensor)
        if self._left_bytes < 0:
            self.end()
        return result

    def end(self) -> NoReturn:
        self.passed = True
        raise TooLarge(f"its tensors take more than {self._most_bytes} bytes, or are not the processor's")


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the tensors among some values, and in the lists among them, less those that have no shape yet."""
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor) and not is_lazy(item):
                yield item


def _bytes_of(tensor: Tensor) -> int:
    """Return what a tensor takes, of a sparse one its values with their places."""
    if tensor.layout is torch.sparse_coo:
        places = tensor.sparse_dim() * torch.int64.itemsize
        values = prod(tensor.shape[tensor.sparse_dim() :]) * tensor.element_size()
        return tensor._nnz() * (places + values)  # noqa: SLF001  # `values()` refuses what is not coalesced
    if tensor.layout in COMPRESSED:
        return tensor.values().numel() * (tensor.element_size() + torch.int64.itemsize)
    return tensor.numel() * tensor.element_size()


def _address(tensor: Tensor) -> object:
    """Return what the tensors that share a memory have in common."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse one has no storage of its own
        return id(tensor)


def _asks_for_elsewhere(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Tell whether a tensor is to be on another device than the processor."""
    asked = [options.get("device"), *(args[1:] if func is Tensor.to else ())]
    if func in FACTORIES and asked[0] is None and not _is_like_another(func):
        asked[0] = torch.get_default_device()
    devices = [torch.device(one) for one in asked if isinstance(one, (str, torch.device))]
    by_number = any(isinstance(one, int) and not isinstance(one, bool) for one in asked)
    return func is Tensor.cuda or by_number or any(device.type not in {"cpu", "meta"} for device in devices)


def _foreseen_bytes(func: Any, args: tuple[Any, ...], options: Mapping[str, Any], given: list[Tensor]) -> int:
    """Return the bytes of a function's result, as far as they can be told before it is there."""
    if func is torch.eye:  # on the meta device it needs the compiler
        sizes = [one for one in (*args, options.get("n"), options.get("m")) if isinstance(one, int)]
        return (
            prod(sizes * 2 if len(sizes) == 1 else sizes) * (options.get("dtype") or torch.get_default_dtype()).itemsize
        )
    if func in FACTORIES:
        if _is_meta(func, options, given) or options.get("layout", torch.strided) is not torch.strided:
            return 0
        drawn_apart = {name: value for name, value in options.items() if name not in {"generator", "pin_memory", "out"}}
        try:
            planned = func(*args, **{**drawn_apart, "device": "meta"})
        except (RuntimeError, TypeError, ValueError):  # it says so itself
            return 0
        return int(planned.numel() * planned.element_size())
    if func is Tensor.to_dense:
        return sum(one.numel() * one.element_size() for one in given)
    dense = [one for one in given if one.device.type != "meta" and one.layout is torch.strided and not one.is_nested]
    shapes = (reversed(tensor.shape) for tensor in dense)  # as they would be broadcast
    together = prod(max(sizes) for sizes in zip_longest(*shapes, fillvalue=1))
    return together * min((one.element_size() for one in dense), default=0)


def _is_meta(func: Any, options: Mapping[str, Any], given: list[Tensor]) -> bool:
    """Tell whether a factory's tensor takes no memory: on the device it names, its tensor's, or the default."""
    if options.get("device") is not None:
        return torch.device(options["device"]).type == "meta"
    return (given[0].device if _is_like_another(func) else torch.get_default_device()).type == "meta"


def _is_like_another(func: Any) -> bool:
    """Tell whether a factory makes tensors on the device of one that it is given."""
    return bool(func.__name__.startswith("new_"))
