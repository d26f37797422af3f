"""Batches of every type that training scripts use: found, split, and extended."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from torch import Tensor

from autosplit.errors import WorkloadError
from autosplit.workload.batch import resize
from autosplit.workload.batch_layout import BatchLayout, read_batch
from autosplit.workload.tree import Whole, tensors_of


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "given"


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x", "y")
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Counted:
    """Its constructor may run only once. A rebuilt object must not call it again."""

    x: Tensor
    length: int = dataclasses.field(init=False)

    def __post_init__(self):
        assert not hasattr(self, "length"), "constructed twice"
        self.length = len(self.x)


class Encoding(collections.UserDict):
    """Like a tokenizer's output: a custom constructor, and attributes next to the data."""

    def __init__(self, data, *, tokenizer):
        super().__init__(data)
        self.tokenizer = tokenizer


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dataclass whose fields are the items of an ordered dictionary, like outputs of model libraries."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def rows(n: int, width: int = 3) -> Tensor:
    return torch.arange(n * width, dtype=torch.float32).view(n, width)


BATCHES = {
    "tensor": lambda: rows(4),
    "tuple": lambda: (rows(4), torch.arange(4)),
    "dict": lambda: {"x": rows(4), "y": torch.arange(4)},
    "MappingProxy": lambda: MappingProxyType({"x": rows(4)}),
    "namedtuple": lambda: Pair(rows(4), torch.arange(4)),
    "dataclass": lambda: Frozen(rows(4)),
    "slots": lambda: Slotted(rows(4), torch.arange(4)),
    "post_init": lambda: Counted(rows(4)),
    "encoding": lambda: Encoding({"x": rows(4)}, tokenizer="bpe"),
    "output": lambda: Output(logits=rows(4)),
    "nested": lambda: {"inputs": [Pair(rows(4), torch.arange(4)), Frozen(rows(4))], "flag": True, "none": None},
}


@pytest.fixture(params=BATCHES)
def batch(request):
    return BATCHES[request.param]()


class TestTrees:
    def test_every_container_holds_four_samples(self, batch):
        assert read_batch(batch).size == 4

    def test_containers_keep_their_types(self, batch):
        assert type(resize(batch, 2)) is type(batch)

    def test_chunks_hold_what_their_sizes_say(self, batch):
        for size, part in zip((1, 0, 3), read_batch(batch).cut((1, 0, 3)), strict=True):
            assert {tensor.size(0) for tensor in tensors_of(part)} == {size}

    def test_chunks_are_views_of_the_batch(self, batch):
        part = read_batch(batch).cut((2, 2))[1]
        for ours, theirs in zip(tensors_of(part), tensors_of(batch), strict=True):
            assert ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()

    def test_the_original_is_left_alone(self, batch):
        before = [tensor.clone() for tensor in tensors_of(batch)]
        resize(batch, 9)
        read_batch(batch).cut((4,))
        for old, new in zip(before, tensors_of(batch), strict=True):
            assert torch.equal(old, new)

    def test_read_only_mapping(self):
        """`copy.copy` cannot copy a mappingproxy. The shallow copy came before the type check."""
        made = resize(MappingProxyType({"x": rows(4)}), 2)
        assert made["x"].size(0) == 2


class TestBatchSize:
    def test_mask_of_another_size_is_no_batch(self):
        tokens, mask = torch.zeros(8, 16), torch.zeros(16, 16)
        assert read_batch((tokens, mask)).size == 8
        assert read_batch((mask, tokens)).size == 8
        assert read_batch({"mask": mask, "other": mask, "tokens": tokens}).size == 8

    def test_positions_of_one_row_are_no_batch(self):
        assert read_batch((torch.zeros(1, 16), torch.zeros(8, 16))).size == 8

    def test_disagreement(self):
        with raises(WorkloadError):
            read_batch((rows(4), rows(5, 7)))

    def test_empty(self):
        with raises(WorkloadError, "0"):
            read_batch({"x": torch.zeros(0, 3)})

    @pytest.mark.parametrize("batch", [(), {}, None, "text", torch.tensor(1.0), [None, 3], (Whole(torch.zeros(3)),)])
    def test_nothing_to_split(self, batch):
        with raises(WorkloadError, "0"):
            read_batch(batch)


class TestResize:
    def test_what_holds_no_samples_is_the_very_same(self):
        tokens, mask, scale = torch.zeros(8, 16), torch.zeros(16, 16), torch.tensor(2.0)
        made = resize((tokens, mask, scale), 3)
        assert made[0].shape == (3, 16)
        assert made[1].value is mask
        assert made[2].value is scale

    def test_whole_is_never_repeated(self):
        mask = torch.zeros(4, 4)
        made = resize({"x": torch.zeros(4, 4), "mask": Whole(mask)}, 9)
        assert made["x"].shape == (9, 4)
        assert next(iter(tensors_of(made["mask"]))) is mask

    def test_a_batch_keeps_its_dtype_and_has_no_graph(self):
        batch = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True) * 1
        made = resize(batch, 4)
        assert made.dtype == torch.float16
        assert not made.requires_grad


class TestWhole:
    def test_goes_whole_into_each_chunk(self):
        mask = torch.zeros(4, 4)
        for part in read_batch({"x": torch.zeros(4, 4), "mask": Whole(mask)}).cut((1, 3)):
            assert part["mask"] is mask


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    dim=st.integers(0, 2),
    width=st.integers(7, 9),
)
def test_chunks_put_together_are_the_batch(sizes, dim, width):
    shape = [width, width + 10, width + 20]
    shape[dim] = sum(sizes)
    batch = {"x": torch.arange(torch.Size(shape).numel()).view(shape), "twin": (torch.rand(shape),)}
    parts = BatchLayout.of(batch, sum(sizes), dim).cut(tuple(sizes))
    assert torch.equal(torch.cat([part["x"] for part in parts], dim), batch["x"])
    assert torch.equal(torch.cat([part["twin"][0] for part in parts], dim), batch["twin"][0])


@pytest.mark.parametrize(
    ("shape", "layout"), [((4, 3, 8, 8), torch.channels_last), ((4, 3, 2, 8, 8), torch.channels_last_3d)]
)
def test_images_lie_as_they_lay(shape, layout):
    """Their memory format changed, so a model was timed with kernels that its training does not use."""
    images = torch.randn(shape).to(memory_format=layout)
    resized = resize(images, 7)
    assert resized.is_contiguous(memory_format=layout)
    assert not resized.is_contiguous()
    torch.testing.assert_close(resized[:4], images)
    assert resize(torch.randn(shape), 7).is_contiguous()


@given(size=st.integers(1, 6), n=st.integers(1, 20))
def test_a_resized_batch_repeats_its_samples(size, n):
    made = resize([rows(size), torch.arange(size)], n)
    assert made[1].tolist() == [index % size for index in range(n)]
    assert torch.equal(made[0], rows(size)[made[1]])
