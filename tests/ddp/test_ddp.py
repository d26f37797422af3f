"""DDP with a plan's settings: the slices cover the epoch, and a process leaves nothing behind.

Gradients of real ranks are compared in tests/public/test_ddp_exact.py and in test_ddp_ragged.py.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import (
    INPUTS,
    gradient,
    loader_of,
    make_model,
    make_plan,
    mean_loss,
    relative_error,
    weights,
)
from handmade import changed_plan
from hypothesis import given
from hypothesis import strategies as st
from noted import noted
from raised import raises
from ranks import found_by, job_of
from torch import distributed as dist
from torch.utils.data import DataLoader

from autosplit import ddp
from autosplit.ddp.batchnorms import BatchNormWarning, doubt_batchnorms
from autosplit.errors import CheckpointError, DeviceError, InputError, PlanError
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler
from autosplit.parallel.epoch_steps import steps
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.plan.plan import Plan

# --------------------------------------------------------------------------------------------------- the arithmetic


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int]:
    """Samples, batch sizes of the ranks, effective batch."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    return draw(st.integers(1, 120)), tuple(sizes), draw(st.integers(1, 60))


def samplers(num_samples: int, sizes: tuple[int, ...], effective: int, **options: Any) -> list[ScheduledBatchSampler]:
    return [
        ScheduledBatchSampler(num_samples, sum(sizes), effective, rank_slice=RankSlice(rank, sizes), **options)
        for rank in range(len(sizes))
    ]


class TestRankSlices:
    @given(jobs())
    def test_an_empty_part_is_a_sample_or_two_that_count_for_nothing(self, job: tuple[Any, ...]) -> None:
        num_samples, sizes, effective = job
        whole = list(ScheduledBatchSampler(num_samples, sum(sizes), effective))
        for rank, sampler in enumerate(samplers(num_samples, sizes, effective)):
            counted = [n for step in sampler.schedule for n in step.micro_batch_sizes]
            for batch, count, all_of_it in zip(sampler, counted, whole, strict=True):
                assert len(batch) <= max(1, sizes[rank])
                assert len(batch) == count or (not count and batch == all_of_it[: min(2, max(1, sizes[rank]))])

    def test_counts_of_one_rank_say_nothing_of_the_others(self) -> None:
        loader = DataLoader(range(45), batch_sampler=samplers(45, (2, 6), 20)[0])
        with raises(InputError, "2"):
            steps(loader, batch_size=8, effective_batch_size=20, count=len)

    def test_the_loss_of_a_rank_is_the_mean_over_its_own_samples(self) -> None:
        step = OptimizerStep([2.0, 5.0], [3, 1], count=16, num_ranks=2)
        for value in step:
            step.backward(torch.tensor(value, requires_grad=True))
        assert step.loss == pytest.approx((3 * 2.0 + 5.0) / 4)


def test_the_effective_batch_is_the_one_that_the_ranks_were_solved_for() -> None:
    """With a range, the ranks may use another number than the split. Steps had 1794 samples instead of 1500."""
    ranks = make_plan((15, 14), 150).layouts[0]
    plan = changed_plan(make_plan((16, 16), 128), strategy="balanced")
    ctx = ddp.Context(replace(plan, layouts=(*plan.layouts, ranks)), 0, torch.device("cpu"))
    assert ctx.effective_batch_size == 150
    assert ctx.batch_sampler(3000).schedule[0].num_samples == 150


# ------------------------------------------------------------------------------------------------------ one process


def group_threads() -> set[str]:
    """Return the system's ids of gloo's threads in this process. Groups of earlier tests may have some, too."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while this reads its name
            found |= {task.name} if "gloo" in (task / "comm").read_text() else set()
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
class TestOneProcess:
    @pytest.mark.smoke
    def test_trains_and_leaves_no_group_behind(self) -> None:
        with ddp.setup(make_plan((4,), 10)) as ctx:
            assert (ctx.rank, ctx.world_size, ctx.device) == (0, 1, torch.device("cpu"))
            assert ctx.seat is ctx.plan.ddp.seats[0]
            model = ctx.wrap(make_model())
            assert model.gradient_as_bucket_view
            step = next(ctx.steps(loader_of(ctx)))
            for indices in step:
                step.backward(mean_loss(model, indices))
            reference = make_model()
            mean_loss(reference, list(range(10))).backward()
            assert relative_error(gradient(model), gradient(reference)) < 1e-12
        assert not dist.is_initialized()

    def test_nothing_of_the_group_outlives_it(self) -> None:
        """On a busy machine, ranks sometimes died at their very end: "terminate called without an active exception".

        The wrapped model, usually a global variable, kept the group alive. So destroying the group ended none of gloo's
        threads, and they ran while the interpreter shut down.
        """
        before = group_threads()
        with ddp.setup(make_plan((4,))) as ctx:
            model = ctx.wrap(make_model())
            mean_loss(model, [0, 1]).backward()
            group = weakref.ref(dist.group.WORLD)
            own = group_threads() - before
        assert group() is None
        assert model.module is not None
        if not own:
            pytest.skip(f"gloo of torch {torch.__version__} gives its threads no names")
        while own & group_threads():  # a joined thread stays in /proc for a moment
            time.sleep(0.01)

    def test_a_wrapped_model_goes_on_as_what_it_wraps(self) -> None:
        with ddp.setup(make_plan((4,))) as ctx:
            plain = make_model()
            model = ctx.wrap(plain)
            expected = model(INPUTS).detach()
            names = list(model.state_dict())
        assert list(model.state_dict()) == names
        assert model.module is plain
        with torch.no_grad():
            assert torch.equal(model(INPUTS), expected)
        with raises(InputError):
            model(INPUTS)
        output = model.eval()(INPUTS)
        assert torch.equal(output, expected)
        output.sum().backward()  # only this rank's, like its forward

    def test_a_group_of_the_users_stays_with_the_model(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with ddp.setup(make_plan((4,))) as ctx:
                model = ctx.wrap(make_model())
            mean_loss(model, [0, 1]).backward()
            assert model.process_group is dist.group.WORLD
            assert dist.is_initialized()
        finally:
            dist.destroy_process_group()

    def test_options_that_this_ddp_does_not_have_are_named(self) -> None:
        with ddp.setup(make_plan((4,))) as ctx, raises(InputError, "not_an_option"):
            ctx.wrap(make_model(), not_an_option=1)

    @pytest.mark.parametrize(
        ("sizes", "rank", "track", "warned"),
        [
            ((2, 6), 0, True, True),
            ((4, 4), 0, True, False),
        ],
    )
    def test_running_statistics_of_the_smaller_share_are_told_of(
        self, sizes: tuple[int, ...], rank: int, track: bool, warned: bool
    ) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, track_running_stats=track))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            doubt_batchnorms(model, rank, sizes)
        assert [warning.category for warning in caught] == [BatchNormWarning] * warned

    @pytest.mark.parametrize(
        ("workload", "warned"),
        [({"model": "Net", "parameters": 5}, True), ({"model": "Net", "parameters": 50}, False), ({}, False)],
    )
    def test_a_plan_for_another_model_is_told_of(self, workload: dict[str, Any], warned: bool) -> None:
        """A user's script ran with the example's plan, the only saved plan, without a message."""
        with ddp.setup(make_plan((4,), workload=workload)) as ctx, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ctx.wrap(make_model())
        assert [(warning.category, warning.filename) for warning in caught] == [
            (ddp.OtherModelWarning, __file__)
        ] * warned

    def test_the_plan_from_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = make_plan((4,))
        plan.save(tmp_path / "plan.json")
        with ddp.setup(tmp_path / "plan.json") as ctx:
            assert ctx.plan == plan
        monkeypatch.setenv("AUTOSPLIT_PROFILE", str(tmp_path / "plan.json"))
        with ddp.setup() as ctx:
            assert ctx.plan == plan

    def test_an_exception_leaves_no_group_behind(self) -> None:
        with pytest.raises(ZeroDivisionError), ddp.setup(make_plan((4,))):
            _ = 1 / 0
        assert not dist.is_initialized()

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with raises(PlanError):
            ddp.setup(tmp_path / "none.json").__enter__()

    @pytest.mark.parametrize(
        ("plan", "error"),
        [
            (make_plan((2, 6)), PlanError),
            (make_plan((4,), device="sim:{}"), DeviceError),
            (changed_plan(make_plan((4,)), strategy="balanced"), PlanError),
            (make_plan((4,), device="cuda:99"), DeviceError),
        ],
        ids=["ranks", "simulated", "none", "device"],
    )
    def test_unfit_plans(self, plan: Plan, error: type[Exception]) -> None:
        with raises(error):
            ddp.setup(plan).__enter__()
        assert not dist.is_initialized()

    @pytest.mark.parametrize("num_samples", [21, 23])
    def test_a_last_forward_that_batchnorm_does_not_train_on_is_refused_before_training(self, num_samples: int) -> None:
        """torch's own error came at the end of the first epoch. The plan knows the smallest batch that works."""
        plan = make_plan((8,), 12)
        with ddp.setup(changed_plan(plan, least_batch=2)) as ctx:
            if num_samples == 23:
                ctx.batch_sampler(num_samples)
                return
            with raises(InputError, "1", "(1,)", "2"):
                ctx.batch_sampler(num_samples)
            ctx.batch_sampler(num_samples, drop_last=True)
        with ddp.setup(plan) as ctx:
            ctx.batch_sampler(num_samples)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"batch_sampler": ScheduledBatchSampler(45, 4, 10)},
            {"batch_sampler": samplers(45, (4, 4), 10)[0]},
        ],
        ids=["all", "of no rank", "of another"],
    )
    def test_a_loader_of_more_than_this_ranks_part(self, options: dict[str, Any]) -> None:
        ctx = ddp.Context(make_plan((2, 6)), 1, torch.device("cpu"))
        with pytest.raises(InputError, match=r"Expected .*rank 1's"):
            ctx.steps(DataLoader(range(45), **options))

    def test_no_loop_that_ended_touches_the_flag_of_the_next(self) -> None:
        with ddp.setup(make_plan((4,), 10)) as ctx:
            model = ctx.wrap(make_model())
            left = ctx.steps(loader_of(ctx))
            next(iter(next(left)))
            assert not model.require_backward_grad_sync
            going_on = ctx.steps(loader_of(ctx))
            step = next(going_on)
            assert model.require_backward_grad_sync
            next(iter(step))
            del left
            gc.collect()
            assert not model.require_backward_grad_sync
            going_on.close()
            assert model.require_backward_grad_sync


# --------------------------------------------------------------------------------------------------- two processes
#
# Starting processes costs seconds, so both run all scenarios, each in its own group, and write the results. The
# scenarios are at module level, because the processes import them by name.


def different_plans() -> str:
    plan = make_plan((2, 6), 8 + 8 * int(os.environ["RANK"]))
    with pytest.raises(PlanError) as caught:
        ddp.setup(plan).__enter__()
    assert not dist.is_initialized()
    return str(caught.value)


def different_notes() -> bool:
    with ddp.setup(make_plan((2, 6), notes=noted(f"from the profile of rank {os.environ['RANK']}"))):
        return True


def communication() -> list[bool]:
    """Whether the flag was set when each forward ran."""
    found = []
    with ddp.setup(make_plan((2, 6), 20)) as ctx:
        model = ctx.wrap(make_model())
        model.module.register_forward_pre_hook(lambda *_: found.append(model.require_backward_grad_sync))
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(mean_loss(model, indices))
    return found


def checkpoints() -> dict[str, Any]:
    """Return each rank's result of three checkpoints: a good one, a failing write on rank 0, and a failing load on rank
    1.
    """
    found: dict[str, Any] = {}
    folder = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parent
    with ddp.setup(make_plan((2, 6))) as ctx:
        model = ctx.wrap(make_model())
        torch.nn.init.ones_(next(model.parameters()))
        ctx.save_checkpoint(folder / "last.pt", model=model, rank=ctx.rank)
        other = ctx.wrap(make_model())
        found["rest"] = ctx.load_checkpoint(folder / "last.pt", model=other)  # waits for rank 0, which writes it
        found["loaded"] = torch.equal(weights(model), weights(other))
        try:
            ctx.save_checkpoint(folder / "none" / "last.pt", step=1)
        except CheckpointError as error:
            found["unwritten"] = str(error)
        with pytest.raises(CheckpointError) as caught:
            ctx.load_checkpoint(folder / "last.pt", model=torch.nn.Linear(2, 2).double() if ctx.rank else make_model())
        found["unloaded"] = str(caught.value)
    return found


SCENARIOS: dict[str, Callable[[], Any]] = {
    "checkpoints": checkpoints,
    "different plans": different_plans,
    "different notes": different_notes,
    "communication": communication,
}


ranks = job_of(__name__, "SCENARIOS", 2)


class TestTwoProcesses:
    def test_different_plans_are_refused_by_all(self, ranks: Any) -> None:
        said = found_by(ranks, "different plans")
        expected = "Rank {} of 2 stops: the plan of rank 1 differs from rank 0's. All ranks need the same plan"
        assert [text.startswith(expected.format(rank)) for rank, text in enumerate(said)] == [True, True]

    def test_notes_do_not_make_plans_different(self, ranks: Any) -> None:
        assert found_by(ranks, "different notes") == [True, True]

    def test_gradients_meet_in_the_last_micro_batch_of_each_step_only(self, ranks: Any) -> None:
        for found in found_by(ranks, "communication"):
            assert found == [False, False, True, False, False, True, True]

    def test_checkpoints_are_rank_0s_to_write_and_everyones_or_nobodys_to_load(self, ranks: Any) -> None:
        for rank, found in enumerate(found_by(ranks, "checkpoints")):
            assert found["loaded"]
            assert found["rest"] == {"rank": 0}
            assert ("was not written. FileNotFoundError" in found.get("unwritten", "")) == (rank == 0)
            assert "was not loaded on rank 1. 'model' is the state of another model" in found["unloaded"]
