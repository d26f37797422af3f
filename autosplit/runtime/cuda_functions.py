"""Run torch's functions on the processor as CUDA runs them: under its autocast, and its dropout.

What a simulated card holds and does depends on it. Autocast runs fewer ops in float32 on the processor: a layer norm in
float32 keeps four bytes of each value, and the next product casts them back. Dropout is one kernel on a GPU, which
keeps a byte of each value; on the processor it is three, which keep a number (aten/src/ATen/native/Dropout.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autosplit.torch_versions import FakeTensor, aten_ops

# "CUDA Ops that can autocast to float32" of torch's documentation (torch.amp), without those that training loops lack.
_NAMES = (
    "cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist exp expm1 group_norm "
    "hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss "
    "multi_margin_loss "
    "multilabel_margin_loss nll_loss norm poisson_nll_loss pow prod reciprocal rsqrt smooth_l1_loss soft_margin_loss "
    "softmax softmin softplus sum __pow__ __rpow__ triplet_margin_loss"
)
_FLOAT32 = {
    getattr(place, name)
    for place in (torch, F, Tensor)
    for name in _NAMES.split()
    if callable(getattr(place, name, None))
}

_HALVES = (torch.float16, torch.bfloat16)

_SOFTMAX = {
    getattr(place, name): kernel
    for name in ("softmax", "log_softmax")
    for kernel in aten_ops(f"_{name}")
    for place in (torch, F, Tensor)
}
"""Functions whose kernels on GPUs read halves and write float32, and those kernels."""


class CudaFunctions(TorchFunctionMode):
    """Run in float32, inside autocast, what CUDA's autocast runs in it, and dropout as one kernel.

    Attributes:
        needed: There was something that the processor does otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function as CUDA would."""
        kwargs = dict(kwargs or {})
        # F.dropout gives all but the values by name.
        if func is F.dropout and kwargs["training"] and not kwargs["inplace"] and 0.0 < kwargs["p"] < 1.0:
            self.needed = True
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if func in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            self.needed = True
            found = _softmax(_SOFTMAX[func], args, kwargs) if func in _SOFTMAX else None
            if found is not None:
                return found
            args = tuple(map(_as_float32, args))
            kwargs = {name: _as_float32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _softmax(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what GPUs' kernel returns of a fake half; None of anything else: the processor has no such kernel."""
    values = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    is_half = isinstance(values, FakeTensor) and values.dtype in _HALVES
    if not is_half or not isinstance(dim, int) or kwargs.get("dtype", torch.float32) not in (None, torch.float32):
        return None
    found: Tensor = kernel(values, dim, True)
    return found
