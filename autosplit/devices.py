"""Devices: what there is to run on, how a spec such as ``sim:2xA100-40GB`` is read, and what may be planned with.

Three kinds: ``cuda`` (real GPUs), ``cpu`` (this machine's processor, with or without enforced budgets) and ``sim``
(cards of the catalogue). Importing this module loads neither torch nor NVML, and a ``sim:`` or ``cpu`` spec never does.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from autosplit.catalog import GpuSpec, find_card, mentions_card
from autosplit.errors import DeviceError, InputError, shown
from autosplit.host import available_host_bytes
from autosplit.sizes import parse_bytes, size_text

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_DEVICES",
    "Device",
    "list_devices",
    "parse_devices",
    "parse_reserve",
    "reserve_bytes",
]

MAX_DEVICES = 1024
"""More devices than this are a typing error, not a machine."""

_CPU_SHARE = Fraction(80, 100)
_CUDA_RESERVE = 0.05
_EXPECTED = "expected 'cuda', 'cuda:0,2', 'cpu', 'cpu:2GiB,cpu:1GiB' or 'sim:2xA100-40GB+1xRTX3090'"


# ------------------------------------------------------------------------------------------------------- facts


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


# ------------------------------------------------------------------------------------------------------- sizes


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
    reserve = _reserve_in(value) if isinstance(value, str) else value
    if isinstance(reserve, float):
        usable = 0 <= reserve < 1
    else:
        usable = isinstance(reserve, int) and not isinstance(reserve, bool) and reserve >= 0
    if not usable:
        raise InputError(
            f"reserve {shown(value)}: expected bytes (1GiB) or a share of at least 0 and below 1 (5%, 0.05); "
            "give one of these, or leave it out"
        )
    return reserve


def _reserve_in(text: str) -> int | float | None:
    """The bytes or the share that a text says; None where it says neither."""
    if percent := re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%", text.strip()):
        return float(Fraction(percent[1]) / 100)
    if re.fullmatch(r"0?\.[0-9]{1,20}", text.strip()):
        return float(text)
    try:
        return parse_bytes(text)
    except InputError:
        return None


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
            f"reserve {shown(reserve)} keeps {size_text(kept_bytes)} free of the {size_text(device.capacity_bytes)} on "
            f"{device.label}: expected less than its capacity; lower the reserve"
        )
    return kept_bytes


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
        f"device {shown(part)} is of type {type(part).__name__}: {_EXPECTED}; pass a string or a torch.device"
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
        return f"device spec {shown(text)} has an empty item: {_EXPECTED}; name at least one device"
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
    elif mentions_card(piece):
        hint = f"for a simulated card write 'sim:{piece}'"
    elif re.fullmatch(r"[0-9]+", piece):
        hint = f"for a GPU write 'cuda:{piece}'"
    return f"device {shown(piece)} is unknown: {_EXPECTED}; {hint}"


def _joined(devices: list[Device], spec: object) -> tuple[Device, ...]:
    """The whole spec's devices, checked against each other and numbered."""
    if not devices:
        raise DeviceError(f"device spec {shown(spec)} names no device: {_EXPECTED}; name at least one")
    _check_count(len(devices), spec)
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise DeviceError(
            f"device spec {shown(spec)} mixes {' and '.join(kinds)}: expected one kind; make a plan for each"
        )
    if kinds == ["cuda"]:
        indices = [device.index for device in devices]
        twice = sorted({index for index in indices if indices.count(index) > 1})
        if twice:
            raise DeviceError(
                f"device spec {shown(spec)} names cuda:{twice[0]} twice: expected each GPU once; remove one"
            )
        return tuple(devices)
    if len(devices) > 1 and any(device.label == "cpu" for device in devices):
        raise DeviceError(
            f"device spec {shown(spec)} names 'cpu' beside others: expected it alone, or a budget for each; "
            "write 'cpu:2GiB,cpu:1GiB'"
        )
    return tuple(replace(device, index=position) for position, device in enumerate(devices))


def _check_count(count: int, spec: object) -> None:
    if count > MAX_DEVICES:
        raise DeviceError(
            f"device spec {shown(spec)} is over {MAX_DEVICES} devices: expected at most that; lower the count"
        )


def _plain_cpu() -> Device:
    return Device("cpu", 0, "cpu", int(available_host_bytes() * _CPU_SHARE))


def _cpu_piece(tail: str | None) -> tuple[Device, ...]:
    """``cpu`` or ``cpu:2GiB``."""
    return (_plain_cpu(),) if tail is None else (Device("cpu", 0, "cpu", _budget(f"cpu:{tail}", tail), budgeted=True),)


def _budget(item: str, text: str) -> int:
    """A budget's bytes. A bare number is refused: ``cpu:1`` looks like torch's second processor, not like one byte."""
    try:
        n_bytes = parse_bytes(text)
    except InputError as error:
        raise DeviceError(
            f"budget {shown(text)} in {shown(item)}: expected a size such as 2GiB or 600MiB; correct it"
        ) from error
    if n_bytes and re.fullmatch(r"[0-9.]+", text):
        raise DeviceError(
            f"budget {shown(text)} in {shown(item)} has no unit: expected a size such as 2GiB; add the unit"
        )
    if n_bytes < 1:
        raise DeviceError(
            f"budget {shown(text)} in {shown(item)}: expected at least one byte; write a size such as 2GiB"
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
        raise DeviceError(f"device spec {shown(spec)} has an item without a card: {_EXPECTED}; name a card")
    if not re.fullmatch(r"[0-9]+", count_text) or not count_text.strip("0"):
        raise DeviceError(
            f"count {shown(count_text)} in {shown(spec)}: expected a whole number of 1 or more; correct it"
        )
    gpu = find_card(name)
    capacity_bytes = _budget(item, memory) if at else gpu.memory_bytes
    if capacity_bytes > gpu.memory_bytes:
        raise DeviceError(
            f"memory {shown(memory)} in {shown(item)}: expected at most the {size_text(gpu.memory_bytes)} of a "
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
            f"device {shown(spec)} is not here ({why}): expected a visible GPU; use 'cpu', or 'sim:' with a card"
        )
    visible = range(cuda.device_count())
    if tail is None:
        indices: Sequence[int] = visible
    elif not re.fullmatch(r"[0-9]{1,9}", tail) or int(tail) not in visible:
        known = f"cuda:0 to cuda:{len(visible) - 1}" if len(visible) > 1 else "cuda:0 alone"
        raise DeviceError(
            f"device {shown(spec)} is not here: expected one that this process sees, {known}; choose again"
        )
    else:
        indices = [int(tail)]
    _refuse_several_mig(cuda, indices)
    _refuse_unsupported(cuda, indices, visible)
    driver = _driver_version()
    return tuple(_cuda_device(cuda, index, driver) for index in indices)


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
        if getattr(properties, "is_integrated", 0):
            # Its memory is the host's: what the system could free for it counts, and the driver does not see that.
            free_bytes = available_host_bytes()
    except RuntimeError as error:
        raise DeviceError(
            f"device 'cuda:{index}' cannot be asked for its memory ({first_line(error)}): expected a working GPU; "
            "look at `autosplit devices`, or choose another"
        ) from error
    return Device(
        kind="cuda",
        index=index,
        name=str(properties.name),
        capacity_bytes=min(int(total_bytes), int(free_bytes) + int(own_bytes)),
        uuid=cuda_uuid(properties),
        driver=driver,
    )


def cuda_uuid(properties: Any) -> str | None:
    """Tell a CUDA device's UUID in NVML's spelling, None in a torch that doesn't say; torch leaves the prefix out."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def is_mig(name: str) -> bool:
    """Tell whether CUDA's name is that of a slice of a GPU (``"NVIDIA A100-SXM4-40GB MIG 1g.5gb"``)."""
    return " MIG " in f"{name} "


def mig_count(names: Iterable[str]) -> int:
    """Count the MIG instances that this process is meant to use: CUDA gives it one, and silently loses the others.

    Args:
        names: What CUDA calls the GPUs that it sees.

    Returns:
        The instances that ``CUDA_VISIBLE_DEVICES`` or the names tell of, whichever are more.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(sum(item.strip().startswith("MIG-") for item in mask), sum(map(is_mig, names)))


def _refuse_several_mig(cuda: Any, indices: Iterable[int]) -> None:
    count = mig_count(str(cuda.get_device_properties(index).name) for index in indices)
    if count > 1:
        raise DeviceError(
            f"{count} MIG instances are visible: expected one, CUDA lets a process use no more; "
            "set CUDA_VISIBLE_DEVICES to one of them"
        )


def _refuse_unsupported(cuda: Any, indices: Iterable[int], visible: Iterable[int]) -> None:
    """A card without kernels in this torch fails at its first operation; say so before, with what would do."""
    problems = {index: why_unsupported(cuda, index) for index in visible}
    bad = [index for index in indices if problems[index] is not None]
    if bad:
        name = str(cuda.get_device_properties(bad[0]).name)
        good = ",".join(str(index) for index, problem in problems.items() if problem is None)
        other = f", or use 'cuda:{good}'" if good else ", or use 'cpu' or 'sim:' with a card"
        raise DeviceError(f"device 'cuda:{bad[0]}' ({name}): {problems[bad[0]]}{other}")


def why_unsupported(cuda: Any, index: int) -> str | None:
    """Say why the installed torch has no kernels for a card, with the build to use; None where it has them."""
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


def first_line(error: BaseException) -> str:
    """Cut an error's message to its first line; without one, its class has to do."""
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
        return None, f"NVML cannot be imported ({first_line(error)}); reinstall nvidia-ml-py"
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
    reason = reasons.get(type(error).__name__, f"NVML does not start ({first_line(error)})")
    return f"{reason}; use, temperature and power are unknown"


def nvml_text(value: str | bytes) -> str:
    """Read a text of NVML's; old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _driver_version() -> str | None:
    """The driver's version by NVML, None where it doesn't tell."""
    nvml, _ = _nvml()
    try:
        return None if nvml is None else nvml_text(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 (the same: a plan needs no driver version)
        return None
