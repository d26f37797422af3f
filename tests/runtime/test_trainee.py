"""A copy is trained, real or fake. The live model and optimizer stay identical to the bit."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from raised import raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from workloads import small

from autosplit.errors import WorkloadError
from autosplit.rng import kept_rng
from autosplit.runtime.fake_copy import fake_mode
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracer import make_tracer
from autosplit.runtime.tracked_step import run_placed
from autosplit.workload.models import Models
from autosplit.workload.tree import Whole
from autosplit.workload.workload import Workload


@pytest.fixture(params=["real", "fake"])
def mode(request):
    return fake_mode() if request.param == "fake" else None


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


BATCH = (torch.randn(6, 4), torch.randint(0, 3, (6,)))


def workload(model=None, **kwargs) -> Workload:
    return Workload(model if model is not None else net(), BATCH, loss_fn=F.cross_entropy, **kwargs)


def run(trainee, *splits: tuple[int, ...]) -> tuple[int, ...]:
    """Run one optimizer step under a tracker."""
    num_devices = len(splits[0])
    tracker = Tracker([f"device {index}" for index in range(num_devices)], [None] * num_devices)
    return run_placed(trainee, StepShape(splits), tracker, lambda phase: None)


def real_step(trainee, n: int = 6) -> None:
    trainee.step(trainee.models, [trainee.batch(n)], [n])


def bits(tensor):
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.detach().clone())


def snapshot(models, optimizers=()) -> dict:
    """Return everything of live models and optimizers that must not change."""
    found: dict = {"rng": torch.get_rng_state().clone(), "python": random.getstate()}
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


def same(old, new) -> bool:
    if isinstance(old, torch.Tensor):
        return torch.equal(old, new)
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(same(old[key], new[key]) for key in old)
    if isinstance(old, (tuple, list)):
        return len(old) == len(new) and all(map(same, old, new))
    return bool(old == new)


class Custom(torch.optim.Optimizer):
    """An optimizer with a custom constructor, extra attributes and nested state."""

    def __init__(self, model, *, momentum):
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


def adam_with_scheduler(model):
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


def live(name):
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


class TestNothingIsTouched:
    def test_random_states(self):
        numpy = pytest.importorskip("numpy")
        before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())
        with kept_rng():
            torch.rand(3), random.random(), numpy.random.rand()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


class TestTwins:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_steps_as_the_live_optimizer_would(self, name):
        model, optimizer = live(name)
        model.eval()
        trainee = training_copy(workload(model, optimizer=optimizer))
        trainee.models.given.eval()
        real_step(trainee)
        optimizer._optimizer_step_post_hooks = {}
        optimizer.zero_grad()
        F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
        for ours, theirs in zip(trainee.models.given.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_nested_state_is_charged(self):
        """Only tensors at the top level of a parameter's state became fake and counted."""
        model, optimizer = live("custom")
        trainee = training_copy(workload(model, optimizer=optimizer), mode=fake_mode())
        (slot,) = optimizer.state[model[0].weight]["nested"]["slots"]
        with Tracker(["one"], [None]) as tracker:
            trainee.adopt_on(tracker)
            state = trainee.optimizers.given.state[trainee.models.given[0].weight]
            assert isinstance(state["nested"]["slots"][0], FakeTensor)
            assert tracker.device_of(state["nested"]["slots"][0]) == 0
        assert not isinstance(slot, FakeTensor)


class TestErrors:
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
    def test_what_can_not_be_trained(self, arguments, mode):
        with raises(WorkloadError) as caught:
            training_copy(workload(**arguments), mode=mode)
        assert "\n" not in str(caught.value)

    def test_meta_is_for_simulated_devices(self):
        with torch.device("meta"):
            model = net()
        with raises(WorkloadError, "0.weight"):
            training_copy(workload(model))

    @pytest.mark.parametrize("given", [torch.optim.LBFGS, lambda p: torch.optim.LBFGS(p, max_iter=2), "live"])
    def test_an_optimizer_that_runs_the_model_again(self, given, mode):
        """LBFGS.step() was called without its closure, and torch's TypeError blamed the user's code."""
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters()) if given == "live" else given
        with raises(WorkloadError, "LBFGS"):
            training_copy(workload(model, optimizer=optimizer), mode=mode)


class TestCustomSteps:
    @staticmethod
    def gan(**kwargs) -> Workload:
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

        optimizers = dict.fromkeys(models, torch.optim.Adam)
        return Workload(models, torch.randn(4, 4), step=step, optimizer=optimizers, **kwargs)

    @pytest.mark.parametrize("split", [(4,), (1, 2, 3), (0, 3, 3)], ids=str)
    def test_two_models_and_two_optimizers(self, split, mode):
        given = self.gan()
        before = snapshot(given.model)
        with kept_rng():
            trainee = training_copy(given, mode=mode)
            peaks = [run(trainee, split) for _ in range(3)]
        assert peaks[1] == peaks[2]
        assert all(peaks[0])
        owned = {name: {id(p) for p in model.parameters()} for name, model in trainee.models.given.items()}
        for name, optimizer in trainee.optimizers.given.items():
            assert {id(p) for p in optimizer.state} == owned[name]
        assert same(before, snapshot(given.model))

    def test_live_optimizers(self):
        given = self.gan()
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in given.model.items()}
        given = Workload(given.model, given.sample_batch, step=given.step, optimizer=optimizers)
        before = snapshot(given.model, optimizers.values())
        with kept_rng():
            run(training_copy(given), (2, 2))
        assert same(before, snapshot(given.model, optimizers.values()))


class TestEvaluation:
    def test_calls_the_model_as_compute_loss_does(self):
        """The batch of a compute_loss was passed to the model. Only compute_loss understands it."""
        given = Workload(net(), BATCH, compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        trainee = training_copy(given)
        loss = trainee.evaluate(trainee.models, trainee.batch(5))
        assert loss.dim() == 0
        assert not loss.requires_grad

    def test_restores_mixed_modes(self):
        model = net()
        model[1].eval()
        trainee = training_copy(workload(model))
        trainee.evaluate(trainee.models, trainee.batch(5))
        assert trainee.models.given.training
        assert not trainee.models.given[1].training


class TestPrecision:
    @pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_autocast_reaches_the_model(self, precision, dtype, mode):
        seen = []
        model = net()
        given = Workload(
            model,
            BATCH,
            loss_fn=lambda outputs, targets: seen.append(outputs.dtype) or F.cross_entropy(outputs, targets),
            precision=precision,
        )
        trainee = training_copy(given, mode=mode)
        peaks = [run(trainee, (2, 4)) for _ in range(2)]
        assert set(seen) == {dtype}
        assert all(peaks[1])


class Masked(nn.Module):
    """Attention over a fixed number of tokens, which may be equal to the number of samples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens, mask):
        assert mask.shape == (tokens.shape[1], tokens.shape[1])
        x = self.embedding(tokens)
        return self.mix((x @ x.mT + mask) @ x)


@pytest.mark.parametrize("mark", [lambda mask: mask, Whole], ids=["found", "marked"])
def test_a_mask_is_not_split_where_the_batch_is_as_large_as_it(mark, mode):
    """With as many samples as tokens, a (T, T) mask looked like a batch, and the step failed at that size."""
    given = Workload(Masked(), {"tokens": torch.randint(0, 9, (4, 6)), "mask": mark(torch.zeros(6, 6))})
    trainee = training_copy(given, mode=mode)
    for split in ((2, 3), (2, 4), (3, 4)):
        run(trainee, split)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_steps_are_one_step(reduction):
    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction=reduction)

    model = nn.Linear(4, 3).double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))
    results = []
    for splits in (((6,),), ((4,), (2,))):
        given = Workload(
            model, batch, loss_fn=loss_fn, loss_reduction=reduction, optimizer=lambda p: torch.optim.SGD(p, 0.1)
        )
        trainee = training_copy(given)
        whole = trainee.batch(6)
        batches = [whole] if len(splits) == 1 else [tuple(t[:4] for t in whole), tuple(t[4:] for t in whole)]
        trainee.step(trainee.models, batches, [sum(split) for split in splits])
        results.append(trainee.models.given.weight)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_in_buckets_train_as_others_do(num_ranks):
    """A rank's gradients are moved into its buckets for all dtypes."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.double_ = nn.Linear(4, 3), nn.Linear(3, 2).double()

        def forward(self, x):
            return self.double_(self.single(x).double())

    def loss(module, inputs):
        return module(inputs).square().mean()

    model = Model()

    trainee = training_copy(Workload(model, torch.randn(4, 4), compute_loss=loss, optimizer=torch.optim.SGD))
    before = [parameter.clone() for parameter in trainee.parameters()]
    shape = StepShape(((4,),), "rank", num_ranks)
    run_placed(trainee, shape, Tracker(["device 0"], [None]), lambda _phase: None)
    loss(model, trainee.batch(4)).backward()
    for parameter, old, given in zip(trainee.parameters(), before, model.parameters(), strict=True):
        assert torch.allclose(parameter, old - 1e-3 * given.grad)
        assert not torch.equal(parameter, old)
        assert parameter.grad is None


def test_a_model_whose_layers_have_no_shape_yet_is_refused_by_name(mode):
    """The error gave advice about a torch method that autosplit had called."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with raises(WorkloadError, "0.weight"):
        training_copy(workload(model), mode=mode)
    model(BATCH[0])
    assert len(training_copy(workload(model), mode=mode).parameters()) == 4


class Graph(nn.Module):
    """A layer over a graph in a sparse matrix."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 3)
        self.register_buffer("edges", torch.ones(256, 256).to_sparse(layout=layout))

    def forward(self, x):
        return self.layer(torch.sparse.mm(self.edges, x.t()).t())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(("layout", "is_faked"), [(torch.sparse_coo, True), (torch.sparse_csr, False)])
def test_a_sparse_tensors_values_take_memory_also_where_they_are_fake(layout, is_faked):
    """Plans for simulated GPUs counted no values, because torch fakes a sparse tensor as an empty tensor."""
    made = Workload(Graph(layout), (torch.randn(4, 256), torch.zeros(4, dtype=torch.long)), loss_fn=F.cross_entropy)
    tracer, note = make_tracer(made, like_gpu=True)
    assert tracer.fake == is_faked
    assert (note is None) == is_faked
    (peak,) = tracer.trace(StepShape(((4,),))).peak_bytes
    assert peak > 256 * 256 * (8 + 4)  # a place and a number each, at least


@pytest.mark.parametrize("factor", [1.0, 1e6, float("inf")])
def test_fp16_has_the_optimizers_state_from_the_first_step(factor):
    """GradScaler skips the optimizer if a gradient overflows, as in the first fp16 steps with scale 65536.

    So there was no state to measure, 8 bytes per parameter, and the ceiling was too high by that.
    """
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * factor
    trainee = training_copy(small(loss_fn=loss, precision="fp16"), device=torch.device("cpu"))
    trainee.step(trainee.models, [trainee.batch(4)], [4])
    states = trainee.optimizers.given.state.values()
    assert len(states) == len(trainee.parameters())
    assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in states)


def test_a_very_large_factory_takes_no_memory():
    given = Workload(lambda: nn.Linear(200_000, 200_000), torch.zeros(2, 1).expand(2, 200_000))
    peaks = run(training_copy(given, mode=fake_mode()), (1, 1))
    assert peaks[0] > 4 * 200_000**2
