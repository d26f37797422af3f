"""The commands of README and docs run, and say what is said of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import DOCS, PAGES, README, ROOT

GPUS = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
COMMANDS = list(
    dict.fromkeys(
        line for block in re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL) for line in block.splitlines() if line
    )
)
INSTALLING = [command for command in COMMANDS if command.startswith("pip install")]
EXAMPLES = [command for command in COMMANDS if re.fullmatch(r"python examples/\w+\.py", command)]
SIMULATED = next(command for command in COMMANDS if "tune" in command and "sim:" in command)
OF_A_CARD = {command for command in COMMANDS if "doctor.json" in command}  # tests/devices/test_examination.py
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
    "command", [c for c in COMMANDS if c not in {*QUICK, *INSTALLING, *EXAMPLES, *OF_A_CARD, SIMULATED, REPORT}]
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
    assert "41,267 samples/s" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_files_that_are_named_exist() -> None:
    named = set(re.findall(r"(?:examples|autosplit|docs)/[\w/]+\.\w+|\b[A-Z]+\.md", PAGES))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([\w-]*))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]


def test_readme_is_a_page() -> None:
    assert len(README.splitlines()) <= 150
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 1000
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) >= 2


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page.name for page in DOCS.glob("*.md")} == set(re.findall(r": ([\w-]+\.md)$", site, re.MULTILINE))


def test_the_errors_that_troubleshooting_quotes_are_said() -> None:
    """But for those of others: torch, and the system."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "autosplit").rglob("*.py"))
    quoted = re.findall(r'^## "([^"]+)"', (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    own = [words.removesuffix("...").strip() for words in quoted if words != "Connection refused"]
    assert len(own) >= 5
    assert [words for words in own if words not in source] == []


@pytest.mark.slow
def test_the_ten_lines_run_as_they_stand(tmp_path: Path) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import torch" in block)
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    done = run("python script.py", tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr


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
