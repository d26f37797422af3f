"""If a rank fails, every other rank ends soon and names the rank and the cause. Real processes, one job per test."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import loader_of, make_model, make_plan, mean_loss
from events import until
from marks import slow
from ranks import free_port, starting
from torch import distributed as dist

import autosplit
from autosplit import ddp
from autosplit.ddp import failure as faults
from autosplit.ddp.failure_channel import Address, Line, Word
from autosplit.errors import RankFailedError

SOON_S = 20
"""Seconds from the failure to the end or the report of every other rank, if nothing else uses the CPU."""

LIMIT_S = 250
"""Seconds after which a job that still runs is killed. Without autosplit, ranks wait for half an hour."""

LONG_S = 300
"""No other rank waits this long."""

SIZES = {2: (2, 6), 3: (2, 3, 3)}

# ---------------------------------------------------------------------------------------------------- scenarios
#
# Module-level functions, because the processes import them by name. Each gets the number of the failing rank.


def failing() -> None:
    """Record the time of the failure. The others' time limit starts then."""
    Path(os.environ["FAULT_FOLDER"], "failed").write_text(str(time.time()))


def raised(error: BaseException) -> None:
    failing()
    raise error


def killed() -> None:
    failing()
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    """Stop until the parent lets this rank continue, after the others have reported."""
    if not Path(os.environ["FAULT_FOLDER"], "failed").exists():
        failing()
        os.kill(os.getpid(), signal.SIGSTOP)
        until(
            lambda: "sends again" in told_in(Path(os.environ["FAULT_FOLDER"]))
        )  # a rank that ends cannot report that it is "back"


def told_in(folder: Path) -> str:
    """Return what all ranks of a job have printed so far."""
    return "".join(text.read_text(errors="replace") for text in folder.glob("[0-9].txt"))


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


def in_a_step(victim: int, fail: Callable[[], None]) -> None:
    with ddp.setup(plan_here()) as ctx:
        train(ctx, fail if ctx.rank == victim else None)


def in_a_step_of_a_foreign_loader(victim: int, fail: Callable[[], None]) -> None:
    with ddp.setup(plan_here()) as ctx:
        train(ctx, fail if ctx.rank == victim else None, loader=[torch.tensor([0, 1])] * 12)


def before_a_checkpoint(victim: int, fail: Callable[[], None]) -> None:
    with ddp.setup(plan_here()) as ctx:
        model = ctx.wrap(make_model())
        if ctx.rank == victim:
            fail()
        ctx.save_checkpoint(Path(os.environ["FAULT_FOLDER"], "last.pt"), model=model)
        ctx.load_checkpoint(Path(os.environ["FAULT_FOLDER"], "last.pt"), model=model)


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


def loads_on_rank_0_only(victim: int, fail: Callable[[], None]) -> None:
    impatient()
    with ddp.setup(plan_here()) as ctx:
        if ctx.rank == victim:
            ctx.load_checkpoint("last.pt", model=make_model())
        failing()
        time.sleep(LONG_S)


def impatient() -> None:
    """Report waiting after 2 or 3 s. Some messages still contain 15 s."""
    faults.TOLD_AFTER_S, faults._SILENT_S, faults._SIGN_EVERY_S = 2.0, 3.0, 0.5


def in_a_step_beside_the_impatient(victim: int, fail: Callable[[], None]) -> None:
    impatient()
    in_a_step(victim, fail)


def before_setup(victim: int, fail: Callable[[], None]) -> None:
    impatient()
    if int(os.environ["RANK"]) == victim:
        fail()
    in_a_step(-1, fail)


def and_lives_on(victim: int, fail: Callable[[], None]) -> None:
    """Fail while references to the process group exist, in a process that ends slowly."""
    kept = []
    try:
        with ddp.setup(plan_here()) as ctx:
            kept += [dist.group.WORLD, torch.nn.parallel.DistributedDataParallel(make_model())]
            train(ctx, fail if ctx.rank == victim else None)
    except ValueError:
        time.sleep(LONG_S)


def while_others_are_in_no_collective(victim: int, fail: Callable[[], None]) -> None:
    faults.GRACE_S = 1.0
    with ddp.setup(plan_here()) as ctx:
        if ctx.rank == victim:
            fail()
        time.sleep(LONG_S)


def while_others_do_not_give_up(victim: int, fail: Callable[[], None]) -> None:
    faults.GRACE_S = 1.0
    with ddp.setup(plan_here()) as ctx:
        while True:
            try:
                train(ctx, fail if ctx.rank == victim else None)
            except RuntimeError:
                time.sleep(0.1)


def with_workers(victim: int, fail: Callable[[], None]) -> None:
    """Fail while a forked process, such as a loader's worker, has copies of all connections."""
    with ddp.setup(plan_here()) as ctx:
        if os.fork() == 0:
            time.sleep(LONG_S)
            os._exit(0)
        train(ctx, fail if ctx.rank == victim else None)


def in_a_group_of_the_users(victim: int, fail: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    in_a_step(victim, fail)


def leaves_before_the_others(victim: int, fail: Callable[[], None]) -> None:
    with ddp.setup(plan_here()) as ctx:
        train(ctx, None)
        if ctx.rank == victim:
            fail()
        until(Path(os.environ["FAULT_FOLDER"], "failed").exists)
        time.sleep(1.5)


def native_threads() -> list[str]:
    """Return the system's names of all threads of this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while this reads its name
            names.append((task / "comm").read_text().strip())
    return names


ERRORS: dict[str, Callable[[], None]] = {
    "raises": lambda: raised(ValueError("the reason\nand more of it")),
    "runs out of memory": lambda: raised(autosplit.OutOfMemoryError("cuda:1 ran out of memory")),
    "is interrupted": lambda: raised(KeyboardInterrupt()),
    "exits": lambda: raised(SystemExit(3)),
    "ends well": lambda: raised(SystemExit(0)),
    "is killed": killed,
    "is stopped": stopped,
}

SAYS = {
    "raises": "failed: ValueError: the reason (",
    "runs out of memory": "failed: OutOfMemoryError: cuda:1 ran out of memory (",
    "is interrupted": "was interrupted (Ctrl-C).",
    "exits": "failed: SystemExit: 3 (",
    "is killed": "is gone: it ended without an error message (perhaps killed, or its machine ran out of memory).",
}


@dataclass(frozen=True)
class Ended:
    """Return how a rank ended, or None if it did not."""

    code: int | None
    after_s: float
    said: str


def run_rank(scenario: Callable[..., None], victim: int, how: str, place: dict[str, str]) -> None:
    """Run as one rank of a job."""
    os.setpgid(0, 0)  # so that the job can kill the rank's workers, too
    os.environ.update(place)
    said = os.open(Path(place["FAULT_FOLDER"], f"{place['RANK']}.txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    scenario(victim, ERRORS[how])


def job(
    folder: Path,
    scenario: Callable[..., None],
    world_size: int,
    victim: int,
    how: str,
    *,
    until_said: str | None = None,
    goes_on: bool = False,
) -> list[Ended]:
    """Start a job's ranks, wait for all except the failing rank, and return how each ended.

    Args:
        folder: Output folder of the ranks.
        scenario: The function that each rank runs.
        world_size: Number of ranks.
        victim: The failing rank.
        how: One of `ERRORS`.
        until_said: Stop waiting when a rank has printed this.
        goes_on: Then let the victim continue, and wait for all ranks.
    """
    context = starting()
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"FAULT_FOLDER": str(folder)}
    ranks = [
        context.Process(target=run_rank, args=(scenario, victim, how, place | {"RANK": str(rank)}))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    until = time.time() + LIMIT_S
    ended_at: dict[int, float] = {}
    while len(ended_at) < world_size and time.time() < until:
        ended_at |= {
            rank: time.time() for rank, process in enumerate(ranks) if rank not in ended_at and not process.is_alive()
        }
        if set(range(world_size)) - {victim} <= set(ended_at) and scenario is and_lives_on:
            break
        if until_said is not None and until_said in told_in(folder):
            if not goes_on:
                break
            os.kill(ranks[victim].pid, signal.SIGCONT)
            until_said = None
        time.sleep(0.02)
    found = []
    note = folder / "failed"
    failed_at = float(note.read_text()) if note.exists() else 0.0
    for rank, process in enumerate(ranks):
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        said = (folder / f"{rank}.txt").read_text(errors="replace")
        found.append(Ended(code, ended_at.get(rank, float("inf")) - failed_at, said))
    return found


def assert_others_ended(found: list[Ended], victim: int, how: str) -> None:
    for rank, ended in enumerate(found):
        if rank == victim:
            continue
        expected = f"rank {victim} {SAYS[how]}"
        assert ended.after_s < LIMIT_S, ended
        assert ended.code == 1, ended.said
        assert expected in ended.said, ended.said
        assert f"This rank {rank} stops" in ended.said, ended.said


class TestRaising:
    @pytest.mark.parametrize(("world_size", "victim"), [slow(2, 0), (2, 1), slow(3, 0), slow(3, 2)])
    @pytest.mark.parametrize("scenario", [in_a_step, slow(before_a_checkpoint), slow(in_a_step_of_a_foreign_loader)])
    def test_ends_every_other_rank(self, tmp_path: Path, scenario: Any, world_size: int, victim: int) -> None:
        found = job(tmp_path, scenario, world_size, victim, "raises")
        assert_others_ended(found, victim, "raises")
        for rank, ended in enumerate(found):
            assert ended.code == 1
            last = ended.said.strip().splitlines()[-1]
            assert last.startswith("autosplit.errors.RankFailedError: " if rank != victim else "and more of it"), last
            if rank != victim:  # the place in the user's code
                assert f"the reason ({Path(__file__)}" in ended.said.replace(".pyc", ".py")
                assert "in raised: raise error)" in ended.said

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["runs out of memory", "is interrupted", "exits"])
    def test_whatever_it_is(self, tmp_path: Path, how: str) -> None:
        found = job(tmp_path, in_a_step, 2, 1, how)
        assert_others_ended(found, 1, how)
        assert found[1].code == (3 if how == "exits" else 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 1])
    def test_and_living_on_with_the_group_in_its_hands(self, tmp_path: Path, victim: int) -> None:
        """gloo's connections stay open then. The others would wait for half an hour."""
        found = job(tmp_path, and_lives_on, 3, victim, "raises")
        assert found[victim].code is None, found[victim].said
        assert_others_ended(found, victim, "raises")

    @pytest.mark.slow
    def test_in_a_group_that_was_there(self, tmp_path: Path) -> None:
        assert_others_ended(job(tmp_path, in_a_group_of_the_users, 2, 1, "raises"), 1, "raises")

    @pytest.mark.parametrize("scenario", [while_others_are_in_no_collective, slow(while_others_do_not_give_up)])
    @pytest.mark.parametrize("how", ["raises", slow("is killed")])
    def test_ends_processes_that_do_not_leave(self, tmp_path: Path, scenario: Any, how: str) -> None:
        found = job(tmp_path, scenario, 3, 1, how)
        assert_others_ended(found, 1, how)
        for rank in (0, 2):
            assert f"Rank {rank} did not leave autosplit.ddp.setup within 1 s, so its process" in found[rank].said


class TestKilled:
    @pytest.mark.parametrize(("world_size", "victim"), [slow(2, 0), slow(2, 1), (3, 0), slow(3, 1), slow(3, 2)])
    def test_ends_every_other_rank(self, tmp_path: Path, world_size: int, victim: int) -> None:
        """Rank 0 has the store and the centre of the connections."""
        found = job(tmp_path, in_a_step, world_size, victim, "is killed")
        assert found[victim].code == -signal.SIGKILL
        assert_others_ended(found, victim, "is killed")

    @pytest.mark.slow
    @pytest.mark.parametrize("scenario", [before_a_checkpoint, in_a_step_of_a_foreign_loader])
    def test_wherever_the_others_wait(self, tmp_path: Path, scenario: Any) -> None:
        assert_others_ended(job(tmp_path, scenario, 2, 1, "is killed"), 1, "is killed")

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 1])
    def test_leaving_workers_behind(self, tmp_path: Path, victim: int) -> None:
        found = job(tmp_path, with_workers, 2, victim, "is killed")
        assert_others_ended(found, victim, "is killed")


class TestWaiting:
    """The awaited rank is named. It may still come."""

    def test_is_told_of_within_20_seconds(self) -> None:
        assert max(faults.GRACE_S, faults.TOLD_AFTER_S, faults._SILENT_S + faults._SIGN_EVERY_S) < SOON_S

    @pytest.mark.parametrize("victim", [slow(0), 1])
    def test_for_a_rank_that_is_stopped(self, tmp_path: Path, victim: int) -> None:
        """They printed nothing for half an hour."""
        told = f"rank {victim} has sent nothing for 3 s. Its process can't run, or it is stopped"
        found = job(tmp_path, in_a_step_beside_the_impatient, 2, victim, "is stopped", until_said=told, goes_on=True)
        assert told in found[1 - victim].said
        assert [ended.code for ended in found] == [0, 0], found
        assert f"rank {victim} sends again" in found[1 - victim].said

    @pytest.mark.parametrize("victim", [slow(0), 1])
    def test_for_a_rank_that_fails_before_setup(self, tmp_path: Path, victim: int) -> None:
        """Without torchrun, no launcher ends the others."""
        told = f"Rank {1 - victim} of 2 has waited 15 s in autosplit.ddp.setup, but some ranks are missing"
        found = job(tmp_path, before_setup, 2, victim, "raises", until_said=told)
        assert told in found[1 - victim].said

    @pytest.mark.slow
    def test_for_the_others_in_what_all_have_to_call(self, tmp_path: Path) -> None:
        told = "Rank 0 has waited 15 s for the other ranks in load_checkpoint. Expected every rank to call it"
        assert told in job(tmp_path, loads_on_rank_0_only, 2, 0, "raises", until_said=told)[0].said


class TestLeaving:
    @pytest.mark.parametrize("victim", [slow(0), 1])
    def test_in_mid_job_is_named(self, tmp_path: Path, victim: int) -> None:
        """A rank that called sys.exit(0) did not count as failed, and gloo's error blamed the waiting ranks."""
        found = job(tmp_path, in_a_step, 3, victim, "ends well")
        assert found[victim].code == 0
        for rank in {0, 1, 2} - {victim}:
            said = f"RankFailedError: rank {victim} left autosplit.ddp.setup (SystemExit, exit code 0)"
            assert said in found[rank].said, found[rank].said
            assert found[rank].after_s < LIMIT_S


class TestNoFailure:
    @pytest.mark.parametrize("victim", [slow(0), 1])
    def test_nothing_is_reported_and_no_thread_is_left(self, tmp_path: Path, victim: int) -> None:
        """gloo's threads stayed while the model was alive, and sometimes crashed the process at its end."""
        found = job(tmp_path, nothing_fails, 2, victim, "raises")
        assert [(ended.code, "rank" in ended.said) for ended in found] == [(0, False)] * 2, found

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_leaving_before_the_others(self, tmp_path: Path, victim: int) -> None:
        """Rank 0 has the store and the centre of the connections."""
        found = job(tmp_path, leaves_before_the_others, 3, victim, "ends well")
        assert [(ended.code, "rank" in ended.said) for ended in found] == [(0, False)] * 3
        assert min(found[rank].after_s for rank in range(3) if rank != victim) > 1


SCRIPT = """
import os, signal, sys
from test_ddp_faults import in_a_step, raised
victim, how = int(sys.argv[1]), sys.argv[2]
in_a_step(victim, (lambda: raised(ValueError("the reason"))) if how == "raises" else lambda: os.kill(os.getpid(), 9))
"""


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")


@pytest.mark.slow
class TestUnderTorchrun:
    @pytest.mark.parametrize("victim", [0, 2])
    @pytest.mark.parametrize("how", ["raises", "is killed"])
    def test_the_others_have_the_last_word(self, tmp_path: Path, victim: int, how: str) -> None:
        """torchrun sends SIGTERM to all ranks after a rank has ended."""
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        paths = os.pathsep.join(sys.path)
        done = subprocess.run(
            [*TORCHRUN, script, str(victim), how],
            env={**os.environ, "PYTHONPATH": paths, "FAULT_FOLDER": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode != 0
        heard = [rank for rank in range(3) if f"This rank {rank} stops" in done.stderr]
        assert heard == [rank for rank in range(3) if rank != victim], done.stderr
        assert f"rank {victim} {SAYS[how]}" in done.stderr


# ------------------------------------------------------------------------------------------------------------- the line


@pytest.fixture
def hub() -> Iterator[tuple[Line, Address]]:
    """Return rank 0's end of the connection, and its address."""
    line = Line(0)
    address = line.listen()
    yield line, address
    line.close()


@contextlib.contextmanager
def telling_of(line: Line) -> Iterator[list[Word]]:
    """Collect the messages that a thread receives in this block."""
    heard: list[Word] = []

    def listen() -> None:
        while Word("over", line.rank) not in heard:
            heard.extend(line.words(LONG_S))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield heard
    finally:
        line.say(Word("over", line.rank))
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def stranger_at(address: Address) -> socket.socket:
    return socket.create_connection(("127.0.0.1", address.port), timeout=LIMIT_S)


class TestLine:
    def test_strangers_are_not_heard(self, hub: Any) -> None:
        line, address = hub
        with telling_of(line) as heard, closing(Line(1)) as other:
            for said in (b"x" * 5000, b"GET / HTTP\r\n\r\n" * 10, secrets.token_hex(16).encode() + bytes(4)):
                with closing(stranger_at(address)) as stranger:
                    stranger.sendall(said)
                    with contextlib.suppress(ConnectionResetError):  # with something unread
                        assert stranger.recv(100) == b"", "the other end is closed without an answer"
            other.join(address)
            until(lambda: bool(heard))
            assert heard == [Word("joined", 1)]

    @pytest.mark.parametrize(
        "said",
        [
            b"[" * 10000 + b"\n",
            b'{"kind": "failed", "rank": 1, "cause": null}\n',
            b'{"kind": "failed"}\n',
            b"\n",
        ],
        ids=["nested", "no cause", "half a word", "nothing"],
    )
    def test_a_rank_that_says_no_word_is_lost(self, hub: Any, said: bytes) -> None:
        line, address = hub
        with telling_of(line) as heard, closing(Line(1)) as garbled, closing(Line(2)) as other:
            garbled.join(address)
            garbled._peers[0].socket.sendall(said)
            until(lambda: len(heard) == 2)
            other.join(address)
            until(lambda: len(heard) == 3)
        assert [(word.kind, word.rank) for word in heard[:3]] == [("joined", 1), ("lost", 1), ("joined", 2)]
        assert heard[1].cause.startswith("it sent a message that is not autosplit's")

    def test_strangers_that_say_nothing_have_their_time(self, hub: Any) -> None:
        line, address = hub
        with telling_of(line) as heard, closing(stranger_at(address)) as stranger, closing(Line(1)) as other:
            other.join(address)
            assert stranger.recv(100) == b""
            until(lambda: list(line._peers) == [1])  # a rank has no such time
            until(lambda: bool(heard))
            assert heard == [Word("joined", 1)]

    @pytest.mark.parametrize(
        "answer",
        [b"another", b"", b"x" * 5000],
        ids=["another token", "nothing", "endless"],
    )
    def test_another_program_on_the_port_is_not_rank_0(self, answer: bytes) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            done = threading.Event()

            def serve() -> None:
                made, _ = server.accept()
                with closing(made):
                    made.recv(1000)
                    made.sendall(answer)
                    if len(answer) > 100:
                        done.wait(LIMIT_S)

            thread = threading.Thread(target=serve)
            thread.start()
            with closing(Line(1)) as line, pytest.raises(OSError, match=r"127\.0\.0\.1: another program listens there"):
                line.join(Address(("127.0.0.1",), server.getsockname()[1], "a token"))
            done.set()
            thread.join()

    def test_who_joins_late_hears_of_the_failure(self, hub: Any) -> None:
        line, address = hub
        watch = faults.Watch(0, 3)
        watch._sockets = {}
        watch._line = line
        watch._left = True  # it prints nothing itself
        watch._listen()
        line.say(Word("failed", 1, "early"))
        with closing(Line(2)) as late:
            late.join(address)
            heard = late.words(LONG_S)
        watch.end()
        assert heard == [Word("failed", 1, "early")]  # twice if it was sent while rank 2 joined
        assert not watch._thread.is_alive()


def join_in_vain(victim: int, fail: Callable[[], None]) -> None:
    """Train on a network where ranks cannot reach rank 0 outside of the process group."""
    Line.join = _unreachable  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told, ddp.setup(plan_here()) as ctx:
        warnings.simplefilter("always")
        train(ctx, None)
    assert [str(warning.message)[:27] for warning in told] == ["rank 1 is not connected (no"] * ctx.rank


def _unreachable(line: Line, address: Address) -> None:
    raise OSError("no way")


def test_a_job_without_the_line_trains(tmp_path: Path) -> None:
    found = job(tmp_path, join_in_vain, 2, 1, "raises")
    assert [ended.code for ended in found] == [0, 0], found


class TestWatch:
    def test_alone_there_is_nothing_to_watch(self) -> None:
        with ddp.setup(make_plan((4,))):
            assert not any(thread.name == "autosplit-watch" for thread in threading.enumerate())

    @pytest.mark.slow
    def test_errors_that_all_ranks_raise_together_stay_what_they_are(self) -> None:
        watch = faults.Watch(1, 2)
        watch._failed = Word("failed", 0, "ValueError: the reason")
        with pytest.raises(autosplit.OutOfMemoryError), watch.telling():
            raise autosplit.OutOfMemoryError("this one, too")
        with pytest.raises(KeyboardInterrupt), watch.telling():
            raise KeyboardInterrupt
        expected = "rank 0 failed: ValueError: the reason. This rank 1 stops"
        with pytest.raises(RankFailedError, match=expected) as told, watch.telling():
            raise LookupError("what the end of the other led to")
        assert isinstance(told.value.__cause__, LookupError)
        assert (told.value.rank, told.value.cause) == (0, "ValueError: the reason")

    def test_a_loop_that_swallowed_it_is_no_success(self) -> None:
        watch = faults.Watch(1, 2)
        watch._failed = Word("lost", 0, "it ended")
        with pytest.raises(RankFailedError, match=r"rank 0 is gone: it ended. This rank 1 stops"), watch.telling():
            pass
