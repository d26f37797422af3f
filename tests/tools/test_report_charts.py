from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from handmade import led_by_ddp, made_plan, solved_plan, without_ddp

pytest.importorskip("vl_convert")

import vl_convert

from autosplit.plan.record import with_devices
from autosplit.tools.report_charts import charts_of


def charts(plan):
    return {chart.name: chart for chart in charts_of(plan)}


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


@pytest.fixture
def led():
    """Return a plan that recommends DDP."""
    return led_by_ddp(solved_plan())


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("devices", ["memory, GiB", "parameters", "optimizer state", "reserve", "free"]),
        ("landscape", ["gpu0_bsz, samples", "batch_size, samples", "% of the best", "measured", "failed", "this plan"]),
        ("rates", ["samples/s", "BalancedDataParallel (recommended)", "even split, same batch", "DDP"]),
    ],
)
def test_vega_draws_axes_and_marks_with_labels_and_units(solved, name, labels):
    assert set(labels) <= words(solved[name])


def test_marks_have_tooltips_with_their_figures(solved):
    assert "trial 1: split (1, 1), 3 forwards per step: cuda:1 (failed)" in texts(solved["trials"])
    assert {"cuda:0: optimizer state, 2 GiB", "cuda:0: reserve, 1 GiB"} <= texts(solved["devices"])
    assert any(re.fullmatch(r"cuda:0: ceiling [\d,]+ samples, .* GiB", text) for text in texts(solved["devices"]))
    assert any("predicted, 100.0% of the best" in text for text in texts(solved["landscape"]))
    assert "even split, same batch: 7,813 samples/s (measured)" in texts(solved["rates"])
    assert "That is 1.31 times even split, same batch: 7,813 samples/s (measured); " in solved["rates"].text


def test_the_first_devices_line_has_the_samples_of_the_other_devices(solved):
    """The traced points had the others at their ceilings. A line through them would show that the plan does not fit."""
    text = solved["line0"].text
    assert "about 1.152 GiB in addition to the samples of the other devices in this plan, and 51 MiB more" in text


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (solved_plan(trials=()), "trials"),
        (solved_plan(cost=None), "landscape"),
        (solved_plan(region=None), "landscape"),
        (without_ddp(solved_plan(even_samples_per_s=None, cost=None)), "rates"),
    ],
)
def test_a_chart_without_data_is_left_out(plan, name):
    assert name not in charts(plan)


def test_devices_that_share_a_cpu_are_not_compared():
    assert "rates" not in charts(made_plan(kind="cpu"))


def test_if_ddp_is_faster_the_charts_show_its_ranks(led):
    """The charts showed the split of BalancedDataParallel, although the page recommended DDP."""
    found = charts(led)
    assert set(found) == {"devices", "line0", "rates"}
    assert "cuda:0 to 1 RTX 3090" in words(found["devices"])
    assert "each RTX 3090: in use, 20 GiB" in texts(found["devices"])
    assert "The capacity of each RTX 3090 is 24 GiB" in found["line0"].text
    assert "The ceiling is 200 samples" in found["line0"].text


def test_the_rates_compare_both_strategies_equal_ranks_and_each_device_alone(led):
    """The chart of a plan for DDP had neither equal ranks nor a device alone."""
    text = charts(led)["rates"].text
    assert "DDP (recommended): 20,469 samples/s (predicted). That is 2.05 times DDP with equal ranks: 10,000" in text
    assert "2.00 times BalancedDataParallel: 10,234 samples/s (measured)" in text
    assert re.search(r"[\d.]+ times cuda:0 alone \(RTX 3090\): [\d,]+ samples/s \(predicted\)\.$", text)
    shown = words(charts(led)["rates"])
    assert {"DDP (recommended)", "DDP with equal ranks", "BalancedDataParallel", "cuda:0 alone (RTX 3090)"} <= shown


def test_equal_devices_are_counted_and_others_are_named():
    plan = solved_plan((100, 96, 30, 30))
    assert {"cuda:0 RTX 3090", "cuda:1 RTX 3090", "cuda:2 to 3 RTX 3090"} <= words(charts(plan)["devices"])
    two_machines = with_devices(plan, lambda n, device: replace(device, index=n % 2, label=f"cuda:{n % 2}"))
    assert {"rank 0 RTX 3090", "rank 1 RTX 3090"} <= words(charts(two_machines)["devices"])


def test_names_of_devices_cannot_be_markup_or_expressions():
    hostile = 'x<script>alert("1")</script>\x00\x1b[31m\u202e&'
    named = with_devices(solved_plan(), lambda n, device: replace(device, name=hostile, label=f"{hostile}{n}"))
    chart = charts(named)["devices"]
    assert not re.search("[\x00\x1b\u202e]", json.dumps(chart.spec, ensure_ascii=False))
    assert any(word.startswith('x<script>alert("1")</script>') for word in words(chart))
