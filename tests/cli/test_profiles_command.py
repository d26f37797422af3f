from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import made_plan

from autosplit.cli.main import main
from autosplit.profiles.store import profile_paths, profiles_folder, store

AB, CD = "ab" * 16, "cd" * 16
WORKLOAD = {"model": "train.Net", "parameters": 7_250_000_000}
REQUEST = {
    "devices": ["cuda:0"],
    "strategy": "auto",
    "reserve": None,
    "effective_batch_size": [256, 512],
    "name": "x y",
}


@pytest.fixture
def stored(monkeypatch):
    """Two profiles, the older one with a name, and an unreadable file."""
    monkeypatch.setenv("COLUMNS", "200")
    paths = {
        AB: store(AB, made_plan((100, 156), workload=WORKLOAD, request=REQUEST, complete=False)),
        CD: store(CD, made_plan((300,), kind="sim")),
        "ef": profiles_folder() / f"{'ef' * 16}.json",
    }
    paths["ef"].write_text("{}")
    for age_s, path in zip((3 * 3600, 90, 10), paths.values(), strict=True):
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return paths


def listed(capsys, *words):
    assert main(["profiles", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("words", [(), ("list",)])
def test_a_line_for_each_the_newest_first(stored, capsys, words):
    heading, _, *lines = [line for line in listed(capsys, *words).splitlines() if line]
    unbroken = [line for line in lines if not line.startswith("   ")]
    assert heading.split() == ["key", "name", "model", "devices", "asked", "for", "plan", "age", "notes"]
    assert [line.split()[0] for line in unbroken] == ["efefefefefef", "cdcdcdcdcdcd", "abababababab"]
    unreadable, simulated, named = unbroken
    assert "can't be read: it is not a plan" in unreadable
    assert simulated.split()[-3:] == ["2", "min", "simulated"]
    for said in (
        "x y",
        "Net, 7.25 billion parameters",
        "2x cuda RTX 3090",
        "effective_batch_size 256:512   ",
        "split (100, 156), 2 steps, 10,234 samples/s",
        "3 h     incomplete",
    ):
        assert said in named


def test_nothing_is_remembered(capsys):
    out = listed(capsys).replace("\n", " ")
    assert out == f"The folder {profiles_folder()} has no profile. Make a profile with autosplit tune FILE. "
    assert json.loads(listed(capsys, "--json")) == {"folder": str(profiles_folder()), "profiles": []}


def test_as_json(stored, capsys):
    unreadable, simulated, named = json.loads(listed(capsys, "list", "--json"))["profiles"]
    assert named["request"] == {name: REQUEST[name] for name in ("devices", "strategy", "effective_batch_size")}
    assert (named["name"], named["model"], named["split"]) == ("x y", "train.Net", [100, 156])
    assert (named["complete"], simulated["simulated"]) == (False, True)
    assert unreadable["problem"].startswith("it is not a plan")
    assert unreadable["split"] == []


def test_remove_says_what(stored, capsys):
    assert listed(capsys, "remove", "cd", "ef", "cdcd") == f"removed {stored[CD]}\nremoved {stored['ef']}\n"
    assert profile_paths() == (stored[AB],)


def test_nothing_is_removed_unless_all_are_found(stored, capsys):
    assert main(["profiles", "remove", "ab", "12"]) == 2
    assert "There is no plan '12'." in capsys.readouterr().err
    assert len(profile_paths()) == 3


def left_by(key):
    """Other files that belong to a profile. autosplit 0.2 left locks."""
    folder = profiles_folder()
    (folder / f"{key}.tuning.lock").touch()
    (folder / f"{key}.bad").write_text("{")
    (folder / f".{key}.json.0123").write_text("half a pl")


def beside(key):
    return sorted(path.name.replace(key, "KEY") for path in profiles_folder().iterdir() if key in path.name)


def test_what_stands_beside_goes_along(stored, capsys):
    """Locks and files that were moved aside were never removed."""
    for key in (AB, CD):
        left_by(key)
    listed(capsys, "remove", "ab")
    assert beside(AB) == []
    assert len(beside(CD)) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Neither a key nor --all is given. Write autosplit profiles remove KEY"),
        (["--all"], "--all removes 3 profiles in"),
        (["../../secret"], "There is no plan '../../secret'."),
    ],
)
def test_what_is_not_removed(stored, capsys, words, said):
    assert main(["profiles", "remove", *words]) == 2
    assert said in capsys.readouterr().err
    assert len(profile_paths()) == 3


def test_nothing_outside_the_cache_is_removed(stored, capsys, tmp_path):
    """The command removes no target of a link, no folder and no file with another name."""
    outside = tmp_path / "mine.json"
    outside.write_text("mine")
    link, folder, other = (
        profiles_folder() / name for name in (f"{'12' * 16}.json", f"{'34' * 16}.json", "notes.json")
    )
    link.symlink_to(outside)
    folder.mkdir()
    (folder / "inside").write_text("mine")
    other.write_text("mine")
    assert main(["profiles", "remove", "--all", "--yes"]) == 2
    out, err = capsys.readouterr()
    assert f"removed {link}\n" in out
    assert "can't be deleted" in err or "is not called as a profile is" in err
    assert set(profile_paths()) == {folder}
    assert other.read_text() == "mine"
    assert outside.read_text() == "mine"
    assert (folder / "inside").exists()


def test_a_file_that_is_not_called_as_a_profile_is_not_listed(capsys):
    path = store("ab" * 16, made_plan())
    path.with_name("abc\x1b]0;evil\x07.json").write_bytes(path.read_bytes())
    assert main(["profiles", "--json"]) == 0
    assert [one["key"] for one in json.loads(capsys.readouterr().out)["profiles"]] == ["ab" * 16]


@pytest.mark.whole
def test_the_newest_is_one_of_a_search_that_ended(capsys):
    store("ab" * 16, made_plan())
    store("cd" * 16, replace(made_plan(), complete=False))
    assert main(["export", "--to", "env"]) == 0
    assert capsys.readouterr().err.startswith("plan: abababababab (")


@pytest.mark.parametrize("written_s", [1e15, -1e13])
def test_a_file_of_a_time_that_no_calendar_has_is_listed(capsys, monkeypatch, written_s):
    path, true_stat = store("ab" * 16, made_plan()), Path.lstat

    def lstat(self):
        status = true_stat(self)
        return os.stat_result((*status[:7], written_s, written_s, written_s)) if self == path else status

    monkeypatch.setattr(Path, "lstat", lstat)
    assert main(["profiles"]) == 0
    assert "?" in capsys.readouterr().out
    assert main(["profiles", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["profiles"]
    assert (one["saved_at"], one["age_s"], one["problem"]) == (None, None, None)
