"""Run examples/tune_and_train.ipynb, store its outputs in it, and write docs/notebook.md from it.

    python docs/notebook.py

This needs nbclient and ipykernel (the extra dev) and takes a minute. One test compares the page with the notebook, and
another runs the notebook again.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER.parent / "examples" / "tune_and_train.ipynb"
PICTURE = "pictures/notebook.png"


def executed(path: Path) -> Any:
    """Run a notebook by this very Python, and keep what it shows but for warnings of this machine's packages."""
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    manager = AsyncKernelManager()
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    book = nbformat.read(path, 4)
    NotebookClient(book, km=manager, timeout=240, record_timing=False).execute()
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for one in cell.outputs:
            if len(one.get("data", ())) > 1:
                one.data.pop("text/plain", None)  # the table or the picture is enough
    return book


def page(book: Any) -> str:
    """Return a notebook as a page: its words, its code, and what that shows."""
    parts = []
    for cell in book.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        parts += [_shown(one) for one in cell.get("outputs", ())]
        if cell is book.cells[0]:
            parts.append(
                "The notebook is `examples/tune_and_train.ipynb`. `python docs/notebook.py` writes this page from it."
            )
    return "\n\n".join(parts) + "\n"


def _shown(output: Any) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What plan.plot() draws]({PICTURE})"
    return str(data["text/html"]) if "text/html" in data else f"```\n{output.text.rstrip()}\n```"


def picture(book: Any) -> bytes:
    """Return the picture of a notebook that has one."""
    outputs = [one for cell in book.cells for one in cell.get("outputs", ())]
    (drawn,) = (one.data["image/png"] for one in outputs if "image/png" in one.get("data", {}))
    return base64.b64decode(drawn)


def main() -> None:
    """Run the notebook, and write it, its page and its picture."""
    book = executed(NOTEBOOK)
    nbformat.write(book, NOTEBOOK)
    (FOLDER / "notebook.md").write_text(page(book), encoding="utf-8")
    (FOLDER / PICTURE).write_bytes(picture(book))


if __name__ == "__main__":
    main()
