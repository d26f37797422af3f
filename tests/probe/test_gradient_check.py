"""The gradient check gives the right verdict on each loss. Its figures are right, and it leaves nothing behind."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plans import make_plan
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import Uncopyable, char_gpt, cnn, mlp, net, net_batch, recurrent

import autosplit
from autosplit.cli import check_report
from autosplit.cli.main import main
from autosplit.errors import UserCodeError, WorkloadError
from autosplit.parallel.epoch_steps import steps
from autosplit.plan.plan import Plan
from autosplit.probe import gradient_check, gradient_runs
from autosplit.probe.check_result import Check, error_text, is_count_expression
from autosplit.probe.gradient_check import check, checks_for
from autosplit.runtime.tracked_step import wrapper_for
from autosplit.torch_versions import FakeTensorMode
from autosplit.workload.model_call import training_loss
from autosplit.workload.tree import Whole, map_tensors
from autosplit.workload.workload import Workload


def by_subject(found):
    return {one.subject: one for one in found}


def advice_on(found, subject):
    one = by_subject(found)[subject]
    assert one.depends
    return one.advice


def only_gradient(found):
    (one,) = found
    assert one.subject == "gradient"
    assert not one.depends
    assert not one.advice
    return one


# ------------------------------------------------------------------------------------------------------- workloads


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(0.3), nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.drop(self.embedding(x)))


def padded(ignored, samples=6, length=9):
    """Tokens and labels of lengths 2, 3, 4, ..., padded."""
    inputs, targets = torch.randint(1, 20, (2, samples, length))
    for row in range(samples):
        targets[row, row + 2 :] = ignored
    return inputs, targets


def token_loss(outputs, targets, ignored=-100):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=ignored)


class WithOwnLoss(nn.Module):
    """Like a transformers model, but of another class: a mean over labels that count."""

    def __init__(self):
        super().__init__()
        self.body = TokenModel()

    def forward(self, input_ids, labels):
        logits = self.body(input_ids)
        return {"loss": token_loss(logits, labels), "logits": logits}


def info_nce(a, b):
    similarities = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.1
    return F.cross_entropy(similarities, torch.arange(len(a)))


def contrastive(**options):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    return Workload(model, (torch.randn(16, 8), torch.randn(16, 16)), loss_fn=info_nce, **options)


class ContrastiveInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 16)

    def forward(self, x, y):
        return info_nce(self.encoder(x), y)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0))


class BatchSoftmax(nn.Module):
    """A layer that mixes the samples of a batch."""

    def forward(self, x):
        return x.softmax(0)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x))


class SinglePrecision(nn.Module):
    """A module with a plain tensor that no conversion reaches."""

    def __init__(self):
        super().__init__()
        self.layer, self.mixing = nn.Linear(4, 3), torch.randn(4, 4)

    def forward(self, x):
        return self.layer(x @ self.mixing)


def classified(model, samples=7, **options):
    batch = (torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    return Workload(model, batch, **{"loss_fn": F.cross_entropy, **options})


def gan(norm, optimizers=None):
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), norm(16), nn.LeakyReLU(), nn.Linear(16, 1))

    def step(models, optimizers, batch):
        for_g, for_d = optimizers.values() if isinstance(optimizers, dict) else optimizers
        g, d = models["generator"], models["discriminator"]
        fake = g(torch.randn(len(batch), 4, dtype=batch.dtype))
        for_d.zero_grad()
        (F.softplus(-d(batch)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        for_d.step()
        for_g.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        for_g.step()

    models = {"generator": generator, "discriminator": discriminator}
    chosen = [torch.optim.Adam, torch.optim.SGD] if optimizers is None else optimizers
    return Workload(models, torch.randn(8, 8), step=step, optimizer=chosen)


# ------------------------------------------------------------------------------------------------ nothing depends


@pytest.mark.parametrize(
    "make",
    [
        mlp,
        partial(recurrent, nn.GRU),
        partial(char_gpt, width=32, depth=1, heads=2),
        lambda: classified(nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.Linear(8, 3))),
        lambda: classified(nn.Sequential(nn.Linear(4, 3)), compute_loss=own_loss, loss_fn=None),
        lambda: Workload(partial(nn.Linear, 4, 3), net_batch(), loss_fn=F.cross_entropy),
        lambda: classified(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 3))),
    ],
    ids=["mlp", "gru", "gpt", "other norms", "compute_loss", "factory", "frozen BatchNorm"],
)
def test_what_does_not_depend_is_exact(make):
    workload = make()
    if workload.sample_batch_size < 6:
        workload = replace(workload, make_batch=None)
    one = only_gradient(check(workload))
    assert one.split_error < 1e-12
    assert one.accumulation_error < 1e-12


def own_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class DropPath(nn.Module):
    def forward(self, x):
        return x * torch.empty(len(x), 1).bernoulli_(0.5) if self.training else x


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y, _ = self.rnn(x.unsqueeze(1).expand(-1, 5, -1))
        y = y + self.attention(y, y, y)[0]
        y = y + F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        y = y + F.scaled_dot_product_attention(y, y, y, None, 0.5)
        y = F.dropout(torch.dropout(y, 0.5, True), 0.5) + F.alpha_dropout(y, 0.5, training=True)
        return self.head(torch.native_dropout(y, 0.5, True)[0].mean(1))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5), DropPath()])
def test_dropout_layers_are_off(layer):
    only_gradient(check(classified(nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)))))


def test_functional_dropout_is_off_too():
    workload = classified(FunctionalDropout())
    only_gradient(check(workload))
    copy = gradient_runs.QuietCopy(workload, workload.sample_batch, torch.float64, (2, 5))
    same = gradient_runs.relative(copy.whole(seed=1), copy.whole(seed=2))
    assert same == {gradient_runs.GRADIENT: 0.0}  # exact, because no random numbers are drawn


# --------------------------------------------------------------------------------------------------------- losses


def accumulated(workload, count=None, *, divided=False, sizes=(4, 2)):
    """Train as the advice describes. Return the gradient of `plan.steps`, and the whole batch's."""
    model = workload.model.eval().double()
    batch = map_tensors(lambda part: part.double() if part.is_floating_point() else part, workload.sample_batch)
    micro_batches = [
        type(batch)(torch.split(part, sizes)[i] for part in batch)
        if not isinstance(batch, dict)
        else {key: torch.split(part, sizes)[i] for key, part in batch.items()}
        for i in range(len(sizes))
    ]

    def gradient():
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return torch.cat([part.flatten() for part in found])

    training_loss(workload, model, batch).backward()
    whole = gradient()
    for step in steps(micro_batches, batch_size=max(sizes), effective_batch_size=sum(sizes), count=count):
        for micro_batch in step:
            loss = training_loss(workload, model, micro_batch)
            step.backward(loss / step.weight if divided else loss)
    return gradient(), whole


def counted_by(advice):
    """Extract the function from the advice."""
    expression = advice.split("plan.steps(loader, count=")[1].split(") (under DDP")[0]
    return eval(expression)


@pytest.mark.parametrize(
    ("ignored", "loss_fn"),
    [
        (-100, token_loss),
        (0, partial(token_loss, ignored=0)),
        (7, partial(token_loss, ignored=7)),
        (-1, lambda outputs, targets: token_loss(outputs, targets, -1)),
    ],
)
def test_a_mean_over_labels_is_named_with_what_counts_them(ignored, loss_fn):
    workload = Workload(TokenModel(), padded(ignored), loss_fn=loss_fn)
    found = check(workload)
    loss = by_subject(found)["loss"]
    assert loss.split_error < 1e-12  # taken of the gathered outputs
    assert loss.accumulation_error > 0.1
    assert f"labels that are not {ignored}" in advice_on(found, "loss")
    gradient, whole = accumulated(workload, counted_by(loss.advice))
    torch.testing.assert_close(gradient, whole)


def test_equal_padding_is_exact_all_the_same():
    inputs, targets = padded(-100)
    targets[:, 3:] = -100
    targets[:, :3] = 1
    only_gradient(check(Workload(TokenModel(), (inputs, targets), loss_fn=token_loss)))


def test_a_loss_inside_the_model_is_combined_by_what_it_averages_over():
    """Also if the sample batch has no ignored label, because later batches may have some."""
    inputs, targets = padded(-100)
    workload = Workload(WithOwnLoss(), {"input_ids": inputs, "labels": targets})
    found = check(workload)
    loss = by_subject(found)["loss"]
    assert loss.split_error < 1e-12
    assert loss.accumulation_error > 0.1
    assert found[0].reduce == "tokens"
    gradient, whole = accumulated(workload, counted_by(loss.advice))
    torch.testing.assert_close(gradient, whole)
    whole_labels = Workload(WithOwnLoss(), {"input_ids": inputs, "labels": targets.clamp(min=0)})
    assert only_gradient(check(whole_labels)).reduce == "tokens"


def test_the_head_of_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    inputs, labels = torch.randint(0, 32, (2, 6, 9))
    for row in range(6):
        labels[row, row + 3 :] = -100
    workload = Workload(model, {"input_ids": inputs, "labels": labels, "use_cache": False})
    loss = by_subject(check(workload))["loss"]
    assert loss.split_error < 1e-6  # labels are counted, and the head takes its loss in float32
    assert "batch['labels'][:, 1:] != -100" in loss.advice


def test_labels_that_are_shifted_are_counted_without_the_first():
    def shifted(outputs, targets):
        return token_loss(outputs[:, :-1], targets[:, 1:])

    inputs, targets = padded(-100)
    targets[0, :2] = -100
    workload = Workload(TokenModel(), (inputs, targets), loss_fn=shifted)
    loss = by_subject(check(workload))["loss"]
    assert "[:, 1:]" in loss.advice
    torch.testing.assert_close(*accumulated(workload, counted_by(loss.advice)))


def test_a_mean_over_a_mask_is_named():
    def masked(outputs, targets):
        labels, mask = targets
        return (F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none") * mask).sum() / mask.sum()

    inputs, labels = torch.randint(0, 20, (2, 6, 9))
    mask = (torch.arange(9) < torch.arange(2, 8).unsqueeze(1)).float()
    loss = by_subject(check(Workload(TokenModel(), (inputs, (labels, mask)), loss_fn=masked)))["loss"]
    assert "batch[1][1].sum()" in loss.advice


HOOKED = {}


class Auxiliary(nn.Module):
    """Keeps the input of an auxiliary loss in an attribute or in a hook."""

    def __init__(self, keeps):
        super().__init__()
        torch.manual_seed(0)
        self.keeps, self.first, self.second = keeps, nn.Linear(4, 8), nn.Linear(8, 3)
        if keeps == "a forward hook on first":
            self.first.register_forward_hook(lambda _module, _inputs, output: HOOKED.update(hidden=output))

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.keeps == "the attribute kept of Auxiliary":
            self.kept = hidden.square().mean()
        return self.second(hidden.tanh())


def auxiliary_loss(model, batch):
    outputs, inner = model(batch[0]), getattr(model, "module", model)
    penalty = inner.kept if hasattr(inner, "kept") else HOOKED["hidden"].square().mean()
    return F.cross_entropy(outputs, batch[1]) + penalty


@pytest.mark.parametrize("keeps", ["the attribute kept of Auxiliary", "a forward hook on first"])
def test_a_loss_from_beside_the_outputs_depends_on_the_batch(keeps):
    """The old advice was to count labels other than -100."""
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    loss = by_subject(check(Workload(Auxiliary(keeps), batch, compute_loss=auxiliary_loss)))["loss"]
    HOOKED.clear()
    assert loss.split_error > 1e-3
    assert loss.accumulation_error < 1e-12
    assert "Let the model return its outputs" in loss.advice
    assert "-100" not in loss.advice


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_the_loss_are_named_with_what_adds_them_up(smoothing):
    weights = torch.tensor([1.0, 5.0, 2.0])
    workload = classified(nn.Linear(4, 3), 6, loss_fn=nn.CrossEntropyLoss(weights.double(), label_smoothing=smoothing))
    loss = by_subject(check(workload))["loss"]
    assert loss.count == "float(loss_fn.weight[batch[1][batch[1] != -100]].sum())"
    assert is_count_expression(loss.count)
    count = eval(f"lambda batch: {loss.count}", {"loss_fn": workload.loss_fn})
    torch.testing.assert_close(*accumulated(workload, count))


def test_class_weights_inside_a_function_are_named():
    def weighted(outputs, targets):
        weights = torch.tensor([1.0, 5.0, 2.0], dtype=outputs.dtype)
        return F.cross_entropy(outputs, targets, weights, ignore_index=7)

    loss = by_subject(check(classified(nn.Linear(4, 3), loss_fn=weighted)))["loss"]
    assert loss.count == "float(class_weights[batch[1][batch[1] != 7]].sum())"
    assert "a mean over the class weights of the labels that are not 7" in loss.advice


def test_weights_of_samples_are_added_up_as_real_numbers():
    def weighted(outputs, targets):
        labels, weights = targets
        return (F.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()

    targets = torch.randint(3, (8,)), torch.rand(8, dtype=torch.float64)
    workload = Workload(nn.Linear(4, 3), (torch.randn(8, 4), targets), loss_fn=weighted)
    loss = by_subject(check(workload))["loss"]
    assert loss.count == "float(batch[1][1].sum())"
    assert "a mean over the weights in batch[1][1]" in loss.advice


def test_a_mean_over_an_unknown_unit_may_be_counted_by_the_user():
    def weighted(outputs, targets):
        weights = torch.tensor([1.0, 5.0, 2.0], dtype=outputs.dtype)[targets]
        return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum()

    loss = by_subject(check(classified(nn.Linear(4, 3), loss_fn=weighted)))["loss"]
    assert loss.count is None
    assert "if the loss is a mean over something else than samples, pass count= to plan.steps" in loss.advice


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_over_the_whole_batch_forbids_accumulation(inside):
    workload = contrastive()
    if inside:
        workload = Workload(ContrastiveInside(), (torch.randn(16, 8), torch.randn(16, 16)))
    found = check(workload)
    loss = by_subject(found)["loss"]
    assert loss.accumulation_error > 0.3
    assert 'loss_scope="batch"' in advice_on(found, "loss")
    assert (loss.split_error > 0.3) == inside
    assert ("Let the model return its outputs" in loss.advice) == inside


def test_similarities_to_all_samples_are_a_matter_of_the_loss():
    class WithCriterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.criterion = nn.Linear(8, 16), nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.criterion(self.encoder(x) @ y.T, torch.arange(len(x)))

    found = check(Workload(WithCriterion(), (torch.randn(16, 8), torch.randn(16, 16))))
    assert 'loss_scope="batch"' in advice_on(found, "loss")


def test_a_declared_loss_over_the_whole_batch_is_not_accumulated():
    one = only_gradient(check(contrastive(loss_scope="batch")))
    assert one.split_error < 1e-12
    assert one.accumulation_error is None
    assert "Accumulation was not checked: loss_scope='batch'" in str(one)


def test_a_sum_is_told_from_a_mean():
    loss_fn = partial(F.cross_entropy, reduction="sum")
    workload = classified(nn.Linear(4, 3), 6, loss_fn=loss_fn)
    advice = advice_on(check(workload), "loss")
    assert "loss_reduction='sum'" in advice
    assert "step.backward(loss * step.num_ranks / step.weight)" in advice
    only_gradient(check(replace(workload, loss_reduction="sum")))
    torch.testing.assert_close(*accumulated(workload, divided=True))


def test_a_sum_inside_the_model_is_one_too():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).square().sum()

    workload = Workload(Summed(), torch.randn(7, 4))
    assert "loss_reduction='sum'" in advice_on(check(workload), "loss")
    only_gradient(check(replace(workload, loss_reduction="sum")))


def test_a_mean_that_was_declared_a_sum_is_told():
    assert "Pass loss_reduction='mean'" in advice_on(check(classified(nn.Linear(4, 3), loss_reduction="sum")), "loss")


def test_a_part_whose_labels_are_all_ignored():
    inputs, targets = padded(-100)
    targets[-2:] = -100
    workload = Workload(TokenModel(), (inputs, targets), loss_fn=token_loss)
    loss = by_subject(check(workload))["loss"]
    torch.testing.assert_close(*accumulated(workload, counted_by(loss.advice)))


def test_a_part_whose_mean_is_not_a_number():
    def masked(outputs, mask):
        return (outputs.square().mean(1) * mask).sum() / mask.sum()

    loss = by_subject(check(Workload(nn.Linear(4, 3), (torch.randn(6, 4), torch.arange(6) < 4), loss_fn=masked)))[
        "loss"
    ]
    assert loss.accumulation_error is None
    assert "pass count= to plan.steps" in loss.advice
    assert Plan.from_json(make_plan(checks=(loss,)).to_json()).checks == (loss,)


# ---------------------------------------------------------------------------------------------------------- models


def test_each_batchnorm_is_named_with_the_gradients_figures():
    workload = cnn()
    workload.model.append(nn.Linear(10, 10)).append(nn.BatchNorm1d(10))
    found = check(workload)
    assert [one.subject for one in found] == ["gradient", "BatchNorm2d at 1", "BatchNorm1d at 7"]
    assert all(one.depends and one.split_error > 0.01 and one.accumulation_error > 0.01 for one in found)
    assert len({one.split_error for one in found}) == 1
    assert "GroupNorm" in found[1].advice


def test_a_batchnorm_does_not_hide_what_else_depends():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    found = check(classified(model, loss_fn=partial(F.cross_entropy, reduction="sum")))
    assert [one.subject for one in found] == ["gradient", "BatchNorm1d at 1", "loss"]
    assert "loss_reduction='sum'" in found[2].advice


@pytest.mark.parametrize("model", [Centred(), nn.Sequential(nn.Linear(4, 8), BatchSoftmax(), nn.Linear(8, 3))])
def test_a_model_that_looks_at_neighbours_depends_on_the_batch(model):
    assert "depends on the whole batch: the loss or a layer" in advice_on(check(classified(model)), "loss")


def test_a_model_that_keeps_state_depends_on_the_batch():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 3))
    found = check(classified(model))
    assert "keeps state from one forward to the next" in advice_on(found, "loss")
    assert by_subject(found)["loss"].split_error < 1e-12


def test_random_numbers_are_not_blamed_on_the_loss():
    found = check(classified(Noisy()))
    (one,) = found
    assert one.accumulation_error > 0.01
    assert not one.depends
    assert "draws random numbers" in one.remark


def test_a_little_noise_hides_nothing_larger():
    class AlmostQuiet(Noisy):
        def forward(self, x):
            return self.layer(x + 1e-6 * torch.randn_like(x))

    found = check(classified(AlmostQuiet(), loss_fn=partial(F.cross_entropy, reduction="sum")))
    assert found[0].depends
    assert by_subject(found)["loss"].depends


def test_other_batch_dimensions_and_what_holds_no_samples():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 6)

        def forward(self, x, mixing):
            return self.layer(torch.einsum("ts,snf->tnf", mixing, x))[0].square()

    batch = (torch.randn(6, 7, 4), Whole(torch.randn(6, 6)))
    only_gradient(check(Workload(TimeFirst(), batch, batch_dim=1)))


class Placed(nn.Module):
    """Adds a row for each position, (T, E), to its tokens' embeddings."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, tokens, positions):
        return self.head(self.embedding(tokens) + positions).squeeze(-1)


@pytest.mark.whole
def test_what_is_cut_in_doubt_is_said_where_another_size_fails():
    """A square batch does not show which dimension holds the samples. torch's error gave no remedy."""
    given = Workload(Placed(), (torch.randint(0, 9, (6, 6)), torch.randn(6, 4)), loss_fn=None)
    with pytest.raises(UserCodeError, match=r"sample_batch\[1\] of shape \(6, 4\).*as autosplit.Whole\(tensor\)"):
        autosplit.tune(given, devices="sim:1xRTX3090", profile="off", n_trials=1, max_batch_size=64)


def test_a_model_that_refuses_float64_is_checked_in_float32():
    one = only_gradient(check(classified(SinglePrecision())))
    assert 1e-12 < one.accumulation_error < 1e-4
    assert "in float32" in one.remark
    advice_on(check(classified(SinglePrecision(), loss_fn=partial(F.cross_entropy, reduction="sum"))), "loss")


def test_reduced_precision_is_left_out():
    only_gradient(check(classified(nn.Sequential(nn.Linear(4, 3)), precision="bf16")))
    only_gradient(check(classified(nn.Sequential(nn.Linear(4, 3)).bfloat16())))


def test_rounding_inside_the_model_is_no_dependence():
    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 3)

        def forward(self, x):
            half = self.first(x).to(torch.bfloat16)
            return self.last((half @ half.new_ones(64, 64)).to(x.dtype))

    (one,) = check(classified(Rounding()))
    assert one.accumulation_error > 1e-6
    assert not one.depends


# ------------------------------------------------------------------------------------------------- custom steps


def test_both_optimizers_of_a_gan_are_looked_at():
    found = check(gan(nn.LayerNorm))
    assert [one.subject for one in found] == [
        "gradient of optimizer 1 (discriminator)",
        "gradient of optimizer 0 (generator)",
    ]
    assert all(one.split_error < 1e-12 and one.accumulation_error is None and not one.depends for one in found)
    assert "Accumulation was not checked: step=" in str(found[0])


def test_the_batchnorm_of_a_gan_is_named():
    found = check(gan(nn.BatchNorm1d, {"for g": torch.optim.Adam, "for d": torch.optim.SGD}))
    assert [one.subject for one in found] == [
        "gradient of optimizer for d",
        "gradient of optimizer for g",
        "BatchNorm1d at discriminator.1",
    ]
    assert all(one.depends for one in found)


def test_a_gan_with_a_layer_that_looks_at_neighbours():
    found = check(gan(lambda _: BatchSoftmax()))
    assert "depends on the whole batch: the loss or a layer" in advice_on(found, "loss")


def test_an_optimizer_that_steps_twice_and_one_with_a_closure():
    model = nn.Linear(4, 3)

    def step(models, optimizers, batch):
        def closure():
            optimizers.zero_grad()
            loss = models(batch).square().mean()
            loss.backward()
            return loss

        assert optimizers.step(closure) > 0
        optimizers.step(closure)

    found = check(Workload(model, torch.randn(6, 4), step=step, optimizer=torch.optim.LBFGS))
    assert [one.subject for one in found] == ["gradient of optimizer 0", "gradient of optimizer 0, step 2"]
    assert max(one.split_error for one in found) < 1e-12


# ---------------------------------------------------------------------------------------- what cannot be checked


def test_too_few_samples_are_refused_and_made_where_they_can_be():
    workload = Workload(nn.Linear(4, 3), (torch.randn(3, 4), torch.randint(0, 3, (3,))), loss_fn=F.cross_entropy)
    with raises(WorkloadError, "3", "s", "4"):
        check(workload)
    found, notes = checks_for(workload)
    assert found == ()
    assert notes[0].kind == "not-checked"
    assert "was not run: WorkloadError: The sample batch has 3 samples" in notes[0].text
    assert "autosplit check FILE (autosplit.check(workload))" in notes[0].text
    only_gradient(check(replace(workload, make_batch=lambda n: (torch.randn(n, 4), torch.randint(0, 3, (n,))))))


def test_a_model_that_this_machine_can_not_hold_is_refused_before_it_is_built():
    def workload():
        layers = [nn.Linear(2**14, 2**14, bias=False) for _ in range(64)]  # 64 GiB in float32
        return Workload(nn.Sequential(*layers), torch.zeros(4, 2**14))

    with raises(WorkloadError, "768.0"):
        check(workload)


def test_a_gradient_that_is_not_finite_is_refused():
    with pytest.raises(WorkloadError, match="not finite"):
        check(Workload(nn.Linear(4, 3), torch.full((6, 4), math.nan)))


def test_the_users_own_errors_show_where():
    def broken(outputs, targets):
        raise ValueError("in the loss")

    with pytest.raises(UserCodeError, match="in the loss") as caught:
        check(classified(nn.Linear(4, 3), loss_fn=broken))
    assert any("in broken" in frame for frame in caught.value.frames)
    _, notes = checks_for(classified(nn.Linear(4, 3), loss_fn=broken))
    assert notes[0].kind == "not-checked"
    assert "in the loss" in notes[0].text


def test_a_function_that_returns_a_workload_is_taken():
    only_gradient(autosplit.check(mlp))


def test_models_without_memory_are_not_checked():
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = mlp()
    for without in (workload, replace(mlp(), model=nn.Linear(64, 10, device="meta"))):
        found, notes = checks_for(without)
        assert found == ()
        assert notes[0].kind == "not-checked"
    assert "built on the meta device" in notes[0].text


def test_what_would_fill_the_memory_is_not_checked(monkeypatch):
    called = []
    monkeypatch.setattr(gradient_check, "available_host_bytes", lambda: 2**20)
    factory = Workload(lambda: called.append(1) or nn.Linear(64, 10_000), torch.randn(4, 64))
    for workload in (mlp(), factory):
        found, notes = checks_for(workload)
        assert found == ()
        assert notes[0].kind == "not-checked"
    assert "over a quarter of this machine's available memory" in notes[0].text
    assert len(called) == 1  # under fake tensors, and never for real


def test_a_slow_first_forward_does_not_skip_the_check(monkeypatch):
    """A busy machine skipped the check, and the printed loop then had no count= for a mean over tokens."""
    seconds = [0.0]

    class Cold(nn.Linear):
        def forward(self, x):
            seconds[0] += 1.5 if seconds[0] == 0 else 0.01
            return super().forward(x)

    monkeypatch.setattr(gradient_runs, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    found, notes = checks_for(classified(Cold(4, 3), 4))
    assert notes == ()
    assert not only_gradient(found).depends


def test_what_takes_too_long_is_not_checked(monkeypatch):
    monkeypatch.setattr(gradient_check, "WARM_S", 0.0)
    monkeypatch.setattr(gradient_check, "PASS_S", 0.0)
    found, notes = checks_for(mlp())
    assert found == ()
    assert notes[0].kind == "not-checked"
    assert "took over 0 s" in notes[0].text


def test_time_that_runs_out_without_gradients_leaves_them_on(monkeypatch):
    """no_grad() ends in a torch function. A timeout there left gradients off, for the user as well."""
    restored = []

    class Restoring(nn.Linear):
        def forward(self, x):
            try:
                with torch.no_grad():
                    time.sleep(0.05)
                return super().forward(x)
            finally:
                restored.append(x.neg().neg())

    monkeypatch.setattr(gradient_check, "COLD_S", 0.02)
    monkeypatch.setattr(gradient_check, "WARM_S", 0.02)
    _, notes = checks_for(classified(Restoring(4, 3), 4))
    assert torch.is_grad_enabled()
    assert notes[0].kind == "not-checked"
    assert "took over 0.02 s" in notes[0].text
    assert len(restored) == 1, "a clean-up runs to its end"


def test_as_many_samples_as_time_allows_are_checked(monkeypatch):
    seen = []
    monkeypatch.setattr(gradient_runs.QuietCopy, "seconds", property(lambda _: 0.2, lambda *_: None), raising=False)

    def loss_fn(outputs, targets):
        seen.append(len(outputs))
        return F.cross_entropy(outputs, targets)

    found, notes = checks_for(classified(nn.Linear(4, 3), 64, loss_fn=loss_fn))
    assert notes == ()
    assert only_gradient(found).remark == "Checked with the first 10 of 64 samples."
    assert max(seen) == 10


def test_a_check_costs_few_passes(monkeypatch):
    samples = []

    def counting(workload):
        model = workload.model
        model.register_forward_hook(lambda _, args, __: samples.append(len(args[0])))
        samples.clear()
        checks_for(workload)
        return sum(samples) / workload.sample_batch_size

    assert counting(mlp()) <= 4.5
    assert counting(classified(net(), loss_fn=partial(F.cross_entropy, reduction="sum"), samples=8)) <= 11


# ------------------------------------------------------------------------------------------ nothing is left behind


def state_of(model):
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "tensors": [
            (id(t), t.dtype, t.data_ptr(), t.detach().clone(), None if t.grad is None else t.grad.clone(), t.grad_fn)
            for t in tensors
        ],
        "modes": [part.training for part in model.modules()],
        "hooks": [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002 # the generator with global state
        "default": torch.get_default_dtype(),
        "modes of torch": torch._C._len_torch_function_stack(),
    }


def same(a, b):
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("make", [net, Uncopyable])
@pytest.mark.parametrize("failing", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_the_live_model_is_as_it_was(make, failing, call):
    model = make()
    calls = []

    def loss_fn(outputs, targets):
        calls.append(torch.rand(1) + random.random())
        if len(calls) == call and failing is not None:
            raise failing("on purpose")
        return F.cross_entropy(outputs, targets)

    workload = Workload(model, net_batch(8), loss_fn=loss_fn, optimizer=torch.optim.AdamW(model.parameters()))
    F.cross_entropy(model(workload.sample_batch[0]), workload.sample_batch[1]).backward()
    next(part for part in model.modules() if isinstance(part, nn.Dropout)).eval()
    before = state_of(model)
    # In float64, a first failure looks like a model without float64 support.
    ends = (failing is not None and call > 1) or failing is KeyboardInterrupt
    if ends:
        with pytest.raises((UserCodeError, KeyboardInterrupt), match="on purpose"):
            check(workload)
    else:
        check(workload)
    assert calls
    after = state_of(model)
    assert [name for name in before if not same(before[name], after[name])] == []


def test_the_loss_and_the_batch_are_left_as_they_were():
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3))
    workload = classified(nn.Linear(4, 3), loss_fn=loss_fn)
    batch = [part.clone() for part in workload.sample_batch]
    check(workload)
    assert loss_fn.weight.dtype == torch.float32
    assert all(map(torch.equal, batch, workload.sample_batch))


# ---------------------------------------------------------------------------------- compared with real training


@pytest.mark.filterwarnings("ignore:The loss is a mean over the labels")  # which it is
def test_figures_are_those_of_the_wrapper_and_of_steps():
    """The two errors, recomputed with public functions."""
    workload = Workload(TokenModel().eval().double(), padded(-100), loss_fn=token_loss)
    one = check(workload)[0]
    gradient, whole = accumulated(workload)
    assert one.accumulation_error == pytest.approx(float((gradient - whole).norm() / whole.norm()), rel=1e-6)
    split = [p.detach().clone() for p in workload.model.parameters()]
    wrapper = wrapper_for(workload, (2, 4))(workload.model)
    training_loss(workload, wrapper, workload.sample_batch).backward()
    split = torch.cat([p.grad.flatten() for p in workload.model.parameters()])
    torch.testing.assert_close(split, whole)


def test_relative_differences():
    ones, zeros = torch.ones(4), torch.zeros(4)
    assert gradient_runs.relative({"a": ones * 1.1}, {"a": ones})["a"] == pytest.approx(0.1, rel=1e-5)
    assert gradient_runs.relative({"a": zeros}, {"a": ones}) == {"a": 1.0}
    assert gradient_runs.relative({"a": zeros}, {"a": zeros}) == {"a": 0.0}
    assert gradient_runs.relative({}, {"a": ones}) == {"a": math.inf}
    assert gradient_runs.relative({"a": ones * math.nan}, {"a": ones}) == {"a": math.inf}


def test_a_gradient_is_one_row():
    dense, sparse, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    dense.grad, sparse.grad = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0]).to_sparse()
    turned = torch.ones(1, dtype=torch.complex64, requires_grad=True)
    turned.grad = torch.tensor([4 + 5j])
    assert gradient_runs._gradient_of([dense, sparse, unused, turned]).tolist() == [1, 2, 0, 3, 0, 0, 4, 5]


# ------------------------------------------------------------------------------------------- plans, command line


def test_checks_come_back_with_their_plan():
    plan = make_plan(checks=check(classified(net(), 8)))
    assert plan.checks
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert isinstance(again.checks[0], Check)
    assert plan.to_dict()["checks"][1]["subject"] == "BatchNorm1d at 1"


def test_a_check_reads_as_one_line():
    one = Check("loss", 3e-16, 0.684, depends=True, advice="Do this.", remark="So it is.")
    assert str(one) == (
        "loss changes when the batch is split (over devices: 3e-16, accumulated: 68 % off). Do this. So it is."
    )
    assert str(Check("gradient", 0.0123, None, depends=False)) == (
        "gradient stays the same when the batch is split (over devices: 1.2 % off, accumulated: not checked)"
    )
    assert error_text(0.1) == "10 % off"


def test_a_plans_report_has_the_changes_first_and_one_line_for_many_norms():
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))), nn.Flatten())
    found = check(Workload(model, (torch.randn(6, 3, 2, 2), torch.randn(6, 12)), loss_fn=F.mse_loss))
    assert [one.subject for one in found] == ["gradient", "BatchNorm2d at 1, 3, 5 and 2 more"]
    quiet_one = Check("gradient of something", 1e-16, None, depends=False)
    assert check_report.check_lines([quiet_one, *found]) == [*map(str, found), str(quiet_one)]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(model, options=""):
        Path("train.py").write_text(
            "import torch, autosplit\nfrom torch import nn\n"
            f"workload = autosplit.Workload({model}, torch.randn(8, 4){options})\n"
        )
        return "train.py"

    return write


def test_check_prints_a_table(script, capsys):
    assert main(["check", script("nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    rows = {line.split("  ")[0].strip(): line.split()[-1] for line in out.splitlines() if line.strip()}
    assert rows["BatchNorm1d at 1"] == "yes"
    assert "- BatchNorm1d at 1: It computes its statistics" in out
    assert err == ""


def test_check_prints_json(script, capsys):
    assert main(["check", script("nn.Linear(4, 1)"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert Check(**found).depends is False


def test_check_fails_with_the_exit_codes_of_the_command_line(script, capsys):
    assert main(["check", "nowhere.py"]) == 2
    assert main(["check", script("nn.Linear(5, 1)")]) == 5
    assert "train.py" not in capsys.readouterr().out
