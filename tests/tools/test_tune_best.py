"""tune_best(checkpointing=...): used if it is faster or the batch needs it, with exact ceilings, and saved."""

from __future__ import annotations

import pytest
import torch
from marks import slow
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit.errors import WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.parallel.checkpointed import checkpointed_in
from autosplit.plan.plan import Plan
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.profiles.store import profile_paths
from autosplit.tools.tune_best import BestPlan, checkpointing_list, tune_best
from autosplit.tuning.progress import Progress
from autosplit.tuning.tune import TuningInterrupted, tune
from autosplit.workload.checkpointing import Checkpointing
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

WIDTH, DEPTH, LENGTH = 16, 4, 8
NO_LAYER, SECOND, EVERY = "no checkpointed layer", "every second Block checkpointed", "every Block checkpointed"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class ByHand(Block):
    """The same model, checkpointed by its author."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


KINDS = (Block, ByHand)


def model(kind: type[Block] = Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(DEPTH)), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3))


BATCH = (torch.randn(2, LENGTH, WIDTH), torch.randint(0, 3, (2,)))


def workload(kind: type[Block] = Block, **options: object) -> Workload:
    return Workload(model(kind), BATCH, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW, **options)


def tuned(devices: str, **options: object) -> BestPlan:
    return tune_best(
        workload(), **{"devices": devices, "checkpointing": Block, "n_trials": 3, "profile": "off", **options}
    )


@pytest.mark.parametrize("devices", ["sim:RTX3090@8MiB", slow("cpu:4MiB")])
def test_ceilings_are_those_of_a_model_that_checkpoints_its_layers_itself(devices):
    chosen = find_ceiling(workload(checkpointing=Checkpointing((Block,), 1)), devices)
    by_hand, plain = find_ceiling(workload(ByHand), devices), find_ceiling(workload(), devices)
    assert (chosen.batch_size, chosen.bytes_per_sample) == (by_hand.batch_size, by_hand.bytes_per_sample)
    assert chosen.batch_size > 1.5 * plain.batch_size


def test_the_fastest_way_is_the_plan_and_all_are_told_of():
    """On a GPU with enough memory, recomputing brings nothing."""
    best = tuned("sim:RTX3090", max_batch_size=64)
    plan = best.plan
    assert plan.checkpointed == ()
    assert {variant.name for variant in best.variants} == {NO_LAYER, SECOND, EVERY}
    assert best.variants[0].name == NO_LAYER
    assert best.variants[0].samples_per_s == plan.samples_per_s > best.variants[1].samples_per_s
    (note,) = (note.text for note in plan.notes if note.kind == "variants")
    assert note.startswith(f"Chose {NO_LAYER}: {plan.samples_per_s:,.0f} samples/s with 64 per forward. Also tried ")


def test_layers_are_checkpointed_where_the_memory_is_short():
    """Without checkpointing, one forward fits half as many samples, and a tiny step takes as long as one twice as
    large.
    """
    best = tuned("sim:RTX3090@1300KiB")
    assert best.plan.checkpointed == tuple(map(str, range(DEPTH)))[:: {SECOND: 2, EVERY: 1}[best.variants[0].name]]
    by_name = {variant.name: variant for variant in best.variants}
    assert best.plan.batch_size > by_name[NO_LAYER].batch_size
    assert best.plan.samples_per_s > by_name[NO_LAYER].samples_per_s


def long_sequence(kind: type[Block] = Block) -> Workload:
    """A model whose activations for one sample are larger than everything else."""
    layers = nn.Sequential(*(kind() for _ in range(DEPTH)))
    return Workload(layers, torch.randn(1, 4096, WIDTH), compute_loss=lambda layers, x: layers(x).mean())


@pytest.mark.slow
def test_a_way_that_does_not_fit_is_left_out():
    peaks = {kind: find_ceiling(long_sequence(kind), "sim:RTX3090", max_batch_size=1).peak_bytes for kind in KINDS}
    devices = f"sim:RTX3090@{sum(peaks.values()) // 2}B"
    options = {"devices": devices, "n_trials": 2, "profile": "off"}
    with pytest.raises(DoesNotFitError):
        tune(long_sequence(), **options)
    plan = tune_best(long_sequence(), checkpointing=Block, **options).plan
    assert plan.checkpointed == ("0", "2"), "which is enough, and faster than all"
    assert any(note.kind == "variant-left-out" and NO_LAYER in note.text for note in plan.notes)


@pytest.mark.parametrize("devices", ["sim:2xRTX3090@1300KiB", slow("cpu:3MiB,cpu:2MiB")])
@pytest.mark.slow
def test_the_users_model_is_untouched(devices):
    own = model()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    tune_best(
        own,
        BATCH,
        loss_fn=F.cross_entropy,
        devices=devices,
        checkpointing="Block",
        n_trials=2,
        max_batch_size=32,
        profile="off",
    )
    assert checkpointed_in(own) == ()
    assert all(type(layer) is Block for layer in own[:DEPTH])
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


def test_all_variants_are_remembered_and_the_fastest_is_the_newest_plan(monkeypatch):
    best = tuned("sim:RTX3090@1300KiB", profile="auto")
    assert best.plan.path == profile_paths()[0]
    assert any(note.kind == "variants" for note in Plan.load(best.plan.path).notes)
    monkeypatch.setattr("autosplit.tuning.tune._tuned_anew", lambda *_, **__: pytest.fail("tuned again"))
    again = tuned("sim:RTX3090@1300KiB", profile="auto")
    assert (again.plan.split, again.plan.checkpointed, again.variants) == (
        best.plan.split,
        best.plan.checkpointed,
        best.variants,
    )
    assert [note.kind for note in again.plan.notes].count("variants") == 1


@pytest.mark.slow
def test_it_is_tuned_for_in_each_precision():
    best = tuned("sim:RTX3090", precision=("none", "bf16"), max_batch_size=16)
    names = {f"precision {one}, {way}" for one in ("none", "bf16") for way in (NO_LAYER, SECOND, EVERY)}
    assert {variant.name for variant in best.variants} == names


def test_an_interrupt_gives_the_best_plan_so_far():
    def interrupt(progress: Progress) -> None:
        if progress.message.startswith("2 of 3"):
            raise KeyboardInterrupt

    with pytest.raises(TuningInterrupted) as caught:
        tuned("sim:RTX3090", max_batch_size=16, progress=interrupt)
    assert caught.value.plan.checkpointed == ()
    assert not caught.value.plan.complete


def test_what_names_no_layer_of_the_model_is_refused():
    with raises(WorkloadError, "checkpointing-no-layer", "'Tower'", "Sequential"):
        tuned("sim:RTX3090", checkpointing="Tower")
    with raises(WorkloadError, "checkpointing-value", "3"):
        tuned("sim:RTX3090", checkpointing=3)


def test_layers_of_several_models_are_refused():
    def step(models, optimizers, batch):
        pytest.fail("it is refused before")

    pair = Workload((model(), model()), BATCH, step=step, optimizer=(torch.optim.SGD, torch.optim.SGD))
    with raises(WorkloadError, "checkpointing-several-models", "2"):
        tune_best(pair, devices="sim:RTX3090", checkpointing=Block, profile="off")


def test_three_ways_are_tuned_for():
    assert checkpointing_list(None) == (None,)
    assert [str(way) for way in checkpointing_list("auto")] == [
        "None",
        "every second layer checkpointed",
        "every layer checkpointed",
    ]
    assert str(checkpointing_list((Block, "GRU"))[2]) == "every Block or GRU checkpointed"
    assert checkpointing_list("Block, GRU")[1] == Checkpointing(("Block", "GRU"), 2)


@pytest.mark.parametrize("odd", [True, 3, (), "", "no name", ("auto", Block), [None], nn.ReLU(), int])
def test_what_names_no_layers_is_refused(odd):
    with raises(WorkloadError, "checkpointing-value"):
        checkpointing_list(odd)
