"""Trace the cases of `cuda_kernels.py`: on CPU fake tensors as `sim:` does, or on fake `cuda` tensors.

Fake `cuda` tensors exist only in a CUDA build of torch with a GPU. On a machine without a GPU, `cuda_stub.c` replaces
the CUDA runtime, see there. torch then chooses kernels as on a GPU, and its meta kernels allocate their outputs.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from kernel_case import Case
from torch import Tensor, _meta_registrations

from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim import fake_trainee, trace_tracker
from autosplit.sim import tracer as tracer_module
from autosplit.sim.fake_trainee import FakeTrainee
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.op_cost import running_part
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.trace_tracker import TraceTracker
from autosplit.sim.tracer import Tracer, make_tracer

STUB = Path(__file__).with_name("cuda_stub") / "cuda_stub.c"
TIMED_ON = "sim:A100-40GB"
"""The GPU that all times are computed for, at every compute capability."""
UNLIMITED_BYTES = 2**60


@dataclass(frozen=True)
class Row:
    """The cost of one case.

    Attributes:
        capability: Compute capability, times ten.
        activation_bytes: Activations at the peak, per sample.
        saved_bytes: Memory in use when the backward begins, per sample.
        compute_s: Compute time of a step of the larger batch size, as `sim:` predicts it from the trace.
        note: Why the case was not traced with fake tensors, or "".
        error: The exception that ended the trace, or "". The numbers are 0 then.
    """

    case: str
    capability: int
    activation_bytes: int = 0
    saved_bytes: int = 0
    compute_s: float = 0.0
    note: str = ""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


class _BackwardTracker(TraceTracker):
    """A tracker that notes the memory in use when the backward begins."""

    saved_bytes: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.saved_bytes is None and running_part() == "backward":
            self.saved_bytes = self.live_bytes[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _kept_trackers() -> Iterator[list[_BackwardTracker]]:
    """Yield a list. Each trace appends its tracker to it."""
    trackers: list[_BackwardTracker] = []

    def made(*args: Any, **kwargs: Any) -> _BackwardTracker:
        trackers.append(_BackwardTracker(*args, **kwargs))
        return trackers[-1]

    with patch.object(tracer_module, "TraceTracker", made):
        yield trackers


def _without_inner_memory() -> Any:
    """Count outputs of operators only: meta kernels allocate nothing inside."""
    return patch.object(trace_tracker, "WITH_INNER_MEMORY", frozenset())


def traced(case: Case, capability: int, make: Callable[[Case, int], tuple[Tracer, str]]) -> Row:
    """Trace a case at its two batch sizes.

    Args:
        make: Returns a tracer, and why it does not use fake tensors. `product_tracer` or `cuda_tracer`.
    """
    small, large = case.samples
    try:
        with _kept_trackers() as trackers, _without_inner_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tracer, note = make(case, capability)
            activations, saved = [], []
            for samples in (small, large):
                trace = tracer.trace(StepShape(((samples,),)))
                activations.append(trace.parts[0].activations_bytes)
                saved.append(trackers[-1].saved_bytes or 0)
            worker = SimulatedWorker((_timed_gpu(capability),), (UNLIMITED_BYTES,), tracer)
            compute_s = worker.measure(StepShape(((large,),))).busy_s[0]
    except Exception as error:  # noqa: BLE001  # one case must not end the run
        return Row(case.name, capability, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    per_sample = [round((numbers[1] - numbers[0]) / (large - small)) for numbers in (activations, saved)]
    return Row(case.name, capability, *per_sample, float(f"{compute_s:.6g}"), note)


def _timed_gpu(capability: int) -> Device:
    """Return a GPU whose kernels are those of a compute capability, and whose speed is always the same."""
    (device,) = parse_devices(TIMED_ON)
    assert device.spec is not None
    major, minor = divmod(capability, 10)
    return replace(device, spec=replace(device.spec, compute_capability=f"{major}.{minor}"))


def product_tracer(case: Case, capability: int) -> tuple[Tracer, str]:
    """Return the tracer that `sim:` uses."""
    tracer, note = make_tracer(case.build(), like_gpu=True, kernels=GpuKernels(capability))
    return tracer, note or ""


# ---------------------------------------------------------------------------------------------------- fake CUDA tensors


def cuda_tracer(case: Case, capability: int) -> tuple[Tracer, str]:
    """Return a tracer on fake `cuda` tensors.

    Raises:
        RuntimeError: The GPU, or its stub, has another compute capability.
    """
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor != capability:
        raise RuntimeError(f"the GPU has compute capability {major}.{minor}; expected {capability / 10}")
    build = case.build_for_cuda or case.build
    with _copies_on(torch.device("cuda:0")):
        return Tracer(build(), fake=True, like_gpu=True), ""


@contextmanager
def _copies_on(device: torch.device) -> Iterator[None]:
    """Make copies with fake tensors on a device. autosplit makes them on the CPU."""
    made = partial(FakeTrainee, device=device)
    with patch.object(fake_trainee, "CPU", device), patch.object(fake_trainee, "FakeTrainee", made):
        yield


class _OwnFunctions:
    """Replaces autosplit's `CudaFunctions`: torch itself runs its functions, as on a GPU."""

    needed = False
    calls: Mapping[Any, Any] = MappingProxyType({})

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _any_grouped_mm(meta: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the meta kernel of `_grouped_mm` without its check for bf16: CUDA multiplies other types, too."""

    def multiplied(mat_a: Tensor, mat_b: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options["scale_a"] is not None or mat_a.dtype is torch.bfloat16:
            return meta(mat_a, mat_b, out_dtype=out_dtype, **options)
        output = meta(mat_a.bfloat16(), mat_b.bfloat16(), **options)
        return output.new_empty(output.shape, dtype=out_dtype or mat_a.dtype)

    return multiplied


@contextmanager
def like_real_cuda() -> Iterator[None]:
    """Let fake `cuda` tensors take the code paths of real ones."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(tracer_module, "CudaFunctions", _OwnFunctions))
        with suppress(ImportError):
            from transformers import masking_utils

            # transformers makes a mask for fake position ids, because it cannot read them. It finds that real ids
            # count up from 0 and need no mask.
            no_mask = patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
            patches.enter_context(no_mask)
        meta = getattr(_meta_registrations, "_meta_grouped_mm_common", None)  # since torch 2.8
        if meta is not None:
            any_type = _any_grouped_mm(meta)
            patches.enter_context(patch.object(_meta_registrations, "_meta_grouped_mm_common", any_type))
        yield


def build_stub(folder: Path) -> Path:
    """Compile the stub against the CUDA headers that came with torch's wheels, and return the library.

    Raises:
        RuntimeError: There are no such headers, because this is no CUDA build of torch.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    # NVIDIA's wheels lack some headers that Triton's wheel has.
    found = [
        *packages.glob("nvidia/*/include/cuda_runtime_api.h"),
        *packages.glob("triton/**/include/cuda_runtime_api.h"),
    ]
    if not found:
        raise RuntimeError(f"no cuda_runtime_api.h in {packages}. Install a CUDA build of torch from PyPI.")
    library = folder / "libcuda_stub.so"
    # torch opens the driver's library by the name libcuda.so.1, and finds the stub, which is loaded under that name.
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(STUB), "-o", str(library)]
    subprocess.run([*command, *(f"-I{header.parent}" for header in found)], check=True)  # noqa: S603  # our own file
    return library


def stubbed_environment(library: Path, capability: int) -> dict[str, str]:
    """Return the environment of a process that sees the stub's GPU."""
    return {**os.environ, "LD_PRELOAD": str(library), "CUDA_STUB_CAPABILITY": str(capability)}
