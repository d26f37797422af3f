"""The command line: flags, exit codes, stdout and stderr, and profiles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ddp_jobs import make_plan
from marks import whole
from plans import simulated_plan
from shell import Ran, autosplit

from autosplit import Plan

WORKLOAD = """
import torch, autosplit
from torch import nn

def workload():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    batch = (torch.randn(4, 16), torch.randint(0, 4, (4,)))
    return autosplit.Workload(model, batch, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.SGD)

def broken():
    raise LookupError("no such data")

loader = torch.utils.data.DataLoader(torch.zeros(64, 2), batch_size=8)
"""
SIM = ("--devices", "sim:1xRTX3090+1xRTX3060")
TUNE = ("tune", "train.py:workload", *SIM, "--effective-batch-size", "64", "--n-trials", "1")
CORE = ("tune", "measure", "probe", "check", "show", "launch", "profiles")
AROUND = ("devices", "doctor", "init", "compare", "loader", "report", "export")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a workload, a plan and a plan for simulated GPUs."""
    made = tmp_path / "here"
    made.mkdir()
    (made / "train.py").write_text(WORKLOAD)
    make_plan((3, 5), 20).save(made / "plan.json")
    simulated_plan().save(made / "sim.json")
    return made


@pytest.fixture
def run(folder):
    def call(*words: str) -> Ran:
        return autosplit(*words, folder=folder)

    return call


@pytest.fixture
def fails(run):
    """Return a function that runs a command, and returns its only line on stderr."""

    def call(*words: str, code: int = 2) -> str:
        ran = run(*words)
        assert (ran.code, ran.out) == (code, "")
        line, *frames = ran.err.splitlines()
        assert line.startswith("error: ")
        assert all(frame.startswith("  ") for frame in frames)
        assert bool(frames) == (code == 5)
        return line

    return call


class TestHelp:
    @pytest.mark.parametrize("words", [(), ("--help",)], ids=str)
    def test_lists_the_commands(self, run, words):
        ran = run(*words)
        assert (ran.code, ran.err) == (0, "")
        assert all(f"\n  {command} " in ran.out for command in CORE)

    @pytest.mark.whole
    def test_lists_the_commands_of_all_packages(self, run):
        assert all(f"\n  {command} " in run("--help").out for command in AROUND)

    @pytest.mark.parametrize("command", [*CORE, *map(whole, AROUND)])
    def test_of_each_command_has_an_example(self, run, command):
        ran = run(command, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith("usage: autosplit")
        assert f"  autosplit {command}" in ran.out


class TestUsage:
    @pytest.mark.whole
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("tun",), "autosplit --help"),
            (("tune",), "See autosplit tune --help"),
            (("tune", "train.py", "--device", "cpu"), "--devices"),
            (("tune", "train.py", "--devices"), "See autosplit tune --help"),
            (("--nothing",), "See autosplit --help"),
            (("show", "plan.json", "sim.json"), "See autosplit show --help"),
            (("show", "plan.json", "--json", "--code"), "--json and --code are given together"),
            (("tune", "nowhere.py"), "nowhere.py"),
            (("tune", "train.py:missing"), "missing"),
            (("tune", "train.py", "--devices", "sim:RTX3091"), "RTX3091"),
            (("tune", "train.py", "--devices", "cpu:2Gb,"), "cpu:2Gb,"),
            (("tune", "train.py", *SIM, "--effective-batch-size", "0"), "effective_batch_size is 0"),
            (("tune", "train.py", *SIM, "--effective-batch-size", "64:16"), "Write 16:64"),
            (("tune", "train.py", *SIM, "--precision", "fp64"), "'none' is fp32"),
            (("tune", "train.py", *SIM, "--strategy", "fsdp"), "strategy"),
            (("tune", "train.py", *SIM, "--n-trials", "none"), "--n-trials 'none' is not a whole number"),
            (("tune", "train.py", *SIM, "--profile", "maybe"), "profile"),
            (("probe", "train.py", "--role", "boss"), "--role 'boss' is not a role"),
            (("probe", "train.py", "--time-limit-s", "nan"), "--time-limit-s is nan. Expected more than 0"),
            (("measure", "train.py", "--devices", "sim:2xL4", "--split", "4"), "split"),
            (("show", "nothing.json"), "nothing.json"),
            (("show", "train.py"), "not a plan"),
            (("show",), "Make one with autosplit tune FILE"),
            (("export", "plan.json", "--to", "keras"), "keras"),
            (("export", "sim.json", "--to", "torchrun"), "sim"),
            (("profiles", "remove", "abcd"), "abcd"),
            (("profiles", "show", "abcd"), "abcd"),
        ],
        ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
    )
    def test_errors_are_one_line_with_code_2(self, fails, words, said):
        assert said in fails(*words)

    @pytest.mark.whole
    def test_what_does_not_fit_has_code_3(self, fails):
        assert "needs" in fails("tune", "train.py", "--devices", "sim:RTX3090@3KiB", code=3)

    @pytest.mark.whole
    def test_what_the_users_code_raised_has_code_5_with_its_frames(self, fails):
        assert "LookupError: no such data" in fails("tune", "train.py:broken", *SIM, code=5)


class TestShow:
    @pytest.mark.parametrize("name", ["plan.json", "sim.json"])
    def test_prints_a_plan(self, run, folder, name):
        ran = run("show", name)
        assert (ran.code, ran.err) == (0, "")
        assert str(Plan.load(folder / name).split) in ran.out

    @pytest.mark.parametrize("name", ["plan.json", "sim.json"])
    def test_prints_all_of_it_as_json(self, run, folder, name):
        ran = run("show", name, "--json")
        assert (ran.code, ran.err) == (0, "")
        assert Plan.from_json(ran.out).split == Plan.load(folder / name).split

    def test_prints_lines_to_paste_that_compile(self, run):
        ran = run("show", "plan.json", "--code")
        assert ran.code == 0
        compile(ran.out, "pasted", "exec")

    def test_details_say_more(self, run):
        assert len(run("show", "plan.json", "--details").out) > len(run("show", "plan.json").out)


@pytest.mark.whole
class TestExport:
    def test_prints_the_settings(self, run):
        ran = run("export", "plan.json", "--to", "env")
        assert ran.code == 0
        assert "AUTOSPLIT_PROFILE" in ran.out

    @pytest.mark.parametrize(
        "to",
        ["transformers", "accelerate", "lightning", "torchrun", "slurm", "trainjob", "skypilot", "env", "json"],
    )
    def test_answers_in_json(self, run, to):
        ran = run("export", "plan.json", "--to", to, "--json")
        assert ran.code == 0
        assert json.loads(ran.out)

    def test_a_file_that_is_there_is_replaced_only_when_asked(self, run, folder):
        (folder / "out.env").write_text("mine")
        assert run("export", "plan.json", "--to", "env", "--output", "out.env").code == 2
        assert (folder / "out.env").read_text() == "mine"
        assert run("export", "plan.json", "--to", "env", "--output", "out.env", "--force").code == 0
        assert (folder / "out.env").read_text() != "mine"


@pytest.fixture(scope="session")
def tuned(tmp_path_factory) -> tuple[Path, Ran]:
    """A folder with the cache and output of one tuning, and the printed text."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "train.py").write_text(WORKLOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSPLIT_CACHE_DIR", str(folder / "cache"))
        ran = autosplit(*TUNE, "--output", "best/plan.json", folder=folder)
    return folder, ran


class TestTune:
    @pytest.fixture(autouse=True)
    def _own_copy(self, tuned, folder, monkeypatch) -> None:
        """Give each test its own copy of the folder of the tuning."""
        shutil.copytree(tuned[0], folder, dirs_exist_ok=True)
        monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(folder / "cache"))

    @staticmethod
    def profile(folder: Path) -> Path:
        (path,) = (folder / "cache" / "profiles").glob("*.json")
        return path

    @pytest.mark.whole
    def test_saves_its_output(self, tuned, folder):
        assert tuned[1].code == 0, tuned[1].err
        plan = Plan.load(folder / "best" / "plan.json")
        assert (plan.simulated, plan.effective_batch_size) == (True, 64)

    @pytest.mark.whole
    @pytest.mark.smoke
    def test_is_answered_by_its_profile_the_second_time(self, run, folder):
        ran = run(*TUNE, "--json")
        assert ran.code == 0
        assert json.loads(ran.out)["notes"][0]["kind"] == "from-profile"
        assert Plan.from_json(ran.out).split == Plan.load(folder / "best" / "plan.json").split

    @pytest.mark.whole
    def test_its_profile_is_listed_and_shown(self, run, folder):
        (listed,) = json.loads(run("profiles", "list", "--json").out)["profiles"]
        assert listed["key"] == self.profile(folder).stem
        for words in (("show",), ("profiles", "show", listed["key"][:6])):
            assert Plan.from_json(run(*words, "--json").out).split == Plan.load(folder / "best" / "plan.json").split

    @pytest.mark.whole
    @pytest.mark.parametrize("words", [("--all", "--yes"), ("key",)], ids=str)
    def test_its_profile_is_removed(self, run, folder, words):
        key = self.profile(folder).stem
        assert run("profiles", "remove", *(key[:8] if word == "key" else word for word in words)).code == 0
        assert json.loads(run("profiles", "list", "--json").out)["profiles"] == []

    @pytest.mark.whole
    def test_a_damaged_profile_is_named_and_tuned_again(self, run, folder):
        profile = self.profile(folder)
        profile.write_text("{")
        ran = run(*TUNE, "--json")
        assert ran.code == 0
        assert f"{profile} was ignored: it is not a plan" in json.loads(ran.out)["notes"][0]["text"]
        assert Plan.load(profile).simulated


class TestOtherCommands:
    @pytest.mark.whole
    @pytest.mark.parametrize(
        ("words", "key"),
        [
            (("devices",), "devices"),
            (("measure", "train.py:workload", "--devices", "sim:2xL4", "--split", "8,4"), "samples_per_s"),
            (("probe", "train.py:workload", "--devices", "sim:L4@24MiB", "--role", "eval"), "ceilings"),
            (("check", "train.py:workload"), "checks"),
            (("launch", "--plan", "plan.json", "train.py"), "command"),
            (("profiles", "path"), "path"),
        ],
        ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
    )
    def test_answer_in_json_alone_on_stdout(self, run, words, key):
        command, *rest = words
        ran = run(command, "--json", *rest) if command == "launch" else run(*words, "--json")
        assert ran.code == 0, ran.err
        assert key in json.loads(ran.out)

    def test_probe_on_a_budget(self, run):
        ran = run("probe", "train.py:workload", "--devices", "cpu:60KiB", "--no-isolate", "--json")
        assert ran.code == 0, ran.err
        (ceiling,) = json.loads(ran.out)["ceilings"]
        assert ceiling["confirmed"]
        assert ceiling["batch_size"] > 50
