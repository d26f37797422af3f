"""Write docs/results.md, the table of the files in docs/results: python docs/results.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from autosplit.text import rate_text, size_text
from autosplit.tools.examination import SharedResult

FOLDER = Path(__file__).parent

INTRODUCTION = """# Contributed results

`python docs/results.py` writes this page from the files in `docs/results`. To add a machine, run
`autosplit doctor --share NAME.json` on it, and move the file to `docs/results`. Then run `python docs/results.py`, and
open a pull request. The file has no user, path, process, host name or UUID.
[The JSON schema](json-schema.json) describes its keys (`SharedResult`).

The rates are those of large matrix products and copies in memory. The small model is tuned and then trained, so its
prediction can be compared with a measurement.

| GPUs | torch | fp32, bf16 TFLOP/s | memory | small model: samples/s (predicted) | peak (predicted) | date |
| --- | --- | --- | --- | --- | --- | --- |
"""


def read(path: Path) -> SharedResult:
    """Read a contributed file. A missing, wrong or unknown key raises an error."""
    content = path.read_bytes()
    found = msgspec.json.decode(content, type=SharedResult)
    unknown = set(msgspec.json.decode(content)) - set(found.__dataclass_fields__)
    if unknown:
        raise ValueError(f"{path.name} has unknown keys: {', '.join(sorted(unknown))}")
    return found


def row(found: SharedResult, name: str) -> str:
    """Return a file's row of the table."""
    gpus = " + ".join(f"{count}x {name}" for name, count in Counter(card.name for card in found.cards).items())
    card = found.cards[0]
    rates = ", ".join(f"{card.tflops[dtype]:.0f}" if dtype in card.tflops else "-" for dtype in ("float32", "bfloat16"))
    cells = [f"[{gpus}](results/{name})", found.torch, rates, f"{card.memory_gb_per_s:,.0f} GB/s"]
    training = found.training
    if training is None:
        cells += ["-", "-"]
    else:
        speed, peak = training.predicted_samples_per_s, max(training.predicted_bytes)
        cells.append(f"{rate_text(training.measured_samples_per_s)} ({rate_text(speed)})")
        cells.append(f"{size_text(max(training.measured_bytes))} ({size_text(peak)})")
    return f"| {' | '.join([*cells, found.date])} |"


def page() -> str:
    """Return docs/results.md."""
    files = sorted((FOLDER / "results").glob("*.json"))
    return INTRODUCTION + "\n".join(row(read(path), path.name) for path in files) + "\n"


if __name__ == "__main__":
    (FOLDER / "results.md").write_text(page(), encoding="utf-8")
