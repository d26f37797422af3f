"""``autosplit probe``: how many samples each device holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosplit.cli.json_types import Ceilings, ProbedCeiling
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed, print_answer, progress
from autosplit.cli.tables import add_row, counted_text, plain_table, print_bullets, print_plain
from autosplit.cli.terminal import stdout_kept_clean
from autosplit.cli.workload_arguments import check_before_running, isolates, sendable, users_errors
from autosplit.devices.device import Device
from autosplit.errors import InputError
from autosplit.plan.canvas import check_drawing
from autosplit.solve.memory import Ceiling, Role
from autosplit.text import size_text
from autosplit.tuning.progress import Progress

if TYPE_CHECKING:
    from autosplit.oom import DoesNotFitError

_REASONS = {"memory": "memory", "max_batch_size": "max_batch_size", "kernel": "a kernel", "time": "time"}


@dataclass
class Probing:
    """The devices to probe, and the ceilings found so far."""

    spec: str
    model_options: dict[str, Any]
    keywords: dict[str, Any]
    devices_spec: str | None
    roles: tuple[str, ...]
    time_limit_s: float | None
    isolate: bool | None
    ceilings: list[Ceiling] = field(default_factory=list)
    misfits: list[DoesNotFitError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    simulated: bool = False


def probe(
    manner: Manner,
    *,
    spec: str,
    model_options: dict[str, Any],
    devices: str | None = None,
    role: Sequence[str] = (),
    time_limit_s: float | None = None,
    isolate: bool | None = None,
    plot: str | None = None,
    **keywords: Any,
) -> int:
    """Find ceilings, and print what was found, also where something kept it from all of them."""
    roles = tuple(dict.fromkeys(role or ["rank"]))
    probing = Probing(spec, model_options, keywords, devices, roles, time_limit_s, isolate)
    _check_before_probing(probing, plot)
    interrupted = False
    with stdout_kept_clean():
        try:
            with progress(manner) as tell:
                _find_ceilings(probing, tell)
        except KeyboardInterrupt:
            interrupted = True
    for error in probing.misfits:
        failed(str(error), error.exit_code)
    if interrupted:
        text = "the ceilings found so far are shown" if probing.ceilings else "no ceiling was found yet"
        failed(f"interrupted: {text}; run it again for all of them", EXIT_INTERRUPTED)
    if any(ceiling.batch_size for ceiling in probing.ceilings):
        _print_ceilings(probing, manner, plot=plot)
    if interrupted:
        return EXIT_INTERRUPTED
    return probing.misfits[0].exit_code if probing.misfits else 0


def _check_before_probing(probing: Probing, plot: str | None) -> None:
    """Refuse bad flags before the user's file runs, which may take long."""
    check_before_running({**probing.keywords, "devices": probing.devices_spec}, None)
    for role in probing.roles:
        if role not in get_args(Role):
            raise InputError(f"--role {role!r}: expected one of {', '.join(get_args(Role))}; choose one of them")
    if probing.time_limit_s is not None and not probing.time_limit_s > 0:
        raise InputError(
            f"--time-limit-s {probing.time_limit_s:g}: expected seconds, above 0; leave it out for no limit"
        )
    if plot is not None:
        _check_plot(plot)


def _find_ceilings(probing: Probing, tell: Callable[[Progress], None] | None) -> None:
    """Find the ceiling of each device in each role, one after the other, into `probing`."""
    from autosplit.devices.spec import parse_devices
    from autosplit.tuning.tune import NO_GPU_NOTE
    from autosplit.workload.from_file import load_workload

    workload: Any = load_workload(probing.spec, **probing.model_options)
    devices = parse_devices(probing.devices_spec)
    probing.simulated = devices[0].kind == "sim"
    if probing.devices_spec is None and devices[0].kind == "cpu":
        probing.notes.append(NO_GPU_NOTE)
    isolate = isolates(probing.isolate, devices)
    source = sendable(probing.spec, workload) if isolate else workload
    ends_s = None if probing.time_limit_s is None else time.monotonic() + probing.time_limit_s
    pairs = [(device, role) for device in devices for role in probing.roles]
    known: dict[tuple[Device, str], Ceiling] = {}
    for done, (device, role) in enumerate(pairs):
        message = f"probing {done + 1} of {len(pairs)}: {device.label} as {role}"
        _tell_ceiling(tell, probing.ceilings, message, done / len(pairs))
        # Cards that are not there are alike to the byte.
        alike = (replace(device, index=0) if probing.simulated else device, role)
        if alike not in known:
            # Each gets its part of what is left of the time.
            left_s = None if ends_s is None else max(0.001, (ends_s - time.monotonic()) / (len(pairs) - done))
            known[alike] = _ceiling_of(probing, source, device, role, time_limit_s=left_s, isolate=isolate)
        probing.ceilings.append(replace(known[alike], device=device.label))


def _tell_ceiling(
    tell: Callable[[Progress], None] | None, found: Sequence[Ceiling], message: str, fraction: float
) -> None:
    if tell is not None:
        steps, ooms = sum(ceiling.steps for ceiling in found), sum(ceiling.ooms for ceiling in found)
        tell(Progress("ceilings", message, fraction, steps, ooms))


def _ceiling_of(probing: Probing, source: Any, device: Device, role: Any, **keywords: Any) -> Ceiling:
    """Find one ceiling; where nothing fits it is 0, and why is kept."""
    from autosplit.oom import DoesNotFitError
    from autosplit.probe.find_ceiling import find_ceiling

    try:
        with users_errors(probing.spec):
            return find_ceiling(source, device, role=role, **probing.keywords, **keywords)
    except DoesNotFitError as error:
        probing.misfits.append(error)
        return Ceiling(device.label, role, 0, "memory", 0, 0, error.requested_bytes, error.capacity_bytes)


def _print_ceilings(probing: Probing, manner: Manner, *, plot: str | None) -> None:
    found, simulated = probing.ceilings, probing.simulated
    notes = tuple(dict.fromkeys([*probing.notes, *(note for ceiling in found for note in ceiling.notes)]))
    answer = Ceilings(simulated, tuple(map(ProbedCeiling.of, found)), notes)
    print_answer(answer, manner, lambda console: _print(found, notes, console, simulated=simulated))
    if plot is not None:  # last: where it can't be drawn, what took long to find is printed already
        _plot(found, plot)


def _print(ceilings: Sequence[Ceiling], notes: Iterable[str], console: Console, *, simulated: bool) -> None:
    """Print a table of ceilings: what limits them, what they hold, and how they were found.

    A `batch_size` of 0 is what does not fit.
    """
    if simulated:
        print_plain(Text("simulated: predicted for cards that are not here", "yellow"), console)
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


def _check_plot(path: str) -> None:
    """Refuse a plot that can't be drawn, for want of matplotlib or by its suffix, before what takes long."""
    check_drawing("--plot")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"--plot {path}: expected a file that ends in one of {', '.join(kinds)}; write it as plot.png")
    if not Path(path).parent.is_dir():
        raise InputError(f"--plot {path}: expected a folder that exists; make {Path(path).parent}, or choose another")


def _plot(ceilings: Sequence[Ceiling], path: str) -> None:
    """Draw bytes against batch for each ceiling above 0: its line, what was looked at, what ran, and the capacity."""
    from matplotlib.figure import Figure  # without pyplot: no window, and no state shared with the user's own plots

    found = [ceiling for ceiling in ceilings if ceiling.batch_size]
    columns = min(3, max(1, len(found)))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    for position, ceiling in enumerate(found, 1):
        _draw_ceiling(figure.add_subplot(rows, columns, position), ceiling)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(
            f"the plot can't be written to {path} ({error.strerror}); expected a file that can be; choose another"
        ) from error


def _draw_ceiling(axes: Any, ceiling: Ceiling) -> None:
    unit, factor = ("GiB", 2**30) if ceiling.capacity_bytes >= 2**30 else ("MiB", 2**20)
    ends = (0, ceiling.batch_size)
    axes.plot(
        ends,
        [(ceiling.fixed_bytes + ceiling.bytes_per_sample * n) / factor for n in ends],
        color="tab:blue",
        label=f"{size_text(ceiling.fixed_bytes)} + {size_text(ceiling.bytes_per_sample)} per sample",
    )
    points = [point for point in ceiling.points if point[0] <= 2 * ceiling.batch_size]
    for ran, marker, label in ((False, "x", "traced"), (True, "o", "ran")):
        chosen = [(n, nbytes / factor) for n, nbytes, it_ran in points if it_ran is ran]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, color="tab:blue", label=label)
    axes.axhline(ceiling.capacity_bytes / factor, color="tab:red", linestyle="--", label="capacity")
    axes.axvline(ceiling.batch_size, color="tab:gray", linestyle=":", label=f"ceiling {ceiling.batch_size:,}")
    axes.set(title=f"{ceiling.device} as {ceiling.role}", xlabel="samples", ylabel=unit, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small", loc="lower right")
