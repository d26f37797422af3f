"""The module ``torch.emu``: the counterpart of ``torch.cuda`` for the emulated devices."""

from __future__ import annotations

import ctypes
import os
import uuid
from types import SimpleNamespace

import torch
from torch.accelerator import memory as _accelerator
from torch.utils._mode_utils import no_dispatch

from . import KIND
from . import library as _c

OutOfMemoryError = torch.OutOfMemoryError
AcceleratorError = torch.AcceleratorError
Event = torch.Event
_TEXT = 4096


def _call(function, *arguments) -> None:
    text = ctypes.create_string_buffer(_TEXT)
    if function(*arguments, text, ctypes.c_size_t(_TEXT)):
        said = text.value.decode()
        raise (torch.AcceleratorError if said.startswith("EMU error") else RuntimeError)(said)


def _index(device=None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        index = device
    else:
        found = torch.device(device)
        if found.type != KIND:
            raise ValueError(f"Expected an {KIND} device, but got: {device}")
        index = current_device() if found.index is None else found.index
    if not 0 <= index < device_count():
        raise torch.AcceleratorError(f"EMU error: invalid device ordinal {index} of {device_count()}")
    return index


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _c.emu_count()


def is_initialized() -> bool:
    return bool(_c.emu_initialized()) and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_c.emu_bad_fork())


def _lazy_init() -> None:
    _call(_c.emu_initialize)


init = _lazy_init


def current_device() -> int:
    return _c.emu_current()


def set_device(device) -> None:
    if not (isinstance(device, int) and device < 0):
        _call(_c.emu_set, _index(device))


class device:
    """Makes a device current in a block."""

    def __init__(self, device):
        self.index = device if isinstance(device, int) and device < 0 else _index(device)

    def __enter__(self):
        self.before = current_device()
        if self.index >= 0 and self.index != self.before:
            set_device(self.index)
        return self

    def __exit__(self, *_):
        _c.emu_set_lazily(self.before)
        return False


def synchronize(device=None) -> None:
    _lazy_init()
    _call(_c.emu_synchronize, _index(device))


def get_device_properties(device=None) -> SimpleNamespace:
    _lazy_init()
    physical = _c.emu_physical(_index(device))
    names = os.environ.get("EMULATED_NAMES", "").split(",")
    major, minor = get_device_capability(device)
    return SimpleNamespace(
        name=names[physical] if physical < len(names) and names[physical] else "Emulated GPU",
        total_memory=_c.emu_total(physical),
        uuid=uuid.UUID(int=0xE0E0 << 64 | physical),
        major=major,
        minor=minor,
        multi_processor_count=1,
        is_integrated=int(os.environ.get("EMULATED_INTEGRATED", "0")),
    )


def get_device_name(device=None) -> str:
    return get_device_properties(device).name


def get_device_capability(device=None) -> tuple[int, int]:
    return (8, 0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# ---- memory ----


def mem_get_info(device=None) -> tuple[int, int]:
    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    _call(_c.emu_memory_info, _index(device), ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def empty_cache() -> None:
    if is_initialized():
        _accelerator.empty_cache()


def memory_stats(device=None) -> dict:
    return _accelerator.memory_stats(_index(device)) if is_initialized() else {}


def _stat(name: str, device) -> int:
    return memory_stats(device).get(name, 0)


def memory_allocated(device=None) -> int:
    return _stat("allocated_bytes.all.current", device)


def max_memory_allocated(device=None) -> int:
    return _stat("allocated_bytes.all.peak", device)


def memory_reserved(device=None) -> int:
    return _stat("reserved_bytes.all.current", device)


def max_memory_reserved(device=None) -> int:
    return _stat("reserved_bytes.all.peak", device)


def reset_peak_memory_stats(device=None) -> None:
    _accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device=None) -> None:
    _accelerator.reset_accumulated_memory_stats(_index(device))


def get_per_process_memory_fraction(device=None) -> float:
    _lazy_init()
    return _c.emu_fraction(_index(device))


def set_per_process_memory_fraction(fraction: float, device=None) -> None:
    _lazy_init()
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _c.emu_set_fraction(_index(device), ctypes.c_double(fraction))


def can_device_access_peer(device, peer) -> bool:
    return _index(device) != _index(peer)


# ---- streams: a call returns when its work is done, but copies to the host are late until the program waits ----


def Stream(device=None, priority=0, **options) -> torch.Stream:
    return torch.Stream(torch.device(KIND, _index(device)), priority=priority, **options)


def current_stream(device=None) -> torch.Stream:
    _lazy_init()
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None) -> torch.Stream:
    _lazy_init()
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class stream:
    """Makes a stream and its device current in a block."""

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.device = device(self.stream.device)
            self.device.__enter__()
            self.before = current_stream()
            set_stream(self.stream)
        return self

    def __exit__(self, *_):
        if self.stream is not None:
            set_stream(self.before)
            self.device.__exit__()
        return False


# ---- random numbers ----


def get_rng_state(device=KIND) -> torch.Tensor:
    _lazy_init()
    index = _index(device)
    with no_dispatch():
        state = torch.empty(_c.emu_random_state(index, None, 0), dtype=torch.uint8, device="cpu")
        _c.emu_random_state(index, ctypes.c_void_p(state.data_ptr()), 0)
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device=KIND) -> None:
    index = _index(device)
    with no_dispatch():
        state = new_state.cpu().contiguous().clone()
        if state.numel() != _c.emu_random_state(index, None, 0):
            raise RuntimeError("RNG state is wrong size")
        _c.emu_random_state(index, ctypes.c_void_p(state.data_ptr()), 1)


def set_rng_state_all(new_states) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _c.emu_seed(current_device(), ctypes.c_uint64(int(seed) % 2**64))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _c.emu_seed(index, ctypes.c_uint64(int(seed) % 2**64))


def initial_seed() -> int:
    return _c.emu_current_seed(current_device())


random = SimpleNamespace(get_rng_state_all=get_rng_state_all, set_rng_state_all=set_rng_state_all)
"""At the place where ``torch.cuda`` and other back ends have them."""
