"""Text for people: harmless, short, in units.

Device names, notes, file names and what a user's code raises come from files and machines that nobody vouches for. An
escape sequence in one could rewrite a terminal, a bidirectional override shows a text as another one, a URL may hold a
password.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from fractions import Fraction

from autosplit.errors import InputError, shown

LONGEST = 4000
"""Characters of one text that are shown; of a longer one the middle is left out."""

_TAIL = 500
_GAP = "..."

_USERINFO = re.compile(r"://([^\s/?#:@'\"]*):([^\s'\"]*)@")
_SECRET_OPTION = re.compile(
    r"([?&;][\w.-]*(?:pass|pwd|secret|token|credential|api_?key|access_?key)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE
)


def printable(text: object, *, longest: int | None = LONGEST) -> str:
    r"""Make a text harmless: one line, of characters that only show themselves.

    Control characters (of C0 and C1, so that no escape sequence is left), line ends, bidirectional and other invisible
    format characters, lone surrogates and odd blanks are written as Python would write them: ``\x1b``, ``\u202e``.
    Marks of rich stay: what draws uses `rich.text.Text`, in which brackets are brackets.

    Args:
        text: Anything; its `str` is shown.
        longest: Characters shown at most; None for all.
    """
    whole = str(text) if longest is None else shortened(str(text), longest)
    return whole if whole.isprintable() else "".join(map(_shown_as, whole))


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a text of more than `longest` characters. The result has `longest` characters."""
    if len(text) <= longest:
        return text
    kept = max(0, longest - len(_GAP))
    tail = min(_TAIL, kept // 2)
    return f"{text[: kept - tail]}{_GAP}{text[len(text) - tail :]}"[:longest]


def listed(texts: Sequence[str], most: int, *, separator: str = ", ", last: str = " ") -> str:
    """List the first of some texts, and count the rest; a single one is named, which takes no more room.

    Args:
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

    Such characters can only stand inside strings; line ends between values stay.
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

    Of a text that is very long the middle is left out, as it is not shown.
    """
    text = shortened(text, LONGEST)
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub(r"://\1:***@", text))


# ----------------------------------------------------------------------------------------------------------- units

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# Bounded lengths: int() refuses thousands of digits with an error of its own.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read whole bytes, rounded down, from a size such as ``"1.5GiB"``.

    Args:
        text: A number of zero or more, with decimals or without, then B, KiB, MiB, GiB, TiB, KB, MB, GB or TB in any
            case. A number alone is bytes.

    Raises:
        InputError: If it is not such a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise InputError(
            f"size {shown(text)}: expected a number of 0 or more with a unit; write it as 600MiB or 1.5GiB",
            code="size-text",
        )
    return int(Fraction(match[1]) * unit_bytes)


def size_text(nbytes: int) -> str:
    """Write bytes, of either sign, in at most four digits of the largest unit that they fill.

    As in ``"23.5 GiB"``, ``"600 MiB"``, ``"7 B"``; beyond 10,000 TiB with as many digits as it takes.
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            # Past four digits, `g` would write an exponent.
            return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.4g} {unit}"
    return f"{nbytes} B"


def counted_text(n: int, noun: str) -> str:
    """Write a number of things: ``1 step``, ``2 steps``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def tuple_text(numbers: Sequence[int]) -> str:
    """Write a split: ``(4, 6, 6)``."""
    return f"({', '.join(map(str, numbers))})"


def ms_text(seconds: float) -> str:
    """Write a duration: in whole milliseconds, or three digits of what is over before that."""
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def rate_text(samples_per_s: float) -> str:
    """Write a throughput: whole samples, or three digits of a slow one."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def bound_text(loader_samples_per_s: float, devices_samples_per_s: float) -> str:
    """Say which of a loader and the devices a run waits for."""
    slower = "loader bounds" if loader_samples_per_s < devices_samples_per_s else "devices bound"
    return f"the {slower} the run"


# ------------------------------------------------------------------------------------------------------------ HTML

_KEPT = "\n\t"
_INVISIBLE = ("Cc", "Cf", "Cs", "Cn", "Co")
"""Unicode categories that draw nothing, or turn what stands around them: controls, marks of direction, halves."""


def visible(text: str) -> str:
    """Return a text with a mark in the place of what can't be seen: control characters, marks of direction."""
    return "".join("�" if unicodedata.category(c) in _INVISIBLE and c not in _KEPT else c for c in text)


def escaped(text: str) -> str:
    """Return a text for HTML, within an element or an attribute's quotes."""
    return html.escape(visible(text), quote=True)


def table_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Iterable[str] = (),
) -> str:
    """Return a table with a heading and facts above it, in the colours of the page that it is put into.

    Args:
        facts: What there is to say by name.
        columns: Headings of the table.
        rows: Its cells.
        remarks: A line each, below.
    """
    left = ' style="text-align:left"'
    # Nothing of colours but what the page has: it may be light or dark.
    head = "".join(f'<th scope="col"{left}>{escaped(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td{left}>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    told = "".join(
        f'<tr><th scope="row"{left}>{escaped(name)}</th><td{left}>{escaped(text)}</td></tr>' for name, text in facts
    )
    notes = "".join(f"<p>{escaped(remark)}</p>" for remark in remarks)
    return (
        f"<div><strong>{escaped(title)}</strong><table><tbody>{told}</tbody></table>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
    )
