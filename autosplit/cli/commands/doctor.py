"""``autosplit doctor``: whether autosplit works on this machine, how fast it is, and what to mend."""

from __future__ import annotations

from pathlib import Path

from autosplit.cli.device_tables import print_examination
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed, note, print_answer
from autosplit.cli.terminal import stdout_kept_clean
from autosplit.devices.catalog import GPUS_VARIABLE
from autosplit.errors import InputError, shown
from autosplit.files import replace_file

__all__ = ["doctor"]


def doctor(manner: Manner, *, devices: str | None = None, save: str | None = None) -> int:
    """Examine this machine, print what was found, and `save` the rates of its cards to a file where one is named."""
    from autosplit.devices.examination import cards_toml
    from autosplit.tuning.doctor import examine

    with stdout_kept_clean():
        try:
            found = examine(devices, tell=lambda text: note(f"looking at {text}", manner))
        except KeyboardInterrupt:
            return failed("interrupted before the examination was over; run it again", EXIT_INTERRUPTED)
    print_answer(found, manner, lambda console: print_examination(found, console))
    if save is not None:
        _keep(cards_toml(found), Path(save))
        note(f"kept the rates of its cards: {GPUS_VARIABLE}={save} makes `sim:` predict with them", manner)
    return 0


def _keep(text: str, path: Path) -> None:
    try:
        replace_file(path, text, mode=0o666)
    except OSError as error:
        raise InputError(
            f"--save {shown(str(path))} can't be written ({error.strerror}); expected a file in a folder that is "
            "there; name another"
        ) from None
