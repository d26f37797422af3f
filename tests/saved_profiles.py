"""Read all saved profiles."""

from __future__ import annotations

from pathlib import Path

from autosplit.plan.plan import Plan
from autosplit.profiles.store import profile_paths, read_or_none


def saved_profiles() -> tuple[tuple[Path, Plan | None], ...]:
    """Return all profiles, the newest first. The plan of an unreadable profile is None."""
    return tuple((path, read_or_none(path)) for path in profile_paths())
