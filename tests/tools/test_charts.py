from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from handmade import GIB, made_plan, solved_plan
from raised import raises

pytest.importorskip("matplotlib")

from autosplit.errors import InputError
from autosplit.solve.split import accumulation_steps
from autosplit.tools.charts import known_parts, segments


def test_the_parts_of_the_memory_are_drawn_only_if_they_are_known():
    seat = solved_plan().main.seats[0]
    unknown = [label for label, _ in segments(replace(seat, memory=None))]
    assert unknown == ["in use", "free", "reserve"]
    assert {"activations and others", "optimizer state"} <= {label for label, _ in segments(seat)}
    assert sum(nbytes for _, nbytes in segments(seat)) == seat.device.memory_bytes
    assert known_parts(seat) is not None
    assert known_parts(replace(seat, peak_bytes=5 * GIB)) is None, "the parts are of another peak"


@pytest.mark.parametrize("plan", [made_plan(), solved_plan()], ids=["without a fit", "with one"])
def test_a_plan_is_plotted_beside_its_curve(plan, tmp_path):
    """The same numbers as on the page: used memory, a star at the plan, and the curve of its fit."""
    figure = plan.plot()
    devices, curve = figure.axes
    factor = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}[devices.get_xlabel().split(", ")[1]]
    used = sum(bar.get_width() for bar in devices.patches if bar.get_facecolor()[3] and bar.get_y() < 0)
    assert used * factor == pytest.approx(plan.main.seats[0].peak_bytes)
    star = curve.collections[-1].get_offsets()[0]
    assert tuple(star) == (plan.batch_size, plan.samples_per_s)
    assert len(curve.lines) == (plan.main.cost is not None)
    if plan.main.cost is not None:
        ((batches, rates),) = [line.get_data() for line in curve.lines]
        batch, rate = int(batches[1]), rates[1]
        splits = [(first, batch - first) for first in range(batch + 1)]
        predicted = [plan.compare_with(split, accumulation_steps(512, batch)).samples_per_s for split in splits]
        assert rate == pytest.approx(max(predicted), rel=0.03)  # whose last forward is whole
    figure.savefig(tmp_path / "plan.pdf")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "plan.pdf").stat().st_size > 1000


def test_a_plot_names_the_extra_that_it_takes(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(InputError, "package-missing", "plan.plot()", "matplotlib"):
        made_plan().plot()
