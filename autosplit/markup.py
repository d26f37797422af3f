"""HTML that stands by itself: a small table for notebooks, and text that no page can take for anything but text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = ["escaped", "printable", "table_html"]

_KEPT = "\n\t"
_INVISIBLE = ("Cc", "Cf", "Cs", "Cn", "Co")
"""Categories of Unicode that draw nothing, or turn what stands around them: controls, marks of direction, halves."""


def printable(text: str) -> str:
    """Return a text with a mark in the place of what can't be seen: control characters, marks of direction.

    Args:
        text: Anyone's.
    """
    return "".join("�" if unicodedata.category(c) in _INVISIBLE and c not in _KEPT else c for c in text)


def escaped(text: str) -> str:
    """Return a text for HTML, within an element or an attribute's quotes.

    Args:
        text: Anyone's.
    """
    return html.escape(printable(text), quote=True)


def table_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Iterable[str] = (),
) -> str:
    """Return a table with a heading and facts above it, in the colours of the page that it is put into.

    Args:
        title: The heading.
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
