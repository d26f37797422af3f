"""tune() end to end: the plan, the profile, errors, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import re
import textwrap
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from marks import for_release, slow, whole
from noted import kinds
from raised import raises
from torch import nn
from torch.nn import functional as F
from workloads import char_gpt, mlp, net, net_batch, small, with_loss

import autosplit
from autosplit.devices.spec import parse_devices
from autosplit.errors import ArgumentError, AutosplitError, DeviceError, InputError, UserCodeError, WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.plan.plan import Plan
from autosplit.probe.request import checked_request
from autosplit.profiles import store as profiles
from autosplit.runtime.prepare import build, prepare, workload_source
from autosplit.runtime.protocol import StepShape
from autosplit.solve.split import micro_batch_sizes
from autosplit.solve.step_time import StepTime, TimeCurve
from autosplit.tuning import search
from autosplit.tuning.limits import Limits
from autosplit.tuning.measure import measure
from autosplit.tuning.survey import all_reduce_seconds
from autosplit.tuning.tune import ChangedTrainingWarning, DoubtfulTimesWarning, TuningInterrupted, tune
from autosplit.workload.batch import resize
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

KIB, MIB = 2**10, 2**20


def quick(workload, devices, **options) -> Plan:
    """Tune with few trials and without a profile."""
    return tune(workload, devices=devices, **{"profile": "off", "n_trials": 3, **options})


@pytest.fixture
def working_cards(tmp_path, monkeypatch) -> tuple[str, str]:
    """Two GPUs whose kernels take longer than the host, even for small models. The second is a third as fast."""
    row = """
        [cards.{name}]
        memory_gib = 24
        tflops = {{ float32 = {tflops}, float16 = {tflops}, float64 = {tflops} }}
        memory_gb_per_s = {bandwidth}
        link = "nvlink4"
        compute_capability = "7.0"
        launch_s = 1e-9
        source = "made up"
    """
    cards = (("Quick", 0.3, 30), ("Slack", 0.1, 10))
    text = "".join(row.format(name=name, tflops=tflops, bandwidth=bandwidth) for name, tflops, bandwidth in cards)
    path = tmp_path / "cards.toml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.setenv("AUTOSPLIT_GPUS", str(path))
    return "Quick", "Slack"


def one_block() -> Workload:
    """The example's model with one block. Tuning time grows with the number of traced calls."""
    return char_gpt(depth=1)


def check_sums(plan: Plan, effective: int) -> None:
    for seat in plan.main.seats if plan.complete else ():  # an interrupted tuning traces nothing more
        assert seat.memory is not None
        assert seat.memory.total_bytes == seat.peak_bytes
    assert sum(plan.split) == plan.batch_size
    sizes = micro_batch_sizes(plan.effective_batch_size, plan.batch_size)
    assert sum(sizes) == plan.effective_batch_size == effective
    assert len(sizes) == plan.accumulation_steps
    assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in plan.main.seats)
    if plan.ddp is not None:
        assert all(seat.peak_bytes <= seat.ceiling.capacity_bytes for seat in plan.ddp.seats)
        together = plan.ddp.batch_size
        assert together * (plan.ddp.accumulation_steps - 1) < effective
        assert together * plan.ddp.accumulation_steps >= effective


def traced(workload: Workload) -> Callable[[StepShape], tuple[int, ...]]:
    """Return a function that traces a step, and returns its peaks."""
    from autosplit.sim.simulated import traced_peaks
    from autosplit.sim.tracer import make_tracer

    tracer, _ = make_tracer(workload, like_gpu=True)
    return lambda shape: traced_peaks(tracer, shape)


def one_alone(split: tuple[int, ...], index: int) -> StepShape:
    """Return a step that gives samples to one rank only."""
    shares = tuple(share if place == index else 0 for place, share in enumerate(split))
    return StepShape((shares,), "rank", num_ranks=len(split))


class TestSimulated:
    @pytest.mark.slow
    def test_lowered_memory_takes_fewer_samples_on_device_0(self):
        """All samples run in one forward, and device 0 gathers the outputs, so an even split does not fit."""
        workload = replace(one_block(), loss_scope="batch")
        peaks = traced(workload)

        def most(gpu0: int) -> int:
            rest = 256 - gpu0
            return max(peaks(StepShape(((gpu0, rest - rest // 2, rest // 2),))))

        even, uneven = most(86), min(most(gpu0) for gpu0 in range(46, 86, 4))
        assert uneven < even
        plan = quick(workload, f"sim:3xRTX3090@{(even + uneven) // 2}B", effective_batch_size=256, n_trials=24)
        check_sums(plan, 256)
        assert plan.accumulation_steps == 1
        assert plan.split[0] < 86

    @pytest.mark.slow
    def test_among_many_cards_slow_ones_get_what_they_can_do(self, working_cards):
        """Times ended at a sixteenth of a ceiling. GPUs that should get 53 samples got 2, which cost a fifth."""
        workload = Workload(net(), net_batch(8), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)
        machine = "sim:3x{}+3x{}".format(*working_cards)
        plan = quick(workload, machine, strategy="ddp", effective_batch_size=768)
        shares = [*plan.ddp.split]
        slowest = {}
        with ExitStack() as closing:
            request = checked_request(devices=parse_devices(machine))
            built = build(workload_source(workload, None, {}), request.devices)
            worker = prepare(
                built, request.devices, request.capacities_bytes, closing, largest_batch=request.max_batch_size
            ).worker
            for fast in range(128, 256, 8):
                split = tuple(fast if index < 3 else 256 - fast for index in range(6))
                slowest[fast] = max(
                    worker.measure(one_alone(split, index), budget_s=0.01).seconds for index in (0, 3) if split[index]
                )
        best = min(slowest, key=lambda fast: slowest[fast])
        assert abs(shares[0] - best) <= 8, (shares, best)
        for index, share in enumerate(shares):
            curve = plan.main.cost.step_time.curves[index]
            assert share in dict(curve.points), "the rate is measured at this share, and not interpolated"


def wide(**options) -> Workload:
    """Weights are most of its memory, so waiting gradients matter."""
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8))
    batch = torch.randn(4, 64), torch.randn(4, 8)
    return Workload(model, batch, loss_fn=F.mse_loss, optimizer=torch.optim.SGD, **options)


class TestGradientsThatWait:
    """A step of several micro-steps keeps the gradients of earlier micro-steps. The fast GPU keeps them, too."""

    MACHINE = "sim:1xH100-80GB@{}B+1xRTX3060@{}B"

    @pytest.fixture(autouse=True)
    def _gradients_alone(self, monkeypatch):
        """Count tensors only. The machines are sized by gradients, and blocks inside kernels are larger than those."""
        monkeypatch.setattr("autosplit.sim.trace_tracker.WITH_INNER_MEMORY", frozenset())

    def machine(self, first: int, second: int) -> str:
        """Sizes: samples of the first GPU alone in a single micro-step, and of the second GPU next to it."""
        peaks = traced(wide())
        return self.MACHINE.format(peaks(StepShape(((first,),)))[0] + KIB, peaks(StepShape(((0, second),)))[1] + KIB)

    @pytest.mark.slow
    def test_bound_device_0_when_it_is_alone(self):
        """The ceiling of a single micro-step was used for each of several, and nothing ran."""
        machine = self.machine(8192, 1024)
        plan = quick(wide(), machine, effective_batch_size=16_000)
        assert plan.accumulation_steps == 3
        assert 5334 <= plan.split[0] <= plan.ceilings[0] < 8192
        assert plan.split[1] == 0
        # A third of the step, 5334, is not always the fastest split. The plan is never slower.
        assert (
            plan.samples_per_s >= measure(wide(), devices=machine, split=(5334, 0), accumulation_steps=3).samples_per_s
        )
        assert not [trial for trial in plan.trials if trial.failure]

    @pytest.mark.slow
    def test_leave_no_room_at_all(self):
        with pytest.raises(DoesNotFitError, match="the accumulated gradients leave no memory"):
            quick(wide(), self.machine(512, 700), effective_batch_size=2000)

    @pytest.mark.whole
    def test_leave_one_micro_step_where_that_will_do(self):
        plan = quick(wide(), self.machine(512, 700), effective_batch_size=(64, 2000))
        assert plan.accumulation_steps == 1
        assert 64 <= plan.batch_size <= 700 + 512


class TestOneMicroStepAndSeveral:
    """Each has its own bounds: a single micro-step keeps no gradients, and several need not fit all samples at once."""

    @pytest.mark.whole
    @pytest.mark.parametrize("effective", [slow((16, 200)), slow((16, 134)), 134])
    def test_a_wider_range_is_no_slower(self, effective):
        """134 samples fit one forward. A range to 200 returned three forwards of 58, at less than half the rate."""
        plan = quick(mlp(), "sim:1xP100@1837KiB", effective_batch_size=effective)
        assert (plan.batch_size, plan.accumulation_steps) == (134, 1)
        assert not [trial for trial in plan.trials if trial.failure]

    @pytest.mark.slow
    @pytest.mark.parametrize("effective", [10**7, (5 * 10**5, 10**6)])
    def test_a_vast_step_takes_no_longer(self, effective):
        """For each candidate, each of thousands of micro-steps was evaluated. That took minutes."""
        plan = quick(mlp(), "sim:1xRTX3090@3MiB+1xRTX3060@2MiB", effective_batch_size=effective)
        assert max(trial.accumulation_steps for trial in plan.trials) > 500
        assert plan.samples_per_s == max(trial.samples_per_s for trial in plan.trials)

    @pytest.mark.slow
    def test_a_step_of_too_many_is_refused(self):
        with pytest.raises(InputError, match=r"needs 17123[0-9][0-9] forwards of .* Expected at most 65536"):
            quick(mlp(), "sim:1xRTX3090@3MiB+1xRTX3060@2MiB", effective_batch_size=10**9)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "devices"),
    [slow(mlp, "sim:1xRTX3090@3MiB+1xRTX3060@664KiB"), (small, "sim:1xRTX3090+1xRTX3060@10KiB")],
)
def test_a_card_that_runs_only_its_part_of_a_step_ends_no_tuning(make, devices):
    """A forward and backward alone takes more memory than this GPU's part of a step, and the tuning died.

    The time of such a step is known on a simulated GPU, whether or not it fits.
    """
    plan = quick(make(), devices, effective_batch_size=64)
    assert plan.split == (64, 0)
    assert "not-timed" not in kinds(plan.notes)


class TestBatchNorms:
    """At least two samples, or none, on every device, also in the last forward."""

    @pytest.mark.whole
    @pytest.mark.parametrize("effective", [slow(2), 3, for_release(5), for_release(7)])
    def test_no_share_of_one_is_tried(self, effective):
        plan = quick(small(), "sim:2xRTX3090", effective_batch_size=effective, n_trials=1)
        assert plan.split == (effective, 0)

    @pytest.mark.whole
    def test_a_tuning_warns_of_them_and_a_remembered_plan_again(self):
        """Users who tuned from Python and did not print the plan got no warning."""
        for _time in range(2):
            with pytest.warns(ChangedTrainingWarning, match=r"BatchNorm1d at 1 changes .* See plan.checks for \d more"):
                quick(small(), "sim:1xRTX3090", effective_batch_size=8, profile="auto")

    def test_a_tuning_warns_of_times_that_contradict_each_other(self, monkeypatch):
        """On a busy machine, tune() from Python returned plans of a twentieth of the rate without a warning."""
        monkeypatch.setattr(search, "DOUBTFUL_ERROR", -1.0)
        for _time in range(2):
            with pytest.warns(DoubtfulTimesWarning, match=r"contradict each other by \d+%"):
                quick(small(), "cpu:1MiB", effective_batch_size=8, profile="auto")

    @pytest.mark.whole
    def test_no_last_forward_of_one_is_the_answer(self):
        plan = quick(small(), "sim:1xRTX3090", effective_batch_size=5, max_batch_size=4)
        assert (plan.batch_size, plan.accumulation_steps) == (3, 2)

    @pytest.mark.parametrize(("effective", "most"), [(5, 2), (7, 3)])
    def test_where_there_is_no_other_the_sizes_are_named(self, effective, most):
        with raises(DoesNotFitError):
            quick(small(), "cpu", effective_batch_size=effective, max_batch_size=most)

    @pytest.mark.whole
    def test_nor_a_last_forward_of_one_for_a_rank(self):
        with raises(DoesNotFitError):
            quick(small(), "sim:2xRTX3090", strategy="ddp", effective_batch_size=5, max_batch_size=4)

    @pytest.mark.whole
    @pytest.mark.parametrize("second", ["17KiB", slow("20KiB")])
    def test_the_last_ceilings_are_found_beside_one_another(self, second):
        """They were measured next to a share of one, after the search. A failure there lost the whole tuning."""
        plan = quick(small(), f"sim:1xRTX3090@17KiB+1xRTX3060@{second}")
        assert plan.split[0] <= plan.ceilings[0]


@pytest.mark.slow
def test_a_card_too_small_for_a_rank_is_timed_as_what_it_is():
    """It cannot hold gradient buckets, so it is no rank. Its time was then invented: a second per sample."""
    peaks = traced(wide())
    held = peaks(StepShape(((64,),)))[0]
    assert held < peaks(StepShape(((1,),), "rank", num_ranks=2))[0]
    plan = quick(wide(), f"sim:1xRTX3090@{held}B+1xRTX3090", effective_batch_size=64)
    assert plan.ddp is None
    assert plan.main.cost.step_time.curves[0](1) < 0.01


# ------------------------------------------------------------------------------------------------------- budgets


def train(model, loss_of, make_batch, optimizer, n: int, count: int = 3) -> None:
    for _ in range(count):
        loss_of(model, make_batch(n)).backward()
        optimizer.step()
        optimizer.zero_grad()


def inside(model, batch):
    return model(*batch)


def check_edges(plan: Plan, workload: Workload, loss_of, new_optimizer, *, steps_before: int = 0) -> None:
    """Train at the ceilings within the budgets, and with one sample more on each device."""

    def batch(n: int):
        return resize(workload.sample_batch, n, 0)

    def attempt(split: tuple[int, ...]) -> tuple[int, ...]:
        model = copy.deepcopy(workload.model)
        optimizer = new_optimizer(model.parameters())
        train(model, loss_of, batch, optimizer, 2, count=steps_before)
        wrapped = BalancedDataParallel(None, model, ["cpu"] * len(split), split=split)
        with plan.budgets() as tracker:
            train(wrapped, loss_of, batch, optimizer, sum(split))
            return tuple(tracker.peak_bytes)

    peaks = attempt(plan.ceilings)
    assert all(peak <= device.capacity_bytes for peak, device in zip(peaks, plan.devices, strict=True))
    for index, device in enumerate(plan.devices):
        more = tuple(n + (position == index) for position, n in enumerate(plan.ceilings))
        with pytest.raises(torch.OutOfMemoryError, match=device.label) as caught:
            attempt(more)
        assert isinstance(caught.value, autosplit.OutOfMemoryError)
        assert caught.value.device == device.label


OPTIMIZERS = {"sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9), "adamw": torch.optim.AdamW}


class TestBudgets:
    @pytest.mark.parametrize("name", [slow("sgd"), "adamw"])
    def test_ceilings_are_the_edge_with_the_loss_inside(self, name):
        workload = with_loss(optimizer=OPTIMIZERS[name])
        plan = quick(workload, "cpu:3MiB,cpu:2MiB")
        check_edges(plan, workload, inside, OPTIMIZERS[name])


# --------------------------------------------------------------------------------------------------- state guard


DEVICES = ("cpu", "cpu:1MiB,cpu:1MiB", "sim:2xRTX3090")


class TestInterrupted:
    @pytest.mark.whole
    def test_the_best_so_far_is_kept_and_not_taken_for_the_answer(self, tmp_path):
        seen = []

        def stop(progress):
            seen.append(progress)
            if progress.stage == "search" and progress.best_samples_per_s is not None:
                raise KeyboardInterrupt

        workload = small()
        with pytest.raises(TuningInterrupted) as caught:
            tune(workload, devices="sim:2xRTX3090", effective_batch_size=64, progress=stop)
        plan = caught.value.plan
        assert plan is not None
        assert not plan.complete
        check_sums(plan, 64)
        assert Plan.load(caught.value.path).to_dict() == plan.to_dict()
        again = tune(workload, devices="sim:2xRTX3090", effective_batch_size=64)
        assert again.complete
        assert "tuned-again" in kinds(again.notes)

    @pytest.mark.slow
    def test_a_refresh_that_is_interrupted_leaves_the_remembered_plan(self, monkeypatch):
        def stop(progress):
            if progress.stage == "search" and progress.best_samples_per_s is not None:
                raise KeyboardInterrupt

        workload, options = small(), {"devices": "sim:2xRTX3090", "effective_batch_size": 64}
        tune(workload, **options)
        with pytest.raises(TuningInterrupted) as caught:
            tune(workload, **options, profile="refresh", progress=stop)
        assert caught.value.path is None
        assert any(one.kind == "plan-not-saved" for one in caught.value.plan.notes)
        forbid_search(monkeypatch)
        assert tune(workload, **options).complete

    def test_nothing_is_kept_where_no_trial_had_succeeded(self, cache_dir):
        def stop(progress):
            raise KeyboardInterrupt

        with pytest.raises(TuningInterrupted) as caught:
            tune(small(), devices="sim:2xRTX3090", progress=stop)
        assert (caught.value.plan, caught.value.path) == (None, None)
        assert not list(cache_dir.rglob("*.json"))


# ------------------------------------------------------------------------------------------------------ profiles


def forbid_search(monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise AssertionError("a remembered plan needs no search")

    monkeypatch.setattr(search, "search", fail)


class TestProfiles:
    options = types.MappingProxyType({"devices": "sim:2xRTX3090", "effective_batch_size": 64, "n_trials": 3})

    @pytest.mark.whole
    @pytest.mark.smoke
    @pytest.mark.slow  # tests/public/test_command_line.py also uses the profile
    def test_the_second_tuning_runs_nothing_and_says_so(self, monkeypatch):
        workload = small()
        first = tune(workload, **self.options)
        forbid_search(monkeypatch)
        second = tune(workload, **self.options)
        assert second.notes[0].kind == "from-profile"
        assert replace(second, notes=first.notes).to_dict() == first.to_dict()
        with pytest.raises(AssertionError, match="no search"):
            tune(workload, **self.options, profile="refresh")

    @pytest.mark.slow
    def test_a_sampler_of_ones_own_tunes_anew(self, monkeypatch):
        """It was ignored without a message."""
        import optuna

        workload = small()
        tune(workload, **self.options)
        forbid_search(monkeypatch)
        with pytest.raises(AssertionError, match="no search"):
            tune(workload, **self.options, sampler=optuna.samplers.RandomSampler())

    @pytest.mark.slow
    def test_refresh_replaces_the_plan(self):
        workload = small()
        tune(workload, **self.options, name="mine")
        fresh = tune(workload, **{**self.options, "n_trials": 1}, name="mine", profile="refresh")
        assert len(fresh.trials) == 1
        assert len(tune(workload, **self.options, name="mine").trials) == 1

    @pytest.mark.whole
    def test_off_neither_reads_nor_writes(self, cache_dir, monkeypatch):
        workload = small()
        tune(workload, **self.options, profile="off")
        assert not cache_dir.exists()
        tune(workload, **self.options)
        forbid_search(monkeypatch)
        with pytest.raises(AssertionError, match="no search"):
            tune(workload, **self.options, profile="off")

    @pytest.mark.whole
    @pytest.mark.parametrize(
        "other",
        [
            {"effective_batch_size": 65},
            slow({"devices": "sim:2xRTX4090"}),
            slow({"precision": "bf16"}),
            slow({"name": "another"}),
            slow({"model": "wider"}),
        ],
        ids=str,
    )
    def test_what_makes_another_plan_makes_another_profile(self, other, monkeypatch):
        tune(small(), **self.options)
        found = []
        real_find = profiles.find
        monkeypatch.setattr(
            profiles, "find", lambda *args, **kwargs: found.append(real_find(*args, **kwargs)) or found[-1]
        )
        options = {**self.options, **other}
        wider = nn.Sequential(nn.Linear(4, 33), nn.BatchNorm1d(33), nn.Dropout(0.5), nn.ReLU(), nn.Linear(33, 3))
        tune(small(wider if options.pop("model", None) else None), **options)
        assert found[0].plan is None
        assert found[0].notes == ()


class TestPrecision:
    """`precision` replaces a Workload's own precision, like the command line's flag."""

    @pytest.mark.parametrize("devices", [whole("sim:2xRTX3090"), "cpu:1MiB,cpu:1MiB"])
    @pytest.mark.parametrize("precision", ["bf16", for_release("fp16")])
    @pytest.mark.parametrize("source", [small, small()], ids=["function", "workload"])
    def test_it_replaces_the_workloads_own(self, devices, precision, source):
        plan = quick(source, devices, precision=precision, max_batch_size=8)
        assert plan.precision == precision
        assert plan.workload["precision"] == precision

    @pytest.mark.parametrize("source", [small, small()], ids=["function", "workload"])
    def test_an_unknown_one_is_refused(self, source):
        with raises(WorkloadError, "'fp8'"):
            quick(source, "sim:1xRTX3090", precision="fp8")


# ---------------------------------------------------------------------------------------------------------- ddp


class TestRangeOfEffectiveBatches:
    @pytest.mark.whole
    def test_ddp_is_within_it_too(self):
        plan = quick(one_block(), "sim:2xRTX3090@70MiB", effective_batch_size="200:300", strategy="ddp")
        assert 200 <= plan.effective_batch_size <= 300
        assert plan.effective_batch_size == plan.ddp.effective_batch_size

    def test_a_step_that_is_one_forward_is_as_large_as_fits(self):
        plan = quick(gan(), "cpu:40MiB", effective_batch_size=(2, 64))
        assert plan.accumulation_steps == 1
        assert 2 <= plan.batch_size <= 64

    @pytest.mark.parametrize(
        "given", [(300, 200), (0, 5), (1, 2, 3), "1:2:3", "a:b", "64:", (1.5, 3), "1e3", (), ("4", True)]
    )
    def test_what_is_no_range_is_refused(self, given):
        with pytest.raises(InputError, match="effective_batch_size"):
            quick(one_block(), "sim:1xRTX3090", effective_batch_size=given)


class TestDdpStrategy:
    @pytest.mark.whole
    def test_the_split_holds_the_ranks_batches_and_nothing_is_searched(self, monkeypatch):
        forbid_search(monkeypatch)
        plan = quick(one_block(), "sim:1xH100-80GB+1xRTX3090", effective_batch_size=512, strategy="ddp")
        check_sums(plan, 512)
        assert plan.trials == ()
        assert plan.split == plan.ddp.split
        assert plan.ceilings == plan.ddp.ceilings
        assert all(seat.ceiling.role == "rank" for seat in plan.ddp.seats)
        assert plan.samples_per_s == plan.ddp.samples_per_s
        assert plan.split[0] > plan.split[1]
        assert "ddp-predicted" in kinds(plan.notes)

    @pytest.mark.parametrize("devices", ["cpu", "cpu:1MiB", "cpu:1MiB,cpu:1MiB", whole("sim:1xRTX3090")])
    def test_on_any_devices(self, devices):
        plan = quick(small(), devices, strategy="ddp", effective_batch_size=32)
        check_sums(plan, 32)
        assert min(plan.split) >= plan.ddp.least_batch == 2  # BatchNorm cannot train on fewer

    @pytest.mark.whole
    def test_a_device_too_small_for_a_rank(self):
        with raises(DoesNotFitError):
            quick(small(), "sim:1xRTX3090+1xRTX3090@5KiB", strategy="ddp", effective_batch_size=32)

    @pytest.mark.whole
    def test_fewer_samples_than_ranks(self):
        with raises(DoesNotFitError):
            quick(small(), "sim:4xRTX3090", strategy="ddp", effective_batch_size=4)

    @pytest.mark.whole
    def test_a_loss_over_the_batch(self):
        plan = quick(small(loss_scope="batch"), "sim:2xRTX3090", max_batch_size=16)
        assert plan.ddp is None
        assert "loss_scope" in plan.why_no_ddp


# ------------------------------------------------------------------------------- steps that cannot be accumulated


class Discriminating(nn.Module):
    """Half of a GAN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))

    def forward(self, x):
        return self.layers(x)


def gan_step(models, optimizers, batch):
    generator, critic = models
    for optimizer in optimizers:
        optimizer.zero_grad()
    made = generator(batch)
    critic_loss = critic(made.detach()).mean() - critic(batch).mean()
    critic_loss.backward()
    optimizers[1].step()
    (-critic(made).mean()).backward()
    optimizers[0].step()


def gan() -> Workload:
    models = (Discriminating(64), Discriminating(32))
    optimizers = (torch.optim.Adam, torch.optim.RMSprop)
    return Workload(models, torch.randn(4, 16), step=gan_step, optimizer=optimizers)


SINGLE = {"step": gan, "loss_scope": lambda: small(loss_scope="batch")}


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
class TestSingleForward:
    @pytest.mark.parametrize("devices", [*map(slow, DEVICES), "cpu:1MiB"])
    def test_the_whole_step_is_one_forward(self, make, devices):
        plan = quick(make(), devices, effective_batch_size=64, n_trials=6)
        check_sums(plan, 64)
        assert plan.accumulation_steps == 1
        assert all(trial.accumulation_steps == 1 for trial in plan.trials)
        assert plan.ddp is None or plan.ddp.accumulation_steps == 1

    @pytest.mark.parametrize("devices", ["cpu:128KiB,cpu:128KiB", whole("sim:2xRTX3090@128KiB")])
    @pytest.mark.parametrize("strategy", [slow("auto"), "ddp"])
    def test_what_does_not_fit_one_forward_is_refused(self, make, devices, strategy):
        with raises(DoesNotFitError) as caught:
            quick(make(), devices, effective_batch_size=4096, strategy=strategy)
        assert "\n" not in str(caught.value)

    @pytest.mark.whole
    def test_a_bound_below_the_step_is_refused(self, make):
        with raises(DoesNotFitError, "raise max_batch_size"):
            quick(make(), "sim:2xRTX3090", effective_batch_size=64, max_batch_size=8)


# -------------------------------------------------------------------------------------------------------- errors


def raising_factory():
    raise LookupError("no such data")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) @ torch.ones(99, 1)


SIM = "sim:2xRTX3090"


def small_of_float64() -> Workload:
    """Float64 batches from numpy. Fake products accepted them, so simulated GPUs got a plan."""
    inputs, targets = net_batch()
    return Workload(net(), (inputs.double(), targets), loss_fn=F.cross_entropy)


def headed() -> Workload:
    """Trains a part and does not freeze the rest. The error claimed that the model grows."""
    model = net()
    optimizer = torch.optim.AdamW(model[-1].parameters())
    return Workload(model, net_batch(), loss_fn=F.cross_entropy, optimizer=optimizer)


def straying() -> Workload:
    model = net()
    return Workload(
        model, net_batch(), loss_fn=F.cross_entropy, optimizer=lambda _: torch.optim.AdamW(model.parameters())
    )


def listed_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, torch.tensor(targets))


BAD = {
    "effective batch of 0": (
        InputError,
        "effective_batch_size is 0",
        lambda: quick(small(), SIM, effective_batch_size=0),
    ),
    "effective batch from its end": (
        InputError,
        "effective_batch_size is 1024:256.*256:1024",
        lambda: quick(small(), SIM, effective_batch_size="1024:256"),
    ),
    "fp64": (
        WorkloadError,
        "'none' is fp32, or the precision of the model",
        lambda: quick(small(), SIM, precision="fp64"),
    ),
    "a single sample": (
        UserCodeError,
        r"a single sample a batch with sample.unsqueeze\(0\)",
        lambda: quick(lambda: Workload(nn.Conv2d(3, 4, 3), torch.zeros(3, 8, 8)), SIM),
    ),
    "an array of targets": (
        UserCodeError,
        r"batch_size \(8\).*values that autosplit does not cut. Make them tensors",
        lambda: quick(
            Workload(nn.Linear(4, 3), (torch.zeros(4, 4), np.zeros(4, np.int64)), loss_fn=listed_cross_entropy), SIM
        ),
    ),
    "max batch of 0": (InputError, "max_batch_size is 0", lambda: quick(small(), SIM, max_batch_size=0)),
    "negative reserve": (InputError, "reserve", lambda: quick(small(), SIM, reserve=-1)),
    "a seed beyond numpy's": (
        InputError,
        "seed is 4294967296.*below",
        lambda: quick(small(), SIM, seed=2**32),
    ),
    "float64 on fakes": (UserCodeError, "must have the same dtype", lambda: quick(small_of_float64(), SIM)),
    "an optimizer of a part": (
        WorkloadError,
        r"4 parameters get a gradient but are not in the optimizer.* requires_grad_\(False\)",
        lambda: quick(headed(), SIM),
    ),
    "an optimizer of live ones": (
        WorkloadError,
        "did not use the parameters in its argument",
        lambda: quick(straying(), SIM),
    ),
    "unknown strategy": (InputError, "strategy is 'fsdp'", lambda: quick(small(), SIM, strategy="fsdp")),
    "unknown profile": (InputError, "profile is 'maybe'", lambda: quick(small(), SIM, profile="maybe")),
    "no trials": (InputError, "n_trials is 0", lambda: quick(small(), SIM, n_trials=0)),
    "time limit of 0": (InputError, "time_limit_s is 0", lambda: quick(small(), SIM, time_limit_s=0)),
    "sample twice": (InputError, "sample_batch", lambda: tune(small(), net_batch(), devices=SIM)),
    "option next to a workload": (InputError, "loss_fn given", lambda: quick(small(), SIM, loss_fn=F.cross_entropy)),
    "model alone": (WorkloadError, "without sample_batch", lambda: quick(net(), SIM)),
    "no workload": (WorkloadError, "workload is 3", lambda: quick(3, SIM)),
    "unknown device": (DeviceError, "RTX3091", lambda: quick(small(), "sim:RTX3091")),
    "factory of another thing": (WorkloadError, "returned a int", lambda: quick(lambda: 3, SIM)),
    "factory raises": (UserCodeError, "no such data", lambda: quick(raising_factory, SIM)),
    "model fails": (UserCodeError, "raised", lambda: quick(small(Failing()), SIM)),
    "does not fit": (DoesNotFitError, "needs", lambda: quick(small(), "sim:RTX3090@3KiB")),
    "storage": (ArgumentError, "Use plan.trials", lambda: quick(small(), SIM, storage="sqlite:///study.db")),
}


class TestErrors:
    @pytest.mark.whole
    @pytest.mark.parametrize(("kind", "says", "call"), BAD.values(), ids=BAD)
    def test_bad_input_is_one_line_that_says_what_to_do(self, kind, says, call):
        with pytest.raises(kind, match=says) as caught:
            call()
        assert isinstance(caught.value, AutosplitError)
        assert "\n" not in str(caught.value)
        assert re.search(r"[.;] ", str(caught.value)), "a message ends in what to do next"

    @pytest.mark.parametrize("source", [raising_factory, small(Failing())], ids=["factory", "model"])
    @pytest.mark.parametrize("devices", ["cpu", whole(SIM)])
    def test_the_users_own_frames_are_shown(self, source, devices):
        with pytest.raises(UserCodeError) as caught:
            quick(source, devices)
        assert caught.value.frames
        assert all("test_tune.py" in frame for frame in caught.value.frames)

    @pytest.mark.whole
    def test_a_time_limit_ends_the_search(self):
        plan = quick(small(), SIM, effective_batch_size=64, n_trials=500, time_limit_s=0.001)
        assert len(plan.trials) == 1

    @pytest.mark.slow
    def test_a_time_limit_bounds_the_ceilings_too(self, monkeypatch):
        """They took 96 s with a limit of a millisecond, because the limit only covered trials."""
        from autosplit.sim.tracer import Tracer

        steps, step = [], Tracer._run
        monkeypatch.setattr(Tracer, "_run", lambda self, shape: (steps.append(shape), step(self, shape))[1])
        options = {"devices": "sim:RTX3090@900MiB", "effective_batch_size": 4096, "n_trials": 1}
        unhurried = quick(one_block(), **options)
        steps.clear()
        plan = quick(one_block(), **options, time_limit_s=0.001)
        assert len(steps) <= 20
        assert plan.ceilings[0] <= unhurried.ceilings[0]
        assert len(plan.trials) == 1
        assert "time-limit" in kinds(plan.notes)

    @pytest.mark.whole
    def test_a_sampler_of_ones_own_draws_all_trials(self):
        import optuna

        plan = quick(small(), SIM, effective_batch_size=64, n_trials=5, sampler=optuna.samplers.RandomSampler(seed=3))
        assert len(plan.trials) == 5
        for odd in ("tpe", optuna.samplers.RandomSampler):  # the class was a TypeError from within Optuna
            with raises(InputError):
                quick(small(), SIM, sampler=odd)


@pytest.mark.parametrize(
    ("copies_s", "reduce_s"),
    [((0.0, 0.08), 0.04), ((0.0, *(0.08,) * 7), 0.07), ((0.0, 0.02, 0.08, 0.02), 0.06), ((0.0,), 0.0)],
)
def test_an_all_reduce_takes_no_longer_than_the_slowest_links_copies(copies_s, reduce_s):
    """It was the sum of all replicas' copies: on eight equal GPUs, seven times a ring's time."""
    curves = (TimeCurve(((1, 1.0),)),) * len(copies_s)
    step_time = StepTime(curves, copies_s, (0.0,) * len(copies_s), 0.0, adds_up=False)
    run = SimpleNamespace(request=SimpleNamespace(devices=[SimpleNamespace(spec=None) for _ in curves]))
    assert all_reduce_seconds(run, step_time) == pytest.approx(reduce_s)


@pytest.mark.slow
def test_a_ceiling_is_no_less_than_the_share_that_ran(monkeypatch, working_cards):
    """On a busy machine, doctor's small model failed: the time limit ended before the search for ceilings."""
    of_plan = Limits.of_plan

    def out_of_time(self, best):
        self.replicas = tuple(replace(ceiling, batch_size=1) for ceiling in self.replicas)
        return of_plan(self, best)

    monkeypatch.setattr(Limits, "of_plan", out_of_time)
    plan = quick(one_block(), f"sim:2x{working_cards[0]}", effective_batch_size=64)
    assert 1 < plan.split[1] <= plan.ceilings[1]
