"""Run torch's functions on the CPU as CUDA would run them.

CUDA has its own attention, fused dropout, normalisation and autocast lists. Memory and time of a simulated GPU depend
on them. `CudaFunctions` intercepts torch's functions above autograd and calls CUDA's operators on fake CPU tensors. For
real tensors, it replaces a function only if the CPU has the same operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autosplit.sim.attention import HALVES, AttentionCall, Backend, attend, chosen_backend
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.rms_norm import has_fused_rms_norm, rms_norm
from autosplit.torch_versions import NN_FUNCTIONS, FakeTensor, aten_ops, has_autocast

# ---------------------------------------------------------------------------------------------------- autocast's lists
#
# The names are from torch's source: aten/src/ATen/autocast_mode.h for CUDA, autocast_mode.cpp for the CPU.
# tests/runtime/test_cuda_functions.py compares them with the header that is installed with torch.

_PLACES: tuple[Any, ...] = (torch, F, Tensor, NN_FUNCTIONS, torch.linalg)


def _words(text: str) -> list[str]:
    return text.split()


FLOAT32_NAMES = frozenset(
    _words(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
        "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
        "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
        "mse_loss "
        "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
        "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
        "upsample_nearest1d _upsample_nearest_exact1d "
        "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
    )
)
"""Operators whose inputs CUDA casts to float32 (AT_FORALL_FP32)."""

FLOAT32_RESULT_NAMES = frozenset(
    _words("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum")
)
"""Operators that CUDA gives the argument `dtype=torch.float32` (AT_FORALL_FP32_SET_OPT_DTYPE)."""

_OTHER_NAMES = {
    "pow": "__pow__ __rpow__",
    "nll_loss": "nll_loss_nd",
    "linalg_vector_norm": "vector_norm",
    "linalg_matrix_norm": "matrix_norm",
    "index_put": "index_put_",
    "scatter_add": "scatter_add_",
}
"""Python's names of operators if they differ from the names in torch's source."""

LOWER_NAMES = frozenset(_words("addmv addr chain_matmul einsum linalg_multi_dot mv"))
"""Operators that only CUDA's autocast casts to the autocast dtype (AT_FORALL_LOWER_PRECISION_FP).

Recurrent cells are missing here, because a GPU runs them as fused kernels. See `recurrent_calls`.
"""

PROMOTED_NAMES = frozenset(
    _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
)
"""Operators that CUDA runs in the widest dtype of their inputs (AT_FORALL_PROMOTE)."""

_CPU_ONLY_NAMES = frozenset(
    _words(
        "avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d "
        "fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d "
        "replication_pad2d replication_pad3d pad quantile nanquantile"
    )
)
"""Operators that the CPU's autocast runs in float32 and CUDA's does not change."""


def _functions(names: frozenset[str]) -> frozenset[Callable[..., Any]]:
    present = [name for name in names if name != "rms_norm" or has_autocast("rms_norm")]
    wanted = [*present, *(other for name in present for other in _OTHER_NAMES.get(name, "").split())]
    found = (getattr(place, name, None) for place in _PLACES for name in wanted)
    return frozenset(one for one in found if callable(one))


FLOAT32 = _functions(FLOAT32_NAMES)
FLOAT32_RESULT = _functions(FLOAT32_RESULT_NAMES)
LOWER = _functions(LOWER_NAMES)
PROMOTED = _functions(PROMOTED_NAMES | _CPU_ONLY_NAMES)
"""Functions that run without the CPU's autocast, in the widest dtype of their inputs."""


# ---------------------------------------------------------------------------------------------------------- the mode


class CudaFunctions(TorchFunctionMode):
    """Replace functions that run other operators on CUDA than on the CPU.

    Attributes:
        needed: Whether a function was replaced. Otherwise the caller can omit the mode, which is faster.
        calls: The attention calls with their back ends.
    """

    def __init__(self, kernels: GpuKernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.needed = False
        self.calls: dict[AttentionCall, Backend] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        body = _body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            found = replacement(self, *args, **kwargs)
            if found is not None:
                self.needed = True
                return found
        if torch.is_autocast_enabled("cpu"):
            return self._autocast(func, args, kwargs)
        return func(*args, **kwargs)

    def _autocast(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in FLOAT32:
            cast: Callable[[Any], Any] = _as_float32
        elif func in FLOAT32_RESULT:
            return self._with_float32_result(func, args, kwargs)
        elif func in LOWER:
            cast = functools.partial(_as_lower, dtype=torch.get_autocast_dtype("cpu"))
        elif func in PROMOTED and any(map(_stands_in, (*args, *kwargs.values()))):
            dtypes = {one.dtype for one in _tensors((*args, *kwargs.values()))}
            cast = _as_float32 if torch.float32 in dtypes else lambda value: value
        else:
            return func(*args, **kwargs)
        self.needed = True
        with _without_autocast():
            return func(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    def _with_float32_result(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = args[0] if args else kwargs.get("input")
        has_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
        if has_dtype or not isinstance(values, Tensor) or values.dtype not in HALVES:
            return func(*args, **kwargs)
        self.needed = True
        with _without_autocast():
            return func(*args, **(kwargs | {"dtype": torch.float32}))

    def again(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function from a replacement, with this mode active. torch disables a mode while its handler runs."""
        with self:
            return func(*args, **kwargs)


def _stands_in(value: Any) -> bool:
    """Return whether a tensor is a fake CPU tensor, which represents a CUDA tensor."""
    return isinstance(value, FakeTensor) and value.device.type == "cpu"


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _as_float32(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_float32, value))
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _as_lower(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_as_lower(one, dtype) for one in value)
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if is_cast else value


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable the CPU's autocast inside the `with` block, as CUDA's autocast is off while it runs a listed operator."""
    enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)


# ------------------------------------------------------------------------------------- Python functions of torch

_MODULES = frozenset({"torch.nn.functional", "torch.functional"})
_METHODS: frozenset[Any] = frozenset({Tensor.backward, Tensor.norm, torch.autograd.backward, torch.autograd.grad})


def _never(*_: Any, **__: Any) -> bool:
    return False


@functools.cache
def _body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that can run with the mode on, or None for any other function.

    torch disables the mode while the mode handles a function. So the mode misses functions that the body calls: the
    attention inside multi-head attention, or a checkpoint's recomputation during `backward`. A function detects modes
    with `has_torch_function` and its variants, which return False in the copy.
    """
    if not isinstance(func, FunctionType) or not (func in _METHODS or func.__globals__.get("__name__") in _MODULES):
        return None
    asks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    if not asks:  # another function checks instead: `torch.meshgrid` calls `_meshgrid`
        return None
    names = {**func.__globals__, **dict.fromkeys(asks, _never)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# ------------------------------------------------------------------------------------------ functions that differ


def _attention(
    mode: CudaFunctions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Run attention with the back end that CUDA would choose.

    Real CPU tensors are not replaced, because the CPU has no such kernels. For fakes on a GPU, torch chooses the back
    end, and this function only records it.
    """
    device_type = query.device.type
    if not isinstance(query, FakeTensor) or device_type not in ("cpu", "cuda"):
        return None
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value, attn_mask = (_as_lower(one, dtype) for one in (query, key, value, attn_mask))
    with _without_autocast():
        inputs = query, key, value
        call = AttentionCall.of(inputs, attn_mask, dropout_p, causal=is_causal, grouped=enable_gqa)
        mode.calls[call] = backend = chosen_backend(call, mode.kernels)
        return attend(inputs, attn_mask, call, backend, scale) if device_type == "cpu" else None


def _dropout(mode: CudaFunctions, input: Tensor, p: float, train: bool) -> Tensor | None:  # noqa: ARG001, A002  # torch's
    """Run dropout as one kernel that stores one byte per value (aten/src/ATen/native/Dropout.cpp)."""
    return torch.native_dropout(input, p, True)[0] if train and 0.0 < p < 1.0 else None


def _softmax(
    mode: CudaFunctions,  # noqa: ARG001  # as all replacements
    input: Tensor,  # noqa: A002  # torch's name
    dim: Any,
    dtype: torch.dtype | None = None,
    *,
    kernel: Any,
) -> Tensor | None:
    """Run the kernel that reads float16 and writes float32 (aten/src/ATen/native/SoftMax.cpp)."""
    result = torch.float32 if dtype is None and torch.is_autocast_enabled("cpu") else dtype
    if not _stands_in(input) or input.dtype is not torch.float16 or result is not torch.float32:
        return None
    found: Tensor = kernel(input, dim, True)
    return found


def _group_norm(mode: CudaFunctions, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # torch's name
    """Copy a channels-last image first, because CUDA's kernel does not accept that layout (native/group_norm.cpp)."""
    if input.is_contiguous() or input.device.type != "cpu":
        return None
    given = _as_float32(input) if torch.is_autocast_enabled("cpu") else input
    return mode.again(torch.group_norm, given.contiguous(), *args, **kwargs)


def _rms_norm(
    mode: CudaFunctions,  # noqa: ARG001  # as all replacements
    input: Tensor,  # noqa: A002  # torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001  # does not affect memory and time
) -> Tensor | None:
    """Run the fused kernel, which needs a weight of the input's dtype (aten/src/ATen/native/layer_norm.cpp)."""
    if not has_fused_rms_norm() or not _stands_in(input):
        return None
    if torch.is_autocast_enabled("cpu") and torch.rms_norm in FLOAT32:
        input, weight = _as_float32(input), _as_float32(weight)  # noqa: A001  # torch's name
    if weight is not None and weight.dtype != input.dtype:
        return None
    with _without_autocast():
        return rms_norm(input, len(normalized_shape), weight)


def _cross_entropy(
    mode: CudaFunctions,
    input: Tensor,  # noqa: A002  # torch's name
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss of half-precision inputs as CUDA's autocast does.

    That is log_softmax in half precision, then a loss in float32 (native/LossNLL.cpp).

    The CPU's autocast casts the logits, which doubles their memory.
    """
    if not torch.is_autocast_enabled("cpu") or input.dtype not in HALVES:
        return None
    return mode.again(_cross_entropy_of_halves, input, target, weight, reduction, ignore_index, label_smoothing)


def _cross_entropy_of_halves(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, smoothing: float
) -> Tensor:
    classes = 0 if logits.dim() == 1 else 1
    num_classes = logits.shape[classes]
    scores = torch.log_softmax(logits, classes, dtype=logits.dtype)
    sides = [1] * logits.dim()
    sides[classes] = -1
    weighted = scores if weight is None else scores * weight.view(sides)
    if target.shape == logits.shape:
        if smoothing:
            target = target * (1 - smoothing) + smoothing / num_classes
        return _reduced(-(weighted * target).sum(classes), reduction, logits.numel() / num_classes)
    loss: Tensor = NN_FUNCTIONS.nll_loss_nd(scores, target, weight, reduction, ignore_index)
    if not smoothing:
        return loss
    smooth = (-weighted.sum(classes)).masked_fill(target == ignore_index, 0.0)
    smooth = _reduced(smooth, reduction, (target != ignore_index).sum())
    return (1 - smoothing) * loss + smooth * (smoothing / num_classes)


def _reduced(losses: Tensor, reduction: int, count: Tensor | float) -> Tensor:
    if reduction == 0:
        return losses
    return losses.sum() if reduction == 2 else losses.sum() / count


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    torch.dropout: _dropout,
    torch.group_norm: _group_norm,
    torch.rms_norm: _rms_norm,
    getattr(NN_FUNCTIONS, "cross_entropy_loss", F.cross_entropy): _cross_entropy,
}
"""Replacement functions. They return None if CUDA runs the same operator as the CPU."""

_REPLACEMENTS |= {
    getattr(place, name): functools.partial(_softmax, kernel=kernel)
    for name in ("softmax", "log_softmax")
    for kernel in aten_ops(f"_{name}")
    for place in (torch, Tensor)
}
