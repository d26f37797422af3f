"""Check that copies between this machine's GPUs arrive unchanged.

On some machines, a direct copy between GPUs reports success but leaves zeros or old values. Training then goes wrong
without an error. So send a known tensor once in each direction, and compare it on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from autosplit.errors import DeviceError

_HOST = torch.device("cpu")
_NUM_VALUES = 2**16  # 256 KiB: some links lose small copies and some lose large copies

_sound: set[tuple[torch.device, torch.device]] = set()
"""Pairs of source and destination that passed the check in this process."""
_num_sent = 0
"""Number of known tensors sent so far. Each tensor has different values."""
_lock = threading.Lock()


def check_links(devices: Sequence[torch.device]) -> None:
    """Check that tensors arrive unchanged between the first device and each other device.

    Each direction is checked once per process, and again after a failure. CPU devices and repeated GPUs are skipped.

    Raises:
        DeviceError: A tensor arrived with other values.
    """
    gpus = list(dict.fromkeys(device for device in devices if device.type != "cpu"))
    with _lock:
        for other in gpus[1:]:
            _check_direction(gpus[0], other)
            _check_direction(other, gpus[0])


def _check_direction(source: torch.device, destination: torch.device) -> None:
    if (source, destination) in _sound:
        return
    sent = _known_values()
    at_source = _copied(sent, source)
    arrived = _copied(_copied(at_source, destination), _HOST)
    if not torch.equal(arrived, sent):
        raise DeviceError(_broken(source, destination, sent, arrived))
    _sound.add((source, destination))


def _known_values() -> Tensor:
    """Return values that were not sent before, so that old values cannot pass the check."""
    global _num_sent  # noqa: PLW0603  # guarded by the lock, as all state of this module
    first = 1 + _num_sent % 2**14 * _NUM_VALUES  # within int32, and never 0
    _num_sent += 1
    return torch.arange(first, first + _NUM_VALUES, dtype=torch.int32, device=_HOST)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


def _broken(source: torch.device, destination: torch.device, sent: Tensor, arrived: Tensor) -> str:
    what = "as zeros"
    if arrived.any():
        wrong = arrived != sent
        index = int(wrong.nonzero()[0])
        what = (
            f"with {int(wrong.sum())} of {sent.numel()} values wrong "
            f"({int(arrived[index])} for {int(sent[index])} at index {index})"
        )
    # Web searches suggest NCCL_P2P_DISABLE, but it does not affect torch's own copies (nccl-tests #117). The usual
    # cause is the IOMMU (pytorch #84803), then the driver (pytorch #119638).
    return (
        f"autosplit copied a known tensor from {source} to {destination}, and it arrived {what}. Direct copies "
        "between these GPUs are broken. Turn off the IOMMU in the BIOS, boot Linux with iommu=pt, or install another "
        "driver version (NCCL_P2P_DISABLE=1 does not help here). Until then, train on one GPU: "
        f"device_ids=[{source.index if source.index is not None else 0}], or CUDA_VISIBLE_DEVICES with one of them."
    )
