from __future__ import annotations

import html
from dataclasses import replace

import pytest
from handmade import made_plan
from hypothesis import given
from hypothesis import strategies as st
from pages import Reader

from autosplit.plan.record import with_devices
from autosplit.text import escaped, visible


@given(st.text())
def test_a_text_stays_a_text(text):
    cell = Reader(f'<td title="{escaped(text)}">{escaped(text)}</td>')
    assert cell.tags == ["td"]
    # HTML's own handling of line ends is not tested.
    assert "".join(cell.texts) == html.unescape(escaped(text))
    assert not any(character in "\x00\x07\x1b\x7f\x9b\u202e\u2066\ud800" for character in visible(text))


@pytest.mark.parametrize("text", ["\x00", "\x1b[31m", "\u202e", "\x9b", "\u200f"])
def test_what_can_not_be_seen_is_marked(text):
    assert visible(f"a{text}b").startswith("a\ufffd")


def test_a_plan_is_a_table_in_notebooks():
    named = with_devices(made_plan(kind="sim", complete=False), lambda _, device: replace(device, name="<b>card</b>"))
    read = Reader(named._repr_html_())
    assert read.open == []
    assert "b" not in read.tags
    for text in (
        "gpu0_bsz",
        "100",
        "256",
        "512 samples per optimizer step",
        "sim:0 <b>card</b>",
        "18.0 of 24.0 GiB (75%)",
        "10,234 samples/s (simulated)",
    ):
        assert text in read.texts
    assert {
        "interrupted: the best plan so far",
        "simulated: predicted for GPUs that this machine does not have",
    } <= set(read.texts)
