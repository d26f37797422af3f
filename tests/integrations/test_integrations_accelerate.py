"""accelerate with a plan trains the weights of one process. Without a plan, nothing changes."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from raised import raises

pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`), for its models")

import accelerate
import shared_training as shared
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from faults import Faults, runs_out
from gpus import KIND
from handmade import changed_layout
from ranks import found_by, run_ranks, run_ranks_once
from shared_training import CLIP, COLLATE, COUNT, EVALUATES_BY, HELD_OUT, JOBS, PRELOAD, STEPS, STOPS_AT, TEXTS
from torch.utils.data import DataLoader

from autosplit.ddp.rendezvous import Place
from autosplit.errors import InputError, PlanError
from autosplit.integrations.accelerate import (
    Accelerator,
    CutWarning,
    NoPlanWarning,
    UnevenLossWarning,
    set_arguments,
)
from autosplit.integrations.process_share import share_of
from autosplit.parallel.awaited_update import StepsWarning
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.plan.layout import DdpOptions
from autosplit.probe.check_result import Check

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def make_accelerator(cls: Any = Accelerator, **options: Any) -> Any:
    """Make an Accelerator as in a new process. Its state is global, and another test's settings would stay."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return cls(**{"cpu": True, **options})


def prepared(kind: str, accelerator: Any, *, workers: int = 0) -> tuple[Any, ...]:
    model = shared.make_model(kind).to(accelerator.device)  # in some versions, kinds of devices have parameters
    loader = DataLoader(TEXTS, batch_size=4, shuffle=True, collate_fn=COLLATE[kind], num_workers=workers)
    held_out = DataLoader(TEXTS[:HELD_OUT], batch_size=EVALUATES_BY, collate_fn=COLLATE[kind])
    if getattr(accelerator, "share", None) is not None:
        loader = accelerator.shares_of(loader, seed=shared.SEED)
    return accelerator.prepare(model, *shared.optimizer_for(model), loader, held_out)


def mean_loss(accelerator: Any, model: Any, loader: Any) -> float:
    """Evaluate on samples from a separate loader, as accelerate's examples do."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = shared.loss_on(model, batch)
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
    model.train()
    return float(torch.cat(losses).mean())


def loop(accelerator: Any, parts: tuple[Any, ...], *, begin: tuple[int, int] = (0, 0), folder: Any = None) -> Any:
    """Train to the last step like an accelerate script, without stopping, and record the samples."""
    model, optimizer, schedule, loader, held_out = parts
    (epoch, skipped), found = begin, {"seen": [], "lrs": {}, "evaluated": []}
    step = epoch * -(-shared.NUM_SAMPLES // accelerator.share.effective_batch_size) + found_steps(loader, skipped)
    while step < STEPS:
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for number, batch in enumerate(batches, skipped + 1):
            found["seen"].append((shared.samples_in(batch), bool(loader.weight)))
            with accelerator.accumulate(model):
                accelerator.backward(shared.loss_on(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    found["lrs"][step + 1] = schedule.get_last_lr()[0]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 10 == 0:
                found["evaluated"].append(mean_loss(accelerator, model, held_out))
            if step == STOPS_AT and folder is not None:
                accelerator.save_state(str(folder))
                found["position"] = (epoch, number)
            if step == STEPS:
                break
        epoch, skipped = epoch + 1, 0
    found["scheduler_steps"] = schedule.scheduler.last_epoch
    found["weights"] = shared.weights_of(accelerator.unwrap_model(model))
    return found


def found_steps(loader: Any, batches: int) -> int:
    """Count the optimizer steps that so many micro-batches of an epoch make."""
    steps = 0
    for step in loader.sampler_of_shares.schedule:
        batches -= len(step.micro_batch_sizes)
        if batches < 0:
            return steps
        steps += 1
    return steps


def trained(
    kind: str,
    sizes: tuple[int, ...],
    effective: int,
    *,
    resumes: bool = False,
    workers: int = 0,
    cls: Any = Accelerator,
    plan_of: Any = shared.shares_plan,
) -> dict[str, Any]:
    """Train for `STEPS` steps. If `resumes`, load the state of step `STOPS_AT` and train to the end again."""
    shared.clean_workers()
    plan = plan_of(sizes, effective)
    options = {"plan": plan, "count": COUNT[kind], "cls": cls, "cpu": plan.devices[0].kind == "cpu"}
    folder = shared.folder_of_job(f"{kind} {sizes} {effective}") if resumes else None
    accelerator = make_accelerator(**options)
    found = loop(accelerator, prepared(kind, accelerator), folder=folder)
    if resumes:
        again = make_accelerator(**options)
        parts = prepared(kind, again, workers=workers)
        again.load_state(str(folder))
        found["resumed"] = loop(again, parts, begin=found["position"])
    return found


def cut(job: tuple[str, tuple[int, ...], int], faults: Faults, *, in_one: bool = False) -> dict[str, Any]:
    """Train for `STEPS` steps. Rank 0 runs out of memory in some of them."""
    kind, sizes, effective = job
    plan = shared.shares_plan(sizes, effective, in_one=in_one)
    accelerator = make_accelerator(plan=plan, count=COUNT[kind], on_oom="cut")
    parts = prepared(kind, accelerator)
    if accelerator.is_main_process:
        runs_out(accelerator.unwrap_model(parts[0]), faults)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CutWarning)
        found = loop(accelerator, parts)
    found["warned"] = [str(one.message) for one in caught if one.category is CutWarning]
    return found


def cut_and_gathered() -> list[str]:
    """Gather in mid-step, where processes may run different numbers of parts."""
    plan = shared.shares_plan((7, 1), 40)
    accelerator = make_accelerator(plan=plan, on_oom="cut")
    model, *_, loader, _ = prepared("bert", accelerator)
    said = []
    batch = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(shared.loss_on(model, batch))
        for gather in (accelerator.gather, accelerator.gather_for_metrics):
            with pytest.raises(InputError) as caught:
                gather(batch["labels"])
            said.append(str(caught.value))
    return said


def unlike_plans() -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(PlanError, match="differs from rank 0's"):
        make_accelerator(plan=shared.shares_plan((2, 2), 8 if rank else 16))


def skipped_by_the_free_function() -> None:
    """accelerate's loader draws the right samples without weights. It raises an error if weights are needed."""
    accelerator = make_accelerator(plan=shared.shares_plan((7, 1), 20))
    model, _, _, loader, _ = prepared("bert", accelerator)
    for batch in accelerate.skip_first_batches(loader, 3):
        loss = shared.loss_on(model, batch)
        with pytest.raises(InputError, match=r"Call accelerator\.skip_first_batches"):
            accelerator.backward(loss)


def with_batchnorms() -> None:
    """They would count the extra sample that the second process runs at the epoch's end. It has no share there."""
    accelerator = make_accelerator(plan=shared.shares_plan((7, 1), 20))
    model, _, _, loader, _ = prepared("bert", accelerator)
    model.module.norm = torch.nn.BatchNorm1d(2)
    for batch in loader:
        with pytest.raises(InputError, match="the model's BatchNorms would count"):
            accelerator.backward(shared.loss_on(model, batch))
        break


def alone_in_each() -> None:
    """Objects made before the Accelerator fix the number of processes, so each process trained a separate model."""
    shared.forget_accelerate()
    accelerate.PartialState()
    with pytest.raises(PlanError, match="accelerate runs 1 process, but the plan is for 2 processes"):
        Accelerator(plan=shared.shares_plan((7, 1), 20))
    shared.forget_accelerate()


class Loop:
    """A script's loop in its common variants. BERT, with the plan's steps of 20 samples."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer, self.schedule, self.loader, self.held_out = prepared("bert", accelerator)
        self.done = 0

    def run(self, batch: Any, *, divided_by: int = 1, clips: bool = True) -> None:
        self.accelerator.backward(shared.loss_on(self.model, batch) / divided_by)
        if clips:
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += self.accelerator.sync_gradients

    def error(self) -> float:
        """Compare with the same number of steps in one process."""
        expected = shared.by_hand("bert", 20)["weights"][self.done - 1]
        return float((shared.weights_of(self.accelerator.unwrap_model(self.model)) - expected).abs().max())

    # The variants. An epoch has 8 micro-batches in 3 optimizer steps.

    def accumulates(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.run(batch)
                self.step()

    def clears_first(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.optimizer.zero_grad()
                self.run(batch)
                self.step()

    def clears_first_only(self) -> None:
        """Each step also had the gradients of all earlier steps."""
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.optimizer.zero_grad()
                self.run(batch)
                self.optimizer.step()
                self.schedule.step()
                self.done += self.accelerator.sync_gradients

    def steps_always(self) -> None:
        for batch in self.loader:
            self.run(batch)
            self.step()

    def has_two_losses(self) -> None:
        for batch in self.loader:
            for part in (0.25, 0.75):
                self.accelerator.backward(part * shared.loss_on(self.model, batch))
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.step()

    def draws_a_step(self, *, ahead_of: str = "accumulate") -> None:
        batches, every = iter(self.loader), self.accelerator.gradient_accumulation_steps
        for begin in range(0, len(self.loader), every):
            drawn = [next(batches) for _ in range(min(every, len(self.loader) - begin))]
            for number, batch in enumerate(drawn, 1):
                if ahead_of == "accumulate":
                    with self.accelerator.accumulate(self.model):
                        self.run(batch)
                        self.step()
                elif number < len(drawn):
                    with self.accelerator.no_sync(self.model):
                        self.run(batch, clips=False)
                else:
                    self.run(batch)
                    self.step()

    def draws_a_step_and_keeps_it_from_meeting(self) -> None:
        self.draws_a_step(ahead_of="no_sync")

    def chunks(self) -> None:
        """The loader ends before the last step's first backward."""
        batches = iter(self.loader)
        while drawn := [*itertools.islice(batches, self.accelerator.gradient_accumulation_steps)]:
            for batch in drawn:
                with self.accelerator.accumulate(self.model):
                    self.run(batch)
                    self.step()

    def steps_seldom(self, every: int = 3, divided_by: int = 1, begin: int = 1) -> None:
        for number, batch in enumerate(self.loader, begin):
            self.run(batch, divided_by=divided_by, clips=False)
            if number % every == 0 or number == len(self.loader):
                self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.step()


WAYS = ("accumulates", "clears_first", "clears_first_only", "steps_always", "has_two_losses", "draws_a_step", "chunks")
HAND_MADE = ("draws_a_step_and_keeps_it_from_meeting", "steps_seldom")


def two_epochs(way: str, sizes: tuple[int, ...] = (8,), **options: Any) -> tuple[int, float]:
    """Train with one variant. Return the optimizer steps, and the difference from a handwritten training."""
    loop = Loop(make_accelerator(plan=shared.shares_plan(sizes, 20), **options))
    for epoch in range(2):
        loop.loader.set_epoch(epoch)
        getattr(loop, way)()
    return loop.done, loop.error()


def every_way() -> dict[str, tuple[int, float]]:
    hand_made = {way: two_epochs(way, (7, 1), gradient_accumulation_steps=5) for way in HAND_MADE}
    return {**{way: two_epochs(way, (7, 1)) for way in WAYS}, **hand_made}


def gathered() -> dict[str, list[Any]]:
    """Gather results of each process's samples in an epoch with shares of 7, 3 or 2 and 1 or 0."""
    accelerator = make_accelerator(plan=shared.shares_plan((7, 1), 12))
    loader = Loop(accelerator).loader
    found: dict[str, list[Any]] = {"metrics": [], "means": [], "objects": [], "all": []}
    for batch in loader:
        outputs = {"ids": batch["input_ids"][:, 0] - shared.FIRST, "labels": batch["labels"]}
        found["metrics"].append(accelerator.gather_for_metrics(outputs)["ids"].tolist())
        found["means"].append(len(accelerator.gather_for_metrics(outputs["ids"].double().mean())))
        found["objects"].append(accelerator.gather_for_metrics(shared.samples_in(batch), use_gather_object=True))
        found["all"].append(accelerator.gather(outputs["ids"]).tolist())
    return found


def gathered_of_unlike_lengths() -> None:
    accelerator = make_accelerator(plan=shared.shares_plan((7, 1), 12))
    own = torch.zeros(accelerator.process_index + 1, accelerator.process_index + 2)
    with pytest.raises(
        InputError,
        match=r"gather tensors of the sizes \[\[\[1, 2\]\], \[\[2, 3\]\]\]. Expected .*pad_across_processes",
    ):
        accelerator.gather({"logits": own})
    assert accelerator.gather(accelerator.pad_across_processes(own, dim=1)).shape == (3, 3)


CUT = {
    "cut, bert": (("bert", (7, 1), 40), Faults(every=10)),
    "cut, too large": (("gpt", (7, 1), 20), Faults(above=3)),
}
TWO = {
    **{name: partial(trained, *job, resumes="3 forwards" in name) for name, job in JOBS[2].items()},
    "with workers": partial(trained, "bert", (7, 1), 20, resumes=True, workers=1),
    **{name: partial(cut, *given) for name, given in CUT.items()},
    "cut and gathered": cut_and_gathered,
    "unlike plans": unlike_plans,
    "free function": skipped_by_the_free_function,
    "batchnorms": with_batchnorms,
    "alone": alone_in_each,
    "every way": every_way,
    "gathered": gathered,
    "unlike lengths": gathered_of_unlike_lengths,
}
THREE = {name: partial(trained, *job, resumes="5 forwards" in name) for name, job in JOBS[3].items()}
RESUMED = {name: job for name, job in JOBS[2].items() if "3 forwards" in name} | {"with workers": ("bert", (7, 1), 20)}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks_once(tmp_path_factory, __name__, "TWO", 2, limit_s=280, preload=PRELOAD)


@pytest.mark.slow
class TestTwoRanks:
    @pytest.mark.parametrize("name", [*JOBS[2], "with workers"])
    def test_twenty_steps_are_those_of_one_process(self, two, name):
        shared.check_trained(found_by(two, name), {**JOBS[2], **RESUMED}[name])

    @pytest.mark.parametrize("name", RESUMED)
    def test_a_state_from_the_middle_of_an_epoch_goes_on(self, two, name):
        _, split, effective = RESUMED[name]
        per_epoch = sum(-(-n // sum(split)) for n in shared.step_sizes(effective))
        shared.check_resumed(found_by(two, name), RESUMED[name])
        for found in found_by(two, name):
            assert [*found["resumed"]["lrs"]] == [*range(STOPS_AT + 1, STEPS + 1)]
            epoch, number = found["position"]
            assert 0 < number < per_epoch, "in the middle of an epoch"
            assert found["resumed"]["seen"] == found["seen"][epoch * per_epoch + number :]

    def test_evaluation_is_that_of_one_process(self, two):
        for name, (kind, _, effective) in JOBS[2].items():
            for found in found_by(two, name):
                check_evaluated(found["evaluated"], kind, effective)

    @pytest.mark.parametrize("name", ["unlike plans", "free function", "alone", "unlike lengths", "batchnorms"])
    def test_what_would_train_something_else_is_refused(self, two, name):
        found_by(two, name)

    def test_every_way_to_write_a_loop(self, two):
        for found in found_by(two, "every way"):
            assert {way: steps for way, (steps, _) in found.items()} == dict.fromkeys((*WAYS, *HAND_MADE), 6)
            assert max(error for _, error in found.values()) < 1e-12, found

    @pytest.mark.parametrize("name", CUT)
    def test_what_runs_out_of_memory_is_handed_out_in_parts(self, two, name):
        (kind, _, effective), _ = CUT[name]
        expected = shared.by_hand(kind, effective)
        for rank, found in enumerate(found_by(two, name)):
            assert float((found["weights"] - expected["weights"][-1]).abs().max()) < 1e-9
            assert found["scheduler_steps"] == STEPS
            assert len(found["warned"]) == (rank == 0)

    def test_what_comes_in_parts_is_not_gathered(self, two):
        for said in found_by(two, "cut and gathered"):
            assert ["the processes gather inside an optimizer step" in one for one in said] == [True, True]

    def test_every_sample_is_gathered_once_and_in_order(self, two):
        """Tensors with different first sizes ended the process in gloo."""
        order = [shared.epoch_order(0)[begin : begin + 12] for begin in range(0, 50, 12)]
        expected = [part for step in order for part in (step[:8], step[8:]) if part]
        for found in found_by(two, "gathered"):
            assert found["metrics"] == found["objects"] == expected
            assert found["means"] == [1 if size in {4, 2} else 2 for size in map(len, expected)]
            assert [len(part) for part in found["all"]] == [8, 5, 8, 5, 8, 5, 8, 5, 3], "one of no share is run, too"


@pytest.mark.slow
def test_three_ranks(tmp_path):
    found = run_ranks(__name__, "THREE", 3, tmp_path, limit_s=280, preload=PRELOAD)
    for name, job in JOBS[3].items():
        shared.check_trained(found_by(found, name), job)
    shared.check_resumed(found_by(found, "gpt, 5 forwards a step"), JOBS[3]["gpt, 5 forwards a step"])


def check_evaluated(got: list[float], kind: str, effective: int) -> None:
    """Compare with the mean over samples of the mean loss of each sample's batch."""
    for step, loss in zip((10, 20), got, strict=True):
        assert loss == pytest.approx(shared.evaluated_by_hand(kind, effective, step), rel=1e-9)


@pytest.fixture
def _alone():
    shared.forget_accelerate()
    yield
    shared.forget_accelerate()


@pytest.mark.usefixtures("_alone")
class TestOneProcess:
    def test_without_a_plan_it_is_accelerates_own(self):
        def weights(accelerator: Any) -> torch.Tensor:
            torch.manual_seed(0)
            model, optimizer, schedule, loader, _ = prepared("gpt", accelerator)
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(shared.loss_on(model, batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            return shared.weights_of(model)

        with pytest.warns(NoPlanWarning, match="so all devices get equal batches") as caught:
            ours = weights(make_accelerator(gradient_accumulation_steps=2))
        assert len(caught) == 1
        assert torch.equal(ours, weights(make_accelerator(accelerate.Accelerator, gradient_accumulation_steps=2)))

    @pytest.mark.parametrize(("kind", "plan"), [("gpt", ((8,), 40)), ("bert", ((5, 3), 20))])
    def test_a_plan_for_one_process_trains_what_one_batch_would(self, kind, plan, monkeypatch):
        monkeypatch.setattr("test_integrations_accelerate.STEPS", 6)
        sizes, effective = plan
        share_plan = shared.shares_plan(sizes, effective, in_one=len(sizes) > 1)
        accelerator = make_accelerator(plan=share_plan, count=COUNT[kind])
        parts = prepared(kind, accelerator)
        assert isinstance(parts[0], BalancedDataParallel) == (len(sizes) > 1)
        assert accelerator.gradient_accumulation_steps == -(-effective // sum(sizes))
        found = loop(accelerator, parts)
        assert float((found["weights"] - shared.by_hand(kind, effective)["weights"][5]).abs().max()) < 1e-9
        shared.check_epochs([found["seen"]], (sum(sizes),), effective)

    @pytest.mark.parametrize(("sizes", "faults"), [((8,), Faults(every=7)), ((5, 3), Faults(above=2))])
    def test_what_runs_out_of_memory_is_handed_out_in_parts(self, sizes, faults, monkeypatch):
        monkeypatch.setattr("test_integrations_accelerate.STEPS", 6)
        found = cut(("bert", sizes, 40), faults, in_one=len(sizes) > 1)
        assert faults.runs > 24  # micro-batches
        assert len(found["warned"]) == 1
        assert float((found["weights"] - shared.by_hand("bert", 40)["weights"][5]).abs().max()) < 1e-9

    def test_loaders_in_order_are_accelerates_own(self):
        """Evaluation loaders are split as usual, and a shuffled training loader needs only prepare()."""
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 40))
        shuffled = accelerator.prepare(DataLoader(TEXTS, batch_size=4, shuffle=True, collate_fn=COLLATE["bert"]))
        in_order = accelerator.prepare(DataLoader(TEXTS, batch_size=4, collate_fn=COLLATE["bert"]))
        assert [len(batch["labels"]) for batch in shuffled] == [8] * 5 + [8, 2]
        assert [len(batch["labels"]) for batch in in_order] == [4] * 12 + [2]


def error_after(accelerator: Any, parts: tuple[Any, ...], effective: int, steps: int, then: Any = None) -> float:
    """Train BERT like any script, with a change after each step. Return the difference from a handwritten training."""
    model, optimizer, schedule, loader, _ = parts
    done = 0
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(shared.loss_on(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            if done == steps:
                expected = shared.by_hand("bert", effective)["weights"][steps - 1]
                return float((shared.weights_of(accelerator.unwrap_model(model)) - expected).abs().max())
            if then is not None:
                then()


@pytest.mark.usefixtures("_alone")
class TestFeatures:
    """Features of accelerate that are used together with the splits."""

    def test_an_evaluation_that_is_left_before_its_end(self):
        """The evaluation loader stayed accelerate's active loader. The next losses had no weights and the last step was
        lost.
        """
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20))
        parts = prepared("bert", accelerator)
        assert error_after(accelerator, parts, 20, 7, lambda: next(iter(parts[4]))) < 1e-12

    def test_the_environment_of_its_launcher(self, monkeypatch):
        """`accelerate launch` sets its own number of steps there, which replaced the plan's."""
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20))
        assert accelerator.gradient_accumulation_steps == 3
        assert error_after(accelerator, prepared("bert", accelerator), 20, 4) < 1e-12

    @pytest.mark.parametrize("effective", [8, 20])
    def test_a_plugin_for_accumulation(self, effective):
        """The plugin's number replaced the plan's if the plan's was 1, and otherwise raised accelerate's error."""
        plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
        accelerator = make_accelerator(
            plan=shared.shares_plan((8,), effective), gradient_accumulation_plugin=plugin, gradient_accumulation_steps=9
        )
        assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"]
        assert error_after(accelerator, prepared("bert", accelerator), effective, 4) < 1e-12

    def test_the_epoch_may_be_chosen_after_what_is_skipped(self):
        """Only the other order worked. In this order the epoch restarted without a message."""
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20))
        loader = accelerator.shares_of(DataLoader(TEXTS, shuffle=True, collate_fn=COLLATE["bert"]), seed=shared.SEED)
        loader.set_epoch(2)
        whole = [shared.samples_in(batch) for batch in loader]
        loader.set_epoch(0)
        skipped = accelerator.skip_first_batches(loader, 3)
        skipped.set_epoch(2)
        assert [shared.samples_in(batch) for batch in skipped] == whole[3:]
        skipped.set_epoch(2)
        assert [shared.samples_in(batch) for batch in skipped] == whole, "skipped once"

    def test_metrics_are_gathered_of_every_sample(self):
        """The last micro-batch has 5 samples, and was cut to `41 % 8`."""
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 12))
        loader = accelerator.prepare(DataLoader(TEXTS[:41], shuffle=True, collate_fn=COLLATE["bert"]))
        assert sum(len(accelerator.gather_for_metrics(batch["labels"])) for batch in loader) == 41

    @pytest.mark.parametrize("plan", [shared.shares_plan((8,), 20), shared.shares_plan((5, 3), 20, in_one=True)])
    def test_mixed_precision(self, plan):
        """On several devices of one process the model ran in full precision."""
        accelerator = make_accelerator(plan=replace(plan, precision="bf16"), mixed_precision="bf16")
        model, seen = accelerator.prepare(shared.make_model("bert").float()), []
        accelerator.unwrap_model(model).classifier.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        assert model(**COLLATE["bert"](TEXTS[:8])).logits.dtype == torch.float32
        assert {*seen} == {torch.bfloat16}

    def test_distributed_data_parallel_is_given_what_the_plan_was_measured_with(self):
        """A model with unused parameters was tuned, and then DDP raised an error."""
        plan = changed_layout(shared.shares_plan((7, 1), 20), options=DdpOptions(find_unused_parameters=True))
        share = share_of(plan, Place(0, 2))
        given: dict[str, Any] = {}
        set_arguments(share, given)
        (handler,) = given["kwargs_handlers"]
        assert (handler.find_unused_parameters, handler.gradient_as_bucket_view) == (True, True)
        own = DistributedDataParallelKwargs(bucket_cap_mb=5)
        given = {"kwargs_handlers": [own]}
        set_arguments(share, given)
        assert given["kwargs_handlers"] == [own]


@pytest.mark.usefixtures("_alone")
class TestLoops:
    """A loop without accumulate() ran 16 steps instead of 6, with the weight of the last drawn batch."""

    @pytest.mark.parametrize(("every", "begin"), [(3, 1), (3, 0), (4, 1)])
    def test_a_loss_that_is_divided_by_hand_is_refused(self, every, begin):
        """The loss was divided twice, so weights were 21% off. Steps that begin with the first batch are a mixture."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        before = shared.weights_of(loop.model)
        with raises(InputError):
            loop.steps_seldom(every, divided_by=every, begin=begin)
        assert torch.equal(shared.weights_of(loop.model), before)

    @pytest.mark.parametrize(
        ("every", "effective"),
        [
            (2, 20),
            (2, 8),
        ],
    )
    def test_a_number_of_ones_own_is_refused(self, every, effective):
        plan = shared.shares_plan((8,), effective)
        loop = Loop(make_accelerator(plan=plan, gradient_accumulation_steps=every))
        before = shared.weights_of(loop.model)
        with raises(InputError):
            loop.steps_seldom(every)
        assert torch.equal(shared.weights_of(loop.model), before)

    @pytest.mark.parametrize("within", [True, False])
    def test_a_backward_past_accelerate_is_refused(self, within):
        """It got no weight."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        with raises(InputError):
            for batch in loop.loader:
                with loop.accelerator.accumulate(loop.model) if within else contextlib.nullcontext():
                    shared.loss_on(loop.model, batch).backward()
                    loop.step()

    @pytest.mark.parametrize("skipped", [1, 2, 3])
    def test_batches_that_are_skipped_are_refused(self, skipped):
        """They would count as batches drawn ahead, and the first batch that runs would get their weight."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        before = shared.weights_of(loop.model)
        with pytest.raises(InputError, match=r"drawn.*accelerator\.skip_first_batches"):  # noqa: PT012
            for number, batch in enumerate(loop.loader):
                if number >= skipped:
                    loop.run(batch)
                    loop.step()
        assert torch.equal(shared.weights_of(loop.model), before)

    def test_a_step_that_is_left_in_its_middle_is_dropped(self):
        """Its gradients were added to those of the next."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        for _, batch in zip(range(2), loop.loader, strict=False):
            loop.run(batch)
            loop.step()
        loop.loader.set_epoch(0)
        loop.steps_always()
        assert (loop.done, loop.error() < 1e-12) == (3, True)

    @pytest.mark.parametrize("how", ["model", "None", "zero"])
    def test_gradients_that_are_cleared_past_the_optimizer_are_refused(self, how):
        """`model.zero_grad()` at the start of each batch left the gradient of the last micro-batch alone."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        with pytest.raises(InputError, match="before micro-batch 2 of 3"):  # noqa: PT012
            for batch in loop.loader:
                with loop.accelerator.accumulate(loop.model):
                    if how == "None":
                        for one in loop.model.parameters():
                            one.grad = None
                    else:
                        loop.model.zero_grad(set_to_none=how == "model")
                    loop.run(batch)
                    loop.step()

    def test_a_gan_that_clears_between_its_backwards_is_refused(self):
        """The second model had only the gradient of the step's last micro-batch."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        other = loop.accelerator.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1))
        with pytest.raises(InputError, match="between two backwards"):  # noqa: PT012
            for batch in loop.loader:
                with loop.accelerator.accumulate(loop.model):
                    loop.run(batch)
                    loop.step()
                    other.zero_grad()
                    loop.run(batch)
                    other.step()

    def test_optimizers_that_take_turns_may_clear_both(self):
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        other = loop.accelerator.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1))
        for batch in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.run(batch)
                loop.step()
                other.zero_grad()
        assert loop.done == 3

    @pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
    def test_a_scheduler_that_was_not_prepared_is_warned_of(self):
        """It stepped once per micro-batch, so the learning rate fell three times as fast."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer.optimizer, 0.5)

        def train():
            for batch in loop.loader:
                with loop.accelerator.accumulate(loop.model):
                    loop.run(batch)
                    loop.step()
                    schedule.step()

        with pytest.warns(StepsWarning, match=r"accelerator\.prepare") as caught:
            train()
        assert [one.category for one in caught].count(StepsWarning) == 1

    def test_a_loader_that_was_not_prepared_is_refused(self):
        """Each loss was divided by the number of micro-batches, and the step had as many whole batches."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        with pytest.raises(InputError, match="no loader of the plan"):
            loop.run(COLLATE["bert"](list(TEXTS)[:8]))

    def test_a_closure_is_refused(self):
        """accelerate calls it at the last micro-batch only."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        batch = next(iter(loop.loader))
        with loop.accelerator.accumulate(loop.model), pytest.raises(InputError, match="closure"):
            loop.optimizer.step(lambda: loop.run(batch))

    def test_an_epoch_of_one_step_may_be_a_list(self):
        """The loader had ended, so the loss could not be examined: AttributeError."""
        loop = Loop(make_accelerator(plan=shared.shares_plan((25,), 50)))
        for batch in list(loop.loader):
            loop.run(batch)
            loop.step()
        assert loop.done == 1

    def test_two_loaders_at_once(self):
        loop = Loop(make_accelerator(plan=shared.shares_plan((8,), 20)))
        other = loop.accelerator.prepare(DataLoader(TEXTS, shuffle=True, collate_fn=COLLATE["bert"]))
        with raises(InputError):
            first, second = iter(loop.loader), iter(other)
            for batches in (first, second, first):
                loop.run(next(batches))
                loop.step()
        with raises(InputError):
            for batch, _ in zip(loop.loader, other, strict=True):
                loop.run(batch)
                loop.step()


def two_steps(accelerator: Any, loss_of: Any) -> torch.Tensor:
    """Train BERT for two steps with a loss of its outputs."""
    model = shared.make_model("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shuffled = DataLoader(TEXTS, shuffle=True, collate_fn=COLLATE["bert"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, shuffled)
    steps = 0
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if steps == 2:
            return shared.weights_of(accelerator.unwrap_model(model))
    raise AssertionError("an epoch has three")


def added(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["input_ids"]).logits, batch["labels"], reduction="sum")


@pytest.mark.usefixtures("_alone")
class TestWhatTheLossIsOver:
    def test_a_sum_that_was_tuned_for_counts_whole(self):
        """It was weighted as a mean, so the training depended on the split."""
        plans = [replace(shared.shares_plan((size,), 20), loss_reduction="sum") for size in (8, 20)]
        first, second = (two_steps(make_accelerator(plan=plan), added) for plan in plans)
        assert float((first - second).abs().max()) < 1e-12

    def test_what_the_check_has_found_is_said(self):
        found = Check("loss", 0.5, 0.4, depends=True, advice="it is a sum over the samples")
        plan = replace(shared.shares_plan((8,), 20), checks=(found,))
        with pytest.warns(UnevenLossWarning) as told:
            two_steps(make_accelerator(plan=plan), added)
        (said,) = (str(one.message) for one in told)
        assert "not a mean over samples (it is a sum over the samples)" in said.lower()
        two_steps(make_accelerator(plan=plan, count=len), added)
        two_steps(make_accelerator(plan=replace(plan, loss_reduction="sum")), added)

    def test_a_loss_that_nothing_has_examined_is_doubted(self):
        plan = shared.shares_plan((8,), 20)
        with pytest.warns(UnevenLossWarning, match="the model did not compute it, and the plan has no gradient check"):
            two_steps(make_accelerator(plan=replace(plan, checks=())), added)
        checked = replace(plan, checks=(Check("gradient", 0.0, 0.0, depends=False),))
        two_steps(make_accelerator(plan=checked), added)  # a warning would be an error here

    @pytest.mark.parametrize("count", [None, shared.count_tokens])
    def test_a_loop_that_weights_its_losses_itself_is_refused(self, count):
        """accelerate's example for autoregressive models does this. Its losses were weighted twice."""
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20), count=count, gradient_accumulation_steps=3)
        model, loader = accelerator.prepare(
            shared.make_model("gpt"), DataLoader(TEXTS, shuffle=True, collate_fn=COLLATE["gpt"])
        )
        batches = iter(loader)
        drawn = [next(batches) for _ in range(3)]
        items = accelerator.gather(sum(batch["labels"].ne(-100).sum() for batch in drawn)).sum()
        with raises(InputError):
            accelerator.backward(model(**drawn[0], num_items_in_batch=items).loss * 3)

    @pytest.mark.parametrize("returned", ["labels", "samples"])
    def test_a_models_own_loss_is_asked(self, returned):
        """Without a `count=`, a mean over labels was weighted by samples."""

        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.frozen = torch.nn.Embedding(shared.TOKENS, 1), torch.nn.Dropout().eval()

            def forward(self, input_ids, attention_mask, labels):
                each = (self.layer(input_ids)[..., 0] ** 2 * labels.ne(-100)).sum(1)
                count = labels.ne(-100).sum(1)
                return {"loss": each.sum() / count.sum() if returned == "labels" else (each / count).mean()}

        accelerator, model = make_accelerator(plan=shared.shares_plan((8,), 20)), Own()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(TEXTS, shuffle=True, collate_fn=COLLATE["gpt"])
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        loss = model(**next(iter(loader)))["loss"]
        says = r'mean over labels, without .*\. Pass count=lambda batch: int\(\(batch\["labels"\] != -100\)\.sum\(\)\)'
        with pytest.raises(InputError, match=says) if returned == "labels" else contextlib.nullcontext():
            accelerator.backward(loss)
        assert (model.training, model.frozen.training) == (True, False)
        assert not model._forward_hooks


@pytest.mark.usefixtures("_alone")
class TestRefusals:
    @pytest.mark.parametrize("way", ["has_two_losses", "steps_always", "draws_a_step"])
    def test_a_loop_whose_micro_batches_can_not_come_in_parts(self, way):
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 40), on_oom="cut")
        with pytest.raises(InputError, match=r"on_oom is 'cut', and (accelerator.backward was|a batch was drawn)"):
            getattr(Loop(accelerator), way)()

    def test_a_plugin_that_joins_epochs(self):
        plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
        with raises(InputError):
            make_accelerator(plan=shared.shares_plan((8,), 20), gradient_accumulation_plugin=plugin)

    def test_to_train_on_a_loader_without_shares(self):
        """The tool's even batches trained with unweighted losses, without a message."""
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20))
        model, optimizer, schedule, _, in_order = prepared("bert", accelerator)
        with raises(InputError):
            error_after(accelerator, (model, optimizer, schedule, in_order, None), 20, 1)

    @pytest.mark.parametrize("batches", [1, 4, 7, 9])
    def test_to_skip_parts_of_an_optimizer_step(self, batches):
        accelerator = make_accelerator(plan=shared.shares_plan((8,), 20))
        loader = accelerator.shares_of(DataLoader(TEXTS, collate_fn=COLLATE["bert"]))
        with raises(InputError, str(batches)):
            accelerator.skip_first_batches(loader, batches)


@pytest.mark.gpu
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("sizes", [(8,), (5, 3)])
def test_on_accelerators_a_plan_trains_what_one_batch_would(sizes, monkeypatch):
    monkeypatch.setattr("test_integrations_accelerate.STEPS", 6)
    plan = shared.on_cards(shared.shares_plan(sizes, 20, in_one=len(sizes) > 1), monkeypatch)
    accelerator = make_accelerator(plan=plan, count=COUNT["bert"], cpu=False)
    parts = prepared("bert", accelerator)
    assert accelerator.device.type == KIND
    assert isinstance(parts[0], BalancedDataParallel) == (len(sizes) > 1)
    assert {parameter.device.type for parameter in parts[0].parameters()} == {KIND}
    found = loop(accelerator, parts)
    expected = shared.by_hand("bert", 20)["weights"][5]
    assert float((found["weights"].cpu() - expected).abs().max()) < 1e-9
