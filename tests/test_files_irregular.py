"""Pipes, devices and folders instead of files raise a clear error immediately. Reading them blocked or never ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from raised import raises

from autosplit.errors import InputError

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.fixture(params=["it is a pipe, not a regular file", "it is a device, not a regular file", "Is a directory"])
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    path = tmp_path / "irregular"
    if "pipe" in request.param:
        os.mkfifo(path)
    elif "directory" in request.param:
        path.mkdir()
    else:
        path = Path("/dev/zero")
    return request.param, path


def test_as_a_plan(irregular: tuple[str, Path]) -> None:
    from autosplit import Plan

    what, path = irregular
    with raises(InputError, str(what)):
        Plan.load(path)


def test_as_lengths(irregular: tuple[str, Path]) -> None:
    from autosplit.tools.padded_length import lengths_in

    what, path = irregular
    with raises(InputError, str(what)):
        lengths_in(str(path))


def test_as_the_catalog_of_gpus(irregular: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from autosplit.devices.catalog import gpu_catalog

    what, path = irregular
    monkeypatch.setenv("AUTOSPLIT_GPUS", str(path))
    with raises(InputError, str(what)):
        gpu_catalog()


def test_as_a_profile(irregular: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The profile is ignored with a note, and not removed."""
    from autosplit.profiles import store
    from autosplit.profiles.key import ProfileKey

    what, path = irregular
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "profiles"
    folder.mkdir(parents=True)
    (folder / "ab.json").symlink_to(path)
    found = store.find("ab", ProfileKey({"devices": []}, {}, {}))
    assert found.plan is None
    assert f"{what}" in str(found.notes[0])
