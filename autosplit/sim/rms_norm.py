"""Define CUDA's fused RMS norm as an operator for fake tensors, because torch has it only for real GPUs.

On the CPU, `aten._fused_rms_norm` consists of eight operators and saves three float32 tensors for the backward. CUDA's
operator saves its input and one number per row (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autosplit.torch_versions import aten_ops

_LIBRARY = torch.library.Library("autosplit", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor values, int num_dims, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor values, Tensor scale, Tensor? weight) -> (Tensor, Tensor?)")

RMS_NORM = torch.ops.autosplit.rms_norm
RMS_NORM_BACKWARD = torch.ops.autosplit.rms_norm_backward


@functools.cache
def has_fused_rms_norm() -> bool:
    """Return whether this torch has a fused RMS norm for CUDA, as torch 2.8 and later."""
    return bool(aten_ops("_fused_rms_norm"))


def rms_norm(values: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
    """Normalise fake values over their last `num_dims` dimensions as CUDA does.

    `weight` has the shape of these dimensions and the dtype of `values`.
    """
    outputs: tuple[Tensor, Tensor] = RMS_NORM(values, num_dims, weight)
    return outputs[0]


def _fake(values: Tensor, num_dims: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001  # the operator's
    rows = values.shape[: values.dim() - num_dims]
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    return values.new_empty(values.shape), values.new_empty((*rows, *[1] * num_dims), dtype=dtype)


def _fake_backward(
    grad: Tensor,  # noqa: ARG001  # the operator's
    values: Tensor,
    scale: Tensor,  # noqa: ARG001  # the operator's
    weight: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    return values.new_empty(values.shape), None if weight is None else torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, _, weight = inputs
    ctx.save_for_backward(values, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, Tensor | None]:
    values, scale, weight = ctx.saved_tensors
    grad_values, grad_weight = RMS_NORM_BACKWARD(grad, values, scale, weight)
    return grad_values, None, grad_weight


torch.library.register_fake("autosplit::rms_norm", _fake, lib=_LIBRARY)
torch.library.register_fake("autosplit::rms_norm_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("autosplit::rms_norm", _backward, setup_context=_setup_context, lib=_LIBRARY)
