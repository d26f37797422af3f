"""``autosplit devices`` lists the GPUs, as a table and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from autosplit.cli.main import main
from autosplit.tools import inventory
from autosplit.tools.devices_command import print_devices
from autosplit.tools.inventory import DeviceReport

GIB = 2**30


def test_devices_as_a_table_and_as_json(monkeypatch, capsys):
    report = DeviceReport(0, 1, "NVIDIA H100", 80 * 2**30, 70 * 2**30, 2**30, "GPU-1", visible=True)
    monkeypatch.setattr(inventory, "survey_devices", lambda: ((report,), ("a note",)))
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    assert "H100" in out
    assert "- a note" in out
    assert main(["devices", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"devices", "notes"}
    assert shown["devices"][0]["free_bytes"] == 70 * 2**30
    assert shown["notes"] == ["a note"]


@pytest.mark.smoke
def test_devices_never_fails(capsys):
    assert main(["devices"]) == 0
    assert main(["devices", "--json"]) == 0


def row_of(text, label):
    return next(line for line in text.splitlines() if line.strip().startswith(label))


def gpu(**changes):
    report = DeviceReport(0, 1, "NVIDIA H100 [PCIe]", 80 * GIB, 70 * GIB, 10 * GIB, "GPU-1", visible=True)
    return replace(report, **changes)


def printed_devices(devices, notes=(), width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_devices(devices, notes, console)
    return console.file.getvalue()


def test_what_nobody_could_tell_is_a_question_mark():
    unknown = gpu(
        physical_index=None,
        total_bytes=None,
        free_bytes=None,
        used_by_others_bytes=None,
    )
    assert row_of(printed_devices([unknown]), "0").split().count("?") == 4


def test_a_hidden_gpu_and_notes_are_named():
    devices = [gpu(notes=("MIG is on",)), gpu(logical_index=None, visible=False, notes=("power unknown",))]
    text = printed_devices(devices, ["CUDA_VISIBLE_DEVICES='1': cuda:0 is physical 1"])
    assert row_of(text, "hidden")
    for line in (
        "- CUDA_VISIBLE_DEVICES='1': cuda:0 is physical 1",
        "- cuda:0: MIG is on",
        "- physical 1: power unknown",
    ):
        assert line in text


def test_without_a_gpu_one_line_names_cpu_and_sim():
    (line,) = printed_devices([]).splitlines()
    assert "--devices cpu" in line
    assert "--devices sim:" in line
