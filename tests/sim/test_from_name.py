from __future__ import annotations

import json
import math
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marks import for_release
from raised import raises
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.cli.main import main
from autosplit.cli.workload_arguments import built_workload, workload_of_spec
from autosplit.errors import InputError, WorkloadError
from autosplit.profiles.key import workload_of
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.from_name import workload_from_name
from autosplit.workload.model_call import assumptions, training_loss
from autosplit.workload.workload import Workload

TEXT = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {
    **TEXT,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
}
CONFIGS = {
    "gpt2": {
        **TEXT,
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 40,
    },
    "bert": {**SMALL, "model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "roberta": {**SMALL, "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"]},
    "llama": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"},
    "vit": {
        **{key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")},
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": 32,
        "patch_size": 8,
        "id2label": {"0": "cat", "1": "dog", "2": "hare"},
    },
    "t5": {
        **TEXT,
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "decoder_start_token_id": 0,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    },
}


@pytest.fixture
def save(tmp_path):
    """Write a config.json with changed values or any text. Return the spec that names it."""

    def write(known="gpt2", folder="model", **changed):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = known if known not in CONFIGS else json.dumps({**CONFIGS[known], **changed})
        (tmp_path / folder / "config.json").write_text(text)
        return f"hf:{tmp_path / folder}"

    return write


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def loss_of(workload: Workload) -> float:
    loss = training_loss(workload, workload.model, workload.sample_batch)
    loss.backward()
    assert all(p.grad is not None for p in workload.model.parameters() if p.requires_grad)
    return loss.item()


# transformers


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    ("known", "options", "shape", "labels", "chance"),
    [
        ("gpt2", {}, (4, 40), (4, 40), 60),
        ("bert", {"seq_len": 12}, (4, 12), (4, 12), 60),
        ("roberta", {}, (4, 37), (4,), 2),  # positions begin after the padding's
        ("llama", {"seq_len": 16}, (4, 16), (4, 16), 60),
        ("t5", {"seq_len": 8}, (4, 8), (4, 8), None),
        ("vit", {}, (4, 3, 32, 32), (4,), 3),
        for_release("gpt2", {"task": "token-classification"}, (4, 40), (4, 40), 2),
    ],
)
def test_a_configuration_has_a_batch_and_a_loss(save, known, options, shape, labels, chance):
    pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
    workload = workload_from_name(save(known), **options)
    inputs = workload.sample_batch["pixel_values" if known in ("vit", "resnet") else "input_ids"]
    assert tuple(inputs.shape) == shape
    assert tuple(workload.sample_batch["labels"].shape) == labels
    assert workload.optimizer is torch.optim.AdamW
    # A guess of a model with random weights, among many classes.
    loss = loss_of(workload)
    assert math.isfinite(loss)
    assert chance is None or loss == pytest.approx(math.log(chance), rel=0.5)


@pytest.fixture
def hub():
    return pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("dtype", "weights", "said"),
    [
        ("bfloat16", torch.bfloat16, "weights, gradients and optimizer states are bfloat16, as in config.json"),
        (
            "float16",
            torch.bfloat16,
            "config.json has float16 weights, which diverge in training. The plan assumes bfloat16",
        ),
        (None, torch.float32, "The plan assumes sequences of 40 tokens"),
    ],
)
def test_weights_are_of_the_dtype_that_the_configuration_says(save, dtype, weights, said):
    workload = workload_from_name(save("llama", torch_dtype=dtype))
    assert {p.dtype for p in workload.model.parameters()} == {weights}
    assert workload.assumed[0].startswith(said)
    assert len(workload.assumed) == (1 if dtype is None else 2)


@pytest.mark.usefixtures("hub")
def test_the_key_is_that_of_the_name_and_its_options(save, tmp_path):
    spec = save()
    first = workload_of(workload_from_name(spec, seq_len=16))
    (tmp_path / "elsewhere").mkdir()
    again = workload_of(workload_from_name(save(folder="elsewhere"), seq_len=16))
    fake = workload_of(built_without_memory(lambda: workload_from_name(spec, seq_len=16), fake_mode()))
    assert first == again == fake
    assert first != workload_of(workload_from_name(spec, seq_len=17))
    assert first != workload_of(workload_from_name(save(vocab_size=61), seq_len=16))


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.usefixtures("hub")
def test_the_key_is_the_same_in_every_process(save):
    """transformers was treated as the user's code, and a random number of each process was in the key."""
    code = (
        "from autosplit.profiles.key import workload_of; from autosplit.sim.from_name import workload_from_name\n"
        f"print(workload_of(workload_from_name({save()!r})))"
    )
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert said[0] == said[1] != b""


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_seven_billion_parameters_take_no_memory(tmp_path):
    large = {**CONFIGS["llama"], "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**large, "num_attention_heads": 32, "num_hidden_layers": 32}))
    workload = built_without_memory(lambda: workload_from_name(f"hf:{tmp_path}/config.json"), fake_mode())
    parameters = list(workload.model.parameters())
    assert sum(p.numel() for p in parameters) == 6_738_415_616
    assert all(isinstance(p, FakeTensor) for p in parameters)


@pytest.mark.usefixtures("hub")
def test_the_hub_is_offline_while_a_model_is_built_and_not_afterwards(save, monkeypatch):
    from huggingface_hub import constants
    from transformers import AutoModelForCausalLM

    seen = []
    build = AutoModelForCausalLM.from_config
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_config",
        lambda *args, **kwargs: (seen.append(constants.HF_HUB_OFFLINE), build(*args, **kwargs))[1],
    )
    workload_from_name(save())
    assert seen == [True]
    assert constants.HF_HUB_OFFLINE is False


# Errors


@pytest.mark.usefixtures("hub", "_no_network")
@pytest.mark.parametrize(
    ("known", "changed", "options", "said"),
    [
        ("{", {}, {}, r"config\.json is not JSON: JSONDecodeError: "),
        ("[1]", {}, {}, "has no model_type. Expected a config.json that transformers saved"),
        (
            "gpt2",
            {"model_type": "gpt3"},
            {},
            r"model type 'gpt3', which this version of transformers does not have. .*gpt2",
        ),
        ("gpt2", {"n_embd": "wide"}, {}, r"is not a configuration of a gpt2: .*. Expected a file"),
        ("gpt2", {"n_layer": 10**9}, {}, "has 1000000000 layers. Expected at most 10000"),
        ("gpt2", {"architectures": ["GPT9"]}, {}, "the architecture 'GPT9'. Expected an architecture for causal-lm or"),
        ("gpt2", {}, {"task": "poetry"}, "task is 'poetry'. Expected one of causal-lm, "),
        ("gpt2", {"model_type": "wav2vec2"}, {}, "wav2vec2, which has none of the tasks"),
        ("gpt2", {}, {"seq_len": 41}, "seq_len 41 is more than the 40 positions of .*. Pass a smaller"),
        ("roberta", {}, {"seq_len": 38}, "seq_len 38 is more than the 37 positions"),
        ("vit", {}, {"seq_len": 8}, "seq_len can't be set for .*, because it is an image classifier"),
        ("vit", {}, {"image_size": 48}, r"can't use images of 48 x 48 pixels: ValueError: .*such as its own, 32 x 32"),
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            {},
            r"has quantised weights \(bitsandbytes\). autosplit can predict neither their memory nor their time",
        ),
    ],
)
def test_what_can_not_be_built_is_refused_on_one_line(save, known, changed, options, said):
    with pytest.raises(InputError, match=said) as caught:
        workload_from_name(save(known, **changed), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hub", "_no_network")
def test_code_of_a_configurations_own_is_not_run(save, tmp_path):
    spec = save("llama", auto_map={"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modelling.Own"})
    ran = tmp_path / "ran"
    for name in ("configuration", "modelling"):
        (tmp_path / "model" / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')")
    with raises(InputError):
        workload_from_name(spec)
    assert not ran.exists()


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    "spec",
    [
        "hf:meta-llama/Llama-2-7b",
        "hf:/dev/zero",
        f"hf:{'a' * 5000}",
        "keras:vgg",
    ],
)
def test_what_is_not_there_is_not_looked_for_elsewhere(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(InputError):
        workload_from_name(spec)


@pytest.mark.usefixtures("hub", "_no_network")
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_kernels_from_the_hub_are_not_asked_for(save, name):
    workload = workload_from_name(save("llama", **{name: "someone/flash"}))
    assert workload.model.config._attn_implementation == "sdpa"


# Classifiers


TIMM = """\
import torch
from torch import nn

class Net(nn.Module):
    num_classes = 7
    pretrained_cfg = {"input_size": (3, 24, 24)}
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 24 * 24, 7)
    def forward(self, x):
        return self.head(x.flatten(1))

def list_models():
    return ["resnet18", "resnet50"]

def is_model(name):
    return name.partition(".")[0] in list_models()

def create_model(name, pretrained):
    assert pretrained is False
    return Net()
"""
TORCHVISION = """\
import sys
from types import SimpleNamespace
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Conv2d(3, 4, 3), nn.ModuleList([nn.Linear(4, 1000), nn.Linear(4, 1000)])
    def forward(self, x):
        return tuple(head(self.body(x).mean((2, 3))) for head in self.heads)

def get_model(name, weights):
    assert weights is None
    return Net()

def get_model_weights(name):
    return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=[20])))

def list_models(module):
    return ["googlenet"] if module is models else ["googlenet", "maskrcnn"]

models = sys.modules[__name__]
"""


@pytest.fixture
def _classifiers(tmp_path, monkeypatch):
    """Replace the two libraries by modules with the parts that are used."""
    for name, text in {"timm": TIMM, "torchvision": TORCHVISION}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("timm", "torchvision"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_classifiers")
def test_classifiers_have_images_and_a_loss():
    workload = workload_from_name("timm:resnet18.tag")
    assert tuple(workload.sample_batch[0].shape) == (4, 3, 24, 24)
    (assumed,) = assumptions(workload)
    assert (assumed.kind, "24 x 24" in assumed.text) == ("assumed", True)
    assert loss_of(workload) == pytest.approx(math.log(7), rel=0.3)
    workload = workload_from_name("torchvision:googlenet", image_size=28)
    assert tuple(workload.sample_batch[0].shape) == (4, 3, 28, 28)
    assert loss_of(workload) == pytest.approx(2 * math.log(1000), rel=0.1)  # with that of its second head
    assert workload.model.training
    assert assumptions(workload) == ()


@pytest.mark.usefixtures("_classifiers")
@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("timm:resnet51", {}, "timm has no model 'resnet51'. Expected one of its 2. The nearest are resnet50"),
        (5, {}, "'?5'? names no model. Expected hf:PATH of a config.json, timm:NAME or torchvision:NAME"),
        ("timm:resnet18", {"image_size": 32}, r"timm:resnet18 can't use images of 32 x 32 pixels: .*its own, 24 x 24"),
        ("torchvision:maskrcnn", {}, "torchvision has no classifier 'maskrcnn'. Expected one of its 1. Check its"),
    ],
)
def test_unknown_classifiers_and_sizes_are_refused(spec, options, said):
    with pytest.raises(InputError, match=said):
        workload_from_name(spec, **options)


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_library_that_is_not_there_is_named(library, save, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    spec = save() if library == "transformers" else f"{library}:resnet18"
    with raises(WorkloadError, "package-missing", str(library)):
        workload_from_name(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["timm:resnet18", "torchvision:googlenet"])
def test_the_libraries_own_classifiers_have_a_loss(spec):
    pytest.importorskip(spec.partition(":")[0])
    assert math.isfinite(loss_of(workload_from_name(spec)))


# The command line


@pytest.mark.usefixtures("hub")
def test_what_is_named_travels_and_is_built_where_it_arrives(save, tmp_path, monkeypatch):
    save()
    monkeypatch.chdir(tmp_path)
    found = workload_of_spec("hf:model", seq_len=8)
    sent = pickle.dumps(found)
    assert len(sent) < 500
    monkeypatch.chdir("/")
    assert tuple(pickle.loads(sent)().sample_batch["input_ids"].shape) == (4, 8)
    assert isinstance(built_workload(f"hf:{tmp_path}/model"), Workload)


def test_the_old_method_names_the_new_function():
    with pytest.raises(InputError, match=r"'timm:resnet18'\) was removed. Use autosplit\.workload_from_name"):
        Workload.from_name("timm:resnet18", image_size=32)


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_every_command_takes_a_name(save, capsys):
    spec = save()
    cards = ["--devices", "sim:2xA100-40GB"]
    for words in (
        ["tune", spec, *cards, "--n-trials", "2"],
        ["probe", spec, *cards, "--max-batch-size", "8"],
        ["compare", spec, *cards, "--n-trials", "2"],
        ["check", spec],
    ):
        assert main([*words, "--seq-len", "8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert main(["check", str(Path(__file__)), "--image-size", "8"]) == 2
    assert "image_size can't be set for" in capsys.readouterr().err
