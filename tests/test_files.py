"""Files: nothing too large is read, and no file is left incomplete."""

from __future__ import annotations

import os
import stat

import pytest

from autosplit.files import LargeFileError, read_bounded, replace_file, what_stands_at


def mode_of(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_file_up_to_the_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(LargeFileError, match="larger than 4 B"):
        read_bounded(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "nowhere", 5)


class TestWriting:
    def test_with_its_mode(self, tmp_path):
        for mode in (0o600, 0o644):
            replace_file(tmp_path / "file", "“text”", mode=mode)
            assert (tmp_path / "file").read_text(encoding="utf-8") == "“text”"
            assert mode_of(tmp_path / "file") == mode
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_link_in_its_place_is_replaced(self, tmp_path):
        (tmp_path / "own").write_text("mine")
        (tmp_path / "file").symlink_to("own")
        replace_file(tmp_path / "file", "text", mode=0o600)
        assert not (tmp_path / "file").is_symlink()
        assert (tmp_path / "own").read_text() == "mine"


def test_what_is_not_to_be_replaced(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    found = {name: what_stands_at(tmp_path / name) for name in ("file", "link", "pipe", "none", "", "a\0b")}
    assert found == {
        "file": None,
        "link": "a link",
        "pipe": "not a regular file",
        "none": None,
        "": "a folder",
        "a\0b": None,
    }
    assert what_stands_at("/dev/null") == "not a regular file"
