from __future__ import annotations

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from folders import ROOT
from handmade import GIB, made_plan, solved_plan
from raised import raises

pytest.importorskip("matplotlib")

from autosplit.errors import InputError
from autosplit.plan import charts
from autosplit.plan.canvas import LIGHT, WIDTH
from autosplit.plan.charts import known_parts
from autosplit.plan.record import DdpPlan
from autosplit.solve.split import accumulation_steps

DRAWN = ("devices", "line0", "line1", "trials", "landscape", "rates")


def drawn(plan, name):
    """Draw one chart: all of them take seconds."""
    if name == "rates":
        return charts._rates_chart(plan, plan.explain())
    if name.startswith("line"):
        return charts._memory_charts(replace(plan, devices=plan.devices[:1]))[0]
    draw = {"devices": charts._devices_chart, "trials": charts._trials_chart, "landscape": charts._landscape_chart}
    return draw[name](plan)


@pytest.fixture(scope="module")
def solved():
    plan = solved_plan()
    return {chart.name: chart for chart in charts.charts_of(plan, plan.explain())}


def words(svg):
    return [text.text for text in ET.fromstring(svg).iter("text")]


@pytest.mark.parametrize("name", DRAWN)
def test_each_is_as_wide_as_a_phone_and_has_words_of_a_readable_size(solved, name):
    root = ET.fromstring(solved[name].svg)
    left, top, width, _ = map(float, root.get("viewBox").split())
    assert (left, top, width) == (0, 0, WIDTH)
    sizes = [float(text.get("font-size").removesuffix("px")) for text in root.iter("text")]
    assert sizes
    assert min(sizes) >= 11


@pytest.mark.parametrize("name", DRAWN)
def test_each_has_the_pages_colours_and_no_styles_or_foreign_ids(solved, name):
    svg = solved[name].svg
    root = ET.fromstring(svg)
    assert not list(root.iter("style"))
    assert not list(root.iter("metadata"))
    assert not [element for element in root.iter() if "style" in element.attrib]
    assert not re.search(r"#0102", svg), "a colour that stands for a variable was left"
    assert "var(--ink)" in svg
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]+)', svg)
    assert set(used) <= set(ids)


def test_no_two_pictures_share_an_id(solved):
    ids = [i for chart in solved.values() for i in re.findall(r' id="([^"]+)"', chart.svg)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        (
            "devices",
            ["memory, GiB", "parameters", "optimizer state", "reserve", "free", "cuda:1 NVIDIA GeForce RTX 3090"],
        ),
        ("line0", ["samples", "memory, GiB", "fitted line", "measured", "traced", "capacity", "ceiling", "this plan"]),
        ("trials", ["trial", "samples/s", "measured", "failed", "best so far", "this plan"]),
        ("landscape", ["gpu0_bsz, samples", "batch_size, samples", "trial", "failed", "this plan"]),
        ("rates", ["samples/s", "this plan", "even split, same batch", "DDP", "measured", "predicted"]),
    ],
)
def test_axes_and_marks_are_labelled_with_units(solved, name, labels):
    assert set(labels) <= set(words(solved[name].svg))


def test_marks_say_what_they_are(solved):
    titles = [title.text for title in ET.fromstring(solved["trials"].svg).iter("title")]
    assert "trial 1: split (1, 1), 3 forwards per step: cuda:1" in titles
    titles = [title.text for title in ET.fromstring(solved["devices"].svg).iter("title")]
    assert "cuda:0: optimizer state, 2 GiB" in titles
    assert "cuda:0: reserve, 1 GiB" in titles


def test_the_text_alternatives_have_the_figures(solved):
    assert "even split, same batch: 7,813 samples/s (measured)" in solved["rates"].text
    assert "1 failed" in solved["trials"].text
    assert ET.fromstring(solved["rates"].svg).get("aria-label") == solved["rates"].text


def test_what_a_memory_is_full_of_is_drawn_only_where_it_is_known():
    plan = solved_plan()
    unknown = replace(plan, devices=tuple(replace(device, memory=None) for device in plan.devices))
    shown = words(drawn(unknown, "devices").svg)
    assert {"in use", "free", "reserve"} <= set(shown)
    assert "activations and others" not in shown
    other_peak = replace(plan.devices[0], peak_bytes=5 * GIB)
    assert known_parts(plan.devices[0]) is not None
    assert known_parts(other_peak) is None, "the parts are of another peak"


def test_the_first_devices_line_is_drawn_beside_what_the_others_have(solved):
    """Its own points were traced with the others at their ceilings: through them the plan would not fit."""
    text = solved["line0"].text
    assert "about 1.152 GiB in addition to the samples of the other devices in this plan, and 51 MiB more" in text


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"trials": ()}, "trials", "There were no trials"),
        ({"fit": None}, "landscape", "the plan has no time model"),
        ({"region": None}, "landscape", "DDP ranks have no gpu0_bsz"),
        (
            {"even_samples_per_s": None, "fit": None, "ddp": DdpPlan((), 0.0, "no")},
            "rates",
            "No other option was measured",
        ),
    ],
)
def test_what_can_not_be_drawn_says_why(changes, name, said):
    chart = drawn(solved_plan(**changes), name)
    assert said in chart.text
    assert not chart.svg


def test_devices_that_share_a_processor_are_compared_with_nothing():
    assert "no gain over an even split is claimed" in drawn(made_plan(kind="cpu"), "rates").text


def test_one_device_has_a_curve_in_the_place_of_the_landscape():
    plan = solved_plan((256,))
    curve = drawn(plan, "landscape")
    assert curve.title == "Throughput by batch_size"
    assert {"predicted", "trial", "this plan", "batch_size, samples"} <= set(words(curve.svg))
    assert not drawn(plan, "rates").svg


def test_predicted_and_simulated_are_told_apart():
    assert "simulated" in words(drawn(solved_plan(kind="sim"), "rates").svg)


def test_unlike_devices_are_drawn_by_their_own_memory():
    plan = solved_plan()
    small = replace(plan.devices[1], memory_bytes=GIB, capacity_bytes=GIB, peak_bytes=2**29, memory=None)
    assert "memory, % of each device" in words(drawn(replace(plan, devices=(plan.devices[0], small)), "devices").svg)


def test_names_are_never_taken_for_markup_or_formulas():
    plan = solved_plan()
    hostile = '$\\frac{1}{0}$<script>alert("1")</script>\x00\x1b[31m\u202e&'
    named = replace(plan, devices=tuple(replace(device, name=hostile) for device in plan.devices))
    chart = drawn(named, "devices")
    assert "<script" not in chart.svg
    assert not re.search("[\x00\x1b\u202e]", chart.svg)
    assert any(text.startswith("cuda:0 $\\frac{1}{0}$<script>") for text in words(chart.svg))


def test_the_users_settings_of_matplotlib_change_nothing(solved):
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "text.usetex": True, "svg.fonttype": "path"}):
        again = drawn(solved_plan(), "trials")
        assert mpl.rcParams["font.size"] == 40
    assert again == solved["trials"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(InputError, "package-missing", "matplotlib"):
        charts.charts_of(made_plan(), made_plan().explain())


def test_the_landscape_tells_what_is_near_the_best_apart(solved):
    """A colormap went by the size of the steps: 90, 95 and 98 % of the best all had one colour."""
    svg = solved["landscape"].svg
    assert {f"var(--l{level})" for level in range(7)} <= set(re.findall(r"var\(--l\d\)", svg))


# ------------------------------------------------------------------------------------------------------- Plan.plot


def test_a_figure_has_the_pages_light_colours():
    css = (ROOT / "autosplit" / "extras" / "templates" / "report.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--(\w+): (#\w+);", css.split("}")[0]))
    assert {name: light[name] for name in LIGHT} == LIGHT


@pytest.mark.parametrize("plan", [made_plan(), solved_plan()], ids=["without a fit", "with one"])
def test_a_plan_is_plotted_beside_its_curve(plan, tmp_path):
    """The same numbers as the page: bars as long as the memory in use, the star at the plan, the curve of its fit."""
    figure = plan.plot()
    devices, curve = figure.axes
    factor = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}[devices.get_xlabel().split(", ")[1]]
    used = sum(bar.get_width() for bar in devices.patches if bar.get_facecolor()[3] and bar.get_y() < 0)
    assert used * factor == pytest.approx(plan.devices[0].peak_bytes)
    star = curve.collections[-1].get_offsets()[0]
    assert tuple(star) == (plan.batch_size, plan.samples_per_s)
    assert len(curve.lines) == (plan.fit is not None)
    if plan.fit is not None:
        ((batches, rates),) = [line.get_data() for line in curve.lines]
        batch, rate = int(batches[1]), rates[1]
        splits = [(first, batch - first) for first in range(batch + 1)]
        predicted = [plan.compare_with(split, accumulation_steps(512, batch)).samples_per_s for split in splits]
        assert rate == pytest.approx(max(predicted), rel=0.03)  # whose last forward is whole
    figure.savefig(tmp_path / "plan.pdf")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "plan.pdf").stat().st_size > 1000


def test_a_plot_leaves_pyplot_and_its_settings_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    made_plan().plot()
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_a_plot_names_the_extra_that_it_takes(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(InputError, "package-missing", "plan.plot()", "matplotlib"):
        made_plan().plot()
