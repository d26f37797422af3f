"""Read the settings of torch's caching allocator from the environment (`PYTORCH_ALLOC_CONF`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autosplit.profiles.key import ALLOCATOR_VARIABLES

MIB = 2**20

MIN_BLOCK_BYTES = 512
"""All blocks have a multiple of this size (kMinBlockSize in torch's allocator)."""

LARGE_SEGMENT_BYTES = 20 * MIB
"""Size of a segment for blocks of 1 to 10 MiB (kLargeBuffer)."""

*SETTINGS_VARIABLES, NO_CACHING_VARIABLE = ALLOCATOR_VARIABLES
"""Variables with settings, the preferred variable first, and the variable that makes torch keep no freed memory."""


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of torch's caching allocator.

    Attributes:
        expandable_segments: Grow segments by mapping more pages, instead of reserving more segments.
        max_split_bytes: Do not split blocks of at least this size. None splits all blocks.
        max_non_split_rounding_bytes: A block that is not split may exceed the request by less than this.
        roundup_power2_divisions: Round sizes up to one of this many equal steps between two powers of 2. One number for
            each power from 1 MiB on. Empty for multiples of 512 bytes.
        caches: Keep freed segments (not with `NO_CACHING_VARIABLE`).
        ignored: Settings that change the memory, but are not modelled.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    caches: bool = True
    ignored: tuple[str, ...] = ()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> AllocatorSettings:
        """Return the settings in an environment (default: this process's)."""
        known = os.environ if environment is None else environment
        texts = [known[name] for name in SETTINGS_VARIABLES if known.get(name)]
        found = cls.parsed(texts[0]) if texts else cls()
        return replace(found, caches=False) if NO_CACHING_VARIABLE in known else found

    @classmethod
    def parsed(cls, text: str) -> AllocatorSettings:
        """Return the settings of a text such as ``"expandable_segments:True,max_split_size_mb:128"``."""
        found = dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\s]+)", text))
        split, rounding = (
            int(found[key]) * MIB if found.get(key, "").isdecimal() else None
            for key in ("max_split_size_mb", "max_non_split_rounding_mb")
        )
        return cls(
            expandable_segments=found.get("expandable_segments") == "True",
            max_split_bytes=split,
            max_non_split_rounding_bytes=rounding or LARGE_SEGMENT_BYTES,
            roundup_power2_divisions=_divisions(found.get("roundup_power2_divisions", "")),
            ignored=tuple(
                f"{key}:{found[key]}"
                for key, default in (("backend", "native"), ("garbage_collection_threshold", "0"))
                if found.get(key, default) != default
            ),
        )

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block for a request (`round_size` in torch)."""
        if self.roundup_power2_divisions:
            # One entry for each power of 2 from 1 MiB on. The first also holds for smaller sizes.
            place = min(max(0, nbytes.bit_length() - 21), len(self.roundup_power2_divisions) - 1)
            divisions = self.roundup_power2_divisions[place]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                step = 1 << max(0, nbytes.bit_length() - divisions.bit_length())
                return -(-nbytes // step) * step
        return max(1, -(-nbytes // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES


_INTERVALS = 16
"""Powers of 2, from 1 MiB on, that have their own `roundup_power2_divisions`."""


def _divisions(text: str) -> tuple[int, ...]:
    """Parse ``"8"``, or ``"[256:1,512:2,>:4]"``. The first numbers of the pairs are MiB."""
    if text.isdecimal():
        return (int(text),) * _INTERVALS
    found: list[int] = []
    for bound, divisions in re.findall(r"(\d+|>)\s*:\s*(\d+)", text):
        place = _INTERVALS if bound == ">" else min(_INTERVALS - 1, max(1, int(bound)).bit_length() - 1)
        if bound != ">" and found:
            found += [1] * (place - len(found))
            found.append(int(divisions))
        else:
            found += [int(divisions)] * (place + (bound != ">") - len(found))
    return tuple(found) + (1,) * (_INTERVALS - len(found)) if found else ()
