"""Text of others on its way to a terminal: nothing in it may act on the terminal, and no password may stand in it.

Device names, notes, file names and what a user's code raises come from files and machines that nobody vouches for. An
escape sequence in one of them could move the cursor, rewrite what stands above, or set a window's title; a
bidirectional override shows a text as another one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["LONGEST", "ascii_json", "listed", "printable", "printable_json", "shortened", "without_passwords"]

LONGEST = 4000
"""Characters of one text that are shown; of a longer one the middle is left out."""

_TAIL = 500

_USERINFO = re.compile(r"://([^\s/?#:@'\"]*):([^\s'\"]*)@")
_SECRET_OPTION = re.compile(
    r"([?&;][\w.-]*(?:pass|pwd|secret|token|credential|api_?key|access_?key)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE
)


def printable(text: object, *, longest: int | None = LONGEST) -> str:
    r"""Make a text harmless: one line, of characters that only show themselves.

    Control characters (of C0 and C1, so that no escape sequence is left), line ends, bidirectional and other invisible
    format characters, lone surrogates and odd blanks are written as Python would write them: ``\x1b``, ``\u202e``.
    Marks of rich are no concern here: what draws uses `rich.text.Text`, in which brackets are brackets.

    Args:
        text: Anything; its `str` is shown.
        longest: Characters shown at most; None for all.
    """
    whole = str(text) if longest is None else shortened(str(text), longest)
    return whole if whole.isprintable() else "".join(map(_shown_as, whole))


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long.

    Args:
        text: Any.
        longest: Characters that are kept, more than 500.
    """
    return text if len(text) <= longest else f"{text[: longest - _TAIL - 3]}...{text[-_TAIL:]}"


def listed(texts: Sequence[str], most: int, *, separator: str = ", ", last: str = " ") -> str:
    """List the first of some texts, and count the rest; a single one is named, which takes no more room.

    Args:
        texts: All of them.
        most: So many are listed, or one more.
        separator: Between two of them.
        last: Before ``and 3 more``.
    """
    shown = texts if len(texts) <= most + 1 else texts[:most]
    more = len(texts) - len(shown)
    return separator.join(shown) + (f"{last}and {more} more" if more else "")


def _shown_as(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def printable_json(text: str) -> str:
    r"""Return the same JSON without a character that a terminal would act on: each is written as ``\uXXXX``.

    Args:
        text: JSON, in which such characters can only stand inside strings; line ends between values stay.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else _json_escape(character) for character in text
    )


def ascii_json(text: str) -> str:
    r"""Return the same JSON in ASCII: every other character, which can only stand inside strings, is ``\uXXXX``."""
    return "".join(character if character.isascii() else _json_escape(character) for character in text)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def without_passwords(text: str) -> str:
    """Mask the passwords of URLs: after the user's name, and in options such as ``?password=``.

    Args:
        text: A URL, or a text with some in it; of one that is very long the middle is left out, as it is not shown.
    """
    text = shortened(text, LONGEST)
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub(r"://\1:***@", text))
