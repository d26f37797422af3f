"""Devices: what there is to run on, how a spec such as ``sim:2xA100-40GB`` is read, and what may be planned with.

Three kinds: ``cuda`` (real GPUs), ``cpu`` (this machine's processor, with or without enforced budgets) and ``sim``
(cards from ``runtime/gpus.toml``). Importing this module loads neither torch nor NVML, and a ``sim:`` or ``cpu`` spec
never does. NVML only adds to what CUDA says: every failure of it ends as a note.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.resources
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autosplit.errors import DeviceError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import torch

__all__ = [
    "Device",
    "DeviceReport",
    "GpuSpec",
    "catalog_names_near",
    "gpu_catalog",
    "list_devices",
    "parse_bytes",
    "parse_devices",
    "parse_reserve",
    "reserve_bytes",
    "survey_devices",
]

_T = TypeVar("_T")

MAX_DEVICES = 1024
"""More devices than this are a typing error, not a machine."""

_CPU_SHARE = Fraction(80, 100)
_CUDA_RESERVE = 0.05
# Where neither /proc nor sysconf says how much memory there is (Windows): small, to be safe; `cpu:SIZE` overrides it.
_UNKNOWN_HOST_BYTES = 4 * 2**30
_EXPECTED = "expected 'cuda', 'cuda:0,2', 'cpu', 'cpu:2GiB,cpu:1GiB' or 'sim:2xA100-40GB+1xRTX3090'"


# ------------------------------------------------------------------------------------------------------- facts


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


@dataclass(frozen=True)
class Device:
    """One device that a plan is made for.

    Attributes:
        kind: Where its steps run.
        index: Its position among the devices for ``cpu`` and ``sim``, its logical CUDA index for ``cuda``.
        name: ``"NVIDIA GeForce RTX 3090"``, ``"RTX3090"`` (simulated) or ``"cpu"``.
        capacity_bytes: What may be planned with, before the reserve. ``cuda``: the memory that is free or held by this
            process's allocator; ``sim``: the card's memory, or what ``@`` lowers it to; ``cpu``: the budget, or 80 %
            of the available memory.
        budgeted: Whether the capacity is enforced exactly, as it is for ``sim`` and ``cpu:SIZE``.
        spec: The catalogue's row; ``sim`` only.
        uuid: ``"GPU-..."``; ``cuda`` only, None where unknown.
        driver: The driver's version; ``cuda`` only, None where unknown.
    """

    kind: Literal["cuda", "cpu", "sim"]
    index: int
    name: str
    capacity_bytes: int
    budgeted: bool = False
    spec: GpuSpec | None = None
    uuid: str | None = None
    driver: str | None = None

    @property
    def label(self) -> str:
        """The device in the words of a report: ``"cuda:0"``, ``"cpu:1"``, ``"sim:2"``; without a budget ``"cpu"``."""
        return "cpu" if self.kind == "cpu" and not self.budgeted else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class DeviceReport:
    """One GPU as ``autosplit devices`` shows it; a figure that nobody could tell is None.

    Attributes:
        logical_index: Its number in CUDA (``cuda:N``); None for a GPU that this process doesn't see.
        physical_index: Its number in NVML and nvidia-smi; None where NVML doesn't know it.
        name: Its product name.
        total_bytes: Its memory.
        free_bytes: What of it nobody holds.
        used_by_others_bytes: What other processes hold.
        utilization_percent: Share of the last moment in which a kernel ran.
        temperature_c: Temperature in degrees Celsius.
        power_w: Power draw in watts.
        uuid: ``"GPU-..."``.
        visible: Whether this process can use it.
        notes: What is special about it, and which figures could not be had.
    """

    logical_index: int | None
    physical_index: int | None
    name: str
    total_bytes: int | None
    free_bytes: int | None
    used_by_others_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    power_w: float | None
    uuid: str | None
    visible: bool
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------- sizes

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
            f"size {_shown(text)}: expected a number of 0 or more with a unit; write it as 600MiB or 1.5GiB"
        )
    return int(Fraction(match[1]) * unit_bytes)


def parse_reserve(value: str | float | None) -> int | float | None:
    """Read what is to be kept free on every device.

    Args:
        value: Bytes (``2**30``, ``"1GiB"``), a share of the device's capacity (``0.05``, ``"5%"``), or None for the
            default.

    Returns:
        An int of bytes, a float share of at least 0 and below 1, or None.

    Raises:
        InputError: If it is negative, a share of 1 or more, or neither a size nor a share.
    """
    if value is None:
        return None
    expected = (
        "expected bytes (1GiB) or a share of at least 0 and below 1 (5%, 0.05); give one of these, or leave it out"
    )
    if isinstance(value, str):
        return _parse_reserve_text(value, expected)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"reserve {_shown(value)}: {expected}")
    if value < 0 or (isinstance(value, float) and not 0 <= value < 1):
        raise InputError(f"reserve {_shown(value)}: {expected}")
    return value


def _parse_reserve_text(text: str, expected: str) -> int | float:
    share = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%", text.strip())
    if share is None and re.fullmatch(r"0?\.[0-9]{1,20}", text.strip()):
        return float(text)
    try:
        reserve = float(Fraction(share[1]) / 100) if share else parse_bytes(text)
    except InputError as error:
        raise InputError(f"reserve {_shown(text)}: {expected}") from error
    if share and reserve >= 1:
        raise InputError(f"reserve {_shown(text)}: {expected}")
    return reserve


def reserve_bytes(reserve: str | float | None, device: Device) -> int:
    """Tell what is kept free on a device.

    Args:
        reserve: As for `parse_reserve`. None is the default: 5 % on ``cuda``, nothing on ``cpu`` and ``sim``.
        device: The device; a share is one of its `capacity_bytes`.

    Returns:
        Bytes, rounded up; less than the device's capacity.

    Raises:
        InputError: If the reserve is unreadable, negative, or leaves nothing of the device.
    """
    wanted = parse_reserve(reserve)
    if wanted is None:
        wanted = _CUDA_RESERVE if device.kind == "cuda" else 0
    kept_bytes = wanted if isinstance(wanted, int) else math.ceil(wanted * device.capacity_bytes)
    if kept_bytes and kept_bytes >= device.capacity_bytes:
        raise InputError(
            f"reserve {_shown(reserve)} keeps {_size(kept_bytes)} free of the {_size(device.capacity_bytes)} on "
            f"{device.label}: expected less than its capacity; lower the reserve"
        )
    return kept_bytes


def _shown(value: object) -> str:
    """What somebody wrote, for a message that has to stay on one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-12:]}"


def _size(n_bytes: int) -> str:
    """Bytes for a message: ``"24 GiB"``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n_bytes) >= factor:
            return f"{n_bytes / factor:.4g} {unit}"
    return f"{n_bytes} B"


# --------------------------------------------------------------------------------------------------- catalogue


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


def _find_card(name: str) -> GpuSpec:
    """Look a card up by its name, or say which names were possible."""
    wanted = _normal(name)
    matches = [spec for known, spec in gpu_catalog().items() if _normal(known) == wanted]
    if matches:
        return matches[0]
    variants = [known for known in gpu_catalog() if wanted and _normal(known).startswith(wanted)]
    if len(variants) > 1:
        raise DeviceError(
            f"card {_shown(name)} may be any of {', '.join(variants)}: expected one of these; name it in full"
        )
    near = catalog_names_near(name) or ("A100-40GB", "RTX3090")
    raise DeviceError(
        f"card {_shown(name)} is not in the catalogue of {len(gpu_catalog())} cards: expected a name such as "
        f"{', '.join(near)}; correct the name"
    )


# ------------------------------------------------------------------------------------------------ device specs


def list_devices() -> tuple[Device, ...]:
    """List what there is to run on.

    Returns:
        Every GPU that this process sees, in CUDA's order; without any, the processor.

    Raises:
        DeviceError: If CUDA refuses to describe a GPU that it counted.
    """
    cuda, _ = _cuda()
    if cuda is None:
        return (_plain_cpu(),)
    driver = _driver_version()
    return tuple(_cuda_device(cuda, index, driver) for index in range(cuda.device_count()))


def parse_devices(
    spec: str | Device | torch.device | Sequence[str | Device | torch.device] | None = None,
) -> tuple[Device, ...]:
    """Read a device spec.

    Args:
        spec: ``"cuda"`` (every visible GPU), ``"cuda:0,2"``, ``"cpu"``, ``"cpu:2GiB,cpu:1GiB"`` (budgets that are
            enforced), ``"sim:2xA100-40GB+1xRTX3090"``, ``"sim:3xRTX3090@10GiB"`` (lowered memory), a `Device`, a
            ``torch.device``, or a sequence of these; all of one kind. None is every visible GPU, without any the
            processor.

    Returns:
        The devices in the order of the spec. Those of ``cpu`` and ``sim`` are numbered by position.

    Raises:
        DeviceError: If the spec can't be read, or names an unknown card, an absent GPU, one GPU twice, a GPU that the
            installed torch was not built for, a count or a budget of 0, devices of several kinds, or over 1024 devices.
    """
    if spec is None:
        cuda, _ = _cuda()
        return _cuda_piece(None) if cuda is not None else (_plain_cpu(),)
    parts = [spec] if isinstance(spec, (str, Device)) or not isinstance(spec, Iterable) else list(spec)
    devices: list[Device] = []
    for part in parts:
        devices.extend([part] if isinstance(part, Device) else _parse_text(_spec_text(part)))
    return _joined(devices, spec)


def _spec_text(part: object) -> str:
    """A part of a spec as text; a ``torch.device`` prints itself in these very words."""
    if isinstance(part, str):
        return part
    if type(part).__module__ == "torch" and type(part).__name__ == "device":
        return str(part)
    raise DeviceError(
        f"device {_shown(part)} is of type {type(part).__name__}: {_EXPECTED}; pass a string or a torch.device"
    )


def _parse_text(text: str) -> list[Device]:
    """The devices of one string, whose items are parted by commas."""
    devices: list[Device] = []
    kind = ""
    for piece in (piece.strip() for piece in text.split(",")):
        # In "cuda:0,2" the second item goes on with the first one's kind.
        goes_on = kind == "cuda" and re.fullmatch(r"[+-]?[0-9]+", piece)
        head, colon, tail = ("cuda", ":", piece) if goes_on else piece.partition(":")
        kind = head.strip().lower()
        read = {"cuda": _cuda_piece, "cpu": _cpu_piece, "sim": _sim_piece}.get(kind)
        if read is None:
            raise DeviceError(_unknown_device(text, piece, kind_before=devices[-1].kind if devices else ""))
        devices.extend(read(tail.strip() if colon else None))
        if len(devices) > MAX_DEVICES:
            break
    return devices


def _unknown_device(text: str, piece: str, kind_before: str) -> str:
    """The message for an item that starts with none of the three kinds."""
    if not piece:
        return f"device spec {_shown(text)} has an empty item: {_EXPECTED}; name at least one device"
    hint = "correct the name"
    word = piece.partition(":")[0].strip().lower()
    # Spelled like "cpu", meant as "cuda".
    near = ["cuda"] if word.startswith("gpu") else difflib.get_close_matches(word, ("cuda", "cpu", "sim"), 1, 0.5)
    if kind_before == "cpu":
        hint = f"every budget carries its own 'cpu:', so write 'cpu:{piece}'"
    elif kind_before == "sim":
        hint = f"cards are joined by '+', so write '+{piece}'"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    elif any(_normal(name) in _normal(piece) for name in gpu_catalog()):
        hint = f"for a simulated card write 'sim:{piece}'"
    elif re.fullmatch(r"[0-9]+", piece):
        hint = f"for a GPU write 'cuda:{piece}'"
    return f"device {_shown(piece)} is unknown: {_EXPECTED}; {hint}"


def _joined(devices: list[Device], spec: object) -> tuple[Device, ...]:
    """The whole spec's devices, checked against each other and numbered."""
    if not devices:
        raise DeviceError(f"device spec {_shown(spec)} names no device: {_EXPECTED}; name at least one")
    _check_count(len(devices), spec)
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise DeviceError(
            f"device spec {_shown(spec)} mixes {' and '.join(kinds)}: expected one kind; make a plan for each"
        )
    if kinds == ["cuda"]:
        indices = [device.index for device in devices]
        twice = sorted({index for index in indices if indices.count(index) > 1})
        if twice:
            raise DeviceError(
                f"device spec {_shown(spec)} names cuda:{twice[0]} twice: expected each GPU once; remove one"
            )
        return tuple(devices)
    if len(devices) > 1 and any(device.label == "cpu" for device in devices):
        raise DeviceError(
            f"device spec {_shown(spec)} names 'cpu' beside others: expected it alone, or a budget for each; "
            "write 'cpu:2GiB,cpu:1GiB'"
        )
    return tuple(replace(device, index=position) for position, device in enumerate(devices))


def _check_count(count: int, spec: object) -> None:
    if count > MAX_DEVICES:
        raise DeviceError(
            f"device spec {_shown(spec)} is over {MAX_DEVICES} devices: expected at most that; lower the count"
        )


def _plain_cpu() -> Device:
    return Device("cpu", 0, "cpu", int(_available_host_bytes() * _CPU_SHARE))


def _cpu_piece(tail: str | None) -> tuple[Device, ...]:
    """``cpu`` or ``cpu:2GiB``."""
    return (_plain_cpu(),) if tail is None else (Device("cpu", 0, "cpu", _budget(f"cpu:{tail}", tail), budgeted=True),)


def _budget(item: str, text: str) -> int:
    """A budget's bytes. A bare number is refused: ``cpu:1`` looks like torch's second processor, not like one byte."""
    try:
        n_bytes = parse_bytes(text)
    except InputError as error:
        raise DeviceError(
            f"budget {_shown(text)} in {_shown(item)}: expected a size such as 2GiB or 600MiB; correct it"
        ) from error
    if n_bytes and re.fullmatch(r"[0-9.]+", text):
        raise DeviceError(
            f"budget {_shown(text)} in {_shown(item)} has no unit: expected a size such as 2GiB; add the unit"
        )
    if n_bytes < 1:
        raise DeviceError(
            f"budget {_shown(text)} in {_shown(item)}: expected at least one byte; write a size such as 2GiB"
        )
    return n_bytes


def _sim_piece(tail: str | None) -> tuple[Device, ...]:
    """``sim:2xA100-40GB+1xRTX3090@10GiB``."""
    if not tail:
        raise DeviceError(f"device 'sim' names no card: {_EXPECTED}; write 'sim:RTX3090', or 'sim:2xRTX3090' for two")
    devices: list[Device] = []
    for item in tail.split("+"):
        count, device = _sim_item(item.strip(), f"sim:{tail}")
        _check_count(len(devices) + count, f"sim:{tail}")
        devices.extend([device] * count)
    return tuple(devices)


def _sim_item(item: str, spec: str) -> tuple[int, Device]:
    """``2xA100-40GB`` as its count and its device."""
    card, at, memory = (text.strip() for text in item.partition("@"))
    # "0x..." and "-1x..." are counts too, and are refused as such.
    match = re.fullmatch(r"(?:([+-]?[0-9.]+)\s*[xX*]\s*)?(.*)", card)
    assert match is not None
    count_text, name = match[1] or "1", match[2]
    if not name:
        raise DeviceError(f"device spec {_shown(spec)} has an item without a card: {_EXPECTED}; name a card")
    if not re.fullmatch(r"[0-9]+", count_text) or not count_text.strip("0"):
        raise DeviceError(
            f"count {_shown(count_text)} in {_shown(spec)}: expected a whole number of 1 or more; correct it"
        )
    gpu = _find_card(name)
    capacity_bytes = _budget(item, memory) if at else gpu.memory_bytes
    if capacity_bytes > gpu.memory_bytes:
        raise DeviceError(
            f"memory {_shown(memory)} in {_shown(item)}: expected at most the {_size(gpu.memory_bytes)} of a "
            f"{gpu.name}; '@' only lowers it, so write less, or choose a larger card"
        )
    # Longer texts than the bound's own are over it, and int() refuses very long ones.
    count = int(count_text) if len(count_text.lstrip("0")) <= len(str(MAX_DEVICES)) else MAX_DEVICES + 1
    return count, Device("sim", 0, gpu.name, capacity_bytes, budgeted=True, spec=gpu)


def _cuda_piece(tail: str | None) -> tuple[Device, ...]:
    """``cuda`` or one index of it."""
    cuda, why = _cuda()
    spec = "cuda" if tail is None else f"cuda:{tail}"
    if cuda is None:
        raise DeviceError(
            f"device {_shown(spec)} is not here ({why}): expected a visible GPU; use 'cpu', or 'sim:' with a card"
        )
    visible = range(cuda.device_count())
    if tail is None:
        indices: Sequence[int] = visible
    elif not re.fullmatch(r"[0-9]{1,9}", tail) or int(tail) not in visible:
        known = f"cuda:0 to cuda:{len(visible) - 1}" if len(visible) > 1 else "cuda:0 alone"
        raise DeviceError(
            f"device {_shown(spec)} is not here: expected one that this process sees, {known}; choose again"
        )
    else:
        indices = [int(tail)]
    _refuse_several_mig(cuda, indices)
    _refuse_unsupported(cuda, indices, visible)
    driver = _driver_version()
    return tuple(_cuda_device(cuda, index, driver) for index in indices)


# ------------------------------------------------------------------------------------------------- host memory


def _available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the kernel's figure, bounded by the cgroups around the process."""
    free_bytes = [n_bytes for n_bytes in (_meminfo_bytes(root), *_cgroup_bytes(root)) if n_bytes is not None]
    return max(0, min(free_bytes)) if free_bytes else _sysconf_bytes()


def _meminfo_bytes(root: Path) -> int | None:
    """``MemAvailable`` of Linux; None elsewhere."""
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_bytes(root: Path) -> list[int]:
    """What every memory cgroup from the process's own up to the root has left, of either version."""
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mounts = ("sys/fs/cgroup/memory",) if controllers else ("sys/fs/cgroup", "sys/fs/cgroup/unified")
        own = Path(path.strip("/"))
        for mount in mounts:
            left.extend(
                n_bytes
                for level in (own, *own.parents)
                if (n_bytes := _cgroup_level_bytes(root / mount / level, v1=bool(controllers))) is not None
            )
    return left


def _cgroup_level_bytes(folder: Path, *, v1: bool) -> int | None:
    """One cgroup's limit less its use; page cache that the kernel would drop is not use. None without a limit."""
    limit = _read(folder / ("memory.limit_in_bytes" if v1 else "memory.max")).strip()
    used = _read(folder / ("memory.usage_in_bytes" if v1 else "memory.current")).strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    cache = re.search(
        rf"^{'total_inactive_file' if v1 else 'inactive_file'} ([0-9]+)", _read(folder / "memory.stat"), re.MULTILINE
    )
    return int(limit) - max(0, int(used) - (int(cache[1]) if cache else 0))


def _sysconf_bytes() -> int:
    """Memory where there is no /proc: free pages, else half of all pages, else a cautious constant."""
    for name, share in (("SC_AVPHYS_PAGES", 1.0), ("SC_PHYS_PAGES", 0.5)):
        try:
            pages = os.sysconf(name)
            page_bytes = os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
        if pages > 0 and page_bytes > 0:
            return int(pages * page_bytes * share)
    return _UNKNOWN_HOST_BYTES


def _read(path: Path) -> str:
    """A file's text, empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------------- CUDA


def _cuda() -> tuple[Any, str]:
    """``torch.cuda`` and an empty text, or None and why there is no GPU to use. Tests put fakes in its place."""
    try:
        import torch  # here, for CUDA devices alone: `sim:` and `cpu` specs must not wait for it
    except ImportError as error:
        return None, f"torch cannot be imported: {error}"
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return None, f"the installed torch {torch.__version__} is a build without CUDA"
    with warnings.catch_warnings():
        # torch warns where a driver is too old or broken; what it then answers says enough.
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if available:
        return torch.cuda, ""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None, "torch sees no GPU" + (f" under CUDA_VISIBLE_DEVICES={mask!r}" if mask is not None else "")


def _cuda_device(cuda: Any, index: int, driver: str | None) -> Device:
    """The device of one CUDA index, with what is free now or already held by this process's allocator."""
    try:
        properties = cuda.get_device_properties(index)
        free_bytes, total_bytes = cuda.mem_get_info(index)
        own_bytes = cuda.memory_reserved(index)
    except RuntimeError as error:
        raise DeviceError(
            f"device 'cuda:{index}' cannot be asked for its memory ({_first_line(error)}): expected a working GPU; "
            "look at `autosplit devices`, or choose another"
        ) from error
    return Device(
        kind="cuda",
        index=index,
        name=str(properties.name),
        capacity_bytes=min(int(total_bytes), int(free_bytes) + int(own_bytes)),
        uuid=_cuda_uuid(properties),
        driver=driver,
    )


def _cuda_uuid(properties: Any) -> str | None:
    """A CUDA device's UUID in NVML's spelling; torch gives it without the prefix."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _pci_address(properties: Any) -> tuple[int, int, int] | None:
    """A CUDA device's (domain, bus, device), None in a torch that doesn't say."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return int(properties.pci_domain_id), int(properties.pci_bus_id), int(properties.pci_device_id)


def _is_mig(name: str) -> bool:
    """Whether CUDA's name is that of a slice of a GPU (``"NVIDIA A100-SXM4-40GB MIG 1g.5gb"``)."""
    return " MIG " in f"{name} "


def _refuse_several_mig(cuda: Any, indices: Iterable[int]) -> None:
    """CUDA gives one process a single MIG instance; a list of them silently loses all but the first."""
    named = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip().startswith("MIG-")]
    slices = [index for index in indices if _is_mig(str(cuda.get_device_properties(index).name))]
    count = max(len(named), len(slices))
    if count > 1:
        raise DeviceError(
            f"{count} MIG instances are visible: expected one, CUDA lets a process use no more; "
            "set CUDA_VISIBLE_DEVICES to one of them"
        )


def _refuse_unsupported(cuda: Any, indices: Iterable[int], visible: Iterable[int]) -> None:
    """A card without kernels in this torch fails at its first operation; say so before, with what would do."""
    problems = {index: _unsupported(cuda, index) for index in visible}
    bad = [index for index in indices if problems[index] is not None]
    if bad:
        name = str(cuda.get_device_properties(bad[0]).name)
        good = ",".join(str(index) for index, problem in problems.items() if problem is None)
        other = f", or use 'cuda:{good}'" if good else ", or use 'cpu' or 'sim:' with a card"
        raise DeviceError(f"device 'cuda:{bad[0]}' ({name}): {problems[bad[0]]}{other}")


def _unsupported(cuda: Any, index: int) -> str | None:
    """Why the installed torch has no kernels for a card, with the build to use; None where it has them."""
    major, minor = cuda.get_device_capability(index)
    return _missing_arch((int(major), int(minor)), cuda.get_arch_list())


def _missing_arch(capability: tuple[int, int], built_for: Sequence[str]) -> str | None:
    """Compare a compute capability with the architectures that torch was built for.

    Machine code (``sm_86``) runs on its own major version from its minor version up, with the suffix ``a`` on that very
    one; PTX (``compute_90``) is compiled for anything newer. An empty or foreign list (``gfx90a``) tells nothing.
    """
    arches = [match for arch in built_for if (match := re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", arch))]
    if not arches or any(_arch_runs(match, capability) for match in arches):
        return None
    listed = " ".join(match[0] for match in arches)
    return (
        f"compute capability {capability[0]}.{capability[1]} is not among what this torch was built for ({listed}); "
        f"install {_build_for(capability)}"
    )


def _arch_runs(arch: re.Match[str], capability: tuple[int, int]) -> bool:
    built = (int(arch[2]), int(arch[3]))
    if arch[4] == "a":
        return built == capability
    if arch[1] == "compute" and not arch[4]:
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _build_for(capability: tuple[int, int]) -> str:
    """Which build of torch has kernels for a card, after pytorch's CUDA support matrix (pytorch#172352, #190385)."""
    if capability < (5, 0):
        return f"a torch built from source for sm_{capability[0]}{capability[1]}, no current wheel has it"
    if capability < (7, 5):
        return "a torch of at most 2.14 built for CUDA 12.6 (cu126), whose wheels still have Maxwell, Pascal and Volta"
    if capability >= (10, 0):
        return "a torch built for CUDA 12.8 or newer (cu128, cu130)"
    return "a torch built for CUDA 12.6 or newer (cu126, cu128, cu130)"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# -------------------------------------------------------------------------------------------------------- NVML


def _nvml() -> tuple[Any, str]:
    """NVML's module, ready to be asked, and an empty text; or None and why not. Tests put fakes in its place."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "NVML is not installed, so use, temperature and power are unknown; pip install nvidia-ml-py"
    except Exception as error:  # noqa: BLE001 (whatever goes wrong in a foreign module, NVML stays optional)
        return None, f"NVML cannot be imported ({_first_line(error)}); reinstall nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 (the same: every failure is a note)
        return None, _nvml_start_problem(error)
    return nvml, ""


def _nvml_start_problem(error: Exception) -> str:
    """The note for an NVML that doesn't start, by the error's class, which old and new bindings name alike."""
    reasons = {
        "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here",
        "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed but not loaded; load it, or reboot",
        "NVMLError_LibRmVersionMismatch": "the NVIDIA driver was updated while loaded; reboot",
        "NVMLError_NoPermission": "NVML has no permission to talk to the driver; run as a user who has",
    }
    reason = reasons.get(type(error).__name__, f"NVML does not start ({_first_line(error)})")
    return f"{reason}; use, temperature and power are unknown"


def _pynvml_distribution_note() -> str | None:
    """The old separate distribution `pynvml` hides or shadows `nvidia-ml-py`, and torch warns of it."""
    try:
        version = importlib.metadata.version("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the separate distribution 'pynvml' {version} is installed beside nvidia-ml-py; pip uninstall pynvml, "
        "then pip install --force-reinstall nvidia-ml-py"
    )


def _ask(notes: list[str], what: str, call: Callable[[], _T]) -> _T | None:
    """Ask for one figure; where that fails, note what is unknown and go on."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (a figure that nobody can tell must not hide the others)
        notes.append(f"{what} unknown: {_first_line(error)}")
        return None


def _text(value: str | bytes) -> str:
    """NVML's text; old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _driver_version() -> str | None:
    """The driver's version by NVML, None where it doesn't tell."""
    nvml, _ = _nvml()
    version = None if nvml is None else _ask([], "driver", nvml.nvmlSystemGetDriverVersion)
    return None if version is None else _text(version)


# ------------------------------------------------------------------------------------------------------ survey


@dataclass
class _Gpu:
    """A GPU while the two views of it, CUDA's and NVML's, are put together."""

    name: str
    notes: list[str]
    logical_index: int | None = None
    physical_index: int | None = None
    uuid: str | None = None
    pci: tuple[int, int, int] | None = None
    mig: bool = False
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None


def survey_devices() -> tuple[tuple[DeviceReport, ...], tuple[str, ...]]:
    """Look at every GPU of the machine, whether this process sees it or not.

    Returns:
        The GPUs, those that this process sees first and in CUDA's order; and notes on the whole (no driver, no NVML,
        how ``CUDA_VISIBLE_DEVICES`` maps). Neither CUDA's nor NVML's failures raise: they are among the notes.
    """
    notes: list[str] = []
    cuda, why_no_cuda = _cuda()
    nvml, why_no_nvml = _nvml()
    notes.extend(note for note in (why_no_cuda, why_no_nvml, _pynvml_distribution_note()) if note)
    logical = [] if cuda is None else _logical_gpus(cuda, notes)
    physical = [] if nvml is None else _physical_gpus(nvml, notes)
    rows = [_merged(gpu, physical, cuda) for gpu in logical]
    matched = {gpu.physical_index for gpu in rows}
    rows.extend(gpu for gpu in physical if gpu.physical_index not in matched)
    reports = tuple(_report(gpu) for gpu in rows)
    notes.extend(_visibility_notes(reports, nvml_answers=bool(physical)))
    return reports, tuple(dict.fromkeys(notes))


def _logical_gpus(cuda: Any, notes: list[str]) -> list[_Gpu]:
    """The GPUs as CUDA sees them."""
    gpus = []
    for index in range(_ask(notes, "the number of GPUs", cuda.device_count) or 0):
        gpu = _Gpu(name="unknown GPU", notes=[], logical_index=index)
        properties = _ask(gpu.notes, "properties", functools.partial(cuda.get_device_properties, index))
        if properties is not None:
            gpu.name = str(properties.name)
            gpu.uuid, gpu.pci = _cuda_uuid(properties), _pci_address(properties)
            gpu.total_bytes = int(properties.total_memory)
            gpu.mig = _is_mig(gpu.name)
            problem = _ask(gpu.notes, "architecture", functools.partial(_unsupported, cuda, index))
            gpu.notes.extend([problem] if problem else [])
        gpus.append(gpu)
    named = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip().startswith("MIG-")]
    if len(named) > 1 or sum(gpu.mig for gpu in gpus) > 1:
        notes.append(
            "several MIG instances are visible, but a process can use only one; set CUDA_VISIBLE_DEVICES to one"
        )
    return gpus


def _physical_gpus(nvml: Any, notes: list[str]) -> list[_Gpu]:
    """The GPUs as NVML sees them."""
    gpus = []
    for index in range(_ask(notes, "NVML's number of GPUs", nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(notes, f"physical GPU {index}", functools.partial(nvml.nvmlDeviceGetHandleByIndex, index))
        if handle is not None:
            gpus.append(_physical_gpu(nvml, index, handle))
    return gpus


def _physical_gpu(nvml: Any, index: int, handle: Any) -> _Gpu:
    """One GPU with all that NVML tells of it."""
    notes: list[str] = []
    name = _ask(notes, "name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    gpu = _Gpu(name=name or "unknown GPU", notes=notes, physical_index=index)
    gpu.uuid = _ask(notes, "UUID", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    pci = _ask(notes, "PCI address", lambda: nvml.nvmlDeviceGetPciInfo(handle))
    gpu.pci = None if pci is None else (int(pci.domain), int(pci.bus), int(pci.device))
    memory = _ask(notes, "memory", lambda: _nvml_memory(nvml, handle))
    if memory is not None:
        gpu.total_bytes, gpu.free_bytes, gpu.used_bytes = int(memory.total), int(memory.free), int(memory.used)
    gpu.own_bytes = _own_bytes(nvml, handle, notes)
    gpu.utilization_percent = _ask(notes, "utilization", lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    gpu.temperature_c = _ask(
        notes, "temperature", lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    )
    gpu.power_w = _ask(notes, "power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    # A card that has no MIG says "not supported": nothing to note.
    mig = _ask([], "MIG", lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig and mig[0]:
        gpu.mig = True
        notes.append("MIG is on: choose one instance by its MIG- UUID in CUDA_VISIBLE_DEVICES")
    return gpu


def _nvml_memory(nvml: Any, handle: Any) -> Any:
    """Memory in its second version, which keeps the driver's own share apart; the first where that one fails (WSL)."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except Exception:  # noqa: BLE001 (old bindings lack it, some drivers answer "unknown error": the first one decides)
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _own_bytes(nvml: Any, handle: Any, notes: list[str]) -> int | None:
    """What NVML says that this process holds; None where it lists no such process, or no figures."""
    processes = _ask(notes, "processes", lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
    if processes is None:
        return None
    if any(process.usedGpuMemory is None for process in processes):
        notes.append("the driver does not say how much each process holds (Windows and WSL do not)")
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return sum(own) if own and None not in own else None


def _merged(gpu: _Gpu, physical: Sequence[_Gpu], cuda: Any) -> _Gpu:
    """CUDA's view of a GPU with what NVML knows of the same one."""
    known = _same_gpu(gpu, physical)
    if known is not None:
        # A slice has the memory that CUDA says; NVML's figures are the whole card's.
        for name in ("physical_index", "temperature_c", "power_w", *(() if gpu.mig else _MEASURED)):
            if getattr(known, name) is not None:
                setattr(gpu, name, getattr(known, name))
        gpu.uuid = gpu.uuid or known.uuid
        gpu.notes.extend(known.notes)
    index = gpu.logical_index
    if gpu.free_bytes is None:
        # Unified memory and slices: NVML has no figures, CUDA has. This makes a context, so it is asked only here.
        memory = _ask(gpu.notes, "free memory", lambda: cuda.mem_get_info(index))
        if memory is not None:
            gpu.free_bytes, gpu.total_bytes = int(memory[0]), int(memory[1])
            gpu.used_bytes = gpu.total_bytes - gpu.free_bytes
    if gpu.own_bytes is None:
        gpu.own_bytes = _ask([], "own memory", lambda: int(cuda.memory_reserved(index) if cuda.is_initialized() else 0))
    return gpu


_MEASURED = ("total_bytes", "free_bytes", "used_bytes", "own_bytes", "utilization_percent")


def _same_gpu(gpu: _Gpu, physical: Sequence[_Gpu]) -> _Gpu | None:
    """NVML's view of a CUDA GPU: by UUID, else by PCI address; never by index, the two orders differ."""
    for attribute in ("uuid", "pci"):
        value = getattr(gpu, attribute)
        matches = [other for other in physical if value is not None and getattr(other, attribute) == value]
        if len(matches) == 1:
            return matches[0]
    if physical:
        gpu.notes.append("NVML knows no GPU with this UUID or PCI address")
    return None


def _report(gpu: _Gpu) -> DeviceReport:
    others = None if gpu.used_bytes is None else max(0, gpu.used_bytes - (gpu.own_bytes or 0))
    return DeviceReport(
        logical_index=gpu.logical_index,
        physical_index=gpu.physical_index,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        used_by_others_bytes=others,
        utilization_percent=gpu.utilization_percent,
        temperature_c=gpu.temperature_c,
        power_w=gpu.power_w,
        uuid=gpu.uuid,
        visible=gpu.logical_index is not None,
        notes=tuple(dict.fromkeys(gpu.notes)),
    )


def _visibility_notes(reports: Sequence[DeviceReport], *, nvml_answers: bool) -> list[str]:
    """How ``CUDA_VISIBLE_DEVICES`` and CUDA's own order map CUDA's numbers to NVML's."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [report for report in reports if report.visible]
    setting = "CUDA_VISIBLE_DEVICES is not set" if mask is None else f"CUDA_VISIBLE_DEVICES={mask!r}"
    if not visible:
        return [f"{setting}: no GPU is visible to this process"] if reports or mask is not None else []
    if not nvml_answers:
        return [f"{setting}: {len(visible)} visible, their physical numbers are unknown without NVML"]
    unknown = "an unknown GPU"
    pairs = [
        f"cuda:{r.logical_index} is {unknown if r.physical_index is None else f'physical {r.physical_index}'}"
        for r in visible
    ]
    notes = [f"{setting}: {', '.join(pairs)}"]
    physical = [r.physical_index for r in visible if r.physical_index is not None]
    if mask is None and physical != sorted(physical):
        notes.append("CUDA puts the fastest GPU first; set CUDA_DEVICE_ORDER=PCI_BUS_ID for nvidia-smi's order")
    return notes
