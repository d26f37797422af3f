"""Outputs of a wrapper keep their order and types, and losses are the whole batch's."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from balanced_models import BATCH, RUNS, TOLERANCE, assert_same_gradients, joined, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.workload.tree import map_tensors


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


# Any nesting and any split


class Both(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass
class Held:
    value: Any
    label: str = "label"


class Sealed(tuple):
    """A subclass of tuple."""

    __slots__ = ()


def numbered(*tail: int, dtype: torch.dtype = torch.float32):
    """A tensor of sample numbers. The samples are along `dim`."""

    def make(n: int, dim: int) -> Tensor:
        shape = (n, *tail)
        return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype).movedim(0, dim).contiguous()

    return make


FLAT = [numbered(3), numbered(2, 2), numbered(4, dtype=torch.int64), numbered(1, dtype=torch.bool)]
PLAIN = [lambda n, dim, value=value: value for value in (None, "text", True, 0.25, torch.float16)]
LEAVES = st.sampled_from([*FLAT, *PLAIN, lambda n, dim: torch.tensor(1.5)])


def nests(children):
    """A tree is a function of the batch size and the batch dimension.

    Each list and tuple ends with a tensor whose rows are the samples. So it is a container, not a list of samples,
    whatever its length.
    """
    lists = st.lists(children, min_size=0, max_size=3)
    makers = [list, tuple, Sealed, lambda items: dict(enumerate(items)), lambda items: collections.OrderedDict(a=items)]
    makers.append(lambda items: collections.UserDict(zip("abc", items, strict=False)))
    makers += [Held, lambda items: Both(items, "text"), lambda items: [{"only": tuple(items)}]]
    return st.builds(
        lambda make, items: lambda n, dim: make([*(it(n, dim) for it in items), FLAT[0](n, dim)]),
        st.sampled_from(makers),
        lists,
    )


TREES = st.recursive(LEAVES, nests, max_leaves=6)


@st.composite
def shares(draw):
    """Return keywords of a wrapper, and its number of devices."""
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return count, {"gpu0_bsz": draw(st.integers(0, 8)), "split": None}
    sizes = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count).filter(any))
    return count, {"gpu0_bsz": None, "split": sizes}


class Mirror(nn.Module):
    """Returns its arguments, with numbers times one. So the outputs must be equal to the inputs."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.tensor(1.0))

    def forward(self, tree, *, more):
        def times_one(tensor):
            return tensor * self.one if tensor.is_floating_point() else tensor

        return {"tree": map_tensors(times_one, tree), "more": map_tensors(times_one, more)}


def assert_alike(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs) if ours.dim() else torch.allclose(ours, theirs)
    elif isinstance(ours, (dict, collections.UserDict)):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_alike(ours[key], theirs[key])
    elif dataclasses.is_dataclass(ours):
        assert_alike(vars(ours), vars(theirs))
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    else:
        assert ours == pytest.approx(theirs) if isinstance(ours, float) else ours == theirs


def assert_mirrors(tree, more, n, dim, given_shares) -> None:
    count, keywords = given_shares
    module = Mirror()
    wrapped = BalancedDataParallel(module=module, device_ids=["cpu"] * count, dim=dim, **keywords)
    inputs = {"tree": tree(n, dim), "more": [FLAT[0](n, dim), more(n, dim)]}
    assert_alike(module(**inputs), inputs)
    assert_alike(wrapped(inputs["tree"], more=inputs["more"]), inputs)


@pytest.mark.filterwarnings(
    "ignore::autosplit.parallel.balanced.AmbiguousBatchWarning"
)  # the drawn tensors may be square
class TestAnyNesting:
    @settings(max_examples=200)
    @given(TREES, TREES, st.integers(1, 20), st.sampled_from([0, 1]), shares())
    def test_outputs_are_the_plain_modules(self, tree, more, n, dim, given_shares):
        assert_mirrors(tree, more, n, dim, given_shares)

    @settings(max_examples=100)
    @given(st.integers(1, 40), shares())
    def test_chunks_are_the_batch_in_order(self, n, given_shares):
        """Each device has as many samples as the split gives it, and together they are the batch in order."""
        count, keywords = given_shares
        seen = []

        class Notes(nn.Module):
            def forward(self, x):
                seen.append(x.tolist())
                return x

        wrapped = BalancedDataParallel(module=Notes(), device_ids=["cpu"] * count, **keywords)
        assert wrapped(torch.arange(n)).tolist() == list(range(n))
        assert [len(part) for part in seen] == [size for size in wrapped.split_of(n) if size]
        assert list(itertools.chain(*seen)) == list(range(n))


@dataclasses.dataclass
class Answer(collections.OrderedDict):
    """Like outputs of transformers: a dataclass and an ordered dict whose keys are the fields that are set."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None
    attention: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self):
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class TestContainers:
    @pytest.mark.parametrize("split", [(1, 3, 4), (0, 2, 6), (8, 0, 0)], ids=str)
    def test_an_answer_of_fields_and_keys(self, split, run):
        outputs = joined(lambda x: Answer(loss=x.mean(), logits=x, hidden=(x, (x * 2,))), *split, run=run)
        assert type(outputs) is Answer
        assert list(outputs) == ["loss", "logits", "hidden"]
        assert outputs.attention is None
        assert outputs.loss is outputs["loss"]
        assert outputs.loss.item() == pytest.approx(3.5)
        assert outputs["logits"].flatten().tolist() == outputs.logits.flatten().tolist() == list(range(8))
        assert outputs.hidden[1][0].flatten().tolist() == [2.0 * index for index in range(8)]

    def test_an_answer_is_not_the_first_chunks(self):
        """Output that a module keeps must not grow to the whole batch's."""
        kept = []

        def answer(x):
            kept.append(Answer(logits=x))
            return kept[-1]

        joined(answer, 1, 3, 4)
        assert [len(part.logits) for part in kept] == [1, 3, 4]


# Losses

TOKENS = 12
LOSS_SPLITS = [(4, 6, 6), (1, 2, 13), (0, 8, 8)]
IGNORED = -100


class Tagger(nn.Module):
    """Predicts a class for each token, and returns the mean of the tokens' losses."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, codes, labels):
        logits = self.head(torch.tanh(self.embedding(codes)))
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return self.combine(losses, labels != IGNORED)


def mean_of_tokens(losses, real):
    return losses.sum() / real.sum()


def mean_by_a_mask(losses, real):
    """A common handwritten loss."""
    return (losses * real).sum() / real.sum()


def sum_of_tokens(losses, real):
    return losses.sum()


def mean_of_each_sample(losses, real):
    return losses.sum(1) / real.sum(1).clamp(min=1)


def mean_over_samples(losses, real):
    return mean_of_each_sample(losses, real).mean()


def padded(num_long: int = 4):
    """A few samples with every token labelled, and many with one."""
    codes = torch.randint(0, 13, (BATCH, TOKENS))
    labels = torch.randint(0, 13, (BATCH, TOKENS))
    labels[num_long:, 1:] = IGNORED
    return codes, labels


def both_ways(combine, split, run, dtype=torch.float32, batch=None, outer=lambda loss: loss, **options):
    """Losses and modules of one step, plain and wrapped."""
    reference = Tagger(combine).to(dtype)
    module = copy.deepcopy(reference)
    codes, labels = batch or padded()
    plain = outer(reference(codes, labels))
    plain.backward()
    with run():
        loss = outer(wrap(module, *split, **options)(codes, labels=labels))
        loss.backward()
    return loss, plain, module, reference


@pytest.mark.parametrize("split", LOSS_SPLITS, ids=str)
class TestLosses:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(
        ("combine", "reduce"),
        [(mean_of_tokens, "tokens"), (sum_of_tokens, "sum"), (mean_over_samples, "samples")],
        ids=["tokens", "sum", "samples"],
    )
    def test_are_those_of_the_whole_batch(self, combine, reduce, dtype, split, run):
        loss, plain, module, reference = both_ways(combine, split, run, dtype, reduce=reduce)
        assert (loss.dim(), loss.dtype) == (0, dtype)
        assert loss.item() == pytest.approx(plain.item(), rel=TOLERANCE[dtype])
        assert_same_gradients(module, reference, TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_of_each_sample_are_gathered(self, dtype, split, run):
        loss, plain, module, reference = both_ways(mean_of_each_sample, split, run, dtype, outer=torch.mean)
        torch.testing.assert_close(loss, plain)
        assert_same_gradients(module, reference, TOLERANCE[dtype])

    def test_of_tokens_by_a_callable(self, split, run):
        """Weights from a function are used unchanged: counts divided by the whole batch's count give a mean."""
        batch = padded()
        real = float((batch[1] != IGNORED).sum())

        def share(call):
            _, kwargs = call
            return float((kwargs["labels"] != IGNORED).sum()) / real

        _, _, module, reference = both_ways(mean_of_tokens, split, run, batch=batch, reduce=share)
        assert_same_gradients(module, reference, 1e-6)

    @pytest.mark.parametrize("combine", [mean_of_tokens, mean_by_a_mask])
    def test_of_a_device_with_nothing_but_padding_count_for_nothing(self, combine, split, run):
        """Its mean over no labels is 0/0, and NaN times a weight of 0 is NaN."""
        codes, labels = padded()
        labels[: split[0]] = IGNORED
        loss, plain, module, reference = both_ways(combine, split, run, batch=(codes, labels), reduce="tokens")
        assert torch.isfinite(plain)
        torch.testing.assert_close(loss, plain)
        assert_same_gradients(module, reference, 1e-6)


def test_a_squeezed_output_of_one_sample_per_device_has_a_row_for_each(run):
    """`.squeeze()` of one row has no dimension, so the wrapper returned the mean of the predictions."""

    class Squeezed(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze()

    module = Squeezed(5, 1).double()
    wrapped = wrap(module, 3, 3)
    with run():
        for n in (6, 2):
            inputs = torch.randn(n, 5, dtype=torch.float64)
            torch.testing.assert_close(wrapped(inputs), module(inputs))


class TestOneElementLosses:
    """nn.DataParallel made a vector of scalar losses, so many modules return a loss with one element."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 3).double()

        def forward(self, x):
            return self.body(x).square().mean().unsqueeze(0)

    @pytest.mark.parametrize("split", [(2, 5, 4), (1, 9, 1), (0, 5, 6)], ids=str)
    def test_are_weighted_by_their_samples(self, split):
        """They were concatenated, and their mean weighted all devices equally: off by a third at (2, 5, 4)."""
        reference = self.WithLoss()
        module = copy.deepcopy(reference)
        inputs = torch.randn(11, 5, dtype=torch.float64)
        loss = reference(inputs)
        loss.mean().backward()
        ours = wrap(module, *split)(inputs)
        assert ours.shape == (1,)
        ours.mean().backward()
        torch.testing.assert_close(ours, loss)
        assert_same_gradients(module, reference, 1e-10)

    def test_are_one_element_whatever_the_batch(self, run):
        """Two samples on two devices gave two elements. Any other batch gave one."""
        module = self.WithLoss()
        wrapped = wrap(module, 3, 2)
        with run():
            for n in (5, 2, 1):
                inputs = torch.randn(n, 5, dtype=torch.float64)
                torch.testing.assert_close(wrapped(inputs), module(inputs))

    def test_are_told_from_what_a_module_returns_in_evaluation(self, run):
        class Both(self.WithLoss):
            def forward(self, x):
                return super().forward(x) if self.training else self.body(x).sum(1)

        wrapped = wrap(Both(), 1, 1)
        with run():
            assert wrapped(torch.randn(5, 5, dtype=torch.float64)).shape == (1,)
            assert wrapped.eval()(torch.randn(2, 5, dtype=torch.float64)).shape == (2,)
            assert wrapped.train()(torch.randn(2, 5, dtype=torch.float64)).shape == (1,)

    def test_one_sample_on_each_device_has_an_output_of_its_own(self):
        assert joined(lambda x: x.sum(1), 1, 1, 1).tolist() == [0.0, 1.0, 2.0]
