"""Load the catalogue of GPUs for ``sim:`` specs, and find a GPU by any spelling of its name.

The values are in ``gpus.toml``, each row with its source. To add or replace GPUs, AUTOSPLIT_GPUS may name a file of the
same format, or the output of ``autosplit doctor --json``. That file is untrusted input.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from autosplit.addons import addon
from autosplit.devices.host_memory import HOST_SHARE
from autosplit.errors import DeviceError, shown
from autosplit.files import read_bounded
from autosplit.text import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GPUS_VARIABLE = "AUTOSPLIT_GPUS"
"""The environment variable with the path of the user's GPU file."""

SIMULATED_ERRORS = (
    (
        "Errors of predicted samples/s: for 320 steps of image models on an RTX 3090 that the prediction was not "
        "fitted to, the median error is within 6% of published measurements, and 90% of the errors are within 19%. "
        "For 22 steps of transformers on H100, A100, V100 and L4, the median is within 4%, and 90% are within 14%."
    ),
    (
        "Errors of predicted memory: of 304 largest batches published for an RTX 3090, 90% are predicted within the "
        "published range, and 5% are predicted too large. On CPUs with a budget, all 39 predictions were exact."
    ),
)
"""Errors of predictions for simulated GPUs, from benchmarks/results/published.json and ceilings.json there."""

UNMEASURED_RATES = "unmeasured-rates"
"""The kind of the note on GPUs without measured kernel rates."""

_DEFAULTS_OF = "A100 and H100"
"""The GPUs whose measurements are the lower and upper bound of ``sustained`` in [defaults]."""

_MOST_BYTES = 2**20

_Positive = Annotated[float, Meta(ge=1e-6, le=1e15)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")]


_Rate = Literal["float16", "float32", "float64", "tf32", "bfloat16"]
_Share = Annotated[float, Meta(ge=1e-3, le=2)]


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as a row of the file. The header of ``gpus.toml`` explains each value."""

    memory_gib: Annotated[float, Meta(ge=1e-6, le=2**20)]
    tflops: dict[_Rate, Annotated[float, Meta(ge=1e-6, le=1e9)]]
    memory_gb_per_s: Annotated[float, Meta(ge=1e-6, le=1e9)]
    link: str
    source: Annotated[str, Meta(max_length=1000)]
    compute_capability: Annotated[str, Meta(pattern=r"^[0-9]{1,2}\.[0-9]\Z")] | None = None
    launch_s: Annotated[float, Meta(gt=0, le=1)] | None = None
    multiprocessors: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    sustained: dict[_Rate, _Share] = {}
    sustained_of: _Name | None = None
    integrated: bool = False
    memory_power: Annotated[float, Meta(ge=0, le=1)] = 1.0
    driver_names: tuple[Annotated[str, Meta(max_length=100)], ...] = ()


class _Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    launch_s: Annotated[float, Meta(gt=0, le=1)]
    context_gib: Annotated[float, Meta(ge=0, le=64)] = 0.0
    driver_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    sustained: dict[_Rate, _Share] = {}


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cards: dict[_Name, _Row] = {}
    links: dict[str, _Positive] = {}
    defaults: _Defaults | None = None


@dataclass(frozen=True)
class GpuSpec:
    """A GPU of the catalogue with published rates (a row of ``gpus.toml``) or measured rates.

    Attributes:
        name: Its name in ``sim:`` specs, without spaces (``"A100-40GB"``).
        context_bytes: Memory that the driver and the CUDA context use.
        integrated: Whether the GPU uses the host's memory. Training then gets `HOST_SHARE` of it.
        peak_flops: Dense peak by dtype name, in FLOP/s: always ``float32`` (without tensor cores), ``float16`` and
            ``float64``. ``tf32`` and ``bfloat16`` only if the hardware supports them.
        link_bytes_per_s: Bandwidth to other GPUs in one direction, over its usual link.
        launch_s: The host's time in seconds to launch a kernel. An op takes a multiple of it.
        compute_capability: ``"8.6"``. None for a GPU that is not NVIDIA's.
        multiprocessors: None if unknown. Matrix products are then assumed to use the whole GPU.
        sustained: Fraction of the peak that large matrix products reach, by dtype.
        sustained_on: Other GPUs on which `sustained` was measured (``"A100 and H100"``), or empty.
        memory_power: Power of kernels that only move memory, as a fraction of the power limit. 1 if the limit does not
            slow matrix products.
        driver_names: Other names that the driver reports (``"NVIDIA H100 80GB HBM3"``).
    """

    name: str
    memory_bytes: int
    # A dict has no hash. The name identifies the GPU.
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float
    compute_capability: str | None
    source: str
    multiprocessors: int | None = None
    sustained: Mapping[str, float] = field(default_factory=dict, hash=False)
    sustained_on: str = ""
    memory_power: float = 1.0
    context_bytes: int = 0
    integrated: bool = False
    driver_names: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Memory of a whole GPU that torch's allocator can reserve."""
        share = HOST_SHARE if self.integrated else 1
        return int((self.memory_bytes - self.context_bytes) * share) // 512 * 512

    def sustained_flops(self, rate: str) -> float:
        """Return the FLOP/s of matrix products of a dtype. A dtype without hardware support runs as float32."""
        own = rate if rate in self.peak_flops else "float32"
        return self.peak_flops[own] * self.sustained_share(rate)

    def sustained_share(self, rate: str) -> float:
        """Return the fraction of the peak that matrix products of a dtype reach. See `sustained_flops`."""
        return self.sustained.get(rate if rate in self.peak_flops else "float32", 1.0)

    @property
    def host_bytes_per_s(self) -> float:
        """Rate of copies from pinned host memory: 80% of PCI Express x16 of the GPU's generation.

        Volta and Turing have PCI Express 3.0, Ampere and Ada 4.0, Hopper and later 5.0. For GPUs of AMD and Intel, 4.0
        is assumed. Copies of 64 MiB to an H100 took 1.3 ms (``benchmarks/results/gpu/h100.json``).
        """
        major = 8 if self.compute_capability is None else int(self.compute_capability.split(".")[0])
        return 12.6e9 * (1 if major < 8 else 2 if major < 9 else 4)

    @property
    def rates(self) -> str:
        """Source of the rates: ``"published"``, or ``"measured "`` and the device."""
        return self.source if self.source.startswith("measured ") else "published"


def unmeasured_rates(specs: Iterable[GpuSpec]) -> str:
    """Return a warning about GPUs that are predicted with the kernels of other GPUs, or an empty string."""
    found = {spec.name: spec for spec in specs}.values()
    others = ", ".join(f"{spec.name} ({spec.sustained_on})" for spec in found if spec.sustained_on)
    foreign = ", ".join(spec.name for spec in found if spec.compute_capability is None)
    texts = []
    if others:
        texts.append(
            f"autosplit has no measured kernel rates for {others}. It scales the rates of the GPUs in brackets by the "
            "datasheets' peaks, so expect larger errors. For example, on a TITAN Xp half of 32 image models take over "
            "1.4 times the predicted time in float32. In float16, half take over 1.6 times the predicted time."
        )
    if foreign:
        texts.append(f"autosplit traces memory and attention for {foreign} with the kernels of an A100.")
    return " ".join(texts)


def gpu_catalog() -> Mapping[str, GpuSpec]:
    """Return the GPUs that ``sim:`` specs can name, in the order of the file. The file is read once."""
    return _catalog_with(os.environ.get(GPUS_VARIABLE) or None)


@functools.lru_cache(maxsize=8)
def _catalog_with(path: str | None) -> Mapping[str, GpuSpec]:
    own = importlib.resources.files("autosplit").joinpath("devices/gpus.toml").read_text(encoding="utf-8")
    table = _table_of(own)
    if path is None:
        return _specs(table, table)
    try:
        text = read_bounded(path, _MOST_BYTES).decode("utf-8")
        if text.lstrip().startswith("{"):  # output of `autosplit doctor --json`
            given = msgspec.convert(addon("cards_of_examination")(text), type=_Table)
        else:
            given = _table_of(text)
        others = _specs(given, table)
    # Some valid TOML (dates, numbers with thousands of digits) raises other errors than the parser's.
    except (OSError, ValueError, ArithmeticError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(
            f"The file {path} of {GPUS_VARIABLE} can't be used ({printable(reason, longest=300)}). Expected a file "
            "like autosplit/devices/gpus.toml, or the output of autosplit doctor --json. Correct the file, or unset "
            "the variable."
        ) from error
    replaced = {_normal(name) for name in others}
    known = {name: spec for name, spec in _specs(table, table).items() if _normal(name) not in replaced}
    if given.defaults is not None:  # the host's launch time does not depend on the GPU
        known = {name: replace(spec, launch_s=given.defaults.launch_s) for name, spec in known.items()}
    return {**known, **others}


def _table_of(text: str) -> _Table:
    return msgspec.convert(tomllib.loads(text), type=_Table)


def _specs(table: _Table, known: _Table) -> dict[str, GpuSpec]:
    defaults = table.defaults or known.defaults
    assert defaults is not None, "gpus.toml has defaults"
    links = {**known.links, **table.links}
    sustained = defaults.sustained if table is known else {}  # a user's rates may be measured, so already sustained
    specs = {}
    for name, row in table.cards.items():
        _check_row(name, row, links, known)
        like = known.cards[row.sustained_of] if row.sustained_of else row
        measured_on = row.sustained_of or ("" if row.sustained else _DEFAULTS_OF)
        specs[name] = GpuSpec(
            name=name,
            memory_bytes=int(row.memory_gib * 2**30),
            peak_flops={str(dtype): tflops * 1e12 for dtype, tflops in row.tflops.items()},
            memory_bytes_per_s=row.memory_gb_per_s * 1e9,
            link_bytes_per_s=links[row.link],
            launch_s=row.launch_s or defaults.launch_s,
            compute_capability=row.compute_capability,
            source=row.source,
            multiprocessors=row.multiprocessors,
            context_bytes=_context_bytes(row, defaults),
            integrated=row.integrated,
            sustained={str(rate): share for rate, share in {**sustained, **like.sustained}.items()},
            sustained_on=measured_on if sustained else "",
            memory_power=like.memory_power,
            driver_names=row.driver_names,
        )
    if len({_normal(name) for name in specs}) < len(specs):
        raise ValueError("two GPUs have names that differ only in case, '-', '_' or the brand")
    return specs


def _context_bytes(row: _Row, defaults: _Defaults) -> int:
    used_gib = defaults.context_gib + defaults.driver_share * row.memory_gib
    return int(min(used_gib, row.memory_gib / 2) * 2**30)


def _check_row(name: str, row: _Row, links: Mapping[str, float], known: _Table) -> None:
    missing = {"float32", "float16", "float64"} - row.tflops.keys()
    if missing:
        raise ValueError(f"GPU {name} has no tflops of {', '.join(sorted(missing))}")
    if row.link not in links:
        raise ValueError(f"GPU {name} has the link {shown(row.link)}. Expected one of {', '.join(links)}")
    if row.sustained_of is not None and row.sustained_of not in known.cards:
        raise ValueError(f"GPU {name} has sustained_of = {shown(row.sustained_of)}. Expected a GPU of the catalogue")


def _normal(name: str) -> str:
    """Normalise a GPU's name for comparison: lower case, without spaces, '-', '_', the brand and a last "GPU"."""
    plain = re.sub(r"[\s_-]|\((r|tm)\)", "", name.lower())
    return re.sub(r"^(nvidia|amd|intel)?(geforce|tesla|instinct|radeon)?|(gpu|graphics)$", "", plain)


def catalog_names_near(name: str) -> tuple[str, ...]:
    """Return at most five catalogue names similar to a name, the most similar first."""
    wanted = _normal(name)
    by_normal = {_normal(known): known for known in gpu_catalog()}
    holding = [known for normal, known in by_normal.items() if len(wanted) > 1 and wanted in normal]
    similar = [by_normal[normal] for normal in difflib.get_close_matches(wanted, by_normal, n=5, cutoff=0.5)]
    return tuple(dict.fromkeys([*holding, *similar]))[:5]


def mentions_card(text: str) -> bool:
    """Return whether a string contains the name of a GPU, in any spelling."""
    return any(_normal(name) in _normal(text) for name in gpu_catalog())


def find_card(name: str) -> GpuSpec:
    """Return the row of a GPU by its name or the driver's name. Case, spaces, '-', '_' and the brand do not matter.

    Raises:
        DeviceError: No row or more than one row has this name.
    """
    wanted = _normal(name)
    for known, spec in gpu_catalog().items():
        if wanted in {_normal(own) for own in (known, *spec.driver_names)}:
            return spec
    variants = [known for known in gpu_catalog() if wanted and _normal(known).startswith(wanted)]
    if len(variants) > 1:
        raise DeviceError(
            f"The name {shown(name)} matches several GPUs: {', '.join(variants)}. Write the full name of one."
        )
    near = catalog_names_near(name) or ("A100-40GB", "RTX3090")
    row = f"the row [cards.{row_name(name)}]" if len(name) <= 60 else "its row"
    raise DeviceError(
        f"GPU {shown(name)} is not in the catalogue of {len(gpu_catalog())} GPUs. Expected a name such as "
        f"{', '.join(near)}. On a machine with this GPU, `python -m autosplit doctor --save gpus.toml` writes "
        f"{row}. Then set {GPUS_VARIABLE}=gpus.toml."
    )


def row_name(name: str) -> str:
    """Convert a GPU's name to the name of a catalogue row."""
    name = re.sub(r"\((R|TM)\)", "", name)
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")
    return (plain if plain[:1].isalpha() else f"card-{plain}")[:60]
