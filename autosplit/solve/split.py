"""Compute splits: the number of samples of a batch for each device.

Every function returns whole numbers, one per device (or per micro-batch), that add up to exactly the given batch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from autosplit.errors import InputError


def even_split(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Split a batch as evenly as possible: the numbers differ by at most 1, the larger ones first.

    Raises:
        InputError: `batch_size` is negative, `num_devices` is below 1, or either is not a whole number.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    num_devices = whole_number("num_devices", num_devices, minimum=1)
    share, larger = divmod(batch_size, num_devices)
    return (share + 1,) * larger + (share,) * (num_devices - larger)


def split_from_gpu0(batch_size: int, gpu0_bsz: int, num_devices: int) -> tuple[int, ...]:
    """Split a batch so that device 0 gets `gpu0_bsz` samples and the other devices get equal parts of the rest.

    If the rest doesn't divide evenly, devices 1, 2, ... get one more sample each. A batch of at most `gpu0_bsz` samples
    goes to device 0. If there is only one device, every batch does.

    Raises:
        InputError: A number is negative or not whole, or `num_devices` is below 1.
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

    A batch of `sum(split)` samples gets `split` itself. Samples above a device's ceiling go to devices below their
    ceilings, in their proportions. A device whose entry is 0 gets samples only if all other devices are at their
    ceilings, in proportion to the ceilings. Ties go to the lower index.

    Args:
        split: The proportions, one whole number per device. Not all 0 unless the batch is empty.
        ceilings: Maximum samples of each device. None for no limit.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, `split` is empty or all 0 with samples to
            place, or the ceilings add up to less than `batch_size`.
    """
    batch_size = whole_number("batch_size", batch_size, minimum=0)
    weights = _wholes("split", split)
    if batch_size and not any(weights):
        raise InputError(
            f"split is {as_text(weights)}, so no device would get any of the batch's {batch_size} samples. Expected at "
            "least one number above 0. Pass the number of samples for each device.",
        )
    if ceilings is None:
        return tuple(_largest_remainder(batch_size, weights))
    limits = limits_of("ceilings", ceilings, len(weights))
    require_room(
        batch_size,
        limits,
        "ceilings",
        "Load batches of the plan's size with plan.loader(loader). Ceilings do not apply under torch.no_grad().",
    )
    return _fill(batch_size, weights, limits)


def short_split(batch_size: int, split: Sequence[int]) -> tuple[int, ...]:
    """Split a batch that is shorter than `split` in its proportions, and avoid devices with a single sample.

    BatchNorm can't train on one sample. So a device with a single sample gets another from a device with more than two.
    Otherwise it gives its sample to a device with fewer samples than in `split`. If neither is possible, it keeps the
    single sample: a batch of 1, or 3 samples of a split of (2, 2). If `split` has an entry of 1, nothing is moved,
    because that device trains on one sample anyway.

    Args:
        split: Samples per device of a full batch. Not all 0 unless the batch is empty.

    Raises:
        InputError: As in `proportional_split`.
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
    """Move samples above a device's ceiling to devices below their ceilings, in proportion to their sizes.

    Raises:
        InputError: A number is negative or not whole, the lengths differ, or the ceilings add up to less than `sizes`.
    """
    checked = _wholes("sizes", sizes)
    return proportional_split(sum(checked), checked, ceilings)


def micro_batch_sizes(effective_batch_size: int, batch_size: int) -> tuple[int, ...]:
    """Cut an optimizer step into full micro-batches, then the remaining samples, if any.

    Raises:
        InputError: Either number is below 1 or not a whole number.
    """
    steps = accumulation_steps(effective_batch_size, batch_size)
    full = (int(batch_size),) * (steps - 1)
    return (*full, int(effective_batch_size) - sum(full))


def accumulation_steps(effective_batch_size: int, batch_size: int) -> int:
    """Return the number of micro-batches in an optimizer step.

    Raises:
        InputError: Either number is below 1 or not a whole number.
    """
    effective = whole_number("effective_batch_size", effective_batch_size, minimum=1)
    batch = whole_number("batch_size", batch_size, minimum=1)
    return -(-effective // batch)


def whole_number(name: str, value: SupportsIndex, *, minimum: int = 0) -> int:
    """Check a number from the user and return it as an int. It may be an int of Python, numpy or torch.

    Raises:
        InputError: `value` is not a whole number (a bool or any float), or is below `minimum`.
    """
    expected = f"Expected a whole number of at least {minimum}."
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} is {value!r}. {expected}")
    if number < minimum:
        raise InputError(f"{name} is {number}. {expected}")
    return number


def _largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    weight_sum = sum(weights)
    if not total:
        return [0] * len(weights)
    quotas = [divmod(total * weight, weight_sum) for weight in weights]
    shares = [whole for whole, _ in quotas]
    left = total - sum(shares)
    # A weight of 0 has remainder 0. There are always more positive remainders than samples left.
    by_remainder = sorted(range(len(weights)), key=lambda i: -quotas[i][1])
    for index in by_remainder[:left]:
        shares[index] += 1
    return shares


def _fill(total: int, weights: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    """Split `total` by `weights` under limits. Fix each number above its limit, split the rest again, and repeat.

    A fixed number stays at its limit, because a quota at or below a limit never rounds up above it.
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
        # All devices with a weight are full. Only now do the other devices get samples.
        spare = [0 if weight else limit for weight, limit in zip(weights, limits, strict=True)]
        shares = [share + more for share, more in zip(shares, _largest_remainder(left, spare), strict=True)]
    return tuple(shares)


def _wholes(name: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise InputError(
            f"{name} is {values!r}. Expected one whole number per device, as a list of ints.",
        )
    numbers = list(values)
    if set(map(type, numbers)) != {int} or min(numbers) < 0:  # a fast path: a search computes thousands
        numbers = [whole_number(f"{name}[{i}]", value, minimum=0) for i, value in enumerate(numbers)]
    if not numbers:
        raise InputError(f"{name} is empty. Expected one whole number per device.")
    return numbers


def limits_of(name: str, values: Sequence[int], num_devices: int, advice: str = "as many") -> list[int]:
    """Return one checked limit for each device."""
    limits = _wholes(name, values)
    if len(limits) != num_devices:
        raise InputError(
            f"{name} is {tuple(limits)}. Expected one whole number for each of {num_devices} devices. Pass {advice}.",
        )
    return limits


def require_room(batch_size: int, limits: Sequence[int], name: str, advice: str = "Lower the batch.") -> None:
    """Raise InputError if a batch is larger than the sum of all limits."""
    room = sum(limits)
    if room < batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the {name} {as_text(limits)} allow at most {room}. {advice}",
        )


def as_text(numbers: Sequence[int]) -> str:
    """Format numbers for a message. Long lists are cut off so that the message stays readable."""
    if len(numbers) <= 16:
        return str(tuple(numbers))
    return f"({', '.join(map(str, numbers[:16]))}, ... {len(numbers)} in all)"
