"""Lightning's Trainer with a plan trains the weights of one process. Without a plan, nothing changes."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from raised import raises

pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`), for its models")

import lightning.pytorch as pl
import shared_training as shared
import torch
from faults import Faults, runs_out
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ranks import found_by, run_ranks_once
from shared_training import CLIP, COLLATE, COUNT, EVALUATES_BY, HELD_OUT, JOBS, PRELOAD, STEPS, STOPS_AT, TEXTS
from torch.utils.data import DataLoader

from autosplit import tune
from autosplit.errors import InputError, PlanError
from autosplit.integrations.lightning import CutMixin, CutWarning, NoPlanWarning, Shares, UnevenLossWarning, workload
from autosplit.parallel.awaited_update import StepsWarning
from autosplit.plan.other_model import OtherModelWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of torch 2.13 at Lightning's use of it
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


class Module(pl.LightningModule):
    """A model, its loss, and a schedule by optimizer steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = shared.make_model(kind)

    def training_step(self, batch, batch_idx):
        return shared.loss_on(self.model, batch)

    def validation_step(self, batch, batch_idx):
        self.log("evaluated", shared.loss_on(self.model, batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self):
        optimizer, schedule = shared.optimizer_for(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(pl.LightningDataModule):
    """A user's data module."""

    def __init__(self, kind: str, workers: int = 0) -> None:
        super().__init__()
        self.kind, self.workers = kind, workers

    def train_dataloader(self):
        return DataLoader(TEXTS, batch_size=4, shuffle=True, collate_fn=COLLATE[self.kind], num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(TEXTS[:HELD_OUT], batch_size=EVALUATES_BY, collate_fn=COLLATE[self.kind])


class Watch(pl.Callback):
    """Records events, as any callback would."""

    def __init__(self) -> None:
        self.seen, self.lrs, self.evaluated = [], {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        walked = getattr(trainer.train_dataloader, "walked", None)
        self.seen.append((shared.samples_in(batch), walked is None or bool(walked[batch_idx].weight)))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.lrs[trainer.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_validation_end(self, trainer, pl_module):
        self.evaluated.append((trainer.global_step, float(trainer.callback_metrics["evaluated"])))


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    plain = {"max_steps": STEPS, "gradient_clip_val": CLIP, "accelerator": "cpu", "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    saves = any(isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(callbacks=[*callbacks], enable_checkpointing=saves, **{**plain, **quiet, **options})


def trained(
    kind: str,
    sizes: tuple[int, ...],
    effective: int,
    *,
    resumes: bool = False,
    workers: int = 0,
    plan_of: Any = shared.shares_plan,
    **place: str,
) -> dict[str, Any]:
    """Train for `STEPS` steps. If `resumes`, load the checkpoint of step `STOPS_AT` and train to the end again."""
    shared.clean_workers()
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it, because Lightning would start processes otherwise
    plan = plan_of(sizes, effective)
    folder = shared.folder_of_job(f"{kind} {sizes} {effective}")

    def fitted(*callbacks: pl.Callback, ckpt_path: Any = None, workers: int = 0) -> dict[str, Any]:
        shares, watch, module = Shares(plan, count=COUNT[kind]), Watch(), Module(kind)
        between = {"val_check_interval": 7, "check_val_every_n_epoch": None}
        options = {"devices": len(sizes), "strategy": "ddp", **between, **place}
        trainer = make_trainer(shares, watch, *callbacks, **options)
        trainer.fit(module, shares.data(Data(kind, workers), seed=shared.SEED), ckpt_path=ckpt_path)
        steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        found = {name: getattr(watch, name) for name in ("seen", "lrs", "evaluated")}
        return {**found, "scheduler_steps": steps, "weights": shared.weights_of(module)}

    saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=STOPS_AT, save_top_k=-1, filename="{step}")
    found = fitted(*[saving] * resumes)
    if resumes:
        found["resumed"] = fitted(ckpt_path=str(folder / f"step={STOPS_AT}.ckpt"), workers=workers)
    return found


class Cutting(CutMixin, Module):
    """The same module, whose training step can run in parts."""


def cut(job: tuple[str, tuple[int, ...], int], faults: Faults, steps: int = STEPS) -> dict[str, Any]:
    """Train, while the first process runs out of memory."""
    kind, sizes, effective = job
    if len(sizes) > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    shares = Shares(shared.shares_plan(sizes, effective), count=COUNT[kind], on_oom="cut")
    watch, module = Watch(), Cutting(kind)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        runs_out(module.model, faults)
    strategy = "ddp" if len(sizes) > 1 else "auto"
    trainer = make_trainer(shares, watch, devices=len(sizes), strategy=strategy, max_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CutWarning)
        trainer.fit(module, shares.data(Data(kind), seed=shared.SEED))
    warned = [str(one.message) for one in caught if one.category is CutWarning]
    return {"weights": shared.weights_of(module), "seen": watch.seen, "warned": warned, "runs": faults.runs}


def refused_in_training() -> None:
    """Lightning's own loader would give every rank the same number of samples."""
    trainer = make_trainer(Shares(shared.shares_plan((7, 1), 20)), devices=2, strategy="ddp")
    with pytest.raises(InputError, match=r"training loader is a DataLoader. Expected .* Pass shares\.loader"):
        trainer.fit(Module("bert"), Data("bert"))


def tuned_where_lightning_refuses() -> dict[str, Any]:
    """Lightning's own finder works for one device. autosplit finds each unequal rank's ceiling, and the fit uses it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    trainer = make_trainer(pl.callbacks.BatchSizeFinder(), devices=2, strategy="ddp")
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        trainer.fit(Module("bert"), Data("bert"))
    plan = tune(
        workload(Module("bert"), Data("bert")), devices=UNLIKE, strategy="ddp", effective_batch_size=22, n_trials=2
    )
    shares, watch, module = Shares(plan), Watch(), Module("bert")
    make_trainer(shares, watch, devices=2, strategy="ddp", max_steps=6).fit(
        module, shares.data(Data("bert"), seed=shared.SEED)
    )
    ranks = [(seat.samples, seat.ceiling.batch_size, plan.accumulation_steps) for seat in plan.ddp.seats]
    return {"ranks": ranks, "measured": plan.ddp.measured, "weights": shared.weights_of(module), "seen": watch.seen}


UNLIKE = "cpu:500KiB,cpu:322KiB"
"""Budgets for the small BERT, its optimizer and a few samples. The number of samples differs."""


CUT = {"bert": ((7, 1), 20), "gpt": ((6, 2), 16)}

TWO = {
    **{name: partial(trained, *job, resumes="3 forwards" in name) for name, job in JOBS[2].items()},
    "with workers": partial(trained, "bert", (7, 1), 20, resumes=True, workers=1),
    **{f"cut, {kind}": partial(cut, (kind, *job), Faults(above=4)) for kind, job in CUT.items()},
    "another loader": refused_in_training,
    "tuned": tuned_where_lightning_refuses,
}
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
    def test_a_checkpoint_of_the_middle_of_an_epoch_goes_on(self, two, name):
        shared.check_resumed(found_by(two, name), RESUMED[name])

    @pytest.mark.parametrize("name", ["cut, bert", "cut, gpt"])
    def test_what_runs_out_of_memory_in_one_runs_in_parts(self, two, name):
        kind = "gpt" if "gpt" in name else "bert"
        _, effective = CUT[kind]
        expected = shared.by_hand(kind, effective)["weights"][-1]
        first, second = found_by(two, name)
        for found in (first, second):
            assert float((found["weights"] - expected).abs().max()) < 1e-9
        assert len(first["warned"]) == 1
        assert not second["warned"]

    def test_what_would_train_something_else_is_refused(self, two):
        found_by(two, "another loader")

    def test_a_module_is_tuned_by_its_ranks_where_lightning_refuses(self, two):
        for found in found_by(two, "tuned"):
            (first, first_ceiling, steps), (second, second_ceiling, _) = found["ranks"]
            assert found["measured"]
            assert first_ceiling > second_ceiling
            # The second rank fits so few samples that the first gets more, in one forward of 22 samples or in two.
            assert first > second
            assert (first <= first_ceiling, second <= second_ceiling) == (True, True)
            assert (first + second) * (steps - 1) < 22 <= (first + second) * steps
            assert float((found["weights"] - shared.by_hand("bert", 22)["weights"][5]).abs().max()) < 1e-9
        shared.check_epochs([found["seen"] for found in found_by(two, "tuned")], (first, second), 22)


def fitted(shares: Any, data: Any, *, steps: int = 6, **options: Any) -> tuple[torch.Tensor, Watch]:
    torch.manual_seed(0)
    module, watch = Module(data.kind), Watch()
    callbacks = [watch] if shares is None else [shares, watch]
    make_trainer(*callbacks, devices=1, max_steps=steps, limit_val_batches=0, **options).fit(module, data)
    return shared.weights_of(module), watch


class TestOneProcess:
    @pytest.mark.parametrize(
        ("kind", "faults"),
        [("bert", Faults(every=7)), ("bert", Faults(above=2))],
    )
    def test_what_runs_out_of_memory_runs_in_parts(self, kind, faults):
        found = cut((kind, (8,), 40), faults, steps=6)
        assert found["runs"] > 24, "micro-batches"
        assert len(found["warned"]) == 1
        assert float((found["weights"] - shared.by_hand(kind, 40)["weights"][5]).abs().max()) < 1e-9

    def test_a_module_that_can_not_run_in_parts_is_refused(self):
        shares = Shares(shared.shares_plan((8,), 16), on_oom="cut")
        with raises(InputError, "Module"):
            make_trainer(shares, max_steps=1).fit(Module("bert"), shares.data(Data("bert")))

    def test_without_a_plan_it_is_lightnings_own(self):
        with pytest.warns(NoPlanWarning, match="so all devices get equal batches") as caught:
            shares = Shares()
        assert len(caught) == 1
        ours, _ = fitted(shares, shares.data(Data("gpt")), accumulate_grad_batches=2)
        plain, _ = fitted(None, Data("gpt"), accumulate_grad_batches=2)
        assert torch.equal(ours, plain)

    def test_the_remembered_plan_of_another_model_is_not_taken(self, monkeypatch):
        module = Module("gpt")
        own = sum(parameter.numel() for parameter in module.parameters())
        plans = [replace(shared.shares_plan((8,), 40), workload={"model": "Other", "parameters": own + 1})]
        monkeypatch.setattr(
            "autosplit.integrations.process_share.usable_here", lambda: tuple((None, plan) for plan in plans)
        )
        for given in ({}, {"model": module}):
            with pytest.warns(NoPlanWarning):
                assert Shares(**given).share is None
        plans.append(replace(plans[0], workload={"parameters": own}))
        assert Shares(model=module).share.plan is plans[1]

    def test_a_plan_that_is_given_for_another_model_is_warned_of(self):
        shares = Shares(replace(shared.shares_plan((8,), 40), workload={"model": "Other", "parameters": 7}))
        with pytest.warns(OtherModelWarning, match="for Other with 7 parameters, but this "):
            fitted(shares, shares.data(Data("gpt"), seed=shared.SEED), steps=1)

    def test_another_precision_is_said(self):
        """Its batch sizes did not fit, and no message gave the reason."""
        shares = Shares(replace(shared.shares_plan((8,), 40), precision="bf16"))
        with pytest.warns(UserWarning, match=r"'bf16', but the arguments set none\. .* Set precision='bf16-mixed', or"):
            fitted(shares, shares.data(Data("gpt"), seed=shared.SEED), steps=1)

    def test_a_plan_for_one_device_accumulates(self):
        shares = Shares(shared.shares_plan((8,), 40), count=COUNT["gpt"])
        weights, watch = fitted(shares, shares.data(Data("gpt"), seed=shared.SEED))
        assert float((weights - shared.by_hand("gpt", 40)["weights"][5]).abs().max()) < 1e-9
        shared.check_epochs([watch.seen], (8,), 40)


class Gradients(pl.Callback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.kept.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))


class Saves(pl.Callback):
    """Saves a checkpoint after every micro-batch, also within an optimizer step."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.saved = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.saved.append(str(self.folder / f"{len(self.saved):02}.ckpt"))
        trainer.save_checkpoint(self.saved[-1])


def run(
    plan: Any, *callbacks: pl.Callback, kind: str = "bert", data: Any = None, ckpt_path: Any = None, **options: Any
):
    """Train a new module. Return its error against a handwritten training, and the records."""
    shares, module, watch = Shares(plan, count=COUNT[kind]), Module(kind), Watch()
    trainer = make_trainer(shares, watch, *callbacks, devices=1, limit_val_batches=0, **options)
    trainer.fit(module, shares.data(data or Data(kind), seed=shared.SEED), ckpt_path=ckpt_path)
    expected = shared.by_hand(kind, plan.effective_batch_size)["weights"][trainer.global_step - 1]
    return float((shared.weights_of(module) - expected).abs().max()), [samples for samples, _ in watch.seen]


THREE_FORWARDS = shared.shares_plan((8,), 20)
"""Of 8, 8 and 4 samples; the epoch's last step has 8 and 2."""


class TestFeatures:
    """Features of Lightning that are used together with the splits."""

    @pytest.mark.parametrize(
        ("options", "sizes"),
        [({"limit_train_batches": 4, "max_steps": 2}, [8, 8, 4, 8]), ({"fast_dev_run": True}, [8])],
    )
    def test_an_epoch_that_is_cut_within_a_step(self, options, sizes):
        """The last, incomplete step had only part of the gradient."""
        gradients = Gradients()
        _, seen = run(THREE_FORWARDS, gradients, gradient_clip_val=None, **options)
        assert [len(samples) for samples in seen] == sizes
        # At step 0 of the warmup the learning rate is 0, so every gradient here belongs to the first weights.
        model = shared.make_model("bert")
        loss = shared.loss_on(model, COLLATE["bert"]([TEXTS[index] for index in seen[-1]]))
        expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, [*model.parameters()])])
        assert float((gradients.kept[-1] - expected).abs().max()) < 1e-12

    def test_it_can_overfit(self):
        """Every epoch drew different samples."""
        _, seen = run(shared.shares_plan((8,), 8), overfit_batches=1, max_epochs=3, max_steps=-1)
        assert seen == [[*range(8)]] * 3

    def test_loaders_that_are_made_again(self):
        """The weights were those of the first epoch's loader, whose batches had other counts."""
        error, _ = run(THREE_FORWARDS, kind="gpt", max_steps=8, reload_dataloaders_every_n_epochs=1)
        assert error < 1e-9

    def test_a_checkpoint_of_any_micro_batch_goes_on_behind_it(self, tmp_path):
        """A checkpoint within an optimizer step raised KeyError. Now the rest of that step is trained."""
        saves = Saves(tmp_path)
        _, whole = run(THREE_FORWARDS, saves, max_steps=6)
        for number, path in enumerate(saves.saved[:-1], 1):
            error, seen = run(THREE_FORWARDS, max_steps=6, ckpt_path=path)
            assert seen == whole[number:], number
            assert (error < 1e-9) == (number % 8 in {0, 3, 6}), "gradients are in no checkpoint"


class Adds(pl.LightningModule):
    """Lightning's own example module for bug reports. Its loss is a sum."""

    def __init__(self, loss=torch.sum):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss, self.asked = torch.nn.Linear(4, 2).double(), loss, 0

    def training_step(self, batch, batch_idx):
        self.asked += 1
        self.log("loss", self.asked)
        return {"loss": self.loss(self.layer(batch))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=1e-3)


ROWS = torch.rand(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def added_up(sizes: tuple[int, ...], effective: int = 20, **options: Any) -> torch.Tensor:
    """Train two epochs of 3 steps. Return the weights."""
    module, shares = Adds(**options), Shares(shared.shares_plan(sizes, effective))
    devices = {"devices": 2, "strategy": "ddp"} if len(sizes) == 2 else {"devices": 1}
    trainer = make_trainer(shares, max_steps=6, gradient_clip_val=None, **devices)
    trainer.fit(module, shares.loader(DataLoader(ROWS, batch_size=4, shuffle=True), seed=shared.SEED))
    assert module.asked == (6 if sum(sizes) == effective else 16), "only a copy was asked"
    return shared.weights_of(module)


class TestWhatTheLossIsOver:
    def test_a_sum_counts_whole(self):
        """It was weighted as a mean, so the training depended on the split."""
        by_hand = Adds()
        optimizer = by_hand.configure_optimizers()
        for epoch in range(2):
            order = shared.epoch_order(epoch)
            for begin in (0, 20, 40):
                by_hand.layer(ROWS[order[begin : begin + 20]]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for sizes in ((20,), (8,)):
            assert torch.allclose(added_up(sizes), shared.weights_of(by_hand), rtol=1e-12)

    def test_labels_are_counted_without_being_asked_for(self):
        """Without a `count=`, a mean over labels was weighted by samples."""
        shares = Shares(shared.shares_plan((8,), 40))
        weights, _ = fitted(shares, shares.data(Data("gpt"), seed=shared.SEED))
        assert float((weights - shared.by_hand("gpt", 40)["weights"][5]).abs().max()) < 1e-9

    def test_what_is_neither_is_warned_of(self):
        with pytest.warns(UnevenLossWarning, match=r"not a sum \(a few samples are \d+\.\d% off\)"):
            added_up((8,), loss=lambda outputs: outputs.sum() ** 2)


class TestRefusals:
    def test_another_number_of_micro_batches_in_some_epochs(self):
        """It trained on, with the gradients of four steps added up."""
        later = pl.callbacks.GradientAccumulationScheduler({1: 4})
        with raises(InputError, "4", "1"):
            run(shared.shares_plan((8,), 8), later, max_steps=9)

    def test_a_checkpoint_of_other_batches(self, tmp_path):
        """In mid-epoch it raised KeyError."""
        saves = Saves(tmp_path)
        make_trainer(saves, devices=1, max_steps=2, limit_val_batches=0).fit(Module("bert"), Data("bert"))
        with raises(InputError, "2", "0"):
            run(THREE_FORWARDS, max_steps=8, ckpt_path=saves.saved[1])

    def test_a_plan_for_several_devices_of_one_process(self):
        with raises(PlanError, "2"):
            Shares(shared.shares_plan((6, 2), 16, in_one=True))

    def test_a_closure_that_runs_twice(self):
        """SAM and LBFGS added up the gradients of their backwards."""

        class Twice(torch.optim.SGD):
            def step(self, closure=None):
                closure()
                return super().step(closure)

        class Own(Module):
            def configure_optimizers(self):
                return Twice(self.parameters(), lr=0.1)

        shares = Shares(shared.shares_plan((8,), 20))
        with raises(InputError, "second backward"):
            make_trainer(shares, devices=1, limit_val_batches=0).fit(Own("bert"), shares.data(Data("bert")))

    @pytest.mark.filterwarnings("ignore:.*dataloader_iter:UserWarning")
    @pytest.mark.filterwarnings("ignore::autosplit.integrations.lightning.UnevenLossWarning")
    def test_a_step_that_draws_its_batches(self):
        """A KeyError was raised."""

        class Own(Module):
            def training_step(self, dataloader_iter):
                return super().training_step(next(dataloader_iter)[0], 0)

        shares = Shares(shared.shares_plan((8,), 20))
        with raises(InputError, "dataloader_iter"):
            make_trainer(shares, devices=1, limit_val_batches=0).fit(Own("bert"), shares.data(Data("bert")))

    def test_a_schedule_that_counts_micro_batches_is_said(self):
        """Lightning steps it at every n-th micro-batch, if that ends an optimizer step."""

        class Own(Module):
            def configure_optimizers(self):
                made = super().configure_optimizers()
                made["lr_scheduler"]["frequency"] = 2
                return made

        shares = Shares(shared.shares_plan((8,), 20))
        with pytest.warns(StepsWarning, match="frequency 2"):
            make_trainer(shares, devices=1, limit_val_batches=0).fit(Own("bert"), shares.data(Data("bert")))

    def test_manual_optimization(self):
        shares, module = Shares(shared.shares_plan((8,), 16)), Module("bert")
        module.automatic_optimization = False
        trainer = make_trainer(shares, devices=1, gradient_clip_val=None)
        with raises(InputError):
            trainer.fit(module, shares.data(Data("bert")))
