"""The command line of `autosplit profiles`, a group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from autosplit.cli.options import Code, Details, Text, command, example, parsed_by

__all__ = ["profiles_app"]

profiles_app = typer.Typer(
    help="List, show and remove remembered plans.",
    invoke_without_command=True,
    epilog=example("autosplit profiles", "autosplit profiles remove 3f2a"),
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_Key = Annotated[Text, typer.Argument(metavar="KEY", help="The beginning of a profile's key.", show_default=False)]


@profiles_app.callback()
@parsed_by("profiles.list_profiles")
def profiles_command() -> None:
    """List, show and remove remembered plans; without a command, list them."""


@command(profiles_app, "list", "profiles.list_profiles", "autosplit profiles list --json")
def profiles_list_command() -> None:
    """List what is remembered, the newest first."""


@command(profiles_app, "show", "show.show_profile", "autosplit profiles show 3f2a")
def profiles_show_command(key: _Key = None, details: Details = False, code: Code = False) -> None:
    """Show a remembered plan. Without a key, list them and show the newest."""


@command(profiles_app, "path", "profiles.show_path", "autosplit profiles path", "autosplit profiles path 3f2a")
def profiles_path_command(key: _Key = None) -> None:
    """Print the folder of the profiles, or the file of one."""


@command(
    profiles_app,
    "remove",
    "profiles.remove_profiles",
    "autosplit profiles remove 3f2a 91c0",
    "autosplit profiles remove --all --yes",
)
def profiles_remove_command(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Beginnings of profiles' keys.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; on a terminal it asks first.")] = False,
    confirmed: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget remembered plans, and say which. Nothing outside the cache is ever removed."""
