"""Scalar losses of replicas: the combined loss is the whole batch's, whatever the loss averages over."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autosplit
from autosplit import Workload
from autosplit.errors import InputError, WorkloadError
from autosplit.parallel import loss_weights as reducing
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.loss_weights import DoubtfulWeights, ReduceWarning, weights_of
from autosplit.plan.record import reduce_of
from autosplit.probe.gradient_check import check
from autosplit.runtime.memory_tracker import Tracker

SPLITS = [(4, 6, 6), (1, 2, 13)]
VOCABULARY = 40


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(reducing, "_examined", Counter())


class TokenMean(nn.Linear):
    """A user's model whose loss ignores padded labels."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x, labels):
        return F.cross_entropy(super().forward(x).transpose(1, 2), labels)


class SampleMean(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x, labels=None):
        return super().forward(x).square().mean()


def calls(*counted, length=6):
    """One call per count. Each returns labels of one sample with that count."""
    return [((), {"labels": torch.tensor([[1] * count + [-100] * (length - count)])}) for count in counted]


def as_floats(weights):
    return [float(weight) for weight in weights]


def assert_as_the_whole(model, call, split, **options):
    """Compare loss and gradients with those of the same model on the whole batch."""
    plain = copy.deepcopy(model)
    wrapped = BalancedDataParallel(None, model, ["cpu"] * len(split), split=split, **options)
    losses = [
        output if isinstance(output, torch.Tensor) else output.loss for output in (plain(**call), wrapped(**call))
    ]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == losses[0].dtype
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (plain, model)]
    assert torch.isfinite(gradients[1]).all()
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm()


class TestExplicit:
    def test_sum(self):
        assert weights_of("sum", nn.Identity(), calls(1, 2), [1, 1]) == [1.0, 1.0]

    @given(st.lists(st.integers(1, 99), min_size=1, max_size=9))
    def test_samples(self, sizes):
        weights = weights_of("samples", nn.Identity(), calls(*sizes, length=99), sizes)
        assert sum(weights) == pytest.approx(1.0)
        assert weights == [size / sum(sizes) for size in sizes]

    def test_callable(self):
        """A replica's call cannot know the other replicas' counts, so it returns an amount and not a share."""

        def counted(call):
            return float((call[1]["labels"] != -100).sum())

        assert weights_of(counted, nn.Identity(), calls(1, 3), [1, 1]) == [0.25, 0.75]
        assert weights_of(lambda _: 0.0, nn.Identity(), calls(1, 3), [1, 1]) == [0.0, 0.0]

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
    def test_tokens(self, counts):
        weights = weights_of("tokens", nn.Identity(), calls(*counts, length=9), [1] * len(counts))
        assert all(isinstance(weight, torch.Tensor) and weight.dim() == 0 for weight in weights)
        assert as_floats(weights) == pytest.approx([count / sum(counts) for count in counts])

    def test_next_tokens(self):
        """The first label of a sequence has no preceding token, unless the labels were already shifted."""
        weights = weights_of("next tokens", nn.Identity(), calls(2, 4), [1, 1])
        assert as_floats(weights) == pytest.approx([1 / 4, 3 / 4])
        shifted = [((), {**named, "shift_labels": named["labels"]}) for _, named in calls(2, 4)]
        assert as_floats(weights_of("next tokens", nn.Identity(), shifted, [1, 1])) == pytest.approx([1 / 3, 2 / 3])

    @pytest.mark.parametrize("reduce", [None, "samples", "tokens", "next tokens"])
    def test_what_the_module_divides_itself_is_added_up(self, reduce):
        divided = [((), {**named, "num_items_in_batch": torch.tensor(6)}) for _, named in calls(2, 4)]
        assert weights_of(reduce, nn.Identity(), divided, [1, 1]) == [1.0, 1.0]

    def test_tokens_without_labels(self):
        with raises(WorkloadError, "['x']"):
            weights_of("tokens", nn.Identity(), [((torch.ones(1),), {"x": 1})], [1])

    def test_tokens_of_fake_tensors(self):
        """Weights must not depend on values, which fake tensors do not have."""
        with FakeTensorMode():
            chunks = [((), {"labels": torch.zeros(2, 3, dtype=torch.long)}) for _ in range(2)]
            weights = weights_of("tokens", nn.Identity(), chunks, [2, 2])
        assert [weight.shape for weight in weights] == [(), ()]

    def test_unknown(self):
        with raises(InputError, "'mean'"):
            BalancedDataParallel(None, nn.Identity(), ["cpu"] * 2, reduce="mean")


def padded(batch_size=16, length=8, classes=3):
    """Labels with a different count in each sequence, mostly small. The first sequence has none."""
    labels = torch.randint(0, classes, (batch_size, length))
    for index in range(batch_size):
        labels[index, (3 * index) % length if index % 4 == 0 else 1 + index % 2 :] = -100
    labels[0] = -100
    return labels


class TestTokens:
    @pytest.mark.parametrize("of_nothing", [float("nan"), 0.0])
    def test_a_batch_without_a_label_gives_what_the_module_gives(self, of_nothing):
        class Mean(TokenMean):
            def forward(self, x, labels):
                return super().forward(x, labels).nan_to_num(of_nothing)

        model = Mean()
        call = {"x": torch.randn(4, 8, 4), "labels": torch.full((4, 8), -100)}
        wrapped = BalancedDataParallel(None, model, ["cpu"] * 2, split=(1, 3), reduce="tokens")
        torch.testing.assert_close(wrapped(**call), model(**call), equal_nan=True)


class TestWhereNobodySaysIt:
    def test_samples_by_default(self):
        weights = weights_of(None, SampleMean(), calls(6, 6), [1, 3])
        assert weights == [0.25, 0.75]
        assert not isinstance(weights, DoubtfulWeights)

    def test_padded_labels_are_said_once(self):
        call = {"x": torch.randn(16, 8, 4), "labels": padded()}
        wrapped = BalancedDataParallel(None, TokenMean(), ["cpu"] * 2, split=(4, 12))
        with pytest.warns(
            ReduceWarning, match=r"whether the loss of TokenMean ignores labels of -100.*pass reduce='tokens'"
        ):
            wrapped(**call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(**call)

    def test_nothing_is_said_where_no_loss_comes_back(self):
        class PerToken(TokenMean):
            def forward(self, x, labels):
                return F.cross_entropy(nn.Linear.forward(self, x).transpose(1, 2), labels, reduction="none")

        call = {"x": torch.randn(4, 8, 4), "labels": padded(4)}
        assert BalancedDataParallel(None, PerToken(), ["cpu"] * 2, split=(1, 3))(**call).shape == (4, 8)

    def test_labels_are_looked_at_in_the_first_batches(self):
        """The first batch had no padding, and the padded batches after it were weighted by samples without a word."""
        assert not isinstance(weights_of(None, TokenMean(), calls(6, 6), [1, 1]), DoubtfulWeights)
        assert isinstance(weights_of(None, TokenMean(), calls(6, 2), [1, 1]), DoubtfulWeights)
        for _ in range(reducing._MOST_EXAMINED):
            weights_of(None, SampleMean(), calls(6, 6), [1, 1])
        assert not isinstance(weights_of(None, SampleMean(), calls(6, 2), [1, 1]), DoubtfulWeights)

    def test_labels_by_position_are_looked_at(self):
        chunks = [((torch.randn(1, 8, 4), kwargs["labels"]), {}) for _, kwargs in calls(6, 2)]
        assert isinstance(weights_of(None, TokenMean(), chunks, [1, 1]), DoubtfulWeights)

    def test_fake_labels_are_not_looked_at(self):
        with FakeTensorMode():
            chunks = [((), {"labels": torch.zeros(2, 3, dtype=torch.long)}) for _ in range(2)]
            assert weights_of(None, TokenMean(), chunks, [2, 2]) == [0.5, 0.5]
        assert isinstance(weights_of(None, TokenMean(), calls(6, 2), [1, 1]), DoubtfulWeights)

    def test_one_share_needs_no_weight(self):
        assert weights_of(None, TokenMean(), calls(2), [4]) == [1.0]


# Models of transformers, tiny and with random weights


@pytest.fixture(scope="module")
def transformers():
    found = pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
    found.logging.set_verbosity_error()
    return found


TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
    **NO_DROPOUT,
}


def tokens(batch_size=16, length=8):
    return torch.randint(3, VOCABULARY, (batch_size, length))


def spans():
    return {"start_positions": torch.randint(0, 4, (16,)), "end_positions": torch.randint(4, 8, (16,))}


HEADS = {
    "gpt2": ("GPT2LMHeadModel", GPT2, lambda: {"labels": padded()}),
    "llama": ("LlamaForCausalLM", TEXT, lambda: {"labels": padded()}),
    "masked": ("BertForMaskedLM", TEXT | NO_DROPOUT, lambda: {"labels": padded()}),
    "tokens": ("BertForTokenClassification", TEXT | NO_DROPOUT | {"num_labels": 3}, lambda: {"labels": padded()}),
    "one class": (
        "BertForSequenceClassification",
        TEXT | NO_DROPOUT | {"num_labels": 3},
        lambda: {"labels": torch.randint(0, 3, (16,))},
    ),
    "one class, padded": (
        "LlamaForSequenceClassification",
        TEXT | {"num_labels": 3},
        lambda: {"labels": padded(16, 1).flatten()},
    ),
    "many classes": (
        "BertForSequenceClassification",
        TEXT | NO_DROPOUT | {"num_labels": 3},
        lambda: {"labels": torch.rand(16, 3).double()},
    ),
    "regression": (
        "BertForSequenceClassification",
        TEXT | NO_DROPOUT | {"num_labels": 1},
        lambda: {"labels": torch.randn(16, 1).double()},
    ),
    "question answering": ("BertForQuestionAnswering", TEXT | NO_DROPOUT, spans),
    "bart": ("BartForConditionalGeneration", BART, lambda: {"labels": padded()}),
    "bart's decoder": ("BartForCausalLM", BART, lambda: {"labels": padded()}),
    "image": ("ViTForImageClassification", VIT, lambda: {"labels": torch.randint(0, 3, (16,))}),
}


def model_and_call(transformers, name, dtype=torch.float64):
    kind, config, labels = HEADS[name]
    head = getattr(transformers, kind)
    head_config = head.config_class(**config)
    inputs = {"pixel_values": torch.randn(16, 3, 8, 8).double()} if "VIT" in kind.upper() else {"input_ids": tokens()}
    model = head(head_config)
    return (model if dtype == torch.float32 else model.to(dtype)).train(), {**inputs, **labels()}


NEXT = {"gpt2", "llama"}
BY_SAMPLES = {"many classes", "regression", "question answering"}


@pytest.mark.parametrize("name", HEADS)
def test_the_check_finds_what_a_head_averages_over(transformers, name):
    """Also from a sample batch without ignored labels. Later batches may have some."""
    model, call = model_and_call(transformers, name)
    sample = {key: part.clamp(min=0) if reducing.is_integer(part) else part for key, part in call.items()}
    (gradient, *_) = check(Workload(model, sample))
    assert gradient.reduce == ("next tokens" if name in NEXT else None if name in BY_SAMPLES else "tokens")
    assert gradient.split_error < 1e-6
    for split in SPLITS:
        model.zero_grad()
        assert_as_the_whole(model, call, split, reduce=gradient.reduce)


@pytest.mark.slow
def test_a_plan_passes_on_what_its_check_found(transformers, tmp_path):
    model, call = model_and_call(transformers, "gpt2", torch.float32)
    sample = {**call, "labels": call["labels"].clamp(min=0)}
    options = {"effective_batch_size": 16, "n_trials": 1, "profile": "off"}
    autosplit.tune(model, sample, devices="cpu:16MiB,cpu:16MiB", **options).save(tmp_path / "plan.json")
    plan = autosplit.Plan.load(tmp_path / "plan.json")
    wrapped = plan.wrap(model)
    assert reduce_of(plan) == wrapped.reduce == "next tokens"
    wrapped.split, wrapped.ceilings = (3, 13), None
    torch.testing.assert_close(wrapped(**call).loss, model(**call).loss, rtol=1e-6, atol=0)


def test_a_head_that_divides_by_the_items_is_added_up(transformers):
    """The Trainer passes models the number of labels in a whole optimizer step."""
    model, call = model_and_call(transformers, "gpt2")
    assert_as_the_whole(model, {**call, "num_items_in_batch": torch.tensor(7)}, (4, 12), reduce="next tokens")


def test_by_samples_a_language_model_is_off(transformers):
    """Three long sequences among short ones: nearly half of the tokens, but a fifth of the batch."""
    model, call = model_and_call(transformers, "gpt2")
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)  # predictions as sharp as those of a trained model
        expected = model(input_ids=call["input_ids"]).logits.argmax(-1)
    call["labels"] = torch.cat([expected[:, :1], expected[:, :-1]], dim=1)  # the predicted labels ...
    call["labels"][3:, 3:] = -100
    call["labels"][:3] = tokens(3)  # ... and the others
    whole = model(**call).loss.detach()
    errors = []
    for reduce in ("samples", "next tokens"):
        wrapped = BalancedDataParallel(None, model, ["cpu"] * 3, split=(1, 2, 13), reduce=reduce)
        errors.append(float((wrapped(**call).loss.detach() - whole).abs() / whole))
    assert errors[0] > 0.1
    assert errors[1] < 1e-6


@pytest.mark.parametrize("fake", [False, True])
def test_a_model_over_followed_devices(transformers, fake):
    """The tuner's devices: labels are counted on real and fake devices, and caches are joined there, too."""
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        model, call = model_and_call(transformers, "gpt2", torch.float32)
        expected = model(**call).loss
        wrapped = BalancedDataParallel(None, model, ["cpu"] * 3, split=(1, 2, 13), reduce="next tokens")
        with Tracker(["first", "second", "third"], [None] * 3) as tracker:
            outputs = wrapped(**call)
            outputs.loss.backward()
            keys = outputs.past_key_values.layers[0].keys
            assert [tracker.device_of(tensor) for tensor in (outputs.loss, outputs.logits, keys)] == [0, 0, 0]
        assert keys.shape == (16, 2, 8, 8)
        if not fake:
            torch.testing.assert_close(outputs.loss, expected, rtol=1e-6, atol=0)
