"""What the forkserver imports once, so that its children need not: parts of autosplit, and the libraries of its CLI."""

from __future__ import annotations

import rich.console
import rich.table

from autosplit import ddp, tune

__all__ = ["ddp", "rich", "tune"]
