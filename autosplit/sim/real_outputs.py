"""Correct fake outputs whose memory differs from real outputs, and reject dtypes that real operators reject.

- oneDNN's LSTM layer stores a workspace for the backward, which torch's fake operator leaves empty. Only the library
  can compute its size, so the real operator runs once for each shape. In its backward, the gradients of the two biases
  are one fake tensor, but two real tensors (torch _meta_registrations.py, meta_mkldnn_rnn_layer;
  aten/src/ATen/native/mkldnn/RNN.cpp).
- Four losses allocate an output as large as their input and shrink it to one number. The memory stays allocated
  (aten/src/ATen/native/Loss.cpp and cuda/Loss.cu).
- The backward of CTC allocates a second table besides its gradient (aten/src/ATen/native/cuda/LossCTC.cu, `log_beta`).
  The trace frees the table with the gradient, a few operators too late.
- A product of two dtypes, for example with float64 from numpy, raises an error only with real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.torch_versions import FakeTensor, aten_ops, unset_fake_temporarily

_RNN_LAYER: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_RNN_LAYER_BACKWARD: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer_backward", None)
_WORKSPACE = 3
"""Index of the workspace among the layer's outputs."""
_SECOND_BIAS = 4
"""Index of the second bias's gradient among the backward's outputs."""


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_CTC_BACKWARD = aten_ops("_ctc_loss_backward")
_KEEPING_LOSSES = {_aten.mse_loss, _aten.smooth_l1_loss, _aten.binary_cross_entropy, _aten.soft_margin_loss}


def as_real(func: Any, args: Sequence[Any], outputs: Any, *, like_gpu: bool = False) -> Any:
    """Return an operator's outputs with the memory of real outputs. Only fake outputs of a few operators change.

    Args:
        like_gpu: Return the outputs of a GPU instead of the CPU.

    Raises:
        RuntimeError: The operator multiplies matrices of different dtypes. The message is torch's.
    """
    packet = getattr(func, "overloadpacket", None)
    if like_gpu and packet is _aten.log_sigmoid_forward and isinstance(outputs[0], FakeTensor):
        return outputs[0], outputs[1].new_empty(0)  # only the CPU has the buffer (cuda/ActivationLogSigmoidKernel.cu)
    if func in _PRODUCTS and args[-1].dtype != args[-2].dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {args[-2].dtype} and {args[-1].dtype}")
    if packet in _KEEPING_LOSSES and isinstance(outputs, FakeTensor) and outputs.dim() == 0:
        return outputs.new_empty(args[0].numel()).as_strided((), ())
    if packet in _CTC_BACKWARD and isinstance(outputs, FakeTensor):
        log_alpha: Tensor = args[6]
        return outputs.new_empty(outputs.numel() + log_alpha.numel()).as_strided(outputs.shape, outputs.stride())
    if packet is None or packet not in (_RNN_LAYER, _RNN_LAYER_BACKWARD) or not isinstance(outputs[0], FakeTensor):
        return outputs
    real = list(outputs)
    if packet is _RNN_LAYER_BACKWARD:
        real[_SECOND_BIAS] = real[_SECOND_BIAS].clone()
    elif torch.is_grad_enabled():  # without gradients, the layer stores no workspace
        hashable = (("list", tuple(arg)) if isinstance(arg, (list, tuple)) else arg for arg in args)
        given = tuple((tuple(arg.shape), arg.dtype) if isinstance(arg, Tensor) else arg for arg in hashable)
        real[_WORKSPACE] = real[_WORKSPACE].new_empty(_rnn_workspace_bytes(given))
    return tuple(real)


@functools.lru_cache(maxsize=256)
def _rnn_workspace_bytes(given: tuple[Any, ...]) -> int:
    with unset_fake_temporarily(), torch.enable_grad():
        outputs = _RNN_LAYER.default(*map(_real, given))
        return int(outputs[_WORKSPACE].untyped_storage().nbytes())


def _real(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, rest = value
    return list(rest) if kind == "list" else torch.zeros(kind, dtype=rest)
