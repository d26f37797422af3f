"""Record the findings of one stage of `gpu.py` as JSON lines, each one immediately."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autosplit.accelerators import accelerator_kind, backend
from autosplit.errors import one_line

KIND = accelerator_kind() or "cuda"
GPU = f"{KIND}:0"
MIB, GIB = 2**20, 2**30

_PATH = re.compile(r"/[^\s\"']*/(autosplit|benchmarks|site-packages|tests)/")
"""Matches a path of this machine up to the part that other machines share."""


class Skipped(Exception):  # noqa: N818 (not an error)
    """Raised if a check does not apply on this machine. The message gives the reason."""


def record(name: str, verdict: str, **figures: Any) -> None:
    """Append a finding to the stage's file.

    Args:
        name: Name of the check.
        verdict: ``"holds"``, ``"fails"``, ``"number"`` (a figure without a limit), ``"error"`` or ``"skipped"``.
        **figures: The measured figures.
    """
    line = json.dumps({"name": name, "verdict": verdict, **figures}, default=str)
    with Path(os.environ["GPU_FINDINGS"]).open("a", encoding="utf-8") as file:
        file.write(_PATH.sub(r"\1/", line) + "\n")


def checked(name: str, check: Callable[[], tuple[bool | None, dict[str, Any]]]) -> None:
    """Run a check and record its result: True holds, False fails, None is a number. An exception is an error."""
    began_s = time.perf_counter()
    try:
        answer, figures = check()
    except Skipped as why:
        record(name, "skipped", why=str(why))
    except Exception as error:  # noqa: BLE001 (continue with the next check)
        text = "".join(traceback.format_exception(error)[-3:])[-1200:]
        record(name, "error", error=one_line(error)[:400], where=text)
    else:
        verdict = "number" if answer is None else "holds" if answer else "fails"
        record(name, verdict, seconds=round(time.perf_counter() - began_s, 2), **figures)
    _forget()


def _forget() -> None:
    """Return cached memory to the GPU, so that the next check starts from an empty allocator."""
    import gc

    gc.collect()
    backend(KIND).empty_cache()
