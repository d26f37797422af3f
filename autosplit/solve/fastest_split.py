"""Find the fastest split of a batch: the split whose slowest device takes the least time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from autosplit.errors import InputError
from autosplit.solve.memory import largest_size
from autosplit.solve.split import as_text, even_split, limits_of, require_room, whole_number

Times = Sequence[Callable[[int], float]]
"""For each device, a function from its number of samples to seconds."""

# If at most this many samples per device are not assigned yet, a heap is faster than another bisection.
_HEAP_SAMPLES_PER_DEVICE = 4


def fastest_split(
    batch_size: int,
    times: Times,
    caps: Sequence[int],
    floors: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Find the split whose slowest device finishes first, with at most `caps` samples per device.

    Give each next sample to the device that would finish it first. This is optimal if no time falls with the batch
    size. On a tie, prefer the device with the smallest number of samples, then the lowest index. So a flat part of a
    curve does not pile samples on one device. For a large batch, bisect the finish time first, with the same result.

    Args:
        times: For each device, the time of n samples in seconds: 0 for n = 0, finite, and never falling up to the cap.
        floors: Minimum samples of each device. Default: 0.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, a floor is above its cap, the caps add up to
            less than `batch_size` or the floors to more, or a time is not finite.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    if not times:
        raise InputError("times is empty. Expected one function per device.")
    limits = [min(cap, batch_size) for cap in limits_of("caps", caps, len(times))]
    least = [0] * len(times) if floors is None else limits_of("floors", floors, len(times))
    require_room(batch_size, limits, "caps")
    _check_floors(batch_size, least, limits)
    free = [i for i, (floor, limit) in enumerate(zip(least, limits, strict=True)) if floor < limit]
    if not free:
        return tuple(least)
    open_samples = batch_size - sum(least) + sum(least[i] for i in free)
    try:
        chosen = _fastest_shares(
            open_samples, [times[i] for i in free], [least[i] for i in free], [limits[i] for i in free]
        )
    except _NotFiniteError as error:
        index = free[error.position]
        raise InputError(
            f"times[{index}]({error.samples}) is {error.seconds}. Expected finite seconds up to the cap. Lower "
            f"caps[{index}] to the largest size with a known time.",
        ) from None
    for index, share in zip(free, chosen, strict=True):
        least[index] = share
    assert sum(least) == batch_size
    return tuple(least)


class _NotFiniteError(Exception):
    """A time is not finite, so it can't be compared."""

    def __init__(self, position: int, samples: int, seconds: float) -> None:
        super().__init__(position, samples, seconds)
        self.position, self.samples, self.seconds = position, samples, seconds


def _fastest_shares(batch_size: int, times: Times, floors: Sequence[int], caps: Sequence[int]) -> Sequence[int]:
    if len(times) == 1:
        _seconds(times, 0, min(1, batch_size) if batch_size <= _HEAP_SAMPLES_PER_DEVICE else batch_size)
        return [batch_size]
    if len(set(map(id, times))) == 1:  # with one curve for all devices, the level split is the fastest
        shares = _level(batch_size, floors, caps)
        _seconds(times, 0, max(shares))
        return shares
    low, high, tied = _bracket(batch_size, times, floors, caps)
    return _level(batch_size, low, high) if tied else _hand_out(batch_size, times, low, caps)


def _bracket(
    batch_size: int, times: Times, floors: Sequence[int], caps: Sequence[int]
) -> tuple[list[int], list[int], bool]:
    """Bisect the finish time until few samples are left to assign.

    Returns:
        A split with at most `batch_size` samples, a split with at least `batch_size` samples, and whether all samples
        between the two would finish at the same moment.
    """
    few = _HEAP_SAMPLES_PER_DEVICE * len(times)
    low = list(floors)
    if batch_size - sum(low) <= few:
        return low, list(caps), False
    # Any split of the whole batch gives an upper bound of the finish time. Begin with the most even split.
    high = _level(batch_size, floors, caps)
    high_s = max(_seconds(times, i, n) for i, n in enumerate(high))
    low_s = -high_s  # no sample finishes before 0, so this counts only the floors
    high = _counts(times, high_s, high, caps)
    for by_line in itertools.cycle((True, False)):
        open_samples = batch_size - sum(low)
        if open_samples <= few:
            break
        # Times are almost linear, so interpolate between the bounds. Every other step bisects, in case they are not.
        share = (open_samples - few / 2) / max(1, sum(high) - sum(low)) if by_line and low_s >= 0 else 0.5
        middle_s = low_s + share * (high_s - low_s)
        if not low_s < middle_s < high_s:
            middle_s = (low_s + high_s) / 2
        if not low_s < middle_s < high_s:
            return low, high, True
        middle = _counts(times, middle_s, low, high)
        if sum(middle) > batch_size:
            # The last sample may finish before `middle_s`. With this tighter bound, equal finish times end the loop.
            high, high_s = middle, min(middle_s, _last_s(times, floors, middle))
        else:
            low, low_s = middle, middle_s
        if _next_s(times, low, high) >= high_s:
            return low, high, True
    return low, high, False


def _last_s(times: Times, floors: Sequence[int], shares: Sequence[int]) -> float:
    return max(time(n) for time, floor, n in zip(times, floors, shares, strict=True) if n > floor)


def _next_s(times: Times, low: Sequence[int], high: Sequence[int]) -> float:
    open_ones = (time(least + 1) for time, least, most in zip(times, low, high, strict=True) if least < most)
    return min(open_ones, default=math.inf)


def _counts(times: Times, finish_s: float, low: Sequence[int], high: Sequence[int]) -> list[int]:
    known: dict[tuple[int, int, int], int] = {}  # identical devices share one result
    counts = []
    for time, least, most in zip(times, low, high, strict=True):
        asked = (id(time), least, most)
        if asked not in known:
            known[asked] = _count(time, finish_s, least, most)
        counts.append(known[asked])
    return counts


def _count(time: Callable[[int], float], finish_s: float, least: int, most: int) -> int:
    within: Callable[[float, int, int], int] | None = getattr(time, "most_within", None)
    if within is not None:  # a `TimeCurve` needs no search
        return within(finish_s, least, most)
    return least + largest_size(most - least, lambda more: time(least + more) <= finish_s)


def _level(batch_size: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Raise `low` towards `high` until the sum is `batch_size`: the smallest numbers first, then the lowest index."""
    even = even_split(batch_size, len(low))
    if max(low) <= even[-1] and even[0] <= min(high):  # no limit applies
        return list(even)
    floor = largest_size(max(high), lambda level: sum(_clamped(level, low, high)) <= batch_size)
    shares = _clamped(floor, low, high)
    left = batch_size - sum(shares)
    for index, share in enumerate(shares):
        if left and share == floor and share < high[index]:
            shares[index] += 1
            left -= 1
    assert left == 0, (batch_size, low, high)
    return shares


def _clamped(level: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    return [min(max(level, least), most) for least, most in zip(low, high, strict=True)]


def _hand_out(batch_size: int, times: Times, shares: Sequence[int], caps: Sequence[int]) -> list[int]:
    shares = list(shares)
    # (when the next sample would end, samples so far, device): a tuple sorts by its first entry first.
    queue = [(_seconds(times, i, n + 1), n, i) for i, n in enumerate(shares) if n < caps[i]]
    heapq.heapify(queue)
    for _ in range(batch_size - sum(shares)):
        _, share, index = queue[0]
        shares[index] = share + 1
        if share + 1 < caps[index]:
            heapq.heapreplace(queue, (_seconds(times, index, share + 2), share + 1, index))
        else:
            heapq.heappop(queue)
    return shares


def _seconds(times: Times, index: int, samples: int) -> float:
    seconds = times[index](samples)
    if not math.isfinite(seconds):
        raise _NotFiniteError(index, samples, seconds)
    return seconds


def _check_floors(batch_size: int, floors: Sequence[int], caps: Sequence[int]) -> None:
    if sum(floors) > batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the floors {as_text(floors)} need {sum(floors)}. Raise the batch or "
            "lower the floors.",
        )
    for index, (least, most) in enumerate(zip(floors, caps, strict=True)):
        if least > most:
            raise InputError(
                f"floors[{index}] is {least}, above the cap of {most}. Lower the floor.",
            )
