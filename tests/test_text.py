"""Printed text is visible and harmless: no escape sequences, overrides, extra lines or passwords."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from handmade import made_plan
from harmless import HOSTILE, assert_harmless
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from rich.console import Console

from autosplit.cli.check_report import print_checks
from autosplit.cli.main import main
from autosplit.cli.terminal import progress_bar
from autosplit.ddp.find_plan import plan_for_job
from autosplit.errors import DeviceError
from autosplit.plan.record import with_devices
from autosplit.probe.check_result import Check
from autosplit.text import LONGEST, listed, printable, printable_json, shortened, without_passwords
from autosplit.tools.devices_command import print_devices
from autosplit.tools.inventory import DeviceReport
from autosplit.tuning.progress import Progress


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ein Gerät — “größer” 卡", "ein Gerät — “größer” 卡"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("one\r\ntwo", r"one\r\ntwo"),
        ("ab\u202edc", r"ab\u202edc"),
        ("[bold]", "[bold]"),
    ],
)
def test_a_text_shows_itself(text, shown):
    assert printable(text) == shown


@given(st.text())
def test_any_text_is_harmless(text):
    assert_harmless(printable(text), lines=False)
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(("count", "said"), [(1, "a"), (3, "a, b, c"), (4, "a, b and 2 more")])
def test_a_single_one_more_is_named(count, said):
    """``and 1 more`` was as long as the name itself."""
    assert listed("abcde"[:count], 2) == said


def test_of_a_long_text_both_ends_are_shown():
    shown = printable("a" * 10**6 + "z")
    assert len(shown) == LONGEST
    assert shown.startswith("aaa")
    assert shown.endswith("aaz")
    assert printable("a" * 10**5, longest=None) == "a" * 10**5


@given(st.dictionaries(st.text(), st.text() | st.integers()))
def test_json_means_the_same_and_is_harmless(value):
    text = printable_json(json.dumps(value, indent=2, ensure_ascii=False))
    assert json.loads(text) == value
    assert_harmless(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mysql://ann:secret@host/db", "mysql://ann:***@host/db"),
        ("postgresql+psycopg2://ann:s/e:c@ret@host:5432/db", "postgresql+psycopg2://ann:***@host:5432/db"),
        ("(at 'mysql://ann:secret@host/db')", "(at 'mysql://ann:***@host/db')"),
        ("mysql://host/db?ssl_key_password=a;auth_token=b", "mysql://host/db?ssl_key_password=***;auth_token=***"),
        ("https://host:8080/page, a@b", "https://host:8080/page, a@b"),
    ],
)
def test_passwords_are_masked(text, shown):
    assert without_passwords(text) == shown
    assert without_passwords(shown) == shown


# Who prints


def printed(draw) -> str:
    stream = io.StringIO()
    draw(Console(file=stream, width=120, force_terminal=False, color_system=None, highlight=False))
    return stream.getvalue()


def hostile_check() -> Check:
    return Check(HOSTILE, 0.5, None, depends=True, advice=HOSTILE, remark=HOSTILE)


def test_cards_and_checks():
    hidden = DeviceReport(None, None, HOSTILE, *(None,) * 3, uuid=HOSTILE, visible=False, notes=(HOSTILE,))
    assert_harmless(printed(lambda console: print_devices([hidden], [HOSTILE], console)))
    assert_harmless(printed(lambda console: print_checks([hostile_check()], console)))


def test_a_progress_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar() as tell:
        assert tell is not None
        tell(Progress("search", "trial \x1b]0;owned\x07", 0.5))
    assert "\x1b]0;owned" not in stream.getvalue()


def test_errors_that_name_a_plans_devices():
    text = HOSTILE.replace("\ud800", "")
    hostile = with_devices(made_plan((100, 156), kind="sim"), lambda _, device: replace(device, name=text))
    with raises(DeviceError) as wrapping:
        hostile.wrap(None)
    with raises(DeviceError) as launching:
        plan_for_job(hostile)
    assert_harmless(str(wrapping.value), lines=False)
    assert_harmless(str(launching.value), lines=False)


class TestCommands:
    def test_an_error_that_names_a_file(self, tmp_path, capsys):
        assert main(["show", str(tmp_path / "a\x1b[2Jb\u202e.json")]) == 2
        assert_harmless(capsys.readouterr().err)

    @pytest.mark.parametrize("arguments", [("show", "x" * 5000), ("tune", "x" * 5000)])
    def test_a_name_that_no_file_can_have(self, arguments, capsys):
        assert main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert "longer than a file name can be. Correct" in line

    def test_what_the_users_code_raises(self, tmp_path, capsys):
        path = tmp_path / "train.py"
        path.write_text("raise RuntimeError('mysql://ann:secret@host \\x1b[2J\\x9b')  # \x9b mysql://ann:secret@host\n")
        assert main(["tune", str(path)]) == 5
        err = capsys.readouterr().err
        assert_harmless(err)
        assert "mysql://ann:***@host" in err
        assert "secret" not in err

    def test_the_line_of_launch(self, tmp_path, capsys):
        path = tmp_path / "plan.json"
        made_plan((100, 156), kind="cpu").save(path)
        assert main(["launch", "--plan", str(path), "--print", "train\x1b[2J.py"]) == 0
        assert_harmless(capsys.readouterr().out)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["://:" * 30_000, "?" + "pass" * 30_000, "aaaa://" * 20_000])
def test_a_text_made_to_take_long_takes_no_time(text):
    assert len(without_passwords(text)) <= LONGEST


@pytest.mark.parametrize("longest", [0, 4, 40, 502, 503, 4000])
def test_a_shortened_text_is_never_longer(longest):
    """Below 503 characters a negative slice kept nearly all of a text of 100,000."""
    text = "".join(map(str, range(30_000)))
    short = shortened(text, longest)
    assert len(short) == longest
    if longest > 4:
        kept = short.split("...")
        assert text.startswith(kept[0])
        assert text.endswith(kept[1])
    assert shortened("short", 5) == "short"
