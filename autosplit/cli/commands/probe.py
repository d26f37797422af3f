"""Run ``autosplit probe``: find the largest batch of each device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.addons import addon
from autosplit.cli.output import EXIT_INTERRUPTED, CommandResult, Manner, Problem, collected, print_problems, progress
from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.cli.workload_arguments import isolates, sendable, users_errors, workload_of_spec
from autosplit.devices.device import Device, parse_reserve
from autosplit.errors import InputError
from autosplit.solve.memory import Ceiling, Role
from autosplit.text import counted_text, size_text
from autosplit.tuning.progress import Progress

_REASONS = {"memory": "memory", "max_batch_size": "max_batch_size", "kernel": "a kernel", "time": "time"}


@dataclass(frozen=True)
class ProbedCeiling(Ceiling):
    """A ceiling and its headroom.

    Attributes:
        headroom_bytes: The part of the capacity that is free at the ceiling. Negative if not even one sample fits.
    """

    headroom_bytes: int = 0


@dataclass(frozen=True)
class Ceilings:
    """The ceilings that were found.

    Attributes:
        simulated: Whether the GPUs are simulated.
        ceilings: One for each device and role, in the order of the command line.
        notes: Notes on the ceilings, one sentence each.
    """

    simulated: bool
    ceilings: tuple[ProbedCeiling, ...]
    notes: tuple[str, ...]


def probe(
    manner: Manner,
    *,
    spec: str,
    model_options: Mapping[str, Any],
    devices: str | None = None,
    role: Sequence[str] = (),
    plot: str | None = None,
    **keywords: Any,
) -> CommandResult[Ceilings] | int:
    """Find ceilings. If the search does not finish, return the ceilings found so far."""
    from autosplit.devices.spec import parse_devices
    from autosplit.tuning.tune import NO_GPU_NOTE

    roles = tuple(dict.fromkeys(role or ["rank"]))
    found_devices = parse_devices(devices)
    parse_reserve(keywords.get("reserve"))
    _check_flags(roles, keywords.get("time_limit_s"), plot)
    ceilings: list[Ceiling] = []
    problems: list[Problem] = []
    try:
        with progress(manner) as report:
            _find_ceilings(spec, model_options, found_devices, roles, report, ceilings, problems, **keywords)
    except KeyboardInterrupt:
        text = "the ceilings found so far are shown" if ceilings else "no ceiling was found yet"
        text = f"The search was interrupted, and {text}. Run the command again for all ceilings."
        problems.append(Problem(text, EXIT_INTERRUPTED))
    if not any(ceiling.batch_size for ceiling in ceilings):
        return print_problems(problems)
    simulated = found_devices[0].kind == "sim"
    no_gpu = (NO_GPU_NOTE,) if devices is None and found_devices[0].label == "cpu" else ()
    notes = tuple(dict.fromkeys(map(str, [*no_gpu, *(note for one in ceilings for note in one.notes)])))
    value = {"simulated": simulated, "ceilings": ceilings, "notes": notes}
    if plot is not None:
        with collected(problems):
            addon("ceiling_plot")(ceilings, plot)
    return CommandResult(
        msgspec.convert(value, Ceilings, from_attributes=True),
        lambda console: _print(ceilings, notes, console, simulated=simulated),
        problems,
    )


def _check_flags(roles: Sequence[str], time_limit_s: float | None, plot: str | None) -> None:
    for role in roles:
        if role not in get_args(Role):
            raise InputError(f"--role {role!r} is not a role. Choose one of {', '.join(get_args(Role))}.")
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(
            f"--time-limit-s is {time_limit_s:g}. Expected more than 0 seconds. Leave it out for no limit."
        )
    if plot is not None:
        addon("check_plot")(plot)


def _find_ceilings(
    spec: str,
    model_options: Mapping[str, Any],
    devices: Sequence[Device],
    roles: Sequence[str],
    report: Callable[[Progress], None],
    ceilings: list[Ceiling],
    problems: list[Problem],
    *,
    time_limit_s: float | None = None,
    isolate: bool | None = None,
    **keywords: Any,
) -> None:
    from autosplit.oom import DoesNotFitError
    from autosplit.probe.find_ceiling import find_ceiling

    keywords["isolate"] = isolates(isolate, devices)
    source = sendable(spec, workload_of_spec(spec, **model_options), isolate=keywords["isolate"])
    ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    pairs: list[tuple[Device, Any]] = [(device, role) for device in devices for role in roles]
    known: dict[tuple[Device, str], Ceiling] = {}
    for done, (device, role) in enumerate(pairs):
        message = f"probing {done + 1} of {len(pairs)}: {device.label} as {role}"
        steps, ooms = sum(ceiling.steps for ceiling in ceilings), sum(ceiling.ooms for ceiling in ceilings)
        report(Progress("ceilings", message, done / len(pairs), steps, ooms))
        # Simulated GPUs of the same kind have exactly equal ceilings.
        alike = (replace(device, index=0) if device.kind == "sim" else device, role)
        if alike not in known:
            # Divide the remaining time equally.
            left_s = None if ends_s is None else max(0.001, (ends_s - time.monotonic()) / (len(pairs) - done))
            try:
                with users_errors(spec):
                    known[alike] = find_ceiling(source, device, role=role, time_limit_s=left_s, **keywords)
            except DoesNotFitError as error:
                problems.append(Problem(str(error), error.exit_code))
                needed_bytes, capacity_bytes = error.requested_bytes, error.capacity_bytes
                known[alike] = Ceiling(device.label, role, 0, "memory", 0, 0, needed_bytes, capacity_bytes)
        ceilings.append(replace(known[alike], device=device.label))


def _print(ceilings: Sequence[Ceiling], notes: Iterable[str], console: Console, *, simulated: bool) -> None:
    if simulated:
        print_plain(Text("simulated: predicted for GPUs that this machine does not have", "yellow"), console)
    print_plain(_ceiling_table(ceilings, simulated=simulated), console)
    print_bullets(notes, console)


def _ceiling_table(ceilings: Sequence[Ceiling], *, simulated: bool) -> Table:
    headings = ("device", "role", "ceiling", "limited by", "fixed", "per sample", "headroom", "found with")
    table = plain_table(*headings, figures=("ceiling", "fixed", "per sample", "headroom"))
    for ceiling in ceilings:
        sizes = (ceiling.fixed_bytes, ceiling.bytes_per_sample, ceiling.headroom_bytes)
        add_row(
            table,
            ceiling.device,
            ceiling.role,
            f"{ceiling.batch_size:,}",
            _REASONS[ceiling.limited_by],
            *(size_text(n) if ceiling.batch_size else "-" for n in sizes),
            _found_text(ceiling, simulated=simulated),
        )
    return table


def _found_text(ceiling: Ceiling, *, simulated: bool) -> str:
    if not ceiling.batch_size:
        return "does not fit"
    if simulated:
        return "traces"
    sure = "confirmed" if ceiling.confirmed else "predicted"
    return f"{counted_text(ceiling.steps, 'step')}, {ceiling.ooms} OOM, {sure}"
