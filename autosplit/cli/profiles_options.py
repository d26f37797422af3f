"""The command line of `autosplit profiles`, a group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from autosplit.cli.options import Code, Command, Details, Json, Quiet, Text, Verbose, example, to_run
from autosplit.cli.output import Manner

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
def profiles_command(
    context: typer.Context, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> Command | None:
    """List, show and remove remembered plans; without a command, list them."""
    manner = Manner(as_json, quiet, verbose)
    if context.invoked_subcommand is None:
        return to_run("profiles.list_profiles", manner)
    context.obj = manner
    return None


def _manner(context: typer.Context, as_json: bool, quiet: bool, verbose: bool, **forms: bool) -> Manner:
    """Put flags before a command of `profiles` and those behind it together."""
    before: Manner = context.obj
    return Manner(as_json or before.as_json, quiet or before.quiet, verbose or before.verbose, **forms)


@profiles_app.command("list", epilog=example("autosplit profiles list --json"))
def profiles_list_command(
    context: typer.Context, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> Command:
    """List what is remembered, the newest first."""
    return to_run("profiles.list_profiles", _manner(context, as_json, quiet, verbose))


@profiles_app.command("show", epilog=example("autosplit profiles show 3f2a"))
def profiles_show_command(
    context: typer.Context,
    key: _Key = None,
    details: Details = False,
    code: Code = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Show a remembered plan. Without a key, list them and show the newest."""
    manner = _manner(context, as_json, quiet, verbose, details=details, code=code)
    return to_run("show.show_profile", manner, key)


@profiles_app.command("path", epilog=example("autosplit profiles path", "autosplit profiles path 3f2a"))
def profiles_path_command(
    context: typer.Context, key: _Key = None, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> Command:
    """Print the folder of the profiles, or the file of one."""
    return to_run("profiles.show_path", _manner(context, as_json, quiet, verbose), key)


@profiles_app.command(
    "remove", epilog=example("autosplit profiles remove 3f2a 91c0", "autosplit profiles remove --all --yes")
)
def profiles_remove_command(
    context: typer.Context,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Beginnings of profiles' keys.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; on a terminal it asks first.")] = False,
    confirmed: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Forget remembered plans, and say which. Nothing outside the cache is ever removed."""
    manner = _manner(context, as_json, quiet, verbose)
    return to_run("profiles.remove_profiles", manner, keys or [], everything=everything, confirmed=confirmed)
