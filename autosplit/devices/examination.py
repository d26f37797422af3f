"""The findings of a machine's examination, and its cards in the form of the catalogue.

Nothing in it tells whose machine it is: no UUIDs, addresses, paths or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.accelerators import is_accelerator
from autosplit.devices.catalog import GpuSpec, find_card
from autosplit.errors import DeviceError

__all__ = ["Card", "Copy", "Examination", "Meeting", "Problem", "Training", "cards_toml", "row_of"]


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
        tflops: Of matrix products, by dtype, in 10^12 operations per second.
        tflops_of_catalogue: The same, as parts of the catalogue's; empty without a row.
        memory_gb_per_s: Bytes read and written within its memory, in 10^9 per second.
        memory_of_catalogue: The same, as a part of the catalogue's; None without a row.
        launch_s: What an operation costs the host.
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


def row_of(name: str) -> GpuSpec | None:
    """Return the catalogue's row of a card by its maker's name; None where it has none."""
    try:
        return find_card(name)
    except DeviceError:
        return None


def cards_toml(examination: Examination) -> str:
    """Return the machine's cards with the rates that were measured, in the form of ``autosplit/devices/gpus.toml``.

    Raises:
        DeviceError: The machine has no accelerators.
    """
    if not is_accelerator(examination.kind):
        raise DeviceError("this machine has no accelerator; expected one whose rates can be kept; leave out --save")
    slowest = min((copy.gb_per_s for copy in examination.copies if copy.arrives), default=None)
    lines = ["# Rates that autosplit doctor measured; for AUTOSPLIT_GPUS."]
    if slowest is None:
        lines += ["# One card has no link to measure: pcie4 is assumed. Write another of the catalogue's in its place."]
    else:
        lines += ["", "[links]", f"measured = {slowest * 1e9:.4g}"]
    for name, card in {_name_of(card): card for card in examination.cards}.items():
        tflops = {**card.tflops}
        tflops.setdefault("float16", tflops["float32"])
        row = row_of(card.name)
        tflops.setdefault("float64", row.peak_flops["float64"] / 1e12 if row is not None else tflops["float32"])
        link = "measured" if slowest is not None else "pcie4"
        lines += [
            "",
            f"[cards.{name}]",
            f"memory_gib = {card.memory_bytes / 2**30:.3f}",
            f"tflops = {{ {', '.join(f'{dtype} = {rate:.4g}' for dtype, rate in sorted(tflops.items()))} }}",
            f"memory_gb_per_s = {card.memory_gb_per_s:.4g}",
            f'link = "{link}"',
            f'compute_capability = "{card.compute_capability or "0.0"}"',
            f"launch_s = {card.launch_s:.3g}",
            f'source = "measured by autosplit doctor, torch {examination.torch}"',
        ]
    return "\n".join(lines) + "\n"


def _name_of(card: Card) -> str:
    if card.catalogue is not None:
        return card.catalogue
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in card.name).strip("-")
    return plain if plain[:1].isalpha() else f"card-{plain}"
