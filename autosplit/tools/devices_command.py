"""Run ``autosplit devices``: print the GPUs with their memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.cli.output import CommandResult, Manner
from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.cli.terminal import clean_stdout
from autosplit.text import short_bytes_text, short_name
from autosplit.tools.inventory import DeviceReport, Devices


def devices(_manner: Manner) -> CommandResult[Devices]:
    """List the GPUs of this machine."""
    from autosplit.devices.catalog import GPUS_VARIABLE, gpu_catalog
    from autosplit.tools.inventory import survey_devices

    # NVML and torch may print while they start, and stdout is for the table.
    with clean_stdout():
        found, notes = survey_devices()
    measured = [card for card in gpu_catalog().values() if card.rates != "published"]
    notes = (*notes, *(f"sim:{card.name} has rates {card.rates} ({GPUS_VARIABLE})" for card in measured))
    return CommandResult(Devices(found, notes), lambda console: print_devices(found, notes, console))


def print_devices(devices: Sequence[DeviceReport], notes: Iterable[str], console: Console) -> None:
    """Print a table of GPUs with their memory, and the notes. Without a GPU, suggest ``cpu`` and ``sim:``."""
    if devices:
        print_plain(_table(devices), console)
    else:
        text = "This machine has no GPU. Tune with --devices cpu, or simulate GPUs with --devices sim:2xRTX3090."
        print_plain(Text(text), console)
    own = [f"{_label(device)}: {note}" for device in devices for note in device.notes]
    print_bullets([*notes, *own], console)


def _table(devices: Sequence[DeviceReport]) -> Table:
    figures = ("total", "free", "others")
    table = plain_table(devices[0].kind, "physical", "name", *figures, figures=figures)
    for device in devices:
        sizes = device.total_bytes, device.free_bytes, device.used_by_others_bytes
        add_row(
            table,
            "hidden" if device.logical_index is None else f"{device.logical_index}",
            "?" if device.physical_index is None else f"{device.physical_index}",
            short_name(device.name),
            *("?" if n is None else short_bytes_text(n) for n in sizes),
        )
    return table


def _label(device: DeviceReport) -> str:
    if device.logical_index is not None:
        return f"{device.kind}:{device.logical_index}"
    return device.name if device.physical_index is None else f"physical {device.physical_index}"
