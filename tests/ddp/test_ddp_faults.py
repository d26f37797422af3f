"""If a rank fails, every rank ends, and torchrun's report or the ranks' errors have the cause. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import NUM_SAMPLES, loader_of, make_model, make_plan, mean_loss
from events import until
from marks import for_release, slow
from ranks import free_port, starting
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.utils.data import DataLoader

import autosplit
from autosplit import ddp
from autosplit.ddp.progress import Progress
from autosplit.errors import RankFailedError

LIMIT_S = 250
"""Seconds after which a job that still runs is killed. This suits a busy machine."""

TIMEOUT_S = 20.0
"""A collective that waits so long for a stopped rank ends the job. Two ranks on a busy machine need less."""

SIZES = {2: (2, 6), 3: (2, 3, 3)}

# ---------------------------------------------------------------------------------------------------- scenarios
#
# Module-level functions, because the processes import them by name. Each gets the number of the failing rank.


def raised(error: BaseException) -> None:
    raise error


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class BrokenData(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples, one of which cannot be read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        if index >= NUM_SAMPLES // 2:
            raise ValueError("the reason")
        return index


ERRORS: dict[str, Callable[[], None]] = {
    "raises": lambda: raised(ValueError("the reason\nand more of it")),
    "runs out of memory": lambda: raised(autosplit.OutOfMemoryError("cuda:1 ran out of memory")),
    "exits": lambda: raised(SystemExit(3)),
    "ends well": lambda: raised(SystemExit(0)),
    "is killed": killed,
    "is stopped": stopped,
}


def plan_here() -> autosplit.Plan:
    return make_plan(SIZES[int(os.environ["WORLD_SIZE"])], 24)


def train(ctx: ddp.Context, fail: Callable[[], None] | None, loader: Any = None) -> None:
    """Train for several epochs, and fail in the middle of a step of the second."""
    model = ctx.wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = loader_of(ctx) if loader is None else loader
    for epoch in range(5):
        for step in ctx.steps(loader):
            for number, indices in enumerate(step):
                if fail is not None and epoch == 1 and number == 1:
                    fail()
                step.backward(mean_loss(model, indices))
            optimizer.step()
            optimizer.zero_grad()


def in_a_step(victim: int, fail: Callable[[], None], timeout_s: float = 600.0) -> None:
    with ddp.setup(plan_here(), timeout_s=timeout_s) as ctx:
        train(ctx, fail if ctx.rank == victim else None)


def in_a_loader(victim: int, fail: Callable[[], None]) -> None:
    """Load in a worker process. It is another process that is left behind if its rank is killed."""
    with ddp.setup(plan_here()) as ctx:
        data: Any = BrokenData() if ctx.rank == victim else range(NUM_SAMPLES)
        sampler = ctx.batch_sampler(NUM_SAMPLES)
        train(ctx, None, DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="forkserver"))


def before_a_checkpoint(victim: int, fail: Callable[[], None]) -> None:
    with ddp.setup(plan_here()) as ctx:
        model = ctx.wrap(make_model())
        if ctx.rank == victim:
            fail()
        ctx.save_checkpoint(Path(os.environ["FAULT_FOLDER"], "last.pt"), model=model)
        ctx.load_checkpoint(Path(os.environ["FAULT_FOLDER"], "last.pt"), model=model)


def in_a_group_of_the_users(victim: int, fail: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    in_a_step(victim, fail)


def nothing_fails(victim: int, fail: Callable[[], None]) -> None:
    """Catch an exception, save on rank 0 while the other rank trains, and leave with a reference to the model."""
    path = Path(os.environ["FAULT_FOLDER"], "last.pt")
    with ddp.setup(plan_here()) as ctx:
        with contextlib.suppress(ValueError):
            if ctx.rank == victim:
                fail()
        train(ctx, None)
        model = ctx.wrap(make_model())
        if ctx.rank == 0:
            ctx.save_checkpoint(path, model=model)
        train(ctx, None)
        ctx.load_checkpoint(path, model=model)
        within = native_threads()
    until(lambda: len(native_threads()) == 1)  # a joined thread stays in /proc for a moment
    assert model.process_group is None
    assert any("gloo" in name for name in within)
    assert threading.enumerate() == [threading.main_thread()]


def leaves_before_the_others(victim: int, fail: Callable[[], None]) -> None:
    left = Path(os.environ["FAULT_FOLDER"], "left")
    with ddp.setup(plan_here()) as ctx:
        train(ctx, None)
        if ctx.rank != victim:
            until(left.exists)
            time.sleep(1.5)
    left.touch()


def before_setup(victim: int, fail: Callable[[], None]) -> None:
    if int(os.environ["RANK"]) == victim:
        fail()
    in_a_step(-1, fail)


def native_threads() -> list[str]:
    """Return the system's names of all threads of this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while this reads its name
            names.append((task / "comm").read_text().strip())
    return names


# ------------------------------------------------------------------------------------------------- under torchrun

SCRIPT = """
import sys
import test_ddp_faults as faults
if __name__ == "__main__":  # the workers of a loader import this file
    scenario, victim, how, *options = sys.argv[1:]
    getattr(faults, scenario)(int(victim), faults.ERRORS[how], *map(float, options))
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")


def report_of(folder: Path, *words: Any) -> str:
    """Run a job of three ranks. Return the output of a job that failed, when none of its processes runs any more."""
    (folder / "train.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [*TORCHRUN, folder / "train.py", *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, "FAULT_FOLDER": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    until(lambda: [*processes_of(folder)] == [])
    return done.stderr


def processes_of(folder: Path) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"FAULT_FOLDER={folder}\0".encode() in (process / "environ").read_bytes():
                yield process.name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the test looks for processes in /proc")
class TestUnderTorchrun:
    @pytest.mark.parametrize(
        ("victim", "how", "cause"),
        [
            (0, "raises", "ValueError: the reason"),
            (2, "is killed", "(SIGKILL)"),
            (0, "exits", "exitcode  : 3"),
            for_release(2, "raises", "ValueError: the reason"),
            for_release(0, "is killed", "(SIGKILL)"),
            for_release(2, "exits", "exitcode  : 3"),
        ],
    )
    def test_its_report_has_the_cause(self, tmp_path: Path, victim: int, how: str, cause: str) -> None:
        root = report_of(tmp_path, "in_a_step", victim, how).split("Root Cause")[1]
        assert f"rank      : {victim}" in root
        assert cause in root

    def test_an_error_of_a_loader_is_the_cause(self, tmp_path: Path) -> None:
        root = report_of(tmp_path, "in_a_loader", 1, "raises").split("Root Cause")[1]
        assert "rank      : 1" in root
        assert "ValueError: the reason" in root

    def test_a_rank_that_exits_early_without_an_error_is_named(self, tmp_path: Path) -> None:
        """torchrun waits for the others, because the rank did not fail."""
        root = report_of(tmp_path, "in_a_step", 1, "ends well").split("Root Cause")[1]
        assert "RankFailedError: rank 1 left autosplit.ddp.setup (SystemExit, exit code 0)" in root

    def test_a_stopped_rank_ends_the_job_by_the_time_out(self, tmp_path: Path) -> None:
        root = report_of(tmp_path, "in_a_step", 1, "is stopped", TIMEOUT_S).split("Root Cause")[1]
        assert "RankFailedError: rank " in root
        assert "rank 1 was last seen " in root
        assert "and does not answer (killed, stopped or busy)" in root
        assert "timeout_s=" in root

    def test_an_error_before_the_ranks_joined_is_the_cause(self, tmp_path: Path) -> None:
        root = report_of(tmp_path, "before_setup", 2, "exits").split("Root Cause")[1]
        assert "rank      : 2" in root


def test_a_recorded_error_is_what_torchrun_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(SystemExit), ddp.setup(make_plan((4,))):
        raise SystemExit(0)
    assert not path.exists()
    with pytest.raises(ValueError, match="the reason"), ddp.setup(make_plan((4,))):
        raise ValueError("the reason")
    message: Any = ProcessFailure(0, 1, 1, str(path)).message
    assert message["message"] == "ValueError: the reason"
    assert f'File "{__file__}"' in message["extraInfo"]["py_callstack"]
    with pytest.raises(autosplit.AutosplitError), ddp.setup(make_plan((4, 4))):
        pass
    assert "The plan has 2 ranks" in json.loads(path.read_text())["message"]["message"]


# ---------------------------------------------------------------------------------------------- without a launcher


@dataclass(frozen=True)
class Ended:
    """How a rank ended. The code is None if it did not."""

    code: int | None
    said: str


def run_rank(scenario: Callable[..., None], victim: int, how: str, place: dict[str, str]) -> None:
    """Run as one rank of a job."""
    os.environ.update(place)
    said = os.open(Path(place["FAULT_FOLDER"], f"{place['RANK']}.txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    scenario(victim, ERRORS[how])


def job(
    folder: Path, scenario: Callable[..., None], world_size: int, victim: int, how: str, *, keeps_store: bool = False
) -> list[Ended]:
    """Run a job without a launcher that ends its ranks. Return how each rank ended.

    Args:
        folder: Output folder of the ranks.
        scenario: The function that each rank runs.
        world_size: Number of ranks.
        victim: The failing rank.
        how: One of `ERRORS`.
        keeps_store: This process has the store, as torchrun has. Otherwise rank 0 has it, and may end before another
            rank has read why the job failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if keeps_store else None
    port = free_port() if store is None else store.port
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"FAULT_FOLDER": str(folder), "TORCHELASTIC_USE_AGENT_STORE": str(keeps_store)}
    ranks = [
        starting().Process(target=run_rank, args=(scenario, victim, how, place | {"RANK": str(rank)}))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    end_s = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < end_s:
        time.sleep(0.02)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    texts = [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(world_size)]
    return [Ended(code, text) for code, text in zip(codes, texts, strict=True)]


def assert_others_said(found: list[Ended], victim: int, expected: str) -> None:
    for rank, ended in enumerate(found):
        if rank != victim:
            assert ended.code == 1, ended.said
            assert f"autosplit.errors.RankFailedError: {expected}" in ended.said, ended.said


class TestWithoutALauncher:
    """The others' collectives break, and their errors have the cause. Rank 0 has the store, unless the job keeps it."""

    @pytest.mark.parametrize("scenario", [in_a_step, slow(before_a_checkpoint), slow(in_a_group_of_the_users)])
    def test_a_rank_that_raises(self, tmp_path: Path, scenario: Any) -> None:
        found = job(tmp_path, scenario, 2, 1, "raises")
        assert_others_said(found, 1, f"rank 1 failed: ValueError: the reason ({Path(__file__)}")
        assert "in raised: raise error). This rank 0 stops" in found[0].said
        assert found[1].code == 1
        assert found[1].said.strip().endswith("and more of it")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("how", "code", "said"),
        [("runs out of memory", 1, "OutOfMemoryError: cuda:1 ran out of memory ("), ("exits", 3, "SystemExit: 3 (")],
    )
    def test_whatever_it_is(self, tmp_path: Path, how: str, code: int, said: str) -> None:
        found = job(tmp_path, in_a_step, 3, 1, how, keeps_store=True)
        assert_others_said(found, 1, f"rank 1 failed: {said}")
        assert found[1].code == code

    @pytest.mark.slow
    def test_a_rank_that_is_killed(self, tmp_path: Path) -> None:
        found = job(tmp_path, in_a_step, 2, 1, "is killed")
        assert found[1].code == -signal.SIGKILL
        assert "RankFailedError: rank 0 waited " in found[0].said
        assert "but rank 1 was last seen " in found[0].said
        assert "and does not answer (killed, stopped or busy)" in found[0].said

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["raises", "is killed"])
    def test_the_rank_with_the_store(self, tmp_path: Path, how: str) -> None:
        """Its message may be lost, but the others end."""
        found = job(tmp_path, in_a_step, 3, 0, how)
        for ended in found[1:]:
            assert ended.code == 1
            assert "RankFailedError: rank " in ended.said

    def test_a_rank_that_leaves_early(self, tmp_path: Path) -> None:
        """A rank that called sys.exit(0) did not count as failed, and gloo's error blamed the waiting ranks."""
        found = job(tmp_path, in_a_step, 3, 1, "ends well", keeps_store=True)
        assert found[1].code == 0
        assert_others_said(found, 1, "rank 1 left autosplit.ddp.setup (SystemExit, exit code 0)")


class TestNoFailure:
    @pytest.mark.parametrize("victim", [slow(0), 1])
    def test_nothing_is_reported_and_no_thread_is_left(self, tmp_path: Path, victim: int) -> None:
        """gloo's threads stayed while the model was alive, and sometimes crashed the process at its end."""
        found = job(tmp_path, nothing_fails, 2, victim, "raises")
        assert [(ended.code, "rank" in ended.said) for ended in found] == [(0, False)] * 2, found

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_leaving_before_the_others(self, tmp_path: Path, victim: int) -> None:
        """Rank 0 has the store."""
        found = job(tmp_path, leaves_before_the_others, 3, victim, "ends well")
        assert [(ended.code, "rank" in ended.said) for ended in found] == [(0, False)] * 3, found


class TestPlaces:
    def test_a_rank_that_waits_long_prints_all_places(self, capfd: pytest.CaptureFixture[str]) -> None:
        """NCCL ends a process at the time-out without an exception."""
        store = dist.HashStore()  # type: ignore[attr-defined]
        store.set("place/0", "at the start of loop 2")
        store.set("end/2", "failed ValueError: the reason")
        printed: list[str] = []
        progress = Progress(1, 3, timeout_s=1.0)
        with progress.published(store):
            progress.begin_loop()
            until(lambda: printed.append(capfd.readouterr().err) or "ends the job" in "".join(printed))
        assert "autosplit: rank 1 has been at the start of loop 1 for " in "".join(printed)
        assert "last seen at the start of loop 2, rank 2 failed: ValueError: the reason)" in "".join(printed)
        assert not any(thread.name == "autosplit-progress" for thread in threading.enumerate())

    def test_only_a_broken_collective_has_another_cause(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        store.set("end/0", "failed ValueError: the reason")
        for error in (autosplit.OutOfMemoryError("this one, too"), KeyboardInterrupt(), LookupError("mine")):
            with pytest.raises(type(error)), Progress(1, 2, 600.0).published(store):
                raise error
        expected = "rank 0 failed: ValueError: the reason. This rank 1 stops"
        with pytest.raises(RankFailedError, match=expected) as told, Progress(1, 2, 600.0).published(store):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
        assert isinstance(told.value.__cause__, RuntimeError)
        assert (told.value.rank, told.value.cause) == (0, "ValueError: the reason")
