"""Small workloads of many kinds for tests."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch
from folders import EXAMPLES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from autosplit import Workload


def example(name: str) -> ModuleType:
    """Load a file of the examples."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def char_gpt(**changes: Any) -> Workload:
    """Return the example's workload, optionally with another model size or optimizer."""
    module = example("char_gpt")
    size = {name: changes.pop(name) for name in ("width", "depth", "heads") if name in changes}
    workload = module.workload()
    model = module.CharGPT(**size) if size else workload.model
    options = {"loss_fn": workload.loss_fn, "optimizer": workload.optimizer, **changes}
    return Workload(model, workload.sample_batch, **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))


def net_batch(n: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(0, 3, (n,))


def small(model: nn.Module | None = None, **options: Any) -> Workload:
    """A model with BatchNorm and dropout. The cross entropy is outside of the model."""
    options = {"loss_fn": F.cross_entropy, "optimizer": torch.optim.AdamW, **options}
    return Workload(net() if model is None else model, net_batch(), **options)


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    return Workload(model, (torch.randn(4, 64), torch.randint(0, 10, (4,))), loss_fn=F.cross_entropy)


class WithLoss(nn.Module):
    """A model that returns its loss, so only one number is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


def with_loss(**options: Any) -> Workload:
    return Workload(WithLoss(), (torch.randn(4, 64), torch.randint(0, 10, (4,))), **options)


def cnn() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    batch = (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))
    return Workload(model, batch, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)


class Recurrent(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layer(x)
        head: Tensor = self.head(outputs[:, -1])
        return head


def recurrent(kind: type[nn.RNNBase]) -> Workload:
    batch = (torch.randn(4, 12, 16), torch.randint(0, 5, (4,)))
    return Workload(Recurrent(kind), batch, loss_fn=F.cross_entropy)


class Branching(nn.Module):
    """Control flow that depends on values, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.relu() if x.sum() > 0 else y.tanh()


class WithoutFakes(Branching):
    """A model with a kernel that has no fake implementation."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise NotImplementedError("the kernel has no fake implementation")
        return super().forward(x)


def without_fakes() -> Workload:
    return Workload(WithoutFakes(), torch.randn(4, 16), optimizer=torch.optim.SGD)


class Uncopyable(nn.Module):
    """Its deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopyable:
        raise RuntimeError("this model can't be copied")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


ALL = {
    "cnn": cnn,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "mlp": mlp,
    "with_loss": with_loss,
    "char_gpt": lambda: char_gpt(width=32, depth=1, heads=2),
}
