"""Files that others may have had their hands on: read with a bound, written for the owner alone, moved out of the way.

No link is followed where it could lead out of a folder of ours, nothing is waited for, and a file that is replaced is
the old one or the new one, whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from autosplit.text import size_text

__all__ = [
    "OWNER_ONLY",
    "READ_BY_ALL",
    "UnfitFileError",
    "make_private_folder",
    "moved_aside",
    "read_bounded",
    "replace_file",
]

OWNER_ONLY = 0o600
"""The mode of a file that concerns nobody else."""

READ_BY_ALL = 0o666
"""The mode of a file that is made to be handed on, less what the process's mask takes away."""

_OWNER_ONLY_FOLDER = 0o700


class UnfitFileError(OSError):
    """What is there is no file of a fit size: a folder, a pipe, a device, a link, or too much."""


def read_bounded(path: str | os.PathLike[str], most_bytes: int, *, follow_links: bool) -> bytes:
    """Read a regular file; a pipe is not waited for, and a device not read.

    Args:
        path: The file.
        most_bytes: What is larger is not read.
        follow_links: Whether a link may stand in its place, as where the user named it.

    Raises:
        UnfitFileError: It is none, or too large; the message says which.
        OSError: It can't be read, or is not there.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        if os.path.islink(path):  # noqa: PTH114 - where a link may not be asked for, opening it says why
            raise UnfitFileError("it is a link")
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - opening a device may do something
        raise UnfitFileError("it is no file")
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnfitFileError("it is no file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnfitFileError(f"it is larger than {size_text(most_bytes)}")
    return content


def what_stands_at(path: str | os.PathLike[str]) -> str | None:
    """Say what is in the place of a file that is to be written, where that is not one that may be replaced.

    Args:
        path: The file.

    Returns:
        ``"a folder"``, ``"a link"`` or ``"no regular file"``; None where there is a regular file, or nothing.
    """
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):  # writing it will say what is wrong with it
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "no regular file"


def replace_file(path: Path, text: str, *, mode: int) -> None:
    """Write a file by atomic replacement: a reader sees the old one or the new one. A link there is replaced itself.

    Args:
        path: Its folder has to be there.
        text: What it is to hold.
        mode: Less what the process's mask takes away.

    Raises:
        OSError: It can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Never a file that is there: somebody may have put a link where it leads elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, with those above it that are missing; one that is there stays.

    Raises:
        OSError: It can't be made.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=_OWNER_ONLY_FOLDER, exist_ok=True)


def moved_aside(path: Path, suffix: str) -> Path:
    """Give what is at a path another suffix, unread; a file of that name is replaced, and a link is itself moved.

    Args:
        path: A file, a link, a folder or anything else.
        suffix: With its dot.

    Returns:
        The new path.

    Raises:
        OSError: It can't be moved: the folder may not be written, or a folder that is not empty has that name.
    """
    aside = path.with_suffix(suffix)
    try:
        path.replace(aside)
    except (IsADirectoryError, NotADirectoryError):  # a file and a folder don't replace each other
        if aside.is_dir() and not aside.is_symlink():
            aside.rmdir()
        else:
            aside.unlink()
        path.replace(aside)
    return aside
