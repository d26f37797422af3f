"""Inside a wrapped step: second derivatives, and the state that a module sees while its chunk runs."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from balanced_models import (
    BATCH,
    MODELS,
    RUNS,
    Listed,
    Returns,
    assert_same_gradients,
    loss_of,
    wrap,
)
from marks import slow
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

UNEVEN = [(2, 1, 3), slow((1, 5)), (0, 4, 2), slow((6, 0))]


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def double(*shape: int, **options):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True, **options)


class Witness(nn.Module):
    """Records the value of a function in each forward, with the module (or replica) and the chunk."""

    def __init__(self, see):
        super().__init__()
        self.see, self.seen = see, []
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        self.seen.append(self.see(self, x))
        return self.body(x)


class TestDerivatives:
    """Compared with finite differences, by torch's gradcheck, with uneven splits."""

    @pytest.mark.parametrize("split", UNEVEN, ids=str)
    @pytest.mark.parametrize("dim", [0, 1])
    def test_of_gathered_tensors_once_and_twice(self, split, dim, run):
        with run():
            wrapped = wrap(Returns(lambda x: (x * x.sin(), x.exp())), *split, dim=dim)
            inputs = double(6, 2) if dim == 0 else double(2, 6)
            assert gradcheck(wrapped, (inputs,))
            assert gradgradcheck(wrapped, (inputs,))

    @pytest.mark.parametrize("split", UNEVEN, ids=str)
    @pytest.mark.parametrize("reduce", ["samples", "sum"])
    def test_of_combined_scalars_once_and_twice(self, split, reduce, run):
        function = (lambda x: (x**3).mean()) if reduce == "samples" else (lambda x: (x**3).sum())
        with run():
            wrapped, inputs = wrap(Returns(function), *split, reduce=reduce), double(6, 2)
            torch.testing.assert_close(wrapped(inputs), function(inputs))
            assert gradcheck(wrapped, (inputs,))
            assert gradgradcheck(wrapped, (inputs,))

    @pytest.mark.parametrize("split", UNEVEN, ids=str)
    def test_by_parameters(self, split, run):
        module, inputs = MODELS["mlp"][0]().double(), torch.randn(6, 5, dtype=torch.double)
        with run():
            wrapped = wrap(module, *split)
            assert gradcheck(lambda *_: wrapped(inputs), tuple(module.parameters()), fast_mode=True)
            assert gradgradcheck(lambda *_: wrapped(inputs), tuple(module.parameters()), fast_mode=True)

    @pytest.mark.parametrize("split", UNEVEN, ids=str)
    def test_a_penalty_on_gradients_outlives_the_graph_it_came_from(self, split, run):
        """The outputs' graph is freed before the second backward, which needs parts of it."""
        module, points = MODELS["mlp"][0]().double(), torch.randn(6, 5, dtype=torch.double)
        reference = copy.deepcopy(module)

        def penalty(model):
            inputs = points.clone().requires_grad_()
            outputs = model(inputs)
            (grads,) = torch.autograd.grad(outputs, inputs, torch.ones_like(outputs), create_graph=True)
            del outputs
            gc.collect()
            return (grads.norm(dim=1) - 1).pow(2).mean()

        penalty(reference).backward()
        with run():
            penalty(wrap(module, *split)).backward()
        assert_same_gradients(module, reference, 1e-10)


class TestMemoryIsFreed:
    @pytest.mark.parametrize("with_backward", [True, False])
    @pytest.mark.parametrize("split", [(4, 6, 6), (0, 8, 8)], ids=str)
    def test_without_the_collector(self, split, with_backward, run):
        """A reference cycle would keep a step's replicas and activations until Python happens to look for cycles."""
        alive = []

        def see(module, x):
            hidden = module.body[0](x)
            alive.extend(weakref.ref(thing) for thing in (module, module.body[0], x, hidden))

        home = Witness(see)
        own = {id(home), id(home.body[0])}
        gc.collect()
        gc.disable()
        try:
            with run():
                wrapped, inputs = wrap(home, *split), torch.randn(BATCH, 5)
                outputs = wrapped(inputs)
                alive.append(weakref.ref(outputs))
                if with_backward:
                    loss_of(outputs).backward()
                del outputs
                left = [thing() for thing in alive if thing() is not None and id(thing()) not in own]
                assert [type(thing).__name__ for thing in left] == []
                alive.append(weakref.ref(wrapped))
                del wrapped
                assert alive[-1]() is None
        finally:
            gc.enable()


class TestReplicas:
    """Inside a tracker each device has a replica of the module, made as torch makes them."""

    def test_have_lists_and_dicts_of_parameters(self, run):
        """A replica's containers were once empty. Their contents must be available through every access."""
        seen = []

        class Looks(Listed):
            def forward(self, x):
                weights = [weight.detach().clone() for weight in self.weights]
                seen.append((len(self.weights), weights, self.weights[1].shape, list(self.named), self.named["scale"]))
                return super().forward(x)

        module = Looks()
        with run():
            wrap(module, 4, 6, 6)(torch.randn(BATCH, 5))
        assert len(seen) == 3
        for count, weights, shape, names, scale in seen:
            assert (count, shape, names) == (3, (5, 5), ["scale"])
            assert all(torch.equal(one, other) for one, other in zip(weights, module.weights, strict=True))
            assert torch.equal(scale, module.named["scale"])


class TestModes:
    """Modes set around the wrapper apply to each chunk."""

    @pytest.mark.parametrize("split", [(4, 6, 6), (1, 2, 13), (0, 8, 8)], ids=str)
    def test_gradients_under_autocast(self, split, run):
        module, inputs = MODELS["mlp"][0](), torch.randn(BATCH, 5)
        reference = copy.deepcopy(module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = reference(inputs)
        loss_of(plain.float()).backward()
        with run():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = wrap(module, *split)(inputs)
            loss_of(outputs.float()).backward()
        assert torch.equal(outputs, plain)
        assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
        assert_same_gradients(module, reference, 0.02)  # a sum of bfloat16 gradients, in another order


class OddError(Exception):
    """Its constructor takes more than a message, so it cannot be recreated from a message."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.code = code


class TestErrors:
    @pytest.mark.parametrize("failing", [4, 6, 7])
    @pytest.mark.parametrize(
        "error", [ArithmeticError("no such number"), KeyError("key"), OddError(7, "odd"), NotImplementedError()]
    )
    def test_of_a_replica_pass_through_with_their_type(self, error, failing, run):
        def see(module, x):
            if armed and len(x) == failing:
                raise error

        armed = [True]
        module = Witness(see)
        before = {name: (id(tensor), tensor.clone()) for name, tensor in module.named_parameters()}
        with run():
            wrapped = wrap(module, 4, 6, 7)
            with pytest.raises(type(error)) as caught:
                wrapped(torch.randn(17, 5))
            assert caught.value is error
            armed.clear()
            assert wrapped(torch.randn(17, 5)).shape == (17, 2), "the next step runs"
        for name, parameter in module.named_parameters():
            identity, values = before[name]
            assert id(parameter) == identity
            assert torch.equal(parameter, values)


class TestHooks:
    def test_of_parameters_get_the_whole_gradient_once(self, run):
        module, inputs = MODELS["mlp"][0]().double(), torch.randn(BATCH, 5, dtype=torch.double)
        reference = copy.deepcopy(module)
        loss_of(reference(inputs)).backward()
        seen, after = [], []
        module[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
        module[0].weight.register_post_accumulate_grad_hook(lambda parameter: after.append(parameter.grad.clone()))
        with run():
            loss_of(wrap(module, 1, 2, 13)(inputs)).backward()
        assert len(seen) == len(after) == 1
        torch.testing.assert_close(seen[0], reference[0].weight.grad)
        torch.testing.assert_close(after[0], reference[0].weight.grad)

    def test_of_the_wrapper_run_once(self):
        sizes = []
        wrapped = wrap(nn.Linear(5, 2), 4, 6, 6)
        wrapped.register_forward_hook(lambda _, args, output: sizes.append((len(args[0]), len(output))))
        wrapped(torch.randn(BATCH, 5))
        assert sizes == [(BATCH, BATCH)]
