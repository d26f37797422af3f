"""Writes docs/json.md, docs/json-schema.json, docs/command-line.md and the pages' scripts: python docs/make.py.

The pages copy the "Attributes" of classes and the `--help` of commands. Tests compare the files with its output.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from autosplit.cli.json_types import ANSWERS, FILES
from autosplit.plan.plan import Plan
from autosplit.plan.record import SCHEMA_VERSION

FOLDER = Path(__file__).parent

INTRODUCTION = f"""# What `--json` prints

`python docs/make.py` writes this page from the code. `json-schema.json` in the same folder describes the same types as
JSON Schema.

Every command takes `--json` and prints one JSON value on stdout. Progress, notes and errors go to stderr. The exit code
is the same as without `--json`. If there is no answer, stdout stays empty. For example, `show` without a plan prints
nothing on stdout and exits with 2.

Names contain the unit: `_bytes` are bytes, `_s` seconds, `samples_per_s` samples per second, `_percent` percent, `_c`
degrees Celsius, `_w` watts. A share is a number from 0 to 1. Sizes without a unit are samples. Unknown values are
`null`. A new version may add keys. `schema_version` of a plan (now {SCHEMA_VERSION}) changes if a key is removed or
changes its meaning. A plan of another version raises an error when it is read.

`tune` and `show` print the same JSON as `--output` and `Plan.save` write and `Plan.load` reads.
"""

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "true or false", type(None): "null", Any: "any value"}


def page() -> str:
    """Return docs/json.md."""
    parts = [INTRODUCTION, "## By command\n", "| command | prints |", "| --- | --- |"]
    parts += [f"| `autosplit {command}` | {_type_text(answer)} |" for command, answer in ANSWERS.items()]
    parts += [f"| the file of `autosplit {command}` | {_type_text(answer)} |" for command, answer in FILES.items()]
    for one in _classes():
        parts.append(f"\n## {one.__name__}\n\n{_first_sentence(one)}\n")
        parts += ["| key | type | what it is |", "| --- | --- | --- |"]
        hints, said = typing.get_type_hints(one), described(one)
        parts += [
            f"| `{field.name}` | {_type_text(hints[field.name])} | {_in_a_cell(said[field.name])} |"
            for field in fields(one)
        ]
    return "\n".join(parts) + "\n"


def schema() -> dict[str, Any]:
    """Return docs/json-schema.json: a schema for each command, with definitions in common."""
    roots = list(dict.fromkeys((*ANSWERS.values(), *FILES.values())))
    schemas, definitions = msgspec.json.schema_components(roots, ref_template="#/$defs/{name}")
    by_type = dict(zip(roots, schemas, strict=True))
    for one in _classes():
        definition, said = definitions[one.__name__], described(one)
        definition["description"] = _first_sentence(one)
        for name, properties in definition["properties"].items():
            properties["description"] = said[name]
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What autosplit's commands print with --json",
        "commands": {command: by_type[answer] for command, answer in {**ANSWERS, **FILES}.items()},
        "$defs": definitions,
    }
    plain: dict[str, Any] = json.loads(json.dumps(made))  # as a reader parses it
    return plain


def described(one: type) -> dict[str, str]:
    """Return the descriptions of a dataclass's fields, with those of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(one.__mro__):
        document = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = re.search(r"^Attributes:\n((?: +.*\n?|\n)+)", document, re.MULTILINE)
        if section:
            entries = re.findall(r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", section[1], re.MULTILINE)
            found.update({name: " ".join(text.split()) for name, text in entries})
    return found


def _classes() -> list[type]:
    """List the dataclasses that are printed, each after the first that holds it."""
    found: list[type] = []

    def add(hint: Any) -> None:
        parts = list(typing.get_args(hint))
        if is_dataclass(hint) and isinstance(hint, type) and hint not in found:
            found.append(hint)
            parts = list(typing.get_type_hints(hint).values())
        for part in parts:
            add(part)

    for answer in (*ANSWERS.values(), *FILES.values()):
        add(answer)
    return found


def _type_text(hint: Any) -> str:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_text, parts))
    if origin is tuple:
        same = len(parts) == 2 and parts[1] is ...
        return f"list of {_type_text(parts[0])}" if same else f"list of ({', '.join(map(_type_text, parts))})"
    if origin in (dict, Mapping):
        return "object" if parts[1] is Any else f"object of {_type_text(parts[1])}"
    raise TypeError(f"no words for {hint}")


def _first_sentence(one: type) -> str:
    return inspect.cleandoc(one.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ").replace("``", "`")


def _in_a_cell(text: str) -> str:
    return re.sub(r"\bNone\b", "`null`", text.replace("``", "`").replace("|", "\\|"))


def command_line() -> str:
    """Return docs/command-line.md: the help of each command at a width of 80 columns."""
    parts = ["# Command line", "`python docs/make.py` writes this page from the `--help` of each command."]
    names = re.findall(r"^  ([a-z]+) ", _help().split("Commands:")[1], re.MULTILINE)
    for name in ["", *names]:
        parts.append(f"## autosplit {name}".rstrip())
        parts.append(f"```\n{_help(*name.split())}\n```")
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    line = [sys.executable, "-m", "autosplit", *command, "--help"]
    said = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout  # noqa: S603  # our own
    return "\n".join(line.rstrip() for line in said.strip().splitlines())


def with_scripts(text: str) -> str:
    """Return a page with the text of each example after `<!-- examples/NAME.py -->`."""

    def shown(found: re.Match[str]) -> str:
        return f"{found[1]}{(FOLDER.parent / found[2]).read_text(encoding='utf-8')}```"

    return re.sub(
        r"(<!-- (examples/[\w.]+) -->\n``` \{ \.python \}\n).*?^```$", shown, text, flags=re.DOTALL | re.MULTILINE
    )


def main() -> None:
    """Write the files."""
    assert Plan in ANSWERS.values(), "what tune prints"
    for shows in FOLDER.glob("*.md"):
        text = shows.read_text(encoding="utf-8")
        if with_scripts(text) != text:
            shows.write_text(with_scripts(text), encoding="utf-8")
    (FOLDER / "json.md").write_text(page(), encoding="utf-8")
    (FOLDER / "command-line.md").write_text(command_line(), encoding="utf-8")
    (FOLDER / "json-schema.json").write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
