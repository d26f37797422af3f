"""Compute the fake outputs of an operator once for each shape of its inputs.

Note [Fake results]
~~~~~~~~~~~~~~~~~~~
A model repeats few operators with few shapes, but FakeTensorMode takes 0.2 ms for each call, also for a repeated one.
So the outputs are made from the shapes of an earlier call:

    mul(x, p)      (8, 64), (64,)  ->  a new tensor of (8, 64)
    view(x, ...)   (8, 64)         ->  a tensor of (512,) in the memory of x
    add_(x, y)     (8, 64) twice   ->  x

An operator is repeated only if the earlier outputs had exactly one of these forms. Operators whose outputs depend on
values always run, as do calls with real, sparse or constant tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autosplit.devices.transfer import TRANSFER_OP
from autosplit.runtime.tensor_parts import key_of
from autosplit.sim.data_dependent import OPERATORS, READS
from autosplit.torch_versions import (
    FakeTensor,
    another_fake,
    aten_ops,
    new_fake,
    unset_fake_temporarily,
    without_torch_functions,
)

_PLAIN = frozenset({
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
})  # fmt: skip

_VARYING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

MOST_KNOWN = 2**16
"""Maximum number of known calls."""

_ALWAYS_RUN = OPERATORS.keys() | READS | aten_ops("_unsafe_view index lift lift_fresh lift_fresh_copy")


class _UnknownError(Exception):
    """An argument has a property that the outputs may depend on, and that a key does not contain."""


@dataclass(frozen=True)
class _Output:
    """The shape of a new tensor, or of a view of the operator's only tensor, and the attributes of a fake tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_view: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class KnownCall:
    """A call whose outputs are known.

    Attributes:
        outputs: Empty if the operator returns its first argument.
        facts: What an observer has found out about the call.
    """

    outputs: tuple[_Output | None, ...]
    is_tuple: bool
    facts: dict[Any, Any] = field(default_factory=dict, compare=False)


class FakeResults:
    """Outputs of the operators that ran, by their arguments. See Note [Fake results]."""

    def __init__(self) -> None:
        self._known: dict[Any, KnownCall | None] = {}

    def repeated(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> tuple[Any, KnownCall | None, Any]:
        """Return a key of all that the outputs depend on, and the known call with its outputs, each or None."""
        mode = getattr(inputs[0], "fake_mode", None) if inputs and _is_repeatable(func) else None
        if mode is None or any(getattr(tensor, "fake_mode", None) is not mode for tensor in inputs):
            return None, None, None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        with without_torch_functions():
            try:
                described = _described(args), *((name, _described(value)) for name, value in kwargs.items())
            except _UnknownError:
                return None, None, None
            key = func, described, mode, modes
            known = self._known.get(key)
            if known is None:
                return key, None, None
            if not known.outputs:
                return key, known, args[0]
            made = tuple(None if one is None else _made(one, inputs[0]) for one in known.outputs)
            return key, known, made if known.is_tuple else made[0]

    def note(self, key: Any, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Any) -> None:
        """Store the outputs of a call that ran, if `outputs` can make the same outputs again."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        if key not in self._known:
            try:
                self._known[key] = _noted(key, args, inputs, outputs)
            except _UnknownError:
                self._known[key] = None


@functools.cache
def _is_repeatable(func: Any) -> bool:
    is_known = func.namespace == "aten" or func is TRANSFER_OP
    return is_known and func.overloadpacket not in _ALWAYS_RUN and not any(tag in func.tags for tag in _VARYING_TAGS)


def _described(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.layout is not torch.strided or value.constant is not None or value.is_conj() or value.is_neg():
            raise _UnknownError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
    if kind in _PLAIN:
        return kind, value  # 1 and 1.0 are equal, but give different dtypes
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    raise _UnknownError


def _noted(key: Any, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Any) -> KnownCall | None:
    """Return how to make an operator's outputs again, or None if they are not one of the forms in the note."""
    if args and outputs is args[0]:
        return KnownCall((), False) if _described(args) == key[1][0] else None
    func, made = key[0], outputs if type(outputs) is tuple else (outputs,)
    found = [None if one is None else _output(func, one, inputs) for one in made]
    keys = [key_of(one) for one in made if isinstance(one, Tensor)]
    if not any(found) or len(set(keys)) < len(keys):
        return None
    return KnownCall(tuple(found), type(outputs) is tuple)


def _output(func: Any, tensor: Any, inputs: Sequence[Tensor]) -> _Output:
    if type(tensor) is not FakeTensor:
        raise _UnknownError
    shape, stride, offset, dtype, device, requires_grad = _described(tensor)
    shares = key_of(tensor) in map(key_of, inputs)
    if requires_grad or (shares and (not func.is_view or len(inputs) > 1)):
        raise _UnknownError
    similar = new_fake((), (), dtype, device, tensor.fake_mode)
    found = _Output(shape, stride, dtype, offset, shares, vars(similar))
    again = _made(found, inputs[0])
    if _described(again) != _described(tensor) or again.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
        raise _UnknownError
    return found


def _made(output: _Output, source: Tensor) -> Tensor:
    with unset_fake_temporarily():
        memory = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        if output.is_view:
            memory.set_(source.untyped_storage(), output.offset, output.shape, output.stride)
        return another_fake(memory, output.attributes)
