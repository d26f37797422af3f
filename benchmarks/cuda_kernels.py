"""Compare the traces behind `sim:` predictions with traces of CUDA's own kernels.

    python benchmarks/cuda_kernels.py [--only PATTERN ...] [--output FILE]
    python benchmarks/cuda_kernels.py --reference [--only PATTERN ...] [--output FILE]

`sim:` traces a step on the CPU back end of torch and replaces operators that differ from CUDA's. The first command
traces every case like that and divides the results by those in `results/kernels/cuda-<torch version>.json`: a ratio of
1 is exact. The second command makes that file. It needs a CUDA build of torch and a C compiler, but no GPU, because
`kernel_tracing.py` uses fake `cuda` tensors. So no GPU confirms the file: it contains torch's own choice of kernels
and the outputs of their meta kernels, but no workspace inside a kernel.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from kernel_case import DEFAULT_CAPABILITY, OTHER_CAPABILITIES, Case
from kernel_cases import chosen_cases
from kernel_tracing import Row, build_stub, cuda_tracer, like_real_cuda, product_tracer, stubbed_environment, traced

RESULTS = Path(__file__).parent / "results" / "kernels"

CLOSE = 0.05
"""The largest error of a ratio that counts as close."""
USABLE = (0.8, 1.25)
"""Ratios outside are listed one by one."""
QUANTITIES = {"activation_bytes": "memory", "saved_bytes": "saved", "compute_s": "time"}
"""The compared fields of a row and their short names."""

Rows = dict[tuple[str, int], dict[str, Any]]
"""Rows as JSON, by case and compute capability."""


def column_path(torch_version: str = torch.__version__) -> Path:
    """Return the file with CUDA's numbers for a torch version, whether it exists or not."""
    release = ".".join(torch_version.split(".")[:2])
    return RESULTS / f"cuda-{release}.json"


def versions() -> dict[str, str]:
    """Return the versions of torch and of the packages with models."""
    found = {"torch": str(torch.__version__)}
    for package in ("transformers", "timm", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**report, "rows": []}, indent=1).removesuffix("[]\n}")
    rows = ",\n".join(json.dumps(row) for row in report["rows"])
    path.write_text(f"{head}[\n{rows}\n]}}\n", encoding="utf-8")


def _rows_of(path: Path) -> Rows:
    return _by_key(json.loads(path.read_text(encoding="utf-8"))["rows"])


def _by_key(rows: Iterable[dict[str, Any]]) -> Rows:
    return {(row["case"], row["capability"]): row for row in rows}


def in_order(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows of today's cases, in the order of the cases."""
    keys = [(case.name, capability) for case in chosen_cases(()) for capability in case.capabilities()]
    return [rows[key] for key in keys if key in rows]


def runnable(cases: Iterable[Case]) -> list[Case]:
    """Return the cases whose packages are installed, and print which packages are missing."""
    cases = list(cases)
    missing = {package for case in cases for package in case.needs if find_spec(package) is None}
    for package in sorted(missing):
        print(f"{package} is not installed; its cases are left out")
    return [case for case in cases if missing.isdisjoint(case.needs)]


# ------------------------------------------------------------------------------------------------------- CUDA's column


def reference(patterns: Sequence[str], output: Path) -> None:
    """Trace the cases on fake `cuda` tensors, in one process for each compute capability, and write the column.

    With patterns, the other rows of an existing file are kept.
    """
    rows = _rows_of(output) if patterns and output.exists() else {}
    only = ["--only", *patterns] if patterns else []
    with tempfile.TemporaryDirectory() as folder:
        library = build_stub(Path(folder))
        part = Path(folder) / "rows.json"
        for capability in (DEFAULT_CAPABILITY, *OTHER_CAPABILITIES):
            command = [sys.executable, __file__, "--capability", str(capability), *only, "--output", str(part)]
            subprocess.run(command, check=True, env=stubbed_environment(library, capability))  # noqa: S603
            rows |= _rows_of(part)
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    write(output, {"date": date, "versions": versions(), "rows": in_order(rows)})


def reference_part(cases: Iterable[Case], capability: int) -> list[dict[str, Any]]:
    """Trace the cases on fake `cuda` tensors of the stub's GPU."""
    rows = []
    with like_real_cuda():
        for case in cases:
            if capability in case.capabilities():
                row = traced(case, capability, cuda_tracer).as_json()
                print(row, flush=True)
                rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------- the comparison


def read_column(path: Path) -> dict[tuple[str, int], Row]:
    """Read CUDA's numbers, by case and compute capability."""
    return {key: Row(**row) for key, row in _rows_of(path).items()}


def ratios(ours: Row, cuda: Row) -> dict[str, float]:
    """Return our numbers as multiples of CUDA's; a quantity that is 0 for CUDA is left out."""
    found = {}
    for name, short in QUANTITIES.items():
        expected = getattr(cuda, name)
        if expected:
            found[short] = round(getattr(ours, name) / expected, 4)
    return found


def compared(cases: Iterable[Case], column: dict[tuple[str, int], Row]) -> list[dict[str, Any]]:
    """Trace the cases as `sim:` does and compare each with CUDA's row."""
    rows = []
    for case in cases:
        for capability in case.capabilities():
            cuda = column.get((case.name, capability), Row(case.name, capability, error="not in the column"))
            row = {"case": case.name, "capability": capability, **_comparison(case, cuda)}
            print(row, flush=True)
            rows.append(row)
    return rows


def _comparison(case: Case, cuda: Row) -> dict[str, Any]:
    if cuda.error:
        return {"not compared": cuda.error}
    ours = traced(case, cuda.capability, product_tracer)
    if ours.error:
        return {"error": ours.error}
    return {**ratios(ours, cuda), **({"note": ours.note} if ours.note else {})}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of close rows, and the rows that are far off, for each quantity."""
    found: dict[str, Any] = {"rows": len(rows)}
    for key in ("error", "not compared"):
        found[key] = {_label(row): row[key] for row in rows if key in row}
    for short in QUANTITIES.values():
        values = {_label(row): row[short] for row in rows if short in row}
        close = sum(abs(value - 1) <= CLOSE for value in values.values())
        found[short] = {
            "rows": len(values),
            "close": round(close / max(1, len(values)), 4),
            "far": {name: value for name, value in values.items() if not USABLE[0] <= value <= USABLE[1]},
        }
    return found


def _label(row: dict[str, Any]) -> str:
    return row["case"] if row["capability"] == DEFAULT_CAPABILITY else f"{row['case']} at {row['capability'] / 10}"


def compare(patterns: Sequence[str], output: Path | None) -> None:
    """Compare the cases with the column of the installed torch version, and write the ratios.

    With patterns, the other rows of an existing file are kept.
    """
    path = column_path()
    known = _rows_of(output) if patterns and output is not None and output.exists() else {}
    rows = in_order(known | _by_key(compared(runnable(chosen_cases(patterns)), read_column(path))))
    report = {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "versions": versions(),
        "column": path.name,
        "summary": summary(rows),
        "rows": rows,
    }
    if output is not None:
        write(output, report)
    print(json.dumps(report["summary"], indent=1))


def main() -> None:
    """Make CUDA's column, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="cases, for example 'GPT-2*'")
    parser.add_argument("--reference", action="store_true", help="trace on fake cuda tensors of a CUDA build of torch")
    parser.add_argument("--capability", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers warns about the small vocabularies
    if options.capability:
        cases = runnable(chosen_cases(options.only))
        write(options.output, {"rows": reference_part(cases, options.capability)})
    elif options.reference:
        reference(options.only, options.output or column_path())
    else:
        compare(options.only, options.output)


if __name__ == "__main__":
    main()
