"""Build small models with real memory. The build of a large model stops before it uses its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from autosplit.accelerators import accelerator_kind
from autosplit.sim.build_small import TooLarge, built_within
from autosplit.torch_versions import default_device

MIB = 2**20
HUGE = 10**6
"""Size of each side of a matrix that fits in no test machine."""


def trained() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    return model


SMALL = {
    "layers": lambda: nn.TransformerEncoderLayer(16, 2, 32),
    "an embedding": lambda: nn.Embedding(100, 16, padding_idx=0),
    "a generator": lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
    "labels of a large vocabulary": lambda: torch.randint(0, 50_000, (8, 1024)),
    "no memory at all": lambda: nn.Linear(HUGE, HUGE, device="meta"),
    "a size to be found": lambda: nn.LazyLinear(4),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "little of a large graph by rows": lambda: torch.ones(9, 9).to_sparse_csr().to(torch.float64),
    "nothing of a large graph": lambda: torch.zeros(HUGE, HUGE, layout=torch.sparse_coo),
    "a step": trained,
    "views of much": lambda: torch.ones(1).expand(HUGE, HUGE),
}

LARGE = {
    "drawn": lambda: torch.randn(HUGE, HUGE),
    "a layer": lambda: nn.Linear(HUGE, HUGE),
    "many": lambda: [torch.ones(MIB // 16) for _ in range(5)],
    "many that are dropped": lambda: sum(torch.ones(MIB // 16).sum() for _ in range(5)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", SMALL)
def test_what_is_small_is_built_as_ever(name):
    assert built_within(SMALL[name], MIB) is not None


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_is_left(name):
    with pytest.raises(TooLarge, match=f"more than {MIB} bytes"):
        built_within(LARGE[name], MIB)


@pytest.mark.gpu
def test_what_is_on_a_gpu_is_left():
    with pytest.raises(TooLarge):
        built_within(lambda: nn.Linear(3, 3).to(accelerator_kind()), MIB)


def test_random_numbers_are_those_of_a_build_without_a_bound():
    torch.manual_seed(3)
    expected = nn.Linear(4, 4).weight
    torch.manual_seed(3)
    torch.testing.assert_close(built_within(lambda: nn.Linear(4, 4), MIB).weight, expected, rtol=0, atol=0)


def test_code_that_goes_on_after_every_exception_is_left_all_the_same():
    def stubborn() -> torch.Tensor:
        try:
            return torch.ones(HUGE, HUGE)
        except:  # noqa: E722 - as some do
            return torch.ones(1)

    with pytest.raises(TooLarge):
        built_within(stubborn, MIB)


def test_a_file_that_is_read_counts(tmp_path):
    torch.save(torch.ones(MIB // 2), tmp_path / "weights.pt")
    assert built_within(lambda: torch.load(tmp_path / "weights.pt"), 3 * MIB).numel() == MIB // 2
    with pytest.raises(TooLarge):
        built_within(lambda: torch.load(tmp_path / "weights.pt"), MIB)


@pytest.mark.parametrize(
    ("read", "write", "meanwhile"),
    [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (default_device, torch.set_default_device, torch.device("meta")),
        (torch.is_grad_enabled, torch.set_grad_enabled, False),
    ],
)
@pytest.mark.parametrize("fails", [lambda: torch.ones(HUGE, HUGE, device="cpu"), lambda: 1 // 0])
def test_what_was_changed_for_a_while_is_as_before_once_code_was_left(read, write, meanwhile, fails):
    """A second call took float64 for the earlier default, and left the process with it."""

    def build() -> None:
        before = read()
        write(meanwhile)
        fails()
        write(before)

    before = read()
    try:
        with pytest.raises((TooLarge, ZeroDivisionError)):
            built_within(build, MIB)
        assert read() == before
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def test_torchs_compiler_is_not_loaded_for_it():
    """Loading it takes as long as torch itself, which would delay a saved plan."""
    code = (
        "import sys; from torch import nn; from autosplit.sim.build_small import built_within\n"
        "built_within(lambda: nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 8)), 2**20)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
