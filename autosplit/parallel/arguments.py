"""Check what a `BalancedDataParallel` is given: devices, shares, and a module that can be replicated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from autosplit.accelerators import accelerator_kind, backend
from autosplit.errors import DeviceError, InputError, WorkloadError
from autosplit.workload.compiled import is_compiled, scripted_part


def refuse_wrong_order(gpu0_bsz: Any, module: Any) -> None:
    """Refuse a module that was given first, as nn.DataParallel takes it, or none."""
    if isinstance(module, nn.Module):
        return
    if isinstance(gpu0_bsz, nn.Module):
        raise InputError(
            f"gpu0_bsz is a {type(gpu0_bsz).__name__} and module is {module!r:.80}; expected the samples of the first "
            "device, or None, before the module; write BalancedDataParallel(None, module, device_ids)",
            code="arguments-order",
        )
    raise InputError(
        f"module is {module!r:.80}; expected an nn.Module; write BalancedDataParallel(gpu0_bsz, module, device_ids)",
        code="module-type",
    )


def refuse_packed(values: tuple[Any, ...]) -> None:
    """Refuse a PackedSequence among the arguments of a call."""
    if any(isinstance(value, PackedSequence) for value in values):
        raise WorkloadError(
            "an argument is a PackedSequence, whose time steps lie one after the other over all samples; expected a "
            "tensor with the batch in one dimension; pass the padded tensor and its lengths; pack inside the module",
            code="packed-sequence",
        )


def refuse_compiled(module: nn.Module) -> None:
    """Refuse a module that can not be replicated: one that torch compiled, in whole or in part, or TorchScript."""
    # Replicating an OptimizedModule empties the original's parameters; a module compiled in place would run
    # every replica with the first device's weights.
    for name, part in module.named_modules():
        if is_compiled(part):
            what = "the module is" if not name else f"its part {name} is"
            raise InputError(
                f"{what} a compiled {type(part).__name__}; expected an eager one; wrap the eager module and compile "
                "the wrapper: torch.compile(BalancedDataParallel(...))",
                code="module-compiled",
            )
    scripted = scripted_part(module)
    if scripted is not None:
        raise InputError(
            f"of the module, {scripted}; expected a Python module; wrap the one that was scripted or traced",
            code="module-scripted",
        )


def devices_from(device_ids: Sequence[int | str | torch.device] | None) -> tuple[torch.device, ...]:
    """Return the devices that are meant; none for a wrapper that passes its inputs through."""
    if device_ids is None:
        kind = accelerator_kind()
        return () if kind is None else tuple(torch.device(kind, i) for i in range(backend(kind).device_count()))
    if isinstance(device_ids, (str, torch.device)) or not isinstance(device_ids, Iterable):
        raise DeviceError(
            f"device_ids is {device_ids!r:.80}; expected a list of devices; write [{device_ids!r:.80}]",
            code="device-ids-type",
        )
    devices = tuple(map(_device_named, device_ids))
    kinds = {device.type for device in devices}
    here = accelerator_kind()
    if len(kinds) > 1 or not kinds <= {"cuda", "cpu", here}:
        raise DeviceError(
            f"device_ids are {[str(d) for d in devices]}; expected all of them {here or 'cuda'}, or all of them cpu",
            code="device-ids-mixed",
        )
    if kinds == {"cuda"} and here is None:
        return ()  # as nn.DataParallel: without any usable GPU, a pass-through
    return tuple(_indexed(device) for device in devices)


def _device_named(item: Any) -> torch.device:
    try:
        return torch.device(accelerator_kind() or "cuda", item) if isinstance(item, int) else torch.device(item)
    except (RuntimeError, TypeError):
        raise DeviceError(
            f"a device is {item!r:.80}; expected a GPU's number, 'cuda:1', or 'cpu'; see autosplit.list_devices()",
            code="device-item",
        ) from None


def output_device_from(given: int | str | torch.device | None, first: torch.device) -> Any:
    """Return the device that outputs are gathered on."""
    # Any: nn.DataParallel declares an index where it keeps whatever it was given.
    if given is None:
        return first
    # What nn.DataParallel means by -1 is the processor.
    place = _indexed(_device_named("cpu" if isinstance(given, int) and given < 0 else given))
    if place.type != first.type:
        raise DeviceError(
            f"output_device is {given!r}; expected a device of the kind of {first}, where the loss is computed; "
            "leave it out, and call .cpu() on what comes back",
            code="output-device",
        )
    return place


def _indexed(device: torch.device) -> torch.device:
    """Name a device as its tensors do: an accelerator with an index, `cpu` without one."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, backend(device.type).current_device()) if device.index is None else device
