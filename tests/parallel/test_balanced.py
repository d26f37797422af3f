"""The wrapper gives the same outputs and gradients as the plain model, for any split."""

from __future__ import annotations

import collections
import copy
import pickle
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from balanced_models import (
    BATCH,
    MODELS,
    RUNS,
    SPLITS,
    TOLERANCE,
    Echo,
    Sparse,
    assert_same_gradients,
    inputs_of,
    joined,
    loss_of,
    tracked,
    wrap,
)
from raised import raises
from torch import Tensor, nn

import autosplit
from autosplit.errors import DeviceError, InputError
from autosplit.oom import OutOfMemoryError
from autosplit.parallel.balanced import AmbiguousBatchWarning, BalancedDataParallel, data_parallel
from autosplit.parallel.persistent_replicas import PersistentReplicas
from autosplit.parallel.tensor_copies import Copies
from autosplit.runtime.memory_tracker import Tracker
from autosplit.workload.tree import Whole


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


class Pair(NamedTuple):
    values: Tensor
    name: str


class Combines(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, left, factor, right, extra=None):
        outputs = factor * left * self.weight * torch.tanh(right)
        return outputs if extra is None else outputs + extra


def nested_inputs(dtype, n: int = BATCH):
    x, y, z = (torch.randn(n, 5, dtype=dtype) for _ in range(3))
    return collections.OrderedDict(first=x, rest=(y, [z, {"flag": "kept"}]), pair=Pair(x * y, "pair"))


class TakesApart(nn.Linear):
    """Checks the types of its arguments, and returns a nested container."""

    def __init__(self):
        super().__init__(5, 3)

    def forward(self, tree):
        assert type(tree) is collections.OrderedDict
        first, (left, [right, options]), pair = tree.values()
        assert type(pair) is Pair
        assert options == {"flag": "kept"}
        total = super().forward(first + left * right)
        return collections.OrderedDict(
            sum=total, parts=(left * self.bias.sum(), [right]), pair=Pair(total * 2, pair.name)
        )


class TestGradients:
    """The gradient of one step, relative L2 error over all gradients together."""

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("split", [(5, 11), (2, 1, 13), (16,), (0, 16)], ids=str)
    def test_of_many_inputs(self, split, dtype, run):
        """Tensors, a number and an optional argument, by position and by name. Each tensor gets its gradient."""
        module = Combines().to(dtype)
        reference = copy.deepcopy(module)
        inputs = [torch.randn(BATCH, 5, dtype=dtype) for _ in range(3)]

        def leaves():
            return [tensor.clone().requires_grad_() for tensor in inputs]

        def calls(model, x, y, z):
            return loss_of(model(x, 2.5, y)) + loss_of(model(x, 0.5, right=y, extra=z)) + loss_of(model(x, 2.5, y, z))

        ours, theirs = leaves(), leaves()
        calls(reference, *theirs).backward()
        with run(len(split)):
            calls(wrap(module, *split), *ours).backward()
        assert_same_gradients(module, reference, TOLERANCE[dtype])
        for one, other in zip(ours, theirs, strict=True):
            assert (one.grad - other.grad).norm() < TOLERANCE[dtype] * other.grad.norm()

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("split", [(4, 6, 6), (1, 2, 13), (0, 3, 13)], ids=str)
    def test_of_nested_inputs_and_outputs(self, split, dtype, run):
        module = TakesApart().to(dtype)
        reference = copy.deepcopy(module)
        tree = nested_inputs(dtype)
        (expected, (left, [right]), pair) = reference(tree).values()
        (loss_of(expected) + loss_of(left * right) + loss_of(pair.values)).backward()
        with run():
            outputs = wrap(module, *split)(tree)
            assert list(outputs) == ["sum", "parts", "pair"]
            ours, (left, [right]), pair = outputs.values()
            (loss_of(ours) + loss_of(left * right) + loss_of(pair.values)).backward()
        assert [type(outputs), type(outputs["parts"]), type(pair)] == [collections.OrderedDict, tuple, Pair]
        torch.testing.assert_close(ours, expected)
        assert pair.name == "pair"
        assert_same_gradients(module, reference, TOLERANCE[dtype])

    @pytest.mark.parametrize("split", [(4, 6, 6), (1, 2, 13), (0, 8, 8)], ids=str)
    def test_of_an_embedding_stay_sparse(self, split, run):
        """A dense gradient of a sparse embedding would be correct, but as large as the table."""
        module = Sparse().double()
        reference, codes = copy.deepcopy(module), inputs_of(None, torch.double)
        loss_of(reference(codes)).backward()
        with run():
            loss_of(wrap(module, *split)(codes)).backward()
        assert module.embedding.weight.grad.layout == torch.sparse_coo
        assert_same_gradients(module, reference, 1e-10)
        if run is nullcontext:  # an optimizer made for sparse gradients takes them
            torch.optim.SparseAdam(module.embedding.parameters()).step()

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("split", [(4, 6, 6), (1, 2, 13), (0, 8, 8)], ids=str)
    @pytest.mark.parametrize("weights", [torch.channels_last, torch.contiguous_format], ids=str)
    @pytest.mark.parametrize("images", [torch.channels_last, torch.contiguous_format], ids=str)
    def test_have_the_strides_of_their_parameters(self, weights, images, split, dtype, run):
        """Over three optimizer steps, because the layout must last for any layout of the inputs."""
        module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 2, 3)).to(dtype)
        module = module.to(memory_format=weights)
        reference = copy.deepcopy(module)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (module, reference)]
        for _ in range(3):
            inputs = torch.randn(BATCH, 4, 6, 6, dtype=dtype).contiguous(memory_format=images)
            loss_of(reference(inputs)).backward()
            with run():
                loss_of(wrap(module, *split)(inputs)).backward()
            assert all(parameter.grad.stride() == parameter.stride() for parameter in module.parameters())
            assert_same_gradients(module, reference, 10 * TOLERANCE[dtype])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


NORM_SPLITS = [(4, 6, 6), (2, 2, 12), (0, 8, 8), (16, 0, 0), (0, 0, 16)]  # it needs two samples on a device


class TestBatchNorm:
    def test_a_short_batch_is_split_so_that_no_device_has_a_single_sample(self):
        """A last batch of 2 on two devices was split (1, 1), which BatchNorm rejects. The epoch ended in an error."""
        wrapped = wrap(nn.BatchNorm1d(4), 2, 2)
        assert wrapped.split_of(2) == (2, 0)
        wrapped(torch.randn(2, 4)).sum().backward()
        assert wrap(nn.Linear(4, 4), 2, 2).split_of(2) == (1, 1), "elsewhere it is in proportion"

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


class TestByHand:
    """If a module's result depends on the chunk, the reference runs the same chunks in a plain loop."""

    @staticmethod
    def chunks(inputs, split):
        return inputs.split([size for size in split if size])

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("split", NORM_SPLITS, ids=str)
    def test_batch_norm_in_training(self, split, dtype, run):
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        reference, inputs = copy.deepcopy(module), torch.randn(BATCH, 4, dtype=dtype)
        expected = torch.cat([reference(part) for part in self.chunks(inputs, split)])
        loss_of(expected).backward()
        with run():
            outputs = wrap(module, *split)(inputs)
            loss_of(outputs).backward()
        torch.testing.assert_close(outputs, expected)
        assert_same_gradients(module, reference, TOLERANCE[dtype])

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_dropout(self, split, run):
        """Each chunk draws its own mask, from the generator state after the chunk before."""
        module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
        reference, inputs = copy.deepcopy(module), torch.randn(BATCH, 4, dtype=torch.double)
        torch.manual_seed(3)
        expected = torch.cat([reference(part) for part in self.chunks(inputs, split)])
        loss_of(expected).backward()
        torch.manual_seed(3)
        with run():
            outputs = wrap(module, *split)(inputs)
            loss_of(outputs).backward()
        torch.testing.assert_close(outputs, expected)
        assert_same_gradients(module, reference, 1e-10)


class TestCalls:
    @pytest.mark.parametrize("empty", [[], {}, ()], ids=str)
    def test_an_empty_container_reaches_every_device(self, empty, run):
        """An empty container next to a named tensor has no samples, but must arrive with its type."""
        seen = []

        class Keywords(nn.Linear):
            def forward(self, *, x, extra):
                seen.append(extra)
                return super().forward(x)

        module, inputs = Keywords(3, 2), torch.randn(8, 3)
        with run():
            outputs = wrap(module, 1, 2, 5)(x=inputs, extra=empty)
        assert len(seen) == 3
        assert all(type(extra) is type(empty) and not extra for extra in seen)
        torch.testing.assert_close(outputs, module(x=inputs, extra=empty))

    @pytest.mark.parametrize(
        "arguments", [((), {}), (([],), {}), ((), {"x": {}}), ((None, "text"), {}), ((torch.tensor(1.0),), {})], ids=str
    )
    def test_a_module_without_inputs_has_its_gradient(self, arguments, run):
        class Constant(nn.Linear):
            calls = 0

            def forward(self, *args, **kwargs):
                Constant.calls += 1
                return torch.tanh(self.weight) + self.bias

        module = Constant(3, 3)
        reference = copy.deepcopy(module)
        loss_of(reference()).backward()
        Constant.calls = 0
        with run():
            loss_of(wrap(module, 0, 3, 3)(*arguments[0], **arguments[1])).backward()
        assert Constant.calls == 1
        assert_same_gradients(module, reference, 1e-6)

    def test_with_nothing_but_what_is_whole_the_first_device_runs_it(self):
        """The batch size was read from a tensor inside a Whole."""
        module = Echo()
        assert wrap(module, 2, 3)(Whole(torch.zeros(4, 4))).shape == (4, 4)
        assert len(module.calls) == 1

    def test_what_holds_no_samples_is_not_cut(self, run):
        """A number in a tensor, one row for all samples, and a (T, T) mask with (n, T) tokens stay whole."""
        module = Echo()
        tokens, mask = torch.zeros(7, 5), torch.ones(5, 5)
        with run():
            wrap(module, 1, 2, 4)(tokens, torch.tensor(0.5), torch.ones(1, 5), mask)
        shapes = [[tuple(argument.shape) for argument in args] for args, _ in module.calls]
        assert shapes == [[(n, 5), (), (1, 5), (5, 5)] for n in (1, 2, 4)]

    def test_what_was_seen_to_be_whole_stays_so_at_a_batch_as_large_as_it(self, run):
        """A (T, T) mask next to (n, T) tokens was split in the one batch with n equal to T."""
        module, mask = Echo(), torch.ones(4, 4)
        wrapped = wrap(module, 1, 3)
        with run():
            for n in (6, 4):
                wrapped(torch.zeros(n, 4), mask, longer=torch.zeros(n, 4))
        assert [tuple(args[1].shape) for args, _ in module.calls] == [(4, 4)] * 4
        assert [tuple(kwargs["longer"].shape) for _, kwargs in module.calls[2:]] == [(1, 4), (3, 4)]

    def test_a_table_that_is_cut_to_single_rows_is_said(self, run):
        """With one sample per device, each row broadcasts over its sample. The numbers were wrong without a warning."""

        class Positions(nn.Linear):
            def forward(self, x, positions):
                return super().forward(x + positions)

        module, inputs, positions = Positions(5, 2), torch.randn(2, 2, 5), torch.randn(2, 5)
        said = r"single rows. If inputs\[1\] of shape \(2, 5\) .*as autosplit.Whole\(tensor\)"
        with run(), pytest.warns(AmbiguousBatchWarning, match=said):
            wrap(module, 1, 1)(inputs, positions)
        with run():
            outputs = wrap(module, 1, 1)(inputs, autosplit.Whole(positions))
        torch.testing.assert_close(outputs, module(inputs, positions))

    def test_an_error_in_a_batch_that_may_be_cut_by_accident_says_so(self, run):
        class Positions(nn.Linear):
            def forward(self, x, positions):
                return super().forward(x + positions)

        with run(), pytest.raises(RuntimeError, match="must match") as caught:
            wrap(Positions(5, 2), 2, 4)(torch.randn(6, 6, 5), torch.randn(6, 5))
        assert "inputs[1] of shape (6, 5) holds no samples" in caught.value.autosplit_advice

    def test_data_parallel_function(self):
        module, inputs = MODELS["mlp"][0](), torch.randn(8, 5)
        torch.testing.assert_close(data_parallel(module, inputs, 2, ["cpu", "cpu"]), module(inputs))
        for none in ((), None):  # torch's data_parallel takes None for no argument; the module got None
            outputs = data_parallel(Echo(), none, split=(2, 6), device_ids=["cpu", "cpu"], module_kwargs={"x": inputs})
            assert torch.equal(outputs, inputs)

    def test_what_one_device_changes_in_place_is_whole_for_the_next(self, run):
        class Spoils(nn.Module):
            def forward(self, x, mask):
                outputs = x * mask
                mask.zero_()
                return outputs

        with run():
            outputs = wrap(Spoils(), 1, 2, 4)(torch.ones(7, 5), Whole(torch.ones(5)))
        assert torch.equal(outputs, torch.ones(7, 5))


class TestOutputs:
    def test_return_types(self):
        outputs = joined(lambda x: torch.max(x, dim=1), 1, 3)
        assert outputs.values.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_counts_are_summed(self):
        assert joined(lambda x: torch.tensor(len(x)), 1, 3).item() == 4
        assert joined(len, 1, 3) == 4

    def test_equal_counts_are_summed_too(self):
        """Equal integers were returned once: two counts of 3 gave 3, but 3 and 4 gave 7."""
        assert joined(len, 3, 3) == 6

    def test_equal_floats_are_summed_where_the_loss_is_a_sum(self):
        assert joined(lambda x: 2.0, 3, 3, reduce="sum") == 4.0
        assert joined(lambda x: 2.0, 3, 3) == 2.0

    def test_truth_needs_every_device(self):
        assert joined(lambda x: torch.tensor(bool((x < 3).all())), 2, 2).item() is False
        assert joined(lambda x: bool((x < 9).all()), 2, 2) is True


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
        with pytest.raises(InputError, match="Expected"):
            wrapped.split = bad
        assert wrapped.split == (4, 6, 6)

    @pytest.mark.parametrize("bad", [-1, 1.0, True, "4"])
    def test_a_bad_gpu0_bsz(self, bad):
        with pytest.raises(InputError, match=r"gpu0_bsz is .*Expected a whole number of at least 0"):
            BalancedDataParallel(bad, Echo(), ["cpu", "cpu"])

    def test_a_contradiction(self):
        with raises(InputError, "3", "4"):
            BalancedDataParallel(3, Echo(), ["cpu", "cpu"], split=(4, 4))

    def test_ceilings(self):
        wrapped = wrap(Echo(), 4, 6, ceilings=(5, 6))
        assert wrapped.split_of(11) == (5, 6)
        with pytest.raises(InputError):
            wrapped.split_of(12)
        with raises(InputError, "0", "6", "5"):
            wrapped.split = (6, 6)


class TestDevices:
    def test_cpu_by_any_name(self):
        """`cpu:0` is the device that tensors call `cpu`. The error claimed that the module was on another device."""
        wrapped = BalancedDataParallel(None, nn.Linear(2, 2), ["cpu:0", torch.device("cpu", 1)], "cpu:0")
        assert wrapped(torch.zeros(4, 2)).shape == (4, 2)

    def test_a_module_elsewhere_is_a_runtime_error_too(self):
        """nn.DataParallel raises RuntimeError, too, and user code may catch it."""
        with raises(RuntimeError, "weight", "meta"):
            wrap(nn.Linear(2, 2, device="meta"), 2, 2)(torch.zeros(4, 2))

    @pytest.mark.parametrize("part", ["the first layer", "the last layer", "a buffer"])
    def test_one_part_elsewhere(self, part):
        """Any tensor of the module may have been forgotten. After a move back, the same wrapper runs."""
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        wrapped = wrap(module, 2, 2)
        if part == "a buffer":
            module[1].running_var = torch.ones(2, device="meta")
        else:
            module[0 if part == "the first layer" else 2].to("meta")
        name = {"the first layer": "0.weight", "the last layer": "2.weight", "a buffer": "1.running_var"}[part]
        with raises(DeviceError, str(name)):
            wrapped(torch.zeros(4, 2))
        module.to_empty(device="cpu")
        assert wrapped(torch.zeros(4, 2)).shape == (4, 2)

    def test_out_of_memory_names_the_device(self):
        module = nn.Linear(64, 64)
        with Tracker(["cpu:0", "cpu:1"], [None, 40_000]) as tracker:
            with pytest.raises(torch.OutOfMemoryError, match=r"^cpu:1 is out of memory. It requested ") as caught:
                loss_of(wrap(module, 8, 256)(torch.randn(264, 64))).backward()
            assert isinstance(caught.value, OutOfMemoryError)
            assert caught.value.device_index == 1
            del caught
            assert tracker.live_bytes[0] == 64 * 64 * 4 + 512

    def test_mixed_kinds(self):
        with raises(DeviceError, "cuda"):
            BalancedDataParallel(None, Echo(), ["cpu", "cuda:0"])


class TestMemory:
    @staticmethod
    def held(split, function=lambda outputs: outputs.sum()):
        """Return device 0's peak beyond parameters, gradients and outputs, in units of the parameters."""
        module = nn.Linear(1024, 1024, bias=False)
        with tracked(len(split)) as tracker:
            outputs = wrap(module, *split)(torch.randn(sum(split), 1024))
            forward_bytes = tracker.peak_bytes[0]
            tracker.peak_bytes[:] = tracker.live_bytes
            function(outputs).backward()
            assert tracker.live_bytes[0] >= 2 * 4 * 1024**2
            return forward_bytes / 4096, tracker.peak_bytes[0] / (4 * 1024**2)

    def test_gathering_holds_the_outputs_once(self):
        """Each chunk was copied in addition to the gathered block. torch's gather makes no such copy."""
        rows, _ = self.held((0, 100, 100))
        assert rows == 1024 + 200

    @pytest.mark.parametrize("others", [1, 2, 6])
    def test_summing_gradients_takes_as_much_for_many_devices_as_for_two(self, others):
        """Each gradient sum was a new tensor next to the last: a copy of the parameters more from three devices on."""
        assert self.held((4, *(4,) * others))[1] == pytest.approx(
            4, abs=0.1
        )  # weight, its gradient, a second gradient, their sum


class TestCopies:
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_wrapper_is_itself(self, duplicate):
        wrapped = wrap(nn.Linear(3, 2), 1, 3, ceilings=(2, 6), reduce="sum")
        twin = duplicate(wrapped)
        inputs = torch.randn(4, 3)
        assert torch.equal(twin(inputs), wrapped(inputs))
        assert (twin.split, twin.gpu0_bsz, twin.ceilings, twin.reduce) == ((1, 3), 1, (2, 6), "sum")
        assert twin.module.weight is not wrapped.module.weight

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_a_copy_has_no_replicas(self, duplicate):
        """After a rename, the copy shared the replicas of the original."""
        wrapped = wrap(nn.Linear(3, 2), 1, 3)
        wrapped._replicas = PersistentReplicas(Copies())
        twin = duplicate(wrapped)
        assert twin._replicas is None
        assert vars(twin).keys() == vars(wrapped).keys()
