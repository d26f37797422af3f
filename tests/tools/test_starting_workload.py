"""`autosplit init`: a workload file for the model in a user's file, with a batch that the model takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autosplit.cli.main import main
from autosplit.errors import InputError
from autosplit.tools.starting_workload import write_workload
from autosplit.workload.from_file import load_workload
from autosplit.workload.model_call import training_loss

HEAD = "import torch\nfrom torch import nn\n\n"
BLOCK = "class Block(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n\n"


def a_class(name: str, layers: str, forward: str) -> str:
    init = "".join(f"        self.{line}\n" for line in layers.splitlines())
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
        f"    def forward(self, x):\n        return {forward}\n\n\n"
    )


CNN = a_class("CNN", "conv = nn.Conv2d(3, 4, 3)\nhead = nn.Linear(4, 10)", "self.head(self.conv(x).mean((2, 3)))")
SMALL = a_class("Small", "flat = nn.Linear(784, 5)\nconv = nn.Conv2d(1, 1, 1)", "self.flat(self.conv(x).flatten(1))")
GPT = a_class(
    "GPT",
    "wide = nn.Embedding(50, 8)\nat = nn.Embedding(16, 8)\nhead = nn.Linear(8, 50)",
    "self.head(self.wide(x) + self.at(torch.arange(x.shape[1])))",
)
MLP = a_class("MLP", "layer = nn.Linear(20, 1)", "self.layer(x)")
RNN = a_class("RNN", "rnn = nn.LSTM(6, 4)\nhead = nn.Linear(4, 3)", "self.head(self.rnn(x)[0][:, -1])")
OWN_LOSS = HEAD + a_class(
    "Own", "layer = nn.Linear(5, 2)", "type('Out', (), {'loss': self.layer(x).square().mean()})()"
)
PAIR = HEAD + a_class("Pair", "layer = nn.Linear(5, 2)", "(self.layer(x), x)")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a user's file, and runs `write_workload` for it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = []

    def write(code: str, name: str = "", **options):
        path = tmp_path / f"users_{tmp_path.name}_{len(names)}.py"
        names.append(path.stem)
        path.write_text(code, encoding="utf-8")
        return write_workload(f"{path}:{name}" if name else str(path), **options)

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "inputs", "targets", "loss"),
    [
        (CNN, "torch.randn(8, 3, 224, 224)", "torch.randint(10, (8,))", "nn.CrossEntropyLoss()"),
        (SMALL, "torch.randn(8, 1, 28, 28)", "torch.randint(5, (8,))", "nn.CrossEntropyLoss()"),
        (GPT, "torch.randint(50, (8, 16))", "torch.randint(50, (8, 16))", "token_loss"),
        (MLP, "torch.randn(8, 20)", "torch.randn(8, 1)", "nn.MSELoss()"),
        (RNN, "torch.randn(8, 16, 6)", "torch.randint(3, (8,))", "nn.CrossEntropyLoss()"),
    ],
    ids=["CNN", "small images", "GPT", "MLP", "RNN"],
)
def test_the_file_is_a_workload_that_trains(written, code, inputs, targets, loss):
    found = written(HEAD + BLOCK + code)
    assert (found.inputs, found.targets, found.loss_fn) == (inputs, targets, loss)
    workload = load_workload(found.path)()
    assert training_loss(workload, workload.model, workload.sample_batch).isfinite()
    assert Path(found.path).name == "workload.py"


def test_a_model_that_returns_its_loss_gets_no_targets(written):
    found = written(OWN_LOSS)
    assert (found.inputs, found.targets, found.loss_fn) == ("torch.randn(8, 5)", None, None)
    assert load_workload(found.path)().loss_fn is None


DATA = "data = [(torch.randn(20), torch.randn(1)) for _ in range(9)]\n"
LOADER = "train_loader = torch.utils.data.DataLoader(data, batch_size=4)\n"
DICTS = (
    "data = [{'x': torch.randn(20), 'y': torch.randn(1)} for _ in range(9)]\n"
    "def compute_loss(model, batch):\n    return (model(batch['x']) - batch['y']).square().mean()\n"
)


@pytest.mark.parametrize(
    ("code", "loss"),
    [
        (DATA + LOADER, "nn.MSELoss()"),
        (DATA + LOADER + "criterion = nn.L1Loss()\n", "criterion"),
        (DICTS + LOADER, "compute_loss"),
    ],
)
def test_the_batch_is_that_of_the_files_loader(written, code, loss):
    """The guess for images was 224 x 224 although the file had a loader of small ones."""
    found = written(HEAD + MLP + code)
    assert (found.inputs, found.targets, found.loss_fn) == ("next(iter(train_loader))", None, loss)
    assert not found.is_guess
    workload = load_workload(found.path)()
    assert workload.sample_batch_size == 4
    assert training_loss(workload, workload.model, workload.sample_batch).isfinite()


TWO = """class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, source, target, scale=1.0):
        return self.head(self.words(target) + self.words(source).mean(1, keepdim=True)) * scale


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels)


def words():
    return torch.randint(9, (5,))


"""


@pytest.mark.parametrize(
    ("sample", "call"),
    [
        ("(words(), words(), words())", "loss_fn(model(source, target), targets)"),
        (
            "{'source': words(), 'target': words(), 'labels': words()}",
            "loss_fn(model(batch['source'], batch['target']), batch['labels'])",
        ),
    ],
)
def test_a_model_of_two_inputs_gets_a_function_that_calls_it(written, sample, call):
    """The written workload passed only one input, and failed at once."""
    found = written(HEAD + TWO + f"loader = torch.utils.data.DataLoader([{sample} for _ in range(9)], batch_size=4)\n")
    text = Path(found.path).read_text()
    assert f"    return {call}\n" in text
    assert "Check that the last argument is what the loss compares with." in text
    workload = load_workload(found.path)()
    assert workload.sample_batch_size == 4
    assert training_loss(workload, workload.model, workload.sample_batch).isfinite()


@pytest.mark.parametrize(
    ("code", "options", "named"),
    [
        (HEAD + BLOCK, {}, "Block needs width"),
        (HEAD + a_class("Odd", "layer = nn.Linear(5, 2)", "self.layer(x, x)"), {}, "--input"),
        (PAIR, {}, "tuple"),
    ],
)
def test_what_cannot_be_guessed_has_a_next_step(written, tmp_path, code, options, named):
    with pytest.raises(InputError) as caught:
        written(code, **options)
    assert named in str(caught.value)
    assert not (tmp_path / "workload.py").exists()


def test_an_existing_file_is_replaced_only_if_asked_to(written, tmp_path):
    (tmp_path / "workload.py").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        written(HEAD + MLP)
    assert (tmp_path / "workload.py").read_text() == "mine"
    assert written(HEAD + MLP, force=True).model == "MLP"


def test_the_command_prints_the_guess_and_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(HEAD + CNN)
    assert main(["init", "nets.py", "--input", "3,16,16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrote workload.py\n")
    assert "inputs   torch.randn(8, 3, 16, 16)" in out
    assert out.endswith("python -m autosplit tune workload.py\n")
    assert main(["init", "my-nets.py", "-o", "other.py"]) == 2
    assert "is not a Python name" in capsys.readouterr().err
