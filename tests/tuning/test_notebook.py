from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import types

import pytest
from pages import Reader

from autosplit.tuning import progress as notebook
from autosplit.tuning.progress import Progress, notebook_bar, progress_listener


class Screen:
    """A fake of IPython in a notebook. It records displayed and updated objects."""

    def __init__(self, kernel=True):
        self.drawn = []
        screen = self
        self.shell = types.SimpleNamespace(kernel=object()) if kernel else types.SimpleNamespace()

        class Handle:
            def update(self, shown):
                screen.drawn.append(("update", shown))

        def display(shown, display_id):
            assert display_id
            screen.drawn.append(("display", shown))
            return Handle()

        self.display = types.SimpleNamespace(HTML=lambda text: text, display=display)

    def get_ipython(self):
        return self.shell


def test_outside_of_notebooks_there_is_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_bar() is None
    monkeypatch.setitem(sys.modules, "IPython", Screen(kernel=False))
    assert notebook_bar() is None, "IPython in a terminal"


def test_it_is_drawn_in_its_own_place(monkeypatch):
    screen = Screen()
    monkeypatch.setitem(sys.modules, "IPython", screen)
    monkeypatch.setattr(notebook, "SHORTEST_S", 0.0)
    bar = notebook_bar()
    assert screen.drawn == [], "an answer from a profile needs no bar"
    bar(Progress("search", "<b>trial</b> 1", 0.5, 3, 1, 1234.5))
    bar(Progress("done", "done", 1.0, 9, 1, 1234.5))
    assert [how for how, _ in screen.drawn] == ["display", "update"]
    read = Reader(screen.drawn[0][1])
    assert read.open == []
    assert "b" not in read.tags
    assert ("progress", "value", "0.500") in read.attributes
    assert "<b>trial</b> 1" in "".join(read.texts)
    assert "3 steps, 1 OOM, best 1,234 samples/s, 0 s" in "".join(read.texts)


CELL = """
import torch, autosplit
model = torch.nn.Linear(8, 8)
autosplit.tune(model, torch.randn(4, 8), devices="sim:2xRTX3090", effective_batch_size=16, n_trials=2, profile="off")
"""


# In a separate process, because a Jupyter client leaves resources open that would warn in the next test.
RUN = """
import sys, nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
manager = AsyncKernelManager()
manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.stdin.read())])
NotebookClient(book, km=manager, timeout=400).execute()
print(nbformat.writes(book))
"""


@pytest.mark.slow
def test_a_real_kernel_shows_the_bar_and_the_plan():
    for needed in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}, of the extra dev")
    done = subprocess.run([sys.executable, "-c", RUN], input=CELL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)["cells"][0]["outputs"]
    bars = ["".join(one["data"]["text/html"]) for one in outputs if one["output_type"] == "display_data"]
    assert len(bars) == 1, "drawn in its own place"
    assert 'value="1.000"' in bars[0], "and kept as it ended"
    (result,) = (one for one in outputs if one["output_type"] == "execute_result")
    assert "<strong>autosplit plan</strong>" in "".join(result["data"]["text/html"])
    assert not [one for one in outputs if one["output_type"] == "error"]


def test_a_fraction_never_falls_and_stages_follow_each_other():
    """A first tuning showed "starting" for most of its first half minute."""
    told: list[Progress] = []
    tell = notebook.never_falling(told.append)
    stages = ("building", "preparing", "checks", "ceilings", "times", "search", "confirming", "done")
    for stage in stages:
        for share in (0.0, 0.5, 7.0):
            tell(Progress(stage, stage, notebook.fraction_of(stage, share)))
    fractions = [part.fraction for part in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    shares = [notebook.searched_share(done, 24) for done in range(25)]
    assert shares == sorted(shares)
    assert (shares[0], shares[4], shares[24]) == (0.0, 0.5, 1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 2


def on_a_terminal(monkeypatch) -> Terminal:
    """Not a fixture: pytest would replace a stderr that was set before the test."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(notebook, "SHORTEST_S", 0.0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _number: os.terminal_size((40, 24)))
    monkeypatch.setenv("TERM", "xterm")
    return sys.stderr


def test_on_a_terminal_a_script_gets_a_line_that_is_gone_at_the_end(monkeypatch):
    """A tuning from Python showed nothing for a minute."""
    terminal = on_a_terminal(monkeypatch)

    def tuned():
        with progress_listener(None) as heard:
            heard(Progress("search", "searching, trial 2", 0.5, 3, 1, 1234.5))
            heard(Progress("search", "searching, trial 3\x1b[31m of very many that there may be", 0.6))
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        tuned()
    first, second, last = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert first == " 50%  searching, trial 2 (3 steps, 1 OO"
    assert second.startswith(" 60%  searching, trial 3")
    assert "\x1b" not in second
    assert last == ""


@pytest.mark.parametrize("why", ["given", "no terminal", "dumb", "another rank"])
def test_else_nothing_is_drawn(monkeypatch, why):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setattr(Terminal, "isatty", lambda _self: why != "no terminal")
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm")
    monkeypatch.setenv("RANK", "1" if why == "another rank" else "0")
    told = []
    with progress_listener(told.append if why == "given" else None) as heard:
        assert (heard is None) == (why != "given")
        if heard is not None:
            heard(Progress("search", "searching", 0.5))
    assert terminal.getvalue() == ""
    assert len(told) == (why == "given")
