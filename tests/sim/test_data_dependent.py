"""Steps whose operators depend on values are traced with fake tensors, and hold as much memory as real steps."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch
from marks import for_release
from noted import kinds
from raised import raises
from torch import nn
from torch.nn import functional as F

from autosplit.devices.spec import parse_devices
from autosplit.errors import WorkloadError
from autosplit.runtime.protocol import StepShape
from autosplit.sim import prepare
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.sample_values import replayed
from autosplit.sim.trace_tracker import TraceTracker
from autosplit.sim.tracer import Tracer, _traced_once, make_tracer
from autosplit.workload.workload import Workload

SAMPLES, LENGTH, WIDTH, CLASSES = 4, 12, 16, 300


class Encoder(nn.Module):
    """One layer of SDPA attention, and a head wider than the rest, so the head decides the peak."""

    def __init__(self, select=None) -> None:
        super().__init__()
        self.select = select
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def hidden(self, x):
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.attention(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def forward(self, x):
        hidden = self.hidden(x)
        return self.head(hidden if self.select is None else hidden[self.select(x)])


def workload(loss, optimizer=torch.optim.AdamW) -> Workload:
    labels = torch.randint(1, CLASSES, (SAMPLES, LENGTH // 2))
    labels[:, -2:] = -100
    batch = (torch.randn(SAMPLES, LENGTH, WIDTH), labels)
    return Workload(Encoder(SELECTIONS.get(loss)), batch, compute_loss=loss, optimizer=optimizer)


def ctc_of_selected(model, batch):
    x, labels = batch
    log_probs = model(x).log_softmax(-1).transpose(0, 1)
    mask = labels >= 0
    inputs = torch.full((len(x),), LENGTH)
    return F.ctc_loss(log_probs, labels.masked_select(mask), inputs, mask.sum(-1), zero_infinity=True)


def ctc_of_padded(model, batch):
    x, labels = batch
    log_probs = model(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, labels.clamp(0), torch.full((len(x),), LENGTH), (labels >= 0).sum(-1))


def masked_positions(x):
    return (torch.arange(LENGTH) % 3 == 0).expand(len(x), LENGTH)


def masked_head(model, batch):
    return model(batch[0]).pow(2).mean()


SELECTIONS = {masked_head: masked_positions}
"""Rows that the head is applied to. Other losses use all rows."""


def unique_labels(model, batch):
    x, labels = batch
    classes, _ = torch.unique(labels, return_inverse=True)
    return (model(x)[..., :1] * classes).pow(2).mean()


def repeated_rows(model, batch):
    x, _ = batch
    counts = masked_positions(x).long().flatten() * 2
    return model(x.flatten(0, 1).repeat_interleave(counts, 0)[None]).pow(2).mean()


def guarded(model, batch):
    loss = model(batch[0]).pow(2).mean()
    return loss * 2 if loss > 1e9 else loss


def matched_in_numpy(model, batch):
    outputs = model(batch[0])
    places = np.asarray(outputs[..., :3].detach().cpu()).argmax(1) + outputs.detach().numpy().argmax(1)[:, :3] * 0
    return outputs[torch.arange(len(outputs))[:, None], torch.as_tensor(places)].pow(2).mean()


LOSSES = {
    ctc_of_selected: "aten.masked_select",
    ctc_of_padded: "aten._ctc_loss",
    masked_head: "aten.nonzero",
    unique_labels: "aten._unique2",
    repeated_rows: "aten.repeat_interleave",
    guarded: "aten._local_scalar_dense",
    matched_in_numpy: ".numpy()",
}
BOUNDED = {loss: LOSSES[loss] for loss in (ctc_of_selected, ctc_of_padded, masked_head, unique_labels)}
"""Losses whose shapes give an upper bound."""


def shape_of(*split: int) -> StepShape:
    return StepShape((split,))


def replaying(described: Workload) -> Tracer:
    """Return a tracer of fake tensors that runs the CPU's operators, so that real steps can be compared."""
    shape = shape_of(described.sample_batch_size)
    tracer = replayed(partial(_traced_once, described, shape), shape, like_gpu=False)
    assert tracer is not None
    return tracer


def peaks(tracer: Tracer, samples: int) -> tuple[int, ...]:
    return tracer.trace(shape_of(samples)).peak_bytes


QUICK = (ctc_of_selected, masked_head, repeated_rows, guarded, matched_in_numpy)


def each_loss() -> list:
    return [loss if loss in QUICK else for_release(loss) for loss in LOSSES]


@pytest.mark.parametrize("loss", each_loss(), ids=lambda loss: loss.__name__)
def test_a_step_is_traced_with_the_values_of_the_sample_batch(loss):
    described = workload(loss)
    tracer, why_real = make_tracer(described, like_gpu=True)
    assert tracer.fake
    assert why_real is None
    assert any(LOSSES[loss] in str(note) and "sample batch" in str(note) for note in tracer.notes())


@pytest.mark.parametrize("loss", each_loss(), ids=lambda loss: loss.__name__)
def test_a_replayed_step_holds_as_much_as_a_real_one(loss):
    described = workload(loss)
    tracer = replaying(described)
    real = Tracer(described, fake=False, like_gpu=False)
    for samples in (SAMPLES, 7, 16):
        (fake_bytes,), (real_bytes,) = peaks(tracer, samples), peaks(real, samples)
        assert real_bytes <= fake_bytes <= 1.12 * real_bytes


@pytest.mark.parametrize("loss", BOUNDED, ids=lambda loss: loss.__name__)
def test_without_values_the_upper_bound_is_taken(loss):
    tracer = Tracer(workload(loss), fake=True, like_gpu=False)
    real = Tracer(workload(loss), fake=False, like_gpu=False)
    for samples in (SAMPLES, 16):
        assert peaks(tracer, samples) >= peaks(real, samples)
    assert BOUNDED[loss] in tracer.data_dependent.bounded
    assert any(BOUNDED[loss] in str(note) and "upper bound" in str(note) for note in tracer.notes())


def test_a_bound_selects_every_row_and_a_replay_those_of_the_sample_batch():
    """Every third position is predicted, so the head's outputs take a third of the bound."""
    replay = replaying(workload(masked_head))
    bounding = Tracer(workload(masked_head), fake=True, like_gpu=False)
    growth = [peaks(tracer, 65)[0] - peaks(tracer, 64)[0] for tracer in (replay, bounding)]
    assert growth[1] > 2 * growth[0]


@pytest.mark.parametrize("loss", [ctc_of_selected, masked_head, repeated_rows])
def test_replayed_steps_are_extrapolated_to_any_batch(loss):
    tracer = replaying(workload(loss))
    traces = AffineTraces(tracer)
    for samples in (2, 64, 513):
        shape = shape_of(samples)
        assert traces.trace(shape).peak_bytes == tracer._run(shape).peak_bytes
    assert not traces.given_up


def test_a_split_over_two_devices_replays_each_devices_rows():
    tracer = replaying(workload(masked_head))
    real = Tracer(workload(masked_head), fake=False, like_gpu=False)
    shape = shape_of(5, 8)
    for fake_bytes, real_bytes in zip(tracer.trace(shape).peak_bytes, real.trace(shape).peak_bytes, strict=True):
        assert real_bytes <= fake_bytes <= 1.02 * real_bytes


class Fallback:
    """Losses that a replay cannot reproduce."""

    @staticmethod
    def grows_with_a_sum(model, batch):
        """The value grows with the batch. A replay would use the same memory for any batch."""
        x, labels = batch
        packed = x.new_zeros(int((labels >= 0).sum()), 4096)
        return model(x).pow(2).mean() + packed.exp().mean()

    @staticmethod
    def depends_on_the_kind_of_tensor(model, batch):
        """Real steps run an extra product."""
        outputs = model(batch[0])
        assert outputs.mean().item() < 1e9
        is_real = type(outputs) is torch.Tensor
        return (model(batch[0]) if is_real else outputs).pow(2).mean()


@pytest.mark.parametrize("loss", [Fallback.grows_with_a_sum, Fallback.depends_on_the_kind_of_tensor])
def test_real_tensors_are_traced_if_a_replay_differs(loss):
    tracer, why_real = make_tracer(workload(loss), like_gpu=True)
    assert not tracer.fake
    assert "_local_scalar_dense" in why_real


@pytest.mark.parametrize("loss", [masked_head, guarded])
def test_for_cpus_real_tensors_are_exact(loss):
    tracer, why_real = make_tracer(workload(loss), like_gpu=False)
    assert not tracer.fake
    assert LOSSES[loss] in why_real


class TestAModelWithoutMemory:
    @pytest.fixture
    def followed(self, monkeypatch):
        """Return a function that traces a model built without memory, on a host with this many bytes."""

        def trace(loss, host_bytes: int) -> prepare.Traced:
            monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
            monkeypatch.setattr(prepare, "available_host_bytes", lambda: host_bytes)
            devices = parse_devices("sim:RTX3090")
            with ExitStack() as closing:
                return prepare.traced_workload(prepare.build_simulated(lambda: workload(loss)), devices, closing)

        return trace

    def test_takes_the_upper_bound_if_the_host_is_too_small_for_it(self, followed):
        found = followed(masked_head, 0)
        assert found.tracer.fake
        assert found.rebuild is not None
        assert any("aten.nonzero" in str(note) and "upper bound" in str(note) for note in found.notes)

    def test_is_built_again_with_memory_for_its_values(self, followed):
        found = followed(masked_head, 2**40)
        assert found.tracer.fake
        assert found.rebuild is None
        assert any(note.kind == "real-tensors" and "aten.nonzero" in note.text for note in found.notes)
        assert any("aten.nonzero" in str(note) and "sample batch" in str(note) for note in found.notes)

    def test_is_refused_if_it_reads_values_and_the_host_is_too_small(self, followed):
        with raises(WorkloadError):
            followed(guarded, 0)


class TestAdafactor:
    def test_of_torch_reads_numbers_that_decide_no_shape(self):
        described = workload(lambda model, batch: model(batch[0]).pow(2).mean(), optimizer=torch.optim.Adafactor)
        tracer, why_real = make_tracer(described, like_gpu=False)
        assert why_real is None
        assert "optimizer-reads-values" in kinds(tracer.notes())
        assert peaks(tracer, 8) == peaks(Tracer(described, fake=False, like_gpu=False), 8)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
class TestGroupedProducts:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("first", "second", "offsets", "shape"),
        [
            ((24, 8), (3, 8, 16), 3, (24, 16)),
            ((8, 24), (24, 16), 3, (3, 8, 16)),
            ((3, 8, 16), (16, 24), 3, (8, 24)),
            ((3, 8, 16), (3, 16, 24), None, (3, 8, 24)),
        ],
    )
    def test_have_outputs_of_the_real_shape_in_any_dtype(self, first, second, offsets, shape, dtype):
        with fake_mode(), TraceTracker(1) as tracker:
            left, right = torch.empty(first, dtype=dtype), torch.empty(second, dtype=dtype)
            tracker.adopt(left, 0)
            groups = None if offsets is None else torch.empty(offsets, dtype=torch.int32)
            found = torch._grouped_mm(left, right, offs=groups)
            assert (tuple(found.shape), found.dtype, tracker.device_of(found)) == (shape, dtype, 0)
