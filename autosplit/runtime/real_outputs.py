"""Differences of real ops from fake ones: the memory of an LSTM layer's outputs and of four losses, a refused dtype.

The layer's workspace for the backward has a size that only the library knows, and torch's fake op returns an empty
one: a traced LSTM's memory would be several times too small. So the real op is asked once for each shape. In its
backward the two biases' gradients are one tensor where it is fake, and two where it is real (torch
_meta_registrations.py, meta_mkldnn_rnn_layer; aten/src/ATen/native/mkldnn/RNN.cpp).

The losses make what they return as large as their input, and then a number of it, which keeps the memory of all
elements for as long as it lives (aten/src/ATen/native/Loss.cpp and cuda/Loss.cu).

A product of unlike dtypes, of float64 that came from numpy for instance, is an error of real ops alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.torch_versions import FakeTensor, unset_fake_temporarily

_RNN_LAYER: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_RNN_LAYER_BACKWARD: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer_backward", None)
_WORKSPACE = 3
"""Index of the workspace among the layer's outputs."""
_SECOND_BIAS = 4
"""Index of the second bias's gradient among the backward's outputs."""


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_KEEPING_LOSSES = {_aten.mse_loss, _aten.smooth_l1_loss, _aten.binary_cross_entropy, _aten.soft_margin_loss}


def as_real(func: Any, args: Sequence[Any], outputs: Any) -> Any:
    """Return an op's outputs with the memory of real ones; only fake outputs of these ops are replaced.

    Raises:
        RuntimeError: Torch's own, of a product of unlike dtypes.
    """
    packet = getattr(func, "overloadpacket", None)
    if func in _PRODUCTS and args[-1].dtype != args[-2].dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {args[-2].dtype} and {args[-1].dtype}")
    if packet in _KEEPING_LOSSES and isinstance(outputs, FakeTensor) and outputs.dim() == 0:
        return outputs.new_empty(args[0].numel()).as_strided((), ())
    if packet is None or packet not in (_RNN_LAYER, _RNN_LAYER_BACKWARD) or not isinstance(outputs[0], FakeTensor):
        return outputs
    real = list(outputs)
    if packet is _RNN_LAYER_BACKWARD:
        real[_SECOND_BIAS] = real[_SECOND_BIAS].clone()
    elif torch.is_grad_enabled():  # it keeps nothing otherwise
        hashable = (("list", tuple(arg)) if isinstance(arg, (list, tuple)) else arg for arg in args)
        given = tuple((tuple(arg.shape), arg.dtype) if isinstance(arg, Tensor) else arg for arg in hashable)
        real[_WORKSPACE] = real[_WORKSPACE].new_empty(_rnn_workspace_bytes(given))
    return tuple(real)


@functools.lru_cache(maxsize=256)
def _rnn_workspace_bytes(given: tuple[Any, ...]) -> int:
    """Run the layer on zeros of those shapes, and return the size of its workspace."""
    with unset_fake_temporarily(), torch.enable_grad():
        outputs = _RNN_LAYER.default(*map(_real, given))
        return int(outputs[_WORKSPACE].untyped_storage().nbytes())


def _real(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, rest = value
    return list(rest) if kind == "list" else torch.zeros(kind, dtype=rest)
