"""Batches of lists, ids and images of different sizes are split like tensors, and outputs of samples are joined."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from balanced_models import RUNS, Returns, joined, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_models import RAGGED
from raised import raises
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from autosplit import Whole
from autosplit.errors import WorkloadError
from autosplit.parallel.balanced import AmbiguousBatchWarning

X = torch.arange(20.0).view(4, 5)
SPLITS = [(2, 2), (1, 3), (4, 4), (1, 1), (2, 0)]


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def gradient_error(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)


class TestModels:
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("name", [name for name, ragged in RAGGED.items() if ragged.is_cut])
    def test_train_like_one_process(self, name, split, run):
        ragged = RAGGED[name]
        reference = ragged.built()
        model = copy.deepcopy(reference)
        plain = ragged.compute_loss(reference, ragged.batch(sum(split)))
        plain.backward()
        with run():
            loss = ragged.compute_loss(wrap(model, *split, reduce="samples"), ragged.batch(sum(split)))
            loss.backward()
        assert abs(float(loss.detach() - plain.detach())) < 1e-12
        assert gradient_error(model, reference) < 1e-12

    @pytest.mark.parametrize(
        ("name", "place"), [("graphs", r"kwargs\['x'\]"), ("vision-language", r"kwargs\['pixel_values'\]")]
    )
    def test_that_cannot_be_cut_are_refused_by_the_name_of_a_tensor(self, name, place):
        ragged = RAGGED[name]
        with pytest.raises(WorkloadError, match=rf"{place} has \d+ rows.*strategy='ddp'"):
            ragged.compute_loss(wrap(ragged.built(), 2, 2), ragged.batch(4))

    @pytest.mark.parametrize("name", RAGGED)
    @pytest.mark.parametrize("split", [(4,), (4, 0), (0, 4)], ids=str)
    def test_run_whole_on_one_device(self, name, split, run):
        """One device needs no split, so the samples need not be counted."""
        ragged = RAGGED[name]
        with run():
            loss = ragged.compute_loss(wrap(ragged.built(), *split), ragged.batch(4))
        torch.testing.assert_close(loss, ragged.compute_loss(ragged.built(), ragged.batch(4)))

    @pytest.mark.parametrize("split", [(3, 2), (2, 2), (1, 1)], ids=str)
    def test_detections_are_one_dict_for_each_image(self, split, run):
        ragged = RAGGED["detector"]
        model, (images, _) = ragged.built().eval(), ragged.batch(sum(split))
        with run():
            found = wrap(model, *split)(images)
        assert len(found) == sum(split)
        for ours, theirs in zip(found, model(images), strict=True):
            torch.testing.assert_close(ours, theirs)


class Pairs(nn.Module):
    """Compares each row with the number of its text."""

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        assert len(x) == len(texts)
        return torch.stack([row.sum() - len(text) for row, text in zip(x, texts, strict=True)])


class Notes(nn.Module):
    """Keeps its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.seen.append((others, named))
        return x


def seen_with(*others: Any, split=(1, 3), **named: Any) -> list[Any]:
    module = Notes()
    wrap(module, *split)(X, *others, **named)
    return module.seen


class TestWhatIsCut:
    @pytest.mark.parametrize("texts", [["a", "bb", "ccc", "dddd"], ("a", "bb", "ccc", "dddd")])
    @pytest.mark.parametrize("split", [(2, 2), (1, 3), (0, 4)], ids=str)
    def test_texts_go_with_their_rows(self, texts, split, run):
        """Each device got all texts, and `zip` paired the second device's rows with the first texts."""
        with run():
            assert torch.equal(wrap(Pairs(), *split)(X, texts), Pairs()(X, texts))

    @pytest.mark.parametrize(
        "items",
        [[1, 2, 3, 4], [[1], [2, 3], [], [4]], [None, "a", 2, {"k": 1}], [torch.zeros(n) for n in range(4)]],
        ids=["numbers", "lists", "mixed", "tensors"],
    )
    def test_lists_of_any_samples(self, items):
        (first,), (second,) = (others for others, _ in seen_with(items))
        assert len(first) == 1
        assert len(second) == 3
        for ours, theirs in zip(first + second, items, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs

    @pytest.mark.parametrize("value", ["text", b"data", 2.5, None, True, [8, 16], (224, 224), X.shape, {"a": [1, 2]}])
    def test_values_without_samples_are_whole(self, value):
        assert [named for _, named in seen_with(value=value)] == [{"value": value}] * 2

    def test_a_list_that_did_not_grow_with_the_batch_is_whole(self):
        module = Notes()
        model = wrap(module, 2, 2)
        for x in (X, X[:2]):
            model(x, sizes=[224, 224])
        assert all(named == {"sizes": [224, 224]} for _, named in module.seen)

    def test_a_list_of_inputs_is_no_list_of_samples(self):
        """As in nn.DataParallel: each of the two tensors is split."""
        module = Notes()
        with pytest.warns(AmbiguousBatchWarning, match="a list of 2 tensors, each with 2 rows. It was cut into 2 rows"):
            wrap(module, 1, 1)(X[:2], [X[:2], X[:2] + 1])
        assert [[part.shape for part in others[0]] for others, _ in module.seen] == [[(1, 5), (1, 5)]] * 2

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (np.zeros((4, 2)), r"inputs\[1\] is a ndarray of 4 items, as many as the batch has samples.*Whole"),
            ({1, 2, 3, 4}, r"inputs\[1\] is a set of 4 items"),
            (range(4), r"inputs\[1\] is a range of 4 items"),
            (
                type("Graph", (), {"to": lambda self, device: self})(),
                r"inputs\[1\] is a Graph, which moves itself",
            ),
            (pack_sequence([X]), "PackedSequence"),
        ],
        ids=["array", "set", "range", "object", "packed"],
    )
    def test_other_parts_are_refused_by_name(self, value, said):
        with pytest.raises(WorkloadError, match=said):
            seen_with(value)
        assert type(seen_with(Whole(value))[0][0][0]) is type(value)

    def test_equal_images_in_a_list_are_warned_of(self):
        """Eight images of three channels are eight samples or three, and only the plan's split shows which."""
        images = [torch.zeros(3, 4, 4) for _ in range(8)]
        model = wrap(Returns(lambda images: torch.zeros(len(images))), 3, 5)
        assert model(images).shape == (8,)
        with pytest.warns(AmbiguousBatchWarning, match="a list of 6 tensors, each with 3 rows.*cut into 3 samples"):
            wrap(Returns(lambda images: torch.zeros(len(images[0]))), 3, 5)(images[:6])


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), kind=st.sampled_from([list, tuple]))
def test_lists_of_samples_come_back_in_order(sizes, kind):
    """A list of texts is split, returned by each device, and joined to the same list."""
    texts = kind(f"sample {index}" for index in range(sum(sizes)))
    module = Notes()
    module.forward = lambda x, texts: {"texts": texts, "x": x}
    assert wrap(module, *sizes)(torch.zeros(sum(sizes), 1), texts)["texts"] == texts


class TestOutputs:
    def test_classes_are_one_for_each_sample(self, run):
        """They were added up: [0, 1, 2, 3] became [2, 4]."""
        assert joined(lambda x: x.flatten().long().tolist(), 2, 2, run=run) == [0, 1, 2, 3]

    def test_one_scalar_for_each_image(self, run):
        """Four images gave two results."""
        images = [torch.full((3, 2 + index, 2), float(index)) for index in range(4)]
        with run(), pytest.warns(AmbiguousBatchWarning, match="assumed samples"):
            found = wrap(Returns(lambda images: [image.mean() for image in images]), 2, 2)(images)
        assert [float(one) for one in found] == [0.0, 1.0, 2.0, 3.0]

    def test_gradients_reach_each_device(self):
        x = X.clone().requires_grad_()
        rows = wrap(Returns(lambda x: [row[: 2 + int(row[0]) % 3] for row in x]), 1, 3)(x)
        sum(row.sum() for row in rows).backward()
        reference = X.clone().requires_grad_()
        sum(row[: 2 + int(row[0]) % 3].sum() for row in reference).backward()
        assert torch.equal(x.grad, reference.grad)

    @pytest.mark.parametrize("split", [(2, 2), (1, 3)], ids=str)
    @pytest.mark.parametrize(
        ("output", "place"),
        [
            (lambda x: x.new_zeros(6, len(x), 5), "The output"),
            (lambda x: (x, x.new_zeros(3, len(x), 5)), "The output[1]"),
            (lambda x: {"x": x, "state": x.new_zeros(3, len(x), 5)}, "The output['state']"),
        ],
        ids=["CTC", "states", "dict"],
    )
    def test_tensors_without_the_batch_first_are_refused_by_name(self, output, place, split, run):
        """Equal devices joined time steps: (6, 4, 5) became (12, 2, 5)."""
        with raises(WorkloadError, place):
            joined(output, *split, run=run)

    def test_a_list_of_losses_is_not_taken_for_samples(self):
        with raises(WorkloadError):
            joined(lambda x: [x.mean(), x.sum()], 2, 2)
        losses = joined(lambda x: (x.mean(), x.square().mean()), 2, 2)
        assert [float(one) for one in losses] == [1.5, 3.5]

    def test_equal_texts_are_one_for_each_sample(self):
        with pytest.warns(AmbiguousBatchWarning, match="a list of 2 items.*assumed samples"):
            assert joined(lambda x: ["cat"] * len(x), 2, 2) == ["cat"] * 4
        assert joined(lambda x: ["cat"] * len(x), 1, 3) == ["cat"] * 4

    def test_a_list_of_outputs_is_joined_item_by_item(self):
        """As in nn.DataParallel. If the lists are as long as the devices' samples by accident, there is a warning."""
        with pytest.warns(AmbiguousBatchWarning, match="assumed a container of tensors with the batch first"):
            assert [part.shape for part in joined(lambda x: [x, x], 2, 2)] == [(4, 1), (4, 1)]
        assert [part.shape for part in joined(lambda x: [x, x], 1, 2)] == [(3, 1), (3, 1)]
