"""measure(): it runs one setting as `tune` runs a trial, and explains a setting that cannot run."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from gpus import COUNT, KIND
from noted import kinds
from raised import raises
from torch import nn
from torch.nn import functional as F
from workloads import char_gpt, mlp, net, net_batch, small, with_loss

import autosplit
from autosplit.cli.main import main
from autosplit.errors import InputError, UserCodeError, WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

TWO = "cpu:8MiB,cpu:4MiB"
CARDS = "sim:RTX3090+RTX2080Ti"


def measure(*workload, **options):
    return autosplit.measure(*(workload or (mlp(),)), **options)


@pytest.mark.whole
class TestSimulated:
    @pytest.mark.smoke
    def test_a_plans_split_has_its_trials_rate_and_memory(self):
        plan = autosplit.tune(mlp(), devices=CARDS, effective_batch_size=96, n_trials=3, profile="off")
        found = measure(devices=CARDS, split=plan.split, accumulation_steps=plan.accumulation_steps)
        assert found.samples_per_s == pytest.approx(plan.samples_per_s)
        assert found.peak_bytes == tuple(seat.peak_bytes for seat in plan.main.seats)
        assert found.memory == tuple(seat.memory for seat in plan.main.seats)
        assert (found.simulated, found.spread_s, found.strategy) == (True, 0.0, "balanced")
        assert found.device_names == ("RTX3090", "RTX2080Ti")

    def test_ddp_is_computed_from_its_ranks(self):
        found = measure(devices=CARDS, split=(64, 8), strategy="ddp")
        alone = [measure(devices=f"sim:{name}", split=n) for name, n in (("RTX3090", 64), ("RTX2080Ti", 8))]
        assert found.predicted
        assert found.notes[-1].kind == "ddp-predicted"
        assert found.step_s >= max(one.step_s for one in alone)
        assert all(a >= b.peak_bytes[0] for a, b in zip(found.peak_bytes, alone, strict=True))  # there are buckets
        assert [parts.total_bytes for parts in found.memory] == [*found.peak_bytes]

    def test_what_bounds_it_is_what_it_would_gain_by(self):
        found = measure(devices="sim:2xRTX3090", split=(8, 8))
        gains = {(bound.what, bound.device): bound.gain for bound in found.bound_by}
        assert [*gains.values()] == sorted(gains.values(), reverse=True)
        assert ("copies", None) in gains
        assert "free copies of parameters and gradients (+" in found.faster_with

    def test_one_that_does_not_fit_names_the_device_with_its_bytes(self):
        with pytest.raises(
            DoesNotFitError, match=r"split \(16, 800\) does not fit sim:1 \(RTX3090\)\. Its 800 samples"
        ):
            measure(devices="sim:2xRTX3090@2MiB", split=(16, 800))


class TestReal:
    def test_the_workload_comes_back_untouched(self):
        model, batch = net(), net_batch(6)
        before = copy.deepcopy(model.state_dict())
        state = torch.get_rng_state()
        found = measure(model, batch, loss_fn=F.cross_entropy, devices=TWO, split=(4, 2), accumulation_steps=3)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.training
        assert found.effective_batch_size == 18
        assert 0 < found.update_s < found.step_s
        assert found.samples_per_s == pytest.approx(18 / found.step_s)
        assert (found.simulated, found.predicted) == (False, False)
        # The devices share a CPU, so no single device limits the step.
        assert {bound.device for bound in found.bound_by} == {None}

    @pytest.mark.whole
    def test_a_split_may_be_an_array(self):
        assert measure(devices="sim:2xL4", split=torch.tensor([8, 0])).split == (8, 0)

    def test_ranks_of_one_process_are_run_one_by_one(self):
        found = measure(devices=TWO, split=(16, 8), accumulation_steps=2, strategy="ddp")
        assert found.predicted
        assert min(found.peak_bytes) > 0

    @pytest.mark.parametrize("strategy", ["balanced", "ddp"])
    def test_a_budget_that_is_too_small_is_named(self, strategy):
        with pytest.raises(DoesNotFitError) as caught:
            measure(devices=TWO, split=(16, 2000), strategy=strategy)
        error = caught.value
        assert (error.device, error.device_index, error.capacity_bytes) == ("cpu:1", 1, 4 * 2**20)
        assert error.requested_bytes > error.capacity_bytes
        assert f"need {error.requested_bytes} bytes" in str(error)

    def test_a_plain_processor_is_never_filled(self):
        with pytest.raises(DoesNotFitError, match="does not fit cpu "):
            measure(devices="cpu", split=10**8)


WRONG = {
    "length": (
        {"split": (4, 4, 4)},
        r"split is \(4, 4, 4\)\. Expected one whole number for each of .* as many, or name other devices than ",
    ),
    "nothing": ({"split": (0, 0)}, "has no samples"),
    "negative": ({"split": (4, -1)}, r"split\[1\] is -1"),
    "a rank without samples": ({"split": (4, 0), "strategy": "ddp"}, "at least one sample for each rank"),
    "too many forwards": ({"split": (4, 4), "accumulation_steps": 10**6}, "Expected at most 65536"),
    "strategy": ({"split": (4, 4), "strategy": "fsdp"}, "strategy is 'fsdp'"),
    "too many samples": ({"split": (2**31, 4)}, "at most 2147483647"),
}


class TestWrong:
    @pytest.mark.parametrize("name", WRONG)
    def test_what_is_wrong_is_said_before_anything_runs(self, name):
        options, said = WRONG[name]
        with pytest.raises(InputError, match=said):
            measure(devices=TWO, **options)

    def test_a_batchnorm_needs_two(self):
        with raises(InputError, "2"):
            measure(small(), devices=TWO, split=(3, 1))

    def test_a_loss_over_the_batch_has_one_forward_and_no_ranks(self):
        workload = with_loss(loss_scope="batch")
        with raises(WorkloadError, "2"):
            measure(workload, devices=TWO, split=(4, 4), accumulation_steps=2)
        with raises(WorkloadError):
            measure(workload, devices=TWO, split=(4, 4), strategy="ddp")

    def test_what_the_model_raises_is_the_users(self):
        def only_small(model, batch):
            if len(batch[0]) > 4:
                raise ValueError("boom")
            return F.cross_entropy(model(batch[0]), batch[1])

        with pytest.raises(UserCodeError, match="ValueError: boom"):
            measure(Workload(net(), net_batch(), compute_loss=only_small), devices=TWO, split=(5, 2))

    def test_a_loss_that_takes_other_arguments_is_told_how_it_is_called(self):
        with pytest.raises(UserCodeError, match=r"takes 1 positional argument.*called as loss_fn\(outputs, targets\)"):
            measure(Workload(net(), net_batch(), loss_fn=lambda outputs: outputs.mean()), devices=TWO, split=(5, 2))


class TestCommand:
    @pytest.fixture
    def script(self, tmp_path):
        path = tmp_path / "train.py"
        path.write_text(
            "import torch, autosplit\n"
            "model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 9))\n"
            "workload = autosplit.Workload(model, torch.randn(4, 64), optimizer=torch.optim.AdamW)\n"
        )
        return str(path)

    @pytest.mark.whole
    def test_the_table_and_the_json_say_the_same(self, script, capsys):
        words = ["measure", script, "--devices", CARDS, "--split", "8,4", "--accumulation-steps", "2"]
        assert main(words) == 0
        table = capsys.readouterr().out
        assert main([*words, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["split"], answer["effective_batch_size"]) == ([8, 4], 24)
        assert f"{answer['samples_per_s']:,.0f} samples/s (simulated)" in table
        for word in ("(8, 4)", "parameters", "activations", "faster with", "sim:1 RTX2080Ti"):
            assert word in table

    @pytest.mark.whole
    def test_exit_codes_are_those_of_the_others(self, script, capsys):
        assert main(["measure", script, "--devices", "sim:RTX3090@1MiB", "--split", "800"]) == 3
        assert "does not fit sim:0 (RTX3090)" in capsys.readouterr().err
        assert main(["measure", script, "--split", "4;8"]) == 2
        assert "such as 4,8" in capsys.readouterr().err

    @pytest.mark.slow
    def test_ddp_is_measured_by_a_process_for_each_device(self, capfd):
        words = ["measure", "examples/char_gpt.py", "--devices", "cpu:512MiB,cpu:256MiB", "--strategy", "ddp"]
        assert main([*words, "--split", "8,4", "--accumulation-steps", "2", "--json"]) == 0
        answer = json.loads(capfd.readouterr().out)
        assert (answer["strategy"], answer["predicted"], answer["effective_batch_size"]) == ("ddp", False, 24)
        assert min(answer["peak_bytes"]) > 2**20
        assert main([*words, "--split", "8,4000"]) == 3
        assert "rank 1: split (8, 4000) does not fit cpu:1 (cpu). Its 4000 samples need" in capfd.readouterr().err


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, rows, ends):
        return self.layer(rows).cumsum(0)[ends - 1].square().mean()


def packed_batch(n):
    return {"rows": torch.ones(3 * n, 8), "ends": 3 * torch.arange(1, n + 2).clamp(max=n)}


@pytest.mark.gpu
class TestAccelerators:
    def test_each_device_holds_its_part(self):
        found = measure(char_gpt(), devices=KIND, split=(4,) * COUNT, accumulation_steps=3)
        assert found.effective_batch_size == 12 * COUNT
        assert (found.simulated, found.predicted, len(found.peak_bytes)) == (False, False, COUNT)
        assert 0 < found.update_s < found.step_s
        assert all(0 < peak <= most for peak, most in zip(found.peak_bytes, found.capacity_bytes, strict=True))

    def test_too_large_a_share_is_named(self):
        split = (*(4,) * (COUNT - 1), 2**22)
        with pytest.raises(DoesNotFitError, match=f"does not fit {KIND}:{COUNT - 1}"):
            measure(mlp(), devices=KIND, split=split, reserve=0.9)

    @pytest.mark.parametrize("isolate", [False, True])
    def test_ranks_are_run_one_by_one(self, isolate):
        found = measure(mlp(), devices=KIND, split=(4,) * COUNT, strategy="ddp", isolate=isolate)
        assert found.predicted == (COUNT > 1)
        assert min(found.peak_bytes) > 0

    def test_ranks_with_batchnorm_get_two_samples_in_every_step(self):
        """The step that times the copies between devices had 1 sample per device, and BatchNorm raised an error."""
        assert measure(small(), devices=KIND, split=(4,) * COUNT, strategy="ddp").split == (4,) * COUNT

    @pytest.mark.parametrize("isolate", [False, True])
    def test_ranks_train_on_batches_that_cannot_be_cut(self, isolate):
        """A step of all devices timed the copies, but no wrapper can cut a packed batch. DDP does not cut it."""
        workload = Workload(
            Packed(), make_batch=packed_batch, sample_batch=packed_batch(4), optimizer=torch.optim.AdamW
        )
        found = measure(workload, devices=KIND, split=(4,) * COUNT, strategy="ddp", isolate=isolate)
        assert min(found.peak_bytes) > 0
        assert ("copies-not-timed" in kinds(found.notes)) == (COUNT > 1)
