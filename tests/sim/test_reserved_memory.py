"""Reserved memory, replayed from a trace. The measured figures are those of an H200 that nothing was fitted to."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from folders import BENCHMARKS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.protocol import StepShape
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.allocator_settings import MIB, AllocatorSettings
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.reserved_memory import block_bytes, reserved_bytes
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.trace_tracker import BoundedEntry
from autosplit.sim.tracer import Tracer
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

DEFAULTS = AllocatorSettings()


def entry(block: int, mib: float, stage: Any = "step", kind: Any = "activations") -> BoundedEntry:
    return BoundedEntry(kind, 0, int(mib * MIB), block=block, stage=stage)


def reserved_mib(entries: list[BoundedEntry], capacity_mib: int | None = None, **options: Any) -> float:
    sizes = block_bytes(entries, np.array([float(one.nbytes) for one in entries]))
    settings = options.pop("settings", DEFAULTS)
    return reserved_bytes(entries, sizes, 0, settings, capacity_mib and capacity_mib * MIB, **options) / MIB


class TestReplay:
    def test_a_block_is_used_again_in_the_next_step(self):
        assert reserved_mib([entry(0, 30), entry(0, -30), entry(1, 20)]) == 30

    def test_the_first_update_creates_the_optimizer_state_in_free_memory(self):
        """The state takes the place of the first step's activations. So the second step reserves more."""
        state = entry(0, 40, "before", "optimizer")
        assert reserved_mib([state, entry(1, 60), entry(1, -60)]) == 60 + 60
        assert reserved_mib([entry(0, 40, "before"), entry(1, 60), entry(1, -60)]) == 40 + 60

    def test_storages_left_at_the_end_of_a_step_are_freed(self):
        assert reserved_mib([entry(0, 30), entry(1, 12, "update")]) == 42

    def test_a_storage_that_grows_is_copied(self):
        assert reserved_mib([entry(0, 30), entry(0, 10)]) == 30 + 40

    def test_other_devices_do_not_count(self):
        assert reserved_mib([entry(0, 30), entry(1, 30)._replace(device=1)]) == 30

    def test_a_block_below_its_limit_does_not_exist(self):
        assert reserved_mib([entry(0, 30)._replace(limits=(31.0 * MIB, 99.0 * MIB)), entry(1, 12)]) == 12

    def test_expandable_segments_have_fewer_gaps(self):
        entries = [entry(0, 30), entry(0, -30), entry(1, 40), entry(1, -40)]
        assert reserved_mib(entries) == 30 + 40
        assert reserved_mib(entries, settings=AllocatorSettings(expandable_segments=True)) == 40

    def test_after_an_empty_cache_segments_are_reserved_again(self):
        """`AcceleratorWorker` measures so. A training uses the segment of 50 MiB for both blocks."""
        state = entry(0, 12, "before", "optimizer")
        step = [entry(1, 30), entry(1, -30), entry(2, 50), entry(2, -50)]
        assert reserved_mib([state, *step]) == 30 + 50
        assert reserved_mib([state, *step], empties_cache=True) == 30 + 30 + 50


class TestCapacity:
    GROWING = (entry(0, 30), entry(0, -30), entry(1, 40), entry(1, -40))

    def test_cached_segments_are_released_when_it_is_full(self):
        assert reserved_mib([*self.GROWING], 70) == 70
        assert reserved_mib([*self.GROWING], 50) == 40

    def test_blocks_that_are_all_in_use_do_not_fit(self):
        assert reserved_mib([entry(0, 30), entry(1, 40)], 60) == 70

    @given(st.lists(st.tuples(st.floats(0.001, 64), st.integers(0, 3)), min_size=1, max_size=12), st.integers(1, 200))
    def test_never_reserves_less_than_the_tensors_or_hides_that_they_do_not_fit(self, blocks, capacity_mib):
        entries = [entry(number, size) for number, (size, _) in enumerate(blocks)]
        entries += [entry(number, -size) for number, (size, kept) in enumerate(blocks) if kept]
        peak = sum(-(-one.nbytes // 512) * 512 for one in entries[: len(blocks)]) / MIB
        found = reserved_mib(entries, capacity_mib)
        assert found >= peak
        if peak > capacity_mib:
            assert found > capacity_mib


def measured() -> dict[str, dict[str, Any]]:
    """Return the steps that `benchmarks/gpu.py` measured on an H200, by name."""
    stages = json.loads((BENCHMARKS / "results" / "gpu" / "h200_before.json").read_text(encoding="utf-8"))["stages"]
    (steps,) = (stage for stage in stages if stage["name"] == "steps")
    return {found["name"].removeprefix("step of "): found for found in steps["findings"]}


@pytest.mark.parametrize("name", ["gpt fp32", "gpt bf16, checkpointing", "encoder bf16, dropout"])
def test_an_h200_reserved_what_was_predicted(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_models import SETTINGS

    (setting,) = (one for one in SETTINGS if one.name == name)
    found = measured()[name]
    tracer = Tracer(setting.build(False), fake=True, like_gpu=True, kernels=GpuKernels.of("9.0"))
    traces = AffineTraces(tracer)
    for samples, mib in zip(found["samples"], found["reserved_mib"], strict=True):
        trace = traces.trace(StepShape(((samples,),)))
        predicted = reserved_bytes(trace.entries, trace.entry_bytes, 0, DEFAULTS, empties_cache=True)
        assert predicted / MIB == pytest.approx(mib, rel=0.02)


def mlp() -> Workload:
    widths = (512, 700, 1100, 300, 512)
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    batch = torch.randn(4, 512), torch.randn(4, 512)
    return Workload(nn.Sequential(*layers), batch, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW)


class TestPlans:
    def test_the_peak_is_what_the_allocator_reserves(self):
        plan = tune(mlp, devices="sim:2xRTX3090@1GiB", effective_batch_size=4096, profile="off")
        for seat in filter(lambda one: one.samples, plan.main.seats):
            assert seat.peak_bytes % (2 * MIB) == 0
            assert seat.memory.untraced_bytes > 0
            assert seat.memory.total_bytes == seat.peak_bytes <= 2**30

    def test_the_ceiling_is_the_last_batch_whose_steps_run(self):
        worker = SimulatedWorker(parse_devices("sim:RTX3090"), (256 * MIB,), AffineTraces(self.tracer()))
        sizes = range(256, 20_000, 256)
        runs = [self.runs(worker, samples) for samples in sizes]
        assert runs[0]
        assert not runs[-1]
        last = sizes[runs.index(False) - 1]
        assert worker.predicted(StepShape(((last,),)))[0].total_bytes <= 256 * MIB

    @staticmethod
    def tracer() -> Tracer:
        return Tracer(mlp(), fake=True, like_gpu=True, kernels=GpuKernels.of("8.6"))

    @staticmethod
    def runs(worker: SimulatedWorker, samples: int) -> bool:
        try:
            worker.peaks(StepShape(((samples,),)))
        except OutOfMemoryError:
            return False
        return True

    def test_expandable_segments_are_read_from_the_environment(self, monkeypatch):
        def peak() -> int:
            worker = SimulatedWorker(parse_devices("sim:RTX3090"), (2**40,), AffineTraces(self.tracer()))
            return worker.peaks(StepShape(((4096,),)))[0]

        usual = peak()
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert peak() < usual
