"""Make transformers build the same attention masks for fake tensors as for real tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def masks_of_real_tensors(sample_batch: Any) -> Iterator[None]:
    """Make transformers skip its search for packed sequences in fake tensors, unless the sample batch has some.

    The search reads `position_ids` (`masking_utils.find_packed_sequence_indices`). Because fake tensors have no values,
    it would always build a mask of (batch, 1, length, length), which rules out flash attention.
    """
    module = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    given = sample_batch.get("position_ids") if isinstance(sample_batch, Mapping) else None
    if module is None or find is None or (isinstance(given, Tensor) and find(given) is not None):
        yield
        return
    module.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]  # noqa: ARG005
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find  # type: ignore[attr-defined]
