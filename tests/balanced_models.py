"""Small models of many kinds, and comparisons with their wrapped versions."""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from ddp_jobs import make_plan
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from autosplit import BalancedDataParallel

SPLITS = [(4, 6, 6), (1, 2, 13), (0, 8, 8), (16, 0, 0), (0, 0, 16)]
BATCH = 16
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


@contextmanager
def tracked(num_devices: int = 3):
    """Track the bytes of CPU devices, each with a budget that no test fills."""
    with make_plan((1,) * num_devices, capacity_bytes=2**50).budgets() as tracker:
        yield tracker


RUNS = {"plain": nullcontext, "tracked": tracked}


def wrap(module: nn.Module, *split: int, **kwargs) -> BalancedDataParallel:
    return BalancedDataParallel(None, module, ["cpu"] * len(split), split=split, **kwargs)


# The models


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x):
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0][:, -1])


class TiedTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, codes):
        return self.head(self.encoder(self.embedding(codes)))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, codes):
        return self.head(self.embedding(codes).mean(1))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(5))})
        self.shared = nn.ModuleList([nn.Linear(5, 5)] * 2)

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        for layer in self.shared:
            x = layer(x)
        return x * self.named["scale"]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


class Complex(nn.Module):
    """Only floating-point parameters were replicated with gradients. Complex parameters lost all but device 0's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.randn(5, 3), torch.randn(5, 3)))

    def forward(self, x):
        return torch.view_as_real(x.to(self.weight.dtype) @ self.weight)


class GradBuffer(nn.Module):
    """A buffer with a gradient, and a buffer of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(5, requires_grad=True))
        self.register_buffer("order", torch.arange(4, -1, -1))
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear((x * self.scale)[:, self.order])


def cnn():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    model[1].running_mean.uniform_()
    model[1].running_var.uniform_(0.5, 2.0)
    return model.eval()


def frozen():
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    return model


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), (5,)),
    "lstm": (Recurrent, (6, 5)),
    "cnn": (cnn, (2, 8, 8)),
    "tied": (TiedTransformer, None),
    "sparse": (Sparse, None),
    "weight_norm": (lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 2)), (5,)),
    "orthogonal": (lambda: nn.Sequential(orthogonal(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 2)), (5,)),
    "listed": (Listed, (5,)),
    "unused": (Unused, (5,)),
    "frozen": (frozen, (5,)),
    "complex": (Complex, (5,)),
    "grad_buffer": (GradBuffer, (5,)),
}


def inputs_of(shape, dtype, n=BATCH):
    return torch.randint(0, 11, (n, 6)) if shape is None else torch.randn(n, *shape, dtype=dtype)


def loss_of(outputs: Tensor) -> Tensor:
    """Return a mean over samples with a different gradient for every output."""
    return (outputs.flatten(1) ** 2 + torch.sin(outputs.flatten(1))).sum(1).mean()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.grad.to_dense() for name, tensor in tensors.items() if tensor.grad is not None}


def assert_same_gradients(module: nn.Module, reference: nn.Module, tolerance: float) -> None:
    ours, theirs = gradients(module), gradients(reference)
    assert ours.keys() == theirs.keys()
    difference = math.fsum(float((ours[name] - theirs[name]).abs().pow(2).sum()) for name in theirs)
    size = math.fsum(float(grad.abs().pow(2).sum()) for grad in theirs.values())
    assert size > 0
    assert math.sqrt(difference / size) < tolerance


def assert_trains_like_plain(name: str, split: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare the outputs and gradients of a wrapped model with those of the same model on one device.

    Args:
        name: A key of `MODELS`.
        split: Samples per device.
        dtype: The default dtype when this is called.
    """
    make, shape = MODELS[name]
    reference, module = make(), make()
    module.load_state_dict(reference.state_dict())
    inputs = inputs_of(shape, dtype, sum(split))
    plain = reference(inputs)
    loss_of(plain).backward()
    outputs = wrap(module, *split)(inputs)
    torch.testing.assert_close(outputs, plain)
    loss_of(outputs).backward()
    assert_same_gradients(module, reference, TOLERANCE[dtype])


class Echo(nn.Module):
    """Returns its arguments and its number of calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return args[0] if args else kwargs.get("x")


@dataclasses.dataclass
class Record:
    logits: Tensor
    loss: Tensor
    share: float
    name: str = "record"


class Returns(nn.Module):
    """Returns the result of a function for its chunk."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def joined(function, *split: int, run=nullcontext, **kwargs) -> Any:
    with run():
        return wrap(Returns(function), *split, **kwargs)(torch.arange(float(sum(split))).view(-1, 1))
