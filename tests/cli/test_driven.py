"""The command line in a pseudo-terminal with key presses. See `terminals`."""

from __future__ import annotations

import re
import sys
import time

import pytest
from handmade import made_plan

from autosplit.plan.plan import Plan
from autosplit.profiles.store import profile_paths, store

pytest.importorskip("termios", reason="there are no pseudo-terminals on this system")

from terminals import CTRL_C, opened

pytestmark = pytest.mark.slow

AUTOSPLIT = [sys.executable, "-m", "autosplit"]
HEAD = "import time, torch, autosplit\n"
SLOW = f"""{HEAD}
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)
workload = autosplit.Workload(Net(3, 1), torch.randn(4, 3))
"""
STUBBORN = f"""{HEAD}
class Net(torch.nn.Linear):
    def forward(self, x):
        print("here", flush=True)
        while True:
            try:
                time.sleep(100)
            except KeyboardInterrupt:
                pass
workload = autosplit.Workload(Net(3, 1), torch.randn(4, 3))
"""
BAR = re.compile(r"\d:\d\d:\d\d")


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    return write


def gone(terminal):
    """Return whether the bar is gone and the cursor is visible."""
    last_cursor = re.findall(r"\x1b\[\?25([hl])", terminal.text)[-1:]
    return not any(BAR.search(line) for line in terminal.screen()) and last_cursor == ["h"]


def test_60_columns_with_progress_a_log_and_one_ctrl_c(script):
    """It stops with the best plan so far. Lines wider than the terminal are for copying: a path or Python code."""
    flags = ["--devices", "cpu:8MiB,cpu:4MiB", "--effective-batch-size", "64", "--no-isolate", "--verbose"]
    terminal = opened([*AUTOSPLIT, "tune", script(SLOW), *flags], columns=60)
    terminal.wait_for(r"steps, [\d,]+/s")
    terminal.press(CTRL_C)
    assert terminal.end() == 4
    (path,) = profile_paths()
    assert not Plan.load(path).complete
    assert "Traceback" not in terminal.text
    assert "building the model" in terminal.text
    assert re.search(r"probing device 1 of 2", terminal.text)
    assert re.search(r"\d+ ?% +\d+ steps", terminal.text)
    assert gone(terminal)
    screen = terminal.screen()
    said = " ".join(line.strip() for line in screen)
    assert "error: The search was interrupted. The best plan so far is shown and saved as" in said
    assert "interrupted: the best plan so far" in screen
    assert re.search(r" \d+\.\d\d s  trial 0, split \(", said)
    # Lines that the terminal had to break are lines to copy.
    printed = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", terminal.text).replace("\r", "\n").splitlines()
    wide = [line.strip() for line in printed if len(line.rstrip()) > 60]
    allowed = (str(path), "next", "more")
    assert all(line.startswith(allowed) for line in wide), wide


def test_ctrl_c_twice_leaves_at_once(script):
    """Independent of the workload's own handling."""
    terminal = opened([*AUTOSPLIT, "tune", script(STUBBORN), "--devices", "cpu:8MiB", "--no-isolate"])
    terminal.wait_for("here")
    terminal.press(CTRL_C)
    terminal.wait_for("Stopping with the best plan so far, if any. Press Ctrl-C again to exit.")
    time.sleep(0.5)  # signals that arrive closer together count as one key press
    terminal.press(CTRL_C)
    assert terminal.end() == 4
    assert "Traceback" not in terminal.text
    assert gone(terminal)


def test_pipes_and_what_the_environment_asks_for(tmp_path, cache_dir):
    """One shell for all cases, because each case starts a process."""
    store("ab" * 16, made_plan((100, 156), kind="sim"))
    made_plan((100, 156)).save(tmp_path / "plan.json")
    plan = tmp_path / "plan.json"
    one = f"{sys.executable} -m autosplit"
    lines = [
        f"{one} show {plan} | head -1; echo head ${{PIPESTATUS[0]}} end",
        f"{one} show {plan} | cat; echo cat ${{PIPESTATUS[0]}} end",
        f"{one} show {plan} --json | head -c 1; echo; echo json ${{PIPESTATUS[0]}} end",
        f"{one} profiles; echo colour $? end",
        f"NO_COLOR=1 {one} show abab; echo plain $? end",
        f"TERM=dumb {one} profiles; echo dumb $? end",
        f"COLUMNS=60 {one} profiles | cat; echo narrow $? end",
        f"FORCE_COLOR=1 {one} show abab | cat; echo forced $? end",
    ]
    terminal = opened(["bash", "-c", "\n".join(lines)], columns=120)
    assert terminal.end() == 0
    texts = dict(
        zip(
            ("head", "cat", "json", "colour", "plain", "dumb", "narrow", "forced"),
            re.split(r"\w+ 0 end\r\n", terminal.text),
            strict=False,
        )
    )
    assert len(texts) == 8, terminal.text
    assert "Traceback" not in terminal.text
    assert texts["head"].count("\r\n") == 1
    assert texts["json"] == "{\r\n"
    for name in ("head", "cat", "json", "dumb", "narrow"):
        assert "\x1b" not in texts[name], name
    assert "\x1b[1m" in texts["colour"]
    assert "\x1b[33m" in texts["forced"]
    assert "\x1b[33m" not in texts["plain"]
    assert "simulated" in texts["plain"]
    assert max(map(len, texts["narrow"].splitlines())) <= 60
    assert max(map(len, texts["dumb"].splitlines())) > 60


def test_removing_all_profiles_asks_first():
    store("ab" * 16, made_plan())
    store("cd" * 16, made_plan())
    words = [*AUTOSPLIT, "profiles", "remove", "--all"]
    refused = opened(words)
    refused.wait_for(r"remove 2 profiles in .*\? \[y/N\] ")
    refused.press(b"\n")
    assert refused.end() == 2
    assert len(profile_paths()) == 2
    agreed = opened(words)
    agreed.wait_for(r"\[y/N\] ")
    agreed.press(b"y\n")
    assert agreed.end() == 0
    assert not profile_paths()
