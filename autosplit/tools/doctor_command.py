"""Run ``autosplit doctor``: diagnose this machine, measure its speed, and suggest fixes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from autosplit.cli.output import CommandResult, Manner, Problem, collected, json_text, note
from autosplit.cli.tables import add_row, pairs_table, plain_table, print_bullets, print_plain
from autosplit.cli.terminal import clean_stdout
from autosplit.devices.catalog import GPUS_VARIABLE
from autosplit.errors import shown
from autosplit.files import write_for_all
from autosplit.text import rate_text, short_bytes_text, short_name, size_text
from autosplit.tools.examination import Examination


def doctor(
    manner: Manner, *, devices: str | None = None, save: str | None = None, share: str | None = None
) -> CommandResult[Examination]:
    """Diagnose this machine.

    If `save` is a file, write the speed of the GPUs to it. If `share` is a file, write the results for docs/results.
    """
    from autosplit.tools.doctor import examine
    from autosplit.tools.examination import cards_toml, shared_result

    with clean_stdout():
        found = examine(devices, report_stage=lambda text: note(f"looking at {text}", manner))
    problems: list[Problem] = []
    if save is not None:
        with collected(problems):
            write_for_all(Path(save), cards_toml(found), f"--save {shown(save)}")
            note(f"wrote the rates of the GPUs. Set {GPUS_VARIABLE}={save}, and sim: devices use them.", manner)
    if share is not None:
        with collected(problems):
            write_for_all(Path(share), json_text(shared_result(found)) + "\n", f"--share {shown(share)}")
            text = f"wrote {share}. The file contains nothing that identifies you. To contribute it, add it to"
            note(f"{text} docs/results in a pull request.", manner)
    return CommandResult(found, lambda console: _print(found, console), problems)


def _print(found: Examination, console: Console) -> None:
    build = f"torch {found.torch}" + (f", CUDA {found.cuda}" if found.cuda else "")
    print_plain(pairs_table([("runs on", found.kind), ("build", build), ("driver", found.driver or "-")]), console)
    print_plain(_card_table(found), console)
    print_plain(_product_table(found), console)
    rows = [
        (
            f"{one.source} to {one.destination}",
            f"{one.gb_per_s:.3g} GB/s{'' if one.arrives else ', but the data arrives wrong'}",
        )
        for one in found.copies
    ]
    if (collective := found.collective) is not None:
        rate = "they can't connect" if collective.gb_per_s is None else f"{collective.gb_per_s:.3g} GB/s of gradients"
        rows.append((f"{collective.ranks} ranks by {collective.backend}", rate))
    if (training := found.training) is not None:
        measured, predicted = training.measured_samples_per_s, training.predicted_samples_per_s
        split = " + ".join(str(share) for share in training.split)
        memory = [" + ".join(map(size_text, sizes)) for sizes in (training.measured_bytes, training.predicted_bytes)]
        rows += [
            ("a small model", f"{split} samples per forward, tuned in {training.took_s:.0f} s"),
            ("its throughput", f"{rate_text(measured)}, predicted {rate_text(predicted)}"),
            ("its memory", f"{memory[0]}, predicted {memory[1]}"),
        ]
    print_plain(pairs_table(rows), console)
    print_bullets(found.notes, console)
    if not found.problems:
        print_bullets([f"No problems found. This took {found.took_s:.0f} s."], console)
    for one in found.problems:
        print_plain(pairs_table([("problem", one.problem), *([("fix", one.cure)] if one.cure else [])]), console)


def _card_table(found: Examination) -> Table:
    figures = ("memory", "free", "memory rate", "launch")
    table = plain_table("device", "name", *figures, figures=figures)
    for card in found.cards:
        add_row(
            table,
            card.device,
            short_name(card.name),
            size_text(card.memory_bytes),
            "?" if card.free_bytes is None else short_bytes_text(card.free_bytes),
            _part_text(f"{card.memory_gb_per_s:.3g} GB/s", card.memory_of_catalogue),
            f"{1e6 * card.launch_s:.1f} us",
        )
    return table


def _product_table(found: Examination) -> Table:
    """Return the table of matrix products. Together with the other figures, it would be wider than 80 columns."""
    dtypes = tuple(dict.fromkeys(dtype for card in found.cards for dtype in card.tflops))
    table = plain_table("TFLOP/s", *dtypes, figures=dtypes)
    for card in found.cards:
        rates = (
            _part_text(f"{card.tflops[n]:.3g}", card.tflops_of_catalogue.get(n)) if n in card.tflops else "-"
            for n in dtypes
        )
        add_row(table, card.device, *rates)
    return table


def _part_text(rate: str, part: float | None) -> str:
    return rate if part is None else f"{rate} ({part:.0%})"
