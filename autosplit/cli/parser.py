"""Make the parser and the help of a command from its declaration, and parse a command line.

Each command has a module, which is imported when the command runs. So `--help` needs neither torch nor rich.
"""

from __future__ import annotations

import difflib
import functools
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from autosplit import addons
from autosplit.cli import options as o
from autosplit.cli.options import Command, Option
from autosplit.cli.output import Manner, finish, logged
from autosplit.errors import InputError, shown

EXIT_CODES = """Exit codes:
  0  done
  2  bad input
  3  does not fit
  4  interrupted: the best plan so far is shown and saved
  5  the workload's own code raised
Ctrl-C stops with the best plan so far. A second Ctrl-C stops at once."""

_REMOVED = {
    "--fits": "Run autosplit probe --role resume, save or eval.",
    "--storage": "The plan has every trial: autosplit show --json",
}
"""Options that older versions had, with the replacement."""


class _Layout(RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: Any) -> str:
        """Print ``-o, --output PATH`` before Python 3.13 too."""
        return super()._format_action_invocation(action).replace("-o PATH,", "-o,")


class _Parser(ArgumentParser):
    def __init__(self, name: str, text: str, epilog: str, groups: Mapping[str, Sequence[Option]], after: str) -> None:
        """Make the parser of a command. `after` follows the name in the usage line, with the positional arguments."""
        super().__init__(
            prog=name,
            description=text,
            epilog=epilog,
            formatter_class=_Layout,
            add_help=False,  # `options.OF_ALL` has --help
            allow_abbrev=False,
            argument_default=SUPPRESS,  # an option that was not given has the default of the Python function
        )
        positional = [one.metavar for options in groups.values() for one in options if not one.usage.startswith("-")]
        self.usage = " ".join([name, "[OPTIONS]", *positional, *after.split()])
        for title, options in groups.items():
            group = self.add_argument_group(title)
            for option in options:
                option.add_to(group)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": '", " '", 1)
        end = "" if message[-1] in ".?" else "."
        raise InputError(f"{message}{end} See {self.prog} --help.")

    def refuse_command(self, word: str, known: Sequence[str]) -> NoReturn:
        near = difflib.get_close_matches(word, known, 1)
        self.error(f"{shown(word)} is not a command. Did you mean {near[0] if near else ' or '.join(known)}?")

    def parsed(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that were given, by keyword."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            self.refuse(unknown)
        return vars(found)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        wrong = next((word for word in unknown if word.startswith("-")), None)
        if wrong is None:
            self.error(f"unexpected argument {shown(unknown[0])}")
        name = wrong.partition("=")[0]
        if name in _REMOVED:
            self.error(f"{name} was removed. {_REMOVED[name]}")
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        self.error(f"{shown(wrong)} is not an option{f'. Did you mean {near[0]}?' if near else ''}")


def commands() -> dict[str, Command]:
    """Return every command by the words that name it, without commands of packages that are not installed."""
    found: dict[str, Command] = {}
    for name, place in addons.COMMANDS.items():
        if addons.is_installed(place):
            found[name] = addons.found_at(place)
            found |= {f"{name} {last}": command for last, command in found[name].subcommands.items()}
    return found


def _top_parser() -> _Parser:
    text = "Find the fastest batch size, per-GPU split and accumulation steps for training a PyTorch model."
    epilog = f"{_listed((name, one) for name, one in commands().items() if ' ' not in name)}\n\n{EXIT_CODES}"
    groups = o.groups_of({"Options": {"--version": "Print the version and exit.", **o.HELP}})
    return _Parser("autosplit", text, epilog, groups, "COMMAND ...")


def _parser_of(name: str, command: Command) -> _Parser:
    examples = command.example.splitlines()
    epilog = "\n  ".join([f"Example{'s' * (len(examples) > 1)}:", *examples])
    if command.subcommands:
        epilog = f"{_listed(command.subcommands.items())}\n\n{epilog}"
    after = "[COMMAND]" if command.subcommands else ""
    return _Parser(f"autosplit {name}", command.text, epilog, command.groups(), after)


def _listed(found: Iterable[tuple[str, Command]]) -> str:
    return "\n".join(["Commands:", *(f"  {name:<10}{command.text.splitlines()[0]}" for name, command in found)])


def parse(words: Sequence[str]) -> Callable[[], int]:
    """Return the command that was typed, as a function without arguments.

    Raises:
        InputError: The command does not exist, or an option is wrong.
        SystemExit: The help was printed.
    """
    if words[0].startswith("-"):
        top = _top_parser()
        return _print_version if "version" in top.parsed(words) else top.error("The command is missing")
    name, command, rest = _named(words)
    parser = _parser_of(name, command)
    options = [option for group in command.groups().values() for option in group]
    typed = parser.parsed(_with_separator(options, rest) if name == "launch" else rest)
    flags = {one.name: typed.pop(one.name) for one in fields(Manner) if one.name in typed}
    model = [Option(*one) for one in o.MODEL.items()]
    if model[0] in options:
        typed["model_options"] = {one.keyword: typed.pop(one.keyword) for one in model if one.keyword in typed}
    return functools.partial(_run, command.body, Manner(**flags, words=tuple(words)), typed)


def _named(words: Sequence[str]) -> tuple[str, Command, list[str]]:
    """Return the command that the words name, its name, and the other words."""
    name, rest = words[0], list(words[1:])
    if name not in addons.COMMANDS:
        _top_parser().refuse_command(name, [*addons.COMMANDS])
    command: Command = addons.found_at(addons.COMMANDS[name])
    second = next((word for word in rest if not word.startswith("-")), None)
    if not command.subcommands or second is None:
        return name, command, rest
    if second not in command.subcommands:
        _parser_of(name, command).refuse_command(second, [*command.subcommands])
    rest.remove(second)
    return f"{name} {second}", command.subcommands[second], rest


def _with_separator(options: Iterable[Option], words: Sequence[str]) -> list[str]:
    """Put ``--`` before the first word that is not one of these options, so argparse ignores later words."""
    takes_value = {name: bool(one.metavar) for one in options for name in one.names if name.startswith("-")}
    place = 0
    while place < len(words) and words[place].partition("=")[0] in takes_value:
        place += 2 if takes_value.get(words[place]) else 1
    return [*words[:place], *([] if words[place : place + 1] == ["--"] else ["--"]), *words[place:]]


def _print_version() -> int:
    from autosplit import __version__

    sys.stdout.write(f"autosplit {__version__}\n")
    return 0


def _run(body: str, manner: Manner, typed: dict[str, Any]) -> int:
    with logged(manner):
        return finish(addons.found_at(body)(manner, **typed), manner)
