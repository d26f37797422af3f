"""A LightningModule's training step as a workload: it runs as in a Trainer, and the module stays unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from raised import raises

pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autosplit import tune
from autosplit.errors import InputError, UserCodeError
from autosplit.integrations.lightning import workload
from autosplit.profiles.key import workload_of
from autosplit.workload.model_call import training_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch 2.13 at Lightning's use of it

SAMPLES = [(torch.full((4,), float(i)), i % 3) for i in range(40)]


class Classifier(pl.LightningModule):
    """A small standard module with logging and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss})
        return {"loss": loss, "labels": labels}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

    def train_dataloader(self):
        return DataLoader(SAMPLES, batch_size=8)


class Data(pl.LightningDataModule):
    """A user's data module that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def prepare_data(self):
        self.asked.append("prepare_data")

    def setup(self, stage):
        self.asked.append(stage)

    def train_dataloader(self):
        return DataLoader(SAMPLES, batch_size=10)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        inputs, labels = batch
        return inputs[:, :4] + 1, labels

    def on_after_batch_transfer(self, batch, dataloader_idx):
        inputs, labels = batch
        return inputs * 2, labels


def loader(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_size=batch_size, shuffle=True)


def plain_trainer(**options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def loss_of(made) -> torch.Tensor:
    return training_loss(made, made.model, made.sample_batch)


def test_the_loss_and_its_gradient_are_the_modules():
    module = Classifier()
    made = workload(module, loader())
    assert made.sample_batch_size == 8
    got = loss_of(made)
    got.backward()
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    inputs, labels = made.sample_batch
    expected = F.cross_entropy(module.layers(inputs), labels)
    expected.backward()
    assert torch.equal(got.detach(), expected.detach())
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(found, module.parameters(), strict=True))


def test_a_module_is_tuned_and_left_as_it_was():
    module, drawn = Classifier(), loader()
    before, attributes = copy.deepcopy(module.state_dict()), set(vars(module))
    seed = torch.get_rng_state()
    plan = tune(workload(module, drawn), devices="cpu:2MiB,cpu:1MiB", strategy="ddp", effective_batch_size=64)
    assert plan.workload["model"] == "Classifier"
    assert plan.effective_batch_size == 64
    assert plan.ddp.batch_size <= 64
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert set(vars(module)) == attributes
    assert module._trainer is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), seed)


def test_a_lightning_module_is_told_apart_by_its_own_code():
    class Other(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"] * 2

    torch.manual_seed(0)
    described = [workload_of(workload(kind(), loader())) for kind in (Classifier, Other, Classifier)]
    assert described[0] != described[1]
    assert described[0] == described[2]


def test_a_data_module_is_prepared_and_its_hooks_are_run_on_the_sample_batch():
    data = Data()
    made = workload(Classifier(), data)
    assert data.asked == ["prepare_data", "fit"]
    inputs, _ = made.sample_batch
    assert torch.equal(inputs, 2 * (torch.stack([sample for sample, _ in SAMPLES[:10]]) + 1))


def test_layers_that_are_made_late_are_made_in_a_copy():
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = None

        def configure_model(self):
            if self.layers is None:
                self.layers = nn.Linear(4, 3)

    module = Late()
    made = workload(module, loader())
    assert module.layers is None
    assert sum(parameter.numel() for parameter in made.model.parameters()) == 15
    assert loss_of(made) > 0


class Asking(Classifier):
    """A module that uses its Trainer in its step and its schedule."""

    def training_step(self, batch, batch_idx):
        assert self.trainer.max_steps == 7
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, self.trainer.max_steps),
        }


def test_a_trainer_that_is_given_is_found():
    module = Asking()
    made = workload(module, loader(), trainer=plain_trainer(max_steps=7))
    assert loss_of(made) > 0
    copied = copy.deepcopy(made.model)  # in training mode
    assert made.compute_loss(copied, made.sample_batch) > 0
    assert module._trainer is None
    assert tune(made, devices="cpu:1MiB", effective_batch_size=16).effective_batch_size == 16


def test_one_that_is_missing_is_asked_for():
    with raises(InputError, "configure_optimizers"):
        workload(Asking(), loader())
    made = workload(Asking(), loader(), optimizer=torch.optim.SGD)
    with raises(InputError, "training_step"):
        tune(made, devices="cpu:1MiB")


@pytest.mark.parametrize(("named", "ours"), [("32-true", "none"), ("bf16-mixed", "bf16")])
def test_the_trainers_precision_counts(named, ours):
    assert workload(Classifier(), loader(), trainer=plain_trainer(precision=named)).precision == ours


def test_a_precision_that_is_not_mixed_is_refused():
    trainer = plain_trainer(precision="64-true")
    with raises(InputError, "'64-true'"):
        workload(Classifier(), loader(), trainer=trainer)
    assert workload(Classifier(), loader(), trainer=trainer, precision="none").precision == "none"


class TestAllOfAModuleStaysAsItWas:
    """Nested modules lost their Trainer, and the module lost its own `log`."""

    def test_modules_within_it_find_the_trainer_log_nothing_and_keep_their_own(self):
        class Whole(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.part = Asking()

            def training_step(self, batch, batch_idx):
                return (
                    self.part.training_step(batch, batch_idx)["loss"] + super().training_step(batch, batch_idx)["loss"]
                )

        module, own, given = Whole(), plain_trainer(), plain_trainer(max_steps=7)
        module.part.trainer = own
        made = workload(module, loader(), trainer=given)
        assert loss_of(made) > 0
        assert (module._trainer, module.part._trainer) == (None, own)
        assert "log" not in vars(module.part)

    def test_a_log_of_its_own(self):
        module, seen = Classifier(), []
        own = module.log = lambda *_args, **_options: seen.append(1)
        loss_of(workload(module, loader()))
        assert module.log is own
        assert not seen

    def test_after_a_step_that_fails(self):
        class Failing(Classifier):
            def training_step(self, batch, batch_idx):
                raise ZeroDivisionError

        module = Failing()
        attributes = dict(vars(module))
        with pytest.raises(ZeroDivisionError):
            loss_of(workload(module, loader()))
        assert vars(module) == attributes


def test_what_is_in_evaluation_mode_stays_so_in_a_copy():
    """A frozen BatchNorm was trained, and dropout took memory that it does not take in Lightning."""
    module = Classifier()
    module.layers[1].eval()
    copied = copy.deepcopy(workload(module, loader()).model)
    assert [part.training for part in copied.module.layers] == [True, False, True]


@pytest.mark.parametrize("wrapped", ["args", "named"])
def test_a_step_in_a_wrapper_of_any_signature_gets_the_number(wrapped):
    """Lightning passes `batch_idx` to wrappers with any signature. The workload passed only the batch."""

    class Wrapped(Classifier):
        def training_step(self, *args):
            batch, number = args
            return Classifier.training_step(self, batch, number)

    class Named(Classifier):
        def training_step(self, batch, batch_idx=None, more=5):
            assert (batch_idx, more) == (0, 5)
            return super().training_step(batch, batch_idx)

    assert loss_of(workload({"args": Wrapped, "named": Named}[wrapped](), loader())) > 0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_is_tuned_in_its_eager_form(in_place):
    """Lightning accepts both kinds. They raised an error, as a copy of a module compiled in place stayed compiled."""
    module = Classifier()
    if in_place:
        module.compile(backend="eager")
    made = workload(module if in_place else torch.compile(module, backend="eager"), loader())
    plan = tune(made, devices="sim:2xRTX3090", strategy="ddp", effective_batch_size=64)
    assert plan.effective_batch_size == 64
    assert (module._compiled_call_impl is not None) == in_place


def test_a_data_module_finds_the_trainer_that_is_given():
    class Sharded(Data):
        def setup(self, stage):
            assert self.trainer.max_steps == 7

        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer.max_steps == 7
            return batch

    data = Sharded()
    workload(Classifier(), data, trainer=plain_trainer(max_steps=7))
    assert data.trainer is None


class TestRefusals:
    def test_manual_optimization(self):
        module = Classifier()
        module.automatic_optimization = False
        with raises(InputError):
            workload(module, loader())

    def test_a_step_that_takes_an_iterator(self):
        class Iterating(Classifier):
            def training_step(self, dataloader_iter):
                raise AssertionError

        with raises(InputError):
            workload(Iterating(), loader())

    @pytest.mark.parametrize(
        ("configured", "named"),
        [
            (lambda a, b: (a, b), "SGD, SGD"),
            (lambda a, b: None, "NoneType"),
        ],
    )
    def test_several_optimizers_or_none(self, configured, named, monkeypatch):
        def configure_optimizers(self):
            return configured(*(torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)))

        monkeypatch.setattr(Classifier, "configure_optimizers", configure_optimizers)
        with raises(InputError, str(named)):
            workload(Classifier(), loader())

    @pytest.mark.parametrize(
        "configured",
        [lambda o: ([o], []), lambda o: [{"optimizer": o}]],
    )
    def test_but_one_in_any_wrapping(self, configured, monkeypatch):
        def configure_optimizers(self):
            return configured(torch.optim.SGD(self.parameters(), lr=0.1))

        monkeypatch.setattr(Classifier, "configure_optimizers", configure_optimizers)
        assert isinstance(workload(Classifier(), loader()).optimizer, torch.optim.SGD)

    def test_several_loaders_in_one(self):
        """It yields its batches with two numbers that the training step does not get."""
        with raises(InputError, "CombinedLoader"):
            workload(Classifier(), CombinedLoader({"a": loader(), "b": loader()}))

    def test_a_step_that_skips(self):
        class Skipping(Classifier):
            def training_step(self, batch, batch_idx):
                return None

        with raises((InputError, UserCodeError), "NoneType"):
            tune(workload(Skipping(), loader()), devices="cpu:1MiB")
