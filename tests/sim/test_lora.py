from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import EXAMPLES, ROOT
from raised import raises
from torch import nn

from autosplit import BalancedDataParallel, find_ceiling, workload_from_name
from autosplit.cli.main import main
from autosplit.errors import InputError, WorkloadError
from autosplit.runtime.protocol import StepShape
from autosplit.sim.lora import Lora
from autosplit.sim.tracer import Tracer

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 32,
}


@pytest.fixture
def tiny(tmp_path):
    pytest.importorskip("peft", reason="needs peft (the extra `peft`)")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"hf:{tmp_path}"


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("text", ["r=0", "rank=4", "quantize=int3", "targets="])
def test_wrong_settings_are_refused(text):
    with raises(InputError):
        Lora.of(text)


def test_frozen_weights_have_neither_gradients_nor_optimizer_state(tiny):
    """Measured where the step is largest: at the update, because one short sample has few activations."""
    workload = workload_from_name(tiny, lora="r=8,targets=all-linear", seq_len=2)
    parts = Tracer(workload, fake=True, like_gpu=True).trace(StepShape(((1,),))).parts[0]
    model = workload.model
    assert isinstance(model, nn.Module)
    state_bytes = sum(2 * -(-p.nbytes // 512) * 512 for p in trained(model))  # the step count is on the host
    assert parts.optimizer_bytes == state_bytes
    assert sum(-(-p.nbytes // 512) * 512 for p in trained(model)) == parts.gradients_bytes
    assert parts.gradients_bytes < parts.parameters_bytes / 3


def test_the_ceiling_is_exact_to_the_sample(tiny):
    """Real steps on a CPU device with a memory budget. One sample more runs out of memory."""
    workload = workload_from_name(tiny, lora="r=8,targets=all-linear", seq_len=16)
    found = find_ceiling(workload, "cpu:12MiB", exact=True)
    assert found.confirmed
    assert found.limited_by == "memory"
    model = workload.model
    fixed_bytes = sum(p.nbytes for p in model.parameters()) + 3 * sum(p.nbytes for p in trained(model))
    assert 1.0 < found.fixed_bytes / fixed_bytes < 1.3


def test_quantised_weights_take_the_bytes_of_nf4(tiny):
    peaks = {}
    for settings in ("r=8,targets=all-linear", "r=8,targets=all-linear,quantize=nf4"):
        workload = workload_from_name(tiny, lora=settings, optimizer="adamw_8bit", seq_len=2)
        trace = Tracer(workload, fake=True, like_gpu=True).trace(StepShape(((1,),)))
        peaks[settings[-4:]] = trace.parts[0].parameters_bytes
    inner = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    saved_bytes = inner * (4 - 0.5 - 1 / 64)
    # Each layer has four small tensors more: the steps, the mean, the code, and the rounding of the scales.
    assert saved_bytes - 14 * 4 * 512 < peaks["near"] - peaks["=nf4"] < saved_bytes


def test_the_command_line_takes_both_options(tiny, capsys):
    words = ["probe", tiny, "--devices", "sim:RTX3090", "--max-batch-size", "8", "--seq-len", "8", "--json"]
    assert main([*words, "--lora", "r=4,quantize=nf4", "--optimizer", "adamw_8bit"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert "LoRA of rank 4" in json.dumps(out)
    assert "NF4" in json.dumps(out)
    assert main([*words, "--optimizer", "adam8"]) == 2


def test_layers_that_do_not_exist_are_refused(tiny):
    with raises(WorkloadError, "all-linear"):
        workload_from_name(tiny, lora="targets=nowhere")


def test_a_missing_peft_names_the_command(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises(WorkloadError, "package-missing", "pip install peft"):
        workload_from_name(tiny, lora="r=4")


def test_an_image_classifier_takes_no_adapters():
    with raises(InputError):
        workload_from_name("torchvision:resnet18", lora="r=4")


# The same training on two devices


def adapted() -> nn.Module:
    """Return a small model in float64 with adapters whose product is not zero."""
    import peft

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    model: nn.Module = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["0", "2"])).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, width, dtype=torch.float64, generator=generator) for width in (5, 1))


def stepped_alone() -> list[torch.Tensor]:
    model, (inputs, targets) = adapted(), data()
    (model(inputs) - targets).square().mean().backward()
    torch.optim.SGD(trained(model), lr=0.1).step()
    return [parameter.detach() for parameter in model.parameters()]


def test_two_devices_train_as_one():
    pytest.importorskip("peft")
    model, (inputs, targets) = adapted(), data()
    wrapped = BalancedDataParallel(6, model, device_ids=["cpu", "cpu"])
    (wrapped(inputs) - targets).square().mean().backward()
    assert all((p.grad is None) is not p.requires_grad for p in model.parameters())
    torch.optim.SGD(trained(model), lr=0.1).step()
    for found, expected in zip(model.parameters(), stepped_alone(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    pytest.importorskip("peft")
    environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(EXAMPLES / "train_lora.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
