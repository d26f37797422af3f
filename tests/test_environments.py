"""autosplit installs next to the packages of common environments, without a change to any of them.

The pins of each environment are recorded in tests/environments, with their source.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from folders import ROOT, TESTS
from marks import for_release
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENTS = sorted((TESTS / "environments").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OFFLINE = ("NewConnectionError", "ConnectTimeout", "Read timed out", "name resolution")
"""Parts of pip's output if it cannot reach the package index. Version conflicts print none of them."""


def requirements_of(path) -> dict[str, Requirement]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def ours() -> dict[str, Requirement]:
    found = map(Requirement, PROJECT["dependencies"])
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_its_pins_are_within_our_bounds(path):
    """Colab's versions violated all seven bounds when these required the newest releases."""
    pins, wanted = requirements_of(path), ours()
    shared = [name for name in pins if name in wanted]
    assert "torch" in shared
    for name in shared:
        exact = [one.version for one in pins[name].specifier if one.operator == "=="]
        assert all(wanted[name].specifier.contains(version) for version in exact), (pins[name], wanted[name])


@pytest.mark.parametrize(
    "path",
    [for_release(path) for path in ENVIRONMENTS],
    ids=lambda path: path.stem,
)
def test_pip_resolves_autosplit_next_to_it(path, tmp_path):
    """Only a release asks pip, which takes three minutes. The test above compares the pins in every run."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(report)]
    done = subprocess.run(
        [*command, "--quiet", "--constraint", str(path), str(ROOT)], capture_output=True, text=True, check=False
    )
    if done.returncode and any(words in done.stderr for words in OFFLINE):
        pytest.skip(f"the package index did not answer: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr[-3000:]
    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    versions = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}
    assert "autosplit" in versions
    for name, pin in requirements_of(path).items():
        assert name not in versions or pin.specifier.contains(versions[name]), (name, versions[name])
    (torch,) = [one.version for one in requirements_of(path)["torch"].specifier]
    assert versions["torch"].partition("+")[0] == torch
