"""tune_best(checkpointing=...): used if it is faster or the batch needs it, with exact ceilings, and saved."""

from __future__ import annotations

import os

import pytest
import torch
from folders import EXAMPLES
from handmade import made_plan
from marks import slow
from raised import raises
from ranks import found_by, job_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import char_gpt

from autosplit.cli.main import main
from autosplit.errors import WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.parallel.checkpointed import checkpointed_in
from autosplit.plan.plan import Plan
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.profiles.store import profile_paths
from autosplit.tools import precision as precisions
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
    monkeypatch.setattr("autosplit.tuning.tune.measure_and_search", lambda *_, **__: pytest.fail("tuned again"))
    again = tuned("sim:RTX3090@1300KiB", profile="auto")
    assert (again.plan.split, again.plan.checkpointed, again.variants) == (
        best.plan.split,
        best.plan.checkpointed,
        best.variants,
    )
    assert [note.kind for note in again.plan.notes].count("variants") == 1


def test_an_interrupt_gives_the_best_plan_so_far():
    def interrupt(progress: Progress) -> None:
        if progress.message.startswith("2 of 3"):
            raise KeyboardInterrupt

    with pytest.raises(TuningInterrupted) as caught:
        tuned("sim:RTX3090", max_batch_size=16, progress=interrupt)
    assert caught.value.plan.checkpointed == ()
    assert not caught.value.plan.complete


def test_what_names_no_layer_of_the_model_is_refused():
    with raises(WorkloadError, "'Tower'", "Sequential"):
        tuned("sim:RTX3090", checkpointing="Tower")
    with raises(WorkloadError, "3"):
        tuned("sim:RTX3090", checkpointing=3)


@pytest.mark.parametrize("odd", [3, (), ("auto", Block), [None]])
def test_what_names_no_layers_is_refused(odd):
    with raises(WorkloadError):
        checkpointing_list(odd)


def one_block() -> Workload:
    """The example's model with one block. Tuning time grows with the number of traced calls."""
    return char_gpt(depth=1)


def quick(given: object, devices: str, **options: object) -> BestPlan:
    """Tune with few trials and without a profile."""
    return tune_best(given, devices=devices, **{"profile": "off", "n_trials": 3, **options})


class TestSeveralPrecisions:
    """RTX 3090s have bfloat16 units, RTX 2080 Ti have none."""

    @pytest.mark.slow
    def test_the_faster_is_the_plan_and_both_are_told_of(self):
        alone = {name: quick(one_block(), "sim:2xRTX3090", precision=name).plan for name in ("none", "bf16")}
        best = quick(one_block(), "sim:2xRTX3090", precision=("none", "bf16"))
        plan = best.plan
        fastest = max(alone, key=lambda name: alone[name].samples_per_s)
        assert plan.precision == fastest
        assert plan.split == alone[fastest].split
        assert [variant.samples_per_s for variant in best.variants] == sorted(
            (one.samples_per_s for one in alone.values()), reverse=True
        )

    @pytest.mark.slow
    def test_bf16_counts_only_where_every_device_has_it(self):
        plan = quick(one_block(), "sim:1xRTX3090+1xRTX2080Ti", precision="none,bf16").plan
        assert plan.precision == "none"
        assert any(note.kind == "precision-left-out" and "RTX2080Ti" in note.text for note in plan.notes)
        assert not any("RTX3090" in str(note) for note in plan.notes if note.kind == "precision-left-out")

    @pytest.mark.parametrize("precision", [("none", "int8"), "none,,bf16", ["none", 3], 7])
    def test_an_unknown_one_among_them_is_refused(self, precision):
        with raises(WorkloadError, "'none', 'bf16', 'fp16'"):
            quick(one_block(), "sim:1xRTX3090", precision=precision)

    @pytest.mark.slow
    def test_the_file_that_is_named_is_of_the_plan_that_is_shown(self):
        """It belonged to the last tuned precision, not to the fastest."""

        def interrupt(progress):
            last = ", precision none: " in progress.message and progress.stage == "search"
            if last and progress.best_samples_per_s is not None:
                raise KeyboardInterrupt

        with pytest.raises(TuningInterrupted) as caught:
            tune_best(one_block(), devices="sim:1xRTX3090", precision=("bf16", "none"), progress=interrupt)
        assert caught.value.plan.precision == "bf16"
        assert Plan.load(caught.value.path).precision == "bf16"


class TestPrecisionsThatDoNotFit:
    """A precision that does not fit made the plan of the others disappear."""

    @staticmethod
    def workload() -> Workload:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        return Workload(
            model,
            torch.randn(4, 64),
            loss_scope="batch",
            optimizer=torch.optim.SGD,
            compute_loss=lambda model, x: model(x).float().pow(2).mean(),
        )

    def test_are_left_out(self):
        plan = quick(self.workload, "sim:1xRTX3090@3900KiB", effective_batch_size=1024, precision="none,bf16").plan
        assert plan.precision == "bf16"
        assert any("precision none is left out: 894 samples" in note.text for note in plan.notes)


def test_the_command_tries_variants_or_lengths_if_it_is_asked_to(monkeypatch, tmp_path, capsys):
    calls = []

    def called(name: str, answer: object) -> object:
        return lambda workload, **keywords: calls.append((name, keywords)) or answer

    plan = made_plan(kind="sim")
    monkeypatch.setattr("autosplit.tools.tune_best.tune_best", called("best", BestPlan(plan, ())))
    monkeypatch.setattr("autosplit.tools.tune_lengths.tune_lengths", called("lengths", plan))
    (tmp_path / "lengths.txt").write_text("8\r\n2\n\n", encoding="utf-8-sig")
    words = ["tune", str(EXAMPLES / "char_gpt.py"), "--devices", "sim:T4", "--json"]
    for flags in (["--precision", "none,bf16"], ["--checkpointing", "Block"], ["--lengths", f"{tmp_path}/lengths.txt"]):
        assert main([*words, *flags]) == 0
    found = [
        (name, {key: keywords[key] for key in keywords if key not in ("devices", "progress")})
        for name, keywords in calls
    ]
    assert found == [
        ("best", {"precision": "none,bf16"}),
        ("best", {"checkpointing": "Block"}),
        ("lengths", {"lengths": [8, 2]}),
    ]


def with_unlike_cards() -> list[str]:
    """Tune for two precisions. Rank 1's GPU lacks units for one of them, which rank 0 cannot know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions, "_has_bf16", lambda _device: os.environ["RANK"] == "0")
        options = {"devices": "cpu:4MiB,cpu:4MiB", "strategy": "ddp", "profile": "off", "n_trials": 1}
        best = tune_best(workload(), precision=("none", "bf16"), max_batch_size=16, **options)
    return [note.text for note in best.plan.notes if "bf16" in note.text]


SCENARIOS = {"unlike cards": with_unlike_cards}
ranks = job_of("test_tune_best", "SCENARIOS", 2)


@pytest.mark.slow
def test_ranks_ask_each_about_its_own_card(ranks):
    """Each rank asked its own cuda:0 about all GPUs, so ranks with different GPUs chose different precisions."""
    for (said,) in found_by(ranks, "unlike cards"):
        assert said.startswith("autosplit did not try bf16, because cpu:1 (cpu) has no native bfloat16")
