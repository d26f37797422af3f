"""Print the devices of a machine, and what an examination of it found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autosplit.cli.tables import (
    add_row,
    bullet_table,
    pairs_table,
    plain_table,
    print_plain,
    short_bytes_text,
    short_name,
)
from autosplit.text import rate_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autosplit.devices.examination import Copy, Examination
    from autosplit.devices.inventory import DeviceReport

__all__ = ["print_devices", "print_examination"]


def print_devices(devices: Sequence[DeviceReport], notes: Iterable[str], console: Console) -> None:
    """Print a table of GPUs with their load, and the notes; without any GPU, a line that names ``cpu`` and ``sim:``."""
    from rich.text import Text

    if devices:
        print_plain(_gpu_table(devices), console)
    else:
        text = "no GPU here: tune with --devices cpu, or for GPUs elsewhere with --devices sim:2xRTX3090"
        print_plain(Text(text), console)
    own = [f"{_gpu_label(device)}: {note}" for device in devices for note in device.notes]
    if lines := [*notes, *own]:
        print_plain(bullet_table(lines), console)


def print_examination(found: Examination, console: Console) -> None:
    """Print a machine's examination."""
    build = f"torch {found.torch}" + (f", CUDA {found.cuda}" if found.cuda else "")
    print_plain(pairs_table([("runs on", found.kind), ("build", build), ("driver", found.driver or "-")]), console)
    print_plain(_card_table(found), console)
    rows = [(f"{one.source} to {one.destination}", _copied_text(one)) for one in found.copies]
    if (meeting := found.collective) is not None:
        rate = "they do not meet" if meeting.gb_per_s is None else f"{meeting.gb_per_s:.3g} GB/s of gradients"
        rows.append((f"{meeting.ranks} ranks by {meeting.backend}", rate))
    if (training := found.training) is not None:
        measured, predicted = training.measured_samples_per_s, training.predicted_samples_per_s
        split = " + ".join(str(share) for share in training.split)
        rows += [
            ("a small model", f"{split} samples per forward; tuned in {training.took_s:.0f} s"),
            ("its throughput", f"{rate_text(measured)}, predicted {rate_text(predicted)}"),
            (
                "its memory",
                f"{_sizes_text(training.measured_bytes)}, predicted {_sizes_text(training.predicted_bytes)}",
            ),
        ]
    print_plain(pairs_table(rows), console)
    if found.notes:
        print_plain(bullet_table(found.notes), console)
    if not found.problems:
        print_plain(bullet_table([f"nothing is wrong; this took {found.took_s:.0f} s"]), console)
    for one in found.problems:
        print_plain(pairs_table([("wrong", one.problem), ("cure", one.cure or "-")]), console)


def _card_table(found: Examination) -> Table:
    figures = ("memory", "free", *found.cards[0].tflops, "memory rate", "launch")
    table = plain_table("device", "name", *figures, figures=figures)
    for card in found.cards:
        products = [_part_text(f"{rate:.3g} T", card.tflops_of_catalogue.get(n)) for n, rate in card.tflops.items()]
        add_row(
            table,
            card.device,
            short_name(card.name),
            size_text(card.memory_bytes),
            _known_bytes(card.free_bytes),
            *products,
            _part_text(f"{card.memory_gb_per_s:.3g} GB/s", card.memory_of_catalogue),
            f"{1e6 * card.launch_s:.1f} us",
        )
    return table


def _part_text(rate: str, part: float | None) -> str:
    return rate if part is None else f"{rate} ({part:.0%})"


def _copied_text(one: Copy) -> str:
    return f"{one.gb_per_s:.3g} GB/s{'' if one.arrives else ', and arrives wrong'}"


def _sizes_text(sizes: Sequence[int]) -> str:
    return " + ".join(size_text(size) for size in sizes)


def _gpu_table(devices: Sequence[DeviceReport]) -> Table:
    figures = ("total", "free", "others", "busy", "temp", "power")
    table = plain_table(devices[0].kind, "physical", "name", *figures, figures=figures)
    for device in devices:
        add_row(
            table,
            "hidden" if device.logical_index is None else f"{device.logical_index}",
            _known(device.physical_index, "{}"),
            short_name(device.name),
            *(_known_bytes(n) for n in (device.total_bytes, device.free_bytes, device.used_by_others_bytes)),
            _known(device.utilization_percent, "{} %"),
            _known(device.temperature_c, "{} C"),
            _known(device.power_w, "{:.0f} W"),
        )
    return table


def _gpu_label(device: DeviceReport) -> str:
    if device.logical_index is not None:
        return f"{device.kind}:{device.logical_index}"
    return device.name if device.physical_index is None else f"physical {device.physical_index}"


def _known(value: float | None, pattern: str) -> str:
    return "?" if value is None else pattern.format(value)


def _known_bytes(nbytes: int | None) -> str:
    return "?" if nbytes is None else short_bytes_text(nbytes)
