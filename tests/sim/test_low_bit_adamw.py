from __future__ import annotations

import pytest
import torch
from raised import raises
from torch import nn

from autosplit.errors import InputError
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.low_bit_adamw import LowBitAdamW, named_optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))


def stepped(name: str, *shape: int) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.randn(*shape))
    parameter.grad = torch.ones_like(parameter)
    optimizer = named_optimizer(name)([parameter])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("adamw_8bit", (100, 50), 2 * 5000 + 2 * 4 * 20),  # 20 blocks of 256
        ("adamw_8bit", (4095,), 2 * 4 * 4095),  # too small for 8 bits
        ("paged_adamw_32bit", (400, 300), 2 * 4 * 120_000),  # not paged on the CPU
    ],
)
def test_the_state_has_the_bytes_of_bitsandbytes(name, shape, nbytes):
    assert state_bytes(stepped(name, *shape)) == nbytes


def test_a_large_paged_state_is_not_on_a_simulated_gpu():
    with fake_mode():
        assert state_bytes(stepped("paged_adamw_8bit", 400, 300)) == 0
        assert state_bytes(stepped("paged_adamw_8bit", 100, 50)) == 2 * 5000 + 2 * 4 * 20


@pytest.mark.parametrize("bits", [8, 32])
def test_it_trains_like_adamw(bits):
    torch.manual_seed(0)
    target = torch.randn(64, 80)
    found = []
    for kind in (torch.optim.AdamW, lambda params, lr: LowBitAdamW(params, lr, bits=bits)):
        parameter = nn.Parameter(torch.zeros(64, 80))
        optimizer = kind([parameter], lr=0.05)
        for _ in range(60):
            loss = (parameter - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(parameter.detach())
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < (0.05 if bits == 8 else 1e-4)


def test_an_unknown_name_is_refused():
    with raises(InputError, "adamw_8bit"):
        named_optimizer("adam8")
