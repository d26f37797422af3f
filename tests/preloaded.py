"""The parts of autosplit that the forkserver imports once, so that its children need not."""

from __future__ import annotations

from autosplit import ddp, tune

__all__ = ["ddp", "tune"]
