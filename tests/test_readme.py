"""The commands of README and docs run, and print what the pages claim."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import DOCS, EXAMPLES, PAGES, README, ROOT, TESTS
from marks import for_release
from shared_training import shares_plan

import autosplit

GPUS = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
COMMANDS = list(
    dict.fromkeys(
        line for block in re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL) for line in block.splitlines() if line
    )
)
INSTALLING = [command for command in COMMANDS if command.startswith("pip install")]
OF_EXAMPLES = [command for command in COMMANDS if re.fullmatch(r"python examples/\w+\.py", command)]
SIMULATED = next(command for command in COMMANDS if "tune" in command and "sim:" in command)
OF_A_CARD = {command for command in COMMANDS if "doctor.json" in command}  # tests/devices/test_examination.py
OF_A_TOOL = {command for command in COMMANDS if "plan.json" in command}  # test_a_tools_page_runs_from_top_to_bottom
TOOLS = ("transformers", "accelerate", "lightning")
QUICK = {"python -m autosplit devices", "python -m autosplit profiles"}
OF_A_PLAN = {
    command for command in COMMANDS if command.startswith(("python -m autosplit show", "python -m autosplit report"))
}
CI = ROOT / ".ci" / "run"


def python_of(page: Path) -> str:
    """Return a page's Python code. Examples are in other code blocks, and their commands are tested."""
    return "\n".join(re.findall(r"^```py.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


WITH_PYTHON = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    if python_of(page) and page.stem != "notebook"  # its parts run below
]


def run(command: str, cache: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a README command as a new user would, by default from the top of the project."""
    words = shlex.split(command)
    assert words[0] == "python", command
    environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)  # the width and colours of the user who runs the tests must not matter
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_first_two_commands_do_everything() -> None:
    assert (
        INSTALLING
        == [COMMANDS[0], COMMANDS[2]]
        == [
            f"pip install -c constraints.txt -e . && {SIMULATED.partition(' && ')[2]}",
            'pip install -c constraints.txt -e ".[test]" && python -m pytest',
        ]
    )


@pytest.mark.parametrize("command", INSTALLING)
def test_ci_runs_the_installing_commands_to_the_letter(command: str) -> None:
    assert command in CI.read_text(encoding="utf-8")


def test_ci_runs_the_examples() -> None:
    """Runs with autosplit only, in an environment without other packages. Once is enough."""
    assert OF_EXAMPLES
    said = CI.read_text(encoding="utf-8")
    assert "for example in examples/*.py; do\n" in said
    assert '    python "$example"\n' in said
    assert [command for command in OF_EXAMPLES if not (ROOT / command.split()[1]).exists()] == []


@pytest.mark.parametrize("command", sorted(QUICK))
def test_quick_commands_run(command: str, tmp_path: Path) -> None:
    assert command in COMMANDS
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def with_few_trials(command: str) -> str:
    """Limit the trials of a tuning command to two, because each trial takes seconds."""
    return f"{command} --n-trials 2" if "autosplit tune" in command and "--n-trials" not in command else command


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # Another command also tunes on the CPU, and `.ci/run` itself runs one.
        for_release(c) if "--loader" in c or f"\n{c}\n" in CI.read_text(encoding="utf-8") else c
        for c in COMMANDS
        if c not in {*QUICK, *INSTALLING, *OF_EXAMPLES, *OF_A_TOOL, *OF_A_CARD, *OF_A_PLAN, SIMULATED}
    ],
)
def test_long_commands_run(command: str, tmp_path: Path) -> None:
    done = run(with_few_trials(command), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "Gbps" in command:  # predictions for clusters are the same on every machine
        shown = PAGES.split(command)[1].split("```\n")[2]
        assert shown.splitlines() == [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_table_is_what_the_command_prints(tmp_path: Path) -> None:
    """The README must show figures that users get. Simulated figures are the same on every machine."""
    shown = README.split(SIMULATED)[1].split("```\n")[2]
    done = run(SIMULATED.partition(" && ")[2], tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    for line in shown.splitlines():
        assert line.rstrip() in printed, line
    # The plan is now the newest profile. Run the README's commands for that profile.
    assert {"python -m autosplit show", "python -m autosplit report -o report.html"} <= OF_A_PLAN
    for command in OF_A_PLAN:
        done = run(command, tmp_path, tmp_path)
        assert done.returncode == 0, done.stderr
    assert "52,222 samples/s" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_files_that_are_named_exist() -> None:
    own = re.sub(r"github:[^|]*", "", PAGES)  # sources in other repositories
    named = set(re.findall(r"(?:examples|autosplit|docs)/[\w/]+\.\w+|\b[A-Z]+\.md", own))
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


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/.-]+\.md)$", site, re.MULTILINE))


def test_every_public_name_has_a_page() -> None:
    pages = {f"autosplit.{page.stem}" for page in (DOCS / "python").glob("*.md")}
    assert pages == {f"autosplit.{name}" for name in autosplit.__all__ if name not in {"__version__", "ddp"}} | {
        "autosplit.ddp.setup",
        "autosplit.ddp.Context",
    }


def test_the_errors_that_troubleshooting_quotes_are_said() -> None:
    """Except messages of other software: torch and the operating system."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "autosplit").rglob("*.py"))
    quoted = re.findall(r'^## "([^"]+)"', (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    foreign = ("Connection refused", "Expected more than 1 value per channel")
    own = [words.removesuffix("...").strip() for words in quoted if words not in foreign]
    assert len(own) >= 5
    assert [words for words in own if words not in source] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    """All blocks run as one script. Blocks that load a plan find a plan for two ranks, and DDP runs two processes."""
    if page.stem in {*TOOLS, "integrations"}:
        pytest.importorskip("transformers" if page.stem == "integrations" else page.stem)
    if page.stem == "plans":
        pytest.importorskip("matplotlib")
    (tmp_path / "page.py").write_text(python_of(page), encoding="utf-8")
    shares_plan((6, 2), 24).save(tmp_path / "plan.json")
    of_ranks = page.stem in {"ddp", "same-training"}
    start = "python -m autosplit launch --plan plan.json page.py" if of_ranks else "python page.py"
    done = run(start, tmp_path / "cache", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tools_page_runs_from_top_to_bottom(tool: str, tmp_path: Path) -> None:
    """Train on one device, tune with two trials, and train two ranks with that plan. Both get the same weights."""
    pytest.importorskip(tool)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    page = (DOCS / f"{tool}.md").read_text(encoding="utf-8")
    commands = [command for command in COMMANDS if f"train_{tool}.py" in command]
    assert len(commands) == 3
    assert f"<!-- examples/train_{tool}.py -->" in page
    for command in commands:
        assert command in page
        script = f"examples/train_{tool}.py"
        saving = command.replace(script, f"{TESTS / 'launched.py'} {script} .") if "launch" in command else command
        done = run(with_few_trials(saving), tmp_path / "cache", tmp_path)
        assert done.returncode == 0, done.stderr
        if "tune" not in command:
            assert ("autosplit found no plan" in done.stderr) is (saving == command)
            losses = [float(loss) for loss in re.findall(r"loss\W+(\d+\.\d+)", done.stdout)]
            assert losses[-1] < losses[0], done.stdout
    assert torch.equal(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)))


def test_every_example_is_on_the_site() -> None:
    """A page shows each example, and the gallery lists it. `.ci/run` and the integration tests run the examples."""
    gallery = (DOCS / "gallery.md").read_text(encoding="utf-8")
    for example in EXAMPLES.glob("*.py"):
        assert f"[`{example.name}`]" in gallery
        assert f"<!-- examples/{example.name} -->" in PAGES
    notebooks = list(EXAMPLES.glob("*.ipynb"))
    assert [f"[`{notebook.name}`](notebook.md)" in gallery for notebook in notebooks] == [True]


def test_the_page_of_the_notebook_is_made_from_it() -> None:
    nbformat = pytest.importorskip("nbformat")
    made = runpy.run_path(str(DOCS / "notebook.py"))
    book = nbformat.read(made["NOTEBOOK"], 4)
    assert (DOCS / "notebook.md").read_text(encoding="utf-8") == made["page"](book), "run python docs/notebook.py"
    assert (DOCS / made["PICTURE"]).read_bytes() == made["picture"](book)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a separate process, because a Jupyter client leaves resources open that would warn in the next test."""
    for needed in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(needed)
    code = "import runpy; made = runpy.run_path('docs/notebook.py')"
    code += "\nprint(made['page'](made['executed'](made['NOTEBOOK'])))"
    environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<strong>autosplit plan</strong>" in done.stdout
    assert "pictures/notebook.png" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_the_map_names_modules_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|toml|html\.j2))`", text)) - {"tests/test_layers.py"}
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / "autosplit" / name).exists()] == []
    places = text.split("## Where do I change ...?")[1].split("## Words")[0]
    assert places.count("\n| ") - 2 <= 40, "one page"
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
