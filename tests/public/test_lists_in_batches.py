"""Lists of tensors are read the same way in every batch: as samples, or as views with one row per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from torch import Tensor, nn

import autosplit
from autosplit import BalancedDataParallel

B_TENSORS_OF_B_ROWS = pytest.mark.filterwarnings("ignore:The batch has a list of . tensors, each with")
READINGS = "each with 8 rows.*Expected either 2 or 8 samples.*pass several inputs as arguments.*It was cut into 8"


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, views: Any) -> Tensor:
        return torch.stack([self.net(view) for view in (views["of"] if isinstance(views, dict) else views)]).mean(0)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: list[Tensor], *rest: Any) -> Tensor:
        return torch.stack([image.mean() * self.scale for image in images]).view(-1)


def views_of(rows: int, number: int) -> list[Tensor]:
    return [torch.randn(rows, 5) for _ in range(number)]


def images_of(number: int) -> list[Tensor]:
    return [torch.randn(3, 4, 4) for _ in range(number)]


def assert_same(module: nn.Module, split: tuple[int, ...], calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Compare the wrapper's rows with those of the plain module, for one call after the other."""
    wrapper = BalancedDataParallel(None, module, ["cpu"] * len(split), split=split)
    for args, kwargs in calls:
        torch.testing.assert_close(wrapper(*args, **kwargs), module(*args, **kwargs))


CALLS: dict[str, Callable[[list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "list": lambda views: ((views,), {}),
    "tuple": lambda views: ((tuple(views),), {}),
    "keyword": lambda views: ((), {"views": views}),
    "dict": lambda views: (({"of": views},), {}),
}


class TestViews:
    @B_TENSORS_OF_B_ROWS
    @pytest.mark.parametrize("split", [(1, 1), (1, 1, 1), (1, 2), (3, 0)], ids=str)
    @pytest.mark.parametrize("name", CALLS)
    def test_batches_of_other_sizes_are_cut_by_rows_too(self, name, split):
        """Two views and a split of 1 + 1 samples: a last batch of 1 row was read as 2 samples, and 8 rows raised."""
        full = sum(split)
        calls = [CALLS[name](views_of(rows, full)) for rows in (full, 1, full, 8, 2)]
        assert_same(Views(), split, calls)

    def test_as_many_views_as_rows_are_warned_of_once(self):
        """nn.DataParallel cuts the rows. But each of the tensors may be a sample."""
        wrapper = BalancedDataParallel(None, Views(), ["cpu", "cpu"], split=(1, 1))
        with pytest.warns(UserWarning, match="a list of 2 tensors, each with 2 rows.*pass them as separate arguments"):
            wrapper(views_of(2, 2))
        wrapper(views_of(2, 2))

    def test_an_evaluation_may_come_first(self):
        """The split is no evidence there, because batches without gradients have any size."""
        module = Views()
        wrapper = BalancedDataParallel(None, module, ["cpu", "cpu"], split=(1, 1))
        views = views_of(8, 2)
        with torch.no_grad(), pytest.warns(UserWarning, match=READINGS):
            torch.testing.assert_close(wrapper(views), module(views))

    def test_an_evaluation_may_pass_a_tensor_of_as_many_rows_as_views(self):
        """Training passed 8 views, so each device got all rows of an evaluation batch of 8 samples."""

        class Crops(nn.Linear):
            def forward(self, crops: Any) -> Tensor:
                views = crops if isinstance(crops, list) else [crops]
                return torch.stack([super(Crops, self).forward(view) for view in views], 1)

        assert_same(Crops(5, 3), (3, 2), [((views_of(5, 8),), {}), ((torch.randn(8, 5),), {})])

    @pytest.mark.parametrize("split", [(3, 2), (2, 2)], ids=str)
    @pytest.mark.parametrize("separate", [False, True])
    def test_joined_views_in_the_output_are_refused(self, split, separate):
        """`torch.cat` of two views came back in another order: the views of device 0, then those of device 1."""

        class Joined(nn.Linear):
            def forward(self, *views: Any) -> Tensor:
                return super().forward(torch.cat(views if separate else views[0]))

        wrapper = BalancedDataParallel(None, Joined(5, 3), ["cpu", "cpu"], split=split)
        views = views_of(sum(split), 2)
        with pytest.raises(autosplit.AutosplitError, match=r"2 rows for each sample.*torch\.stack\(views, 1\)"):
            wrapper(*views) if separate else wrapper(views)


class TestImages:
    @pytest.mark.parametrize("kind", ["alone", "labels", "boxes"])
    def test_a_short_batch_is_cut_by_items_too(self, kind):
        """Four images of three channels, then three or two: the channels were cut, or samples were lost."""

        def call(number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            rest = {"alone": (), "labels": (torch.zeros(number),), "boxes": ([{"boxes": torch.zeros(2, 4)}] * number,)}
            return (images_of(number), *rest[kind]), {}

        assert_same(Images(), (2, 2), [call(number) for number in (4, 3, 2, 1, 8)])

    def test_a_sequence_as_long_as_the_batch_is_a_sample(self):
        """Its length was constant at its place in the list, so each device got the sequences of the whole batch."""
        calls = [(([torch.randn(length, 2) for length in lengths],), {}) for lengths in ((3, 2, 5, 3), (3, 2, 4))]
        assert_same(Images(), (2, 2), calls)

    @pytest.mark.parametrize("kind", ["labels", "boxes", "dicts"])
    def test_accumulated_batches_are_weighted_by_their_items(self, kind):
        """Batches of 5 and 3 images had 3 samples each, because the first tensor has 3 channels."""
        images, module = images_of(8), Images()
        loss = torch.stack([image.mean() for image in images]).mean()

        def batch(first: int, last: int) -> Any:
            part = images[first:last]
            if kind == "dicts":
                return [{"image": image} for image in part]
            return part, torch.zeros(len(part)) if kind == "labels" else [{"boxes": torch.zeros(2, 4)}] * len(part)

        for step in make_plan((5,), 8).steps([batch(0, 5), batch(5, 8)]):
            for part in step:
                step.backward(module([item["image"] for item in part] if kind == "dicts" else part[0]).mean())
        torch.testing.assert_close(module.scale.grad, loss.view(1))
