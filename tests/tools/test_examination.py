"""doctor's JSON is a row of the catalogue, which `sim:` uses and reports as measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from examined import CARD, examined
from folders import ROOT
from raised import raises
from workloads import mlp

import autosplit
from autosplit.cli.main import main
from autosplit.cli.output import json_text
from autosplit.devices.catalog import GPUS_VARIABLE, find_card, tomllib
from autosplit.errors import DeviceError
from autosplit.tools.examination import Copy, cards_table, cards_toml

PAGE = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
ODD = replace(CARD, device="cuda:1", name='A "fast" card\\ \x7f [2]', catalogue=None, usual_link_gb_per_s=None)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Save an examination for `sim:`, as doctor prints it."""

    def keep(found, text=json_text):
        path = tmp_path / "doctor.json"
        path.write_text(text(found))
        monkeypatch.setenv(GPUS_VARIABLE, str(path))
        return path

    return keep


def test_the_json_is_a_row_with_all_that_was_measured(kept):
    published = find_card("H200")
    kept(examined(replace(CARD, tflops={**CARD.tflops, "tf32": 400.0}, usual_link_gb_per_s=360.0)))
    row = find_card("NVIDIA H200")
    assert row.peak_flops == {"float32": 5e13, "bfloat16": 7e14, "float16": 6.9e14, "float64": 5e13, "tf32": 4e14}
    assert (row.memory_bytes_per_s, row.launch_s, row.link_bytes_per_s) == (4.1e12, 4e-6, 3.6e11)
    assert row.rates == "measured on NVIDIA H200 by autosplit doctor, torch 2.13.0, driver 580.65"
    assert published.rates == "published"


@pytest.mark.parametrize("text", [json_text, cards_toml])
def test_json_and_toml_say_the_same_of_cards_of_any_name(kept, text):
    copies = (Copy("cuda:0", "cuda:1", True, 300.0), Copy("cuda:1", "cuda:0", False, 9.0))
    found = examined(CARD, ODD, copies=copies)
    kept(found, text)
    odd = find_card("A--fast--card----2")
    assert odd.source == f"measured on {ODD.name} by autosplit doctor, torch 2.13.0, driver 580.65"
    assert odd.link_bytes_per_s == find_card("H200").link_bytes_per_s == 3e11
    assert tomllib.loads(cards_toml(found)) == cards_table(found)


def test_sim_predicts_with_it_and_says_so(kept, capsys):
    published = autosplit.measure(mlp(), devices="sim:H200", split=2**20)
    slow = replace(CARD, tflops={"float32": 5.0}, memory_gb_per_s=410.0)
    kept(examined(slow))
    measured = autosplit.measure(mlp(), devices="sim:H200", split=2**20)
    assert measured.step_s > 2 * published.step_s
    assert (published.rates, measured.rates[0][:23]) == (("published",), "measured on NVIDIA H200")
    assert main(["devices"]) == 0
    assert "sim:H200 has rates measured on NVIDIA H200 by autosplit doctor" in capsys.readouterr().out.replace(
        "\n ", ""
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "Object missing required field"),
        (json_text(examined(replace(CARD, memory_gb_per_s=-1.0))), "Expected `float` >= 1e-06"),
        ('{"cards": [', "truncated"),
    ],
)
def test_what_can_not_be_a_card_is_refused_in_a_line(kept, text, said):
    kept(None, lambda _: text)
    with raises(DeviceError):
        find_card("H200")


@pytest.mark.slow
def test_the_pages_second_command_runs_with_the_firsts_answer(kept, capsys, monkeypatch):
    """The first command is doctor, which needs time and a GPU."""
    first, second = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
    assert first == "python -m autosplit doctor --json > doctor.json"
    variable, *words = second.split()
    assert variable == f"{GPUS_VARIABLE}={kept(examined(CARD)).name}"
    monkeypatch.chdir(ROOT)
    assert main([*words[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"][0].startswith("measured on NVIDIA H200")
