"""Files that others may have had their hands on: no link leads out, nothing is waited for, nothing half written."""

from __future__ import annotations

import os
import secrets
import stat

import pytest

from autosplit.files import UnfitFileError, make_private_folder, moved_aside, read_bounded, replace_file, what_stands_at


def mode_of(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


class TestReading:
    def test_a_file_up_to_the_bound(self, tmp_path):
        (tmp_path / "file").write_bytes(b"12345")
        assert read_bounded(tmp_path / "file", 5, follow_links=False) == b"12345"
        with pytest.raises(UnfitFileError, match="larger than 4 B"):
            read_bounded(tmp_path / "file", 4, follow_links=False)

    def test_a_link_where_it_may_be_one(self, tmp_path):
        (tmp_path / "file").write_bytes(b"1")
        (tmp_path / "link").symlink_to("file")
        assert read_bounded(tmp_path / "link", 5, follow_links=True) == b"1"
        with pytest.raises(UnfitFileError, match="it is a link"):
            read_bounded(tmp_path / "link", 5, follow_links=False)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices with names here")
    @pytest.mark.parametrize("follow_links", [False, True])
    def test_what_is_no_file(self, tmp_path, follow_links):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe", "/dev/zero", "/dev/null"):
            with pytest.raises(UnfitFileError, match="it is no file"):
                read_bounded(path, 5, follow_links=follow_links)

    def test_what_is_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            read_bounded(tmp_path / "nowhere", 5, follow_links=False)


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

    @pytest.mark.parametrize("target", ["own", "nowhere"])
    def test_a_temporary_file_that_somebody_made_first_is_not_written_to(self, tmp_path, monkeypatch, target):
        monkeypatch.setattr(secrets, "token_hex", lambda length: "guessed")
        (tmp_path / "own").write_text("mine")
        (tmp_path / ".file.guessed").symlink_to(tmp_path / target)
        with pytest.raises(FileExistsError):
            replace_file(tmp_path / "file", "text", mode=0o600)
        assert (tmp_path / "own").read_text() == "mine"
        assert not (tmp_path / "nowhere").exists()
        assert (tmp_path / ".file.guessed").is_symlink()


def test_folders_are_their_owners_alone(tmp_path):
    (tmp_path / "there").mkdir(mode=0o755)
    make_private_folder(tmp_path / "there" / "a" / "b")
    make_private_folder(tmp_path / "there" / "a" / "b")
    modes = [mode_of(tmp_path / "there" / name) for name in ("", "a", "a/b")]
    assert modes == [0o755, 0o700, 0o700]


@pytest.mark.parametrize("older", ["none", "file", "link", "folder", "full folder"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_in_the_way_is_moved(tmp_path, kind, older):
    own, path, aside = (tmp_path / name for name in ("own", "it.json", "it.bad"))
    own.write_text("mine")
    for what, place in ((kind, path), (older, aside)):
        if what == "file":
            place.write_text("text")
        elif what == "link":
            place.symlink_to(own)
        elif what != "none":
            place.mkdir()
    if older == "full folder":
        (aside / "something").write_text("else")
        with pytest.raises(OSError, match="not empty"):
            moved_aside(path, ".bad")
        assert (aside / "something").read_text() == "else"
        assert os.path.lexists(path)
    else:
        assert moved_aside(path, ".bad") == aside
        assert not os.path.lexists(path)
        assert (aside.is_symlink(), aside.is_dir()) == (kind == "link", kind == "folder")
    assert own.read_text() == "mine"


def test_what_is_not_to_be_replaced(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    found = {name: what_stands_at(tmp_path / name) for name in ("file", "link", "pipe", "none", "", "a\0b")}
    assert found == {
        "file": None,
        "link": "a link",
        "pipe": "no regular file",
        "none": None,
        "": "a folder",
        "a\0b": None,
    }
    assert what_stands_at("/dev/null") == "no regular file"
