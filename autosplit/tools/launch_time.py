"""Measure the host's time to launch a kernel, in the unit of the catalogue's `launch_s`.

A model's forward op takes ten times this unit, because its Python code is part of it, and an op of the backward two
times (`sim.kernel_time.HostRates`). A single op in a loop does not show this unit: it took 7.5 us on an H100 and
12.6 us on an H200, but their training steps fit 5 us (``benchmarks/results/gpu``). So train a small transformer, whose
kernels are shorter than their launches. Divide the time of a step by the launches that the simulation counts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Tracer
from autosplit.tools.measured_rates import best_seconds
from autosplit.workload.workload import Workload

_WIDTH, _DEPTH, _LENGTH = 64, 12, 8


def launch_s(device: torch.device) -> float:
    """Return the host's time in seconds to launch a kernel on a device."""
    model, batch = _transformer().to(device), _batch().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return best_seconds(step, device) / _launches()


def _launches() -> float:
    (device,) = parse_devices("sim:A100-40GB")
    assert device.spec is not None
    slow_host: Device = replace(device, spec=replace(device.spec, launch_s=1.0))
    workload = Workload(_transformer(), _batch(), compute_loss=_loss, optimizer=torch.optim.AdamW)
    tracer = Tracer(workload, fake=True, like_gpu=True, kernels=GpuKernels.of("8.0"))
    return SimulatedWorker((slow_host,), (device.capacity_bytes,), tracer).measure(StepShape(((1,),))).seconds


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.sum(model(batch))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, _DEPTH, enable_nested_tensor=False)


def _batch() -> Tensor:
    return torch.randn(1, _LENGTH, _WIDTH)
