"""A plan for reading: the terminal table with the three numbers, the gain and the lines to paste; GPUs and ceilings.

Only here bytes become GiB and seconds ms. Everything is built from `Text`, so that brackets in a name stay brackets,
and what others wrote passes `printed.printable`, so that it shows itself and does nothing else.
"""

from __future__ import annotations

import importlib
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError
from autosplit.measure.check_result import Check, error_text
from autosplit.plan.plan import Plan
from autosplit.plan.record import PlanDevice, RankSettings
from autosplit.solve.memory import Ceiling
from autosplit.solve.split import even_split
from autosplit.text import ms_text, printable, rate_text, size_text

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from autosplit.devices.examination import Copy, Examination
    from autosplit.devices.inventory import DeviceReport
    from autosplit.plan.explanation import Explanation
    from autosplit.tuning.compare import ComparedMachine, Comparison

__all__ = [
    "Origin",
    "Told",
    "check_plot",
    "paste_lines",
    "plan_report",
    "plot_ceilings",
    "print_ceilings",
    "print_checks",
    "print_comparison",
    "print_devices",
    "print_plan",
    "request_text",
    "told_of",
]

_LIMITS = {"memory": " (memory)", "max_batch_size": " or more", "kernel": " (a kernel's limit)", "time": " (time)"}


@dataclass(frozen=True)
class Origin:
    """How to have a plan again.

    Attributes:
        expression: Python that gives the plan: ``autosplit.Plan.load("plan.json")``.
        setup: Lines that it needs before it.
        remark: A comment above it; empty for none.
        command: The command that tunes the same on real GPUs, shown with simulated plans; empty for what the plan
            knows of it.
        path: The plan's file, if it has one that is not the profile.
    """

    expression: str
    setup: tuple[str, ...] = ()
    remark: str = ""
    command: str = ""
    path: str | None = None


_SAVED = Origin('autosplit.Plan.load("plan.json")', remark='after plan.save("plan.json")', path="plan.json")


def print_plan(plan: Plan, console: Console, *, origin: Origin | None = None) -> None:
    """Print a plan's report.

    Args:
        plan: What to print.
        console: Where to.
        origin: How to have the plan again. Default: from a file that it would be saved to.
    """
    _print(plan_report(plan, origin=origin), console)


def _print(what: RenderableType, console: Console) -> None:
    """Print uncropped (a line to paste may be longer than the terminal) and, in plain text, without trailing blanks."""
    if console.is_terminal:
        console.print(what, crop=False)
        return
    with console.capture() as captured:
        console.print(what, crop=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


# ---------------------------------------------------------------------------------------------------------- a plan


@dataclass(frozen=True)
class Told:
    """What the report says of a plan, as texts, for whoever sets them otherwise than a terminal.

    Attributes:
        numbers: The numbers to set and what they make, by name.
        columns: Headings of the table of devices.
        devices: Its rows.
        ddp_heading: What DDP's numbers are, and which is faster.
        ddp: A line for each run of ranks with the same numbers.
        explained: Why the plan is what it is, a sentence each.
        notes: What was assumed or could not be done, a sentence each.
    """

    numbers: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]
    ddp_heading: str
    ddp: tuple[str, ...]
    explained: tuple[str, ...]
    notes: tuple[str, ...]


def told_of(plan: Plan, explanation: Explanation) -> Told:
    """Return what the report says of a plan.

    Args:
        plan: What is reported.
        explanation: Of it, which takes long enough to be made once.
    """
    return Told(
        numbers=tuple(_numbers(plan)),
        columns=_device_columns(plan),
        devices=tuple(_device_cells(plan)),
        ddp_heading=_ddp_heading(explanation),
        ddp=tuple(_ddp_lines(plan)),
        explained=tuple(_explained_lines(explanation)),
        notes=plan.notes,
    )


def plan_report(plan: Plan, *, origin: Origin | None = None) -> Group:
    """Build a plan's report: devices, numbers, gain, DDP's numbers, what explains it, notes, and lines to paste.

    Args:
        plan: What is reported.
        origin: How to have the plan again. Default: from a file that it would be saved to.

    Returns:
        A rich renderable.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if plan.simulated:
        parts.append(Text("simulated: predicted for cards that are not here; `wrap` refuses", "yellow"))
    if not plan.complete:
        parts.append(Text("interrupted: the best so far", "yellow"))
    parts.append(_device_table(plan))
    parts.append(_pairs(_numbers(plan)))
    explanation = plan.explain()
    ddp = _ddp_lines(plan)
    notes = [*_check_lines(plan.checks), *plan.notes]
    for heading, body in (
        (_ddp_heading(explanation), ddp),
        ("explained", _explained_lines(explanation)),
        ("notes", notes),
    ):
        if body:
            parts.extend([Text(f"\n{heading}", "bold"), _bullets(body)])
    heading = "on the machine that has the cards" if plan.simulated else "to use it"
    parts.append(Text(f"\n{heading}\n", "bold"))
    parts.extend(
        Text(printable(line, longest=None), no_wrap=True, overflow="ignore") for line in paste_lines(plan, origin)
    )
    return Group(*parts)


def paste_lines(plan: Plan, origin: Origin | None = None) -> tuple[str, ...]:
    """Return the lines that use a plan: Python for a real one, a command for a simulated one.

    Args:
        plan: The plan.
        origin: How to have it again. Default: from a file that it would be saved to.

    Returns:
        Lines without indentation of their own. The Python expects `model`, `optimizer`, `loss_fn` and `dataset`.
    """
    origin = origin or _SAVED
    if plan.simulated:
        return (origin.command or _command_again(plan),)
    if plan.region is None and len(plan.ddp.ranks) > 1 and plan.split == tuple(r.batch_size for r in plan.ddp.ranks):
        return _ranks_lines(origin)
    return (
        "import autosplit",
        "from torch.utils.data import DataLoader",
        *origin.setup,
        "",
        *([f"# {origin.remark}"] if origin.remark else []),
        f"plan = {origin.expression}",
        "model = plan.wrap(model)",
        "sampler = plan.batch_sampler(len(dataset), shuffle=True)",
        "loader = DataLoader(dataset, batch_sampler=sampler)",
        "for step in plan.steps(loader):",
        "    for inputs, targets in step:",
        "        step.backward(loss_fn(model(inputs), targets.to(model.output_device)))",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    )


def _command_again(plan: Plan) -> str:
    """Return the command that asks for the same on real GPUs, of a workload whose file the plan does not know."""
    asked = dict(plan.request)
    sizes = asked.get("effective_batch_size")
    if isinstance(sizes, list):
        asked["effective_batch_size"] = ":".join(map(str, sizes))
    words = ["python", "-m", "autosplit", "tune", "FILE", "--devices", "cuda"]
    for keyword, usual in (
        ("strategy", "auto"),
        ("effective_batch_size", None),
        ("max_batch_size", None),
        ("reserve", None),
        ("name", None),
    ):
        if asked.get(keyword) not in (None, usual):
            words += [f"--{keyword.replace('_', '-')}", str(asked[keyword])]
    return shlex.join(words)


def _ranks_lines(origin: Origin) -> tuple[str, ...]:
    """Return the lines that use a plan of DDP's ranks alone."""
    given = "" if origin.path is None else f" --plan {shlex.quote(origin.path)}"
    return (
        "import autosplit.ddp",
        "from torch.utils.data import DataLoader",
        "",
        f"# in train.py, started by: python -m autosplit launch{given} train.py",
        "with autosplit.ddp.setup() as ctx:",
        "    model = ctx.wrap(model)",
        "    sampler = ctx.batch_sampler(len(dataset), shuffle=True)",
        "    loader = DataLoader(dataset, batch_sampler=sampler)",
        "    for step in ctx.steps(loader):",
        "        for inputs, targets in step:",
        "            step.backward(loss_fn(model(inputs.to(ctx.device)), targets.to(ctx.device)))",
        "        optimizer.step()",
        "        optimizer.zero_grad()",
    )


def _device_table(plan: Plan) -> Table:
    """A row for each device; on a single one there are no shares to speak of."""
    table = _table()
    for heading in _device_columns(plan):
        table.add_column(heading, justify="left" if heading in ("device", "ceiling") else "right", overflow="fold")
    for cells in _device_cells(plan):
        _add_row(table, *cells)
    return table


def _device_columns(plan: Plan) -> tuple[str, ...]:
    several = len(plan.devices) > 1
    share = ("share",) if several else ()
    return ("device", *share, f"memory at this {'split' if several else 'batch'}", "ceiling", "busy time")


def _device_cells(plan: Plan) -> Iterator[tuple[str, ...]]:
    several = len(plan.devices) > 1
    for device, ceiling in zip(plan.devices, plan.ceilings, strict=True):
        yield (
            _device_text(device),
            *([f"{device.share:,}"] if several else []),
            _memory_text(device.peak_bytes, device.capacity_bytes),
            f"{ceiling:,}{_limit_text(device, simulated=plan.simulated)}",
            ms_text(device.busy_s),
        )


def _device_text(device: PlanDevice) -> str:
    return device.label if device.kind == "cpu" else f"{device.label} {_short_name(device.name)}"


def _limit_text(device: PlanDevice, *, simulated: bool) -> str:
    """What the ceiling was limited by, and whether it is only a prediction where it could have been run."""
    return _LIMITS[device.ceiling.limited_by] + ("" if simulated or device.ceiling.confirmed else ", not run")


def _samples_text(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _numbers(plan: Plan) -> list[tuple[str, str]]:
    """The numbers that the user sets, what they make, and what is gained."""
    several = len(plan.devices) > 1
    rows = [("split", _tuple_text(plan.split)), ("gpu0_bsz", f"{plan.gpu0_bsz}")] if several else []
    rows.append(("batch_size", f"{plan.batch_size}"))
    rows.append(("accumulation_steps", f"{plan.accumulation_steps}{_short_step_text(plan)}"))
    rows.append(("effective batch", f"{_samples_text(plan.effective_batch_size)} per optimizer step"))
    rows.append(("throughput", f"{rate_text(plan.samples_per_s)}{' (simulated)' if plan.simulated else ''}"))
    if several:
        rows.append(("gain", _gain_text(plan)))
    if plan.trials:
        rows.append(("found with", _effort_text(plan)))
    return rows


def _short_step_text(plan: Plan) -> str:
    """Say so where the last micro-step is smaller."""
    last = plan.effective_batch_size - (plan.accumulation_steps - 1) * plan.batch_size
    return "" if last == plan.batch_size else f" (the last of {_samples_text(last)})"


def _gain_text(plan: Plan) -> str:
    """Compare with the even split of the same batch, as far as that says something."""
    even = even_split(plan.batch_size, len(plan.split))
    if all(device.kind == "cpu" for device in plan.devices):
        return "none is claimed over an even split: these devices share one processor"
    if plan.split == even:
        return "none: the even split is the answer"
    if plan.even_samples_per_s is not None:
        return f"{plan.samples_per_s / plan.even_samples_per_s:.2f} times the even split {_tuple_text(even)}"
    pairs = zip(plan.devices, even, plan.ceilings, strict=True)
    over = [f"{device.label}'s ceiling of {most}" for device, share, most in pairs if share > most]
    if over:
        return f"the even split {_tuple_text(even)} is above {', '.join(over)}"
    return f"the even split {_tuple_text(even)} was not run"


def _effort_text(plan: Plan) -> str:
    failed = sum(trial.failure is not None for trial in plan.trials)
    text = _count(len(plan.trials), "trial") + (f" ({failed} failed)" if failed else "")
    if plan.simulated and not plan.real_steps:
        return f"{text}, no real step"
    return f"{text}, {_count(plan.real_steps, 'real step')}, {plan.real_ooms} out of memory"


def _ddp_lines(plan: Plan) -> list[str]:
    """A line for each run of ranks with the same numbers; on a single device DDP has nothing to divide."""
    if len(plan.devices) == 1:
        return []
    if not plan.ddp.ranks:
        return [plan.ddp.reason] if plan.ddp.reason else []
    lines = [
        _ranks_text(list(ranks))
        for _, ranks in itertools.groupby(plan.ddp.ranks, lambda rank: (rank.batch_size, rank.accumulation_steps))
    ]
    effective = plan.ddp.effective_batch_size
    other = (
        f", {_samples_text(effective)} per optimizer step" if effective not in (0, plan.effective_batch_size) else ""
    )
    return [*lines, f"together {rate_text(plan.ddp.samples_per_s)}{other}"]


def _ddp_heading(explanation: Explanation) -> str:
    """Say what DDP's numbers are, and which is faster where there are two answers."""
    heading = f"DDP, {'measured' if explanation.ddp_measured else 'predicted'}"
    compared = explanation.comparison().removeprefix("DDP is ")
    return f"{heading}: {compared}" if compared else heading


def _explained_lines(explanation: Explanation) -> list[str]:
    """Leave out what stands elsewhere in the report, and what would bring nothing."""
    left_out = {"ddp"}
    if explanation.shares_processor or explanation.even_measured is not None:
        left_out.add("even")  # the gain's row says it
    if explanation.more_memory is not None and not explanation.more_memory.pays:
        left_out.add("memory")
    return [text for subject, text in explanation.sentences().items() if subject not in left_out]


def _ranks_text(ranks: Sequence[RankSettings]) -> str:
    first, last = ranks[0], ranks[-1]
    who = f"rank {first.rank} ({first.device})"
    if last is not first:
        who = f"ranks {first.rank} to {last.rank} ({first.device} to {last.device})"
    return f"{who}: batch_size {first.batch_size}, accumulation_steps {first.accumulation_steps}"


def request_text(request: Mapping[str, Any]) -> str:
    """Say what was asked for, less the devices, the name and what is the default: ``effective_batch_size 256:512``."""
    defaults = {"strategy": "auto"}
    texts = []
    for name, value in request.items():
        if name not in ("devices", "name") and value not in (None, defaults.get(name)):
            texts.append(f"{name} {':'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return ", ".join(texts)


# ---------------------------------------------------------------------------------------------------------- devices


def print_devices(devices: Sequence[DeviceReport], notes: Iterable[str], console: Console) -> None:
    """Print a table of GPUs with their load, and what there is to say of them.

    Args:
        devices: From `survey_devices`; without any, a line says so and names ``cpu`` and ``sim:``.
        notes: On the whole.
        console: Where to.
    """
    from rich.text import Text

    if devices:
        _print(_gpu_table(devices), console)
    else:
        text = "no GPU here: tune with --devices cpu, or for GPUs elsewhere with --devices sim:2xRTX3090"
        _print(Text(text), console)
    own = [f"{_gpu_label(device)}: {note}" for device in devices for note in device.notes]
    if lines := [*notes, *own]:
        _print(_bullets(lines), console)


def print_examination(found: Examination, console: Console) -> None:
    """Print a machine's examination.

    Args:
        found: From `examine`.
        console: Where to.
    """
    build = f"torch {found.torch}" + (f", CUDA {found.cuda}" if found.cuda else "")
    _print(_pairs([("runs on", found.kind), ("build", build), ("driver", found.driver or "-")]), console)
    _print(_card_table(found), console)
    rows = [(f"{one.source} to {one.destination}", _copied_text(one)) for one in found.copies]
    if (meeting := found.collective) is not None:
        rate = "they do not meet" if meeting.gb_per_s is None else f"{meeting.gb_per_s:.3g} GB/s of gradients"
        rows.append((f"{meeting.ranks} ranks by {meeting.backend}", rate))
    if (training := found.training) is not None:
        measured, predicted = training.measured_samples_per_s, training.predicted_samples_per_s
        split = " + ".join(str(share) for share in training.split)
        rows += [
            ("a small model", f"{split} samples per forward; tuned in {training.took_s:.0f} s"),
            ("its throughput", f"{rate_text(measured)}, predicted {rate_text(predicted)}"),
            (
                "its memory",
                f"{_sizes_text(training.measured_bytes)}, predicted {_sizes_text(training.predicted_bytes)}",
            ),
        ]
    _print(_pairs(rows), console)
    if found.notes:
        _print(_bullets(found.notes), console)
    if not found.problems:
        _print(_bullets([f"nothing is wrong; this took {found.took_s:.0f} s"]), console)
    for one in found.problems:
        _print(_pairs([("wrong", one.problem), ("cure", one.cure or "-")]), console)


def _card_table(found: Examination) -> Table:
    table = _table()
    table.add_column("device", overflow="fold")
    table.add_column("name", overflow="fold")
    for heading in ("memory", "free", *found.cards[0].tflops, "memory rate", "launch"):
        table.add_column(heading, justify="right", overflow="fold")
    for card in found.cards:
        products = [_part_text(f"{rate:.3g} T", card.tflops_of_catalogue.get(n)) for n, rate in card.tflops.items()]
        _add_row(
            table,
            card.device,
            _short_name(card.name),
            size_text(card.memory_bytes),
            _known_bytes(card.free_bytes),
            *products,
            _part_text(f"{card.memory_gb_per_s:.3g} GB/s", card.memory_of_catalogue),
            f"{1e6 * card.launch_s:.1f} us",
        )
    return table


def _part_text(rate: str, part: float | None) -> str:
    return rate if part is None else f"{rate} ({part:.0%})"


def _copied_text(one: Copy) -> str:
    return f"{one.gb_per_s:.3g} GB/s{'' if one.arrives else ', and arrives wrong'}"


def _sizes_text(sizes: Sequence[int]) -> str:
    return " + ".join(size_text(size) for size in sizes)


def _gpu_table(devices: Sequence[DeviceReport]) -> Table:
    table = _table()
    for heading in (devices[0].kind, "physical", "name"):
        table.add_column(heading, overflow="fold")
    for heading in ("total", "free", "others", "busy", "temp", "power"):
        table.add_column(heading, justify="right", overflow="fold")
    for device in devices:
        _add_row(
            table,
            "hidden" if device.logical_index is None else f"{device.logical_index}",
            _known(device.physical_index, "{}"),
            _short_name(device.name),
            *(_known_bytes(n) for n in (device.total_bytes, device.free_bytes, device.used_by_others_bytes)),
            _known(device.utilization_percent, "{} %"),
            _known(device.temperature_c, "{} C"),
            _known(device.power_w, "{:.0f} W"),
        )
    return table


def _gpu_label(device: DeviceReport) -> str:
    if device.logical_index is not None:
        return f"{device.kind}:{device.logical_index}"
    return device.name if device.physical_index is None else f"physical {device.physical_index}"


def _known(value: float | None, pattern: str) -> str:
    return "?" if value is None else pattern.format(value)


def _known_bytes(nbytes: int | None) -> str:
    return "?" if nbytes is None else _bytes_text(nbytes)


# --------------------------------------------------------------------------------------------------------- ceilings

_REASONS = {"memory": "memory", "max_batch_size": "max_batch_size", "kernel": "a kernel", "time": "time"}


def print_ceilings(ceilings: Sequence[Ceiling], notes: Iterable[str], console: Console, *, simulated: bool) -> None:
    """Print a table of ceilings: what limits them, what they hold, and how they were found.

    Args:
        ceilings: At least one; a `batch_size` of 0 is what does not fit.
        notes: What there is to say of them.
        console: Where to.
        simulated: They are of cards that are not there.
    """
    from rich.text import Text

    if simulated:
        _print(Text("simulated: predicted for cards that are not here", "yellow"), console)
    _print(_ceiling_table(ceilings, simulated=simulated), console)
    if lines := list(notes):
        _print(_bullets(lines), console)


def _ceiling_table(ceilings: Sequence[Ceiling], *, simulated: bool) -> Table:
    table = _table()
    for heading in ("device", "role"):
        table.add_column(heading, overflow="fold")
    table.add_column("ceiling", justify="right")
    table.add_column("limited by", overflow="fold")
    for heading in ("fixed", "per sample", "headroom"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("found with", overflow="fold")
    for ceiling in ceilings:
        sizes = (ceiling.fixed_bytes, ceiling.bytes_per_sample, ceiling.headroom_bytes)
        _add_row(
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
    return f"{_count(ceiling.steps, 'step')}, {ceiling.ooms} OOM, {sure}"


def check_plot(path: str) -> None:
    """Refuse a plot that could not be drawn, before what takes long.

    Args:
        path: Where it is to be written.

    Raises:
        InputError: matplotlib is not installed, or can't write this kind of file there.
    """
    kinds = sorted(_canvas(1, 1).get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"--plot {path}: expected a file that ends in one of {', '.join(kinds)}; write it as plot.png")
    if not Path(path).parent.is_dir():
        raise InputError(f"--plot {path}: expected a folder that exists; make {Path(path).parent}, or choose another")


def plot_ceilings(ceilings: Sequence[Ceiling], path: str) -> None:
    """Draw bytes against batch for each ceiling: the line, what was looked at, what ran, the capacity, the ceiling.

    Args:
        ceilings: Those of 0 are left out.
        path: Where the picture is written; the suffix says of which kind it is.

    Raises:
        InputError: matplotlib is not installed, or the file can't be written.
    """
    found = [ceiling for ceiling in ceilings if ceiling.batch_size]
    columns = min(3, max(1, len(found)))
    rows = math.ceil(len(found) / columns)
    canvas = _canvas(columns, rows)
    for position, ceiling in enumerate(found, 1):
        _draw_ceiling(canvas.figure.add_subplot(rows, columns, position), ceiling)
    try:
        canvas.figure.savefig(path)
    except OSError as error:
        raise InputError(
            f"the plot can't be written to {path} ({error.strerror}); expected a file that can be; choose another"
        ) from error


def _canvas(columns: int, rows: int) -> Any:
    """Return an empty picture, without pyplot: no window, and no state shared with the user's own plots."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        agg = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise InputError(
            "--plot needs matplotlib, which is not installed; expected the extra; pip install 'autosplit[report]'"
        ) from None
    return agg.FigureCanvasAgg(figures.Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained"))


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


# ---------------------------------------------------------------------------------------------- machines side by side

NARROW = 80
"""Columns below which a machine's plan stands under its name."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table of machines with their plans and what they cost, and below it how far to trust it.

    Args:
        comparison: What is printed.
        console: Where to.
    """
    from rich.text import Text

    if any(machine.predicted for machine in comparison.machines):
        all_are = all(machine.predicted for machine in comparison.machines)
        which = "predicted" if all_are else "predicted where it says so"
        _print(Text(f"{which}: for cards that are not here", "yellow"), console)
    if len(comparison.machines) > 1:
        priced = comparison.sorted_by == "cost_per_million_samples"
        _print(Text(f"sorted by {'the cost of 1M samples' if priced else 'samples/s'}, as each plan trains"), console)
    _print(_comparison_table(comparison, narrow=console.width < NARROW), console)
    left = [f"not compared: {', '.join(comparison.not_compared)}"] if comparison.not_compared else []
    if lines := [*left, *comparison.notes]:
        _print(_bullets(lines), console)


def _comparison_table(comparison: Comparison, *, narrow: bool) -> Table:
    from rich.text import Text

    priced = comparison.sorted_by == "cost_per_million_samples"
    several = len({one.plan.precision for one in comparison.machines if one.plan is not None}) > 1
    table = _table()
    table.add_column("machine and plan" if narrow else "machine", overflow="fold")
    if not narrow:
        table.add_column("plan", overflow="fold")
    for heading in ("samples/s", "headroom", *(["price/h", "cost of 1M"] if priced else [])):
        if not (narrow and heading == "price/h"):
            table.add_column(heading, justify="right", overflow="fold")
    if not narrow:
        table.add_column("how", overflow="fold")
    for machine in comparison.machines:
        how = "predicted" if machine.predicted else "measured"
        plan = _machine_plan_texts(machine, with_precision=several)
        costs = [_money_text(machine.cost_per_million_samples)] if priced else []
        prices = [_money_text(machine.price_per_hour)] if priced else []
        numbers = [_machine_rate_text(machine), _headroom_text(machine)]
        if narrow:
            lines = [machine.devices, *plan[:-1], f"{plan[-1]} ({how})"]
            _add_row(table, Text("\n  ".join(map(printable, lines))), *numbers, *costs)
        else:
            _add_row(table, machine.devices, ", ".join(plan), *numbers, *prices, *costs, how)
    return table


def _machine_plan_texts(machine: ComparedMachine, *, with_precision: bool) -> list[str]:
    """Say ``(12, 24) = 36`` and ``3 steps``, the split with its batch and the accumulation steps; or what is short."""
    plan, misfit = machine.plan, machine.misfit
    if plan is not None:
        batch = f"batch {plan.batch_size}"
        if len(plan.split) > 1:
            batch = f"({_runs_text(plan.split)}) = {plan.batch_size}"
        steps = _count(plan.accumulation_steps, "step")
        return [batch, f"{steps}, {plan.precision}" if with_precision else steps]
    assert misfit is not None, machine
    if misfit.device is None or not misfit.needed_bytes:
        return [f"does not fit: {misfit.reason}"]
    needed, held = size_text(misfit.needed_bytes), size_text(misfit.capacity_bytes)
    return [f"does not fit: {misfit.device} needs {needed}, has {held}"]


def _runs_text(split: Sequence[int]) -> str:
    """Write a split with its runs counted: ``12, 7x35``."""
    runs = [(share, len(list(alike))) for share, alike in itertools.groupby(split)]
    return ", ".join(f"{count}x{share}" if count > 2 else ", ".join([f"{share}"] * count) for share, count in runs)


def _machine_rate_text(machine: ComparedMachine) -> str:
    return "-" if machine.samples_per_s is None else rate_text(machine.samples_per_s).removesuffix(" samples/s")


def _headroom_text(machine: ComparedMachine) -> str:
    return "-" if machine.headroom_bytes is None else size_text(machine.headroom_bytes)


def _money_text(amount: float | None) -> str:
    """Write money of no particular currency: two decimals, or three digits of little."""
    if amount is None:
        return "-"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.3g}"


# ----------------------------------------------------------------------------------------------------------- checks


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print a table of what was checked, and below it what to do.

    Args:
        checks: At least one.
        console: Where to.
    """
    table = _table()
    table.add_column("what", overflow="fold")
    for heading in ("split over devices", "accumulated"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("depends on the cut")
    for check in checks:
        errors = (error_text(check.split_error), error_text(check.accumulation_error))
        _add_row(table, check.subject, *errors, "yes" if check.depends else "no")
    _print(table, console)
    subjects: dict[str, list[str]] = {}
    for check in checks:
        if check.advice:
            subjects.setdefault(check.advice, []).append(check.subject)
    advice = [f"{' and '.join([of[0], *_others(of)])}: {said}" for said, of in subjects.items()]
    remarks = dict.fromkeys(check.remark for check in checks if check.remark)
    if advice or remarks:
        _print(_bullets([*advice, *remarks]), console)


def _others(subjects: Sequence[str]) -> list[str]:
    return [_count(len(subjects) - 1, "other")] if len(subjects) > 1 else []


def _check_lines(checks: Sequence[Check]) -> list[str]:
    """A line for each check, those that depend first; many that want the same done share one."""
    ordered = sorted(checks, key=lambda check: not check.depends)
    lines: list[str] = []
    for _, group in itertools.groupby(ordered, key=lambda check: (check.depends, check.advice)):
        alike = list(group)
        if len(alike) <= _CHECKS_IN_FULL or not alike[0].advice:
            lines.extend(map(str, alike))
        else:
            lines.append(_alike_text(alike))
    return lines


_CHECKS_IN_FULL = 3
"""More that want the same done share a line in a plan's report."""


def _alike_text(alike: Sequence[Check]) -> str:
    """Say of many at once how much the worst of them depends."""
    split, accumulated = (
        error_text(max((error for error in errors if error is not None), default=None))
        for errors in zip(*((check.split_error, check.accumulation_error) for check in alike), strict=True)
    )
    return (
        f"{alike[0].subject} and {len(alike) - 1} others up to {alike[-1].subject} depend on how the batch is cut "
        f"(at most, split: {split}, accumulated: {accumulated}): {alike[0].advice}"
    )


# ------------------------------------------------------------------------------------------------------ small texts


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)


def _add_row(table: Table, *cells: str | Text) -> None:
    """Add cells as they are: a name with brackets is no markup, and none acts on the terminal."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        _add_row(grid, *row)
    return grid


def _bullets(lines: Iterable[str]) -> Table:
    """Lines with a hanging indent."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        _add_row(grid, "-", line)
    return grid


def _short_name(name: str) -> str:
    """Leave out what every card of its maker is called."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _tuple_text(split: Sequence[int]) -> str:
    return f"({', '.join(map(str, split))})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _bytes_text(nbytes: int) -> str:
    """GiB with one decimal, or whole MiB, or whole KiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def _memory_text(peak_bytes: int, capacity_bytes: int) -> str:
    """``18.2 of 24.0 GiB (75 %)``; the share is rounded down, so that only what is full reads 100 %."""
    peak, capacity = _bytes_text(peak_bytes), _bytes_text(capacity_bytes)
    if peak[-3:] == capacity[-3:]:
        peak = peak[:-4]
    share = 100 * peak_bytes // capacity_bytes if capacity_bytes else 0
    return f"{peak} of {capacity} ({share} %)"
