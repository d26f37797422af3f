"""``autosplit devices``: the GPUs with their load."""

from __future__ import annotations

from autosplit.cli.device_tables import print_devices
from autosplit.cli.json_types import Devices
from autosplit.cli.output import Manner, print_answer
from autosplit.cli.terminal import stdout_kept_clean

__all__ = ["devices"]


def devices(manner: Manner) -> int:
    """Print what there is to tune for."""
    from autosplit.devices.catalog import GPUS_VARIABLE, gpu_catalog
    from autosplit.devices.inventory import survey_devices

    # Both libraries talk while they start; the table is alone on stdout.
    with stdout_kept_clean():
        found, notes = survey_devices()
    measured = [card for card in gpu_catalog().values() if card.rates != "published"]
    notes = (*notes, *(f"sim:{card.name} has rates {card.rates} ({GPUS_VARIABLE})" for card in measured))
    print_answer(Devices(found, notes), manner, lambda console: print_devices(found, notes, console))
    return 0
