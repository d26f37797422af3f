"""Give every test its own cache, fixed seeds, one thread, no terminal, and a Ctrl-C that works."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import os
import platform
import random
import shutil
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import emulated
import pytest
from hypothesis import settings
from marks import FOR_RELEASE
from short_budgets import short_budgets

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell that starts pytest in the background makes it ignore SIGINT, and each process of a test inherits that. Tests
# that press Ctrl-C then fail. pytest imports this file in its main process and in each xdist worker, so restore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing the tests, torch and transformers makes objects that stay, so collecting garbage meanwhile is wasted time:
# `pytest --collect-only -m slow` took 22.9 s of CPU time, and takes 19.6 s without.
gc.disable()

# Removed, because tests run pytest in other processes, which must not write to the same files.
SKIPPED_TESTS_FILE = os.environ.pop("AUTOSPLIT_SKIPPED_TESTS", None)
FAILED_TESTS_FILE = os.environ.pop("AUTOSPLIT_FAILED_TESTS", None)

# Before anything imports torch, and inherited by child processes: two workers share the CPU, and a sum over one thread
# is reproducible.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

# Emulated devices, if requested. torch loads them here and in child processes.
if emulated.wanted():
    emulated.switch_on()

# FORCE_COLOR and the others make rich write colour into a pipe. pytest-xdist sets COLUMNS.
for _name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(_name, None)

LONG_S = 900
"""Tests with at least this time limit, in seconds, are the longest."""

# The same examples every time, and none remembered on disk. A first example may wait for an import of torch.
EXAMPLES = 100 if FOR_RELEASE else 40
settings.register_profile("autosplit", database=None, deadline=None, derandomize=True, max_examples=EXAMPLES)
settings.load_profile("autosplit")


def pytest_report_header() -> str:
    """Name the versions that decide how a test ends."""
    found = ", ".join(f"{name} {version(name)}" for name in ("torch", "optuna"))
    return f"autosplit: python {platform.python_version()}, {found}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for `.ci/run`, which runs skipped tests again together with the slow tests."""
    parser.addoption("--also", help="a file with the ids of tests and test files that count as slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Deselect tests for a release, give slow tests a long timeout, and skip GPU tests if there is no accelerator."""
    if listed := config.getoption("also", None):
        also = set(Path(listed).read_text(encoding="utf-8").splitlines())
        for item in items:
            if not also.isdisjoint((item.nodeid, item.nodeid.partition("::")[0])):
                item.add_marker("slow")
    yield  # -m and -k choose the tests
    if not FOR_RELEASE:
        left_out = [item for item in items if item.get_closest_marker("release")]
        items[:] = [item for item in items if not item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        _begin_with_the_longest(items)
    if gpu_items := [item for item in items if item.get_closest_marker("gpu")]:
        _skip_without_an_accelerator(gpu_items)


def _skip_without_an_accelerator(gpu_items: list[pytest.Item]) -> None:
    """Import torch only here, because most files have no GPU test."""
    import torch

    from autosplit.torch_versions import available_accelerator

    if torch.cuda.is_available():
        return
    found = available_accelerator()
    reason = f"needs a CUDA device; torch {torch.__version__} sees none"
    for item in gpu_items:
        if found is None:
            item.add_marker(
                pytest.mark.skip(reason=reason + " (EMULATED_DEVICES=2 emulates two: tests/test_emulated.py)")
            )
        elif item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason + ", and what is measured here is CUDA's own"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage again in the tests."""
    gc.enable()


def _begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Move the longest tests to where the two workers begin. If one of them ran last, the other worker would wait.

    The first worker begins with the first test, and the second one in the middle. Both take small tests at the end.
    """
    limits = {item: item.get_closest_marker("timeout") for item in items if not item.get_closest_marker("gpu")}
    longest = [item for item, limit in limits.items() if limit and limit.args and limit.args[0] >= LONG_S]
    others = [item for item in items if item not in set(longest)]
    middle = len(items) // 2 - len(longest[::2])
    items[:] = [*longest[::2], *others[:middle], *longest[1::2], *others[middle:]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Write the skipped and the failed tests to the files that the environment names; `.ci/run` runs them again."""
    stats = terminalreporter.stats
    if SKIPPED_TESTS_FILE:
        _write_ids(SKIPPED_TESTS_FILE, stats.get("skipped", []))
    failed = [*stats.get("failed", []), *stats.get("error", [])]
    # After a collection error an unknown number of tests did not run, so there is no complete list to run again.
    complete = exitstatus == pytest.ExitCode.TESTS_FAILED and all(
        isinstance(report, pytest.TestReport) for report in failed
    )
    if FAILED_TESTS_FILE and complete:
        _write_ids(FAILED_TESTS_FILE, failed)


def _write_ids(path: str, reports: list[pytest.TestReport]) -> None:
    """Write the node ids of reports to a file, one a line. A test may have two, of its call and its teardown."""
    ids = dict.fromkeys(report.nodeid for report in reports)
    Path(path).write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test its own profile cache, which does not exist yet, and no profile from the environment.

    `tmp_path` would create and remove a folder for each of 7,000 tests. That takes milliseconds on a disk.
    """
    path = tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"
    monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(path))
    monkeypatch.delenv("AUTOSPLIT_PROFILE", raising=False)
    yield path
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_stage_lines() -> Iterator[None]:
    """Let no command print its stages: on a busy machine they appear between the lines that a test expects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autosplit.cli.terminal.SILENT_S", math.inf)
        yield


@pytest.fixture(autouse=True, scope="module")
def _short_budgets() -> Iterator[None]:
    """Repeat a timed step three times instead of for a second."""
    with short_budgets():
        yield


_unfreeze = gc.unfreeze


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Exclude objects that are already loaded from the garbage collections of tunings and traced steps.

    They stay excluded after a tuning. With torch and all tests loaded, each collection takes 0.2 s or more, which was
    half the time of a test that tunes three times.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    _unfreeze()


@pytest.fixture
def whole_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tuning end as for users: all living objects are collected again."""
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)


@pytest.fixture(autouse=True)
def _no_draws() -> None:
    """Forget the batches of earlier tests. A list of batches with equal sizes would be refused."""
    module = sys.modules.get("autosplit.parallel.hidden_sampler")
    if module is not None:
        module._newest.clear()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Start every test from the same random state, on one thread."""
    random.seed(0)
    torch = sys.modules.get("torch")  # not loaded yet: its generator starts from a fixed seed anyway
    if torch is not None:
        # torch.manual_seed also queues a call for CUDA, with a formatted stack, which takes half a millisecond.
        seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
        seed(0)
        torch.set_num_threads(1)


@pytest.fixture
def exact_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the allocator of simulated GPUs reserve exactly the tensors, as with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")


@pytest.fixture(scope="module")
def without_workspaces() -> Iterator[None]:
    """Let a `sim:` device of a few KiB hold a model. cuBLAS alone takes 16 MiB, and the allocator reserves 2 MiB."""
    if importlib.util.find_spec("autosplit.sim") is None:  # tests of the core alone
        yield
        return
    from autosplit.sim import kernel_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_memory, "cublas_workspace_bytes", lambda _capability: 0)
        patch.setattr(kernel_memory, "cublaslt_workspace_bytes", lambda: 0)
        patch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        yield
