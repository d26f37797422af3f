"""The lists of CUDA's autocast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autosplit.runtime import cuda_autocast
from autosplit.torch_versions import has_autocast

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

LISTS = {
    "AT_FORALL_FP32": cuda_autocast.FLOAT32_NAMES,
    "AT_FORALL_FP32_SET_OPT_DTYPE": cuda_autocast.FLOAT32_RESULT_NAMES,
    "AT_FORALL_PROMOTE": cuda_autocast.PROMOTED_NAMES,
}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch was installed without its headers")
@pytest.mark.parametrize("macro", LISTS)
def test_the_names_are_those_of_torchs_header(macro):
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(rf"#define {macro}\(_\)(.*)", text)
    if found is None:
        pytest.skip(f"the header of torch {torch.__version__} has no list {macro}")
    names = set(re.findall(r"_\((\w+)[,)]", found[1]))
    assert names
    ours = {name for name in LISTS[macro] if name != "rms_norm" or has_autocast("rms_norm")}
    assert names == ours


def test_functions_are_found_in_every_module_that_has_them():
    assert {torch.exp, torch.Tensor.exp, torch.logsumexp} <= cuda_autocast.FLOAT32
    assert {torch.sum, torch.Tensor.sum, torch.linalg.vector_norm} <= cuda_autocast.FLOAT32_RESULT
    assert torch.nn.functional.gelu not in cuda_autocast.FLOAT32
