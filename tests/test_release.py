"""The release is complete, has one version, and contains nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from folders import ROOT

import autosplit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def files_of(folder: Path) -> set[str]:
    """Return the files of a source folder, relative to the top, without files that running creates."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".hypothesis", ".pytest_cache"}.intersection(path.parts)
    }


def build(kind: str, source: Path, into: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


@pytest.mark.slow
def test_the_sdist_makes_a_wheel_that_holds_the_package_alone(tmp_path):
    """The sdist lacked the emulated devices, because git ignores a folder of the same name."""
    name = f"autosplit-{PROJECT['version']}"
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        packed = {member.removeprefix(f"{name}/") for member in sdist.getnames()}
        # tarfile has filters since Python 3.10.12 and 3.11.4.
        sdist.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    folders = (".ci", ".github", "autosplit", "benchmarks", "docs", "examples", "tests")
    files = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
    files |= {f"constraints{which}.txt" for which in ("", "-colab", "-lowest")} | {"mkdocs.yml", "pyproject.toml"}
    assert packed - {"PKG-INFO", ".gitignore"} == files.union(*(files_of(ROOT / one) for one in folders))

    with zipfile.ZipFile(build("wheel", tmp_path / name, tmp_path / "wheel")) as wheel:
        held = set(wheel.namelist())
        metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert held == files_of(ROOT / "autosplit") | {f"{name}.dist-info/{one}" for one in about}
    data = {"py.typed", "devices/gpus.toml", "sim/kernel_rates.json", "tools/templates/report.html.j2"}
    assert {f"autosplit/{one}" for one in data} <= held
    assert f"\nVersion: {PROJECT['version']}\n" in metadata


def test_the_version_stands_in_one_place():
    assert autosplit.__version__ == version("autosplit")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert "version" not in citation
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_files_that_are_there_on_pythons_that_are_promised(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    scripts = [word for step in steps for word in re.findall(r"bash (\S+)", step.get("run", ""))]
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []

    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={promised[0]}"
    assert jobs["tests"]["strategy"]["matrix"]["python-version"] == promised
    named = {step["with"]["python-version"] for step in steps if "with" in step}
    for job in jobs.values():
        matrix = job.get("strategy", {}).get("matrix", {})
        named.update(matrix.get("python-version", ()), (row["python-version"] for row in matrix.get("include", ())))
    assert {one for one in named if "{{" not in one} == set(promised)
    extras = {found for step in steps for found in re.findall(r"\.\[([\w,]+)\]", step.get("run", ""))}
    assert set(",".join(extras).split(",")) <= set(PROJECT["optional-dependencies"])
