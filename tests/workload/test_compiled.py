"""Compiled models are tuned in their eager form, run once compiled, and stay unchanged."""

from __future__ import annotations

import copy
import csv
import statistics
from pathlib import Path

import pytest
import torch
from marks import for_release, whole
from raised import raises
from torch import nn
from torch.nn import functional as F

from autosplit import BalancedDataParallel, find_ceiling, measure, tune
from autosplit.errors import InputError, WorkloadError
from autosplit.profiles.key import workload_of
from autosplit.workload.compiled import (
    COMPILED_TIMES,
    FUSED_SHARE,
    CompiledTimes,
    eager_of,
    has_compiled_parts,
    is_compiled,
    with_eager_parts,
)
from autosplit.workload.workload import Workload

ROOT = Path(__file__).parents[2]
BATCH = (torch.randn(4, 8), torch.randint(0, 3, (4,)))


def net():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


def compiled():
    return torch.compile(net(), backend="eager")


def in_place():
    module = net()
    module.compile(backend="eager")
    return module


class Stateful(nn.Sequential):
    """Its copies have all its attributes, as a LightningModule's copies."""

    def __getstate__(self):
        return dict(vars(self))


def in_place_and_stateful():
    module = Stateful(*net())
    module.compile(backend="eager")
    return module


def in_part():
    module = net()
    module[0] = torch.compile(module[0], backend="eager")
    return module


SIM, CPU = "sim:2xRTX3090", "cpu:4MiB,cpu:2MiB"
COMPILED = {"whole": compiled, "in_place": in_place, "stateful": in_place_and_stateful, "in_part": in_part}


@pytest.mark.parametrize("name", COMPILED)
def test_are_recognised(name):
    module = COMPILED[name]()
    assert has_compiled_parts(module)
    assert is_compiled(module) == (name != "in_part")
    assert not has_compiled_parts(net())


@pytest.mark.parametrize("name", COMPILED)
def test_a_copy_is_eager_and_the_original_stays(name):
    module = COMPILED[name]()
    eager = with_eager_parts(copy.deepcopy(module))
    assert not has_compiled_parts(eager)
    assert has_compiled_parts(module)
    assert torch.equal(eager(BATCH[0]), module(BATCH[0]))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        {("whole", SIM): whole, ("in_part", CPU): pytest.param}.get((name, devices), for_release)(name, devices)
        for name in COMPILED
        for devices in (SIM, CPU)
    ],
)
def test_are_tuned_in_their_eager_form_and_it_is_said(name, devices):
    """A compiled model raised an error with the advice to wrap the eager model, before the user wrapped anything."""
    model = COMPILED[name]()
    before = copy.deepcopy(eager_of(model).state_dict())
    plan = tune(model, BATCH, loss_fn=F.cross_entropy, devices=devices, max_batch_size=16, n_trials=2, profile="off")
    (said,) = [note for note in plan.notes if note.kind == "compiled"]
    if devices.startswith("sim"):
        assert said.text.startswith("autosplit assumes that torch.compile fuses all kernels except matrix products")
        assert "compiled transformers in 16 bits took" in said.text
    else:
        assert "those of the uncompiled model" in said.text
    assert has_compiled_parts(model)
    assert all(torch.equal(before[key], value) for key, value in eager_of(model).state_dict().items())


@pytest.mark.parametrize("kind", sorted(COMPILED_TIMES))
def test_published_times_are_those_of_the_table(kind):
    with (ROOT / "benchmarks" / "compiled.csv").open(encoding="utf-8") as file:
        pairs = [row for row in csv.DictReader(file) if row["kind"] == kind]
    assert pairs
    assert {row["precision"].split()[0] for row in pairs} <= {"bf16", "fp16"}
    ratios = [float(row["compiled_s"]) / float(row["eager_s"]) for row in pairs]
    found = (round(number, 2) for number in (min(ratios), statistics.median(ratios), max(ratios)))
    assert CompiledTimes(len(pairs), *found) == COMPILED_TIMES[kind]


@pytest.mark.whole
def test_a_compiled_transformer_is_predicted_faster_with_the_same_products():
    """Published steps of compiled GPTs took half of the time that was predicted for eager ones."""
    layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True, dropout=0.0)
    batch = torch.randn(8, 32, 64), torch.randn(8, 32, 64)

    def seconds(model: nn.Module) -> float:
        return measure(model, batch, F.mse_loss, devices="sim:H100-80GB", split=512).step_s

    eager_s, compiled_s = seconds(layer), seconds(torch.compile(copy.deepcopy(layer), backend="eager"))
    assert FUSED_SHARE * eager_s < compiled_s < 0.9 * eager_s


def test_a_ceiling_of_one():
    workload = Workload(compiled(), BATCH, loss_fn=F.cross_entropy)
    eager = Workload(net(), BATCH, loss_fn=F.cross_entropy)
    assert find_ceiling(workload, "cpu:1MiB").batch_size == find_ceiling(eager, "cpu:1MiB").batch_size


@pytest.mark.parametrize("name", COMPILED)
def test_the_plan_of_one_is_found_again(name):
    """The profile was never found, because torch numbers compiled models by their memory address."""
    first, second = COMPILED[name](), COMPILED[name]()  # both are kept, so they have different addresses
    described, again, eager = (workload_of(Workload(model, BATCH[0])) for model in (first, second, net()))
    assert described == again
    assert described != eager


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "compile_it", [torch.jit.script, for_release(lambda module: torch.jit.trace(module, BATCH[0]))]
)
def test_one_of_torchscript_is_refused_by_name(compile_it):
    """The error came from a missing method of TorchScript's: 'OrderedModuleDict' object has no attribute 'get'."""
    whole, part = compile_it(net()), nn.Sequential(net(), compile_it(nn.Linear(8, 8)))
    for devices in ("sim:2xRTX3090", "cpu:1MiB"):
        with raises(WorkloadError):
            tune(whole, BATCH[0], devices=devices)
    with raises(WorkloadError):
        tune(part, BATCH[0], devices="cpu:1MiB")
    with raises(InputError):
        BalancedDataParallel(2, whole, ["cpu", "cpu"])
