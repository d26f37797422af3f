"""Format text for people: safe, short and with units.

Device names, notes, file names and messages of the user's code are untrusted. An escape sequence could rewrite the
terminal, a bidirectional override could disguise text, and a URL could contain a password.
"""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from autosplit.errors import InputError, shown

LONGEST = 4000
"""Largest number of characters of a string that are shown. The middle of a longer string is left out."""

_TAIL = 500
_GAP = "..."

_USERINFO = re.compile(r"://([^\s/?#:@'\"]*):([^\s'\"]*)@")
_SECRET_OPTION = re.compile(
    r"([?&;][\w.-]*(?:pass|pwd|secret|token|credential|api_?key|access_?key)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE
)


def printable(text: object, *, longest: int | None = LONGEST) -> str:
    r"""Make text safe to print: one line of printable characters.

    Control characters (C0 and C1, so no escape sequence remains), line ends, bidirectional and other invisible format
    characters, lone surrogates and unusual spaces are escaped as in Python: ``\x1b``, ``\u202e``. Rich markup is
    unchanged, because callers use `rich.text.Text`, which does not interpret brackets.

    Args:
        text: Any object. Its `str` is shown.
        longest: Most characters to show, or None for all.
    """
    whole = str(text) if longest is None else shortened(str(text), longest)
    return whole if whole.isprintable() else "".join(map(_shown_as, whole))


_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_CONTROLS}\t\n]")
_CONTROL_IN_PROSE = re.compile(f"[{_CONTROLS}]")


def has_control_character(text: str, *, prose: bool = False) -> bool:
    """Return whether a text has a C0 or C1 control, a line separator, a bidirectional control or a lone surrogate.

    Args:
        prose: Whether tabs and line feeds are allowed.
    """
    return (_CONTROL_IN_PROSE if prose else _CONTROL).search(text) is not None


def prose(text: str) -> str:
    r"""Escape control characters except tabs and line feeds as in Python, such as ``\x1b``."""
    return _CONTROL_IN_PROSE.sub(lambda match: _shown_as(match[0]), text)


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a string of more than `longest` characters. The result has `longest` characters."""
    if len(text) <= longest:
        return text
    room = max(0, longest - len(_GAP))
    tail = min(_TAIL, room // 2)
    return f"{text[: room - tail]}{_GAP}{text[len(text) - tail :]}"[:longest]


def listed(texts: Sequence[str], most: int, *, separator: str = ", ", last: str = " ") -> str:
    """List the first few strings and count the rest. A single remaining string is listed, as its count is no shorter.

    Args:
        most: Number of strings to list.
        separator: Text between two items.
        last: Text before ``and 3 more``.
    """
    shown = texts if len(texts) <= most + 1 else texts[:most]
    more = len(texts) - len(shown)
    return separator.join(shown) + (f"{last}and {more} more" if more else "")


def _shown_as(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def printable_json(text: str) -> str:
    r"""Escape the characters of a JSON text that a terminal would interpret, as ``\uXXXX``.

    Such characters occur only inside strings. Line ends between values stay unchanged.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else _json_escape(character) for character in text
    )


def ascii_json(text: str) -> str:
    r"""Escape the characters of a JSON text that are not ASCII, as ``\uXXXX``. They occur only inside strings."""
    return "".join(character if character.isascii() else _json_escape(character) for character in text)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def without_passwords(text: str) -> str:
    """Mask the passwords of URLs: after the user name, and in options such as ``?password=``.

    The middle of a very long text is left out, because it is not shown.
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
# Limit the number of digits, because int() raises its own error for thousands of digits.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"1.5GiB"`` into whole bytes, rounded down.

    Args:
        text: A number of 0 or more, optionally with decimals, then B, KiB, MiB, GiB, TiB, KB, MB, GB or TB in any case.
            A number without a unit is bytes.

    Raises:
        InputError: The text has a different form.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise InputError(
            f"The size {shown(text)} is invalid. Expected a number of 0 or more with a unit, such as 600MiB or 1.5GiB.",
        )
    return int(Fraction(match[1]) * unit_bytes)


def size_text(nbytes: int) -> str:
    """Format bytes, positive or negative, with at most four digits of the largest suitable unit.

    Examples: ``"23.5 GiB"``, ``"600 MiB"``, ``"7 B"``. Above 10,000 TiB there are more digits.
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            # `g` writes an exponent for more than four digits.
            return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.4g} {unit}"
    return f"{nbytes} B"


def counted_text(n: int, noun: str) -> str:
    """Format a count with its noun: ``1 step``, ``2 steps``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def tuple_text(numbers: Sequence[int]) -> str:
    """Format a split: ``(4, 6, 6)``."""
    return f"({', '.join(map(str, numbers))})"


def percent_text(share: float) -> str:
    """Format a fraction as a percentage: no decimals from 10% upwards, one decimal below."""
    return f"{100 * share:,.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


def ms_text(seconds: float) -> str:
    """Format seconds as milliseconds: two decimals below 10 ms, one below 1,000 ms, and none above."""
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def rate_text(samples_per_s: float) -> str:
    """Format a throughput: whole samples per second, or three digits below 100."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def bound_text(loader_samples_per_s: float, devices_samples_per_s: float) -> str:
    """Return a phrase that names the bottleneck of a run: the loader or the devices."""
    return f"the {'loader limits' if loader_samples_per_s < devices_samples_per_s else 'devices limit'} training"


# ------------------------------------------------------------------------------------------------------------ HTML

_KEPT = "\n\t"
_INVISIBLE = ("Cc", "Cf", "Cs", "Cn", "Co")
"""Unicode categories without a visible character: control and format characters, surrogates, unassigned."""


def short_name(name: str) -> str:
    """Remove the manufacturer from a device's name."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def shares_text(split: Sequence[int]) -> str:
    """Format a split. With more than four devices, group equal numbers: ``3 x 1024, 5 x 512``."""
    if len(split) <= 4:
        return tuple_text(split)
    return ", ".join(f"{len([*run])} x {share}" for share, run in itertools.groupby(split))


def rates_text(labels: Sequence[str], rates: Sequence[str]) -> str:
    """Return the sources of simulated GPUs' speeds. If all sources are equal, return the source once."""
    if len(set(rates)) == 1:
        return rates[0]
    return "; ".join(f"{label} {rate}" for label, rate in zip(labels, rates, strict=True))


def short_bytes_text(nbytes: int) -> str:
    """Format bytes as GiB with one decimal, or whole MiB, or whole KiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def memory_text(peak_bytes: int, capacity_bytes: int) -> str:
    """Return ``18.2 of 24.0 GiB (75%)``. The percentage is rounded down, so that only a full memory has 100%."""
    peak, capacity = short_bytes_text(peak_bytes), short_bytes_text(capacity_bytes)
    if peak[-3:] == capacity[-3:]:
        peak = peak[:-4]
    share = 100 * peak_bytes // capacity_bytes if capacity_bytes else 0
    return f"{peak} of {capacity} ({share}%)"


def request_text(request: Mapping[str, Any]) -> str:
    """Return the arguments of a request without devices, name and defaults: ``effective_batch_size 256:512``."""
    texts = []
    for name, value in request.items():
        if name not in ("devices", "name") and value is not None and (name, value) != ("strategy", "auto"):
            texts.append(f"{name} {':'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return ", ".join(texts)


def visible(text: str) -> str:
    """Replace invisible characters, such as control and bidirectional characters, with a mark."""
    return "".join("�" if unicodedata.category(c) in _INVISIBLE and c not in _KEPT else c for c in text)


def escaped(text: str) -> str:
    """Escape text for HTML, in an element or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def table_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Iterable[str] = (),
) -> str:
    """Return an HTML table with a heading and facts above it. It uses the colours of the surrounding page.

    Args:
        facts: Pairs of a name and a value.
        remarks: Lines below the table.
    """
    left = ' style="text-align:left"'
    # Set no colours, because the page may be light or dark.
    head = "".join(f'<th scope="col"{left}>{escaped(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td{left}>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    shown_text = "".join(
        f'<tr><th scope="row"{left}>{escaped(name)}</th><td{left}>{escaped(text)}</td></tr>' for name, text in facts
    )
    notes = "".join(f"<p>{escaped(remark)}</p>" for remark in remarks)
    return (
        f"<div><strong>{escaped(title)}</strong><table><tbody>{shown_text}</tbody></table>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
    )
