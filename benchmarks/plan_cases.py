"""Define the cases of `compare_plans.py`: one row each, with a name, a workload, devices, and arguments of `tune`.

The first word of a name is the kind of the devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import char_gpt

SAMPLES = 8
"""Samples of each sample batch."""
CLASSES = 10
WORDS, LENGTH, PADDING = 500, 32, 0

LENGTHS = [4, 8, 8, 12, 16, 20, 24, 32] * 40
"""Lengths of the samples of a data set, for the tagger."""

ALL_PRECISIONS = ("none", "bf16", "fp16")

adamw = torch.optim.AdamW
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def labels(classes: int = CLASSES) -> Tensor:
    """Return a random class for each sample."""
    return torch.randint(0, classes, (SAMPLES,))


# Models


class DictOutputs(nn.Module):
    """Return the loss and the logits in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the mean loss and the logits."""
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Recurrent(nn.Module):
    """Classify a sequence by the last output of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 64), nn.Linear(128, CLASSES)
        self.layers = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each sequence."""
        outputs, _ = self.layers(self.embedding(tokens))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


class Tagger(nn.Module):
    """Classify each token of a sequence. Padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 64, padding_idx=PADDING), nn.Linear(64, CLASSES)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        logits: Tensor = self.head(self.layer(self.embedding(tokens), src_key_padding_mask=tokens == PADDING))
        return logits


def perceptron(width: int = 256) -> nn.Sequential:
    """Return a small MLP."""
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES))


def convolutions() -> nn.Sequential:
    """Return convolutions with BatchNorm, pooled."""
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, CLASSES))


# Losses and steps


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the tokens that are not padding."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def adversarial_step(models: Any, optimizers: Any, real: Tensor) -> None:
    """Train a discriminator and then a generator."""
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    fake = generator(torch.randn(len(real), 16))
    of_discriminator.zero_grad()
    (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))).mean().backward()
    of_discriminator.step()
    of_generator.zero_grad()
    F.softplus(-discriminator(fake)).mean().backward()
    of_generator.step()


# Workloads


def mlp(**options: Any) -> autosplit.Workload:
    """Return a small MLP."""
    options = {"loss_fn": F.cross_entropy, "optimizer": adamw, **options}
    return autosplit.Workload(perceptron(), (torch.randn(SAMPLES, 64), labels()), **options)


def weighted() -> autosplit.Workload:
    """Return an MLP whose loss has class weights, so the divisor of its mean is no number of samples."""
    return mlp(loss_fn=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, CLASSES)))


def summed() -> autosplit.Workload:
    """Return an MLP with a sum over the samples as its loss."""
    return mlp(loss_fn=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")


def contrastive() -> autosplit.Workload:
    """Return an MLP whose loss compares the samples of a batch with each other."""
    return mlp(loss_fn=lambda outputs, _: (outputs @ outputs.T).logsumexp(1).mean(), loss_scope="batch")


def without_optimizer() -> autosplit.Workload:
    """Return an MLP whose loss and optimizer autosplit assumes."""
    return autosplit.Workload(perceptron(), torch.randn(SAMPLES, 64))


def dict_outputs() -> autosplit.Workload:
    """Return an MLP with a dict for its batch, and a dict for its outputs."""
    return autosplit.Workload(DictOutputs(), {"x": torch.randn(SAMPLES, 64), "y": labels()}, optimizer=sgd)


def frozen() -> autosplit.Workload:
    """Return an MLP with one trainable layer."""
    model = perceptron(1024).requires_grad_(requires_grad=False)
    model[-1].requires_grad_()
    return autosplit.Workload(model, (torch.randn(SAMPLES, 64), labels()), loss_fn=F.cross_entropy, optimizer=adamw)


def cnn() -> autosplit.Workload:
    """Return convolutions with BatchNorm."""
    batch = (torch.randn(SAMPLES, 3, 32, 32), labels())
    return autosplit.Workload(convolutions(), batch, loss_fn=F.cross_entropy, optimizer=sgd)


def lstm() -> autosplit.Workload:
    """Return an LSTM over 32 tokens."""
    batch = (torch.randint(1, WORDS, (SAMPLES, LENGTH)), labels())
    return autosplit.Workload(Recurrent(), batch, loss_fn=F.cross_entropy, optimizer=adamw)


def padded() -> autosplit.Workload:
    """Return a tagger whose loss leaves out padding."""
    tokens, tags = torch.randint(1, WORDS, (SAMPLES, LENGTH)), torch.randint(1, CLASSES, (SAMPLES, LENGTH))
    for row in range(SAMPLES):
        tokens[row, LENGTH - 2 * row :] = PADDING
        tags[row, LENGTH - 2 * row :] = PADDING
    return autosplit.Workload(Tagger(), (tokens, tags), loss_fn=token_loss, optimizer=adamw)


def gpt() -> autosplit.Workload:
    """Return the GPT of the examples, half as wide and half as deep."""
    example = char_gpt.workload()
    model = char_gpt.CharGPT(width=64, depth=2, heads=2)
    return autosplit.Workload(model, example.sample_batch, loss_fn=example.loss_fn, optimizer=adamw)


def large_gpt() -> autosplit.Workload:
    """Return a GPT of 400 million parameters. autosplit makes it with fake tensors."""
    example = char_gpt.workload()
    model = partial(char_gpt.CharGPT, width=2048, depth=8, heads=16)
    return autosplit.Workload(model, example.sample_batch, loss_fn=example.loss_fn, optimizer=adamw)


def two_models() -> autosplit.Workload:
    """Return a generator and a discriminator with a step of their own."""
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
    models = (generator, nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    batch = torch.randn(SAMPLES, 64)
    return autosplit.Workload(models, batch, step=adversarial_step, optimizer=(adamw, adamw))


# Cases


class Case(NamedTuple):
    """A plan to make.

    Attributes:
        name: The name in the saved file.
        workload: Function that returns the workload.
        devices: The device spec.
        options: Further arguments of `autosplit.tune`, `tune_best` or `tune_lengths`.
    """

    name: str
    workload: Callable[[], autosplit.Workload]
    devices: str
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """The kind of the devices: "sim", "cluster", "cpu", "ranks" or "emulated"."""
        return self.name.partition(":")[0]


ONE, EQUAL, DIFFERENT = "sim:RTX3090", "sim:4xRTX3090", "sim:2xRTX3090+2xGTX1080Ti"
SMALL = "sim:RTX3090@24MiB+T4@20MiB"
MEDIUM = "sim:2xRTX3090@96MiB+2xGTX1080Ti@48MiB"
LARGE = "sim:H100-80GB+A100-40GB"

SIMULATED = (
    Case("sim: MLP, one GPU", mlp, ONE, {}),
    Case("sim: MLP, one GPU, little memory", mlp, "sim:RTX3090@20MiB", {"effective_batch_size": 4096}),
    Case("sim: MLP, too little memory", mlp, "sim:RTX3090@1MiB", {}),
    Case("sim: MLP, different GPUs, fp16", mlp, DIFFERENT, {"effective_batch_size": 8192, "precision": "fp16"}),
    Case("sim: MLP, no loss and no optimizer", without_optimizer, SMALL, {"effective_batch_size": 4096}),
    Case("sim: class weights", weighted, SMALL, {"effective_batch_size": 4096}),
    Case("sim: sum of losses", summed, SMALL, {"effective_batch_size": 4096, "strategy": "ddp"}),
    Case("sim: contrastive loss", contrastive, "sim:2xL4", {"max_batch_size": 1024}),
    Case("sim: dict outputs", dict_outputs, SMALL, {"effective_batch_size": 4096}),
    Case("sim: frozen layers", frozen, MEDIUM, {"effective_batch_size": 32768, "strategy": "ddp"}),
    Case("sim: two models with a step", two_models, "sim:RTX3090@64MiB", {}),
    Case("sim: CNN, one GPU", cnn, ONE, {"effective_batch_size": 512}),
    Case("sim: CNN, two equal GPUs, range", cnn, "sim:2xL4", {"effective_batch_size": (512, 1024)}),
    Case("sim: CNN, four equal GPUs", cnn, EQUAL, {"effective_batch_size": 2048}),
    Case("sim: CNN, different GPUs", cnn, DIFFERENT, {"effective_batch_size": 2048}),
    Case("sim: CNN, different GPUs, little memory", cnn, MEDIUM, {"effective_batch_size": 2048}),
    Case("sim: CNN, different GPUs, reserve", cnn, MEDIUM, {"reserve": "20%"}),
    Case("sim: CNN, equal GPUs, bf16, DDP", cnn, EQUAL, {"precision": "bf16", "strategy": "ddp"}),
    Case("sim: LSTM, one GPU", lstm, ONE, {"max_batch_size": 64}),
    Case("sim: LSTM, different GPUs", lstm, MEDIUM, {"effective_batch_size": 512}),
    Case("sim: padded tokens, one GPU", padded, ONE, {"effective_batch_size": 300}),
    Case("sim: padded tokens, different GPUs", padded, MEDIUM, {"effective_batch_size": 2048}),
    Case("sim: padded tokens, lengths", padded, MEDIUM, {"lengths": LENGTHS}),
    Case("sim: GPT, equal GPUs, balanced", gpt, EQUAL, {"effective_batch_size": 4096, "strategy": "balanced"}),
    Case("sim: GPT, different GPUs, 24 trials", gpt, MEDIUM, {"effective_batch_size": 1000, "n_trials": 24}),
    Case("sim: GPT, different GPUs, DDP", gpt, MEDIUM, {"effective_batch_size": 1000, "strategy": "ddp"}),
    Case("sim: GPT, checkpointing", gpt, "sim:L4@48MiB", {"effective_batch_size": 64, "checkpointing": char_gpt.Block}),
    Case("sim: GPT, three precisions", gpt, "sim:L4+T4", {"effective_batch_size": 256, "precision": ALL_PRECISIONS}),
    Case("sim: large GPT, different GPUs", large_gpt, LARGE, {"effective_batch_size": 96}),
    Case("sim: large GPT, different GPUs, bf16, DDP", large_gpt, LARGE, {"precision": "bf16", "strategy": "ddp"}),
)

CLUSTERS = (
    Case("cluster: GPT, equal nodes", gpt, "sim:4x(8xA100-80GB)@100Gbps", {"effective_batch_size": 65536}),
    Case("cluster: GPT, different nodes", gpt, "sim:2x(8xA100-80GB)+2x(4xL40S)@10Gbps", {}),
)

TWO, THREE = "cpu:64MiB,cpu:32MiB", "cpu:32MiB,cpu:24MiB,cpu:16MiB"
TIGHT = "cpu:8MiB,cpu:4MiB"

BUDGETS = (
    Case("cpu: MLP, one budget", mlp, "cpu:4MiB", {}),
    Case("cpu: MLP, too little memory", mlp, "cpu:256KiB", {}),
    Case("cpu: MLP, two budgets", mlp, TIGHT, {"effective_batch_size": 8192}),
    Case("cpu: MLP, two budgets, range", mlp, TIGHT, {"effective_batch_size": (4096, 8192)}),
    Case("cpu: MLP, two budgets, bf16", mlp, "cpu:3MiB,cpu:2MiB", {"effective_batch_size": 4096, "precision": "bf16"}),
    Case("cpu: MLP, no loss and no optimizer", without_optimizer, TIGHT, {"effective_batch_size": 8192}),
    Case("cpu: class weights", weighted, TIGHT, {"effective_batch_size": 8192}),
    Case("cpu: sum of losses", summed, TIGHT, {"effective_batch_size": 8192}),
    Case("cpu: contrastive loss", contrastive, "cpu:4MiB", {}),
    Case("cpu: dict outputs", dict_outputs, TIGHT, {"effective_batch_size": 8192}),
    Case("cpu: frozen layers", frozen, "cpu:16MiB,cpu:8MiB", {"effective_batch_size": 8192}),
    Case("cpu: two models with a step", two_models, "cpu:4MiB", {}),
    Case("cpu: CNN, one budget", cnn, "cpu:64MiB", {"effective_batch_size": 512}),
    Case("cpu: CNN, two budgets", cnn, TWO, {"effective_batch_size": 512}),
    Case("cpu: CNN, three budgets", cnn, THREE, {"effective_batch_size": 512}),
    Case("cpu: CNN, two budgets, reserve", cnn, TWO, {"effective_batch_size": 512, "reserve": "4MiB"}),
    Case("cpu: LSTM, two budgets", lstm, "cpu:16MiB,cpu:12MiB", {"effective_batch_size": 256}),
    Case("cpu: padded tokens, two budgets", padded, "cpu:16MiB,cpu:8MiB", {"effective_batch_size": 256}),
    Case("cpu: padded tokens, lengths", padded, "cpu:8MiB,cpu:4MiB", {"lengths": LENGTHS}),
    Case("cpu: GPT, two budgets", gpt, "cpu:32MiB,cpu:16MiB", {"effective_batch_size": 128}),
    Case("cpu: GPT, two budgets, DDP", gpt, "cpu:32MiB,cpu:16MiB", {"effective_batch_size": 128, "strategy": "ddp"}),
    Case("cpu: GPT, checkpointing", gpt, "cpu:16MiB", {"effective_batch_size": 64, "checkpointing": char_gpt.Block}),
)

DDP = {"strategy": "ddp"}

RANKS = (
    Case("ranks: MLP", mlp, "cpu:8MiB,cpu:4MiB", {**DDP, "effective_batch_size": 8192}),
    Case("ranks: CNN", cnn, TWO, {**DDP, "effective_batch_size": 512}),
    Case("ranks: padded tokens", padded, "cpu:16MiB,cpu:8MiB", {**DDP, "effective_batch_size": 256}),
    Case("ranks: GPT, no effective batch", gpt, "cpu:32MiB,cpu:16MiB", DDP),
)
"""Two processes that tune together."""

EMULATED = (
    Case("emulated: MLP, one device", mlp, "emu:0", {"effective_batch_size": 65536}),
    Case("emulated: CNN, two devices", cnn, "emu:0,1", {"effective_batch_size": 1024}),
    Case("emulated: GPT, two devices, DDP", gpt, "emu:0,1", {**DDP, "effective_batch_size": 256}),
    Case("emulated: MLP, isolated", mlp, "emu:0", {"effective_batch_size": 8192, "isolate": True}),
)
"""Devices of tests/emulated. They need a C++ compiler."""

CASES = SIMULATED + CLUSTERS + BUDGETS + RANKS + EMULATED
