"""Workloads to copy, and the tests that every copy passes: with real tensors, or with fake ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.errors import WorkloadError
from autosplit.rng import preserved_rng
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import run_placed
from autosplit.runtime.trainee import Trainee
from autosplit.workload.models import Models
from autosplit.workload.tree import Whole
from autosplit.workload.workload import Workload

BATCH = (torch.randn(6, 4), torch.randint(0, 3, (6,)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def workload(model: Any = None, **options: Any) -> Workload:
    return Workload(model if model is not None else net(), BATCH, loss_fn=F.cross_entropy, **options)


class Custom(torch.optim.Optimizer):
    """An optimizer with a custom constructor, extra attributes and nested state."""

    def __init__(self, model: nn.Module, *, momentum: float) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.momentum = momentum
        self.counts = {"steps": 0}
        self.model = model

    @torch.no_grad()
    def step(self, closure=None):
        self.counts["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter].setdefault("nested", {"slots": [torch.zeros_like(parameter)]})
                if parameter.grad is not None:
                    slots["slots"][0].mul_(self.momentum).add_(parameter.grad)
                    parameter.sub_(slots["slots"][0], alpha=group["lr"])


def adam_with_scheduler(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: pytest.fail("the live optimizer's hook was called"))
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "scheduled": adam_with_scheduler,
    "custom": lambda model: Custom(model, momentum=0.5),
    "groups": lambda model: torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 1.0}, {"params": list(model[1:].parameters())}], 0.1, momentum=0.9
    ),
    "tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), amsgrad=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
}


def live(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of its training: with gradients, hooks, modes, and optimizer state."""
    model = net()
    model.register_forward_hook(lambda *args: None)
    model[2].eval()
    optimizer = OPTIMIZERS[name](model)
    hooks, optimizer._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks, {}
    F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    optimizer._optimizer_step_post_hooks = hooks
    return model, optimizer


def gan(**options: Any) -> Workload:
    models = {"generator": nn.Linear(3, 4), "critic": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))}

    def step(models, optimizers, batch):
        noise = torch.randn(len(batch), 3)
        fake = models["generator"](noise)
        optimizers["critic"].zero_grad()
        (models["critic"](fake.detach()).mean() - models["critic"](batch).mean()).backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        (-models["critic"](fake).mean()).backward()
        optimizers["generator"].step()

    options = {"optimizer": dict.fromkeys(models, torch.optim.Adam), **options}
    return Workload(models, torch.randn(4, 4), step=step, **options)


class Masked(nn.Module):
    """Attention over a fixed number of tokens, which may be equal to the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape == (tokens.shape[1], tokens.shape[1])
        x = self.embedding(tokens)
        return self.mix((x @ x.mT + mask) @ x)


def bits(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.detach().clone())


def snapshot(models: Any, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[Any, Any]:
    """Return everything of live models and optimizers that must not change."""
    found: dict[Any, Any] = {"rng": torch.get_rng_state().clone(), "python": random.getstate()}
    for number, module in enumerate(Models.of(models).modules):
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():
            key = f"{number}.{name}"
            found[key] = (id(tensor), tensor.data_ptr(), tensor.requires_grad, id(tensor.grad), type(tensor))
            found[key, "bits"], found[key, "grad"] = bits(tensor), bits(tensor.grad)
        for name, part in module.named_modules():
            hooks = {key: dict(value) for key, value in vars(part).items() if "hooks" in key and value is not None}
            found[f"{number}.{name}", "module"] = (id(part), part.training, hooks, sorted(vars(part)))
    for number, optimizer in enumerate(optimizers):
        found["optimizer", number] = copy.deepcopy(optimizer.state_dict())
        found["attributes", number] = {name: id(value) for name, value in vars(optimizer).items()}
    return found


def same(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor):
        return torch.equal(old, new)
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(same(old[key], new[key]) for key in old)
    if isinstance(old, (tuple, list)):
        return len(old) == len(new) and all(map(same, old, new))
    return bool(old == new)


class CopyTests:
    """Tests of a copy. A subclass names the function that copies, and the tracker of the copy's tensors."""

    def copied(self, given: Workload) -> Trainee:
        raise NotImplementedError

    def tracker(self, num_devices: int) -> Tracker:
        raise NotImplementedError

    def run(self, trainee: Trainee, *splits: tuple[int, ...]) -> tuple[int, ...]:
        """Run one optimizer step under a tracker."""
        return run_placed(trainee, StepShape(splits), self.tracker(len(splits[0])), lambda phase: None)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"optimizer": 3},
            {"optimizer": lambda p: 3},
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            {"model": net().requires_grad_(False)},
            {"model": lambda: 3},
        ],
    )
    def test_what_can_not_be_trained(self, arguments):
        with raises(WorkloadError) as caught:
            self.copied(workload(**arguments))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("given", [torch.optim.LBFGS, lambda p: torch.optim.LBFGS(p, max_iter=2), "live"])
    def test_an_optimizer_that_runs_the_model_again(self, given):
        """LBFGS.step() was called without its closure, and torch's TypeError blamed the user's code."""
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters()) if given == "live" else given
        with raises(WorkloadError, "LBFGS"):
            self.copied(workload(model, optimizer=optimizer))

    def test_a_model_whose_layers_have_no_shape_yet_is_refused_by_name(self):
        """The error gave advice about a torch method that autosplit had called."""
        model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
        with raises(WorkloadError, "0.weight"):
            self.copied(workload(model))
        model(BATCH[0])
        assert len(self.copied(workload(model)).parameters()) == 4

    def test_nested_state_is_charged(self):
        """Only tensors at the top level of a parameter's state counted."""
        model, optimizer = live("custom")
        trainee = self.copied(workload(model, optimizer=optimizer))
        with self.tracker(1) as tracker:
            trainee.adopt_on(tracker)
            state = trainee.optimizers.given.state[trainee.models.given[0].weight]
            assert tracker.device_of(state["nested"]["slots"][0]) == 0

    @pytest.mark.parametrize("split", [(4,), (1, 2, 3), (0, 3, 3)], ids=str)
    def test_two_models_and_two_optimizers(self, split):
        given = gan()
        before = snapshot(given.model)
        with preserved_rng():
            trainee = self.copied(given)
            peaks = [self.run(trainee, split) for _ in range(3)]
        assert peaks[1] == peaks[2]
        assert all(peaks[0])
        owned = {name: {id(p) for p in model.parameters()} for name, model in trainee.models.given.items()}
        for name, optimizer in trainee.optimizers.given.items():
            assert {id(p) for p in optimizer.state} == owned[name]
        assert same(before, snapshot(given.model))

    @pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_autocast_reaches_the_model(self, precision, dtype):
        seen = []
        loss_fn = lambda outputs, targets: seen.append(outputs.dtype) or F.cross_entropy(outputs, targets)
        trainee = self.copied(Workload(net(), BATCH, loss_fn=loss_fn, precision=precision))
        peaks = [self.run(trainee, (2, 4)) for _ in range(2)]
        assert set(seen) == {dtype}
        assert all(peaks[1])

    @pytest.mark.parametrize("mark", [lambda mask: mask, Whole], ids=["found", "marked"])
    def test_a_mask_is_not_split_where_the_batch_is_as_large_as_it(self, mark):
        """With as many samples as tokens, a (T, T) mask looked like a batch, and the step failed at that size."""
        given = Workload(Masked(), {"tokens": torch.randint(0, 9, (4, 6)), "mask": mark(torch.zeros(6, 6))})
        trainee = self.copied(given)
        for split in ((2, 3), (2, 4), (3, 4)):
            self.run(trainee, split)
