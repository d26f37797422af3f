"""Paths for tests that run in other folders, and for the processes that they start."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = "\n".join([README, *(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))])
"""All texts for users: README, then every page."""
