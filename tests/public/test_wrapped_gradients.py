"""A wrapped model trains like the plain model: the same outputs and gradients at every split."""

from __future__ import annotations

import pytest
import torch
from balanced_models import MODELS, RUNS, SPLITS, TOLERANCE, assert_trains_like_plain


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", RUNS)
def test_outputs_and_gradients_are_those_of_one_device(run, name, split, dtype):
    torch.set_default_dtype(dtype)
    with RUNS[run]():
        assert_trains_like_plain(name, split, dtype)
