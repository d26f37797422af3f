"""Make the file that `autosplit doctor --share` writes: a machine's rates, and a plan's predictions for it.

docs/results.md is a table of such files. They contain no user, path, process, UUID or host name.
"""

from __future__ import annotations

import datetime as dt
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version

from autosplit.devices.examination import Card, Copy, Examination, Meeting, Training

SCHEMA_VERSION = 1


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
