"""Plans for models that fit no single device: the batch sizes of sharded ranks, from simulated steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raised import raises
from shared_training import shares_plan
from torch import nn

from autosplit import Plan, Workload, ddp, tune, tune_sharded
from autosplit.errors import ArgumentError, DeviceError, InputError
from autosplit.oom import DoesNotFitError
from autosplit.text import parse_bytes
from autosplit.tools.tune_sharded import GAPS

SIZE, LAYERS, MIB = 1024, 8, 2**20
PARAMETERS = 4 * LAYERS
"""MiB of parameters: each layer has 4 MiB."""

WORKSPACE = 16
"""MiB of cuBLAS workspaces on an RTX 3090."""

FITS_NOT = "150MiB"
"""Memory of a GPU that fits a sharded model. A whole one needs 160 MiB for its state, and 24 MiB for workspaces."""


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE, bias=False)


def make_model() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def make_workload() -> Workload:
    return Workload(
        make_model, (torch.randn(4, SIZE), torch.randn(4, SIZE)), nn.functional.mse_loss, optimizer=torch.optim.AdamW
    )


def sharded(memory: str, **options: object) -> Plan:
    given = {"layers": Layer, "effective_batch_size": 64, **options}
    return tune_sharded(make_workload, devices=f"sim:2xRTX3090@{memory}", **given)


def kinds_of(plan: Plan) -> list[str]:
    return [note.kind for note in plan.notes]


class TestModelsThatDoNotFit:
    @pytest.mark.parametrize("devices", [f"sim:2xRTX3090@{FITS_NOT}", "sim:8xRTX3090@62MiB"])
    def test_the_memory_is_that_of_large_gpus(self, devices):
        """In 150 MiB the tuning fails. In 62 MiB not even parameters and gradients fit, so it is not tried."""
        plan, large = (
            tune_sharded(make_workload, devices=spec, layers=Layer, effective_batch_size=64, shard_size=int(spec[4]))
            for spec in (devices, devices.partition("@")[0])
        )
        for own, other in zip(plan.ddp.seats, large.ddp.seats, strict=True):
            assert own.peak_bytes == other.peak_bytes <= own.ceiling.capacity_bytes
            assert own.ceiling.capacity_bytes == parse_bytes(devices.partition("@")[2])
        assert "sharded-simulated" in kinds_of(plan)
        assert "sharded-simulated" not in kinds_of(large)
        assert "The whole model does not fit." in plan.notes[-2].text
        assert "Ranks with whole models train" in large.notes[-2].text

    def test_the_ceiling_fills_the_devices_own_memory(self):
        plan = sharded(FITS_NOT, effective_batch_size=20_000)
        for rank in plan.ddp.seats:
            ceiling = rank.ceiling
            assert ceiling.limited_by == "memory"
            assert ceiling.bytes_per_sample >= 4 * SIZE * LAYERS  # the output of each layer
            room_bytes = 0.99 * (1 - GAPS) * 150 * MIB
            assert ceiling.bytes_at(ceiling.batch_size) <= room_bytes < ceiling.bytes_at(ceiling.batch_size + 1)
        assert plan.effective_batch_size == 20_000

    def test_the_plan_is_for_the_devices_that_were_given(self):
        plan = sharded(FITS_NOT)
        assert [device.label for device in plan.devices] == ["sim:0", "sim:1"]
        assert [device.memory_bytes for device in plan.devices] == [150 * MIB] * 2
        assert plan.machine["devices"][0]["capacity_bytes"] == 150 * MIB
        assert plan.ddp.shard_size == 2
        assert not plan.ddp.measured
        assert plan.path is None
        assert Plan.from_json(plan.to_json()) == plan
        with raises(DeviceError), ddp.setup(plan):
            pass

    def test_the_reserve_counts_once(self):
        """The simulated GPUs with more memory kept it free, too."""
        plan = sharded("170MiB", reserve="20MiB")
        assert {rank.ceiling.capacity_bytes for rank in plan.ddp.seats} == {150 * MIB}
        assert plan.ddp.seats[0].peak_bytes == sharded(FITS_NOT).ddp.seats[0].peak_bytes

    def test_a_cpu_can_not_be_simulated(self):
        with raises(DoesNotFitError, "take 64 MiB, and cpu:0 has 60 MiB"):
            tune_sharded(make_workload, devices="cpu:60MiB,cpu:60MiB", layers=Layer, effective_batch_size=64)


def test_a_plan_that_was_made_elsewhere():
    whole = tune(make_workload, devices="sim:2xRTX3090@1GiB", strategy="ddp", effective_batch_size=64)
    found = tune_sharded(make_workload, layers=Layer, plan=whole)
    assert found.ddp == sharded("1GiB").ddp
    assert found.ddp.shard_size == 2


@pytest.mark.usefixtures("exact_allocator")
def test_the_activations_are_traced_and_not_those_of_the_update():
    """The plan's own ceilings had no bytes per sample: a whole rank needs the most memory in its update."""
    whole = tune(make_workload, devices="sim:2xRTX3090@1GiB", strategy="ddp", effective_batch_size=64)
    assert whole.ddp.seats[0].ceiling.bytes_per_sample == 0
    assert sharded("1GiB").ddp.seats[0].ceiling.bytes_per_sample >= 4 * SIZE * LAYERS


class TestParamDtype:
    def test_only_the_shards_keep_the_dtype_of_the_parameters(self):
        full, half = sharded("1GiB"), sharded("1GiB", param_dtype=torch.bfloat16)
        shards = 4 * PARAMETERS / 2
        sizes = [plan.ddp.seats[0].ceiling.fixed_bytes / MIB - shards - WORKSPACE for plan in (full, half)]
        assert sizes[0] == pytest.approx(2 * 4 + 2 * 4 + 4, abs=0.5)  # see Note [Memory of a sharded model], 1 gradient
        assert sizes[1] == pytest.approx(sizes[0] / 2, abs=0.5)
        ratio = half.ddp.seats[0].ceiling.bytes_per_sample / full.ddp.seats[0].ceiling.bytes_per_sample
        assert 0.5 <= ratio < 0.8
        assert half.samples_per_s > full.samples_per_s

    @pytest.mark.parametrize("given", ["model", "workload", "function"])
    def test_the_model_stays_unchanged(self, given):
        model = make_model()
        before = [parameter.clone() for parameter in model.parameters()]
        workload = replace(make_workload(), model=model)
        batch = (workload.sample_batch, workload.loss_fn) if given == "model" else ()
        what = {"model": model, "workload": workload, "function": lambda: workload}[given]
        plan = tune_sharded(
            *(what, *batch),
            devices="sim:2xRTX3090@1GiB",
            layers=Layer,
            param_dtype=torch.bfloat16,
            effective_batch_size=64,
        )
        assert plan.ddp.shard_size == 2
        assert all(map(torch.equal, model.parameters(), before))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert not model._forward_pre_hooks

    def test_tied_parameters_stay_tied(self):
        """Cast one by one, a shared parameter would become two."""
        from autosplit.tools.tune_sharded import _cast_model

        model = make_model()
        model[1].weight = model[0].weight
        cast = _cast_model(model, torch.bfloat16)
        assert cast[1].weight is cast[0].weight
        assert len([*cast.parameters()]) == LAYERS - 1
        assert cast(torch.ones(1, SIZE)).dtype is torch.bfloat16


class TestRefusals:
    def test_an_option_that_does_not_apply(self):
        with raises(InputError, "strategy="):
            tune_sharded(make_workload, devices="sim:2xRTX3090", strategy="balanced")

    @pytest.mark.parametrize(
        ("option", "meant"), [("shardsize", "Use shard_size"), ("effective_batchsize", "Use effective_batch_size")]
    )
    def test_an_unknown_keyword(self, option, meant):
        """It may be misspelled from an argument of tune_sharded or of tune."""
        with raises(ArgumentError, f"{option}= is not", "tune_sharded()", meant):
            tune_sharded(make_workload, **{option: 2})

    @pytest.mark.parametrize("dtype", ["bf16", torch.int8])
    def test_a_param_dtype_that_can_not_be_trained(self, dtype):
        with raises(InputError, "Expected a floating-point dtype"):
            tune_sharded(make_workload, devices="sim:2xRTX3090", param_dtype=dtype)

    def test_a_number_of_ranks_to_reshard_to(self):
        """FSDP2 takes this number, and then keeps larger shards after the forward. The prediction lacks them."""
        with raises(InputError, "reshard_after_forward is 2"):
            tune_sharded(make_workload, devices="sim:4xRTX3090", reshard_after_forward=2)

    @pytest.mark.parametrize("size", [3, True])
    def test_a_shard_size_is_refused_before_the_tuning(self, size, monkeypatch):
        monkeypatch.setattr("autosplit.tools.tune_sharded._whole_plan", pytest.fail)
        with raises(InputError, f"shard_size is {size!r}. Expected one of [2]"):
            sharded("1GiB", shard_size=size)

    @pytest.mark.parametrize("layers", ["Layer", [Layer], (Layer, "Layer"), make_model(), 3])
    def test_layers_that_are_no_class(self, layers):
        with raises(InputError, "Pass the class itself"):
            sharded("1GiB", layers=layers)

    def test_lazy_parameters(self):
        model = nn.Sequential(nn.LazyLinear(SIZE))
        with raises(InputError, "has lazy parameters, which have no shape until the model has run once: 0.weight"):
            tune_sharded(model, torch.randn(4, SIZE), devices="sim:2xRTX3090")

    @pytest.mark.parametrize("given", ["workload", "keyword"])
    def test_an_optimizer_of_the_parameters_before_the_cast(self, given):
        workload = replace(make_workload(), model=make_model())
        optimizer = torch.optim.SGD(workload.model.parameters())
        what, options = {
            "workload": ((replace(workload, optimizer=optimizer),), {}),
            "keyword": ((workload.model, workload.sample_batch, workload.loss_fn), {"optimizer": optimizer}),
        }[given]
        with raises(InputError, "The optimizer is a SGD object"):
            tune_sharded(*what, devices="sim:2xRTX3090", param_dtype=torch.bfloat16, **options)

    @pytest.mark.parametrize("option", [{"devices": "sim:4xRTX3090"}, {"reserve": 0.1}, {"effective_batch_size": 8}])
    def test_an_option_that_a_given_plan_would_ignore(self, option):
        with raises(InputError, f"{next(iter(option))}=", "was passed with plan="):
            tune_sharded(make_workload, plan=shares_plan((8, 8), 64), **option)

    def test_a_job(self, monkeypatch):
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        with raises(InputError):
            tune_sharded(make_workload, devices="sim:2xRTX3090")
