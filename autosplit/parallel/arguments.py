"""Check the arguments of `BalancedDataParallel`: the module and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autosplit.accelerators import accelerator_kind, backend
from autosplit.errors import DeviceError, InputError
from autosplit.workload.compiled import is_compiled, scripted_part


def refuse_wrong_order(gpu0_bsz: Any, module: Any) -> None:
    """Raise InputError if the module is missing, or comes first as in nn.DataParallel."""
    if isinstance(module, nn.Module):
        return
    if isinstance(gpu0_bsz, nn.Module):
        raise InputError(
            f"gpu0_bsz is a {type(gpu0_bsz).__name__} and module is {module!r:.80}. Expected the number of "
            "samples for the first device (or None), and then the module. Write BalancedDataParallel(None, module, "
            "device_ids).",
        )
    raise InputError(
        f"module is {module!r:.80}. Expected an nn.Module. Write BalancedDataParallel(gpu0_bsz, module, device_ids).",
    )


def refuse_compiled(module: nn.Module) -> None:
    """Raise InputError if a module or a part of it is compiled or TorchScript, because it cannot be replicated."""
    # Replicating an OptimizedModule removes the parameters of the original. If a module was compiled in place, all
    # replicas would run with the weights of device 0.
    for name, part in module.named_modules():
        if is_compiled(part):
            what = "The module is" if not name else f"The submodule {name} is"
            raise InputError(
                f"{what} a compiled {type(part).__name__}. Expected an eager module. Wrap the eager module and "
                "compile the wrapper: torch.compile(BalancedDataParallel(...)).",
            )
    scripted = scripted_part(module)
    if scripted is not None:
        raise InputError(
            f"The module can't be replicated: {scripted}. Expected a Python module. Wrap the module before "
            "scripting or tracing.",
        )


def devices_from(device_ids: Sequence[int | str | torch.device] | None) -> tuple[torch.device, ...]:
    """Return the devices of a wrapper. Without a GPU, return (), so the wrapper calls the module."""
    if device_ids is None:
        kind = accelerator_kind()
        return () if kind is None else tuple(torch.device(kind, i) for i in range(backend(kind).device_count()))
    devices = tuple(map(_device_named, device_ids))
    kinds = {device.type for device in devices}
    here = accelerator_kind()
    if len(kinds) > 1 or not kinds <= {"cuda", "cpu", here}:
        raise DeviceError(
            f"device_ids are {[str(d) for d in devices]}. Expected either only {here or 'cuda'} devices or only cpu "
            "devices.",
        )
    if kinds == {"cuda"} and here is None:
        return ()  # without a usable GPU, nn.DataParallel calls the module directly, too
    return tuple(_indexed(device) for device in devices)


def _device_named(item: Any) -> torch.device:
    return torch.device(accelerator_kind() or "cuda", item) if isinstance(item, int) else torch.device(item)


def output_device_from(given: int | str | torch.device | None, first: torch.device) -> Any:
    """Return the device on which outputs are gathered."""
    # The return type is Any, because nn.DataParallel declares `output_device` as an int but stores any device.
    if given is None:
        return first
    # nn.DataParallel accepts -1 for the CPU.
    place = _indexed(_device_named("cpu" if isinstance(given, int) and given < 0 else given))
    if place.type != first.type:
        raise DeviceError(
            f"output_device is {given!r}. Expected the same device type as {first}, because the loss is computed "
            "there. Leave output_device out, and call .cpu() on the output.",
        )
    return place


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, backend(device.type).current_device()) if device.index is None else device
