"""The code that `autosplit show --code` prints trains as one process does, for each kind of loss, output and batch.

A user pastes the code unchanged under the definitions of model, optimizer, loss_fn and loader.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import autosplit
from torch.utils.data import default_collate

from autosplit import tune

EFFECTIVE = 16
EXACT = 1e-12

HEADER = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
X, Y = torch.randn(48, 6), torch.randint(4, (48,))
TOKENS = torch.randint(1, 9, (48, 5))
LABELS = torch.where(torch.arange(48)[:, None] % 6 > torch.arange(5), TOKENS, 0)  # 0 is padding
LABELS[:, 0] = TOKENS[:, 0]
"""
FOOTER = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=5)
options = {"optimizer": torch.optim.SGD, **options}
"""
CLASSIFIER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
    def forward(self, inputs):
        return self.layer(inputs)
data = [*zip(X, Y)]
"""
TAGGER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 6), nn.Linear(6, 9)
    def forward(self, tokens):
        return self.layer(self.embedding(tokens))
data = [*zip(TOKENS, LABELS)]
"""


def with_own_loss(returned: str, data: str) -> str:
    """Return a model that computes its loss itself."""
    return f"""
from types import SimpleNamespace
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
    def forward(self, inputs, labels):
        logits = self.layer(inputs)
        loss = cross_entropy(logits, labels)
        return {returned}
data = {data}
options = {{}}
def whole_loss(model, batch):
    inputs, labels = batch.values() if isinstance(batch, dict) else batch
    return cross_entropy(model.layer(inputs), labels)
"""


KEYWORDS = '[{"inputs": x, "labels": y} for x, y in zip(X, Y)]'
PAIRS = "[*zip(X, Y)]"
PAIR_LOSS = """
options = {"loss_fn": loss_fn}
def whole_loss(model, batch):
    return loss_fn(model(batch[0]), batch[1])
"""
KINDS = {
    "logits and a mean": f"{CLASSIFIER}loss_fn = cross_entropy{PAIR_LOSS}",
    "logits and a sum": CLASSIFIER
    + """
def loss_fn(logits, targets):
    return cross_entropy(logits, targets, reduction="sum")
options = {"loss_fn": loss_fn, "loss_reduction": "sum"}
def whole_loss(model, batch):
    return loss_fn(model(batch[0]), batch[1])
""",
    "logits and class weights": CLASSIFIER
    + f"loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])){PAIR_LOSS}",
    "a mean over tokens": f"{TAGGER}"
    f"""
def loss_fn(logits, labels):
    return cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)
{PAIR_LOSS}""",
    "a mean over tokens, without padding in the first batch": f"{TAGGER}"
    f"""
LABELS[:6] = TOKENS[:6]
data = [*zip(TOKENS, LABELS)]
def loss_fn(logits, labels):
    return cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)
{PAIR_LOSS}""",
    "compute_loss": CLASSIFIER
    + """
def compute_loss(model, batch):
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)
options = {"compute_loss": compute_loss}
whole_loss = compute_loss
""",
    "two inputs": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 6), nn.Linear(6, 9)
    def forward(self, source, target):
        return self.layer(self.embedding(target) + self.embedding(source).mean(1, keepdim=True))
data = [((source, target), target) for source, target in zip(TOKENS, TOKENS.flip(0))]
def loss_fn(logits, labels):
    return cross_entropy(logits.transpose(1, 2), labels)
options = {"loss_fn": loss_fn}
def whole_loss(model, batch):
    return loss_fn(model(*batch[0]), batch[1])
""",
    "an object with a loss": with_own_loss("SimpleNamespace(loss=loss, logits=logits)", KEYWORDS),
    "a dict with a loss": with_own_loss('{"loss": loss, "logits": logits}', KEYWORDS),
    "a tuple with a loss": with_own_loss("(loss, logits)", PAIRS),
    "a scalar": with_own_loss("loss", PAIRS),
    "a scalar of keywords": with_own_loss("loss", KEYWORDS),
}
SPLITTABLE = [kind for kind in KINDS if kind != "an object with a loss"]
"""Kinds of outputs that BalancedDataParallel can gather: it does not know a SimpleNamespace."""


@pytest.fixture(autouse=True)
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def definitions(folder: Path, kind: str) -> Any:
    """Write the user's definitions to a module, and import it."""
    path = folder / "definitions.py"
    path.write_text(HEADER + KINDS[kind] + FOOTER, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("definitions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["definitions"] = module
    spec.loader.exec_module(module)
    return module


def trained_alone(user: Any) -> torch.Tensor:
    """Train in one process, with the whole batch of each optimizer step."""
    model = user.Net()
    model.load_state_dict(user.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for first in range(0, len(user.data), EFFECTIVE):
        user.whole_loss(model, default_collate(user.data[first : first + EFFECTIVE])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def printed_code(folder: Path, user: Any, devices: str, **options: Any) -> str:
    """Tune, save the plan, and return what `autosplit show --code` prints."""
    plan = tune(
        user.Net(),
        next(iter(user.loader)),
        devices=devices,
        effective_batch_size=EFFECTIVE,
        n_trials=1,
        profile="off",
        **{"max_batch_size": 6, **user.options, **options},
    )
    plan.save(folder / "plan.json")
    return autosplit("show", "plan.json", "--code", folder=folder).out


@pytest.mark.parametrize(
    ("kind", "devices"),
    [(kind, "cpu:8MiB") for kind in KINDS] + [(kind, "cpu:8MiB,cpu:4MiB") for kind in SPLITTABLE],
)
def test_in_one_process_it_trains_as_the_whole_batch_does(kind: str, devices: str, tmp_path: Path, monkeypatch) -> None:
    """A dict's loss was printed as `.loss`, and a loss over tokens without count= trained wrongly."""
    user = definitions(tmp_path, kind)
    expected = trained_alone(user)
    code = printed_code(tmp_path, user, devices)
    monkeypatch.chdir(tmp_path)
    exec(code, vars(user))
    assert (weights(user.model) - expected).abs().max() < EXACT, code


ALL_SCRIPTS = """
import os, runpy, sys
for folder in {folders!r}:
    os.environ["AUTOSPLIT_PROFILE"] = os.path.join(folder, "plan.json")
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.modules.pop("definitions", None)
    runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_two_ranks_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    """One job runs the scripts of all kinds."""
    saving = "import os\n    torch.save(model.state_dict(), f'{os.environ[\"RANK\"]}.pt')"
    expected, codes = {}, {}
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        user = definitions(folder, kind)
        expected[folder] = trained_alone(user)
        codes[folder] = printed_code(folder, user, "cpu:8MiB,cpu:4MiB", strategy="ddp")
        script = f"from definitions import *\n{codes[folder]}\n    {saving}\n"
        (folder / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "all.py").write_text(ALL_SCRIPTS.format(folders=[*map(str, codes)]), encoding="utf-8")
    first = str(next(iter(codes)) / "plan.json")
    done = autosplit("launch", "--plan", first, "all.py", folder=tmp_path, limit_s=400)
    assert done.code == 0, done.err
    for folder, code in codes.items():
        for rank in (0, 1):
            found = torch.cat([value.flatten() for value in torch.load(folder / f"{rank}.pt").values()])
            assert (found - expected[folder]).abs().max() < EXACT, code
