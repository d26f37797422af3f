"""The host's time to launch a kernel is in the unit that the simulation multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Tracer
from autosplit.tools import launch_time
from autosplit.workload.workload import Workload


def test_a_gpu_with_the_measured_time_takes_the_measured_step(monkeypatch):
    """An H100's launch time in a loop of one op was 7.5 us. With it, `sim:` predicted 1.4 times the time of a step."""
    step_s = 0.0131
    monkeypatch.setattr(launch_time, "best_seconds", lambda run, _device: run() or step_s)
    launch_s = launch_time.launch_s(torch.device("cpu"))
    (device,) = parse_devices("sim:H200")
    device = replace(device, spec=replace(device.spec, launch_s=launch_s))
    model, batch = launch_time._transformer(), launch_time._batch()
    workload = Workload(model, batch, compute_loss=launch_time._loss, optimizer=torch.optim.AdamW)
    tracer = Tracer(workload, fake=True, like_gpu=True, kernels=GpuKernels.of("9.0"))
    predicted = SimulatedWorker((device,), (device.capacity_bytes,), tracer).measure(StepShape(((1,),)))
    assert predicted.seconds == pytest.approx(step_s, rel=0.01)
    assert predicted.busy_s[0] < step_s / 2  # the host decides
