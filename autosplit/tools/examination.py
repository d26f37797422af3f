"""Store the results of `autosplit doctor`, and convert its GPUs to rows of the catalogue.

The results contain nothing that identifies the machine: no UUIDs, addresses, paths or processes. docs/results.md is a
table of the results that users share.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import msgspec

from autosplit.accelerators import is_accelerator
from autosplit.devices.catalog import row_name
from autosplit.errors import DeviceError

SCHEMA_VERSION = 2
"""Version of the format of `SharedResult`."""


@dataclass(frozen=True)
class Problem:
    """A problem of the machine, with a fix.

    Attributes:
        problem: The problem. The message of an error also has the next step.
        cure: How to fix it. Empty if `problem` describes the fix.
    """

    problem: str
    cure: str = ""


@dataclass(frozen=True)
class Card:
    """A device and its measured rates.

    Attributes:
        device: ``"cuda:0"``.
        name: The vendor's name.
        memory_bytes: Total memory.
        free_bytes: Free memory, or None if unknown.
        used_by_others_bytes: Memory of other processes, or None if unknown.
        compute_capability: ``"9.0"``, or None for a device other than CUDA.
        compute_mode: ``"default"``, ``"exclusive process"``, ..., or None if NVML does not report it.
        catalogue: The catalogue row with this name, or None.
        tflops: Rate of matrix products by dtype, in 10^12 operations per second. ``"tf32"`` only if supported.
        tflops_of_catalogue: `tflops` as fractions of the catalogue's rates. Empty without a row.
        memory_gb_per_s: Bytes read and written in its memory, in 10^9 per second.
        memory_of_catalogue: `memory_gb_per_s` as a fraction of the catalogue's rate. None without a row.
        launch_s: The host's time to launch a kernel, see `autosplit.tools.launch_time`. In version 1 of shared results,
            it was the time of one call in a loop.
        usual_link_gb_per_s: The catalogue's rate to a neighbouring GPU, in 10^9 bytes per second. None without a row.
    """

    device: str
    name: str
    memory_bytes: int
    free_bytes: int | None
    used_by_others_bytes: int | None
    compute_capability: str | None
    compute_mode: str | None
    catalogue: str | None
    tflops: Mapping[str, float]
    tflops_of_catalogue: Mapping[str, float]
    memory_gb_per_s: float
    memory_of_catalogue: float | None
    launch_s: float
    usual_link_gb_per_s: float | None = None


@dataclass(frozen=True)
class Copy:
    """A copy from one GPU to another.

    Attributes:
        source: The sending GPU.
        destination: The receiving GPU.
        arrives: Whether the data arrives unchanged.
        gb_per_s: 10^9 bytes per second.
    """

    source: str
    destination: str
    arrives: bool
    gb_per_s: float


@dataclass(frozen=True)
class Meeting:
    """The result of an all-reduce between the ranks of a job.

    Attributes:
        backend: Torch's backend for these devices: ``"nccl"``, ``"gloo"``.
        ranks: Number of ranks.
        gb_per_s: 10^9 bytes of gradients reduced per second, or None if the all-reduce failed.
        failure: The reason of the failure, or None.
        cure: How to fix it.
    """

    backend: str
    ranks: int
    gb_per_s: float | None = None
    failure: str | None = None
    cure: str = ""


@dataclass(frozen=True)
class Training:
    """A small model, tuned on this machine and trained with the plan.

    Attributes:
        devices: The device spec.
        split: Samples per device.
        accumulation_steps: Micro-steps per optimizer step.
        predicted_samples_per_s: The plan's prediction.
        measured_samples_per_s: Throughput of training with the plan.
        predicted_bytes: The plan's prediction of each device's peak.
        measured_bytes: Peak of each device during training.
        took_s: Tuning time.
    """

    devices: str
    split: tuple[int, ...]
    accumulation_steps: int
    predicted_samples_per_s: float
    measured_samples_per_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    took_s: float


@dataclass(frozen=True)
class Examination:
    """Results of `autosplit doctor` for a machine.

    Attributes:
        torch: Torch's version.
        cuda: The CUDA version that torch was built for, or None.
        driver: The version of NVIDIA's driver, or None if NVML does not report it.
        kind: Torch's name for the devices: ``"cuda"``, ``"xpu"``, ``"cpu"``.
        cards: The usable devices.
        copies: Copies between all pairs of devices, in both directions.
        collective: An all-reduce between the devices, or None with fewer than two.
        training: A small tuned model, or None if it could not be tuned.
        problems: Problems and how to fix them. Empty if there are none.
        notes: Other remarks.
        took_s: Total time.
    """

    torch: str
    cuda: str | None
    driver: str | None
    kind: str
    cards: tuple[Card, ...]
    copies: tuple[Copy, ...]
    collective: Meeting | None
    training: Training | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    took_s: float


def cards_of_examination(text: str) -> dict[str, Any]:
    """Return the rows of the GPU catalogue for the output of ``autosplit doctor --json``.

    Raises:
        msgspec.DecodeError: The text is not an examination.
    """
    return cards_table(msgspec.json.decode(text, type=Examination))


def cards_table(examination: Examination) -> dict[str, Any]:
    """Return the machine's GPUs with their measured rates, in the format of ``autosplit/devices/gpus.toml``.

    Without a measured link, a GPU gets the link of its catalogue row, or PCI Express 4.0. Data types that a GPU does
    not support run as float32.

    Raises:
        DeviceError: The machine has no accelerator.
    """
    if not is_accelerator(examination.kind):
        raise DeviceError(
            "The machine has no accelerator, so there are no rates to save. Run the command on a machine with a GPU.",
        )
    slowest = min((copy.gb_per_s for copy in examination.copies if copy.arrives), default=None)
    driver = f", driver {examination.driver}" if examination.driver else ""
    cards, links = {}, {}
    for name, card in {card.catalogue or row_name(card.name): card for card in examination.cards}.items():
        gb_per_s = card.usual_link_gb_per_s if slowest is None else slowest
        link = "pcie4" if gb_per_s is None else f"of-{name}"
        if gb_per_s is not None:
            links[link] = _rounded(gb_per_s * 1e9)
        missing = {rate: card.tflops["float32"] for rate in ("float16", "float64") if rate not in card.tflops}
        cards[name] = {
            "memory_gib": round(card.memory_bytes / 2**30, 3),
            "tflops": {rate: _rounded(reached) for rate, reached in sorted({**card.tflops, **missing}.items())},
            "memory_gb_per_s": _rounded(card.memory_gb_per_s),
            "link": link,
            **({"compute_capability": card.compute_capability} if card.compute_capability else {}),
            "launch_s": _rounded(card.launch_s),
            "driver_names": [card.name[:100]],
            "source": f"measured on {card.name} by autosplit doctor, torch {examination.torch}{driver}",
        }
    return {"links": links, "cards": cards}


def cards_toml(examination: Examination) -> str:
    """Return `cards_table` as the text of a file for AUTOSPLIT_GPUS."""
    table = cards_table(examination)
    lines = ["# Rates that autosplit doctor measured, for AUTOSPLIT_GPUS.", "", "[links]"]
    lines += [f"{name} = {rate}" for name, rate in table["links"].items()]
    for name, row in table["cards"].items():
        lines += ["", f"[cards.{name}]", *(f"{key} = {_toml_of(value)}" for key, value in row.items())]
    return "\n".join(lines) + "\n"


def _toml_of(value: float | str | list[str] | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {one}' for key, one in value.items())} }}"
    return f"{value}" if isinstance(value, (int, float)) else json.dumps(value)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


@dataclass(frozen=True)
class SharedResult:
    """The results of `autosplit doctor` that a user shares.

    Attributes:
        schema_version: Version of this format. It changes if a key is removed or gets a different meaning.
        date: Day of the measurement, as ``2026-11-26``.
        autosplit: Version of autosplit.
        python: Version of Python.
        system: Operating system: ``"Linux"``, ``"Windows"``, ``"Darwin"``.
        torch: Version of torch.
        cuda: The CUDA version that torch was built for, or None.
        driver: The version of NVIDIA's driver, or None if NVML does not report it.
        kind: Torch's name for the devices: ``"cuda"``, ``"xpu"``, ``"cpu"``.
        cards: The devices, with their measured rates.
        copies: Copies between all pairs of devices, in both directions.
        collective: An all-reduce between the devices, or None with fewer than two.
        training: A small tuned model, with predictions and measurements. None if it could not be tuned.
    """

    schema_version: int
    date: str
    autosplit: str
    python: str
    system: str
    torch: str
    cuda: str | None
    driver: str | None
    kind: str
    cards: tuple[Card, ...]
    copies: tuple[Copy, ...]
    collective: Meeting | None
    training: Training | None


def shared_result(found: Examination) -> SharedResult:
    """Return the shareable results of an examination: without remarks, error messages and data of other processes."""
    collective = None if found.collective is None else replace(found.collective, failure=None, cure="")
    return SharedResult(
        schema_version=SCHEMA_VERSION,
        date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        autosplit=version("autosplit"),
        python=platform.python_version(),
        system=platform.system(),
        torch=found.torch,
        cuda=found.cuda,
        driver=found.driver,
        kind=found.kind,
        cards=tuple(replace(card, free_bytes=None, used_by_others_bytes=None) for card in found.cards),
        copies=found.copies,
        collective=collective,
        training=found.training,
    )
