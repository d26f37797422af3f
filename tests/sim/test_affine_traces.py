"""Traces extrapolated to any batch size are equal to traces at that size."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from architectures import ARCHITECTURES
from marks import for_release
from torch import nn
from torch.nn import functional as F
from traced_memory import traced_parts
from workloads import ALL

from autosplit.devices.spec import parse_devices
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.runtime.protocol import StepShape
from autosplit.sim import simulated
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.op_cost import Work
from autosplit.sim.replay import WholeStep
from autosplit.sim.simulated import SimulatedWorker, traced_peaks
from autosplit.sim.tracer import Tracer, make_tracer
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

UNFAKED = ("experts", "halting")
"""Models whose control flow depends on values, which fake tensors do not have."""

SHAPES = {
    "alone": lambda n: StepShape(((n,),)),
    "alone, accumulating": lambda n: StepShape(((n,),) * 2),
    "a replica": lambda n: StepShape(((0, n),)),
    "device 0 next to one": lambda n: StepShape(((n, 5),)),
    "device 0 next to one, accumulating": lambda n: StepShape(((7, n),) * 2),
    "device 0 next to two": lambda n: StepShape(((n, 6, 3),)),
    "a rank": lambda n: StepShape(((n,),), "rank", num_ranks=2),
    "evaluation": lambda n: StepShape(((n,),), "eval"),
}


@pytest.mark.parametrize("name", ["cnn", for_release("gru"), for_release("char_gpt")])
def test_equal_to_the_byte(name):
    """Up to 24 traces per size took seconds each, for a step of a third of a second."""
    workload = ALL[name]()
    tracer, _ = make_tracer(workload, like_gpu=True)
    full, _ = make_tracer(workload, like_gpu=True)
    traces = AffineTraces(tracer)
    for shape_of in SHAPES.values():
        for n in (4, 61):
            shape = shape_of(n)
            assert traced_peaks(traces, shape) == traced_peaks(full, shape)
            assert traced_parts(traces, shape) == traced_parts(full, shape)
    for n in range(100, 1000, 10):
        traced_peaks(traces, StepShape(((n,),)))
    assert tracer.runs <= 12


@pytest.mark.parametrize("machine", [for_release("sim:2xRTX3090"), "sim:3xRTX3090"])
@pytest.mark.parametrize("name", ["cnn", for_release("with_loss"), for_release("char_gpt")])
def test_a_short_last_micro_step_is_told_by_the_first(name, machine):
    """A short last micro-step leaves devices idle. A tuning of 7 billion parameters on 8 GPUs traced 3 of 9 steps for
    it.

    Losses that replicas compute were joined on a device 0 that has no samples: an error of 1.1% of a step.
    """
    workload = ALL[name]()
    devices = parse_devices(machine)
    (tracer, _), (full, _) = (make_tracer(workload, like_gpu=True) for _ in range(2))
    told, followed = (SimulatedWorker(devices, (2**60,) * 3, traces) for traces in (AffineTraces(tracer), full))
    first = (4, 6, 6)[: len(devices)]
    told.measure(StepShape((first,) * 2))
    runs = tracer.runs
    for last in ((0, 3, 3), (0, 2, 1), (0, 1, 0), (2, 0, 0), (1, 0, 0)):
        shape = StepShape((first, first, last[: len(devices)]))
        ours = told.measure(shape)
        with mock.patch.object(simulated, "source_of", WholeStep):
            theirs = followed.measure(shape)
        assert ours.peak_bytes == theirs.peak_bytes
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-6)
    assert tracer.runs <= runs + 1, "one more trace, of a single sample, checks its time"


@pytest.mark.slow
def test_a_last_share_of_one_that_spares_much_is_followed():
    """An encoder has a third fewer ops for one sample. A step with last shares (0, 1, 1) was predicted 4% too slow."""
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Flatten(), nn.Linear(256, 1))
    workload = Workload(model, (torch.randn(4, 8, 32), torch.randn(4, 1)), loss_fn=F.mse_loss)
    devices = parse_devices("sim:3xRTX3090")
    (tracer, _), (full, _) = (make_tracer(workload, like_gpu=True) for _ in range(2))
    told, followed = (SimulatedWorker(devices, (2**60,) * 3, traces) for traces in (AffineTraces(tracer), full))
    shape = StepShape(((4, 6, 6), (4, 6, 6), (0, 1, 1)))
    assert told.measure(shape).seconds == pytest.approx(followed.measure(shape).seconds, rel=0.01)


@pytest.mark.slow
def test_one_sample_beside_others_is_not_followed_where_alone_it_holds_and_takes_what_others_say():
    """A tuning of 7 billion parameters on 64 GPUs traced two more steps, to check whether one sample fits next to
    others.

    Copies that a single sample does not need took 4 KiB of 400 MiB at a replica's peak, and none at the other peaks.
    """
    devices = parse_devices("sim:3xH100-80GB")
    (tracer, _), (full, _) = (make_tracer(ALL["lstm"](), like_gpu=True) for _ in range(2))
    traces = AffineTraces(tracer)
    told, followed = (SimulatedWorker(devices, (2**60,) * 3, source) for source in (traces, full))
    traces.trace(StepShape(((1,),)))
    runs = tracer.runs
    for split in ((1, 1, 0), (1, 7, 0), (7, 1, 0), (0, 1, 1)):
        with mock.patch.object(simulated, "source_of", WholeStep):
            ours, theirs = (worker.measure(StepShape((split,))) for worker in (told, followed))
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.01)
        assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=1.1e-5)
    assert tracer.runs <= runs + 2, "a step of two devices, and a step that leaves device 0 idle"


class Contrasting(nn.Module):
    """A loss over all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x):
        return F.normalize(self.layer(x))


def contrast(outputs, _targets):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=outputs.device))


class Switching(nn.Module):
    """Takes another code path from a number of samples on."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(16, 16), most

    def forward(self, x):
        return self.layer(self.layer(x)) if len(x) > self.most else self.layer(x)


@pytest.mark.parametrize("most", [10, 3000])
def test_steps_that_take_another_way_are_followed_at_each_size(most):
    """Detected from the sample batch's step, or from steps at the chosen size."""
    workload = Workload(Switching(most), torch.randn(4, 16))
    tracer, _ = make_tracer(workload, like_gpu=True)
    full, _ = make_tracer(workload, like_gpu=True)
    traces = AffineTraces(tracer)
    with traces.checking():
        traced_peaks(traces, StepShape(((4000,),)))
    for n in (2, 8, 16, 100, 5000):
        assert traced_peaks(traces, StepShape(((n,),))) == traced_peaks(full, StepShape(((n,),)))


def test_real_steps_that_take_another_way_are_told_by_a_line():
    """These traces use real tensors, and a large batch could fill the machine's memory."""
    workload = Workload(Switching(4), torch.randn(4, 16))
    tracer, full = (Tracer(workload, fake=False, like_gpu=True) for _ in range(2))
    ends = [traced_peaks(full, StepShape(((n,),)))[0] for n in (4, 8)]
    traces = AffineTraces(tracer)
    assert traced_peaks(traces, StepShape(((16,),)))[0] == 3 * ends[1] - 2 * ends[0]
    assert max(shape.splits[0][0] for shape in tracer._traces) == 8


class Halving(nn.Module):
    """Continues with half of the samples, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        outputs = self.layers(x).flatten()
        return outputs + outputs.topk(len(x) // 2).values.sum()


ODD = {
    "a loss over the batch": lambda: Workload(
        Contrasting(), (torch.randn(16, 16), torch.zeros(16)), loss_fn=contrast, loss_scope="batch"
    ),
    "half of the samples": lambda: Workload(Halving(), (torch.randn(9, 16), torch.randn(9)), loss_fn=F.mse_loss),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("devices", ["sim:L4", for_release("sim:2xL4")])
def test_a_plan_for_what_follows_no_line_is_that_of_its_own_step(name, devices):
    """A linear fit predicted a twentieth of the memory of a loss over all pairs on two GPUs."""
    plan = tune(ODD[name](), devices=devices, effective_batch_size=512, n_trials=3, profile="off")
    full, _ = make_tracer(ODD[name](), like_gpu=True)
    cards = parse_devices(devices)
    splits = (plan.split,) * plan.accumulation_steps
    step = SimulatedWorker(cards, (2**60,) * len(cards), full).measure(StepShape(splits))
    assert tuple(seat.peak_bytes for seat in plan.main.seats) == step.peak_bytes
    assert plan.samples_per_s == pytest.approx(512 / step.seconds, rel=1e-6)


@pytest.mark.usefixtures("exact_allocator")
def test_a_single_sample_is_followed():
    """A batch of 1 needs no contiguous copy, so it takes less memory than the linear fit predicts."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x.transpose(0, 1).contiguous())
            return y.transpose(0, 1).contiguous().flatten(1).sum(1)

    def workload():
        return Workload(Sequences(), (torch.randn(4, 1000, 8), torch.randn(4)), loss_fn=F.mse_loss)

    full, _ = make_tracer(workload(), like_gpu=True)
    (held,) = traced_peaks(full, StepShape(((1,),)))
    assert find_ceiling(workload(), f"sim:L4@{held + 4096}B", role="primary").batch_size == 1


def test_another_way_that_holds_as_much_is_no_law():
    """Only peaks were compared, so work that only large batches do was not in the predicted time."""

    class WorksMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            with torch.no_grad():
                for _ in range(3 if len(x) > 2000 else 0):
                    x.neg_()
            return self.layer(x)

    tracer, _ = make_tracer(Workload(WorksMore(), torch.randn(4, 16)), like_gpu=True)
    traces = AffineTraces(tracer)
    shape = StepShape(((4000,),))
    before = traces.trace(shape)
    with traces.checking():
        assert traces.trace(shape).peak_bytes == before.peak_bytes
    assert traces.given_up
    assert sum(len(event.labels) for event in traces.trace(shape).micro if isinstance(event, Work)) > sum(
        len(event.labels) for event in before.micro if isinstance(event, Work)
    )


def test_single_samples_beside_others_are_a_kind_of_their_own():
    """Each size next to a share of 1 was traced: seven steps of three seconds for a GPT on large GPUs."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)[:, :-1].contiguous().flatten(1).sum(1)  # a single sample needs no copy

    def tracer():
        return make_tracer(
            Workload(Shifted(), (torch.randn(4, 50, 8), torch.randn(4)), loss_fn=F.mse_loss), like_gpu=True
        )

    followed, full = tracer()[0], tracer()[0]
    traces = AffineTraces(followed)
    for split in ((1,), (9,), (1, 1), (1, 9), (1, 31), (1, 4), (9, 1), (5, 1), (0, 1), (0, 1, 5), (0, 1, 8)):
        assert traced_parts(traces, StepShape((split,))) == traced_parts(full, StepShape((split,)))
    assert followed.runs <= 12


class Arriving(nn.Module):
    """Has gradients of every kind: tied, summed and shared parameters, views, and frozen or unused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Parameter(torch.zeros(1, 8, 16))
        self.scale, self.triple = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(3, 16, 16))
        self.norm, self.frozen, self.unused = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(4, 4)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        values = self.tokens(x) + self.places
        values = values * self.scale + values
        values = F.scaled_dot_product_attention(*(values @ part for part in self.triple.unbind(0)))
        return self.head(self.frozen(self.norm(values))).flatten(0, 1)


def arriving(precision="none"):
    tokens = torch.randint(0, 50, (4, 8))
    return Workload(
        Arriving(),
        (tokens, tokens),
        loss_fn=lambda outputs, targets: F.cross_entropy(outputs, targets.flatten()),
        optimizer=torch.optim.AdamW,
        precision=precision,
    )


@pytest.mark.parametrize(
    "make",
    [
        arriving,
        for_release(lambda: arriving("bf16")),
        for_release(lambda: arriving("fp16")),
        *(
            for_release(lambda make=make: make(torch.optim.AdamW))
            for name, make in ARCHITECTURES.items()
            if name not in UNFAKED
        ),
    ],
)
def test_a_plain_step_of_one_device_tells_one_that_accumulates_and_a_rank(make):
    """Two of seven steps were traced for them. The prediction is the same in every storage and op, in order."""
    (tracer, _), (full, _) = (make_tracer(make(), like_gpu=True) for _ in range(2))
    traces = AffineTraces(tracer)
    first = tracer.runs
    for shape in (StepShape(((7,),), accumulates=True), StepShape(((7,),), "rank", num_ranks=2)):
        told, followed = traces.trace(shape), full.trace(shape)
        assert (told.peak_bytes, told.parts) == (followed.peak_bytes, followed.parts)
        law = traces._model_of(shape)
        assert law is not None
        assert law.predicts(shape.splits[0], followed)
    assert tracer.runs - first <= 2, "the optimizer's state appears in one more"


@pytest.mark.parametrize("batch", [1024, for_release((64, 4096))])
def test_a_tuning_follows_few_steps(batch, monkeypatch):
    """A hundred steps were traced. Later, each kind of step was traced, and the largest of each kind."""
    followed = []
    run = Tracer._traced
    monkeypatch.setattr(Tracer, "_traced", lambda *args: followed.append(args) or run(*args))
    tune(ALL["char_gpt"](), devices="sim:1xRTX3090+3xRTX2080Ti", effective_batch_size=batch, profile="off")
    assert 3 <= len(followed) <= 6
