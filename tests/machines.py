"""Two machines for tests of jobs that span several, made of this one: each has its own network, name and hosts file.

        machine-a                            machine-b
    10.77.0.1, its own loopback -- wire -- 10.77.0.2, its own loopback

Processor, disk and the numbers of processes are shared. The namespaces have no names that anything else could find:
they live as long as a process is in them. So those of another test's machines may have the same addresses, and nothing
is left behind, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Machine", "Machines", "missing", "network_of"]

_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
_SPACES = ("--net", "--uts", "--mount")
_LIMIT_S = 60


@dataclass(frozen=True)
class Machine:
    """One of the two machines.

    Attributes:
        name: Its host name.
        address: Its address on the wire.
        folder: Working folder of its commands, separate for each machine.
        holder: The process that keeps its namespaces. It ends when its standard input closes.
        started: Processes started on it.
    """

    name: str
    address: str
    folder: Path
    holder: subprocess.Popen[str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on this machine, with a separate cache. Output goes to files next to its folder.

        Args:
            *command: The program and its arguments. It becomes the returned process.
            **variables: Environment variables, in addition to the present ones.
        """
        environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": str(self.folder / "cache"), **variables}
        with self.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                self.entered(*command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        self.started.append(process)
        return process

    def entered(self, *command: str) -> list[str]:
        """Return the command that runs another command on this machine, in its folder."""
        return [*_entering(self.holder.pid), f"--wd={self.folder}", "--", *command]

    @property
    def log(self) -> Path:
        """Return the output of its commands so far."""
        return self.folder.with_suffix(".log")

    def processes(self) -> Iterator[int]:
        """List all processes on this machine, including workers of a killed torchrun."""
        own = network_of(self.holder.pid)
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and own is not None and network_of(int(path.name)) == own:
                yield int(path.name)

    def kill_all(self) -> None:
        """Kill all processes on this machine, as a crash does. The machine itself stays."""
        while others := [pid for pid in self.processes() if pid != self.holder.pid]:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # killed processes exist for a moment


class Machines:
    """Two machines, `a` and `b`. A context manager that removes them.

    Args:
        folder: For their folders, which stay.
        own_name_is_loopback: Each machine resolves its own name to 127.0.1.1, as on Debian, and the other's name
            to its address. Otherwise both resolve both names to addresses.
    """

    def __init__(self, folder: Path, *, own_name_is_loopback: bool = False) -> None:
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:  # also after a failure half-way
            addresses = {"machine-a": "10.77.0.1", "machine-b": "10.77.0.2"}
            for name in addresses:
                (folder / name).mkdir(parents=True)
                own = {name: "127.0.1.1"} if own_name_is_loopback else {}
                lines = ("127.0.0.1 localhost", *(f"{at} {host}" for host, at in {**addresses, **own}.items()))
                (folder / f"{name}.hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.a = self._made(folder, "machine-a", addresses["machine-a"], beside=None)
            self.b = self._made(folder, "machine-b", addresses["machine-b"], beside=self.a)
            _ip(self.a, f"link add wire type veth peer name wire netns {self.b.holder.pid}")
            for machine in (self.a, self.b):
                _ip(machine, f"address add {machine.address}/24 dev wire")
                _ip(machine, "link set wire up")
            self._cleanup = self._cleanup.pop_all()

    def _made(self, folder: Path, name: str, address: str, *, beside: Machine | None) -> Machine:
        """Start the process that holds a machine's namespaces."""
        ready = "mount --bind $1 /etc/hosts && hostname $2 && ip link set lo up && echo ready"
        setting = ["sh", "-c", f"{ready} && exec cat", "sh", str(folder / f"{name}.hosts"), name]
        # The second belongs to the first one's user namespace. Otherwise no wire could connect them.
        place = _own_user() if beside is None else _entering_user(beside.holder.pid)
        holder = subprocess.Popen(
            [*place, "unshare", *_SPACES, "--", *setting],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        machine = Machine(name, address, folder / name, holder)
        self._cleanup.callback(_end, machine)
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert said == "ready\n", f"{name} was not made: {said}"
        return machine

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()


def _end(machine: Machine) -> None:
    """Kill all processes on a machine, and release its namespaces."""
    machine.kill_all()
    for process in machine.started:
        process.wait()
    machine.holder.kill()
    machine.holder.communicate()


def _own_user() -> list[str]:
    """Become root of a user namespace if this process is not root, because the following commands need it."""
    return [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--"]


def _entering_user(pid: int) -> list[str]:
    return [] if os.geteuid() == 0 else ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--"]


def _entering(pid: int) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *user, *_SPACES]


def network_of(pid: int) -> str | None:
    """Return the network namespace of a process. Return None if it is gone or belongs to another user."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def _ip(machine: Machine, words: str) -> None:
    """Run iproute2 on a machine."""
    command = [*_entering(machine.holder.pid), "--", "ip", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, f"ip {words} said {done.stdout}{done.stderr}"


@functools.cache
def missing() -> str | None:
    """Return the reason why two machines cannot be made here, or None."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} on PATH; install iproute2, util-linux, mount and hostname"
    # All required commands, tried in namespaces that end with them.
    trial = "ip link add wire type veth peer name other && mount --bind /etc/hosts /etc/hosts"
    command = [*_own_user(), "unshare", *_SPACES, "--", "sh", "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode == 0:
        return None
    said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    return f"no network namespaces with a link between them: {said[0]}; be root, or allow user namespaces"
