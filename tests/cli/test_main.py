from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from handmade import made_ceiling, made_plan, on_devices
from marks import for_release

from autosplit.__main__ import main as start
from autosplit.cli.main import main
from autosplit.cli.parser import commands
from autosplit.devices.device import Device
from autosplit.oom import DoesNotFitError
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_path
from autosplit.plan.redact import shareable
from autosplit.probe import find_ceiling
from autosplit.profiles.store import store
from autosplit.tuning import tune
from autosplit.workload.from_file import Loaded

HEAD = "import torch, autosplit\n"
WORKLOAD = f"{HEAD}workload = autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3))\n"
SIM = ("--devices", "sim:2xRTX3090")


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """Undo the effects of loading a file on the process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("autosplit_file_"):
            del sys.modules[name]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write train.py into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text=WORKLOAD):
        Path("train.py").write_text(text)
        return "train.py"

    return write


@pytest.fixture
def tuned(monkeypatch):
    """Replace tune. `calls` has its arguments, and `answer` is returned or raised."""

    class Tuned:
        def __init__(self):
            self.calls = []
            self.answer = made_plan((100, 156), kind="sim")

        def __call__(self, workload, **keywords):
            self.calls.append((workload, keywords))
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

    stand_in = Tuned()
    monkeypatch.setattr(tune, "tune", stand_in)
    return stand_in


@pytest.fixture
def fails(capsys):
    """Run a command line that should fail. Return its line on stderr and the traceback frames below."""

    def run(*arguments, code=2):
        assert main(list(arguments)) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        line, *frames = err.splitlines()
        assert line.startswith("error: ")
        assert all(frame.startswith("  ") for frame in frames)
        assert code == 5 or all(frame.startswith("    ") for frame in frames)
        return line, frames

    return run


def test_every_keyword_of_tune_has_its_flag(capsys):
    import inspect

    assert main(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    in_python = {"loss_fn", "compute_loss", "optimizer", "loss_reduction", "batch_dim", "make_batch", "sampler"}
    in_python.add("progress")
    parameters = inspect.signature(tune.tune).parameters.values()
    flags = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY} - in_python
    assert not [flag for flag in flags if not re.search(f"  --{flag.replace('_', '-')}[ ,]", out)]


# Usage


def test_what_starts_at_once_loads_neither_torch_nor_what_it_has_no_use_for(tmp_path, cache_dir):
    """One process runs them in turn, and reports the modules that each has loaded."""
    store("ab" * 16, made_plan((100, 156), kind="sim"))
    heavy = ("torch", "optuna", "pynvml", "pydantic", "filelock", "rich", "msgspec", "autosplit.solve.solver")
    code = (
        "import sys; from autosplit.cli.main import main\n"
        f"for words in (['tune', '--help'], ['profiles', 'path'], ['profiles'], ['show', 'abab']):\n"
        f"    assert main(words) == 0\n    print('loaded', [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert loaded == [
        "loaded []",
        "loaded ['msgspec']",
        "loaded ['rich', 'msgspec']",
        "loaded ['rich', 'msgspec', 'autosplit.solve.solver']",
    ]


def examples():
    """Return the examples of all commands."""
    assert all(command.example for command in commands().values())
    return [line for command in commands().values() for line in command.example.splitlines()]


# These take seconds each. test_readme.py runs the same commands from the documentation.
LONG = tuple(
    f"autosplit {command} " for command in ("doctor", "tune", "compare", "measure", "probe", "check", "loader")
)


@pytest.mark.whole
@pytest.mark.parametrize("line", [for_release(line) if line.startswith(LONG) else line for line in examples()])
def test_the_examples_in_the_helps_run(line, tmp_path, monkeypatch, capsys):
    if line.startswith("autosplit report"):
        pytest.importorskip("vl_convert")
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    made_plan().save("plan.json")
    for key in ("3f2a", "91c0"):
        store(key * 8, made_plan())
    assert main(shlex.split(line)[1:]) == 0
    assert any(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tun"], "'tun' is not a command. Did you mean tune? See autosplit --help."),
        (
            ["tune", "a.py", "--device=cpu"],
            "'--device=cpu' is not an option. Did you mean --devices? See autosplit",
        ),
        (
            ["measure", "a.py", "--split", "4,x"],
            "--split '4,x' is not a list of whole numbers. Write one number per device, such as",
        ),
        (
            ["profiles", "path", "--jsn"],
            "'--jsn' is not an option. Did you mean --json? See autosplit profiles path --help.",
        ),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_wrong_word_is_named_with_the_help_to_read(fails, words, message):
    assert message in fails(*words)[0]


@pytest.mark.smoke
def test_python_m_autosplit_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "autosplit", "tune"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the following arguments are required: FILE[:NAME]. See autosplit tune --help.\n"


# tune, with a fake for tuning


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--lengths lengths.txt can't be read (No such file or directory). Name a text file"),
        ("length\n8\n", "--lengths lengths.txt contains 'length', which is not a whole number. Write one length"),
        ("", "the lengths in lengths.txt are empty. Expected"),
    ],
)
def test_a_file_of_lengths_that_are_none_is_refused_before_anything_runs(script, tuned, capsys, text, said):
    if text is not None:
        Path("lengths.txt").write_text(text)
    assert main(["tune", script(), "--lengths", "lengths.txt"]) == 2
    assert said in capsys.readouterr().err
    assert not tuned.calls


def test_flags_become_keywords(script, tuned, capsys):
    flags = {
        "--devices": "sim:2xRTX3090",
        "--strategy": "balanced",
        "--precision": "bf16",
        "--effective-batch-size": "512",
        "--max-batch-size": "300",
        "--reserve": "1GiB",
        "--n-trials": "7",
        "--time-limit-s": "1.5",
        "--profile": "refresh",
        "--name": "mine",
        "--seed": "3",
    }
    assert main(["tune", script(), "--isolate", *[word for pair in flags.items() for word in pair]]) == 0
    ((workload, keywords),) = tuned.calls
    assert workload.spec == f"{Path.cwd()}/train.py:workload"  # for the separate process
    assert callable(keywords.pop("progress"))
    assert keywords == {
        "devices": "sim:2xRTX3090",
        "strategy": "balanced",
        "precision": "bf16",
        "effective_batch_size": 512,
        "max_batch_size": 300,
        "reserve": "1GiB",
        "n_trials": 7,
        "time_limit_s": 1.5,
        "isolate": True,
        "profile": "refresh",
        "name": "mine",
        "seed": 3,
    }


BUDGETED = ["--devices", "cpu:8MiB"]


@pytest.mark.parametrize(
    ("flags", "isolated"),
    [
        (BUDGETED, True),
        ([*BUDGETED, "--no-isolate"], False),
        (["--devices", "cpu"], False),
        (list(SIM), False),
    ],
)
def test_steps_that_fill_a_memory_run_in_a_process_of_their_own(script, tuned, capsys, flags, isolated):
    assert main(["tune", script(), *flags]) == 0
    ((workload, keywords),) = tuned.calls
    assert keywords.get("isolate", False) is isolated
    assert isinstance(workload, Loaded) is isolated


def test_an_interrupted_tuning_shows_the_best_so_far(script, tuned, capsys, tmp_path):
    tuned.answer = tune.TuningInterrupted(with_path(made_plan(complete=False), tmp_path / "kept.json"))
    assert main(["tune", script()]) == 4
    out, err = capsys.readouterr()
    assert f"The best plan so far is shown and saved as {tmp_path / 'kept.json'}. Run the command again" in err
    assert out.startswith("interrupted: the best plan so far")
    assert f"python -m autosplit show {tmp_path / 'kept.json'} --code" in out


def test_an_interrupted_tuning_saves_its_output_too(script, tuned, capsys):
    tuned.answer = tune.TuningInterrupted(made_plan(complete=False))
    assert main(["tune", script(), "--output", "best.json", "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["complete"] is False
    assert not Plan.load("best.json").complete
    assert "saved as best.json" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), tune.TuningInterrupted(None)])
def test_an_interrupted_tuning_without_a_plan(script, tuned, fails, error):
    tuned.answer = error
    assert (
        fails("tune", script(), code=4)[0] == "error: The command was interrupted before it had a result. Run it again."
    )


def test_our_own_bug_keeps_its_traceback(script, tuned, monkeypatch):
    monkeypatch.setattr("autosplit.cli.workload_arguments.user_frames", lambda trace: ())
    tuned.answer = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        main(["tune", script()])


# Bad input: one line with value, expectation and next step


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "sim:2xRTX3091"], "RTX3090"),
        ([*SIM, "--reserve", "-1GiB"], "--reserve: expected one argument. See autosplit tune --help."),
        (
            [*SIM, "--effective-batch-size", "many"],
            "--effective-batch-size 'many' is not a whole number. Write digits, such as 64 or 1024. See",
        ),
        (
            [*SIM, "--time-limit-s", "soon"],
            ("--time-limit-s 'soon' is not a number of seconds. Write a number such as 60. See"),
        ),
        ([*SIM, "--output", "."], "--output . is a folder, not a file. Write --output plan.json."),
    ],
)
def test_bad_flags_are_refused_before_the_file_runs(script, tuned, fails, arguments, said):
    line, _ = fails("tune", script("raise SystemError('the file ran')"), *arguments)
    assert said.lower() in line.lower()
    assert re.search(r"[.;] ", line)
    assert tuned.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--effective-batch-size", "0"], "effective_batch_size"),
        (["--time-limit-s", "nan"], "nan"),
        (["--strategy", "best"], "'best'"),
    ],
)
def test_numbers_and_choices_out_of_range_are_tunes_to_refuse(script, fails, arguments, said):
    line, _ = fails("tune", script(), *SIM, *arguments)
    assert said in line
    assert "expected" in line.lower()


def test_a_file_without_a_workload(script, fails):
    """The lines to paste were printed in one line, which is no Python."""
    line, code = fails("tune", script("x = 1"), *SIM)
    assert "train.py has no 'workload'. Expected" in line
    assert code == ["    import autosplit", "    workload = autosplit.Workload(model, (inputs, targets), loss_fn)"]


def test_an_output_that_cant_be_written_still_shows_the_plan(script, tuned, capsys):
    Path("blocked").write_text("")
    assert main(["tune", script(), "--output", "blocked/plan.json", "--json"]) == 2
    out, err = capsys.readouterr()
    assert Plan.from_json(out) == tuned.answer
    assert err.startswith("error: the plan can't be written to blocked/plan.json")


def test_an_output_is_where_it_was_asked_for_though_the_workload_went_elsewhere(script, tuned, tmp_path):
    here = Path.cwd()
    (tmp_path / "elsewhere").mkdir()
    moved = f"import os\nos.chdir({str(tmp_path / 'elsewhere')!r})\n"
    try:
        assert main(["tune", script(moved + WORKLOAD), "--output", "plan.json"]) == 0
    finally:
        os.chdir(here)
    assert Plan.load("plan.json") == tuned.answer


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_is_no_file_is_not_read(script, fails):
    """/dev/full yields zeros forever, and was read until memory was full."""
    assert "--output /dev/full is not a regular file" in fails("tune", script(), "--output", "/dev/full")[0]


def test_ctrl_c_while_arguments_are_read(monkeypatch, capsys):
    def interrupted(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr("autosplit.cli.main.parse", interrupted)
    assert main(["tune", "x.py", "--seed", "1"]) == 4
    assert capsys.readouterr().err.startswith("error: The command was interrupted before it had a result.")


USER_ERRORS = {
    "a file that raises": "import torch\n1 / 0",
    "a model that fails on its own sample": f"{HEAD}\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
    "        return super().forward(x[:, :2])\n"
    "workload = autosplit.Workload(Net(3, 1), torch.randn(4, 3))",
    "a loss that fails": f"{HEAD}\ndef loss(outputs, targets):\n    return targets.none\n"
    "workload = autosplit.Workload(torch.nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4)), loss_fn=loss)",
}


@pytest.mark.whole
@pytest.mark.parametrize("text", USER_ERRORS.values(), ids=USER_ERRORS)
def test_the_users_own_frames_are_shown(script, fails, text):
    line, frames = fails("tune", script(text), *SIM, code=5)
    assert " raised " in line
    assert line.endswith("fix it and run again")
    assert frames
    assert all("train.py:" in frame for frame in frames)


BAD_WORKLOADS = {
    "tensors that disagree": "(torch.nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(5)), "
    "loss_fn=torch.nn.functional.mse_loss)",
    "an empty batch": "(torch.nn.Linear(3, 1), torch.randn(0, 3))",
}


@pytest.mark.parametrize("arguments", BAD_WORKLOADS.values(), ids=BAD_WORKLOADS)
def test_bad_workloads(script, fails, arguments):
    line, _ = fails("tune", script(f"{HEAD}workload = autosplit.Workload{arguments}"), *SIM)
    assert "expected" in line.lower()


# tune, for real


CONVOLUTIONAL = f"""{HEAD}
from torch import nn
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
net = nn.Sequential(*layers)
batch = torch.randn(8, 3, 16, 16), torch.randint(4, (8,))
workload = autosplit.Workload(net, batch, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW)
"""


WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

import autosplit

class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.zeros(3)

def collate(rows):
    return torch.stack(rows)

def loss(model, batch):
    return model(batch).mean()

def workload():
    loader = DataLoader(Images(), batch_size=4, num_workers=1, collate_fn=collate)
    return autosplit.Workload(torch.nn.Linear(3, 1), next(iter(loader)), compute_loss=loss)
"""


@pytest.mark.slow
def test_a_workload_with_loader_workers_runs_isolated(script, capsys):
    """The isolated process is spawned, and the workers that it spawned could not import the user's file."""
    options = ["--devices", "cpu:1MiB", "--n-trials", "1", "--max-batch-size", "8", "--profile", "off", "--isolate"]
    assert main(["tune", script(WITH_WORKERS), *options]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_what_tune_prints_fits_a_terminal_of_24_lines(script):
    """It was 40 lines or more, so the numbers scrolled out of view."""
    words = ["tune", script(CONVOLUTIONAL), "--devices", "cpu:128MiB,cpu:64MiB", "--n-trials", "2"]
    for _ in range(2):  # the second uses the profile
        done = subprocess.run(
            [sys.executable, "-m", "autosplit", *words],
            env={**os.environ, "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        # A command over 10 s adds a line per stage to a log. A terminal shows a bar there and removes it.
        lines = [line for line in done.stdout.splitlines() if not re.match(r"\s*\d+%  ", line)]
        assert len(lines) <= 24, done.stdout
        copied = [str(Path(words[1]).parent), "autosplit show", "autosplit tune"]  # one line to copy
        assert max(len(line) for line in lines if not any(part in line for part in copied)) <= 80, done.stdout
        assert lines[-2].startswith("next  python -m autosplit ")


# probe, with a fake for the search


@pytest.fixture
def probed(monkeypatch):
    """Replace find_ceiling. `calls` has its arguments, and `answers` has values to return or raise."""
    monkeypatch.setenv("COLUMNS", "140")  # each row on one line

    class Probed:
        def __init__(self):
            self.calls, self.answers = [], {}

        def __call__(self, workload, device, **keywords):
            self.calls.append((workload, device, keywords))
            answer = self.answers.get((device.label, keywords["role"]), made_ceiling("as found", 100, 2**30, steps=3))
            if isinstance(answer, BaseException):
                raise answer
            return dataclasses.replace(answer, role=keywords["role"])

    stand_in = Probed()
    monkeypatch.setattr(find_ceiling, "find_ceiling", stand_in)
    return stand_in


MISFIT = DoesNotFitError("cpu:1 needs 2 MiB; expected more", device="cpu:1", requested_bytes=9, capacity_bytes=4)
TWO = ["--devices", "cpu:8MiB,cpu:4MiB"]


def test_probe_asks_for_each_device_in_each_role(script, probed, capsys):
    flags = ["--role", "primary", "--role", "eval", "--max-batch-size", "50", "--reserve", "5%", "--exact"]
    assert main(["probe", script(), *TWO, *flags]) == 0
    asked = [(device.label, keywords.pop("role"), keywords) for _, device, keywords in probed.calls]
    same = {"max_batch_size": 50, "reserve": "5%", "exact": True, "time_limit_s": None, "isolate": True}
    pairs = [("cpu:0", "primary"), ("cpu:0", "eval"), ("cpu:1", "primary"), ("cpu:1", "eval")]
    assert asked == [(*pair, same) for pair in pairs]
    assert all(isinstance(workload, Loaded) for workload, _, _ in probed.calls)
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith(" cpu:")]
    assert rows == [[*pair, "100"] for pair in pairs]


def test_cards_that_are_alike_are_probed_once(script, probed, capsys):
    assert main(["probe", script(), "--devices", "sim:2xRTX3090+1xA100-40GB"]) == 0
    assert [device.label for _, device, _ in probed.calls] == ["sim:0", "sim:2"]
    out = capsys.readouterr().out
    assert out.startswith("simulated: predicted for GPUs that this machine does not have\n")
    assert [line.split()[0] for line in out.splitlines() if line.startswith(" sim:")] == ["sim:0", "sim:1", "sim:2"]


def test_a_device_that_is_too_small_is_told_beside_the_others(script, probed, capsys):
    probed.answers["cpu:1", "rank"] = MISFIT
    assert main(["probe", script(), *TWO, "--json"]) == 3
    out, err = capsys.readouterr()
    assert err == "error: cpu:1 needs 2 MiB; expected more\n"
    rows = json.loads(out)["ceilings"]
    assert [(row["device"], row["batch_size"], row["headroom_bytes"]) for row in rows][1] == ("cpu:1", 0, -5)
    assert main(["probe", script(), *TWO]) == 3
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" cpu:1")]
    assert row.split() == ["cpu:1", "rank", "0", "memory", "-", "-", "-", "does", "not", "fit"]


def test_an_interrupted_probe_shows_what_it_has(script, probed, capsys):
    probed.answers["cpu:1", "rank"] = KeyboardInterrupt()
    assert main(["probe", script(), *TWO]) == 4
    out, err = capsys.readouterr()
    shown = "The search was interrupted, and the ceilings found so far are shown."
    assert err == f"error: {shown} Run the command again for all ceilings.\n"
    assert [line.split()[0] for line in out.splitlines() if line.startswith(" cpu:")] == ["cpu:0"]


def test_real_gpus_are_isolated_by_default(script, probed, monkeypatch, capsys):
    gpu = Device("cuda", 0, "NVIDIA H100", 80 * 2**30)
    monkeypatch.setattr(
        "autosplit.devices.spec.parse_devices", lambda spec=None, **_: spec if isinstance(spec, tuple) else (gpu,)
    )
    assert main(["probe", script()]) == 0
    assert main(["probe", script(), "--no-isolate"]) == 0
    assert [keywords["isolate"] for _, _, keywords in probed.calls] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--role", "boss"],
            "--role 'boss' is not a role. Choose one of primary, replica, rank, eval, resume, save.",
        ),
        (["--time-limit-s", "0"], "--time-limit-s is 0. Expected more than 0 seconds"),
    ],
)
def test_bad_flags_of_probe_are_refused_before_the_file_runs(script, probed, fails, arguments, said):
    assert said in fails("probe", script("raise SystemExit('the file ran')"), *arguments)[0]


@pytest.mark.whole
def test_a_plot_is_drawn(script, probed, capsys, fails):
    pytest.importorskip("matplotlib")
    probed.answers["cpu:1", "rank"] = made_ceiling("x", 9, 2**20, points=((4, 2**19, True), (8, 2**20, False)))
    for name in ("plot.png", "plot.svg", "PLOT.PDF"):
        assert main(["probe", script(), *TWO, "--plot", name]) == 0
        assert Path(name).stat().st_size > 1000
    capsys.readouterr()
    assert "does not end in a known format" in fails("probe", script(), "--plot", "plot.txt")[0]
    assert "in a folder that does not exist" in fails("probe", script(), "--plot", "no/plot.png")[0]


# probe, for real


@pytest.mark.slow
@pytest.mark.parametrize("command", ["tune", for_release("probe")])
def test_ctrl_c_ends_both_processes(script, command):
    path = script(
        "import time\nimport multiprocessing as m\nif m.parent_process():\n    print('here', flush=True)\n"
        "    time.sleep(500)\n" + WORKLOAD
    )
    words = [sys.executable, "-m", "autosplit", command, str(Path(path).resolve()), *BUDGETED]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "here\n"  # the other process is running, and hangs
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=400)  # a process that hangs takes 500 s
    assert (process.returncode, out) == (4, "")
    assert err.startswith("error: The command was interrupted")
    assert err.count("\n") == 1


# show


@pytest.mark.smoke
def test_show_prints_the_newest_plan_and_says_that_it_is_one_of_several(capsys):
    """The list of all plans was above it, and longer than the plan."""
    store("ab" * 16, made_plan((100, 156)))
    store("cd" * 16, made_plan((300,)))
    assert main(["show"]) == 0
    out, err = capsys.readouterr()
    assert "show cdcdcdcdcdcd --code" in out
    assert "abababababab" not in out
    assert err.startswith("plan: cdcdcdcdcdcd (")
    assert err.endswith(", of 2 in autosplit profiles\n")
    assert main(["show", "--code"]) == 0
    code = capsys.readouterr().out
    assert code.startswith("# Your script defines model, optimizer, loss_fn and loader\nimport autosplit\n")
    assert 'Plan.load("cdcdcdcdcdcd")' in code
    assert main(["show", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == shareable(made_plan((300,)))


def test_show_without_any_profile(capsys, fails):
    assert "Make one with autosplit tune FILE" in fails("show")[0]
    assert "Make one with autosplit tune FILE" in fails("show", "--json")[0]
    assert "Make one with autosplit tune FILE" in fails("show", "--code")[0]
    assert "--json and --code are given together" in fails("show", "--json", "--code")[0]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("ab", "2 plans begin with 'ab': "),
        ("plan.json", "Check the path, or pass a key"),
        ("m1.py:work", "m1.py:work is a Python file, not a plan. Make a plan with autosplit tune m1.py:work."),
    ],
)
def test_show_what_is_not_there(fails, which, said):
    store("ab" * 16, made_plan((100, 156)))
    store("ab" * 15 + "cd", made_plan((300,)))
    assert said in fails("show", which)[0]


def test_a_second_interrupt_on_the_way_out_changes_no_exit_code():
    """It killed the process, so its caller saw a signal and not the best plan that was saved."""
    script = (
        "import atexit, os, signal\n"
        "from autosplit.cli import main as cli\n"
        "def main():\n"
        "    atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "    raise KeyboardInterrupt\n"
        "cli.main = main\n"
        "cli.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr


# Streams and working directories


def in_a_shell(line, folder, **environment):
    """Run a line of shell code that calls `autosplit`. Return its exit code, stdout and stderr."""
    function = f'autosplit() {{ {shlex.quote(sys.executable)} -m autosplit "$@"; }}\n'
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        ["/bin/bash", "-c", function + line], cwd=folder, env=settings, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_streams_that_are_full_or_closed(tmp_path):
    code, _, err = in_a_shell("autosplit profiles path > /dev/full", tmp_path)
    assert code == 2
    assert err.startswith("error: autosplit can't write to stdout (No space left on device). ")
    assert err.count("\n") == 1
    assert in_a_shell("autosplit profiles path >&-", tmp_path) == (0, "", "")
    assert in_a_shell("autosplit show nothing.json 2>&- <&-", tmp_path) == (2, "", "")
    assert in_a_shell("autosplit show nothing.json 2> /dev/full", tmp_path) == (2, "", "")


def test_an_encoding_that_lacks_a_name_of_the_plan(tmp_path):
    plan = made_plan((100, 156), kind="sim")
    named = dataclasses.replace(plan.devices[0], name="RTX \u00e9\U0001f600")
    plan = on_devices(plan, named, plan.devices[1])
    plan.save(tmp_path / "plan.json")
    code, out, err = in_a_shell("autosplit show plan.json", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "RTX \\xe9\\U0001f600" in out
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, err = in_a_shell("autosplit show plan.json --json", tmp_path, **plain)
    assert (code, err) == (0, "")
    assert "RTX \\u00e9\\ud83d\\ude00" in out
    assert Plan.from_json(out).devices[0].name == "RTX \u00e9\U0001f600"


@pytest.mark.whole
def test_names_of_files_that_are_not_utf8_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", f"{tmp_path}/c\udcff")
    assert main(["profiles", "path", "--json"]) == 0
    out = capsys.readouterr().out
    assert "c\\udcff" in out
    assert json.loads(out) == {"path": f"{tmp_path}/c\udcff/profiles"}
    monkeypatch.chdir(tmp_path)
    made_plan((100, 156), kind="sim").save("plan.json")
    pytest.importorskip("vl_convert")
    assert main(["report", "plan.json", "-o", "r\udcff.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "r\udcff.html"}


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch, fails):
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "working directory no longer exists" in fails("tune", "../train.py", *SIM)[0]
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", "relative")
    assert "working directory no longer exists" in fails("profiles", "path")[0]


def test_ctrl_c_while_it_is_imported(monkeypatch, capsys):
    class Interrupting:
        @staticmethod
        def find_spec(name, _path=None, _target=None):
            if name == "autosplit.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "autosplit.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as left:
            start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 4
    assert capsys.readouterr().err == "error: The command was interrupted before it began. Run it again.\n"
