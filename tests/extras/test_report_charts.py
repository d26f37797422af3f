from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from handmade import made_plan, solved_plan

pytest.importorskip("vl_convert")

import vl_convert

from autosplit.extras.report_charts import charts_of
from autosplit.plan.record import DdpPlan


def charts(plan):
    return {chart.name: chart for chart in charts_of(plan, plan.explain())}


def texts(chart):
    """Return the tooltips of a chart's marks."""
    return {value["text"] for layer in chart.spec["layer"] for value in layer["data"]["values"] if "text" in value}


def words(chart):
    """Draw a chart with Vega and return its texts."""
    svg = vl_convert.vegalite_to_svg({**chart.spec, "width": 330, "autosize": "pad"})
    return {text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


@pytest.fixture(scope="module")
def solved():
    return charts(solved_plan())


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("devices", ["memory, GiB", "parameters", "optimizer state", "reserve", "free"]),
        ("line0", ["samples", "memory, GiB", "measured", "traced", "this plan"]),
        ("trials", ["trial", "samples/s", "measured", "failed", "this plan"]),
        ("landscape", ["gpu0_bsz, samples", "batch_size, samples", "% of the best", "measured", "failed", "this plan"]),
        ("rates", ["samples/s", "this plan", "even split, same batch", "DDP"]),
    ],
)
def test_vega_draws_axes_and_marks_with_labels_and_units(solved, name, labels):
    assert set(labels) <= words(solved[name])


def test_colours_are_those_of_the_page(solved):
    colors = set(re.findall(r"#[0-9a-f]{3,6}\b", json.dumps([chart.spec for chart in solved.values()])))
    assert colors == set()


def test_marks_have_tooltips_with_their_figures(solved):
    assert "trial 1: split (1, 1), 3 forwards per step: cuda:1 (failed)" in texts(solved["trials"])
    assert {"cuda:0: optimizer state, 2 GiB", "cuda:0: reserve, 1 GiB"} <= texts(solved["devices"])
    assert any(re.fullmatch(r"cuda:0: ceiling [\d,]+ samples, .* GiB", text) for text in texts(solved["devices"]))
    assert any("predicted, 100.0% of the best" in text for text in texts(solved["landscape"]))
    assert "even split, same batch: 7,813 samples/s (measured)" in texts(solved["rates"])
    assert "even split, same batch: 7,813 samples/s (measured)" in solved["rates"].text


def test_the_first_devices_line_has_the_samples_of_the_other_devices(solved):
    """The traced points had the others at their ceilings. A line through them would show that the plan does not fit."""
    text = solved["line0"].text
    assert "about 1.152 GiB in addition to the samples of the other devices in this plan, and 51 MiB more" in text


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"trials": ()}, "trials", "computed from measurements, without trials"),
        ({"fit": None}, "landscape", "the plan has no time model"),
        ({"region": None}, "landscape", "DDP ranks have no gpu0_bsz"),
        (
            {"even_samples_per_s": None, "fit": None, "ddp": DdpPlan((), 0.0, "no")},
            "rates",
            "No other option was measured",
        ),
    ],
)
def test_a_chart_that_cannot_be_drawn_has_the_reason(changes, name, said):
    chart = charts(solved_plan(**changes))[name]
    assert said in chart.text
    assert chart.spec is None


def test_devices_that_share_a_cpu_are_not_compared():
    assert "reports no gain over an even split" in charts(made_plan(kind="cpu"))["rates"].text


def test_one_device_has_a_curve_instead_of_the_landscape():
    found = charts(solved_plan((256,)))
    assert found["landscape"].title == "Throughput by batch_size"
    assert {"this plan", "batch_size, samples"} <= words(found["landscape"])
    assert any(text.endswith(" predicted") for text in texts(found["landscape"]))
    assert found["rates"].spec is None


def test_simulated_rates_are_not_called_measured():
    found = charts(solved_plan(kind="sim"))
    assert "simulated" in words(found["trials"])
    assert "measured" not in words(found["trials"])


def test_names_of_devices_cannot_be_markup_or_expressions():
    plan = solved_plan()
    hostile = 'x<script>alert("1")</script>\x00\x1b[31m\u202e&'
    named = replace(plan, devices=tuple(replace(device, name=hostile, label=hostile) for device in plan.devices))
    chart = charts(named)["devices"]
    assert not re.search("[\x00\x1b\u202e]", json.dumps(chart.spec, ensure_ascii=False))
    assert any(word.startswith('x<script>alert("1")</script>') for word in words(chart))
