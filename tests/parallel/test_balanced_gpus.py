"""The wrapper on real GPUs: on two GPUs, or on one GPU that is named twice.

Replicas run in separate threads there. So each replica is checked for state that threads do not inherit, and records
come in any order.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref

import pytest
import torch
from balanced_models import (
    MODELS,
    Returns,
    Unused,
    assert_same_gradients,
    inputs_of,
    loss_of,
)
from events import until
from gpus import CARDS, KIND, card
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from autosplit.oom import OutOfMemoryError
from autosplit.parallel.balanced import BalancedDataParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights"),  # cuDNN's, of weights that were copied
]

BATCH = 8
SPLITS = [(2, 6), (6, 2), (1, 7), (0, 8), (8, 0)]
ORDERS = [(0, 1), (1, 0)] if CARDS == (0, 1) else [(0, 0)]
TOLERANCE = 1e-10


HOME = card(CARDS[0])


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def wrap(module: nn.Module, *split: int, cards=CARDS, **options) -> BalancedDataParallel:
    return BalancedDataParallel(None, module, list(cards), split=split, **options)


def made(name: str, home: torch.device = HOME):
    """Return a model, its copy, and inputs on its device, all in double precision."""
    make, shape = MODELS[name]
    torch.set_default_dtype(torch.double)
    with home:  # not .to(home): a buffer that requires grad would be a leaf no more
        reference, module = make(), make()
    module.load_state_dict(reference.state_dict())
    return module, reference, inputs_of(shape, torch.double, BATCH).to(home)


class Witness(nn.Module):
    """Records the value of a function in each forward, with the module (or replica) and the chunk."""

    def __init__(self, see):
        super().__init__()
        self.see, self.seen = see, []
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        self.seen.append(self.see(self, x))
        return self.body(x)


def witnessed(see, *split: int):
    module = Witness(see).to(HOME)
    outputs = wrap(module, *(split or (2, 6)))(torch.randn(BATCH, 5))
    return module.seen, outputs


class TestGradients:
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "unused"])
    def test_are_the_plain_modules(self, name, split):
        module, reference, inputs = made(name)
        plain = reference(inputs)
        loss_of(plain).backward()
        outputs = wrap(module, *split)(inputs)
        torch.testing.assert_close(outputs, plain)
        loss_of(outputs).backward()
        assert_same_gradients(module, reference, TOLERANCE)

    @pytest.mark.parametrize("where", ["cpu", CARDS[0], CARDS[1]])
    def test_of_inputs_wherever_they_are(self, where):
        module, _, inputs = made("mlp")
        plain = inputs.clone().requires_grad_()
        loss_of(module(plain)).backward()
        ours = inputs.to("cpu" if where == "cpu" else card(where)).detach().requires_grad_()
        loss_of(wrap(module, 3, 5)(ours)).backward()
        assert ours.grad.device == ours.device
        torch.testing.assert_close(ours.grad, plain.grad.to(ours.device))

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.double, torch.cdouble], ids=str)
    def test_against_differences_once_and_twice(self, split, dtype):
        wrapped = wrap(Returns(lambda x: (x * x.sin(), x**2)), *split)
        inputs = torch.randn(BATCH, 2, dtype=dtype, device=HOME, requires_grad=True)
        assert gradcheck(wrapped, (inputs,))
        assert gradgradcheck(wrapped, (inputs,))

    @pytest.mark.cuda  # the emulated devices have no complex tensors
    def test_complex_outputs_are_complex(self):
        """torch's copies between GPUs use pairs of real numbers, and have returned these."""
        module = nn.Linear(3, 2, dtype=torch.cfloat, device=HOME)
        inputs = torch.randn(BATCH, 3, dtype=torch.cfloat, device=HOME)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                outputs = wrap(module, 3, 5)(inputs)
            assert (outputs.dtype, outputs.shape) == (torch.cfloat, (BATCH, 2))
            torch.testing.assert_close(outputs, module(inputs))

    @pytest.mark.cuda  # nn.DataParallel's broadcast is
    def test_an_even_split_is_nn_data_parallels(self):
        """With the same chunks, outputs, gradients and running statistics are equal, too."""
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double().to(HOME)
        theirs = copy.deepcopy(module)
        parent = nn.DataParallel(theirs, list(CARDS))
        ours = wrap(module, 4, 4)
        for _ in range(3):
            inputs = torch.randn(BATCH, 4, dtype=torch.double)
            expected, outputs = parent(inputs), ours(inputs)
            torch.testing.assert_close(outputs, expected)
            loss_of(expected).backward()
            loss_of(outputs).backward()
        assert_same_gradients(module, theirs, TOLERANCE)
        torch.testing.assert_close(module[1].running_mean, theirs[1].running_mean)
        torch.testing.assert_close(module[1].running_var, theirs[1].running_var)

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_of_what_nothing_used_change_nothing(self, split):
        """torch's broadcast creates zero gradients on several GPUs. A plain module has no gradient."""
        module = Unused().to(HOME)
        loss_of(wrap(module, *split)(torch.randn(BATCH, 5))).backward()
        assert module.unused.weight.grad is None or not module.unused.weight.grad.any()
        assert module.used.weight.grad.any()


class TestBatchNorm:
    @pytest.mark.parametrize("split", [(2, 6), (6, 2), (0, 8), (8, 0)], ids=str)
    def test_is_that_of_the_same_chunks_by_hand(self, split):
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double().to(HOME)
        reference, first = copy.deepcopy(module), copy.deepcopy(module)
        wrapped = wrap(module, *split)
        for _ in range(3):
            inputs = torch.randn(BATCH, 4, dtype=torch.double, device=HOME) + 2
            chunks = inputs.split([size for size in split if size])
            first(chunks[0])
            loss_of(torch.cat([reference(chunk) for chunk in chunks])).backward()
            loss_of(wrapped(inputs)).backward()
        assert_same_gradients(module, reference, TOLERANCE)
        # The first device with samples updates the statistics, even if the module is on another device.
        assert module[1].num_batches_tracked == 3
        torch.testing.assert_close(module[1].running_mean, first[1].running_mean)
        torch.testing.assert_close(module[1].running_var, first[1].running_var)


class TestDevices:
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    @pytest.mark.parametrize("order", ORDERS, ids=str)
    def test_in_both_orders(self, order, split):
        module, reference, inputs = made("mlp", card(order[0]))
        plain = reference(inputs)
        loss_of(plain).backward()
        for source in ("cpu", *map(card, order)):
            module.zero_grad()
            outputs = wrap(module, *split, cards=order)(inputs.to(source))
            assert outputs.device == card(order[0])
            torch.testing.assert_close(outputs, plain)
            loss_of(outputs).backward()
            assert_same_gradients(module, reference, TOLERANCE)

    def test_moved_after_it_was_wrapped(self):
        """The order of common scripts: wrap first, then call .cuda()."""
        wrapped = BalancedDataParallel(2, nn.Linear(5, 3), list(CARDS)).to(card(CARDS[0]))
        inputs = torch.randn(BATCH, 5)
        torch.testing.assert_close(wrapped(inputs), wrapped.module(inputs.to(HOME)))


class TestInsideReplicas:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("split", [(2, 6), (0, 8), (8, 0)], ids=str)
    def test_autocast_has_the_callers_dtype(self, split, dtype):
        """torch's threads learn that autocast is on, but not its dtype. Replicas ran in float16."""

        def see(module, x):
            return torch.is_autocast_enabled(KIND), torch.get_autocast_dtype(KIND), module.body[0](x).dtype

        with torch.autocast(KIND, dtype=dtype):
            seen, outputs = witnessed(see, *split)
        assert seen == [(True, dtype, dtype)] * sum(1 for size in split if size)
        assert outputs.dtype == dtype

    @pytest.mark.parametrize("split", [(2, 6), (0, 8), (8, 0)], ids=str)
    def test_inference_mode(self, split):
        def see(module, x):
            x.mul_(1)  # an inference tensor may be changed in inference mode only
            return torch.is_inference_mode_enabled()

        with torch.inference_mode():
            seen, outputs = witnessed(see, *split)
        assert set(seen) == {True}
        assert outputs.is_inference()

    @pytest.mark.parametrize("split", [(2, 6), (0, 8), (8, 0)], ids=str)
    def test_the_default_device(self, split):
        """Without an index it is the current GPU. In a replica it is the replica's GPU."""
        module = Witness(lambda module, x: torch.zeros(1).device == x.device).to(HOME)
        inputs = torch.randn(BATCH, 5)
        with torch.device(KIND):
            outputs = wrap(module, *split)(inputs)
        assert set(module.seen) == {True}
        assert outputs.device == HOME

    @pytest.mark.parametrize("with_backward", [True, False])
    @pytest.mark.parametrize("split", [(2, 6), (0, 8)], ids=str)
    def test_nothing_of_them_waits_for_the_collector(self, split, with_backward):
        alive = []
        home = Witness(lambda module, x: alive.append(weakref.ref(module))).to(HOME)
        gc.collect()
        gc.disable()
        try:
            outputs = wrap(home, *split)(torch.randn(BATCH, 5))
            alive.append(weakref.ref(outputs))
            if with_backward:
                loss_of(outputs).backward()
            del outputs
            until(lambda: all(ref() is None for ref in alive))  # the engine's threads drop the graph after backward
        finally:
            gc.enable()


class TestErrors:
    @pytest.mark.parametrize("failing", [2, 6])
    @pytest.mark.parametrize("error", [ArithmeticError, KeyError, NotImplementedError])
    def test_of_a_replica_pass_through_with_their_type(self, error, failing):
        def see(module, x):
            if armed and len(x) == failing:
                raise error("no such thing")

        armed = [True]
        wrapped = wrap(Witness(see).to(HOME), 2, 6)
        with pytest.raises(error, match="no such thing"):
            wrapped(torch.randn(BATCH, 5))
        armed.clear()
        assert wrapped(torch.randn(BATCH, 5)).shape == (BATCH, 2)

    @pytest.mark.parametrize(
        ("split", "position"), [((5, 3), 1), ((3, 5), 0), ((0, 3), 1), ((3, 0), 0)], ids=["1", "0", "only 1", "only 0"]
    )
    def test_out_of_memory_names_the_device_and_its_samples(self, split, position):
        def see(module, x):
            if armed and len(x) == 3:
                torch.empty(2**50, dtype=torch.uint8, device=x.device)

        armed = [True]
        wrapped = wrap(Witness(see).to(HOME), *split)
        inputs = torch.randn(sum(split), 5)
        named = re.escape(str(card(CARDS[position])))
        with pytest.raises(torch.OutOfMemoryError, match=rf"^{named} is out of memory with 3 samples") as caught:
            wrapped(inputs)
        assert isinstance(caught.value, OutOfMemoryError)
        assert (caught.value.device, caught.value.device_index) == (str(card(CARDS[position])), position)
        del caught
        armed.clear()
        assert wrapped(inputs).shape == (len(inputs), 2)
