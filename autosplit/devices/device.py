"""Devices: what there is to run on, how a spec such as ``sim:2xA100-40GB`` is read, and what may be planned with.

Accelerators under torch's own names (``cuda``, ``xpu``, ``npu``, ``mps``, ...), ``cpu`` (this machine's processor, with
or without enforced budgets) and ``sim`` (cards of the catalogue). Importing this module loads neither torch nor NVML,
and a ``sim:`` or ``cpu`` spec never does. Nothing here makes a context on a card where NVML tells what is free.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from autosplit.accelerators import accelerator_kind, backend, is_accelerator
from autosplit.devices.catalog import GpuSpec, find_card, mentions_card
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import DeviceError, InputError, shown
from autosplit.text import parse_bytes, size_text

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
_ACCELERATOR_RESERVE = 0.05
_EXPECTED = "expected 'auto', 'cuda', 'cuda:0,2', 'cpu', 'cpu:2GiB,cpu:1GiB' or 'sim:2xA100-40GB+1xRTX3090'"


# ------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Device:
    """One device that a plan is made for.

    Attributes:
        kind: Where its steps run: ``"cpu"``, ``"sim"``, or torch's name of an accelerator (``"cuda"``, ``"xpu"``).
        index: Its position among the devices for ``cpu`` and ``sim``, its logical index for an accelerator.
        name: ``"NVIDIA GeForce RTX 3090"``, ``"RTX3090"`` (simulated) or ``"cpu"``.
        capacity_bytes: What may be planned with, before the reserve. An accelerator: the memory that is free or held by
            this process's allocator; ``sim``: the card's memory, or what ``@`` lowers it to; ``cpu``: the budget, or
            80 % of the available memory.
        budgeted: Whether the capacity is enforced exactly, as it is for ``sim`` and ``cpu:SIZE``.
        spec: The catalogue's row; ``sim`` only.
        uuid: ``"GPU-..."``; accelerators only, None where unknown.
        driver: The driver's version; ``cuda`` only, None where unknown.
    """

    kind: str
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
        reserve: As for `parse_reserve`. None is the default: 5 % on accelerators, nothing on ``cpu`` and ``sim``.
        device: The device; a share is one of its `capacity_bytes`.

    Returns:
        Bytes, rounded up; less than the device's capacity.

    Raises:
        InputError: If the reserve is unreadable, negative, or leaves nothing of the device.
    """
    wanted = parse_reserve(reserve)
    if wanted is None:
        wanted = _ACCELERATOR_RESERVE if is_accelerator(device.kind) else 0
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
        Every accelerator that this process sees, in torch's order; without any, the processor.

    Raises:
        DeviceError: If none of them can be asked for its memory.

    Warns:
        DeviceWarning: One can't be asked for its memory, and is left out.
    """
    found = _accelerator()
    return (
        (_plain_cpu(),) if found.module is None else _devices_of(found, range(found.module.device_count()), all_of=True)
    )


def parse_devices(
    spec: str | Device | torch.device | Sequence[str | Device | torch.device] | None = None,
    *,
    ask_memory: bool = True,
) -> tuple[Device, ...]:
    """Read a device spec.

    Args:
        spec: ``"cuda"`` (every visible GPU), ``"cuda:0,2"``, ``"xpu:0,1"`` and the like for any accelerator of torch's,
            ``"cpu"``, ``"cpu:2GiB,cpu:1GiB"`` (budgets that are enforced), ``"sim:2xA100-40GB+1xRTX3090"``,
            ``"sim:3xRTX3090@10GiB"`` (lowered memory), a `Device`, a ``torch.device``, or a sequence of these; all of
            one kind. None and ``"auto"`` are every visible accelerator, without any the processor.
        ask_memory: False takes all of an accelerator's memory for its capacity: to ask how much of it is free makes a
            context there, where NVML does not tell, which a process that does not compute there should not have.

    Returns:
        The devices in the order of the spec. Those of ``cpu`` and ``sim`` are numbered by position.

    Raises:
        DeviceError: If the spec can't be read, or names an unknown card, an absent GPU, one GPU twice, a GPU that the
            installed torch was not built for, a count or a budget of 0, devices of several kinds, or over 1024 devices.

    Warns:
        DeviceWarning: Every GPU is meant, and one can't be asked for its memory: it is left out.
    """
    if spec is None or (isinstance(spec, str) and spec.strip().lower() == "auto"):
        found = _accelerator()._replace(ask_memory=ask_memory)
        return (_plain_cpu(),) if found.module is None else _accelerator_piece(found, None)
    parts = [spec] if isinstance(spec, (str, Device)) or not isinstance(spec, Iterable) else list(spec)
    devices: list[Device] = []
    for part in parts:
        devices.extend([part] if isinstance(part, Device) else _parse_text(_spec_text(part), ask_memory))
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


def _parse_text(text: str, ask_memory: bool) -> list[Device]:
    """The devices of one string, whose items are parted by commas."""
    devices: list[Device] = []
    kind = ""
    for piece in (piece.strip() for piece in text.split(",")):
        # In "cuda:0,2" the second item goes on with the first one's kind.
        goes_on = kind not in {"", "cpu", "sim"} and re.fullmatch(r"[+-]?[0-9]+", piece)
        head, colon, tail = (kind, ":", piece) if goes_on else piece.partition(":")
        kind = head.strip().lower()
        if kind in {"cpu", "sim"}:
            read = _cpu_piece if kind == "cpu" else _sim_piece
            devices.extend(read(tail.strip() if colon else None))
        elif kind in _ACCELERATORS or (kind.isidentifier() and kind == _accelerator().kind):
            found = _accelerator(kind)._replace(ask_memory=ask_memory)
            devices.extend(_accelerator_piece(found, tail.strip() if colon else None))
        else:
            raise DeviceError(_unknown_device(text, piece, kind_before=devices[-1].kind if devices else ""))
        if len(devices) > MAX_DEVICES:
            break
    return devices


def _unknown_device(text: str, piece: str, kind_before: str) -> str:
    """The message for an item that starts with no kind of device."""
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
    if is_accelerator(kinds[0]):
        labels = [device.label for device in devices]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise DeviceError(f"device spec {shown(spec)} names {twice} twice: expected each GPU once; remove one")
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


def _accelerator_piece(found: Found, tail: str | None) -> tuple[Device, ...]:
    """``cuda`` or one index of it."""
    spec = found.kind if tail is None else f"{found.kind}:{tail}"
    if found.module is None:
        raise DeviceError(
            f"device {shown(spec)} is not here ({found.why_not}): expected a visible GPU; use 'cpu', or 'sim:' with a "
            "card"
        )
    visible = range(found.module.device_count())
    if tail is None:
        return _devices_of(found, visible, all_of=True)
    if not re.fullmatch(r"[0-9]{1,9}", tail) or int(tail) not in visible:
        known = f"{found.kind}:0 to {found.kind}:{len(visible) - 1}" if len(visible) > 1 else f"{found.kind}:0 alone"
        raise DeviceError(
            f"device {shown(spec)} is not here: expected one that this process sees, {known}; choose again"
        )
    return _devices_of(found, [int(tail)])


# ------------------------------------------------------------------------------------------------- accelerators

_ACCELERATORS = ("cuda", "xpu", "npu", "mps", "hpu", "mtia")
"""Kinds that a spec may name where they are not, to be told so."""


class DeviceWarning(UserWarning):
    """A device that is there is not used."""


class Found(NamedTuple):
    """What torch says of a kind of accelerator.

    Attributes:
        module: The back end's; None where there is no device of it.
        kind: ``"cuda"`` and the like.
        why_not: Why there is none.
        ask_memory: Ask how much of a device's memory is free.
    """

    module: Any
    kind: str
    why_not: str = ""
    ask_memory: bool = True


def _accelerator(kind: str | None = None) -> Found:
    """A kind of accelerator, None for the one that torch sees. Tests put fakes in its place."""
    try:
        import torch  # here, for accelerators alone: `sim:` and `cpu` specs must not wait for it
    except ImportError as error:
        return Found(None, kind or "cuda", f"torch cannot be imported: {error}")
    with warnings.catch_warnings():
        # torch warns where a driver is too old or broken; what it then answers says enough.
        warnings.simplefilter("ignore")
        here = accelerator_kind()
    if here is not None and kind in {None, here}:
        return Found(backend(here), here)
    wanted = kind or "cuda"
    if wanted == "cuda" and torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return Found(None, wanted, f"the installed torch {torch.__version__} is a build without CUDA")
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") if wanted == "cuda" else None
    under = f" under CUDA_VISIBLE_DEVICES={mask!r}" if mask is not None else ""
    return Found(None, wanted, f"torch sees no {'GPU' if wanted == 'cuda' else wanted + ' device'}{under}")


def _devices_of(found: Found, indices: Sequence[int], *, all_of: bool = False) -> tuple[Device, ...]:
    """The devices of some indices.

    Where all are meant, one that does not answer (another process has it for itself, it has failed) is left out.
    """
    if found.kind == "cuda":
        _refuse_several_mig(found.module, indices)
        _refuse_unsupported(found.module, indices, range(found.module.device_count()))
    nvml = _nvml()[0] if found.kind == "cuda" else None
    devices, problems = [], []
    for index in indices:
        try:
            devices.append(_device_at(found, index, nvml))
        except RuntimeError as error:
            problems.append(f"device '{found.kind}:{index}' cannot be asked for its memory ({first_line(error)})")
    if problems and not (all_of and devices):
        raise DeviceError(f"{problems[0]}: expected a working GPU; look at `autosplit devices`, or choose another")
    for problem in problems:
        warnings.warn(f"{problem}, and is left out; look at `autosplit devices`", DeviceWarning, stacklevel=4)
    return tuple(devices)


def _device_at(found: Found, index: int, nvml: Any) -> Device:
    """The device of one index, with what is free now or already held by this process's allocator."""
    properties = found.module.get_device_properties(index)
    total_bytes, uuid = int(properties.total_memory), device_uuid(properties)
    free_bytes: int | None
    if not found.ask_memory:
        free_bytes = total_bytes
    elif getattr(properties, "is_integrated", 0):
        # Its memory is the host's: what the system could free for it counts, and the driver does not see that.
        free_bytes = available_host_bytes()
    else:
        free_bytes = None if is_mig(str(properties.name)) else _free_bytes_by_nvml(nvml, uuid)
        if free_bytes is None:  # this makes a context, which takes some of what it tells
            free_bytes = int(found.module.mem_get_info(index)[0])
    return Device(
        kind=found.kind,
        index=index,
        name=str(properties.name),
        capacity_bytes=min(total_bytes, free_bytes + int(found.module.memory_reserved(index))),
        uuid=uuid,
        driver=_driver_version(nvml),
    )


def device_uuid(properties: Any) -> str | None:
    """Tell an accelerator's UUID, CUDA's in NVML's spelling (torch leaves the prefix out); None where torch doesn't.

    Args:
        properties: By ``get_device_properties``.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if re.match("[A-Z]{3}-", str(uuid)) else f"GPU-{uuid}"


class Visible(NamedTuple):
    """An accelerator that this process sees, at its place in torch's order."""

    name: str
    uuid: str | None


def visible_devices(kind: str) -> tuple[Visible, ...]:
    """List the accelerators of a kind that this process sees, without a context on any.

    Args:
        kind: ``"cuda"`` and the like.
    """
    module = _accelerator(kind).module
    found = [] if module is None else [module.get_device_properties(index) for index in range(module.device_count())]
    return tuple(Visible(str(properties.name), device_uuid(properties)) for properties in found)


def indices_here(wanted: Sequence[Visible], here: Sequence[Visible]) -> list[int | None]:
    """Find where the devices of a plan stand now.

    One is known by its UUID, so that another CUDA_VISIBLE_DEVICES moves no share to another card. Where none of theirs
    is here, on a twin of the machine, they are those of the same names in the same order.

    Args:
        wanted: The plan's.
        here: By `visible_devices`.

    Returns:
        The index of each; None where it is not here.
    """
    by_uuid: dict[str | None, int] = {device.uuid: index for index, device in enumerate(here)}
    by_uuid.pop(None, None)
    if any(device.uuid in by_uuid for device in wanted):
        return [by_uuid.get(device.uuid) for device in wanted]
    alike = {name: iter([i for i, device in enumerate(here) if device.name == name]) for name, _ in wanted}
    return [next(alike[name], None) for name, _ in wanted]


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


def _free_bytes_by_nvml(nvml: Any, uuid: str | None) -> int | None:
    """What of a card nobody holds; None where NVML doesn't tell."""
    if nvml is None or uuid is None:
        return None
    try:
        return int(memory_by_nvml(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)).free)
    except Exception:  # noqa: BLE001 (the same: torch is asked then)
        return None


def memory_by_nvml(nvml: Any, handle: Any) -> Any:
    """Ask NVML for a card's memory: in its second version, which keeps the driver's own share apart, else the first."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except Exception:  # noqa: BLE001 (old bindings lack it, some drivers answer "unknown error": the first one decides)
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _driver_version(nvml: Any) -> str | None:
    """The driver's version by NVML, None where it doesn't tell."""
    try:
        return None if nvml is None else nvml_text(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 (the same: a plan needs no driver version)
        return None
