"""List the functions that CUDA's autocast runs in float32, and its differences from the CPU's autocast.

The names are from torch's source: aten/src/ATen/autocast_mode.h for CUDA, autocast_mode.cpp for the CPU.
tests/runtime/test_cuda_autocast.py compares them with the header that is installed with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autosplit.torch_versions import NN_FUNCTIONS, has_autocast

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
