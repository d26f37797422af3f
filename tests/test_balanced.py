"""The wrapper is the plain model: the same outputs, the same gradients, whatever the split."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import math
import pickle
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from autosplit.balanced import BalancedDataParallel, data_parallel
from autosplit.batches import Whole
from autosplit.errors import AutosplitError, DeviceError, InputError, WorkloadError
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.tracking import Tracker

SPLITS = [(4, 6, 6), (1, 2, 13), (0, 8, 8), (16, 0, 0), (0, 0, 16)]
BATCH = 16
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


@contextmanager
def tracked(num_devices: int = 3):
    with Tracker([f"device {index}" for index in range(num_devices)], [None] * num_devices) as tracker:
        yield tracker


RUNS = {"plain": nullcontext, "tracked": tracked}


@pytest.fixture(autouse=True, scope="module")
def _quick_collection():
    """A tracker collects garbage as it is entered: let it skip the modules that are loaded by now."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


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
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.randn(5, 3), torch.randn(5, 3)))

    def forward(self, x):
        return torch.view_as_real(x.to(self.weight.dtype) @ self.weight)


class GradBuffer(nn.Module):
    """A buffer that takes part in the gradient, and one of whole numbers."""

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
    """A mean over samples that makes every output's gradient different."""
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


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


class TestGradients:
    """The gradient of one step, relative L2 error over all gradients together."""

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("name", MODELS)
    def test_of_gathered_outputs(self, name, split, dtype, run):
        make, shape = MODELS[name]
        torch.set_default_dtype(dtype)
        reference, module = make(), make()
        module.load_state_dict(reference.state_dict())
        inputs = inputs_of(shape, dtype)
        plain = reference(inputs)
        loss_of(plain).backward()
        with run():
            outputs = wrap(module, *split)(inputs)
            torch.testing.assert_close(outputs, plain)
            loss_of(outputs).backward()
        assert_same_gradients(module, reference, TOLERANCE[dtype])

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_of_scalar_losses(self, split, run):
        class WithLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(5, 3)

            def forward(self, x, target):
                return F.cross_entropy(self.body(x), target)

        reference = WithLoss()
        module = copy.deepcopy(reference)
        inputs, targets = torch.randn(BATCH, 5), torch.randint(0, 3, (BATCH,))
        plain = reference(inputs, targets)
        plain.backward()
        with run():
            loss = wrap(module, *split)(inputs, targets)
            assert loss.dim() == 0
            torch.testing.assert_close(loss, plain)
            loss.backward()
        assert_same_gradients(module, reference, 1e-6)

    def test_of_inputs(self, run):
        module = MODELS["mlp"][0]()
        inputs = torch.randn(BATCH, 5)
        reference, ours = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        loss_of(module(reference)).backward()
        with run():
            loss_of(wrap(module, 4, 6, 6)(ours)).backward()
        torch.testing.assert_close(ours.grad, reference.grad)

    def test_accumulate(self, run):
        reference = MODELS["mlp"][0]()
        module = copy.deepcopy(reference)
        inputs = torch.randn(BATCH, 5)
        with run():
            wrapped = wrap(module, 4, 6, 6)
            for _ in range(3):
                loss_of(reference(inputs)).backward()
                loss_of(wrapped(inputs)).backward()
        assert_same_gradients(module, reference, 1e-6)

    def test_a_complex_parameter_keeps_its_gradient_on_every_device(self):
        """Only floating-point parameters were replicated with their gradients: complex ones lost all but device 0's."""
        module = Complex()
        with tracked():
            loss_of(wrap(module, 0, 8, 8)(torch.randn(BATCH, 5))).backward()
        assert module.weight.grad is not None

    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_double_backward(self, split, run):
        reference = MODELS["mlp"][0]().double()
        module = copy.deepcopy(reference)
        inputs = torch.randn(BATCH, 5, dtype=torch.float64)

        def penalty(model, owner):
            grads = torch.autograd.grad(loss_of(model(inputs)), list(owner.parameters()), create_graph=True)
            sum(grad.pow(2).sum() for grad in grads).backward()

        penalty(reference, reference)
        with run():
            penalty(wrap(module, *split), module)
        assert_same_gradients(module, reference, 1e-10)

    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_unused_parameters_stay_without(self, split, run):
        module = Unused()
        with run():
            loss_of(wrap(module, *split)(torch.randn(BATCH, 5))).backward()
        assert module.unused.weight.grad is None
        assert module.used.weight.grad is not None

    def test_none_under_no_grad(self, run):
        module = MODELS["mlp"][0]()
        with run(), torch.no_grad():
            outputs = wrap(module, 4, 6, 6)(torch.randn(BATCH, 5))
        assert not outputs.requires_grad

    def test_inference_mode(self, run):
        module, inputs = MODELS["mlp"][0](), torch.randn(BATCH, 5)
        with run(), torch.inference_mode():
            outputs = wrap(module, 4, 6, 6)(inputs)
        torch.testing.assert_close(outputs, module(inputs).detach())


NORM_SPLITS = [(4, 6, 6), (2, 2, 12), (0, 8, 8), (16, 0, 0), (0, 0, 16)]  # it needs two samples on a device


class TestBatchNorm:
    @staticmethod
    def statistics(split, run, steps=3):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        wrapped = wrap(module, *split)
        for _ in range(steps):
            with run():
                loss_of(wrapped(torch.randn(BATCH, 4) + 2)).backward()
        return module[1]

    @pytest.mark.parametrize("split", NORM_SPLITS, ids=str)
    def test_the_same_tracked_and_untracked(self, split):
        plain, followed = self.statistics(split, nullcontext), self.statistics(split, tracked)
        assert torch.equal(plain.running_mean, followed.running_mean)
        assert torch.equal(plain.running_var, followed.running_var)
        assert plain.num_batches_tracked == followed.num_batches_tracked

    @pytest.mark.parametrize("split", NORM_SPLITS, ids=str)
    def test_moves_once_a_step_also_with_nothing_on_gpu0(self, split, run):
        norm = self.statistics(split, run)
        assert norm.num_batches_tracked == 3
        assert norm.running_mean.abs().sum() > 0

    def test_takes_the_first_active_chunk_as_gpus_do(self, run):
        """Chunks run in turn must not each move the running statistics, nor the last one win."""
        torch.manual_seed(1)
        module = nn.BatchNorm1d(4)
        reference = copy.deepcopy(module)
        inputs = torch.randn(BATCH, 4)
        with run():
            wrap(module, 0, 6, 10)(inputs)
        reference(inputs[:6])
        torch.testing.assert_close(module.running_mean, reference.running_mean)

    def test_buffers_are_the_same_objects_afterwards(self, run):
        module = nn.BatchNorm1d(4)
        before = {name: id(buffer) for name, buffer in module.named_buffers()}
        with run():
            wrap(module, 2, 6)(torch.randn(8, 4))
        assert {name: id(buffer) for name, buffer in module.named_buffers()} == before

    def test_stays_in_evaluation(self, run):
        module = nn.BatchNorm1d(4).eval()
        with run():
            wrap(module, 0, 8)(torch.randn(8, 4))
        assert module.num_batches_tracked == 0

    def test_buffers_are_put_back_after_an_error(self):
        class Fails(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(4)

            def forward(self, x):
                if len(x) == 5:
                    raise ArithmeticError
                return self.norm(x)

        module = Fails()
        before = id(module.norm.running_mean)
        with pytest.raises(ArithmeticError):
            wrap(module, 3, 5)(torch.randn(8, 4))
        assert id(module.norm.running_mean) == before


class Echo(nn.Module):
    """Returns what it is called with, and how often it was called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return args[0] if args else kwargs.get("x")


class TestCalls:
    @pytest.mark.parametrize(("batch", "expected"), [(16, [4, 6, 6]), (8, [2, 3, 3]), (3, [1, 1, 1]), (1, [1])])
    def test_short_batches_keep_the_proportions(self, batch, expected):
        module = Echo()
        assert wrap(module, 4, 6, 6)(torch.zeros(batch, 2)).shape == (batch, 2)
        sizes = [len(args[0]) for args, _ in module.calls]
        assert sum(sizes) == batch
        assert len(sizes) == len(expected)

    @pytest.mark.parametrize("batch", range(1, 9))
    @pytest.mark.parametrize("gpu0_bsz", [0, 1, 2, 5])
    def test_every_small_batch(self, batch, gpu0_bsz, run):
        wrapped = BalancedDataParallel(gpu0_bsz, Echo(), ["cpu"] * 4)
        inputs = torch.randn(batch, 2)
        with run(4):
            assert torch.equal(wrapped(inputs), inputs)

    def test_gpu0_bsz_is_exact(self):
        module = Echo()
        BalancedDataParallel(6, module, ["cpu", "cpu"])(torch.zeros(10, 1))
        assert [len(args[0]) for args, _ in module.calls] == [6, 4]

    def test_keywords_only(self, run):
        class Keywords(nn.Linear):
            def forward(self, *, x, scale=1.0, flags=()):
                return super().forward(x) * scale

        module, inputs = Keywords(3, 2), torch.randn(8, 3)
        with run():
            outputs = wrap(module, 2, 3, 3)(x=inputs, scale=2.0, flags=[])
        torch.testing.assert_close(outputs, module(x=inputs, scale=2.0))

    def test_a_flag_beside_a_short_batch(self):
        module = Echo()
        wrap(module, 2, 3, 3)(torch.zeros(2, 1), flag=True)
        assert all(len(args) == 1 and kwargs == {"flag": True} for args, kwargs in module.calls)

    def test_without_a_batch_the_first_device_runs_it(self, run):
        class Constant(nn.Linear):
            def forward(self, scale=None):
                return self.weight * 2

        module = Constant(2, 2)
        with run():
            assert torch.equal(wrap(module, 2, 3, 3)(), module.weight * 2)
            assert torch.equal(wrap(module, 2, 3, 3)(torch.tensor(1.0)), module.weight * 2)

    def test_with_nothing_but_what_is_whole_the_first_device_runs_it(self):
        """A tensor inside a Whole was looked for a batch size."""
        module = Echo()
        assert wrap(module, 2, 3)(Whole(torch.zeros(4, 4))).shape == (4, 4)
        assert len(module.calls) == 1

    def test_whole_reaches_every_device_unwrapped(self, run):
        class Masked(nn.Linear):
            def forward(self, x, mask):
                assert mask.shape == (8, 8)
                return super().forward(x @ mask)

        module, inputs, mask = Masked(8, 2), torch.randn(8, 8), torch.rand(8, 8)
        with run():
            outputs = wrap(module, 2, 3, 3)(inputs, Whole(mask))
        torch.testing.assert_close(outputs, module(inputs, mask))

    def test_other_dimension(self, run):
        module, inputs = nn.Linear(4, 4), torch.randn(5, 8, 4)
        with run():
            outputs = wrap(module, 2, 3, 3, dim=1)(inputs)
        torch.testing.assert_close(outputs, module(inputs))

    def test_one_device(self, run):
        module, inputs = MODELS["mlp"][0](), torch.randn(6, 5)
        with run(1):
            torch.testing.assert_close(BalancedDataParallel(2, module, ["cpu"])(inputs), module(inputs))

    def test_outputs_without_the_batch_dimension(self):
        """torch.cat's IndexError named neither the output nor the dimension."""
        with pytest.raises(WorkloadError, match=r"has the shape \(5,\); expected one with a dimension 1.*; give it"):
            wrap(Returns(lambda x: x.sum((1, 2))), 1, 3, dim=1)(torch.zeros(5, 4, 2))

    def test_disagreeing_inputs(self):
        with pytest.raises(WorkloadError, match="disagree"):
            wrap(Echo(), 2, 2)(torch.zeros(4, 3), torch.zeros(5, 7))

    def test_an_empty_batch(self):
        with pytest.raises(WorkloadError, match="empty"):
            wrap(Echo(), 2, 2)(torch.zeros(0, 3))

    def test_data_parallel_function(self):
        module, inputs = MODELS["mlp"][0](), torch.randn(8, 5)
        torch.testing.assert_close(data_parallel(module, inputs, 2, ["cpu", "cpu"]), module(inputs))
        outputs = data_parallel(Echo(), (), split=(2, 6), device_ids=["cpu", "cpu"], module_kwargs={"x": inputs})
        assert torch.equal(outputs, inputs)


class Triple(NamedTuple):
    logits: Tensor
    loss: Tensor
    name: str


@dataclasses.dataclass
class Record:
    logits: Tensor
    loss: Tensor
    share: float
    name: str = "record"


class Returns(nn.Module):
    """Returns what a function makes of its chunk."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def joined(function, *split: int, run=nullcontext, **kwargs) -> Any:
    with run():
        return wrap(Returns(function), *split, **kwargs)(torch.arange(float(sum(split))).view(-1, 1))


class TestOutputs:
    def test_namedtuple(self, run):
        outputs = joined(lambda x: Triple(x, x.mean(), "same"), 1, 3, 4, run=run)
        assert isinstance(outputs, Triple)
        assert outputs.logits.flatten().tolist() == list(range(8))
        assert outputs.loss.item() == pytest.approx(3.5)
        assert outputs.name == "same"

    def test_dataclass(self, run):
        outputs = joined(lambda x: Record(x, x.mean(), float(x.mean())), 1, 3, 4, run=run)
        assert isinstance(outputs, Record)
        assert outputs.logits.shape == (8, 1)
        assert outputs.loss.item() == pytest.approx(3.5)
        assert outputs.share == pytest.approx(3.5)
        assert outputs.name == "record"

    def test_nested(self, run):
        outputs = joined(
            lambda x: {"a": [x, (x * 2, None)], "b": collections.OrderedDict(c=x.sum(1), d="text")}, 1, 3, 4, run=run
        )
        assert outputs["a"][1][0].flatten().tolist() == [2.0 * index for index in range(8)]
        assert outputs["a"][1][1] is None
        assert isinstance(outputs["b"], collections.OrderedDict)
        assert outputs["b"]["d"] == "text"

    def test_user_dict(self):
        outputs = joined(lambda x: collections.UserDict(x=x), 1, 3)
        assert isinstance(outputs, collections.UserDict)
        assert outputs["x"].shape == (4, 1)

    def test_return_types(self):
        outputs = joined(lambda x: torch.max(x, dim=1), 1, 3)
        assert outputs.values.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_counts_are_summed(self):
        assert joined(lambda x: torch.tensor(len(x)), 1, 3).item() == 4
        assert joined(len, 1, 3) == 4

    def test_equal_counts_are_summed_too(self):
        """Equal whole numbers came back once: two counts of 3 were 3, and 3 and 4 were 7."""
        assert joined(len, 3, 3) == 6

    def test_equal_floats_are_summed_where_the_loss_is_a_sum(self):
        assert joined(lambda x: 2.0, 3, 3, reduce="sum") == 4.0
        assert joined(lambda x: 2.0, 3, 3) == 2.0

    def test_truth_needs_every_device(self):
        assert joined(lambda x: torch.tensor(bool((x < 3).all())), 2, 2).item() is False
        assert joined(lambda x: bool((x < 9).all()), 2, 2) is True

    @pytest.mark.parametrize(
        ("function", "what"),
        [
            (lambda x: x if len(x) == 1 else [x], "types"),
            (lambda x: [x] * len(x), "lengths"),
            (lambda x: {str(len(x)): x}, "keys"),
            (lambda x: x.expand(-1, len(x)), "shapes"),
            (lambda x: f"chunk of {len(x)}", "values"),
            (lambda x: x.numpy(), "values"),
        ],
    )
    def test_what_can_not_be_joined(self, function, what):
        with pytest.raises(WorkloadError, match=f"different {what}.*expected the same from each; return"):
            joined(function, 1, 3)


class TestReduce:
    def test_samples(self):
        assert joined(lambda x: x.mean(), 1, 3, 4).item() == pytest.approx(3.5)

    def test_sum(self):
        assert joined(lambda x: x.sum(), 1, 3, 4, reduce="sum").item() == 28.0

    def test_callable(self):
        def weight(call):
            (x,), _ = call
            return 10.0 * len(x)

        assert joined(lambda x: x.new_tensor(1.0), 1, 3, reduce=weight).item() == 40.0

    def test_tokens(self, run):
        class TokenMean(nn.Linear):
            def forward(self, x, labels):
                return F.cross_entropy(super().forward(x), labels)

        reference = TokenMean(4, 3)
        module = copy.deepcopy(reference)
        inputs, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
        labels[:3] = -100
        loss = reference(inputs, labels=labels)
        loss.backward()
        with run():
            ours = wrap(module, 4, 2, 2, reduce="tokens")(inputs, labels=labels)
            torch.testing.assert_close(ours, loss)
            ours.backward()
        assert_same_gradients(module, reference, 1e-6)

    def test_tokens_without_labels(self):
        with pytest.raises(WorkloadError, match=r"no tensor named labels among \['x'\].*pass labels="):
            wrap(Echo(), 2, 2, reduce="tokens")(x=torch.zeros(4, 1))

    def test_unknown(self):
        with pytest.raises(InputError, match=r"reduce is 'mean'; expected 'samples', 'tokens', 'sum' or a callable"):
            wrap(Echo(), 2, 2, reduce="mean")


class TestShares:
    def test_setters(self):
        wrapped = wrap(Echo(), 4, 6, 6)
        assert (wrapped.gpu0_bsz, wrapped.split) == (4, (4, 6, 6))
        wrapped.gpu0_bsz = 2
        assert (wrapped.gpu0_bsz, wrapped.split) == (2, None)
        assert wrapped.split_of(16) == (2, 7, 7)
        wrapped.split = [1, 2, 3]
        assert (wrapped.gpu0_bsz, wrapped.split) == (1, (1, 2, 3))
        wrapped.split = None
        assert (wrapped.gpu0_bsz, wrapped.split) == (1, None)

    @pytest.mark.parametrize("bad", [(1, 2), (1, -2, 3), (1.5, 2, 3), (True, 2, 3), (0, 0, 0)])
    def test_a_bad_split_changes_nothing(self, bad):
        wrapped = wrap(Echo(), 4, 6, 6)
        with pytest.raises(InputError, match="expected"):
            wrapped.split = bad
        assert wrapped.split == (4, 6, 6)

    @pytest.mark.parametrize("bad", [-1, 1.0, True, "4"])
    def test_a_bad_gpu0_bsz(self, bad):
        with pytest.raises(InputError, match=r"gpu0_bsz is .*expected a number of samples, 0 or more"):
            BalancedDataParallel(bad, Echo(), ["cpu", "cpu"])

    def test_a_contradiction(self):
        with pytest.raises(InputError, match=r"gpu0_bsz is 3 and split\[0\] is 4; expected the same; leave one out"):
            BalancedDataParallel(3, Echo(), ["cpu", "cpu"], split=(4, 4))

    def test_ceilings(self):
        wrapped = wrap(Echo(), 4, 6, ceilings=(5, 6))
        assert wrapped.split_of(11) == (5, 6)
        with pytest.raises(InputError):
            wrapped.split_of(12)
        with pytest.raises(InputError, match=r"split\[0\] is 6, above that device's ceiling of 5; lower"):
            wrapped.split = (6, 6)

    def test_neither_is_an_even_split(self):
        assert BalancedDataParallel(None, Echo(), ["cpu"] * 3).split_of(8) == (3, 3, 2)


class TestDevices:
    def test_without_a_gpu_it_passes_through(self):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        module = Echo()
        wrapped = BalancedDataParallel(2, module, dim=0).cpu()
        wrapped(torch.zeros(4, 1), Whole(torch.zeros(2)))
        args, _ = module.calls[0]
        assert [tuple(arg.shape) for arg in args] == [(4, 1), (2,)]

    def test_cpu_by_any_name(self):
        """`cpu:0` is the device that tensors call `cpu`; the module was said to be elsewhere."""
        wrapped = BalancedDataParallel(None, nn.Linear(2, 2), ["cpu:0", torch.device("cpu", 1)], "cpu:0")
        assert wrapped(torch.zeros(4, 2)).shape == (4, 2)

    def test_mixed_kinds(self):
        with pytest.raises(DeviceError, match="expected all of them cuda, or all of them cpu"):
            BalancedDataParallel(None, Echo(), ["cpu", "cuda:0"])

    def test_a_module_elsewhere(self):
        wrapped = wrap(nn.Linear(2, 2, device="meta"), 2, 2)
        with pytest.raises(DeviceError, match=r"weight is on meta; expected the first device, cpu; call \.to"):
            wrapped(torch.zeros(4, 2))

    def test_a_compiled_module_is_refused_whole(self):
        module = nn.Linear(2, 2)
        with pytest.raises(InputError, match="compiled OptimizedModule; expected an eager one; wrap the eager module"):
            wrap(torch.compile(module, backend="eager"), 2, 2)
        in_place = nn.Linear(2, 2)
        in_place.compile(backend="eager")
        with pytest.raises(InputError, match="compiled Linear"):
            wrap(in_place, 2, 2)
        assert len(list(module.parameters())) == 2
        assert len(list(in_place.parameters())) == 2

    def test_it_is_a_data_parallel(self):
        wrapped = wrap(nn.Linear(2, 2), 1, 1)
        assert isinstance(wrapped, nn.DataParallel)
        assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]

    def test_out_of_memory_names_the_device(self):
        module = nn.Linear(64, 64)
        with Tracker(["cpu:0", "cpu:1"], [None, 40_000]) as tracker:
            with pytest.raises(torch.OutOfMemoryError, match=r"^cpu:1 is out of memory: ") as caught:
                loss_of(wrap(module, 8, 256)(torch.randn(264, 64))).backward()
            assert isinstance(caught.value, OutOfMemoryError)
            assert caught.value.device_index == 1
            del caught
            assert tracker.live_bytes[0] == 64 * 64 * 4 + 512


class TestMemory:
    @staticmethod
    def held(split, function=lambda outputs: outputs.sum()):
        """What device 0 held at most above parameters, gradients and outputs, in parameters."""
        module = nn.Linear(1024, 1024, bias=False)
        with tracked(len(split)) as tracker:
            outputs = wrap(module, *split)(torch.randn(sum(split), 1024))
            forward_bytes = tracker.peak_bytes[0]
            tracker.reset_peak()
            function(outputs).backward()
            assert tracker.live_bytes[0] >= 2 * 4 * 1024**2
            return forward_bytes / 4096, tracker.peak_bytes[0] / (4 * 1024**2)

    def test_gathering_holds_the_outputs_once(self):
        """A chunk was copied beside the block that it was gathered in; torch's gather has no such copy."""
        rows, _ = self.held((0, 100, 100))
        assert rows == 1024 + 200

    @pytest.mark.parametrize("others", [1, 2, 6])
    def test_summing_gradients_takes_as_much_for_many_devices_as_for_two(self, others):
        """Each gradient's sum was a new tensor beside the last one: a parameter more from the third device on."""
        assert self.held((4, *(4,) * others))[1] == pytest.approx(
            4, abs=0.1
        )  # weight, its gradient, another, their sum


class TestCopies:
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_wrapper_is_itself(self, duplicate):
        wrapped = wrap(nn.Linear(3, 2), 1, 3, ceilings=(2, 6), reduce="sum")
        twin = duplicate(wrapped)
        inputs = torch.randn(4, 3)
        assert torch.equal(twin(inputs), wrapped(inputs))
        assert (twin.split, twin.gpu0_bsz, twin.ceilings, twin.reduce) == ((1, 3), 1, (2, 6), "sum")
        assert twin.module.weight is not wrapped.module.weight

    def test_no_replica_is_left_behind(self):
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        before = {name: id(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
        with tracked():
            loss_of(wrap(module, 0, 4, 4)(torch.randn(8, 3))).backward()
        assert {name: id(value) for name, value in [*module.named_parameters(), *module.named_buffers()]} == before
        assert not hasattr(module, "_former_parameters")


def test_errors_are_one_line():
    failures = [
        lambda: wrap(Echo(), 1, -1),
        lambda: BalancedDataParallel(-1, Echo(), ["cpu"]),
        lambda: BalancedDataParallel(None, Echo(), ["cpu", "meta"]),
        lambda: joined(lambda x: f"a\n{len(x)}", 1, 3),
        lambda: wrap(Echo(), 2, 2)(torch.zeros(4, 3), torch.zeros(5, 7)),
    ]
    for failure in failures:
        with pytest.raises(AutosplitError) as caught:
            failure()
        assert "\n" not in str(caught.value)
