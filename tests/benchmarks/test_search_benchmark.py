"""The search benchmark's exhaustive search finds the same best split as full enumeration."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType

import pytest
import workloads
from folders import BENCHMARKS

from autosplit import parse_devices
from autosplit.sim.tracer import Tracer, make_tracer


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


@pytest.mark.slow
def test_bounds_are_below_every_step(bench, tracer):
    judge = bench.Judge(tracer, parse_devices("sim:T4+2xRTX3060"), SAMPLES)
    seconds = enumerated(judge, 3)
    assert judge.bounds_broken == 0
    assert all(0 < judge.path_seconds(splits) <= judge.simulated[splits] * (1 + 1e-9) for splits in judge.simulated)
    found = bench.exhaustive(bench.Judge(tracer, judge.devices, SAMPLES))
    assert found.rate == pytest.approx(SAMPLES / min(seconds.values()))
