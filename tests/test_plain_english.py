"""The package and its documentation do not use phrases that no reader understands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PHRASES = (
    "as it stands, of which",
    "anew",
    "come home",
    "is asked of",
    "is told of",
    "its like",
    "mend it",
    "stands beside",
    "thrice",
    "unlike ones",
    "what is remembered",
    "what it holds",
    "without a word",
)

TEXTS = [*(ROOT / "autosplit").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_not_used(phrase: str) -> None:
    words = re.compile(pattern_of(phrase))
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in TEXTS
        for text in [path.read_text(encoding="utf-8")]
        for match in words.finditer(text)
    ]
    assert found == []


def pattern_of(phrase: str) -> str:
    """Return a pattern for a phrase that may be broken over lines, of comments too."""
    return r"\b" + r"[\s#]+".join(map(re.escape, phrase.split())) + r"\b"


def test_a_phrase_over_two_lines_is_found() -> None:
    assert re.search(pattern_of("is asked of"), "what is\n    # asked of it")
    assert not re.search(pattern_of("anew"), "a new one")
