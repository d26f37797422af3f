"""The arithmetic of splits: how many samples of a batch go on which device.

Pure Python on whole numbers. Every function returns a tuple with one entry per device (or per micro-batch) whose sum
is exactly the batch that went in; no sample is dropped and none is padded.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex

from autosplit.errors import InputError

__all__ = [
    "accumulation_steps",
    "cap_split",
    "even_split",
    "fastest_split",
    "micro_batch_sizes",
    "proportional_split",
    "short_split",
    "split_from_gpu0",
    "whole_number",
]

# Below this many samples per device a heap is quicker than another bisection over all the devices.
_HEAP_SAMPLES_PER_DEVICE = 4


def even_split(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Split a batch as evenly as whole samples allow.

    Args:
        batch_size: Samples to split, 0 or more.
        num_devices: Devices to split over, 1 or more.

    Returns:
        One share per device; shares differ by at most 1 sample, the larger ones first.

    Raises:
        InputError: `batch_size` is negative, `num_devices` is below 1, or either is not a whole number.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    num_devices = whole_number("num_devices", num_devices, minimum=1)
    share, larger = divmod(batch_size, num_devices)
    return (share + 1,) * larger + (share,) * (num_devices - larger)


def split_from_gpu0(batch_size: int, gpu0_bsz: int, num_devices: int) -> tuple[int, ...]:
    """Split a batch by device 0's share: it takes `gpu0_bsz` samples, the others take the rest evenly.

    Device 0 may take more than the others, fewer, or none. A batch below `gpu0_bsz` is all on device 0, and on one
    device everything is on it, because there is nowhere else to go.

    Args:
        batch_size: Samples to split, 0 or more.
        gpu0_bsz: Samples for device 0, 0 or more.
        num_devices: Devices to split over, device 0 included, 1 or more.

    Returns:
        One share per device; what doesn't divide evenly goes to devices 1, 2, ... one sample each.

    Raises:
        InputError: A number is negative, `num_devices` is below 1, or one of them is not a whole number.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    gpu0_bsz = whole_number("gpu0_bsz", gpu0_bsz, minimum=0)
    num_devices = whole_number("num_devices", num_devices, minimum=1)
    if num_devices == 1:
        return (batch_size,)
    first = min(gpu0_bsz, batch_size)
    return (first, *even_split(batch_size - first, num_devices - 1))


def proportional_split(batch_size: int, split: Sequence[int], ceilings: Sequence[int] | None = None) -> tuple[int, ...]:
    """Split a batch of any size in the proportions of `split`, by largest remainder.

    A batch of `sum(split)` samples gets `split` itself. What would go above a device's ceiling goes to the devices
    that still have room, in their own proportions. A device with no share gets samples only when ceilings leave no
    room on any device that has one; those samples are shared out in proportion to the ceilings. Ties go to the lower
    index, so the answer is always the same.

    Args:
        batch_size: Samples to split, 0 or more.
        split: The proportions, one whole number per device, not all 0 unless the batch is empty.
        ceilings: The most samples that each device may get; None for no limit.

    Returns:
        One share per device, none above its ceiling.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, `split` is empty or all 0 with samples to
            place, or the ceilings add up to less than `batch_size`.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    weights = _wholes("split", split)
    if batch_size and not any(weights):
        raise InputError(
            f"split is {_shown(weights)}, which gives no device a share of {batch_size} samples; expected at least one "
            "share above 0; pass the samples per device"
        )
    if ceilings is None:
        return tuple(_largest_remainder(batch_size, weights))
    limits = _limits("ceilings", ceilings, len(weights))
    _require_room(batch_size, limits, "ceilings")
    return _fill(batch_size, weights, limits)


def short_split(batch_size: int, split: Sequence[int]) -> tuple[int, ...]:
    """Split a batch that is shorter than `split` in its proportions, shrinking no share to 1.

    A BatchNorm can't train on one sample. So a single sample gets another one beside it, from whoever can spare it, or
    moves to whoever has room. Where neither can be, it stays alone: a batch of 1, or 3 samples of a split of (2, 2).
    Nothing is moved where a share of `split` is 1: who trains on that trains on one.

    Args:
        batch_size: Samples to split, 0 to `sum(split)`.
        split: Samples per device of a full batch, not all 0 unless the batch is empty.

    Returns:
        One share per device, none above that of `split`.

    Raises:
        InputError: As of `proportional_split`.
    """
    shares = [*proportional_split(batch_size, split)]
    for alone in sorted(range(len(shares)), key=lambda index: (split[index], -index)):
        if shares[alone] != 1 or 1 in split:
            continue
        can_spare = [i for i, share in enumerate(shares) if share > 2]
        has_room = [i for i, share in enumerate(shares) if 0 < share < split[i] and i != alone]
        if can_spare or has_room:
            moved = 1 if can_spare else -1
            shares[alone] += moved
            shares[max(can_spare or has_room, key=lambda index: (shares[index], split[index]))] -= moved
    return tuple(shares)


def cap_split(sizes: Sequence[int], ceilings: Sequence[int]) -> tuple[int, ...]:
    """Move what is above a device's ceiling to the devices with room, in proportion to their own sizes.

    Args:
        sizes: Samples per device.
        ceilings: The most samples that each device may get.

    Returns:
        One size per device, with the sum of `sizes`; `sizes` itself where no ceiling is exceeded.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, or the ceilings add up to less than `sizes`.
    """
    checked = _wholes("sizes", sizes)
    return proportional_split(sum(checked), checked, ceilings)


def fastest_split(
    batch_size: int,
    times: Sequence[Callable[[int], float]],
    caps: Sequence[int],
    floors: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Find the split whose slowest device finishes first, under caps.

    Each next sample goes to the device that would finish it first, which is optimal when no time falls as the batch
    grows. Where two would finish at the same moment, the one with fewer samples gets it, then the lower index, so that
    a flat stretch of a curve doesn't pile samples on one device. Large batches bisect the finish time first and hand
    out only the last few samples one by one; the answer is the same.

    Args:
        batch_size: Samples to split, 0 or more.
        times: Per device, seconds for n samples: 0 at n = 0, finite, never falling as n grows up to its cap.
        caps: The most samples that each device may get.
        floors: The fewest samples that each device must get; None for 0 everywhere.

    Returns:
        One share per device, which minimises the largest ``times[i](share[i])``.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, a floor is above its cap, the caps add up to
            less than `batch_size` or the floors to more, or a time is not finite.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    if not times:
        raise InputError("times is empty; expected one function per device; pass at least one")
    limits = [min(cap, batch_size) for cap in _limits("caps", caps, len(times))]
    least = [0] * len(times) if floors is None else _limits("floors", floors, len(times))
    _require_room(batch_size, limits, "caps")
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
            f"times[{index}]({error.samples}) is {error.seconds}; expected finite seconds up to the cap; lower "
            f"caps[{index}] to the largest size with a known time"
        ) from None
    for index, share in zip(free, chosen, strict=True):
        least[index] = share
    assert sum(least) == batch_size
    return tuple(least)


class _NotFiniteError(Exception):
    """A time that no split can be chosen by."""

    def __init__(self, position: int, samples: int, seconds: float) -> None:
        super().__init__(position, samples, seconds)
        self.position, self.samples, self.seconds = position, samples, seconds


def _fastest_shares(
    batch_size: int, times: Sequence[Callable[[int], float]], floors: Sequence[int], caps: Sequence[int]
) -> Sequence[int]:
    """Split over devices of which each may have more than its floor."""
    if len(times) == 1:
        _seconds(times, 0, min(1, batch_size) if batch_size <= _HEAP_SAMPLES_PER_DEVICE else batch_size)
        return [batch_size]
    if len(set(map(id, times))) == 1:  # who has fewer samples never ends later
        shares = _level(batch_size, floors, caps)
        _seconds(times, 0, max(shares))
        return shares
    low, high, tied = _bracket(batch_size, times, floors, caps)
    return _level(batch_size, low, high) if tied else _hand_out(batch_size, times, low, caps)


def micro_batch_sizes(effective_batch_size: int, batch_size: int) -> tuple[int, ...]:
    """Cut one optimizer step into micro-batches: full ones, then what is left.

    Args:
        effective_batch_size: Samples of the optimizer step, 1 or more.
        batch_size: Samples per forward, 1 or more.

    Returns:
        `accumulation_steps(effective_batch_size, batch_size)` sizes that add up to `effective_batch_size`; only the
        last may be below `batch_size`.

    Raises:
        InputError: Either number is below 1 or not a whole number.
    """
    steps = accumulation_steps(effective_batch_size, batch_size)
    full = (int(batch_size),) * (steps - 1)
    return (*full, int(effective_batch_size) - sum(full))


def accumulation_steps(effective_batch_size: int, batch_size: int) -> int:
    """Count the forwards of one optimizer step: the effective batch over the batch, rounded up.

    Args:
        effective_batch_size: Samples of the optimizer step, 1 or more.
        batch_size: Samples per forward, 1 or more.

    Returns:
        The number of micro-batches, 1 or more.

    Raises:
        InputError: Either number is below 1 or not a whole number.
    """
    effective = whole_number("effective_batch_size", effective_batch_size, minimum=1)
    batch = whole_number("batch_size", batch_size, minimum=1)
    return -(-effective // batch)


def whole_number(name: str, value: SupportsIndex, *, minimum: int = 0) -> int:
    """Check a number that a user gave, whether an int of Python, numpy or torch.

    Args:
        name: What the user calls it; the message begins with it.
        value: What was given. A bool is a slip, not a number of samples, and a float is refused even when it is whole.
        minimum: The least it may be.

    Returns:
        `value` as an int.

    Raises:
        InputError: `value` is not a whole number, or is below `minimum`.
    """
    expected = f"expected a whole number, {minimum} or more"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} is {value!r}; {expected}; pass an int")
    if number < minimum:
        raise InputError(f"{name} is {number}; {expected}; raise it to at least {minimum}")
    return number


# Proportions -----------------------------------------------------------------------------------------------------


def _largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Share `total` in proportion to `weights`; whole quotas first, then one more to the largest remainders."""
    weight_sum = sum(weights)
    if not total:
        return [0] * len(weights)
    quotas = [divmod(total * weight, weight_sum) for weight in weights]
    shares = [whole for whole, _ in quotas]
    left = total - sum(shares)
    # A share of 0 has remainder 0, and there are always more positive remainders than samples left.
    by_remainder = sorted(range(len(weights)), key=lambda i: -quotas[i][1])
    for index in by_remainder[:left]:
        shares[index] += 1
    return shares


def _fill(total: int, weights: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    """Share `total` by `weights` under limits: fix at its limit what goes above, share the rest again, until all fit.

    A quota at or below a limit never rounds to above it, so whatever is fixed at its limit belongs there.
    """
    shares = [0] * len(weights)
    open_devices = [i for i, weight in enumerate(weights) if weight]
    left = total
    while left and open_devices:
        trial = _largest_remainder(left, [weights[i] for i in open_devices])
        over = {i for i, share in zip(open_devices, trial, strict=True) if share > limits[i]}
        for index, share in zip(open_devices, trial, strict=True):
            shares[index] = min(share, limits[index])
        if not over:
            return tuple(shares)
        left -= sum(limits[i] for i in over)
        open_devices = [i for i in open_devices if i not in over]
    if left:
        # Everything with a share is full: only now do devices without one take samples.
        spare = [0 if weight else limit for weight, limit in zip(weights, limits, strict=True)]
        shares = [share + more for share, more in zip(shares, _largest_remainder(left, spare), strict=True)]
    return tuple(shares)


# The fastest split -----------------------------------------------------------------------------------------------


def _bracket(
    batch_size: int, times: Sequence[Callable[[int], float]], floors: Sequence[int], caps: Sequence[int]
) -> tuple[list[int], list[int], bool]:
    """Bisect the finish time until few samples are open.

    Returns:
        Shares that fit the batch, shares that reach it, and whether every sample between the two ends at one moment.
    """
    few = _HEAP_SAMPLES_PER_DEVICE * len(times)
    low = list(floors)
    if batch_size - sum(low) <= few:
        return low, list(caps), False
    # Some split's finish time is enough for the whole batch: one above the floors, even but for the caps.
    high = _level(batch_size, floors, caps)
    high_s = max(_seconds(times, i, n) for i, n in enumerate(high))
    low_s = -high_s  # no sample ends before 0, so that only the floors are in by then
    high = _counts(times, high_s, high, caps)
    for by_line in itertools.cycle((True, False)):
        open_samples = batch_size - sum(low)
        if open_samples <= few:
            break
        # Times are about straight, so that the line between the ends comes near; halving does where they are not.
        share = (open_samples - few / 2) / max(1, sum(high) - sum(low)) if by_line and low_s >= 0 else 0.5
        middle_s = low_s + share * (high_s - low_s)
        if not low_s < middle_s < high_s:
            middle_s = (low_s + high_s) / 2
        if not low_s < middle_s < high_s:
            return low, high, True
        middle = _counts(times, middle_s, low, high)
        if sum(middle) > batch_size:
            # The last of them end no later than this, and where they all do, none is left to tell apart.
            high, high_s = middle, min(middle_s, _last_s(times, floors, middle))
        else:
            low, low_s = middle, middle_s
        if _next_s(times, low, high) >= high_s:
            return low, high, True
    return low, high, False


def _last_s(times: Sequence[Callable[[int], float]], floors: Sequence[int], shares: Sequence[int]) -> float:
    """Return when the last device ends that has more than its floor."""
    return max(time(n) for time, floor, n in zip(times, floors, shares, strict=True) if n > floor)


def _next_s(times: Sequence[Callable[[int], float]], low: Sequence[int], high: Sequence[int]) -> float:
    """Return when the first sample beyond `low` would end."""
    open_ones = (time(least + 1) for time, least, most in zip(times, low, high, strict=True) if least < most)
    return min(open_ones, default=math.inf)


def _counts(
    times: Sequence[Callable[[int], float]], finish_s: float, low: Sequence[int], high: Sequence[int]
) -> list[int]:
    """Per device, the most samples from `low` to `high` that end by `finish_s`; `low` where none above does."""
    known: dict[tuple[int, int, int], int] = {}  # of devices that are alike, one is asked
    counts = []
    for time, least, most in zip(times, low, high, strict=True):
        asked = (id(time), least, most)
        if asked not in known:
            known[asked] = _count(time, finish_s, least, most)
        counts.append(known[asked])
    return counts


def _count(time: Callable[[int], float], finish_s: float, least: int, most: int) -> int:
    within: Callable[[float, int, int], int] | None = getattr(time, "most_within", None)
    if within is not None:  # a curve knows by itself
        return within(finish_s, least, most)
    while least < most:
        middle = (least + most + 1) // 2
        if time(middle) <= finish_s:
            least = middle
        else:
            most = middle - 1
    return least


def _level(batch_size: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Raise `low` towards `high` until the sum is `batch_size`, the smallest shares first, then the lower index."""
    even = even_split(batch_size, len(low))
    if max(low) <= even[-1] and even[0] <= min(high):  # nothing is in the way
        return list(even)
    floor, ceiling = 0, max(high)
    while floor < ceiling:
        middle = (floor + ceiling + 1) // 2
        if sum(_clamped(middle, low, high)) <= batch_size:
            floor = middle
        else:
            ceiling = middle - 1
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


def _hand_out(
    batch_size: int, times: Sequence[Callable[[int], float]], shares: Sequence[int], caps: Sequence[int]
) -> list[int]:
    """Give each open sample to the device that would finish it first."""
    shares = list(shares)
    # (when the next sample would end, samples so far, device): tuples compare in just the order wanted.
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


def _seconds(times: Sequence[Callable[[int], float]], index: int, samples: int) -> float:
    seconds = times[index](samples)
    if not math.isfinite(seconds):
        raise _NotFiniteError(index, samples, seconds)
    return seconds


# Checks ----------------------------------------------------------------------------------------------------------


def _wholes(name: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise InputError(f"{name} is {values!r}; expected one whole number per device; pass a list of ints")
    numbers = [whole_number(f"{name}[{i}]", value, minimum=0) for i, value in enumerate(values)]
    if not numbers:
        raise InputError(f"{name} is empty; expected one whole number per device; pass at least one")
    return numbers


def _limits(name: str, values: Sequence[int], num_devices: int) -> list[int]:
    limits = _wholes(name, values)
    if len(limits) != num_devices:
        raise InputError(
            f"{name} has {len(limits)} entries for {num_devices} devices; expected one per device; pass {num_devices}"
        )
    return limits


def _require_room(batch_size: int, limits: Sequence[int], name: str) -> None:
    room = sum(limits)
    if room < batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the {name} {_shown(limits)} have room for {room}; expected a batch of at "
            f"most {room}; lower the batch or raise the {name}"
        )


def _check_floors(batch_size: int, floors: Sequence[int], caps: Sequence[int]) -> None:
    if sum(floors) > batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the floors {_shown(floors)} need {sum(floors)}; expected a batch of at "
            "least that; raise the batch or lower the floors"
        )
    for index, (least, most) in enumerate(zip(floors, caps, strict=True)):
        if least > most:
            raise InputError(
                f"floors[{index}] is {least}, above the cap of {most}; expected a floor within the cap; lower the floor"
            )


def _shown(numbers: Sequence[int]) -> str:
    """Write shares for a message, which stays one readable line for thousands of devices too."""
    if len(numbers) <= 16:
        return str(tuple(numbers))
    return f"({', '.join(map(str, numbers[:16]))}, ... {len(numbers)} in all)"
