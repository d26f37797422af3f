"""Agreement of ranks without real ranks: a watch that replies immediately, and a group that needs only one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autosplit.tuning.peers import Interrupts, Peers


class Echo:
    """A connection that answers each message about a missing rank with the same message."""

    on_missing: Callable[[str], None]

    def say_missing(self, number: str) -> None:
        self.on_missing(number)


class AloneOfTwo(Peers):
    """Rank 0 of two. The other rank repeats every message."""

    def __init__(self) -> None:
        super().__init__(0, 2, None, Interrupts(), Echo())  # type: ignore[arg-type]
        self.said: list[Any] = []

    def gathered(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, value]

    def part(self) -> None:
        self.parted = True


def test_the_rank_that_fails_has_not_waited_though_others_are_cut_off_before_it_is_done() -> None:
    """In 2 of 60 jobs on a busy machine, each rank blamed its own code, because the failed rank counted as a victim."""
    peers, cuts = AloneOfTwo(), []

    def fails() -> None:
        raise ValueError("a bug of mine")

    with pytest.raises(ValueError, match="a bug of mine"):
        peers.all_try(fails, cut=lambda: cuts.append(1))
    assert not peers.said[0].failure.waited
    assert cuts == [1]
