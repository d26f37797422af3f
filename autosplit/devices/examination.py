"""The findings of a machine's examination, and its cards in the form of the catalogue.

Nothing in it tells whose machine it is: no UUIDs, addresses, paths or processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autosplit.accelerators import is_accelerator
from autosplit.errors import DeviceError


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        problem: What it is.
        cure: What to do.
    """

    problem: str
    cure: str


@dataclass(frozen=True)
class Card:
    """A device, and what it reaches.

    Attributes:
        device: ``"cuda:0"``.
        name: What its maker calls it.
        memory_bytes: What it has.
        free_bytes: What of it nobody holds; None where that is unknown.
        used_by_others_bytes: What other processes hold; None where that is unknown.
        compute_capability: ``"9.0"``; None of what is no CUDA device.
        compute_mode: ``"default"``, ``"exclusive process"``, ...; None where NVML does not tell.
        catalogue: The row of the catalogue of that name; None where there is none.
        tflops: Of matrix products, by dtype, in 10^12 operations per second; ``"tf32"`` where the card has it.
        tflops_of_catalogue: The same, as parts of the catalogue's; empty without a row.
        memory_gb_per_s: Bytes read and written within its memory, in 10^9 per second.
        memory_of_catalogue: The same, as a part of the catalogue's; None without a row.
        launch_s: What an operation costs the host.
        usual_link_gb_per_s: Of the catalogue: 10^9 bytes per second to a card beside it; None without a row.
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
    """A way from one card to another.

    Attributes:
        source: Where from.
        destination: Where to.
        arrives: What is sent arrives as it was.
        gb_per_s: 10^9 bytes per second.
    """

    source: str
    destination: str
    arrives: bool
    gb_per_s: float


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a job met.

    Attributes:
        backend: Torch's for these devices: ``"nccl"``, ``"gloo"``.
        ranks: How many there were.
        gb_per_s: 10^9 bytes of gradients added up over the ranks per second; None where they did not meet.
        failure: Why they did not; None where they did.
        cure: What to do about it.
    """

    backend: str
    ranks: int
    gb_per_s: float | None = None
    failure: str | None = None
    cure: str = ""


@dataclass(frozen=True)
class Training:
    """A small model, tuned here and trained by the plan.

    Attributes:
        devices: The device spec.
        split: Samples per device.
        accumulation_steps: Forwards per optimizer step.
        predicted_samples_per_s: By the plan.
        measured_samples_per_s: By training with it.
        predicted_bytes: By the plan, the peak of each device.
        measured_bytes: While training with it.
        took_s: To tune.
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
    """A machine, as far as autosplit stands on it.

    Attributes:
        torch: Its version.
        cuda: The CUDA that it was built for; None without.
        driver: The version of NVIDIA's driver; None where NVML does not tell.
        kind: What computes here, in torch's word: ``"cuda"``, ``"xpu"``, ``"cpu"``.
        cards: Its devices that can be used.
        copies: Every way between two of them.
        collective: How ranks of a job meet; None with fewer than two devices.
        training: A small model; None where it could not be tuned.
        problems: What is wrong, with its cure; empty where all is well.
        notes: What else there is to say.
        took_s: All of it.
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


def cards_table(examination: Examination) -> dict[str, Any]:
    """Return the machine's cards with the rates that were measured, as ``autosplit/devices/gpus.toml`` has cards.

    A card alone has no link to measure: its catalogue row's is taken, without one that of PCI Express 4.0. Products
    that a card has not run as float32.
    """
    if not is_accelerator(examination.kind):
        raise DeviceError(
            "the machine has no accelerator; expected one whose rates can be kept; examine one that has",
            code="no-accelerator",
        )
    slowest = min((copy.gb_per_s for copy in examination.copies if copy.arrives), default=None)
    driver = f", driver {examination.driver}" if examination.driver else ""
    cards, links = {}, {}
    for name, card in {_name_of(card): card for card in examination.cards}.items():
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
            "compute_capability": card.compute_capability or "0.0",
            "launch_s": _rounded(card.launch_s),
            "source": f"measured on {card.name} by autosplit doctor, torch {examination.torch}{driver}",
        }
    return {"links": links, "cards": cards}


def cards_toml(examination: Examination) -> str:
    """Return `cards_table` as the text of a file, for AUTOSPLIT_GPUS."""
    table = cards_table(examination)
    lines = ["# Rates that autosplit doctor measured, for AUTOSPLIT_GPUS.", "", "[links]"]
    lines += [f"{name} = {rate}" for name, rate in table["links"].items()]
    for name, row in table["cards"].items():
        lines += ["", f"[cards.{name}]", *(f"{key} = {_toml_of(value)}" for key, value in row.items())]
    return "\n".join(lines) + "\n"


def _toml_of(value: float | str | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {one}' for key, one in value.items())} }}"
    return json.dumps(value) if isinstance(value, str) else f"{value}"


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def _name_of(card: Card) -> str:
    if card.catalogue is not None:
        return card.catalogue
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in card.name).strip("-")
    return (plain if plain[:1].isalpha() else f"card-{plain}")[:60]
