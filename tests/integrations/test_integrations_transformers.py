"""transformers' Trainer with a plan trains the weights of one process. Without a plan, nothing changes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from raised import raises

pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")

import shared_training as shared
import torch
import transformers
from faults import Faults, runs_out
from gpus import KIND
from ranks import found_by, run_ranks_once
from shared_training import CLIP, COLLATE, EVALUATES_BY, HELD_OUT, JOBS, LR, PRELOAD, STEPS, STOPS_AT, TEXTS, WARMUP
from torch import nn
from torch.utils.data import DataLoader

import autosplit
from autosplit.errors import DeviceError, InputError
from autosplit.integrations.transformers import (
    CutWarning,
    NoPlanWarning,
    SharesMixin,
    Trainer,
    UnevenLossWarning,
    apply,
    workload,
)
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.plan.record import with_devices

BOUNDS = {"bert": 1e-9, "gpt": 1e-8}
"""transformers' loss of GPT-2 casts the logits to float32. Two single-process runs differ as much."""


def make_args(folder: str | Path, **changes: Any) -> transformers.TrainingArguments:
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": LR,
        "max_grad_norm": CLIP,
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "seed": shared.SEED,
        "logging_steps": 10,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **{**options, **changes})


class Watched(transformers.Trainer):
    """A user's Trainer that records the samples of every micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def training_step(self, model, inputs, *args):
        self.seen.append(shared.samples_in(inputs))
        return super().training_step(model, inputs, *args)


class Mixed(SharesMixin, Watched):
    """A user's Trainer with a plan."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted = []

    def training_step(self, model, inputs, *args):
        self.counted.append(bool(self._weights[0]))
        return super().training_step(model, inputs, *args)


def make_trainer(kind: str, plan: Any, args: Any, *, cls: Any = Mixed, **options: Any) -> Any:
    model = shared.make_model(kind)
    return cls(model, args, data_collator=COLLATE[kind], train_dataset=TEXTS, plan=plan, **options)


def loss_by_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """A loss over the whole step's items, which the Trainer counts and gathers itself."""
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def trained(
    kind: str,
    sizes: tuple[int, ...],
    effective: int,
    *,
    name: str,
    resumes: bool = False,
    cls: Any = Mixed,
    loss: Any = None,
    workers: int = 0,
    plan_of: Any = shared.shares_plan,
) -> dict[str, Any]:
    """Train for `STEPS` steps and evaluate twice. If `resumes`, train again from checkpoint `STOPS_AT`."""
    shared.clean_workers()
    plan = plan_of(sizes, effective)
    place = {"use_cpu": plan.devices[0].kind == "cpu"}
    saves = {"save_strategy": "steps", "save_steps": STOPS_AT} if resumes else {}
    evaluates = {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": EVALUATES_BY}
    args = make_args(shared.folder_of_job(name), **place, **evaluates, **saves)
    trainer = make_trainer(kind, plan, args, eval_dataset=TEXTS[:HELD_OUT], cls=cls, compute_loss_func=loss)
    trainer.train()
    log = trainer.state.log_history
    plain = transformers.Trainer(
        trainer.model, args, data_collator=COLLATE[kind], eval_dataset=TEXTS[:HELD_OUT], compute_loss_func=loss
    )
    found = {
        "weights": shared.weights_of(trainer.model),
        "lrs": {entry["step"]: entry["learning_rate"] for entry in log if "learning_rate" in entry},
        "scheduler_steps": trainer.lr_scheduler.last_epoch,
        "seen": list(zip(trainer.seen, trainer.counted, strict=True)),
        "evaluated": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "evaluated_by_transformers": plain.evaluate()["eval_loss"],
        "as_bucket_view": trainer.model_wrapped.gradient_as_bucket_view,
        "losses": {entry["step"]: entry["loss"] for entry in log if "loss" in entry},
    }
    if resumes:
        args = make_args(shared.folder_of_job(name), **place, dataloader_num_workers=workers)
        again = make_trainer(kind, plan, args, cls=cls, compute_loss_func=loss)
        again.train(resume_from_checkpoint=str(shared.folder_of_job(name) / f"checkpoint-{STOPS_AT}"))
        seen = list(zip(again.seen, again.counted, strict=True))
        weights, steps = shared.weights_of(again.model), again.lr_scheduler.last_epoch
        found["resumed"] = {"weights": weights, "scheduler_steps": steps, "seen": seen}
    return found


def cut(job: tuple[str, tuple[int, ...], int], faults: Faults, *, name: str, loss: Any = None) -> dict[str, Any]:
    """Train for `STEPS` steps. Rank 0 runs out of memory in some of them."""
    kind, sizes, effective = job
    args = make_args(shared.folder_of_job(name))
    plan = shared.shares_plan(sizes, effective)
    trainer = make_trainer(kind, plan, args, cls=Trainer, compute_loss_func=loss, on_oom="cut")
    if not trainer.share.place.rank:
        runs_out(trainer.model, faults)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CutWarning)
        trainer.train()
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    warned = [str(one.message) for one in caught if one.category is CutWarning]
    return {"weights": shared.weights_of(trainer.model), "warned": warned, "losses": logged}


def cut_with_a_static_graph() -> None:
    args = make_args(shared.folder_of_job("static"))
    trainer = make_trainer("bert", shared.shares_plan((7, 1), 8), args, on_oom="cut")
    trainer.accelerator.ddp_handler.static_graph = True
    with pytest.raises(InputError, match="on_oom is 'cut', and the wrapped model has static_graph=True"):
        trainer.train()


CUT = {
    "cut, bert": (("bert", (7, 1), 40), Faults(every=10), None),
    "cut, own loss": (("bert", (7, 1), 20), Faults(above=3), loss_by_items),
}


class Divides(Mixed):
    """A user's Trainer whose own method divides by the items of the step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        loss = loss_by_items(outputs, labels, items)
        return (loss, outputs) if return_outputs else loss


TWO = {
    **{name: partial(cut, job, faults, name=name, loss=loss) for name, (job, faults, loss) in CUT.items()},
    **{name: partial(trained, *job, name=name, resumes="3 forwards" in name) for name, job in JOBS[2].items()},
    "with workers": partial(trained, "bert", (7, 1), 20, name="workers", resumes=True, workers=1),
    "own loss": partial(trained, "bert", (7, 1), 20, name="own", loss=loss_by_items),
    "own method": partial(trained, "bert", (7, 1), 20, name="method", cls=Divides),
    "cut with a static graph": cut_with_a_static_graph,
}


RESUMED = {name: job for name, job in JOBS[2].items() if "3 forwards" in name} | {"with workers": ("bert", (7, 1), 20)}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks_once(tmp_path_factory, __name__, "TWO", 2, limit_s=280, preload=PRELOAD)


@pytest.mark.slow
class TestTwoRanks:
    @pytest.mark.parametrize("name", [*JOBS[2], "with workers"])
    def test_twenty_steps_are_those_of_one_process(self, two, name):
        job = {**JOBS[2], **RESUMED}[name]
        shared.check_trained(found_by(two, name), job, BOUNDS[job[0]])

    @pytest.mark.parametrize("name", RESUMED)
    def test_a_checkpoint_of_the_middle_of_an_epoch_goes_on(self, two, name):
        shared.check_resumed(found_by(two, name), RESUMED[name], BOUNDS[RESUMED[name][0]])

    @pytest.mark.parametrize("name", ["own loss", "own method"])
    def test_a_loss_of_ones_own_gets_the_items_of_the_whole_step(self, two, name):
        shared.check_trained(found_by(two, name), ("bert", (7, 1), 20))

    def test_evaluation_is_transformers_own(self, two):
        """For some models, its mean over several processes is not the mean over the samples (transformers 5.23)."""
        for name in JOBS[2]:
            for found in found_by(two, name):
                assert len(found["evaluated"]) == 2
                assert found["evaluated"][-1] == found["evaluated_by_transformers"]

    def test_the_loss_that_is_logged_is_that_of_the_samples(self, two):
        for name, (kind, _, effective) in {**JOBS[2], "own loss": ("bert", (7, 1), 20)}.items():
            losses = shared.by_hand(kind, effective)["losses"]
            for step, loss in found_by(two, name)[0]["losses"].items():
                assert loss == pytest.approx(sum(losses[step - 10 : step]) / 10, rel=1e-5), (name, step)

    @pytest.mark.parametrize("name", CUT)
    def test_what_runs_out_of_memory_is_run_in_parts(self, two, name):
        (kind, _, effective), *_ = CUT[name]
        expected = shared.by_hand(kind, effective)
        for rank, found in enumerate(found_by(two, name)):
            assert float((found["weights"] - expected["weights"][-1]).abs().max()) < BOUNDS[kind]
            assert len(found["warned"]) == (rank == 0)
        for step, loss in found_by(two, name)[0]["losses"].items():
            assert loss == pytest.approx(sum(expected["losses"][step - 10 : step]) / 10, rel=1e-5)

    def test_what_would_train_something_else_is_refused(self, two):
        found_by(two, "cut with a static graph")


@pytest.fixture(autouse=True)
def _alone():
    """Reset accelerate's global state, which a Trainer leaves behind."""
    shared.forget_accelerate()
    yield
    shared.forget_accelerate()


def make_single(kind: str, plan: Any, args: Any, **options: Any) -> Any:
    """Return a Trainer whose learning rate schedule has `STEPS` steps, even if it trains for fewer."""
    trainer = make_trainer(kind, plan, args, **options)
    trainer.optimizer, trainer.lr_scheduler = shared.optimizer_for(trainer.model)
    return trainer


def error(trainer: Any, effective: int, steps: int) -> float:
    expected = shared.by_hand("bert", effective)["weights"][steps - 1]
    return float((shared.weights_of(trainer.model).cpu() - expected).abs().max())


class TestOneProcess:
    def test_without_a_plan_it_is_transformers_own(self, tmp_path):
        def weights(cls: Any) -> torch.Tensor:
            args = make_args(tmp_path, max_steps=5, per_device_train_batch_size=4, gradient_accumulation_steps=2)
            trainer = cls(shared.make_model("gpt"), args, data_collator=COLLATE["gpt"], train_dataset=TEXTS)
            trainer.train()
            return shared.weights_of(trainer.model)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = weights(Trainer)
        assert [str(w.message)[:23] for w in caught if w.category is NoPlanWarning] == ["autosplit found no plan"]
        shared.forget_accelerate()
        assert torch.equal(ours, weights(transformers.Trainer))

    def test_two_devices_train_what_one_would_and_are_wrapped_once(self, tmp_path):
        trainer = make_single("bert", shared.shares_plan((5, 3), 20, in_one=True), make_args(tmp_path, max_steps=6))
        trainer.train()
        assert error(trainer, 20, 6) < 1e-9
        first = trainer.model_wrapped
        trainer.train()
        for wrapped in (first, trainer.model_wrapped):
            assert isinstance(wrapped, BalancedDataParallel)
            assert wrapped.module is trainer.model
            assert not any(isinstance(part, BalancedDataParallel) for part in trainer.model.modules())

    @pytest.mark.filterwarnings("ignore::autosplit.integrations.transformers.CutWarning")
    @pytest.mark.parametrize(("sizes", "faults"), [((8,), Faults(every=7)), ((5, 3), Faults(above=2))])
    def test_what_runs_out_of_memory_is_run_in_parts(self, sizes, faults, tmp_path):
        plan = shared.shares_plan(sizes, 40, in_one=len(sizes) > 1)
        trainer = make_single("bert", plan, make_args(tmp_path, max_steps=6), on_oom="cut")
        runs_out(trainer.model, faults)
        trainer.train()
        assert faults.runs > 21  # micro-batches
        assert error(trainer, 40, 6) < 1e-9

    @pytest.mark.gpu
    @pytest.mark.parametrize("sizes", [(8,), (5, 3)])
    def test_on_accelerators_too(self, sizes, tmp_path, monkeypatch):
        plan = shared.on_cards(shared.shares_plan(sizes, 20, in_one=len(sizes) > 1), monkeypatch)
        trainer = make_single("bert", plan, make_args(tmp_path, max_steps=6, use_cpu=False))
        trainer.train()
        assert {parameter.device.type for parameter in trainer.model.parameters()} == {KIND}
        assert isinstance(trainer.model_wrapped, BalancedDataParallel) == (len(sizes) > 1)
        assert error(trainer, 20, 6) < 1e-9

    def test_a_loss_that_is_no_mean_is_said(self, tmp_path):
        """For several samples, this loss has no detectable count."""

        class Squared(Mixed):
            def compute_loss(self, model, inputs, **options):
                return super().compute_loss(model, inputs, **options) ** 2 * len(inputs["labels"]) ** 2

        args = make_args(tmp_path, max_steps=1)
        trainer = make_trainer("bert", shared.shares_plan((8,), 16), args, cls=Squared)
        with pytest.warns(UnevenLossWarning, match=r"not a mean over labels or samples, and not a sum"):
            trainer.train()


def test_a_sum_counts_whole(tmp_path):
    """It was weighted as a mean, so the training depended on the split."""

    class Adds(Mixed):
        def compute_loss(self, model, inputs, **options):
            labels = inputs.pop("labels")
            return 1e-2 * nn.functional.cross_entropy(model(**inputs)["logits"], labels, reduction="sum")

    def weights(size: int) -> torch.Tensor:
        args = make_args(tmp_path, max_steps=6, optim="sgd", max_grad_norm=0)
        trainer = make_trainer("bert", shared.shares_plan((size,), 20), args, cls=Adds)
        trainer.train()
        assert trainer._rule == "sum"
        return shared.weights_of(trainer.model)

    assert torch.allclose(weights(8), weights(20), rtol=0, atol=1e-12)


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A user's loss that ignores the number of items in the step."""
    return nn.functional.cross_entropy(outputs["logits"], labels)


class TestFeatures:
    """Features of the Trainer that are used together with the splits."""

    @pytest.mark.parametrize("loss", [loss_by_items, mean_loss])
    @pytest.mark.parametrize("plan", [shared.shares_plan((8,), 20), shared.shares_plan((5, 3), 20, in_one=True)])
    def test_a_loss_of_ones_own(self, tmp_path, plan, loss):
        """A mean was treated as a mean over the step's items, so a step was the sum of its forwards."""
        trainer = make_single("bert", plan, make_args(tmp_path, max_steps=6), compute_loss_func=loss)
        trainer.train()
        assert error(trainer, 20, 6) < 1e-9

    @pytest.mark.parametrize("items", [True, False])
    def test_a_method_of_ones_own_for_the_loss_gets_the_items(self, tmp_path, items):
        """It got None, and a loss that divides by the items of the step raised a TypeError."""

        class Own(Mixed):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                return (loss_by_items if items else mean_loss)(model(**inputs), labels, num_items_in_batch)

        args = make_args(tmp_path, max_steps=6)
        trainer = make_trainer("bert", shared.shares_plan((8,), 20), args, cls=Own)
        trainer.train()
        assert error(trainer, 20, 6) < 1e-9

    def test_a_second_backward_has_the_weight_of_the_first(self, tmp_path):
        """Adversarial training runs another backward after the Trainer's, which had no weight."""

        class Adversarial(Mixed):
            def training_step(self, model, inputs, num_items_in_batch=None):
                loss = super().training_step(model, dict(inputs), num_items_in_batch)
                self.accelerator.backward(self.compute_loss(model, dict(inputs)))
                return loss

        def weights(size: int) -> torch.Tensor:
            args = make_args(tmp_path, max_steps=6, optim="sgd")
            trainer = make_trainer("bert", shared.shares_plan((size,), 20), args, cls=Adversarial)
            trainer.train()
            return shared.weights_of(trainer.model)

        assert torch.allclose(weights(8), weights(20), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("evaluates_before", [False, True])
    @pytest.mark.parametrize("plan", [shared.shares_plan((8,), 20), shared.shares_plan((5, 3), 20, in_one=True)])
    def test_mixed_precision(self, tmp_path, plan, evaluates_before):
        """Several devices of one process trained in full precision until the first evaluation."""
        between = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": EVALUATES_BY}
        model, seen = shared.make_model("bert").float(), []
        model.classifier.register_forward_hook(lambda *call: seen.append((model.training, call[-1].dtype)))
        trainer = Mixed(
            model,
            make_args(tmp_path, max_steps=3, bf16=True, **between),
            data_collator=COLLATE["bert"],
            train_dataset=TEXTS,
            eval_dataset=TEXTS[:HELD_OUT],
            plan=replace(plan, precision="bf16"),
        )
        if evaluates_before:
            trainer.evaluate()
        trainer.train()
        trainer.train()
        trainer.evaluate()
        assert {*seen} == {(True, torch.bfloat16), (False, torch.bfloat16)}
        if trainer.share.wraps:
            assert "forward" not in vars(model), "replicas would run this forward, with the model's parameters"


class TestRefusals:
    def test_a_sampler_of_ones_own(self, tmp_path):
        """The sampler was ignored without a message."""

        class Weighted(Mixed):
            def _get_train_sampler(self, train_dataset=None):
                return torch.utils.data.WeightedRandomSampler([1.0] * len(TEXTS), len(TEXTS))

        trainer = make_trainer("bert", shared.shares_plan((8,), 16), make_args(tmp_path), cls=Weighted)
        with raises(InputError, "WeightedRandomSampler"):
            trainer.train()

    @pytest.mark.parametrize("divided", [True, False])
    def test_a_training_step_of_ones_own_without_weights(self, tmp_path, divided):
        """Its micro-batches counted equally, or were divided by their number once more."""

        class Steps(Watched):
            def training_step(self, model, inputs, num_items_in_batch=None):
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
                self.accelerator.backward(loss / (self.args.gradient_accumulation_steps if divided else 1))
                return loss.detach()

        bases = (SharesMixin, Steps) if divided else (Steps, Trainer)
        cls = type("Own", bases, {"training_step": bases[0].training_step})
        trainer = make_trainer("bert", shared.shares_plan((8,), 20), make_args(tmp_path), cls=cls)
        with raises(InputError, "divides the loss by 3" if divided else "none of the 3 weights"):
            trainer.train()

    def test_a_loader_of_ones_own(self, tmp_path):
        """An AttributeError was raised, or with `count=` each micro-batch was a whole batch."""

        class Loads(Mixed):
            def get_train_dataloader(self):
                loader = DataLoader(TEXTS, batch_size=8, collate_fn=COLLATE["bert"])
                return self.accelerator.prepare(loader)

        trainer = make_trainer("bert", shared.shares_plan((8,), 20), make_args(tmp_path), cls=Loads)
        with raises(InputError, "get_train_dataloader"):
            trainer.train()

    @pytest.mark.parametrize(
        ("option", "value"), [("auto_find_batch_size", True), ("train_sampling_strategy", "batch_rebalance")]
    )
    def test_arguments_that_draw_batches_of_their_own(self, tmp_path, option, value):
        with raises(InputError, str(option)):
            make_trainer("bert", shared.shares_plan((8,), 16), make_args(tmp_path, **{option: value}))

    @pytest.mark.parametrize(
        ("precision", "options", "said"),
        [("bf16", {}, "set none\\. .* Set bf16=True")],
    )
    def test_another_precision_is_said(self, tmp_path, precision, options, said):
        plan = replace(shared.shares_plan((8,), 16), precision=precision)
        with pytest.warns(UserWarning, match=f"precision '{precision}', but the arguments {said}"):
            make_trainer("bert", plan, make_args(tmp_path, **options))

    def test_texts_grouped_by_length_are_trained_on(self, tmp_path):
        """It raised an error. Samples of similar length stay together, and the plan's splits stay the same."""

        def padding(strategy: str) -> tuple[int, list[int]]:
            args = make_args(tmp_path, max_steps=-1, num_train_epochs=1, train_sampling_strategy=strategy)
            trainer = make_trainer("bert", shared.shares_plan((8,), 16), args)
            trainer.train()
            lengths = [[len(TEXTS[one]["input_ids"]) for one in batch] for batch in trainer.seen]
            assert sorted(one for batch in trainer.seen for one in batch) == [*range(len(TEXTS))]
            return sum(max(batch) * len(batch) - sum(batch) for batch in lengths), [len(batch) for batch in lengths]

        (grouped, grouped_sizes), (mixed, sizes) = padding("group_by_length"), padding("random")
        assert grouped_sizes == sizes
        assert grouped < 0.7 * mixed


class TestTuning:
    @pytest.mark.slow
    def test_a_trainer_is_tuned_as_it_is_and_takes_the_plan(self, tmp_path):
        args = make_args(tmp_path, per_device_train_batch_size=2)
        model = shared.make_model("bert")
        trainer = transformers.Trainer(model, args, data_collator=COLLATE["bert"], train_dataset=TEXTS)
        before = shared.weights_of(trainer.model)
        plan = autosplit.tune(
            workload(trainer), devices="sim:2xRTX3090", effective_batch_size=48, max_batch_size=16, n_trials=1
        )
        assert torch.equal(shared.weights_of(trainer.model), before)
        assert plan.effective_batch_size == 48
        with pytest.raises(DeviceError, match="simulated GPUs"):
            apply(plan, args)
        here = with_devices(plan, lambda index, device: replace(device, kind="cpu", label=f"cpu:{index}"))
        share = apply(here, args)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (
            plan.batch_size,
            plan.accumulation_steps,
        )
        assert (share.wraps, args.average_tokens_across_devices) == (True, True)

    @pytest.mark.parametrize("option", ["its method", "smoothed labels", "its function"])
    def test_the_loss_is_the_trainers(self, tmp_path, option):
        """The model's own loss was tuned, not the Trainer's."""

        class Weightier(transformers.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return 5 * super().compute_loss(model, inputs)

        args = make_args(tmp_path, label_smoothing_factor=0.3 if option == "smoothed labels" else 0.0)
        trainer = (Weightier if option == "its method" else transformers.Trainer)(
            shared.make_model("bert"),
            args,
            data_collator=COLLATE["bert"],
            train_dataset=TEXTS,
            compute_loss_func=loss_by_items if option == "its function" else None,
        )
        made, batch = workload(trainer), COLLATE["bert"](TEXTS[:8])
        logits = trainer.model(**batch).logits
        expected = nn.functional.cross_entropy(logits, batch["labels"])
        if option == "smoothed labels":
            expected = 0.7 * expected - 0.3 * nn.functional.log_softmax(logits, -1).mean()
        elif option == "its method":
            expected = 5 * expected
        assert float(made.compute_loss(trainer.model, batch).detach()) == pytest.approx(
            float(expected.detach()), rel=1e-7
        )
        assert "labels" in batch
