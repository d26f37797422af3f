"""Describe a benchmark's run, and write its results."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from startup import processor


def of_this_run() -> dict[str, Any]:
    """Return the date, the machine and the versions of a run."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def put(answer: dict[str, Any]) -> None:
    """Write the results as JSON to the file named on the command line, or to stdout."""
    text = json.dumps(answer, indent=2) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
