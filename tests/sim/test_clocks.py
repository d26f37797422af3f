"""Clocks of a step of many micro-steps: the first few predict all."""

from __future__ import annotations

from unittest import mock

import pytest
from marks import for_release
from workloads import ALL

from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.clocks import Clocks
from autosplit.sim.op_cost import Work
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import make_tracer

MACHINES = {
    "sim:1xRTX4090": [(8,), (200,)],
    "sim:2xRTX3090": [(2, 2), (40, 200), (0, 200), (200, 0)],
    "sim:1xH100-80GB+2xT4": [(2, 2, 2), (200, 40, 40), (0, 8, 40)],
}


@pytest.mark.parametrize("name", ["cnn", for_release("char_gpt"), for_release("lstm")])
def test_sixty_micro_steps_are_told_by_few(name):
    """Each was simulated. For 7 billion parameters on eight GPUs, twelve micro-steps forty times took a tenth of a
    tuning.
    """
    traces = AffineTraces(make_tracer(ALL[name](), like_gpu=True)[0])
    for machine, splits in MACHINES.items():
        devices = parse_devices(machine)
        worker = SimulatedWorker(devices, (2**60,) * len(devices), traces)
        for split in splits:
            shape = StepShape((*(split,) * 60, tuple(samples // 2 for samples in split)))
            with mock.patch.object(Clocks, "_is_steady", return_value=False):
                played = worker.measure(shape)
            with mock.patch.object(Clocks, "work", autospec=True, side_effect=Clocks.work) as works:
                told = worker.measure(shape)
            once = sum(isinstance(event, Work) for event in traces.trace(StepShape((split,), accumulates=True)).micro)
            assert works.call_count < 2 * 12 * once, "sixty were, in each of two steps"
            assert told.seconds == pytest.approx(played.seconds, rel=1e-9)
            assert told.busy_s == pytest.approx(played.busy_s, rel=1e-9)
            assert told.update_s == pytest.approx(played.update_s, rel=1e-6)


def test_a_host_that_is_behind_its_card_is_waited_for():
    """A GPU begins late, because parameters are copied first. So a slow host is no limit yet."""
    clocks = Clocks([parse_devices("sim:1xRTX3090")[0].spec])

    def play() -> None:
        clocks.now_s[0] = max(clocks.now_s[0] + 1.0, clocks._host_s[0] + 2.0)
        clocks._host_s[0] += 2.0

    clocks.now_s[0] = 10.0
    clocks.repeat(play, 40)
    assert clocks.now_s[0] == pytest.approx(80.0)
