"""Runs a program in a pseudo-terminal with key presses, and reads the final screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field

# The controlling terminal passes keys to the foreground process group.
_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
_CODES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|([\r\n\b])|([^\x1b\r\n\b]+)|(\x1b)")
CTRL_C = b"\x03"


@dataclass
class Terminal:
    """A program in a pseudo-terminal; see `opened`."""

    process: subprocess.Popen
    master: int
    columns: int
    received: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """Return the output so far, with escape codes."""
        return self.received.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait_for(self, pattern: str, timeout_s: float = 300.0) -> None:
        """Read until the output matches a pattern. Fail the test if it never does."""
        ends_s = time.monotonic() + timeout_s
        while not re.search(pattern, self.text):
            assert self._read(ends_s), f"{pattern!r} never came; what did: {self.text[-1500:]!r}"

    def end(self, timeout_s: float = 300.0) -> int:
        """Read to the end, and return the exit code."""
        ends_s = time.monotonic() + timeout_s
        while self._read(ends_s):
            pass
        code = self.process.wait(max(1.0, ends_s - time.monotonic()))
        os.close(self.master)
        return code

    def _read(self, ends_s: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, ends_s - time.monotonic()))
        if not ready:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it hangs; so far: {self.text[-1500:]!r}")
        try:
            some = os.read(self.master, 2**16)
        except OSError:  # Linux's error for a closed other end
            return False
        self.received += some
        return bool(some)

    def screen(self) -> list[str]:
        """Return the lines on the screen. Cursor movements and erasures are applied, and colours are ignored."""
        lines, row, column = [""], 0, 0
        for found in _CODES.finditer(self.text):
            parameters, code, control, letters, _ = found.groups()
            if code == "A":
                row = max(0, row - int(parameters or 1))
            elif code == "K":
                lines[row] = "" if parameters == "2" else lines[row][:column]
            elif code == "J":
                lines[row:] = [lines[row][:column]]
            elif control == "\r":
                column = 0
            elif control == "\n":
                row += 1
            elif control == "\b":
                column = max(0, column - 1)
            for letter in letters or "":
                if column == self.columns:
                    row, column = row + 1, 0
                    lines += [""] * (row + 1 - len(lines))
                lines[row] = f"{lines[row][:column]:<{column}}{letter}{lines[row][column + 1 :]}"
                column += 1
            lines += [""] * (row + 1 - len(lines))
        return [line.rstrip() for line in lines]


def opened(words: list[str], *, columns: int = 80, **variables: str) -> Terminal:
    """Start a program in a terminal.

    Args:
        words: The program and its arguments.
        columns: The terminal's width.
        variables: For its environment. COLUMNS and variables that control colour are not inherited.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-ISc", _TAKE, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**kept, "TERM": "xterm-256color", **variables},
    )
    os.close(slave)
    return Terminal(process, master, columns)
