"""A text that would change a terminal, and a check that a printed text does not."""

from __future__ import annotations

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\r\nerror: done\x00\x7f\u2028\ud800[bold red]x[/]"
"""A title, a cleared screen, C1's CSI, a bidirectional override, line ends of three kinds, a lone surrogate, markup."""


def assert_harmless(text: str, *, lines: bool = True) -> None:
    shown = text.replace("\n", "") if lines else text
    assert shown.isprintable(), [character for character in shown if not character.isprintable()]
