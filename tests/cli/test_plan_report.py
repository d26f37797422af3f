from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from handmade import GIB, changed_layout, changed_plan, made_ceiling, made_plan, on_devices, solved_plan
from noted import noted
from rich.console import Console

from autosplit.cli.pasted_code import Origin
from autosplit.cli.plan_report import print_plan
from autosplit.devices.catalog import UNMEASURED_RATES
from autosplit.notes import Note
from autosplit.probe.check_result import Check
from autosplit.solve.length_plan import LengthPlan, LengthPoint


def printed(plan, *, width=100, terminal=False, origin=None, details=True):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    print_plan(plan, console, origin=origin, details=details)
    return console.file.getvalue()


def row_of(text, label):
    return next(line for line in text.splitlines() if line.strip().startswith(label))


LENGTHS = LengthPlan((LengthPoint(64, 1.0, 100.0, 100.0), LengthPoint(32, 3.0, 300.0, 200.0)), 300.0, 150.0, 0.1, 0.5)


# The plan's table and numbers


def test_the_table_has_every_device_with_its_figures():
    text = printed(made_plan((100, 156)))
    first, second = row_of(text, "cuda:0"), row_of(text, "cuda:1")
    assert re.split(r"\s{2,}", first.strip()) == [
        "cuda:0 RTX 3090",
        "100",
        "18.0 of 24.0 GiB (75%)",
        "201 (memory)",
        "41.2 ms",
    ]
    assert " 156 " in second
    assert "313 (memory)" in second


@pytest.mark.parametrize(
    ("limit", "confirmed", "kind", "shown"),
    [
        ("memory", True, "cuda", "201 (memory)"),
        ("memory", False, "cuda", "201 (memory), not run"),
        ("max_batch_size", True, "cuda", "201+"),
    ],
)
def test_a_ceiling_says_what_limited_it(limit, confirmed, kind, shown):
    plan = made_plan((100, 156), kind=kind)
    ceiling = replace(made_ceiling("x", 201, GIB, limited_by=limit), confirmed=confirmed)
    first, second = plan.main.seats
    plan = changed_plan(plan, seats=(replace(first, ceiling=ceiling), second))
    assert re.search(rf"{re.escape(shown)}  ", row_of(printed(plan), f"{kind}:0"))


def test_the_numbers():
    text = printed(made_plan((100, 156)))
    assert row_of(text, "split").split(None, 1)[1] == "(100, 156)"
    assert row_of(text, "gpu0_bsz").split() == ["gpu0_bsz", "100"]
    assert row_of(text, "batch_size").split() == ["batch_size", "256"]
    assert row_of(text, "accumulation_steps").split() == ["accumulation_steps", "2"]
    assert "512 samples per optimizer step" in text
    assert "10,234 samples/s" in row_of(text, "throughput")
    assert "2 trials (1 failed), 12 real steps, 1 out of memory" in text


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (made_plan((100, 156)), "1.31 times the even split (128, 128)"),
        (made_plan((100, 156), kind="cpu"), "none is reported, because these devices share one CPU"),
        (made_plan((50, 206), even_samples_per_s=None), "the even split (128, 128) does not fit: cuda:0 fits 101"),
    ],
)
def test_the_gain_is_claimed_only_where_it_was_measured(plan, said):
    assert said in row_of(printed(plan), "gain")


def test_another_effective_batch_of_the_ranks_is_told():
    """With a range, the ranks may use another number than the split. The report did not mention it."""
    plan = made_plan((64, 64))
    text = printed(changed_layout(plan, effective_batch_size=1500, accumulation_steps=6))
    assert "1500 samples per optimizer step" in text.split("together")[1]


def test_one_device_speaks_of_batch_and_accumulation_not_of_splits():
    text = printed(made_plan((256,)))
    for word in ("share", "split", "gpu0_bsz", "gain", "DDP"):
        assert not re.search(rf"\b{word}\b", text)
    assert "memory at this batch" in text
    assert row_of(text, "batch_size").split() == ["batch_size", "256"]


# The short report


SAVED = Origin("0123456789ab", "python -m autosplit tune x.py")


def short(plan, **options):
    return printed(plan, details=False, **{"width": 80, "origin": SAVED, **options})


def test_the_short_report_ends_with_the_next_command():
    """The report had some 40 lines, and the next command was below unimportant ones."""
    real, simulated = short(made_plan()).splitlines(), short(made_plan(kind="sim")).splitlines()
    more = "more  python -m autosplit show 0123456789ab --details"
    assert real[-2:] == ["next  python -m autosplit show 0123456789ab --code  # the lines to paste", more]
    assert simulated[-2:] == ["next  python -m autosplit tune x.py", more]
    assert row_of("\n".join(real), "split").endswith("(100, 156), 256 samples per forward")
    assert row_of("\n".join(real), "gain").endswith("1.31 times the even split (128, 128)")
    for word in ("gpu0_bsz", "found with", "data loading", "rank 0", "import autosplit"):
        assert word not in "\n".join(real)


def test_alike_devices_share_a_row():
    """Eight GPUs took eight rows, and the explanation scrolled out of view."""
    told = short(made_plan((100, 156, 156, 156, 156), kind="sim"))
    assert "sim:1 to 4" in told
    assert "sim:2" not in told
    assert "split               1 x 100, 4 x 156, 724 samples per forward" in told


def test_devices_of_two_machines_are_told_by_their_ranks():
    """Two machines with a GPU each were shown as cuda:0 to 0, like one GPU."""
    plan = made_plan((64, 64, 64))
    first = plan.devices[0]
    told = short(on_devices(plan, first, first, replace(plan.devices[2], label=first.label, name="T4")))
    assert re.search(r"rank 0 to rank 1 RTX.* 64 ", told)
    assert "rank 2 T4" in told


def test_ddp_leads_if_it_is_faster():
    """The table was that of BalancedDataParallel, which left four of six GPUs idle, and a row recommended DDP."""
    plan = changed_layout(made_plan((100, 156)), samples_per_s=20469.0, even_samples_per_s=10000.0)
    text = short(plan, width=120)
    assert row_of(text, "split").split(None, 1)[1] == "(128, 128), 256 samples per forward"
    assert row_of(text, "cuda:0 to 1").split()[5] == "128"
    assert row_of(text, "throughput").split(None, 1)[1] == "20,469 samples/s (predicted)"
    strategy = "DDP (autosplit launch): 2.00 times BalancedDataParallel, 10,234 samples/s"
    assert row_of(text, "strategy").split(None, 1)[1] == strategy
    details = printed(plan)
    assert "gpu0_bsz" not in details
    assert (
        "\nBalancedDataParallel\n- split (100, 156), 2 forwards, 10,234 samples/s, 1.31 times the even split" in details
    )


def test_notes_that_ask_for_nothing_are_left_for_the_details():
    checks = (
        Check("gradient", 0.12, 0.1, depends=True, advice="give each device more"),
        Check("BatchNorm2d at 0", 0.02, None, depends=True, advice="freeze it"),
        Check("Dropout at 1", 0.0, 0.0, depends=False),
    )
    rates = Note(UNMEASURED_RATES, "the rates of this GPU are not measured")
    text = " ".join(short(made_plan(checks=checks, notes=(rates, *noted("a note")))).split())
    said = "changed by splitting: BatchNorm2d at 0, up to 2%; gradient, up to 12% (--details)"
    assert f"notes - {said} - a note next" in text
    many = " ".join(short(made_plan(notes=noted(*"abcde"))).split())
    assert "notes - a - b - 3 more notes: add --details next" in many
    assert "\nnotes\n" not in short(made_plan())


def test_a_loss_that_the_printed_loop_corrects_names_the_loop():
    """The report said only that the loss changed, although the printed code had the right count."""
    count = "int((batch[1] != -100).sum())"
    text = " ".join(short(made_plan(checks=(Check("loss", 0.0, 0.19, depends=True, advice="a", count=count),))).split())
    assert "changed by splitting: loss, up to 19% (autosplit show --code prints a loop that avoids this)" in text
    both = short(made_plan(checks=(Check("loss", 0.1, 0.19, depends=True, advice="count", count=count),)))
    assert "up to 19% (--details)" in " ".join(both.split())


@pytest.mark.parametrize("lengths", [(145, 75), (220, 75), (75, 75, 75, 75)])
def test_notes_take_lines_of_the_terminal_and_not_whole_sentences(lengths):
    """Three notes of any length were allowed. On a busy machine, three notes took 25 lines."""
    notes = noted(*(" ".join(["a note"] * (length // 7)) for length in lengths))
    text = short(made_plan((100, 156), notes=notes))
    said = text.split("\nnotes\n")[1].split("\n\n")[0]
    assert len(said.splitlines()) <= (4 if lengths[0] > 160 else 3)
    assert len(text.splitlines()) <= 24
    assert "add --details" in said or said.count("\n- ") + 1 == len(notes)


# Simulated plans


def test_what_is_copied_for_real_cards_asks_for_the_same():
    """The command for real GPUs dropped the precision of the plan."""
    plan = replace(made_plan(kind="sim"), precision="bf16")
    assert printed(plan).rstrip().endswith("--devices cuda --precision bf16")
    assert printed(made_plan(kind="sim")).rstrip().endswith("--devices cuda")


def test_a_simulated_plan_says_so_and_shows_the_command_instead():
    origin = Origin(command="python -m autosplit tune x.py --devices cuda")
    text = printed(made_plan(kind="sim"), origin=origin)
    assert text.startswith("simulated: predicted for GPUs that this machine does not have")
    assert "(simulated)" in row_of(text, "throughput")
    assert "no real step" in text
    assert text.rstrip().endswith("on the machine that has the GPUs\n\npython -m autosplit tune x.py --devices cuda")
    assert "plan.wrap(model)" not in text


# Widths and terminals


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("split", [(256,), (100, 156), (1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000)])
def test_nothing_is_cut_and_only_long_lines_to_paste_are_wider(width, split):
    plan = made_plan(split, effective=40000)
    devices = (replace(device, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb") for device in plan.devices)
    text = printed(on_devices(plan, *devices), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    assert not re.search(r" $", text, re.MULTILINE)
    assert text.count("HBM3") == len(split)


def test_a_device_without_samples_is_told_of():
    """The table had a GPU without samples, without a reason."""
    told = " ".join(short(solved_plan((100, 0), kind="sim")).split())
    assert "sim:1 gets no samples, because copying the model there takes longer than it saves." in told


# Samples of different lengths


@pytest.mark.parametrize("details", [True, False])
def test_what_batches_of_like_length_bring_is_beside_the_throughput(details):
    text = printed(made_plan(lengths=LENGTHS), details=details)
    assert row_of(text, "by length").split(maxsplit=2)[2] == "300 samples/s, 2.00 times batches of one size (predicted)"
    if details:
        assert "give 300 samples/s with 10% padding. Batches of one size give 150 samples/s with 50%" in " ".join(
            text.split()
        )
