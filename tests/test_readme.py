"""The README's commands run, and say what the README says they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import README, ROOT

GPUS = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
INSTALLING = [command for command in COMMANDS if command.startswith("pip install")]
EXAMPLES = [command for command in COMMANDS if re.fullmatch(r"python examples/\w+\.py", command)]
SIMULATED = next(command for command in COMMANDS if "tune" in command and "sim:" in command)
QUICK = {"python -m autosplit devices", "python -m autosplit show", "python -m autosplit profiles"}
REPORT = "python -m autosplit report -o report.html"
CI = ROOT / ".ci" / "run"


def run(command: str, cache: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a README command as a newcomer would, from the top of the project if nothing else is said."""
    words = command.split()
    assert words[0] == "python", command
    environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "2"}
    environment.pop("COLUMNS", None)  # of whoever runs the tests: what is piped has a width of its own
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_the_first_two_commands_do_everything() -> None:
    assert (
        INSTALLING
        == COMMANDS[:2]
        == [
            "pip install -c constraints.txt -e . && python -m autosplit tune examples/char_gpt.py",
            'pip install -c constraints.txt -e ".[test]" && python -m pytest',
        ]
    )


@pytest.mark.parametrize("command", INSTALLING)
def test_ci_runs_the_installing_commands_to_the_letter(command: str) -> None:
    assert command in CI.read_text(encoding="utf-8")


def test_ci_runs_the_examples() -> None:
    """Where nothing is installed but autosplit; once is enough."""
    assert EXAMPLES
    said = CI.read_text(encoding="utf-8")
    assert "for example in examples/*.py; do\n" in said
    assert '    python "$example"\n' in said
    assert [command for command in EXAMPLES if not (ROOT / command.split()[1]).exists()] == []


@pytest.mark.parametrize("command", sorted(QUICK))
def test_quick_commands_run(command: str, tmp_path: Path) -> None:
    assert command in COMMANDS
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in {*QUICK, *INSTALLING, *EXAMPLES, SIMULATED, REPORT}]
)
def test_long_commands_run(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_table_is_what_the_command_prints(tmp_path: Path) -> None:
    """A README that shows figures nobody gets is worse than none; simulated ones are the same everywhere."""
    shown = README.split(SIMULATED)[1].split("```\n")[2]
    done = run(SIMULATED, tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    for line in shown.splitlines():
        assert line.rstrip() in printed, line
    # The plan is remembered now, and the newest: what the README says to do with that one.
    assert REPORT in COMMANDS
    done = run(REPORT, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "59,393 samples/s" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"(?:examples|autosplit|docs)/[\w/]+\.\w+|[A-Z]+\.md", README))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_map_names_modules_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|toml|html\.j2))`", text)) - {"tests/test_layers.py"}
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / "autosplit" / name).exists()] == []
    packages = {path.parent.name for path in (ROOT / "autosplit").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)` \| [^|]+ \| `\w+/", text, re.MULTILINE))


def test_the_places_that_run_on_a_card_alone_are_there() -> None:
    """docs/gpus.md names them one by one."""
    rows = re.findall(r"^\| `([a-z_/]+\.py):([^|]*)\|[^|]*\|([^|]*)\|$", GPUS, re.MULTILINE)
    assert len(rows) >= 9
    for module, names, checked_by in rows:
        source = (ROOT / "autosplit" / module).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", source), (module, name)
        assert all((ROOT / test).exists() for test in re.findall(r"tests/[\w/]+\.py", checked_by)), checked_by
