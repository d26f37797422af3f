"""`sim:` allocates and saves the tensors that CUDA's operators do, and predicts the same compute time.

CUDA's numbers are committed (`python benchmarks/cuda_kernels.py --reference`), so the tests need no CUDA build.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from folders import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))
import cuda_kernels
import kernel_tracing
from kernel_case import DEFAULT_CAPABILITY
from kernel_cases import all_cases
from kernel_exceptions import reason_for
from marks import for_release, slow

COLUMN = cuda_kernels.read_column(cuda_kernels.column_path()) if cuda_kernels.column_path().exists() else {}
CASES = {case.name: case for case in all_cases()}
HELP = (
    "If you changed how `sim:` counts memory or time, and not which operators it traces, make CUDA's numbers again: "
    "python benchmarks/cuda_kernels.py --reference"
)

ATTENTION = (
    "attention, bool mask, dropout 0.0 [bf16]",
    "attention, grouped queries, dropout 0.0 [none]",
    "attention, length 511, bool mask, dropout 0.0 [bf16]",
)
MODULES = (
    "checkpoint",
    "cross_entropy, label smoothing",
    "cumsum",
    "GroupNorm, channels_last",
    "interpolate, bilinear",
    "LayerNorm",
    "MaxPool3d",
    "torch.dropout",
    "TransformerDecoderLayer, dropout 0.1",
)
MODELS = ("GPT-2 [bf16]", "Llama, grouped queries [none]")

UNTRACEABLE = ("Adafactor", "GRU", "LSTM", "LSTM, 2 layers, dropout")
"""Cases that fake `cuda` tensors cannot run: cuDNN needs a driver, and Adafactor reads values of the parameters."""

needs_column = pytest.mark.skipif(not COLUMN, reason=f"no CUDA numbers for torch {torch.__version__}")


def pinned_torch() -> str:
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_column_of_the_tested_torch_version_is_committed_for_every_case():
    rows = cuda_kernels.read_column(cuda_kernels.column_path(pinned_torch()))
    assert set(rows) == {(case.name, capability) for case in CASES.values() for capability in case.capabilities()}


def test_all_other_cases_have_numbers():
    rows = cuda_kernels.read_column(cuda_kernels.column_path(pinned_torch())).values()
    without = {row.case.rpartition(" [")[0] for row in rows if row.error}
    assert without == set(UNTRACEABLE)
    assert all(row.activation_bytes > 0 and row.compute_s > 0 for row in rows if not row.error)


def rows(*names, capabilities=None):
    return [(name, capability) for name in names for capability in capabilities or CASES[name].capabilities()]


QUICK = [
    *rows(*ATTENTION, capabilities=(75, 90)),
    *rows(*(f"{name} [bf16]" for name in MODULES), capabilities=(DEFAULT_CAPABILITY,)),
    *rows(*MODELS, capabilities=(DEFAULT_CAPABILITY,)),
]
IN_HALF = [name for name in CASES if name.endswith(" [bf16]") and name.rpartition(" [")[0] not in UNTRACEABLE]
IN_GATE = ("BERT", "ConvNeXt", "Mixtral", "ResNet", "T5", "ViT")
"""One model of each kind. All other cases wait for a release."""
# In the column, 8.6 and 12.0 have the bytes of 8.0, and 10.0 has those of 9.0.
OTHERS = [
    row for row in rows(*IN_HALF, *ATTENTION, *MODELS) if row not in QUICK and row[1] in (75, DEFAULT_CAPABILITY, 90)
]


def marked(name, capability):
    in_gate = capability == DEFAULT_CAPABILITY and name.rpartition(" [")[0] in IN_GATE
    return slow(name, capability) if in_gate else for_release(name, capability)


@needs_column
@pytest.mark.parametrize(
    ("name", "capability"),
    [*QUICK, *(marked(*row) for row in dict.fromkeys(OTHERS))],
)
@pytest.mark.slow
def test_a_step_is_traced_as_on_cuda(name, capability):
    for package in CASES[name].needs:
        pytest.importorskip(package)
    ours = kernel_tracing.traced(CASES[name], capability, kernel_tracing.product_tracer)
    assert not ours.error, ours.error
    for quantity, ratio in cuda_kernels.ratios(ours, COLUMN[name, capability]).items():
        is_close = abs(ratio - 1) <= cuda_kernels.CLOSE
        if reason_for(name, capability, quantity):
            assert not is_close, f"{quantity} of {name} matches now. Remove its entry in kernel_exceptions.py."
        else:
            assert is_close, f"{quantity} of {name} is {ratio} times CUDA's. {HELP}"
