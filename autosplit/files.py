"""Read files up to a size limit, replace them atomically, rename them, and find the folder of profiles."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from autosplit.errors import InputError, ProfileError
from autosplit.text import size_text

OWNER_ONLY = 0o600
"""Mode of a file that only its owner may read."""

READ_BY_ALL = 0o666
"""Mode of a file that others may read, before the process's umask is applied."""


class LargeFileError(OSError):
    """A file is larger than any file that autosplit writes."""


class IrregularFileError(OSError):
    """A path names a pipe, a device or a socket instead of a regular file."""


def read_bounded(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read a file that another user or program may have written.

    Raises:
        LargeFileError: The file has more than `most_bytes`.
        IrregularFileError: It is not a regular file. A pipe would block, and /dev/zero never ends.
        OSError: The file can't be read, or does not exist.
    """
    with open(path, "rb", opener=_open_regular) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise LargeFileError(f"it is larger than {size_text(most_bytes)}")
    return content


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # otherwise opening a pipe waits for a writer
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise IrregularFileError(errno.EINVAL, f"it is {_kind_of(mode)}, not a regular file", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _kind_of(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "a special file")


def what_stands_at(path: str | os.PathLike[str]) -> str | None:
    """Describe the object at a path if it prevents writing a file there. Return None if the path can be replaced."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):  # Writing the file will raise the error.
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "not a regular file"


def replace_file(path: Path, text: str, *, mode: int) -> None:
    """Replace a file atomically. A reader sees either the old or the new file.

    Args:
        path: The file, in an existing folder.
        mode: File mode before the process's umask is applied.

    Raises:
        OSError: The file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder and its missing parents with access for the owner only. An existing folder is unchanged.

    Raises:
        OSError: The folder can't be made.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def moved_aside(path: Path, suffix: str) -> Path:
    """Change the suffix of a file. An existing file with the new name is replaced.

    Raises:
        OSError: The file can't be moved.
    """
    return path.replace(path.with_suffix(suffix))


def profiles_folder() -> Path:
    """Return the folder of profiles in `AUTOSPLIT_CACHE_DIR` or the user's cache directory. It may not exist.

    Raises:
        ProfileError: The home directory is unknown.
    """
    given = os.environ.get("AUTOSPLIT_CACHE_DIR")
    with contextlib.suppress(RuntimeError):  # the home directory is unknown
        if given:
            return Path(given).expanduser().absolute() / "profiles"
        import platformdirs

        found = platformdirs.user_cache_path("autosplit", appauthor=False)
        if found.is_absolute():  # older versions of platformdirs return "~/.cache"
            return found / "profiles"
    raise ProfileError(
        f"AUTOSPLIT_CACHE_DIR is {given!r} and the home directory is unknown. Expected a folder for profiles. Set "
        "AUTOSPLIT_CACHE_DIR or HOME to a folder."
    )


def profile_with_key(digits: str) -> Path | None:
    """Return the profile whose key begins with these hexadecimal digits, or None if there is not exactly one."""
    if not digits or set(digits) - set("0123456789abcdef"):
        return None
    try:
        found = [*profiles_folder().glob(f"{digits}*.json")]
    except (OSError, ProfileError):
        return None
    return found[0] if len(found) == 1 else None


def write_for_all(path: Path, text: str, called: str = "") -> None:
    """Write a file that all users can read. On failure, raise InputError, which calls the file `called`."""
    try:
        replace_file(path, text, mode=READ_BY_ALL)
    except (OSError, ValueError) as error:  # a name with a null character raises ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{called or path} can't be written ({reason}). Choose a file in an existing folder."
        ) from error
