"""Record why a rank failed. The launcher ends the other ranks.

Note [How a job ends]
~~~~~~~~~~~~~~~~~~~~~
autosplit does not watch other ranks. torchrun, ``srun --kill-on-bad-exit=1`` and Ray notice a process that ended, and
end the others. For example, rank 1 of three raises an error while the others are in an all-reduce over gloo:

    0.0 s  rank 1 writes its error into torchrun's error file and into the job's store (`progress`), and ends
           the system closes its connections, so the all-reduce of ranks 0 and 2 raises an error
    0.1 s  torchrun sees that rank 1 has ended, and ends ranks 0 and 2. Its report shows rank 1's traceback
    2.0 s  without torchrun, ranks 0 and 2 read rank 1's error in the store, and raise RankFailedError with it

A rank that is stopped or hangs is not noticed. The collectives of the other ranks time out, and their error names the
place of each rank (see `progress`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from autosplit.text import printable

HEAD_START_S = 2.0
"""Time in seconds until a rank raises an error for a broken collective. torchrun blames the rank that ends first."""


@contextmanager
def recorded() -> Iterator[None]:
    """Write an error of the `with` block into torchrun's error file, as `torch.distributed.elastic`'s `record` does."""
    try:
        yield
    except BaseException as error:
        if is_failure(error):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            with suppress(Exception):  # for example, the disk is full
                get_error_handler().record_exception(error)
        raise


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is an error, and not ``sys.exit(0)`` or a closed generator."""
    return not (isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0)))


def abort_group(group: Any) -> None:
    """Abort NCCL's collectives. They would block the destruction of the group. gloo ignores this (torch 2.13)."""
    with suppress(Exception):  # the error that led here is more important
        group.abort()


def print_line(text: str) -> None:
    """Print a line on stderr."""
    with suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()
