"""Define AdamW with the memory of bitsandbytes' optimizers, to plan without a GPU. Train with bitsandbytes.

The sizes are those of bitsandbytes 0.50.2 (`optim.optimizer.Optimizer2State`): two bytes of state per weight, and two
float32 scales for each 256 weights. A tensor with fewer than 4,096 elements has its state in float32. Paged states of
100,000 elements or more are in managed memory. The driver moves them to the host if the GPU is full. torch's allocator
does not count managed memory, so plans do not include it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import InputError, shown
from autosplit.torch_versions import FakeTensor

BLOCK = 256
SMALLEST_8BIT, SMALLEST_PAGED = 4096, 100_000
"""Smallest number of elements of a tensor whose state has 8 bits, and of a tensor whose state is paged."""


def named_optimizer(name: str) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return the optimizer with this name in transformers' option `optim`.

    Raises:
        InputError: There is no such name.
    """
    known: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
        "adamw_torch": torch.optim.AdamW,
        "adamw_8bit": LowBitAdamW,
        "paged_adamw_8bit": partial(LowBitAdamW, paged=True),
        "paged_adamw_32bit": partial(LowBitAdamW, bits=32, paged=True),
    }
    if name not in known:
        raise InputError(f"optimizer is {shown(name)}. Expected one of {', '.join(known)}.")
    return known[name]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with states of 8 or 32 bits. Its update is one op per parameter and makes no temporary tensors.

    Use it for plans only. Its rounding differs from bitsandbytes, which quantises with a nonlinear code book.

    Args:
        bits: 8 or 32, the bits of each of the two states.
        paged: Whether large states are in managed memory. On the CPU they are ordinary tensors, as in bitsandbytes.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, bits: int = 8, paged: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2})
        self.bits, self.paged = bits, paged

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, **self._new_state(parameter)}
        state["step"] += 1
        held = [state[name] for name in ("state1", "state2", "scales1", "scales2") if name in state]
        numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        adamw_update(parameter, held, parameter.grad, [float(number) for number in numbers], state["step"])

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        count = parameter.numel()
        if self.paged and count >= SMALLEST_PAGED and isinstance(parameter, FakeTensor):
            return {}
        if self.bits == 32 or count < SMALLEST_8BIT:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        scales = {name: parameter.new_zeros(-(-count // BLOCK), dtype=torch.float32) for name in ("scales1", "scales2")}
        return {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")} | scales


# torch 2.6 can't infer the schema of parameters of type list.
@torch.library.custom_op(
    "autosplit::adamw_update",
    mutates_args=("parameter", "held"),
    schema="(Tensor(a!) parameter, Tensor(b!)[] held, Tensor gradient, float[] numbers, int step) -> ()",
)
def adamw_update(parameter: Tensor, held: list[Tensor], gradient: Tensor, numbers: list[float], step: int) -> None:
    """Update a parameter and its states. `held` contains two states and, if they have 8 bits, their scales."""
    lr, beta1, beta2, eps, decay = numbers
    mean, root = (_restored(held, index) for index in (0, 1))  # the state is the root of the second moment
    gradient = gradient.float()
    mean = mean.lerp(gradient, 1 - beta1)
    root = (root.square() * beta2 + gradient.square() * (1 - beta2)).sqrt()
    parameter.mul_(1 - lr * decay)
    parameter.sub_(lr * (mean / (1 - beta1**step)) / (root / (1 - beta2**step) ** 0.5 + eps))
    for index, values in enumerate((mean, root)):
        _store(held, index, values)


@adamw_update.register_fake
def _(parameter: Tensor, held: list[Tensor], gradient: Tensor, numbers: list[float], step: int) -> None:
    del parameter, held, gradient, numbers, step


def _restored(held: list[Tensor], index: int) -> Tensor:
    state = held[index]
    if len(held) == 2:
        return state
    scales = held[index + 2].repeat_interleave(BLOCK)[: state.numel()].view_as(state)
    return (state.float() - 128 * (index == 0)) / (127 if index == 0 else 255) * scales


def _store(held: list[Tensor], index: int, values: Tensor) -> None:
    if len(held) == 2:
        held[index].copy_(values)
        return
    padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    held[index + 2].copy_(scales)
    shares = (padded / scales.clamp(min=1e-30)[:, None]).flatten()[: values.numel()].view_as(values)
    # Round the root of the second moment up: zero would make the next update huge.
    held[index].copy_((shares * 127).round() + 128 if index == 0 else (shares * 255).ceil())
