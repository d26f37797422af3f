"""Agreement of ranks without real ranks: a store that is read at once, and a group that needs only one rank."""

from __future__ import annotations

from typing import Any

import pytest
from events import until
from torch import distributed as dist

from autosplit.tuning.peers import Interrupts, Peers


class AloneOfTwo(Peers):
    """Rank 0 of two. The other rank repeats every message."""

    def __init__(self, store: Any) -> None:
        super().__init__(0, 2, None, Interrupts(), store)
        self.said: list[Any] = []

    def gathered(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, value]

    def part(self) -> None:
        self.parted = True


def fails() -> None:
    raise ValueError("a bug of mine")


@pytest.mark.parametrize("has_store", [True, False])
def test_the_rank_that_fails_has_not_waited(has_store: bool) -> None:
    """In 2 of 60 jobs on a busy machine, each rank blamed its own code, because the failed rank counted as a victim."""
    store = dist.HashStore() if has_store else None  # type: ignore[attr-defined]
    peers, cuts = AloneOfTwo(store), []
    with pytest.raises(ValueError, match="a bug of mine"):
        peers.all_try(fails, cut=lambda: cuts.append(1))
    assert not peers.said[0].failure.waited
    assert cuts == [1] * has_store


def test_a_rank_is_cut_off_if_another_failed_in_the_same_attempt() -> None:
    """The rank was cut off once. If its collective began after that, it waited for half an hour."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a bug of mine"):
        AloneOfTwo(store).all_try(fails, cut=lambda: None)
    peers, cuts = AloneOfTwo(store), []

    def waits() -> None:
        until(lambda: len(cuts) >= 2)
        fails()

    with pytest.raises(ValueError, match="a bug of mine"):
        peers.all_try(waits, cut=lambda: cuts.append(1))
    assert peers.said[0].failure.waited
