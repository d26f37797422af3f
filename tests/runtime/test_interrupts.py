from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows reports a signal only through a socket")

SETUP = """
import os, signal, sys, threading, time
from autosplit.cli.exit_code import exit_at_second_ctrl_c
from autosplit.runtime.interrupts import held_interrupts
heard = threading.Event()  # the listening thread has seen the first Ctrl-C
first = lambda: (os.write(2, FIRST), heard.set())
exit_at_second_ctrl_c(lambda: 4 if os.write(1, b"left ") else 0, first=first, apart_s=APART)
def interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        print("once", end=" ", flush=True)
"""


def run(body, *, apart_s=0.0, first=b""):
    code = SETUP.replace("APART", str(apart_s)).replace("FIRST", repr(first)) + body
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_first_is_pythons_and_the_second_ends_it_in_whatever_it_is():
    """This code holds Ctrl-C back. No handler gets the second one."""
    done = run(
        "interrupted()\n"
        "with held_interrupts():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(50)\nprint('not this')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, "once left ", "")


def test_the_first_is_told_of_at_once_although_it_is_held_back():
    body = (
        "try:\n    with held_interrupts():\n        os.kill(os.getpid(), signal.SIGINT)\n        heard.wait()\n"
        "        os.write(2, b' held')\n"
        "except KeyboardInterrupt:\n    print('once')"
    )
    done = run(body, first=b"told")
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "told held")


def test_one_that_was_held_back_is_one():
    body = (
        "try:\n    with held_interrupts():\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    heard.wait()\n    time.sleep(0.5)\n    print('once')"
    )
    done = run(body)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_two_of_one_key_are_one_and_a_forks_are_its_own():
    body = (
        "interrupted()\ninterrupted()\n"
        "if os.fork() == 0:\n    interrupted()\n    interrupted()\n    os._exit(0)\n"
        "os.wait()\ntime.sleep(0.3)\nprint('done')"
    )
    done = run(body, apart_s=30)
    assert (done.returncode, done.stdout.split()) == (0, ["once"] * 4 + ["done"]), done.stderr
