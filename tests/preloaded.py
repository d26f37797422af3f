"""Imports for the forkserver, shared by its children: parts of autosplit, and the libraries of its command line."""

from __future__ import annotations

import rich.console
import rich.table

from autosplit import ddp, tune

__all__ = ["ddp", "rich", "tune"]
