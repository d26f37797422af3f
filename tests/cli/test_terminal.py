from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading

import pytest

from autosplit.cli import terminal as terminals
from autosplit.cli.terminal import clean_stdout, progress_bar, show_stopping
from autosplit.tuning.tune import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A stderr that is a terminal of 80 columns."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def drawn_bar(stream, progress):
    with contextlib.redirect_stderr(stream), progress_bar() as tell:
        tell(progress)
    return stream.getvalue()


def test_the_bar_says_what_is_done_and_what_was_found(terminal):
    text = drawn_bar(terminal, Progress("search", "trial 3 of 24", 0.5, steps=31, ooms=1, best_samples_per_s=1234.56))
    assert "trial 3 of 24" in text
    assert "31 steps, 1 OOM, best 1,235/s" in text
    assert "\x1b[" in text
    assert text.rstrip().endswith("\x1b[2K")  # the line disappears at the end


def test_without_a_terminal_each_stage_of_a_long_run_is_a_line(capsys, monkeypatch):
    """Logs showed nothing for minutes."""
    with progress_bar() as tell:
        tell(Progress("tracing", "tracing the model", 0.06))
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(terminals, "SILENT_S", 0.0)
        tell(Progress("search", "searching, trial 1", 0.624))
        tell(Progress("search", "searching, trial 2", 0.7))
        tell(Progress("done", "done", 1.0))
    assert capsys.readouterr() == ("", " 62%  searching, trial 1\n")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_after_ctrl_c_a_bar_says_what_comes_of_it(terminal, monkeypatch, columns):
    """The bar continued as if Ctrl-C had not been pressed, so users pressed it again."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(terminals, "_stopping", threading.Event())
    show_stopping()
    text = drawn_bar(terminal, Progress("search", "trial 3 of 24", 0.5, steps=31))
    said = "Stopping with the best plan so far, if any. Press Ctrl-C again to exit."
    assert said in " ".join(re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text).split())
    assert "31 steps" not in text


def test_what_is_written_meanwhile_goes_to_stderr(capfd):
    with clean_stdout():
        sys.stdout.write("by print\n")
        os.write(1, b"by C\n")
        subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)
    sys.stdout.write("the answer\n")
    out, err = capfd.readouterr()
    assert out == "the answer\n"
    assert sorted(err.splitlines()) == ["by C", "by a child", "by print"]
