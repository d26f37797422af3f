"""Bytes as people write and read them; times and samples per second as they read them."""

from __future__ import annotations

import re
from fractions import Fraction

from autosplit.errors import InputError, shown

__all__ = ["ms_text", "parse_bytes", "rate_text", "size_text"]

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# Bounded lengths: int() refuses thousands of digits with an error of its own.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read a size such as ``"1.5GiB"``.

    Args:
        text: A number of zero or more, with decimals or without, then B, KiB, MiB, GiB, TiB, KB, MB, GB or TB in any
            case. A number alone is bytes.

    Returns:
        Whole bytes, rounded down.

    Raises:
        InputError: If it is not such a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise InputError(
            f"size {shown(text)}: expected a number of 0 or more with a unit; write it as 600MiB or 1.5GiB"
        )
    return int(Fraction(match[1]) * unit_bytes)


def size_text(nbytes: int) -> str:
    """Write bytes for a message.

    Args:
        nbytes: Bytes, of either sign.

    Returns:
        Four digits at most, in the largest unit that they fill: ``"23.5 GiB"``, ``"600 MiB"``, ``"7 B"``; beyond
        10,000 TiB as many as it takes.
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            # Past four digits, `g` would write an exponent.
            return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.4g} {unit}"
    return f"{nbytes} B"


def ms_text(seconds: float) -> str:
    """Write how long something takes: in whole milliseconds, or three digits of what is over before that."""
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def rate_text(samples_per_s: float) -> str:
    """Write a throughput: whole samples, or three digits of a slow one."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"
