"""The graph of a loss shows its reduction. An unclear graph counts as unknown."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.epoch_steps import steps
from autosplit.parallel.loss_graph import LabelMean, UnevenLossWarning, label_means, read_loss
from autosplit.parallel.loss_weights import ReduceWarning

OUT = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
LABELS = torch.tensor([0, 1, 2, 0, 1, 1])
IGNORING = torch.tensor([0, 1, 255, 0, 1, 1])
WEIGHTS = torch.tensor([0.3, 2.7, 1.0], dtype=torch.float64)
MAPS = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
PARAMETER = torch.ones(5, dtype=torch.float64, requires_grad=True)

LOSSES = {
    "cross entropy": (F.cross_entropy(OUT, LABELS), 6, "samples"),
    "equal class weights": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS * 0 + 2), 6, "samples"),
    "class weights": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS), 6, "weights"),
    "class weights of pixels": (F.cross_entropy(MAPS, MAPS.argmax(1), weight=WEIGHTS), 2, "weights"),
    "smoothed class weights": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS, label_smoothing=0.1), 6, "weights"),
    "ignored labels": (F.cross_entropy(OUT, IGNORING, ignore_index=255), 6, "labels"),
    "no ignored label here": (F.cross_entropy(OUT, LABELS, ignore_index=255), 6, "samples"),
    "weighted, not reduced": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS, reduction="none").mean(), 6, "samples"),
    "positive weights": (
        F.binary_cross_entropy_with_logits(OUT, OUT.detach().gt(0) * 1.0, pos_weight=WEIGHTS),
        6,
        "samples",
    ),
    "squares": (F.mse_loss(OUT, OUT.detach() + 1), 6, "samples"),
    "huber": (F.smooth_l1_loss(OUT, OUT.detach() + 1), 6, "samples"),
    "a view": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS).view(1), 6, "weights"),
    "scaled": (F.cross_entropy(OUT, LABELS, weight=WEIGHTS) * 0.5, 6, "weights"),
    "two losses": (F.cross_entropy(OUT, LABELS) + 0.3 * F.cross_entropy(OUT, LABELS, weight=WEIGHTS), 6, "weights"),
    "stacked": (torch.stack([OUT.mean(), F.cross_entropy(OUT, LABELS)]).mean(), 6, "samples"),
    "a penalty": (F.cross_entropy(OUT, LABELS) + PARAMETER.square().sum(), 6, "unknown"),
    "a mask": (OUT.square()[OUT.detach() > 0][:7].mean(), 6, "elements"),
    "a sum": (OUT.square().sum(), 6, "sum"),
    "a sum of squares": (F.mse_loss(OUT, OUT.detach() + 1, reduction="sum"), 6, "sum"),
    "a sum over the samples": (OUT.square().sum() / 6, 6, "samples"),
    "a sum over something": (OUT.square().sum() / 4, 6, "unknown"),
    "a ratio": (OUT.square().sum() / OUT.exp().sum(), 6, "unknown"),
    "no operation": (torch.ones((), requires_grad=True), 6, "unknown"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_read(name):
    loss, samples, kind = LOSSES[name]
    assert read_loss(loss, samples).kind == kind


def test_a_graph_that_has_run_is_unknown_and_no_error():
    loss = F.cross_entropy(OUT * 1, LABELS, weight=WEIGHTS)
    loss.backward()
    assert read_loss(loss, 6).kind in ("samples", "unknown")


@pytest.mark.parametrize("ignored", [-100, 0, 255])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_what_a_cross_entropy_divides_by_is_counted_in_any_batch(ignored, weights, is_shifted):
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(1, 3, (4, 5), generator=draw)
    labels[0, 2:] = labels[1, 1] = labels[2, :1] = ignored
    batch = {"x": torch.randn(4, 5, 3, dtype=torch.float64, generator=draw), "targets": labels}
    own = labels[:, 1:] if is_shifted else labels
    logits = (batch["x"][:, :-1] if is_shifted else batch["x"]).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), own.flatten(), weight=weights, ignore_index=ignored)
    found = [one for one in label_means(loss, batch) if one.is_shifted == is_shifted]
    (mean,) = found
    kept = own[own != ignored]
    assert mean(batch) == (len(kept) if weights is None else float(weights[kept].sum()))
    assert mean.is_special == (weights is not None or ignored != -100)


def test_a_label_mean_is_told_in_words():
    assert str(LabelMean(1, False, -100, WEIGHTS)) == "the class weights of the labels that are not -100"
    assert str(LabelMean(1, True, 7, None)) == "labels that are not 7, without the first label of each sequence"


class WithLoss(nn.Module):
    """Returns its loss: a cross entropy with class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, inputs, labels):
        return F.cross_entropy(self.linear(inputs), labels, weight=WEIGHTS)


def epoch(loss_of: Any, sizes=(4, 2, 4, 2), effective_batch_size=6, **options: Any) -> list[str]:
    """Run an epoch of a user's loop, by default of two optimizer steps, and return the warnings."""
    model = nn.Linear(3, 3).double()
    batches = [(OUT.detach()[:size], LABELS[:size]) for size in sizes]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps(batches, batch_size=4, effective_batch_size=effective_batch_size, **options):
            for inputs, labels in step:
                with step.attempt():
                    step.backward(loss_of(model(inputs), labels))
            model.zero_grad()
    assert all(one.filename == __file__ for one in caught), "each points at the loop"
    return [str(one.message) for one in caught if one.category is UnevenLossWarning]


class TestLoopsOfOnesOwn:
    def test_class_weights_without_a_count_are_warned_of_once(self):
        (said,) = epoch(lambda outputs, labels: F.cross_entropy(outputs, labels, weight=WEIGHTS))
        assert "The loss is a cross entropy with class weights" in said

    def test_nothing_is_said_of_a_count_or_a_mean_over_samples(self):
        weighted = lambda outputs, labels: F.cross_entropy(outputs, labels, weight=WEIGHTS)
        assert not epoch(weighted, count=lambda batch: WEIGHTS[batch[1]].sum())
        assert not epoch(F.cross_entropy)
        assert not epoch(lambda outputs, labels: outputs.sum() / labels.float().norm())

    @pytest.mark.parametrize(("effective", "warns"), [(4, 0), (5, 1)])
    def test_a_step_of_one_forward_weights_nothing(self, effective, warns):
        """A plan of one forward in one process warned about class weights, although its gradient was exact."""
        weighted = lambda outputs, labels: F.cross_entropy(outputs, labels, weight=WEIGHTS)
        assert len(epoch(weighted, effective_batch_size=effective, sizes=(4, 4, 4, 4))) == warns

    def test_a_later_step_of_two_forwards_is_warned_of(self):
        weighted = lambda outputs, labels: F.cross_entropy(outputs, labels, weight=WEIGHTS)
        assert len(epoch(weighted, effective_batch_size=4, sizes=(4, 4, 2, 2))) == 1

    def test_a_micro_batch_that_may_be_cut_is_warned_of(self):
        weighted = lambda outputs, labels: F.cross_entropy(outputs, labels, weight=WEIGHTS)
        assert len(epoch(weighted, effective_batch_size=4, sizes=(4, 4), cuts=object())) == 1

    def test_losses_of_several_devices_are_warned_of_until_reduce_counts(self):
        """Devices that compute the loss combine it by samples, also in a step of one forward."""
        model = BalancedDataParallel(None, WithLoss(), ["cpu", "cpu"], split=(4, 2))
        batch = OUT.detach(), LABELS
        said = []
        for reduce in (None, lambda call: float(WEIGHTS[call[0][1]].sum())):
            model.reduce = reduce
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in steps([batch], batch_size=6, effective_batch_size=6):
                    for inputs, labels in step:
                        step.backward(model(inputs, labels))
            said.append([str(one.message) for one in caught if one.category is UnevenLossWarning])
            got = [p.grad.clone() for p in model.module.parameters()]
            model.zero_grad()
            model.module(*batch).backward()
            exact = all(torch.allclose(p.grad, own) for p, own in zip(model.module.parameters(), got, strict=True))
            assert exact is not bool(said[-1])
            model.zero_grad()
        assert "weights devices by their samples" in said[0][0]
        assert "Set model.reduce" in said[0][0]
        assert "count=" not in said[0][0]
        assert not said[1]

    def test_a_sum_is_warned_of(self):
        (said,) = epoch(lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum"))
        assert "loss_reduction='sum'" in said


class WithAuxiliary(nn.Module):
    """Keeps an auxiliary loss, or an activation, in an attribute."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.first, self.second = keeps, nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        self.kept = hidden.square().mean() if self.keeps == "a loss" else hidden
        return self.second(hidden)


def test_an_auxiliary_loss_in_an_attribute_is_warned_of_once():
    model = WithAuxiliary("a loss")
    wrapped = BalancedDataParallel(None, model, ["cpu", "cpu"], split=(4, 2))
    with pytest.warns(ReduceWarning, match=r"in the attribute kept of WithAuxiliary\. Each device overwrites it"):
        wrapped(OUT.detach())
    wrapped(OUT.detach())  # a second warning would be an error


@pytest.mark.parametrize("grad", [False, True])
def test_an_activation_that_the_output_is_made_of_is_not(grad):
    wrapped = BalancedDataParallel(None, WithAuxiliary("an activation"), ["cpu", "cpu"], split=(4, 2))
    with torch.set_grad_enabled(grad):
        wrapped(OUT.detach())
