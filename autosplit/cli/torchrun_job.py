"""Run an autosplit command in several processes with torchrun."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.cli.exit_code import OUTCOME_VARIABLE
from autosplit.errors import RankFailedError
from autosplit.launcher import STARTER_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def run_together(arguments: Sequence[str], num_processes: int) -> int:
    """Run an autosplit command in several processes of this machine with torchrun. Return rank 0's exit code.

    Raises:
        RankFailedError: A process ended without an exit code.
        KeyboardInterrupt: A signal arrived before rank 0 had a result.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # it repeats the errors of the processes
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with _outcome_file() as outcome:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, with a warning
        os.environ |= {OUTCOME_VARIABLE: str(outcome), STARTER_VARIABLE: str(os.getpid())}
        lost: ChildFailedError | None = None
        signalled: SignalException | None = None
        options = ["--standalone", f"--nproc-per-node={num_processes}", "--log-dir", os.devnull]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            torchrun([*options, "-m", "autosplit", *arguments])
        except SignalException as error:  # The processes got the signal, too.
            signalled = error
        except ChildFailedError as error:
            lost = error
        finally:
            del os.environ[OUTCOME_VARIABLE], os.environ[STARTER_VARIABLE]
            for number, handler in handlers.items():
                signal.signal(number, handler)  # torchrun does not restore the handlers
        text = outcome.read_text()
    if text.isdigit():
        return int(text)
    if signalled is not None:
        raise KeyboardInterrupt
    if lost is None:
        raise RankFailedError(
            f"Rank 0 of {num_processes} ended without a plan or an error. Read its output above, and check whether "
            "the workload's code exits the process."
        )
    rank, failure = _first_failure(lost.failures)
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
    raise RankFailedError(
        f"rank {rank} of {num_processes} {how} without an error message. autosplit stopped the other ranks. Read the "
        "output above, or check with dmesg whether the system ran out of memory."
    )


@contextmanager
def _outcome_file() -> Iterator[Path]:
    """Yield an empty file for rank 0's exit code.

    On Linux the file is in memory, so a process that is killed leaves no file behind.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("autosplit-outcome")
        try:
            in_memory = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            if os.access(in_memory, os.R_OK | os.W_OK):  # False if /proc is not mounted
                yield in_memory
                return
        finally:
            os.close(descriptor)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome"
        path.touch()
        yield path


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, with its failure.

    torchrun reports times in whole seconds, and the other ranks stop within 0.2 s. Among failures at the same time,
    prefer a rank that was killed, then a rank that exited, then a rank that torchrun ended by SIGTERM.
    """
    first_s = min(failure.timestamp for failure in failures.values())
    together = [(rank, failure) for rank, failure in failures.items() if failure.timestamp <= first_s + 1]
    order = {-signal.SIGTERM: 2}
    return min(together, key=lambda one: (order.get(one[1].exitcode, int(one[1].exitcode >= 0)), one[0]))
