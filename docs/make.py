"""Writes docs/json.md, docs/json-schema.json, docs/command-line.md and the pages' scripts: python docs/make.py.

The schema has the "Attributes" of classes, and the page of commands has their `--help`. Tests compare the files with
its output.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from autosplit.addons import found_at
from autosplit.cli.output import CommandResult
from autosplit.cli.parser import commands
from autosplit.plan.plan import Plan
from autosplit.plan.record import SCHEMA_VERSION
from autosplit.tools.examination import SharedResult


def type_of_answer(place: str) -> type:
    """Return the type of a command's answer, from the annotation of its function."""
    hint = typing.get_type_hints(found_at(place))["return"]
    answer = next(one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is CommandResult)
    found: type = typing.get_args(answer)[0]
    return found


ANSWERS: Mapping[str, type] = {
    **{name: type_of_answer(command.body) for name, command in commands().items()},
    "compare --models": type_of_answer("sim.compare_models_command:compare_models"),
}
"""The type of each command's answer."""

FILES: Mapping[str, type] = {"doctor --share": SharedResult}
"""The type of each file that a command writes, by the command."""

FOLDER = Path(__file__).parent
WIDTH = 110

SHOWN = "python -m autosplit tune examples/char_gpt.py --devices sim:RTX4090 --effective-batch-size 4096 --json"
"""The command whose output docs/json.md shows. Its figures are the same on every machine."""


def page(plan: Mapping[str, Any]) -> str:
    """Return docs/json.md, with a plan as an example."""
    return f"""# What `--json` prints

`python docs/make.py` writes this page. [json-schema.json](json-schema.json) describes every key of every command as
JSON Schema: `commands` has the type of each command's output, and `$defs` has the types.

Every command takes `--json` and prints one JSON value on stdout. Progress, notes and errors go to stderr. The exit code
is the same as without `--json`. If there is no answer, stdout stays empty. For example, `show` without a plan prints
nothing on stdout and exits with 2.

- Names contain the unit: `_bytes`, `_s` (seconds), `samples_per_s`, `_percent`, `_c` (degrees Celsius), `_w` (watts).
- A share is a number from 0 to 1. Sizes without a unit are samples. Unknown values are `null`.
- A new version may add keys. `schema_version` of a plan (now {SCHEMA_VERSION}) changes if a key is removed or changes
  its meaning. Plans of older versions are converted when they are read, and a newer version raises an error.

`tune` and `show` print a plan, the same JSON as `--output` and `Plan.save` write and `Plan.load` reads:

```sh
{SHOWN}
```

```json
{_lines_of(plan)}
```
"""


def example() -> dict[str, Any]:
    """Return the plan that the shown command prints."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": cache}
        line = [sys.executable, *SHOWN.split()[1:]]
        done = subprocess.run(line, env=environment, cwd=FOLDER.parent, capture_output=True, text=True, check=True)  # noqa: S603  # our own
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def _lines_of(value: Any, indent: str = "", before: int = 0) -> str:
    """Return a value as JSON, with each part on one line if it fits."""
    short = json.dumps(value)
    if len(indent) + before + len(short) < WIDTH or not value or not isinstance(value, (Mapping, list)):
        return short
    inner, named = indent + "  ", isinstance(value, Mapping)
    names = [f"{json.dumps(name)}: " for name in value] if named else [""] * len(value)
    parts = value.values() if isinstance(value, Mapping) else value
    lines = [f"{inner}{name}{_lines_of(part, inner, len(name))}" for name, part in zip(names, parts, strict=True)]
    return "\n".join(["{" if named else "[", ",\n".join(lines), indent + ("}" if named else "]")])


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


def _first_sentence(one: type) -> str:
    return inspect.cleandoc(one.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ").replace("``", "`")


def command_line() -> str:
    """Return docs/command-line.md: the help of each command at a width of 80 columns. It describes each option once."""
    whole = _help()
    names = re.findall(r"^  ([a-z]+) ", whole.split("Commands:")[1], re.MULTILINE)
    helps = {name: _help(name) for name in names}
    common = set.intersection(*(set(_options(one)) for one in helps.values()))
    shown = "\n".join(entry.rstrip("\n") for name, entry in _options(helps[names[0]]).items() if name in common)
    parts = [
        "# Command line",
        """`python docs/make.py` writes this page from the `--help` of each command. If several commands have an option,
only the first one shows it.""",
        f"## autosplit\n\n```\n{whole}\n```",
        f"Options of every command:\n\n```\n{shown}\n```",
    ]
    first_of: dict[tuple[str, str], str] = {}
    for name, text in helps.items():
        parts.append(f"## autosplit {name}\n\n```\n{_without_repeats(name, text, common, first_of)}\n```")
    return "\n\n".join(parts) + "\n"


def _options(text: str) -> dict[str, str]:
    """Return the entry of each option in a help."""
    entries = re.findall(
        r"^(  ((?:-|FILE|\[PLAN)[^\n]*?)(?:  +[^\n]*)?\n(?: {4,}\S[^\n]*\n)*)", text + "\n", re.MULTILINE
    )
    return {name: entry for entry, name in entries}


def _without_repeats(command: str, text: str, common: set[str], first_of: dict[tuple[str, str], str]) -> str:
    """Return a help without the options that the page has already. The last lines name the commands that have them."""
    text += "\n"
    repeated: dict[str, list[str]] = {}
    for name, entry in _options(text).items():
        first = first_of.setdefault((name, " ".join(entry.split())), command)
        if name in common or first != command:
            text = text.replace(entry, "", 1)
        if name not in common and first != command:
            repeated.setdefault(first, []).append(name.split()[0].rstrip(","))
    text = re.sub(r"^[A-Z]\w+:\n(?=\n|\Z)", "", text, flags=re.MULTILINE)  # groups without an entry
    also = [
        textwrap.fill(f"As in {first}: {', '.join(names)}", 80, break_on_hyphens=False)
        for first, names in repeated.items()
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join([text.strip(), *also]))


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
    (FOLDER / "json.md").write_text(page(example()), encoding="utf-8")
    (FOLDER / "command-line.md").write_text(command_line(), encoding="utf-8")
    (FOLDER / "json-schema.json").write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
