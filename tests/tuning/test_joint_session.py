"""Ranks that tune together get one plan. If one rank fails, the trial or the tuning fails on all ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spinning
import torch
from ddp_jobs import make_plan
from fake_gpus import FakeCuda, cards, stand_in
from marks import for_release, slow
from noted import kinds
from raised import raises
from ranks import found_by, job_of, starting
from saved_profiles import saved_profiles
from short_budgets import short_budgets
from torch import distributed as dist
from torch import nn

import autosplit
from autosplit import ddp
from autosplit.cli.workload_arguments import checked_arguments
from autosplit.ddp.rendezvous import Place, meeting_place
from autosplit.devices import spec as specs
from autosplit.devices.accelerator import Found
from autosplit.devices.spec import parse_devices
from autosplit.errors import AutosplitError, DeviceError, InputError, RankFailedError, UserCodeError, WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.plan.layout import DdpOptions
from autosplit.plan.plan import Plan
from autosplit.probe.request import checked_request
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey, machine_of, workload_of
from autosplit.profiles.validity import usable_here
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.model_copy import training_copy
from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.proposals import Proposer
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import RankStepTime, StepTime, TimeCurve
from autosplit.solve.trial import Trial
from autosplit.tuning import rank_group as jobs
from autosplit.tuning.peers import Failure, Interrupts, Peers
from autosplit.tuning.process import equal_on_all_ranks
from autosplit.tuning.rank_steps import RankSteps
from autosplit.tuning.tune import TuningInterrupted, request_for

DEVICES = "cpu:400KiB,cpu:200KiB"
LIMIT_S = 450


class Net(nn.Module):
    """A small model. Some parameters may get no gradient."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.spare = nn.Linear(2, 2) if unused else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a number for each sample."""
        result: torch.Tensor = self.body(inputs)
        return result


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


class Trap:
    """A loss that acts after a number of calls, on one rank, in real steps only."""

    def __init__(self, spring: Callable[[], object], after: int) -> None:
        self.spring, self.left = spring, after

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss, or act."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.left -= 1
            if self.left < 0:
                self.spring()
        return squared(model, batch)


class HeldLoss:
    """A loss that uses its rank's number or data."""

    def __init__(self, rank: int) -> None:
        self.parts = [rank]

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return squared(model, batch)


def workload(model: nn.Module | None = None, **options: Any) -> autosplit.Workload:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
    options = {"compute_loss": squared, "optimizer": torch.optim.AdamW, **options}
    return autosplit.Workload(model or Net(), batch, **options)


def tune(given: autosplit.Workload, devices: str = DEVICES, **options: Any) -> Plan:
    options = {"effective_batch_size": 64, "n_trials": 3, "strategy": "ddp", **options}
    with short_budgets():
        return autosplit.tune(given, devices=devices, **options)


def rank_here() -> int:
    return int(os.environ["RANK"])


def raised(run: Callable[[], object]) -> tuple[str, str, int]:
    """Return the error's class, its message, and the exit code of the command line."""
    try:
        run()
    except AutosplitError as error:
        return type(error).__name__, str(error), error.exit_code
    raise AssertionError("nothing was raised")


# ------------------------------------------------------------------------------------------------------- scenarios


def tuned() -> dict[str, Any]:
    """Tune, tune again, and train one step with the plan."""
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    heard: list[str] = []
    plan = tune(workload(model), progress=lambda progress: heard.append(progress.stage))
    untouched = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    untouched &= torch.equal(rng, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    again = tune(workload(Net()))
    with ddp.setup(plan) as ctx:
        wrapped = ctx.wrap(Net())
        loader = torch.utils.data.DataLoader(list(range(64)), batch_sampler=ctx.batch_sampler(64))
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))
        for step in ctx.steps(loader):
            for indices in step:
                step.backward(wrapped(inputs[indices]).square().mean())
        gradient = torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.grad is not None])
    reference = Net()
    reference(inputs).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    return {
        "plan": plan.to_json(),
        "again": again.to_json(),
        "untouched": untouched,
        "heard": heard,
        "error": float((gradient - expected).norm() / expected.norm()),
        "group": dist.is_initialized(),
    }


def adopted() -> str:
    """Tune inside an existing process group, which must survive."""
    dist.init_process_group("gloo", store=meeting_place(jobs.place_here()), rank=rank_here(), world_size=2)
    try:
        plan = tune(workload(), profile="off", n_trials=1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    return plan.to_json()


def without_memory() -> list[Any]:
    """Run steps with too many samples on rank 0, the last rank, and both in turn. Then run a fitting step."""
    request = checked_request(devices=parse_devices(DEVICES), strategy="ddp")
    found = []
    with jobs.joined_job(request) as job:
        given = workload()
        worker = CpuWorker(job.devices, job.capacities_bytes, training_copy(given, device=job.device), 64)
        steps = RankSteps(given, worker, job.device, job.peers, backend="gloo", options=DdpOptions().keywords())
        for sizes in ((100_000, 4), (4, 100_000), (100_000, 4), (4, 4), (4, 100_000), (4, 4)):
            result = steps.measured([sizes[rank_here()]], budget_s=0.1)
            found.append((result.rank, result.message) if isinstance(result, Failure) else len(result[0]))
        steps.close()
    return found


def batches_made() -> int:
    """Time a step of two different micro-steps, and count the batches made for it."""
    made = []

    def make(n: int) -> Any:
        made.append(n)
        return torch.randn(n, 16), torch.randn(n, 1)

    with jobs.joined_job(checked_request(devices=parse_devices(DEVICES), strategy="ddp")) as job:
        given = workload(make_batch=make)
        worker = CpuWorker(job.devices, job.capacities_bytes, training_copy(given, device=job.device), 64)
        steps = RankSteps(given, worker, job.device, job.peers, backend="gloo", options=DdpOptions().keywords())
        steps._dry_peak_bytes = lambda _sizes: made.clear() or 0  # makes its own batch
        steps.measured([4, 3], budget_s=0.1)
        steps.close()
    return len(made)


def without_memory_in_a_timed_step() -> list[Any]:
    """Run out of memory only in the all-reduce. The waiting rank's collective times out."""

    def spring() -> None:
        if rank_here() == 1 and not sprung:
            sprung.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    sprung: list[bool] = []
    trap = Trap(spring, after=2)
    plan = tune(workload(compute_loss=trap), profile="off", n_trials=3)
    return [[trial.failure for trial in plan.trials], plan.real_ooms]


def spinning_for_one_without_memory() -> list[Any]:
    """Run out of memory in the all-reduce, on a back end that waits forever. Then run a fitting step."""
    spinning.register()
    request = checked_request(devices=parse_devices(DEVICES), strategy="ddp")
    found: list[Any] = []
    with jobs.joined_job(request) as job:
        for victim, error in ((1, torch.OutOfMemoryError("out of memory")), (0, torch.OutOfMemoryError("again"))):
            sprung: list[bool] = []

            def spring(victim: int = victim, error: Exception = error, sprung: list[bool] = sprung) -> None:
                if rank_here() == victim and not sprung:
                    sprung.append(True)
                    raise error

            given = workload(compute_loss=Trap(spring, after=2))
            worker = CpuWorker(job.devices, job.capacities_bytes, training_copy(given, device=job.device), 64)
            options = DdpOptions().keywords()
            steps = RankSteps(given, worker, job.device, job.peers, backend=spinning.NAME, options=options)
            for _ in range(2):
                result = steps.measured([4], budget_s=0.1)
                found.append((result.rank, result.message) if isinstance(result, Failure) else len(result[0]))
            steps.close()
    return found


def raising() -> tuple[str, str, int]:
    def spring() -> None:
        if rank_here() == 1:
            raise ValueError("a bug of mine")

    return raised(lambda: tune(workload(compute_loss=Trap(spring, after=2)), profile="off"))


def interrupted() -> list[Any]:
    """Press Ctrl-C on rank 1 as the search begins. Both ranks end with the plan so far."""

    def press() -> None:
        if rank_here() == 1 and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    pressed: list[bool] = []
    handler = signal.getsignal(signal.SIGINT)
    try:
        tune(workload(compute_loss=Trap(press, after=1)), n_trials=24, name="interrupted")
    except TuningInterrupted as error:
        plan = error.plan
        assert plan is not None
        return [plan.to_json(), plan.complete, plan.path is not None, signal.getsignal(signal.SIGINT) == handler]
    return ["not interrupted"]


@contextmanager
def on_a_machine_of_its_own() -> Iterator[None]:
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        yield
    finally:
        os.environ |= before


def on_processors_of_their_own() -> str:
    """Tune without a budget, as on separate machines."""
    with on_a_machine_of_its_own():
        return tune(workload(), "cpu", profile="off", n_trials=1, max_batch_size=64).to_json()


def with_less_memory() -> dict[str, Any]:
    """Tune, then tune again with less free memory on both."""
    model, options = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 1)), {"name": "short", "n_trials": 1}
    with on_a_machine_of_its_own():
        first = tune(workload(model, optimizer=torch.optim.SGD), "cpu", max_batch_size=64, **options)
        real = specs.available_host_bytes
        # Both may use 80% of this, slightly less than the fuller rank needs. So the fit shows what fits well.
        specs.available_host_bytes = lambda: int(1.2 * max(seat.peak_bytes for seat in first.main.seats))
        try:
            second = tune(workload(model, optimizer=torch.optim.SGD), "cpu", max_batch_size=64, **options)
        finally:
            specs.available_host_bytes = real
    return {"first": first.to_json(), "second": second.to_json()}


SCENARIOS: dict[str, Callable[[], Any]] = {
    "tuned": tuned,
    "without memory": without_memory,
    "batches": batches_made,
    "spinning": spinning_for_one_without_memory,
    "raising": raising,
    "interrupted": interrupted,
    "other requests": lambda: raised(lambda: tune(workload(), effective_batch_size=64 + rank_here())),
    "other models": lambda: raised(
        lambda: tune(workload(nn.Sequential(nn.Linear(16, 1), *[nn.Tanh()] * rank_here())), profile="off")
    ),
    "one device": lambda: raised(lambda: tune(workload(), "cpu:1MiB")),
    "simulated": lambda: raised(lambda: tune(workload(), "sim:2xRTX3090")),
    "nothing fits": lambda: raised(lambda: tune(workload(), "cpu:400KiB,cpu:1KiB", profile="off")),
    "synchronised": lambda: raised(
        lambda: tune(workload(nn.Sequential(nn.Linear(16, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))), profile="off")
    ),
    "over the batch": lambda: raised(lambda: tune(workload(loss_scope="batch"), profile="off")),
    "adopted": adopted,
    "isolated": lambda: tune(workload(), profile="off", n_trials=1, isolate=True).to_json(),
    "plain": on_processors_of_their_own,
    "unused": lambda: tune(workload(Net(unused=True)), profile="off", n_trials=1).to_json(),
    "without memory in a timed step": without_memory_in_a_timed_step,
    "less memory": with_less_memory,
}


ranks = job_of(__name__, "SCENARIOS", 2, limit_s=LIMIT_S)


def plan_of(ranks: list[dict[str, Any]], name: str) -> Plan:
    """Return the plan of a scenario, which is equal on both ranks."""
    one, other = found_by(ranks, name)
    assert one == other
    return Plan.from_json(one, source="a scenario")


@pytest.mark.timeout(LIMIT_S + 60)  # both run all scenarios before the first test
@pytest.mark.slow
class TestTwoRanks:
    def test_get_one_plan_that_was_measured_together(self, ranks: Any) -> None:
        one, other = found_by(ranks, "tuned")
        assert one["plan"] == other["plan"]
        plan = Plan.from_json(one["plan"], source="a scenario")
        assert plan.ddp.measured
        assert [device.label for device in plan.devices] == ["cpu:0", "cpu:1"]
        assert plan.ddp.split == plan.split
        assert min(plan.split) >= 1
        assert plan.effective_batch_size == plan.ddp.effective_batch_size == 64
        large, small = (seat.ceiling for seat in plan.ddp.seats)
        assert large.capacity_bytes == 2 * small.capacity_bytes
        assert large.role == small.role == "rank"
        assert all(seat.peak_bytes <= seat.ceiling.capacity_bytes for seat in plan.ddp.seats)
        assert 1 <= len(plan.trials) <= 3
        assert all(len(trial.peak_bytes) == 2 for trial in plan.trials if trial.failure is None)
        assert "ddp-measured" in kinds(plan.notes)
        assert str(plan.explain())

    def test_leave_their_models_and_generators_as_they_were(self, ranks: Any) -> None:
        assert [found["untouched"] for found in found_by(ranks, "tuned")] == [True, True]
        assert [found["group"] for found in found_by(ranks, "tuned")] == [False, False]

    def test_train_by_it(self, ranks: Any) -> None:
        assert all(found["error"] < 1e-5 for found in found_by(ranks, "tuned"))

    def test_find_it_again(self, ranks: Any) -> None:
        for found in found_by(ranks, "tuned"):
            again = Plan.from_json(found["again"], source="a scenario")
            assert again.notes[0].kind == "from-profile"
            assert again.trials == Plan.from_json(found["plan"], source="a scenario").trials

    def test_only_rank_0_tells_how_far_it_is(self, ranks: Any) -> None:
        first, second = (found["heard"] for found in found_by(ranks, "tuned"))
        assert {"ceilings", "times", "search", "done"} <= set(first)
        assert second == []

    def test_in_a_group_that_is_there(self, ranks: Any) -> None:
        assert plan_of(ranks, "adopted").ddp.measured

    def test_with_steps_in_processes_of_their_own(self, ranks: Any) -> None:
        assert plan_of(ranks, "isolated").ddp.measured

    def test_on_processors_without_a_budget(self, ranks: Any) -> None:
        plan = plan_of(ranks, "plain")
        assert plan.ddp.measured
        assert [device.label for device in plan.devices] == ["cpu", "cpu"]
        assert plan.machine["ranks_per_machine"] == [1, 1]

    def test_solve_a_plan_again_where_memory_is_short(self, ranks: Any) -> None:
        one, other = found_by(ranks, "less memory")
        assert one == other
        first, second = (Plan.from_json(one[name], source="a scenario") for name in ("first", "second"))
        assert second.notes[0].kind == "less-memory"
        assert str(second.notes[0]).endswith("; its samples/s are predicted")
        assert max(second.split) < max(first.split)
        assert not second.ddp.measured
        assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in second.main.seats)

    def test_a_parameter_without_a_gradient_is_told_to_ddp(self, ranks: Any) -> None:
        assert plan_of(ranks, "unused").ddp.options.find_unused_parameters
        tuned = Plan.from_json(found_by(ranks, "tuned")[0]["plan"], source="a scenario")
        assert not tuned.ddp.options.find_unused_parameters

    def test_a_rank_that_lacks_memory_is_everyones_failed_step_and_no_more(self, ranks: Any) -> None:
        one, other = found_by(ranks, "without memory")
        assert one == other
        assert [result if isinstance(result, int) else result[0] for result in one] == [0, 1, 0, 2, 1, 2]
        assert all(f"cpu:{result[0]}" in result[1] for result in one if not isinstance(result, int))

    def test_one_that_lacks_it_only_where_gradients_meet_is_waited_for_in_vain(self, ranks: Any) -> None:
        for failures, ooms in found_by(ranks, "without memory in a timed step"):
            assert [failure for failure in failures if failure is not None]
            assert all("rank 1: cpu:1 is out of memory" in failure for failure in failures if failure)
            assert ooms >= 1

    def test_time_no_batch_being_made(self, ranks: Any) -> None:
        """Each timed step made its batches again. For images that took longer than the step."""
        assert found_by(ranks, "batches") == [2, 2]

    def test_one_that_spins_for_the_gradients_of_another_is_told(self, ranks: Any) -> None:
        """NCCL waits until its watchdog ends the process, so one rank without memory ended the job."""
        for one, fits, other, again in found_by(ranks, "spinning"):
            assert (one[0], other[0]) == (1, 0)
            assert "cpu:1 is out of memory" in one[1]
            assert fits == again == 2

    def test_what_one_raises_ends_all(self, ranks: Any) -> None:
        (first, said, code), (second, own, own_code) = found_by(ranks, "raising")
        assert (first, second) == (RankFailedError.__name__, UserCodeError.__name__)
        assert said.startswith("rank 1 failed: ")
        assert "ValueError: a bug of mine" in said
        assert "ValueError: a bug of mine" in own
        assert code == own_code == 5

    def test_ctrl_c_on_one_ends_all_with_the_best_so_far(self, ranks: Any) -> None:
        one, other = found_by(ranks, "interrupted")
        assert one[0] == other[0]
        assert one[1:] == other[1:] == [False, True, True]

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("other requests", InputError, r"effective_batch_sizes is \(64, 64\) on rank 0 and \(65, 65\) on rank 1"),
            ("other models", InputError, "workload's model_.* is .* on rank 0 and .* on rank 1. Expected the same"),
            ("one device", DeviceError, r"There are 1 devices \(cpu:0\) for 2 ranks of this machine. Expected one"),
            ("simulated", DeviceError, "The devices are simulated, but 2 ranks were started"),
            ("synchronised", WorkloadError, "The model has a SyncBatchNorm, whose forward waits for all ranks"),
            ("over the batch", WorkloadError, "DDP can't train this workload: loss_scope='batch'"),
        ],
    )
    def test_what_can_not_be_tuned_is_refused_by_all(
        self, ranks: Any, name: str, error: type[Exception], message: str
    ) -> None:
        for kind, said, code in found_by(ranks, name):
            assert kind == error.__name__
            assert re.search(message, said), said
            assert code == 2

    def test_a_device_that_holds_nothing_is_named_on_all(self, ranks: Any) -> None:
        (first, said, code), (second, own, own_code) = found_by(ranks, "nothing fits")
        assert first == second == DoesNotFitError.__name__, "a smaller precision may do, on all of them"
        assert code == own_code == 3
        assert own in said


def test_a_loss_that_holds_its_ranks_own_is_the_same_workload() -> None:
    """Ranks have different numbers and data, but one profile serves the job."""
    every = [workload_of(workload(compute_loss=HeldLoss(rank))) for rank in (0, 1)]
    assert every[0] != every[1]
    said = equal_on_all_ranks(every)
    assert {name for name in said if said[name] != every[0][name]} == {"compute_loss"}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_optional_entry_of_one_rank_is_refused(rank) -> None:
    """Only the entries of rank 0 were compared, so no rank noticed that only rank 1 checkpoints its layers."""
    every: list[dict[str, Any]] = [workload_of(workload()) for _ in range(2)]
    every[rank]["checkpointing"] = "every layer checkpointed"
    with raises(InputError, "checkpointing", "rank 1"):
        equal_on_all_ranks(every)


# ----------------------------------------------------------------------------------------------------- a rank dies


def die_while_tuning(rank: int, port: int, victim: int, folder: str) -> None:
    """Tune with three ranks. One rank is killed in a trial."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["AUTOSPLIT_CACHE_DIR"] = folder

    def spring() -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    given = workload(compute_loss=Trap(spring, after=2))
    said = raised(lambda: tune(given, "cpu:400KiB,cpu:200KiB,cpu:100KiB", profile="off"))
    (Path(folder) / str(rank)).write_text(json.dumps(said))


@pytest.mark.parametrize("victim", [slow(0), 2])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, victim: int) -> None:
    context = starting()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = store.port, victim, str(tmp_path)
    processes = [context.Process(target=die_while_tuning, args=(rank, *arguments)) for rank in range(3)]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    for rank in {0, 1, 2} - {victim}:
        kind, said, code = json.loads((tmp_path / str(rank)).read_text())
        assert (kind, code) == (RankFailedError.__name__, 1)
        assert said.startswith(f"rank {rank} stops, because another rank ended without an error message ("), said


# ------------------------------------------------------------------------------------------------- the command line

FILE = """
import os
import torch
import autosplit

def loss(model, batch):
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and os.environ.get("SPRING") == os.environ["RANK"]:
        {spring}
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def workload():
    print("built")
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return autosplit.Workload(model, (torch.randn(8, 16), torch.randn(8, 1)), compute_loss=loss)
"""
OPTIONS = ["--strategy", "ddp", "--devices", DEVICES, "--effective-batch-size", "64", "--n-trials", "1"]


def run_cli(folder: Path, *arguments: str, spring: str = "pass", **environment: str) -> Any:
    (folder / "work.py").write_text(FILE.format(spring=spring))
    command = [sys.executable, "-m", *arguments]
    everything = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_starts_the_ranks_itself(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "autosplit", "tune", "work.py", *OPTIONS, "--json", "--output", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout, source="stdout")  # alone there, and once
    assert plan.ddp.measured
    assert len(plan.ddp.seats) == 2
    assert Plan.load(tmp_path / "plan.json") == plan
    assert len(saved_profiles()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spring", "code", "said"),
    [
        ("raise ValueError('mine')", 5, "error: rank 1 failed: the workload raised ValueError: mine; fix it"),
        ("os.kill(os.getpid(), 9)", 1, "error: rank 1 "),  # printed by torchrun or rank 0, whichever notices first
        for_release("os._exit(0)", 1, "error: rank "),
    ],
)
def test_what_happens_to_a_rank_is_said_once_with_its_exit_code(
    tmp_path: Path, spring: str, code: int, said: str
) -> None:
    done = run_cli(tmp_path, "autosplit", "tune", "work.py", *OPTIONS, spring=spring, SPRING="1")
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.py", *OPTIONS], 2, "nowhere.py does not exist"),
        (["work.py", *OPTIONS[:2], "--devices", "cpu:400KiB,cpu:1KiB"], 3, "rank 1 failed: "),
    ],
)
def test_errors_of_all_are_said_once(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done = run_cli(tmp_path, "autosplit", "tune", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert said in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent was killed")
def test_nothing_is_left_where_the_command_is_killed(tmp_path: Path) -> None:
    """Its ranks kept running, and a blocked rank stayed forever."""
    spring = "[open(f'{os.getpid()}.rank', 'w').close(), __import__('time').sleep(600)]"
    (tmp_path / "work.py").write_text(FILE.format(spring=spring))
    environment = {**os.environ, "SPRING": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "autosplit", "tune", "work.py", *OPTIONS]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as started:
        until = time.monotonic() + 300
        while not (found := list(tmp_path.glob("*.rank"))):
            assert time.monotonic() < until
            time.sleep(0.2)
        started.kill()
    while Path(f"/proc/{found[0].stem}").exists():
        assert time.monotonic() < until, "the rank is still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_is_the_commands_own_exit_code_and_one_line(tmp_path: Path) -> None:
    spring = "[open('reached', 'w').close(), __import__('time').sleep(0.5)]"
    (tmp_path / "work.py").write_text(FILE.format(spring=spring))
    environment = {**os.environ, "SPRING": "0", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "autosplit", "tune", "work.py", *OPTIONS[:-1], "24"]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **streams) as started:
        until = time.monotonic() + 300
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < until
            time.sleep(0.2)
        os.killpg(started.pid, signal.SIGINT)
        _, said = started.communicate(timeout=200)
    assert started.returncode == 4, said
    assert len([line for line in said.splitlines() if line.startswith("error: The search was interrupted")]) == 1, said
    assert "Traceback" not in said
    assert "death signal" not in said
    assert not list(tmp_path.glob("torchelastic*"))


@pytest.mark.slow
def test_torchrun_by_hand(tmp_path: Path) -> None:
    started = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "autosplit", "tune", "work.py"]
    done = run_cli(tmp_path, *started, *OPTIONS[2:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nmore ") == 1, "one rank prints"
    ((path, _),) = saved_profiles()
    shown = run_cli(tmp_path, "autosplit", "show", str(path), "--code")
    assert f"python -m autosplit launch --plan {path.stem[:12]} train.py" in shown.stdout
    refused = run_cli(tmp_path, *started, *OPTIONS[2:], "--strategy", "balanced")
    assert refused.returncode != 0
    assert "BalancedDataParallel (--strategy balanced) uses one process" in refused.stderr


# ---------------------------------------------------------------------------------------------------------- pieces


def test_a_ranks_time_counts_the_all_reduce_whoever_has_samples() -> None:
    curves = TimeCurve(((1, 1.0), (11, 11.0))), TimeCurve(((1, 2.0), (11, 22.0)))
    time_s = RankStepTime(curves, (0.0, 3.0), (0.0, 0.0), 0.5, adds_up=False)
    assert time_s.seconds([(4, 2)]) == pytest.approx(3 + 4 + 0.5)
    assert time_s.seconds([(4, 2), (2, 3)]) == pytest.approx(3 + 4 + 6 + 0.5)
    # The rank without samples runs one sample that does not count.
    assert time_s.seconds([(1, 0)]) == pytest.approx(3 + 2 + 0.5)
    assert StepTime(curves, (0.0, 3.0), (0.0, 0.0), 0.5, adds_up=False).seconds([(1, 0)]) == pytest.approx(1.5)


@pytest.mark.parametrize("slower", [1.0, 1.6, 30.0])
@pytest.mark.parametrize("effective", [None, (64, 64), (3, 3)])
@pytest.mark.parametrize("least", [1, 2])
def test_a_slow_rank_takes_part_with_the_least_that_it_can(slower: float, effective: Any, least: int) -> None:
    """With a flat time curve, the fastest split gave the slow rank no samples. DDP rejected it and the search died."""
    curves = tuple(TimeCurve(((1, factor * 1e-3), (64, factor * 1.5e-3))) for factor in (1.0, slower))
    region = Region(MemoryFit(0, 0), 2**20, 64, (64,), 64, least)
    solver = Solver(Space(region, effective, 4), RankStepTime(curves, (0.0, 0.0), (0.0, 0.0), 0.0, adds_up=False))
    answers = solver.ranked()
    if effective == (3, 3) and least == 2:
        assert not answers
        return
    assert answers
    assert solver.first_trials()
    for configuration in answers:
        assert all(min(split) >= least for split in solver.splits_of(configuration)[:1])
    share = solver.split_of(answers[0])[1]
    assert share == least if slower == 30.0 else share >= least
    failed = Trial(0, 1, 2, 1, (1, 1), failure="no")
    assert Proposer(solver)([failed]).configuration is not None


def test_a_search_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = (TimeCurve(((1, 1e-3), (64, 1.5e-3))),) * 2
    region = Region(MemoryFit(0, 0), 2**20, 64, (64,), 64)
    solver = Solver(Space(region, None), RankStepTime(curves, (0.0, 0.0), (0.0, 0.0), 0.0, adds_up=False))
    proposer = Proposer(solver)
    trials = [
        Trial(number, c.gpu0_bsz, c.batch_size, 1, solver.split_of(c), 10.0) for number, c in enumerate(proposer.first)
    ]
    monkeypatch.setattr(Solver, "ranked", lambda _self: [])
    proposer(trials)


def test_it_is_refitted_to_steps_that_all_ranks_ran() -> None:
    curves = TimeCurve(((1, 1.0), (11, 11.0))), TimeCurve(((1, 2.0), (11, 22.0)))
    guess = RankStepTime(curves, (0.0, 1.0), (0.0, 0.0), 0.5, adds_up=False)
    truth = replace(guess, copies_s=(0.0, 4.0), contention=1.5)
    measured = [([split], truth.seconds([split])) for split in ((4, 2), (8, 1), (2, 6), (10, 5))]
    fitted = guess.refitted(measured)
    assert isinstance(fitted, RankStepTime)
    for splits, seconds in measured:
        assert fitted.seconds(splits) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("locals_", "expected"),
    [([0, 1, 2, 3], None), ([0, 1, 0, 1], [2, 2]), ([0, 0, 1, 2], [1, 3]), ([None, None], None)],
)
def test_machines_are_told_apart_by_their_first_ranks(locals_: list[int | None], expected: list[int] | None) -> None:
    machine = machine_of(parse_devices("cpu:1MiB"))
    whole = jobs._machine_of_all([machine] * len(locals_), locals_)
    assert whole.get("ranks_per_machine") == expected
    assert whole["devices"] == [{**machine["devices"][0], "count": len(locals_)}]


@pytest.mark.parametrize(
    ("place", "spec", "index"),
    [
        (Place(1, 2, 1, 2), "cpu:1MiB,cpu:2MiB", 1),
        (Place(3, 4, 1, 2), "cpu:1MiB,cpu:2MiB", 1),
        (Place(1, 2, 0, 1), "cpu", 0),
        (Place(1, 2), "cpu:1MiB,cpu:2MiB", 1),
    ],
)
def test_each_rank_has_its_machines_device(place: Place, spec: str, index: int) -> None:
    assert jobs._own_index(parse_devices(spec), place) == index


class TestOwnPart:
    """A context takes up to a GiB. Eight ranks that examined eight GPUs left seven foreign contexts on each."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        fake = FakeCuda(cards("A100", "A100", "A100", "A100"))
        stand_in(
            monkeypatch,
            accelerators=lambda kind=None: Found(fake, kind or "cuda"),
            nvml=lambda: (None, "it is not here"),
        )
        return fake

    @pytest.mark.parametrize(
        ("place", "spec", "own"),
        [
            (Place(1, 4, 1, 4), None, ["cuda:1"]),
            (Place(5, 8, 1, 4), "cuda", ["cuda:1"]),
            (Place(1, 2, 1, 2), "cuda:3,2", ["cuda:2"]),
            (Place(1, 2, 1, 2), "cuda:3", ["cuda:3"]),  # each process was given one GPU
            (Place(1, 2, 1, 2), "cuda:0,1,2", ["cuda:0", "cuda:1", "cuda:2"]),  # all ranks must get this
            (Place(0, 1), "cuda:0,1", ["cuda:0", "cuda:1"]),
            (Place(1, 2, 1, 2), "cpu:1MiB,cpu:2MiB", ["cpu:0", "cpu:1"]),
        ],
    )
    def test_is_a_card(self, place: Place, spec: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jobs, "place_here", lambda: place)
        assert [device.label for device in request_for(spec, "ddp").devices] == own

    def test_the_others_are_asked_for_nothing(self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        for index in (0, 1, 3):
            fake.cards[index].fails["mem_get_info"] = AssertionError(f"a context on cuda:{index}")
        monkeypatch.setattr(jobs, "place_here", lambda: Place(2, 4, 2, 4))
        request = request_for("cuda", "ddp")
        assert [device.label for device in request.devices] == ["cuda:2"]

    def test_whoever_starts_ranks_or_looks_for_their_plan_asks_none(self, fake: FakeCuda) -> None:
        for card in fake.cards:
            card.fails["mem_get_info"] = AssertionError("a context")
        asked = checked_arguments("", {}, {"strategy": "ddp", "devices": "cuda"})
        assert (asked.num_processes, asked.isolate) == (4, True)
        assert [*usable_here()] == []


def test_two_signals_of_one_keypress_are_one() -> None:
    interrupts = Interrupts()
    with interrupts.noted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun passes it on
        assert interrupts.came
        interrupts._at_s -= 5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class TestUsableHere:
    """A plan of several machines is usable on each of them."""

    @staticmethod
    def kept(plan: Plan) -> int:
        profiles.store(ProfileKey(plan.machine, {}, {}).digest, plan)
        return len([*usable_here()])

    def test_the_second_machines_part_is_enough(self) -> None:
        here = machine_of(parse_devices("cpu:1MiB"))
        gpus = {"kind": "cuda", "name": "a GPU that is elsewhere", "memory_gib": 24, "count": 2}
        both = {**here, "devices": [gpus, *here["devices"]], "ranks_per_machine": [2, 1]}
        assert self.kept(make_plan((4, 4, 4), machine=both)) == 1

    @pytest.mark.parametrize("counts", [None, [3], [2, 0], ["2", 1], 7, []])
    def test_without_it_or_with_nonsense_none_is(self, counts: Any) -> None:
        here = machine_of(parse_devices("cpu:1MiB"))
        gpus = {"kind": "cuda", "name": "a GPU that is elsewhere", "memory_gib": 24, "count": 2}
        machine = {**here, "devices": [gpus, *here["devices"]]}
        machine |= {} if counts is None else {"ranks_per_machine": counts}
        assert self.kept(make_plan((4, 4, 4), machine=machine)) == 0


def test_options_of_a_plan_reach_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ddp.setup(make_plan((4,), options=DdpOptions(find_unused_parameters=True))) as ctx:
        assert ctx.wrap(Net()).find_unused_parameters
        assert not ctx.wrap(Net(), find_unused_parameters=False).find_unused_parameters


def test_who_only_waited_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that timed out may have lower numbers. The error must name the failed rank."""
    peers = Peers(2, 3, None, Interrupts())
    monkeypatch.setattr(peers, "part", lambda: None)
    waited = Failure(0, "RuntimeError: gloo timed out", 1, waited=True)
    cause = Failure(1, "the workload raised ValueError: x", 5)
    told: Any = [type("T", (), {"failure": failure})() for failure in (waited, cause, None)]
    with pytest.raises(RankFailedError, match=r"rank 1 failed: the workload raised ValueError: x") as caught:
        peers._raise_first(told, None)
    assert caught.value.exit_code == 5
