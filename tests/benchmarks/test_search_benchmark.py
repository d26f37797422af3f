"""The search benchmark's exhaustive search finds the same best split as full enumeration."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import workloads
from folders import BENCHMARKS

from autosplit import parse_devices
from autosplit.runtime.tracer import Tracer, make_tracer


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Load the benchmark under another name, because `search` is too common."""
    spec = importlib.util.spec_from_file_location("search_benchmark", BENCHMARKS / "search.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        del sys.modules[spec.name]


@pytest.fixture(scope="module", params=["mlp", "cnn"])
def tracer(request) -> Tracer:
    return make_tracer(workloads.ALL[request.param](), like_gpu=True)[0]


def enumerated(judge, count: int) -> dict[tuple[int, ...], float]:
    """Return every split of every batch, by the simulator only."""
    splits = (s for s in itertools.product(range(judge.num_samples + 1), repeat=count) if sum(s))
    return {s: judge.seconds(judge.splits_of(s)) for s in splits if sum(s) <= judge.num_samples}


SAMPLES = 5


def cards(bench, tracer: Tracer, spec: str, held: int | None):
    """Return GPUs with memory for a number of samples of an accumulated step, or with all their memory."""
    devices = parse_devices(spec)
    if held is None:
        return devices
    shape = bench.StepShape(((held,),), accumulates=True)
    capacity_bytes = tracer.trace(shape).peak_bytes[0]
    return tuple(replace(device, capacity_bytes=capacity_bytes) for device in devices)


@pytest.mark.slow
def test_bounds_are_below_every_step(bench, tracer):
    judge = bench.Judge(tracer, parse_devices("sim:T4+2xRTX3060"), SAMPLES)
    seconds = enumerated(judge, 3)
    assert judge.bounds_broken == 0
    assert all(0 < judge.path_seconds(splits) <= judge.simulated[splits] * (1 + 1e-9) for splits in judge.simulated)
    found = bench.exhaustive(bench.Judge(tracer, judge.devices, SAMPLES))
    assert found.rate == pytest.approx(SAMPLES / min(seconds.values()))


@pytest.mark.slow
def test_what_does_not_fit_is_no_answer(bench):
    tracer = make_tracer(workloads.cnn(), like_gpu=True)[0]
    judge = bench.Judge(tracer, cards(bench, tracer, "sim:T4+V100-16GB", 3), SAMPLES)
    assert math.isinf(judge.seconds(((SAMPLES, 0),)))
    assert judge.rate((SAMPLES, 0)) == 0
    assert judge.caps[True][0] == 3
    best = bench.exhaustive(judge)
    judge.runtime.peaks(bench.StepShape(judge.splits_of(best.split)))  # raises if it does not fit
