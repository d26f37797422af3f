"""`autosplit launch`: torchrun's command for a plan, and real ranks that find their plan."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ddp_jobs import make_plan
from marks import for_release
from raised import raises

from autosplit.cli import torchrun_job
from autosplit.cli.main import main
from autosplit.errors import InputError, PlanError
from autosplit.launcher import STARTER_VARIABLE
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import command_for
from autosplit.profiles import store

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch):
    monkeypatch.delenv("AUTOSPLIT_PROFILE", raising=False)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "a plan.json"
    make_plan((2, 6)).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["train.py", "--epochs", "3"], ["--nproc-per-node=2", "--standalone"]),
        (["-m", "package.train"], ["--nproc-per-node=2", "--standalone"]),
        (["--nnodes", "2", "train.py"], ["--nproc-per-node=1"]),
        (["--nnodes=1", "--master-port", "1234", "train.py"], ["--nproc-per-node=2"]),
        (["--nproc_per_node=2", "train.py"], ["--standalone"]),
        (["--max-restarts", "3", "train.py", "--nnodes", "7"], ["--nproc-per-node=2", "--standalone"]),
    ],
)
def test_what_is_not_said_is_chosen(plan_file, arguments, chosen):
    job = command_for(Plan.load(plan_file), Path(plan_file), arguments)
    assert job.command == (*TORCHRUN, *chosen, *arguments)
    assert job.variables == {"AUTOSPLIT_PROFILE": plan_file}


@pytest.mark.parametrize("arguments", [["--nnodes", "2"], ["--standalone"], ["--max-restarts=3"]])
def test_without_a_script(plan_file, arguments):
    with raises(InputError):
        command_for(Plan.load(plan_file), Path(plan_file), arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nnodes", "3", "train.py"], PlanError),
        (["--nnodes=1:4", "train.py"], InputError),
        (["--nproc-per-node", "3", "train.py"], PlanError),
    ],
)
def test_machines_that_do_not_go_with_the_plan(plan_file, arguments, error):
    with raises(error):
        command_for(Plan.load(plan_file), Path(plan_file), arguments)


def test_a_profiles_key_names_its_plan(capsys):
    """`show` prints the key, and users pass it to `launch`."""
    key = "0" * 32
    path = store.store(key, make_plan((2, 6)))
    assert main(["launch", "--print", "--plan", key[:12], "train.py"]) == 0
    assert capsys.readouterr().out.startswith(f"AUTOSPLIT_PROFILE={path} ")


def test_json_names_the_plan(plan_file, capsys):
    assert main(["launch", "--plan", plan_file, "--json", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == f"a model, 2, 6 samples x 1, {plan_file}"


def test_the_line_is_a_shells(plan_file, capsys):
    assert main(["launch", "--print", "--plan", plan_file, "train.py", "--lr", "0.1", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words == [
        *(f"AUTOSPLIT_PROFILE={plan_file}", *TORCHRUN, "--nproc-per-node=2", "--standalone"),
        *("train.py", "--lr", "0.1", "--print"),
    ]


@pytest.mark.parametrize("apart", [[], ["--"]])
def test_the_words_after_launchs_own_options_are_torchruns(plan_file, capsys, apart):
    words = ["--nnodes", "1", "--max-restarts=2", "train.py", "--plan", "theirs", "-o", "--", "--json"]
    assert main(["launch", f"--plan={plan_file}", "--print", *apart, *words]) == 0
    assert shlex.split(capsys.readouterr().out)[-len(words) :] == words


def test_a_script_that_is_not_there_is_refused_before_torchrun_starts(plan_file, capsys):
    """torchrun printed a traceback."""
    assert main(["launch", "--plan", plan_file, "none.py"]) == 2
    assert "none.py does not exist. Check the path of the training script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["launch"], "the following arguments are required: [TORCHRUN OPTIONS] SCRIPT"),
        (["launch", "train.py"], "You named no plan"),
        (["launch", "--plan", "none.json", "train.py"], "can't be read"),
    ],
)
def test_errors_are_one_line(argv, says, capsys):
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


SCRIPT = """
import sys
from autosplit import ddp
with ddp.setup() as ctx:
    print(f"rank {ctx.rank} takes {ctx.seat.samples}, {sys.argv[1:]}", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [for_release(0), 3])
def test_real_ranks_find_the_plan(plan_file, tmp_path, code):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "autosplit", "launch", "--plan", plan_file, "train.py", str(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"rank 0 takes 2, ['{code}']" in done.stdout
    assert f"rank 1 takes 6, ['{code}']" in done.stdout
    assert (done.returncode == 0) == (code == 0), "the exit code is torchrun's"


@pytest.mark.parametrize(("text", "doubted"), [("import torch", True), ("from autosplit import ddp", False)])
def test_a_script_that_never_sets_up_is_doubted(plan_file, tmp_path, monkeypatch, capsys, text, doubted):
    """Each process trained a separate model on all samples, without a message."""
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(os, "execve", lambda *_: sys.exit(0))
    with pytest.raises(SystemExit):
        main(["launch", "--plan", plan_file, str(tmp_path / "train.py")])
    assert ("does not import autosplit" in " ".join(capsys.readouterr().err.split())) is doubted


@pytest.mark.parametrize(
    ("ended", "first"),
    [
        ({0: (1, 7), 1: (-signal.SIGKILL, 7)}, 1),  # rank 0 noticed and stopped before torchrun checked
        ({0: (-signal.SIGTERM, 7), 1: (3, 7)}, 1),  # by torchrun
        ({0: (1, 8), 1: (-signal.SIGSEGV, 7), 2: (1, 7)}, 1),
        ({0: (-signal.SIGKILL, 40), 1: (3, 7)}, 1),  # it hung, and torchrun ended it
    ],
)
def test_the_rank_that_was_killed_is_the_one_that_failed_first(ended, first):
    """torchrun's times have whole seconds, so it sometimes blamed the other ranks, which stop at once."""
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=at_s) for rank, (code, at_s) in ended.items()}
    assert torchrun_job._first_failure(failures)[0] == first


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends it on Linux alone")
@pytest.mark.parametrize(("starter", "code"), [(os.getpid(), 0), (2**22 - 1, 1)], ids=["there", "gone"])
def test_a_rank_whose_starter_was_killed_ends_before_it_waits_for_others(starter, code):
    """Ranks stayed and slept forever. The system reports a parent's death only after the request for it."""
    done = subprocess.run(
        [sys.executable, "-c", "from autosplit.launcher import end_with_launcher; end_with_launcher()"],
        env={**os.environ, STARTER_VARIABLE: str(starter)},
        check=False,
    )
    assert done.returncode == code


def test_a_plan_that_is_named_after_the_script_is_a_note(plan_file, monkeypatch, capsys):
    """The script got `--plan`, and the job used the newest plan or found none."""
    monkeypatch.setenv("AUTOSPLIT_PROFILE", plan_file)
    assert main(["launch", "--print", "train.py", "--plan", "other.json"]) == 0
    said = "--plan stands after the script, so the script gets it. Put autosplit's options before the script."
    assert said in " ".join(capsys.readouterr().err.split())
    assert main(["launch", "--print", "--plan", plan_file, "train.py"]) == 0
    assert "stands after" not in capsys.readouterr().err
