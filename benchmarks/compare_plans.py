"""Save the plans of about 60 workloads and device sets, and compare them with saved ones.

    python benchmarks/compare_plans.py save FILE [--kinds sim cluster cpu ranks emulated] [--only TEXT]
    python benchmarks/compare_plans.py compare FILE [NEW_FILE] [--kinds ...] [--only TEXT]

Save the plans before a refactoring, and compare after each part of it. `compare` makes all plans again, or reads them
from a second file. It prints one line for each case. If a figure without noise differs, the exit code is 1.

`plan_cases.py` has the cases. `EXACT` has the figures without noise, by kind. `sim` and `cluster` are equal in all
figures. On real devices (`cpu`, `ranks`, `emulated`), ceilings with their bytes and checks are equal, but the
split depends on measured times. If an effective batch size fits into one forward with some splits only, the ceilings
depend on the split. So no case of `cpu` has such a size.

The default is every kind except `emulated`, which needs a C++ compiler. Memory depends on torch, so saved plans are
only valid for the same versions. `benchmarks/compare_plans.json` has plans of all kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plan_cases import CASES, Case

import autosplit

HERE = Path(__file__).parent
EMULATED_SITE = HERE.parent / "tests" / "emulated" / "site"

EMULATED_BYTES = 80 * 2**20
"""Memory of an emulated device, with its context of 32 MiB."""

DIGITS = 9
"""Significant digits of saved times. A sum in another order has the same digits."""

MEASURED = ("error", "ceilings", "ddp_ceilings", "checks", "precision", "checkpointed")
EXACT = {
    "sim": None,
    "cluster": None,
    "cpu": MEASURED,
    "ranks": MEASURED,
    "emulated": MEASURED,
}
"""The figures of each kind that have no noise. None for all figures."""

DEFAULTS = {"n_trials": 2, "profile": "off", "seed": 0}
"""Arguments of `tune`, unless a case has others."""

Figures = dict[str, Any]
Saved = dict[str, Figures]
"""The figures of each case, by its name."""


# Figures of a plan


def rounded(value: float | None) -> float | None:
    """Return a number with `DIGITS` significant digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def ceiling_figures(ceilings: Sequence[Any]) -> list[Any]:
    """Return the size, the bytes and the limit of each ceiling."""
    return [[one.role, one.batch_size, one.peak_bytes, one.capacity_bytes, one.limited_by] for one in ceilings]


def plan_figures(plan: autosplit.Plan) -> Figures:
    """Return the figures of a plan that a refactoring must not change."""
    ddp, main = plan.ddp, plan.main
    ranks = () if ddp is None else ddp.seats
    return {
        "split": list(plan.split),
        "batch_size": plan.batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "effective_batch_size": plan.effective_batch_size,
        "samples_per_s": rounded(plan.samples_per_s),
        "even_samples_per_s": rounded(main.even_samples_per_s if main.measured else None),
        "ceilings": ceiling_figures([seat.ceiling for seat in main.seats]),
        "peaks": list(main.peak_bytes),
        "ddp_ceilings": ceiling_figures([seat.ceiling for seat in ranks]),
        "ddp_split": [seat.samples for seat in ranks],
        "ddp_steps": None if ddp is None else ddp.accumulation_steps,
        "ddp_effective_batch_size": 0 if ddp is None else ddp.effective_batch_size,
        "ddp_samples_per_s": rounded(0.0 if ddp is None else ddp.samples_per_s),
        "ddp_peaks": [seat.peak_bytes for seat in ranks],
        "fastest": plan.fastest,
        "precision": plan.precision,
        "checkpointed": list(plan.checkpointed),
        "lengths": [[one.length, rounded(one.times)] for one in plan.lengths.points] if plan.lengths else None,
        "notes": sorted(note.kind for note in plan.notes if note.kind != "variants"),  # a plan field before
        "checks": [[one.subject, one.depends, one.reduce, one.count] for one in plan.checks],
    }


def cluster_figures(case: Case) -> Figures:
    """Return the predicted figures of a cluster for each number of nodes."""
    best = autosplit.compare(case.workload, devices=[case.devices], **case.options).best
    assert best is not None
    assert best.cluster is not None
    found = best.cluster.predictions
    return {
        "nodes": [one.nodes for one in found],
        "split": [[share.batch_size for share in one.shares] for one in found],
        "samples_per_s": [rounded(one.samples_per_s) for one in found],
        "limited_by": [one.limited_by for one in found],
    }


def planned(workload: Any, options: dict[str, Any]) -> autosplit.Plan:
    """Call the function that plans with these options."""
    if "lengths" in options:
        return autosplit.tune_lengths(workload, **options)
    if "checkpointing" in options or isinstance(options.get("precision"), tuple):
        return autosplit.tune_best(workload, **options).plan
    return autosplit.tune(workload, **options)


def figures(case: Case) -> Figures:
    """Make the plan of a case, and return its figures. If autosplit raises its own error, return the error's class."""
    torch.manual_seed(0)
    try:
        if case.kind == "cluster":
            return cluster_figures(case)
        # A function for `sim:` devices, so that a large model needs no memory
        workload = case.workload if case.kind == "sim" else case.workload()
        return plan_figures(planned(workload, {"devices": case.devices, **DEFAULTS, **case.options}))
    except (autosplit.AutosplitError, autosplit.OutOfMemoryError) as error:
        return {"error": type(error).__name__}


# Processes: each kind of devices has its own


def selected(kinds: Sequence[str], only: str) -> list[Case]:
    """Return the cases of these kinds whose names contain a text."""
    return [case for case in CASES if case.kind in kinds and only in case.name]


def run(cases: Sequence[Case], file: Path) -> None:
    """Make the plans of one kind in this process, which may be one of several ranks. Rank 0 writes them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # an operator's temporary memory depends on the number of threads
    is_first = os.environ.get("RANK", "0") == "0"
    found = {}
    for case in cases:
        begun_s = time.perf_counter()
        found[case.name] = figures(case)
        if is_first:
            print(f"{time.perf_counter() - begun_s:6.1f} s  {case.name}", file=sys.stderr, flush=True)
    if is_first:
        file.write_text(json.dumps(found), encoding="utf-8")


def made(cases: Sequence[Case], only: str) -> Saved:
    """Make plans, each kind in new processes with an empty cache."""
    found: Saved = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in dict.fromkeys(case.kind for case in cases):
            file = Path(folder) / f"{kind}.json"
            words = [*launcher(kind), str(Path(__file__)), "run", str(file), "--kinds", kind, "--only", only]
            subprocess.run(words, check=True, env={**os.environ, **environment(kind, Path(folder))})  # noqa: S603
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def launcher(kind: str) -> list[str]:
    """Return the command that starts the processes of a kind."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(torchrun if kind == "ranks" else [])]


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Return the environment variables of a kind's processes."""
    found = {"AUTOSPLIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if kind != "emulated":
        return found
    path = os.pathsep.join(filter(None, [str(EMULATED_SITE), os.environ.get("PYTHONPATH")]))
    memory = {"EMULATED_MEMORY": str(folder / "memory"), "EMULATED_BYTES": str(EMULATED_BYTES)}
    return {**found, **memory, "EMULATED_DEVICES": "2", "PYTHONPATH": path}


# Comparison


def kind_of(name: str) -> str:
    """Return the kind of a saved case, which may be in no table any more."""
    return name.partition(":")[0]


def verdict(name: str, old: Figures | None, new: Figures | None) -> tuple[str, list[str]]:
    """Compare a case. Return "equal", "noise", "new", "missing" or "differs", and lines with the differences."""
    if old is None or new is None:
        return ("new" if old is None else "missing"), []
    exact = EXACT[kind_of(name)]
    apart = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    noise = {key: pair for key, pair in apart.items() if exact is not None and key not in exact}
    lines = [
        f"{key}: {json.dumps(one)} -> {json.dumps(other)}" for key, (one, other) in apart.items() if key not in noise
    ]
    word = "differs" if lines else "noise" if noise else "equal"
    remark = f"depends on times: {', '.join(noise_text(key, *pair) for key, pair in noise.items())}"
    return word, [*lines, *([remark] if noise else [])]


def noise_text(key: str, old: Any, new: Any) -> str:
    """Name a figure that depends on measured times, with the quotient of its numbers."""
    are_numbers = isinstance(old, (int, float)) and isinstance(new, (int, float)) and old != 0
    return f"{key} x{new / old:.2f}" if are_numbers else key


def compared(old: Saved, new: Saved) -> bool:
    """Print the comparison of all cases. Return whether every figure without noise is equal."""
    counts: Counter[str] = Counter()
    for name in {**old, **new}:
        word, lines = verdict(name, old.get(name), new.get(name))
        counts[word] += 1
        print(f"{word:8} {name}", *(f"         {line}" for line in lines), sep="\n", flush=True)
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    return not {"differs", "missing"} & counts.keys()


# Files and commands


def versions() -> dict[str, str]:
    """Return the versions that change plans: torch's memory, and Python's text, which trains the GPT."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def saved_text(plans: Saved) -> str:
    """Return a file's text, with a line for each case."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in plans.items())
    return f'{{"versions": {json.dumps(versions())}, "plans": {{\n{rows}\n}}}}\n'


def read(file: Path, kinds: Sequence[str], only: str) -> Saved:
    """Read the saved cases of these kinds whose names contain a text. Warn if the file is from other versions."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["versions"] != versions():
        print(f"{file} is from {found['versions']}. This is {versions()}. Save the plans again.", file=sys.stderr)
    return {name: row for name, row in found["plans"].items() if kind_of(name) in kinds and only in name}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["save", "compare", "run"], help="the others start `run`")
    parser.add_argument("file", type=Path, help="the saved plans")
    parser.add_argument("new_file", type=Path, nargs="?", help="compare with this file, and make no plans")
    kinds = [kind for kind in EXACT if kind != "emulated"]
    parser.add_argument("--kinds", nargs="+", choices=[*EXACT], default=kinds, help="default: all except emulated")
    parser.add_argument("--only", default="", help="only cases whose names contain this text")
    return parser.parse_args()


def main() -> int:
    """Run the command. Return the exit code."""
    given = arguments()
    cases = selected(given.kinds, given.only)
    if given.command == "run":
        run(cases, given.file)
        return 0
    if given.command == "save":
        given.file.write_text(saved_text(made(cases, given.only)), encoding="utf-8")
        return 0
    old = read(given.file, given.kinds, given.only)
    new = read(given.new_file, given.kinds, given.only) if given.new_file else made(cases, given.only)
    return 0 if compared(old, new) else 1


if __name__ == "__main__":
    sys.exit(main())
