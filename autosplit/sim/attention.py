"""Run the attention operator that torch's CUDA back end would choose, on fake CPU tensors.

torch has four back ends for `scaled_dot_product_attention`. The fused back ends save one number per row of scores for
the backward, and the math back end saves all scores. The choice depends on compute capability, dtypes, head sizes,
masks (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) and torch's version.

Tests compare `chosen_backend` with torch's own choices in benchmarks/results/kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.torch_versions import cudnn_attention_rules

aten = torch.ops.aten

Backend = Literal["cudnn", "flash", "efficient", "math"]

HALVES = (torch.float16, torch.bfloat16)

_FLASH_ALIGNMENT = 8
"""Flash attention pads head sizes to a multiple of this number (attention.cpp, `pad_last_dim`)."""

_CUDNN_UNEQUAL = (192, 128)
"""Head sizes above 128 that cuDNN supports on compute capability 10 (`check_cudnn_tensor_shapes`)."""

_MASK_ALIGNMENT = 16
"""The memory-efficient back end pads mask rows to a multiple of this number (attention.cpp, `preprocess_mask`)."""


@dataclass(frozen=True)
class AttentionCall:
    """The properties of an attention call that decide the back end.

    Attributes:
        query: Shape (batch, heads, length, head size), as for `key` and `value`.
        trains_mask: Whether the mask needs a gradient.
        is_grouped: Whether `enable_gqa` was set.
        is_dense: Whether query, key, value and mask are contiguous in their last dimension.
        allowed: The fused back ends that the user has not disabled, see `allowed_backends`.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[int, ...] | None
    trains_mask: bool
    dropout: float
    is_causal: bool
    is_grouped: bool
    needs_grad: bool
    is_dense: bool
    allowed: frozenset[Backend]

    @classmethod
    def of(
        cls, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout: float, *, causal: bool, grouped: bool
    ) -> AttentionCall:
        """Return the properties of a call with these arguments."""
        given = (*inputs, mask) if mask is not None else inputs
        query, key, value = (tuple(one.shape) for one in inputs)
        return cls(
            query,
            key,
            value,
            inputs[0].dtype,
            None if mask is None else tuple(mask.shape),
            mask is not None and mask.requires_grad,
            dropout,
            causal,
            grouped,
            torch.is_grad_enabled() and any(one.requires_grad for one in inputs),
            all(one.stride(-1) == 1 for one in given),
            allowed_backends(),
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of heads of query, key and value."""
        return self.query[1], self.key[1], self.value[1]

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Head size of query and key, and of value."""
        return self.query[-1], self.value[-1]


def allowed_backends() -> frozenset[Backend]:
    """Return the fused back ends that the user has not disabled, for example with `torch.nn.attention.sdpa_kernel`."""
    cuda = torch.backends.cuda
    switches: dict[Backend, Any] = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
    }
    return frozenset(name for name, is_on in switches.items() if is_on())


def chosen_backend(call: AttentionCall, kernels: GpuKernels) -> Backend:
    """Return the back end that torch chooses on a GPU."""
    if not (len(call.query) == len(call.key) == len(call.value) == 4) or not call.is_dense:
        return "math"
    if call.query[0] != call.key[0] or 0 in (*call.query, *call.key):
        return "math"
    prefers_cudnn = kernels.capability // 10 in (9, 10)
    if "cudnn" in call.allowed and prefers_cudnn and _takes_cudnn(call, kernels):
        return "cudnn"
    if "flash" in call.allowed and _takes_flash(call, kernels):
        return "flash"
    return "efficient" if "efficient" in call.allowed and _takes_efficient(call, kernels) else "math"


def _takes_half(call: AttentionCall, kernels: GpuKernels) -> bool:
    return call.dtype in (HALVES if kernels.capability >= 80 else (torch.float16,))


def _takes_groups(call: AttentionCall) -> bool:
    queries, keys, values = call.heads
    return keys == values and (queries == keys or (call.is_grouped and queries % keys == 0))


def _takes_cudnn(call: AttentionCall, kernels: GpuKernels) -> bool:
    rules = cudnn_attention_rules()
    size, value_size = call.head_sizes
    most = rules.head_size if kernels.capability == 90 else 128
    return (
        rules.is_preferred
        and _takes_half(call, kernels)
        and _takes_groups(call)
        and not call.trains_mask
        and (call.mask is None or len(call.mask) in (2, 4))
        and size % 8 == value_size % 8 == 0
        and (max(size, value_size) <= most or (size, value_size) == _CUDNN_UNEQUAL)
        and call.key[2] > 1
        and (not call.dropout or call.query[2] > 1)
        and (rules.takes_any_dropout or (call.dropout * 16).is_integer())
    )


def _takes_flash(call: AttentionCall, kernels: GpuKernels) -> bool:
    size, value_size = call.head_sizes
    if call.needs_grad and (86 <= kernels.capability <= 89 or kernels.capability >= 120):
        # The backward for other sizes needs more shared memory than these GPUs have.
        fits = size <= 192 or (size > 224 and not call.dropout)
    else:
        fits = True
    return (
        fits
        and kernels.capability >= 80
        and _takes_half(call, kernels)
        and _takes_groups(call)
        and call.mask is None
        and size == value_size <= 256
        and not (call.is_causal and call.query[2] != call.key[2])
    )


def _takes_efficient(call: AttentionCall, kernels: GpuKernels) -> bool:
    queries, keys, values = call.heads
    half = call.dtype in HALVES
    alignment = 8 if half and kernels.capability >= 70 else 4 if kernels.capability >= 80 else 1
    return (
        queries == keys == values
        and (_takes_half(call, kernels) or call.dtype is torch.float32)
        and all(size % alignment == 0 for size in call.head_sizes)
    )


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    call: AttentionCall,
    backend: Backend,
    scale: float | None,
) -> Tensor:
    """Run a back end's operator as attention.cpp does, on fakes of shape (batch, heads, length, head size).

    Args:
        inputs: Query, key and value.
        scale: The factor of the scores, or None for `1 / sqrt(head size)`.
    """
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=call.dtype).masked_fill_(mask.logical_not(), -math.inf)
    if backend == "flash":
        return _flash(inputs, call, scale)
    if backend == "math" and call.dropout:
        return _math_with_dropout(inputs, mask, call, scale)
    saves_logsumexp = call.needs_grad or call.trains_mask
    if backend == "cudnn":
        settings: tuple[Any, ...] = (mask, saves_logsumexp, call.dropout, call.is_causal, False)
        return _output("_scaled_dot_product_cudnn_attention", *inputs, *settings, scale=scale)
    if backend == "efficient":
        settings = (_expanded(mask, call), saves_logsumexp, call.dropout, call.is_causal)
        return _output("_scaled_dot_product_efficient_attention", *inputs, *settings, scale=scale)
    settings = (mask, 0.0, call.is_causal, None)
    named = {"scale": scale, "enable_gqa": call.is_grouped}
    return _output("_scaled_dot_product_attention_math", *inputs, *settings, **named)


def _output(operator: str, *args: Any, **kwargs: Any) -> Tensor:
    outputs: Any = getattr(aten, operator)(*args, **kwargs)
    found: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return found


def _flash(inputs: tuple[Tensor, Tensor, Tensor], call: AttentionCall, scale: float | None) -> Tensor:
    size = call.head_sizes[0]
    missing = -size % _FLASH_ALIGNMENT
    padded = [F.pad(one, (0, missing)) for one in inputs] if missing else inputs
    settings = (call.dropout, call.is_causal, False)
    found = _output("_scaled_dot_product_flash_attention", *padded, *settings, scale=scale or size**-0.5)
    return found[..., :size] if missing else found


def _expanded(mask: Tensor | None, call: AttentionCall) -> Tensor | None:
    """Return a mask as the memory-efficient operator needs it: the shape of the scores, with aligned rows."""
    if mask is None:
        return None
    length = mask.shape[-1]
    if length % _MASK_ALIGNMENT:
        mask = F.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*call.query[:3], call.key[2])


def _math_with_dropout(
    inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, call: AttentionCall, scale: float | None
) -> Tensor:
    query, key, value = (one.float() if call.dtype in HALVES else one for one in inputs)
    root = math.sqrt(scale or call.query[-1] ** -0.5)
    if call.is_causal:
        allowed = torch.ones(call.query[-2], call.key[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(allowed.logical_not(), -math.inf)
    # torch keeps every tensor that has a separate name here until the end.
    keys, values = key, value
    if call.is_grouped:
        keys, values = (one.repeat_interleave(call.query[-3] // one.shape[-3], -3) for one in (key, value))
    scaled = query * root
    scores = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    # Reuse one name: torch frees each of these tensors as soon as the next tensor exists.
    scores = _output("_safe_softmax", scores, -1)
    scores = torch.native_dropout(scores, call.dropout, True)[0]
    weights = scores.to(call.dtype)  # torch's operator also returns the weights, and computes them first
    output = (scores @ values).to(call.dtype)
    del weights
    return output
