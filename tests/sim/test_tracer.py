"""How traces are built: the first step shows whether a second is needed, and which norms need two samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, OPTIMIZERS
from marks import for_release
from torch import nn
from torch.nn import functional as F

from autosplit.devices.catalog import find_card
from autosplit.runtime.protocol import StepShape
from autosplit.sim.op_cost import Work
from autosplit.sim.tracer import Trace, Tracer, make_tracer
from autosplit.workload.workload import Workload

SAMPLES = 4
SHAPE = StepShape(((SAMPLES,),))


def regression(model: nn.Module, loss_fn=F.mse_loss, **options) -> Workload:
    return Workload(model, (torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8)), loss_fn=loss_fn, **options)


def alike(trace: Trace, other: Trace) -> bool:
    def seconds(one: Trace) -> list[object]:
        events = (*one.micro, *one.update)
        return [event.seconds(find_card("RTX3090")) if isinstance(event, Work) else event for event in events]

    same_memory = replace(trace, micro=(), update=()) == replace(other, micro=(), update=())
    return same_memory and seconds(trace) == seconds(other)


class TestTheFirstStep:
    @pytest.mark.parametrize("like_gpu", [False, True])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("name", ["cnn", for_release("lstm"), for_release("gpt"), for_release("checkpointed")])
    def test_that_is_kept_is_as_all_that_follow(self, name, optimizer, like_gpu):
        workload = ARCHITECTURES[name](OPTIMIZERS[optimizer])
        tracer, why_real = make_tracer(workload, like_gpu=like_gpu)
        assert why_real is None
        assert tracer.runs <= 2, "an optimizer's state appears in one more"
        assert alike(tracer.trace(SHAPE), tracer._run(SHAPE))

    @pytest.mark.parametrize("shape", [StepShape(((3, 5),)), StepShape(((4,),), accumulates=True)], ids=str)
    def test_may_be_of_several_devices_or_micro_steps(self, shape):
        """Gradients of earlier micro-steps, and replicas on other devices, exist from the second step on."""
        workload = regression(nn.Linear(8, 8), optimizer=torch.optim.AdamW)
        tracer = Tracer(workload, fake=True, like_gpu=False)
        assert alike(tracer.trace(shape), tracer._run(shape))

    def test_that_leaves_something_behind_is_followed_again(self):
        """A table that the first forward creates counts in the first step, but not in the second."""

        class Remembers(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.table = nn.Linear(8, 8), None

            def forward(self, x):
                if self.table is None:
                    self.table = x.new_ones(4096, 8).cumsum(0)
                return self.layer(x) + self.table[: len(x)]

        tracer, _ = make_tracer(regression(Remembers()), like_gpu=False)
        assert alike(tracer.trace(SHAPE), tracer._run(SHAPE))


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.mse_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.l1_loss,
        F.soft_margin_loss,
        lambda outputs, targets: F.binary_cross_entropy(outputs.sigmoid(), targets.sigmoid()),
        F.binary_cross_entropy_with_logits,
    ],
)
def test_losses_that_keep_every_element_hold_as_much_where_they_are_fake(loss_fn):
    """A split that fitted in its trace ran out of memory, because the output of mse_loss keeps all elements alive."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 512))
    given = Workload(model, (torch.randn(8, 4), torch.randn(8, 512)), loss_fn=loss_fn, optimizer=torch.optim.SGD)
    for split in ((8,), (3, 5)):
        shape = StepShape((split,))
        fake, real = (Tracer(given, fake=fake, like_gpu=False).trace(shape).peak_bytes for fake in (True, False))
        assert fake == real


class Half(nn.Module):
    """Uses one layer, trains another layer, and never uses a third."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(64, 64) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


class Starting(torch.optim.AdamW):
    """Raises in its first step."""

    def step(self, closure=None):
        if not self.defaults.get("has_started"):
            self.defaults["has_started"] = True
            raise RuntimeError("not yet")
        return super().step(closure)


@pytest.mark.parametrize(
    ("model", "optimizer", "runs"),
    [
        (nn.Linear(64, 64), torch.optim.AdamW, 1),
        (nn.Linear(64, 64), torch.optim.SGD, 1),
        (Half(), torch.optim.AdamW, 2),
        (nn.Linear(64, 64), Starting, 2),
    ],
)
def test_the_optimizers_state_is_there_without_a_step(model, optimizer, runs):
    """One of five traces was made only for optimizer state. Parameters without a gradient have no state."""
    workload = Workload(model, torch.randn(4, 64), optimizer=lambda parameters: optimizer(parameters, lr=0.1))
    tracer, real = Tracer(workload, fake=True, like_gpu=True), Tracer(workload, fake=False, like_gpu=True)
    shape = StepShape(((4,),))
    if optimizer is Starting:
        real.trainee.optimizers.given.defaults["has_started"] = True
    assert tracer.trace(shape).peak_bytes == real.trace(shape).peak_bytes
    assert tracer.trace(shape).entries == real.trace(shape).entries
    assert tracer.runs == runs
