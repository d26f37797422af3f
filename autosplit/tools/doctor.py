"""Diagnose this machine and suggest fixes: versions, GPUs, copies, collectives and a training run.

versions      torch, its CUDA, the driver, NVML
cards         architecture, memory, other processes, measured rates compared with the catalogue's
copies        between every two GPUs: whether they arrive unchanged, and their rate
collective    the back end for the ranks of a job, and its all-reduce rate
model         a small model, tuned and then trained with the plan: predicted and measured values
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import torch
from torch import nn

from autosplit.accelerators import backend, is_accelerator
from autosplit.devices.catalog import GpuSpec, find_card
from autosplit.devices.device import Device
from autosplit.devices.nvml import started_nvml
from autosplit.devices.peer_copy_check import check_links
from autosplit.devices.spec import parse_devices
from autosplit.errors import AutosplitError, DeviceError, first_line
from autosplit.text import size_text
from autosplit.tools import measured_rates as rates
from autosplit.tools.collective_check import met
from autosplit.tools.examination import Card, Copy, Examination, Problem, Training
from autosplit.tools.inventory import DeviceReport, survey_devices
from autosplit.tools.launch_time import launch_s
from autosplit.torch_versions import accelerator_index
from autosplit.tuning.tune import DoubtfulTimesWarning, tune

WITHOUT_GPU = "cpu:256MiB"
"""Device of a machine without an accelerator. Its budget is tracked exactly, so measured memory can be compared."""

SLOW_PRODUCTS, SLOW_MEMORY = 0.2, 0.5
"""Fractions of the catalogue's rates below which a GPU is reported.

On the eight GPUs of NeuSight's measurements, float32 products reach 0.28 (L4, limited by its power) to 0.89 of the
datasheet. Elementwise operations reach 0.74 to 0.89 of the memory's rate (medians of large kernels).
"""

OFF = 0.25
"""Relative error of a prediction above which it is reported."""

TF32_SINCE = 8, 0
"""Lowest compute capability of GPUs with tensor cores for float32."""

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def examine(devices: str | None = None, *, report_stage: Callable[[str], None] = lambda _text: None) -> Examination:
    """Examine this machine. Failures become problems in the result.

    Args:
        devices: A device spec. Default: every accelerator, or the CPU with a budget of 256 MiB if there is none.

    Raises:
        DeviceError: The spec can't be parsed, or selects simulated GPUs.
    """
    began_s = time.perf_counter()
    problems: list[Problem] = []
    reports, notes = survey_devices()
    for report in reports:
        problems += _problems_of(report)
    found = _devices_for(devices, problems)
    nvml, why_no_nvml = started_nvml() if found[0].kind == "cuda" else (None, "")
    if why_no_nvml:
        problems.append(Problem(why_no_nvml, "Install nvidia-ml-py and the driver of the GPUs."))
    places = [torch.device(one.kind, one.index) if is_accelerator(one.kind) else torch.device("cpu") for one in found]
    cards = []
    for device, place in zip(found, places, strict=True):
        report_stage(f"{device.label}: matrix products, memory, kernel launches")
        surveyed = next((one for one in reports if (one.kind, one.logical_index) == (device.kind, device.index)), None)
        cards.append(_card_of(device, place, surveyed, nvml))
        problems += _problems_of_rates(cards[-1])
    report_stage("copies between the devices")
    copies = [_copy_of(*pair, problems) for pair in permutations(dict.fromkeys(places), 2)]
    collective = None
    if len(set(places)) > 1:
        report_stage("the ranks of a job")
        collective = met(places)
        if collective.failure is not None:
            what = f"the ranks' {collective.backend} collective failed: {collective.failure}"
            problems.append(Problem(what, collective.cure))
    report_stage("a small model")
    training = _trained(found, problems)
    return Examination(
        str(torch.__version__),
        torch.version.cuda,
        found[0].driver,
        found[0].kind,
        tuple(cards),
        tuple(copies),
        collective,
        training,
        tuple(problems),
        tuple(note for note in notes if note != why_no_nvml),
        time.perf_counter() - began_s,
    )


def _devices_for(spec: str | None, problems: list[Problem]) -> tuple[Device, ...]:
    try:
        found = parse_devices(spec)
    except DeviceError as error:
        if spec is not None:
            raise
        problems.append(Problem(str(error)))
        found = parse_devices(WITHOUT_GPU)
    if spec is None and found[0].kind == "cpu" and not found[0].budgeted:
        found = parse_devices(WITHOUT_GPU)
    if found[0].kind == "sim":
        raise DeviceError(
            f"devices is {spec!r}, but doctor can't examine simulated GPUs. Name real devices of this machine, or "
            "leave devices out.",
        )
    return found


def _problems_of(report: DeviceReport) -> list[Problem]:
    if not report.visible:
        return []
    name = f"{report.kind}:{report.logical_index}"
    found = [Problem(f"{name}: {report.unsupported}")] if report.unsupported else []
    total, others = report.total_bytes, report.used_by_others_bytes
    if total and others and others > total / 20:
        what = f"{name}: other processes use {size_text(others)} of {size_text(total)}"
        found.append(Problem(what, "end them (nvidia-smi lists them) before you tune, or choose another GPU"))
    return found


# ------------------------------------------------------------------------------------------------------------ cards


def _card_of(device: Device, place: torch.device, report: DeviceReport | None, nvml: Any) -> Card:
    largest_bytes = min(device.capacity_bytes // 4, 2**30)
    on_card = accelerator_index(place.index) if is_accelerator(place.type) else nullcontext()
    with on_card:
        flops = _flops_of(place, largest_bytes)
        memory = rates.memory_bytes_per_s(place, largest_bytes=largest_bytes)
        launch = launch_s(place)
    row = _row_of(device.name)
    tflops = {name: one / 1e12 for name, one in flops.items() if one is not None}
    total = report.total_bytes if report is not None and report.total_bytes else device.capacity_bytes
    return Card(
        device=device.label,
        name=device.name,
        memory_bytes=total,
        free_bytes=None if report is None else report.free_bytes,
        used_by_others_bytes=None if report is None else report.used_by_others_bytes,
        compute_capability=_compute_capability(place),
        compute_mode=_compute_mode(nvml, device.uuid),
        catalogue=None if row is None else row.name,
        tflops=tflops,
        tflops_of_catalogue={
            name: 1e12 * one / row.peak_flops[name] for name, one in tflops.items() if row and name in row.peak_flops
        },
        memory_gb_per_s=memory / 1e9,
        memory_of_catalogue=None if row is None else memory / row.memory_bytes_per_s,
        launch_s=launch,
        usual_link_gb_per_s=None if row is None else row.link_bytes_per_s / 1e9,
    )


def _row_of(name: str) -> GpuSpec | None:
    try:
        return find_card(name)
    except DeviceError:
        return None


def _flops_of(place: torch.device, largest_bytes: int) -> dict[str, float | None]:
    flops = {name: rates.matmul_flops(place, dtype, largest_bytes=largest_bytes) for name, dtype in _DTYPES.items()}
    if place.type == "cuda" and torch.cuda.get_device_capability(place) >= TF32_SINCE:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            flops["tf32"] = rates.matmul_flops(place, torch.float32, largest_bytes=largest_bytes)
        finally:
            torch.set_float32_matmul_precision(precision)
    return flops


def _compute_capability(place: torch.device) -> str | None:
    """Return the compute capability of an NVIDIA GPU. ROCm reports other numbers under this name (9.4 for MI300X)."""
    if place.type != "cuda" or torch.version.hip is not None:
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(place)))


def _compute_mode(nvml: Any, uuid: str | None) -> str | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return _COMPUTE_MODES.get(int(nvml.nvmlDeviceGetComputeMode(handle)))
    except Exception:  # a value that NVML can't read stays unknown # noqa: BLE001
        return None


def _problems_of_rates(card: Card) -> list[Problem]:
    found = []
    cool = "check its clocks, power and temperature (nvidia-smi -q -d PERFORMANCE), and the other processes on it"
    for what, reached, least in (
        ("float16 products", card.tflops_of_catalogue.get("float16"), SLOW_PRODUCTS),
        ("its memory", card.memory_of_catalogue, SLOW_MEMORY),
    ):
        if reached is not None and reached < least:
            found.append(
                Problem(
                    f"{card.device} reaches {reached:.0%} of the catalogue's rate for {what}",
                    cool,
                )
            )
    if card.compute_mode in {"exclusive process", "prohibited"}:
        mode = f"{card.device} is in compute mode {card.compute_mode}, so only one process at a time may use it"
        found.append(Problem(mode, "tune with --no-isolate, or reset the mode (nvidia-smi -c DEFAULT)"))
    return found


def _copy_of(source: torch.device, destination: torch.device, problems: list[Problem]) -> Copy:
    try:
        check_links((source, destination))
    except DeviceError as error:
        arrives = False
        problems.append(Problem(str(error)))
    else:
        arrives = True
    rate = rates.copy_bytes_per_s(source, destination) / 1e9
    return Copy(str(source), str(destination), arrives=arrives, gb_per_s=rate)


# --------------------------------------------------------------------------------------------------------- training

_FEATURES, _CLASSES = 256, 16
_EFFECTIVE = 512
_STEPS = 8


def _small_model() -> nn.Module:
    hidden = 4 * _FEATURES
    return nn.Sequential(
        *(nn.Linear(_FEATURES, hidden), nn.GELU()),
        *(nn.Linear(hidden, hidden), nn.GELU()),
        nn.Linear(hidden, _CLASSES),
    )


def _trained(devices: Sequence[Device], problems: list[Problem]) -> Training | None:
    began_s = time.perf_counter()
    batch = torch.randn(64, _FEATURES), torch.randint(_CLASSES, (64,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DoubtfulTimesWarning)  # the predictions are checked below
            plan = tune(
                _small_model(),
                batch,
                loss_fn=nn.functional.cross_entropy,
                optimizer=torch.optim.AdamW,
                devices=tuple(devices),
                strategy="balanced",
                effective_batch_size=_EFFECTIVE,
                n_trials=4,
                time_limit_s=20,
                profile="off",
            )
        took_s = time.perf_counter() - began_s
        measured_s, peaks = _by_the_plan(plan)
    except (AutosplitError, RuntimeError) as error:
        what = f"autosplit could not tune a small model: {first_line(error)}"
        problems.append(Problem(what, "fix the cause, or report it with the output of doctor"))
        return None
    found = Training(
        devices=",".join(device.label for device in devices),
        split=plan.split,
        accumulation_steps=plan.accumulation_steps,
        predicted_samples_per_s=plan.samples_per_s,
        measured_samples_per_s=plan.effective_batch_size / measured_s,
        predicted_bytes=plan.main.peak_bytes,
        measured_bytes=peaks,
        took_s=took_s,
    )
    if abs(found.measured_samples_per_s / found.predicted_samples_per_s - 1) > OFF:
        what = (
            f"a small model trains at {found.measured_samples_per_s:.0f} samples/s, but its plan predicted "
            f"{found.predicted_samples_per_s:.0f}"
        )
        problems.append(Problem(what, "check whether the machine is busy, and run doctor again"))
    return found


def _by_the_plan(plan: Any) -> tuple[float, tuple[int, ...]]:
    model = plan.wrap(_small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    count = plan.effective_batch_size
    features, classes = torch.randn(count, _FEATURES), torch.randint(_CLASSES, (count,))
    batches = list(zip(features.split(plan.batch_size), classes.split(plan.batch_size), strict=True))
    places = [device for device in model.devices if is_accelerator(device.type)]
    budgeted = all(device.budgeted for device in plan.devices)

    def epoch() -> float:
        began_s = time.perf_counter()
        for step in plan.steps(batches):
            for inputs, targets in step:
                step.backward(nn.functional.cross_entropy(model(inputs), targets.to(model.output_device)))
            optimizer.step()
            optimizer.zero_grad()
        for place in places:
            rates.synchronize(place)
        return time.perf_counter() - began_s

    with plan.budgets() if budgeted else nullcontext() as tracker:
        epoch()  # The first epoch creates optimizer state and chooses kernels.
        for place in places:  # Like the plan, measure the bytes that the allocator reserves for a steady step.
            backend(place.type).empty_cache()
            backend(place.type).reset_peak_memory_stats(place)
        epoch()
        peaks = tuple(backend(place.type).max_memory_reserved(place) for place in places)
        if tracker is not None:
            peaks = tuple(tracker.peak_bytes)
    seconds = min(epoch() for _ in range(_STEPS))
    return seconds, peaks
