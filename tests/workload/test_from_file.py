from __future__ import annotations

import pickle
import sys
import textwrap

import pytest
from raised import raises

from autosplit.errors import InputError, UserCodeError
from autosplit.workload.from_file import Loaded, load_workload, split_spec
from autosplit.workload.workload import Workload

HEAD = "import torch, autosplit\n"
MADE = "autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3))"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """Undo the effects of loading on the process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in _loaded():
        del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.startswith(("autosplit_file_", "own_package"))]


@pytest.fixture
def write(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("train.py", ("train.py", "workload")),
        ("a/train.py:small", ("a/train.py", "small")),
        ("package.module", ("package.module", "workload")),
        ("package.module:small", ("package.module", "small")),
        (r"C:\train.py", (r"C:\train.py", "workload")),
        (r"C:\train.py:small", (r"C:\train.py", "small")),
    ],
)
def test_specs_are_split(spec, parts):
    assert split_spec(spec) == parts


def test_a_function_is_returned_uncalled(write):
    path = write(f"{HEAD}calls = []\ndef workload(scale=1):\n    calls.append(scale)\n    return {MADE}")
    function = load_workload(path)
    module = next(m for name, m in sys.modules.items() if name.startswith("autosplit_file_"))
    assert module.calls == []
    assert isinstance(function(), Workload)
    assert module.calls == [1]


def test_the_file_is_not_main_and_its_classes_pickle(write):
    path = write(f"""\
        import torch, autosplit
        from dataclasses import dataclass
        assert __name__ != "__main__"
        @dataclass
        class Settings:
            width: int = 3
        settings = Settings()
        workload = {MADE}
        """)
    load_workload(path)
    module = next(m for name, m in sys.modules.items() if name.startswith("autosplit_file_"))
    assert pickle.loads(pickle.dumps(module.settings)) == module.settings


def test_the_file_imports_its_neighbours_also_later(write):
    write("WIDTH = 3", "own_package_neighbour.py")
    write("", "own_package_late.py")
    path = write(f"""\
        import torch, autosplit
        import own_package_neighbour
        def workload():
            import own_package_late
            return {MADE}
        """)
    assert isinstance(load_workload(path)(), Workload)


@pytest.mark.parametrize("value", [MADE, f"lambda: {MADE}"])
def test_what_was_loaded_travels_as_its_spec(write, tmp_path, monkeypatch, value):
    path = write(f"{HEAD}class Net(torch.nn.Linear): ...\nsmall = {value.replace('torch.nn.Linear', 'Net')}")
    monkeypatch.chdir(tmp_path)
    loaded = load_workload("train.py:small")
    loaded = loaded if isinstance(loaded, Loaded) else Loaded("train.py:small", loaded)
    assert loaded.spec == f"{path}:small"
    sent = pickle.dumps(loaded)
    assert b"Net" not in sent
    monkeypatch.chdir("/")
    arrived = pickle.loads(sent)
    assert isinstance(arrived() if isinstance(arrived, Loaded) else arrived, Workload)


def test_a_file_runs_afresh_each_time(write):
    path = write(f"{HEAD}first = {MADE}")
    load_workload(f"{path}:first")
    write(f"{HEAD}second = {MADE}  # of another length")
    assert isinstance(load_workload(f"{path}:second"), Workload)


def test_a_module_is_imported_from_the_current_folder(write, tmp_path, monkeypatch):
    write("", "own_package/__init__.py")
    write(f"{HEAD}workload = {MADE}", "own_package/train.py")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_workload("own_package.train"), Workload)
    assert isinstance(load_workload("own_package.train:workload"), Workload)


# Files that cannot be loaded


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("chargpt.py", "has char_gpt.py"),
        ("exmples/train.py", "Did you mean"),
        ("none/at_all.py", "Check the path"),
        ("examples", "has train.py"),
        ("notes.txt", "has char_gpt.py"),
    ],
)
def test_a_path_that_is_no_python_file_is_answered_with_the_nearest(write, tmp_path, name, near):
    for file in ("char_gpt.py", "notes.txt", "examples/train.py"):
        write("", file)
    with raises(InputError) as caught:
        load_workload(str(tmp_path / name))
    assert near in str(caught.value)


def test_a_missing_name_lists_what_there_is(write):
    path = write(f"{HEAD}big = {MADE}\ndef wrkload():\n    return {MADE}\ndef _own(): ...\ndef needs(a): ...")
    with raises(InputError, "'workload'"):
        load_workload(path)
    with raises(InputError, "'zzz'"):
        load_workload(f"{path}:zzz")


@pytest.mark.parametrize(
    ("value", "kind"),
    [("torch.nn.Linear(1, 1)", "Linear"), ("torch.nn.Linear", "class"), ("3", "int"), ("None", "NoneType")],
)
def test_something_else(write, value, kind):
    with raises(InputError, str(kind)):
        load_workload(write(f"{HEAD}workload = {value}"))


def test_a_function_that_needs_arguments(write):
    with raises(InputError, "width, depth"):
        load_workload(write("def workload(width, depth, *rest, heads=4, **more): ..."))


def test_a_file_beside_one_of_another_ending_does_not_run(tmp_path, monkeypatch):
    """``tune train.txt`` was read as ``txt`` in the module train. It ran train.py before it reported an error."""
    (tmp_path / "trained_beside.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    with raises(InputError, "trained_beside.txt"):
        load_workload("trained_beside.txt")


@pytest.mark.parametrize("spec", ["no_such_module_here", "no_such_module_here.train:workload", "json.no_such_part"])
def test_a_missing_module(spec):
    with raises(InputError, str(spec.split(":")[0])):
        load_workload(spec)


def test_a_module_that_misses_another(write, tmp_path, monkeypatch):
    write("import no_such_module_here", "own_package_broken.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserCodeError, match="own_package_broken raised ModuleNotFoundError: No module named 'no_such"):
        load_workload("own_package_broken")


# Errors of the file itself


def test_a_file_that_raises_shows_the_users_own_frames(write):
    path = write("def deeper():\n    return 1 / 0\n\ndeeper()\n")
    with pytest.raises(UserCodeError, match=r"train\.py raised ZeroDivisionError: division by zero; ") as caught:
        load_workload(path)
    assert caught.value.frames == (f"{path}:4 in <module>: deeper()", f"{path}:2 in deeper: return 1 / 0")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not [name for name in sys.modules if name.startswith("autosplit_file_")]


def test_a_file_that_is_not_valid_python_shows_where(write):
    path = write("x = 1\ndef f(:\n")
    with pytest.raises(UserCodeError, match=r"train\.py raised SyntaxError") as caught:
        load_workload(path)
    assert caught.value.frames[-1] == f"{path}:2: def f(:"


def test_a_file_that_exits(write):
    with pytest.raises(UserCodeError, match=r"train\.py raised SystemExit: 3; "):
        load_workload(write("raise SystemExit(3)"))


def test_ctrl_c_passes(write):
    with pytest.raises(KeyboardInterrupt):
        load_workload(write("raise KeyboardInterrupt"))
