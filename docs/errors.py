"""Writes docs/errors.md, the list of error codes, from the raise statements of the package: python docs/errors.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent / "autosplit"

INTRODUCTION = """# Error codes

`python docs/errors.py` writes this page from the code.

Every error that autosplit raises on purpose is an `autosplit.AutosplitError`. Its `code` identifies the problem. The
code stays the same if the message changes, so compare the code, never the text:

    except autosplit.AutosplitError as error:
        if error.code == "no-profile-matches":
            ...

`exit_code` is the exit code of the command line: 2 for bad input, 3 if the workload does not fit, 5 if your own code
raised. In the messages below, `{...}` is a value.

| code | error | message |
| --- | --- | --- |
"""

OF_CLASSES = {
    "does-not-fit": "DoesNotFitError",
    "out-of-memory": "OutOfMemoryError",
    "process-lost": "ChildLostError",
    "rank-failed": "RankFailedError",
    "step-lost": "StepLostError",
    "user-code": "UserCodeError",
}
"""Codes of classes that write their own messages."""


def raised(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the code, the class and the message of each error that a module creates with a code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args or not ast.unparse(node.func).endswith("Error"):
            continue
        codes = [word.value for word in node.keywords if word.arg == "code"]
        if codes and isinstance(codes[0], ast.Constant):
            yield str(codes[0].value), ast.unparse(node.func), template(node.args[0])


def template(message: ast.expr) -> str:
    """Return a message with `{...}` for each value."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in message.values)
    if isinstance(message, ast.BinOp):
        return template(message.left) + template(message.right)
    return "{...}"


def page() -> str:
    """Return docs/errors.md."""
    found = {one for path in PACKAGE.rglob("*.py") for one in raised(path)}
    found |= {(code, name, "{...}") for code, name in OF_CLASSES.items()}
    rows = [f"| `{code}` | `{name}` | {_cell(message)} |" for code, name, message in sorted(found)]
    return INTRODUCTION + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    text = text.replace("{...}{...}", "{...}").replace("\n", " ")
    for character in "\\|*_`<>[]()":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    (FOLDER / "errors.md").write_text(page(), encoding="utf-8")
