"""The catalogue of GPUs: the cards that ``sim:`` specs know, and finding one by a name that somebody wrote.

The figures are in ``runtime/gpus.toml``, each row with its source.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from autosplit.errors import DeviceError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GpuSpec", "catalog_names_near", "find_card", "gpu_catalog", "mentions_card"]


@dataclass(frozen=True)
class GpuSpec:
    """A card of the catalogue: published figures, a row of ``gpus.toml``.

    Attributes:
        name: Its name in ``sim:`` specs, without spaces (``"A100-40GB"``).
        memory_bytes: Nominal memory.
        peak_flops: Dense peak by dtype name, in FLOP/s: ``float32`` (without tensor cores), ``float16`` and ``float64``
            always, ``tf32`` and ``bfloat16`` only where the hardware has them.
        memory_bytes_per_s: Bandwidth of the card's memory.
        link_bytes_per_s: Bandwidth to its peers in one direction, over its usual link.
        launch_s: What one operation costs before its kernel does any work.
        compute_capability: ``"8.6"``.
        source: The document that the figures are from.
    """

    name: str
    memory_bytes: int
    # A dict has no hash; the name says enough.
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float
    compute_capability: str
    source: str


@functools.lru_cache(maxsize=1)
def gpu_catalog() -> Mapping[str, GpuSpec]:
    """Read the cards that ``sim:`` knows.

    Returns:
        Each card's row by its name, in the order of the file; read once.
    """
    text = importlib.resources.files("autosplit").joinpath("runtime/gpus.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {
        name: GpuSpec(
            name=name,
            memory_bytes=row["memory_gib"] * 2**30,
            peak_flops={dtype: tflops * 1e12 for dtype, tflops in row["tflops"].items()},
            memory_bytes_per_s=row["memory_gb_per_s"] * 1e9,
            link_bytes_per_s=table["links"][row["link"]],
            launch_s=row.get("launch_s", table["defaults"]["launch_s"]),
            compute_capability=row["compute_capability"],
            source=row["source"],
        )
        for name, row in table["cards"].items()
    }


def _normal(name: str) -> str:
    """A card's name as it is compared: no case, spaces, '-' or '_', no brand in front."""
    plain = re.sub(r"[\s_-]", "", name).lower()
    return re.sub(r"^(nvidia)?(geforce|tesla)?", "", plain)


def catalog_names_near(name: str) -> tuple[str, ...]:
    """Find the cards whose names are nearest to a name.

    Args:
        name: What somebody wrote.

    Returns:
        At most five names of the catalogue, the nearest first; empty if none is near.
    """
    wanted = _normal(name)
    by_normal = {_normal(known): known for known in gpu_catalog()}
    holding = [known for normal, known in by_normal.items() if len(wanted) > 1 and wanted in normal]
    similar = [by_normal[normal] for normal in difflib.get_close_matches(wanted, by_normal, n=5, cutoff=0.5)]
    return tuple(dict.fromkeys([*holding, *similar]))[:5]


def mentions_card(text: str) -> bool:
    """Tell whether the name of a card is somewhere in a text, in any spelling."""
    return any(_normal(name) in _normal(text) for name in gpu_catalog())


def find_card(name: str) -> GpuSpec:
    """Look a card up by its name.

    Args:
        name: In any case, with or without spaces, '-', '_' and the brand: ``"NVIDIA GeForce RTX 3090"``.

    Returns:
        Its row.

    Raises:
        DeviceError: If no card or several have the name; the message says which names were possible.
    """
    wanted = _normal(name)
    for known, spec in gpu_catalog().items():
        if _normal(known) == wanted:
            return spec
    variants = [known for known in gpu_catalog() if wanted and _normal(known).startswith(wanted)]
    if len(variants) > 1:
        raise DeviceError(
            f"card {shown(name)} may be any of {', '.join(variants)}: expected one of these; name it in full"
        )
    near = catalog_names_near(name) or ("A100-40GB", "RTX3090")
    raise DeviceError(
        f"card {shown(name)} is not in the catalogue of {len(gpu_catalog())} cards: expected a name such as "
        f"{', '.join(near)}; correct the name"
    )
