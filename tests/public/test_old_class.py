"""Switching from the old class: each of its bugs and of nn.DataParallel's bugs is tested here.

The old class of this name took `gpu0_bsz` samples for the first GPU and split the rest. Many repositories use similar
copies of it. Each test describes a bug and shows that it does not happen here.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from balanced_models import RUNS, Echo, assert_same_gradients, joined, loss_of, tracked, wrap
from error_types import DeviceError, InputError, WorkloadError
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import BalancedDataParallel, Whole, data_parallel


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def old_call(gpu0_bsz: int, module: nn.Module, count: int, **options) -> BalancedDataParallel:
    """Call it like old scripts: the samples of the first device, then the model."""
    return BalancedDataParallel(gpu0_bsz, module, ["cpu"] * count, dim=0, **options)


def sizes_seen(gpu0_bsz: int, count: int, batch: int) -> list[int]:
    """Return each device's part of a batch."""
    module = Echo()
    inputs = torch.arange(float(batch)).view(-1, 1)
    assert torch.equal(old_call(gpu0_bsz, module, count)(inputs), inputs)
    return [len(args[0]) for args, _ in module.calls]


class WithLoss(nn.Linear):
    """Returns a mean over its samples, like models with their own loss."""

    def __init__(self):
        super().__init__(5, 3)

    def forward(self, x, target):
        return F.cross_entropy(super().forward(x), target)


class TestFourteenDefects:
    def test_01_a_large_share_became_an_even_split(self):
        """Asked for 6 of 10 on the first of two GPUs, it gave 5 and 5: a fast first GPU could never get more."""
        assert sizes_seen(6, 2, 10) == [6, 4]
        assert sizes_seen(9, 3, 12) == [9, 2, 1]

    def test_02_the_share_was_no_limit(self):
        """Asked for 2 of 9 on four GPUs, it gave 3, 3, 3: more than the first could hold, and a GPU left out."""
        assert sizes_seen(2, 4, 9) == [2, 3, 2, 2]
        for batch in range(1, 40):
            sizes = sizes_seen(2, 4, batch)
            assert sizes[0] == min(2, batch)
            assert len(sizes) == min(4, 1 + max(0, batch - 2)), "no device is left out while there are samples"

    @pytest.mark.parametrize("gpu0_bsz", [0, 1, 4, 100])
    def test_03_one_gpu_was_a_division_by_zero(self, gpu0_bsz, run):
        """Scripts that use all available GPUs also run on machines with one GPU. It gets the whole batch."""
        module, inputs = nn.Linear(5, 3), torch.randn(4, 5)
        with run(1):
            outputs = old_call(gpu0_bsz, module, 1)(inputs)
        torch.testing.assert_close(outputs, module(inputs))

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((), {"x": torch.zeros(8, 2)}),
            (({"x": torch.zeros(8, 2)},), {}),
            ((None, torch.zeros(8, 2)), {}),
            ((None,), {"x": torch.zeros(8, 2)}),
            (([], "text", 3), {"x": {"deep": (torch.zeros(8, 2),)}}),
        ],
        ids=["only by name", "a dict first", "None first", "None, then by name", "deep inside"],
    )
    def test_04_the_batch_had_to_be_the_first_argument(self, args, kwargs):
        """It read the batch size from the first positional argument. Without one, or with a dict there, it crashed."""
        module = Echo()
        old_call(2, module, 3)(*args, **kwargs)
        sizes = [len(next(_tensors((args, kwargs)))) for args, kwargs in module.calls]
        assert sizes == [2, 3, 3]

    @pytest.mark.parametrize(("batch", "count", "sizes"), [(5, 4, [1, 2, 1, 1]), (1, 3, [1]), (3, 4, [1, 1, 1])])
    def test_05_a_short_last_batch_was_an_assertion(self, batch, count, sizes):
        """At the end of an epoch it had more replicas than chunks, and an assertion about modules and inputs failed."""
        assert sizes_seen(1, count, batch) == sizes

    @pytest.mark.parametrize("batch", [6, 7, 16])
    def test_06_no_samples_on_the_first_gpu_always_failed(self, batch, run):
        """If outputs and gradients fill the first GPU, 0 samples are best for it."""
        assert sizes_seen(0, 3, batch) == [(batch + 1) // 2, batch // 2]
        module = nn.Linear(5, 3).double()
        reference, inputs = copy.deepcopy(module), torch.randn(batch, 5, dtype=torch.double)
        loss_of(reference(inputs)).backward()
        with run():
            loss_of(old_call(0, module, 3)(inputs)).backward()
        assert_same_gradients(module, reference, 1e-10)

    def test_07_nor_with_fewer_samples_than_gpus(self):
        """Both bugs above at once: a short last batch, and no samples on the first GPU."""
        assert sizes_seen(0, 4, 2) == [1, 1]
        assert sizes_seen(0, 4, 1) == [1]

    def test_08_batch_norm_never_moved_without_samples_on_the_first_gpu(self, run):
        """Only the first GPU's replica shares its buffers with the module, and it never ran.

        After epochs of training the running mean was still 0 and the variance 1, and evaluation was at chance.
        """
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        by_hand = copy.deepcopy(module)
        wrapped = old_call(0, module, 3)
        for _ in range(5):
            inputs = torch.randn(10, 4) + 2
            with run():
                loss_of(wrapped(inputs)).backward()
            by_hand(inputs[:5])  # the part of the first device with samples
        assert module[1].num_batches_tracked == 5
        torch.testing.assert_close(module[1].running_mean, by_hand[1].running_mean)
        torch.testing.assert_close(module[1].running_var, by_hand[1].running_var)

    def test_09_an_argument_that_could_not_be_cut_ended_the_process(self, capsys):
        """For a mask of another batch size, or a number in a tensor, it printed the sizes and called quit().

        `except Exception` does not catch SystemExit, so the job ended with nothing saved.
        """
        with pytest.raises(WorkloadError, match=r"disagree on the batch size: .*\(8, 3\), \(6, 7\).*Expected one size"):
            old_call(2, Echo(), 3)(torch.zeros(8, 3), torch.zeros(6, 7))
        module = Echo()
        old_call(2, module, 3)(torch.zeros(8, 3), torch.tensor(0.5))
        assert [args[1].item() for args, _ in module.calls] == [0.5] * 3
        assert capsys.readouterr() == ("", "")

    def test_10_a_mean_of_unlike_shares_was_taken_as_if_they_were_alike(self, run):
        """A model returned its loss, a mean over each GPU's share. The script took the mean of these means."""
        module = WithLoss()
        reference, by_old = copy.deepcopy(module), copy.deepcopy(module)
        inputs, target = torch.randn(11, 5), torch.randint(0, 3, (11,))
        whole = reference(inputs, target)
        whole.backward()
        with run():
            loss = wrap(module, 2, 5, 4)(inputs, target)
            loss.mean().backward()  # scripts still call .mean(), which still works
        torch.testing.assert_close(loss, whole)
        assert_same_gradients(module, reference, 1e-6)
        parts = zip(inputs.split([2, 5, 4]), target.split([2, 5, 4]), strict=True)
        torch.stack([by_old(*part) for part in parts]).mean().backward()
        error = (by_old.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm()
        assert error > 0.05, "the old way gives another gradient here"

    def test_11_namedtuples_no_inputs_and_a_module_elsewhere(self, run):
        """A namedtuple came back as a tuple, a call without inputs crashed, and so did a module on another device."""

        class Pair(NamedTuple):
            first: Tensor
            second: Tensor

        class Doubles(nn.Module):
            def forward(self, pair=None):
                assert pair is None or type(pair) is Pair
                return torch.ones(2) if pair is None else Pair(pair.first * 2, pair.second)

        with run():
            outputs = old_call(2, Doubles(), 3)(Pair(torch.ones(8, 1), torch.zeros(8)))
            assert type(outputs) is Pair
            assert outputs.first.sum() == 16
            assert old_call(2, Doubles(), 3)().tolist() == [1, 1]
        with raises(DeviceError, "weight", "meta", "cpu"):
            old_call(2, nn.Linear(2, 2, device="meta"), 3)(torch.zeros(8, 2))

    @pytest.mark.parametrize("batch", [1, 2, 5, 8])
    def test_12_a_flag_beside_a_short_batch_called_replicas_without_their_input(self, batch):
        """All GPUs got the flag, but only some got samples. The others were called with the flag alone."""
        module = Echo()
        old_call(1, module, 4)(torch.zeros(batch, 2), training=True, names=["a", "b", "c"])
        assert sum(len(args[0]) for args, _ in module.calls) == batch
        assert all(kwargs == {"training": True, "names": ["a", "b", "c"]} for _, kwargs in module.calls)

    @pytest.mark.parametrize("batch", [1, 8])
    def test_13_each_forward_printed_eight_lines(self, batch, capsys):
        """One of the copies printed the sizes of every step."""
        old_call(2, Echo(), 3)(torch.zeros(batch, 2))
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("batch", [4, 3])
    def test_14_a_share_divided_away_left_the_first_gpu_out(self, batch):
        """Scripts pass `gpu0_bsz // acc_grad`. 1 // 2 is 0, and the first GPU silently got no samples.

        Half a sample raises an error. A 0 is visible on the wrapper, and trains correctly.
        """
        gpu0_bsz, acc_grad = 1, 2
        with raises(InputError, "gpu0_bsz", "0.5"):
            old_call(gpu0_bsz / acc_grad, nn.BatchNorm1d(2), 3)
        module = nn.BatchNorm1d(2)
        wrapped = old_call(gpu0_bsz // acc_grad, module, 2)
        assert wrapped.gpu0_bsz == 0
        assert wrapped.split_of(batch) == (0, batch)
        wrapped(torch.randn(batch, 2))
        assert module.num_batches_tracked == 1


class TestTheTrapInItsReadme:
    """The old README promised 4 + 6 + 6 samples for a batch of 16 in two steps, and passed `4 // 2`."""

    def test_a_loader_of_whole_batches_got_another_split(self):
        """The loader yielded 16 samples, and the first GPU got 2 of them: 2, 7, 7. The others exceeded the promised
        sizes.
        """
        wrapped = old_call(4 // 2, Echo(), 3)
        assert wrapped.split_of(16) == (2, 7, 7)

    def test_the_loader_must_yield_what_one_forward_takes(self):
        """gpu0_bsz belongs to one forward, so two forwards of 8 make the promised batch."""
        wrapped = old_call(4 // 2, Echo(), 3)
        forwards = [wrapped.split_of(8), wrapped.split_of(8)]
        assert forwards == [(2, 3, 3), (2, 3, 3)]
        assert tuple(map(sum, zip(*forwards, strict=True))) == (4, 6, 6)

    def test_a_split_keeps_its_proportions(self):
        """With a split, the same loader keeps the proportions, and ceilings reject a batch that does not fit."""
        assert wrap(Echo(), 2, 3, 3).split_of(16) == (4, 6, 6)
        bounded = wrap(Echo(), 2, 3, 3, ceilings=(2, 4, 4))
        with raises(InputError, "16"):
            bounded(torch.zeros(16, 1))


@dataclasses.dataclass
class Record:
    codes: Tensor
    labels: Tensor


class TestTrapsOfDataParallel:
    """Bugs of nn.DataParallel that the old class shared."""

    def test_nine_samples_on_four_gpus_used_three(self):
        """It splits into chunks of the rounded-up size: 3, 3, 3 and nothing for the fourth GPU."""
        module = Echo()
        BalancedDataParallel(None, module, ["cpu"] * 4)(torch.zeros(9, 1), flag=True)
        assert [len(args[0]) for args, _ in module.calls] == [3, 2, 2, 2]
        assert all(kwargs == {"flag": True} for _, kwargs in module.calls)

    def test_an_argument_by_name_of_fewer_rows(self):
        """With one positional argument it raised AssertionError. With three, missing rows were silently left out."""
        short = torch.zeros(2, 7)
        for count in (1, 3):
            with pytest.raises(WorkloadError, match=r"disagree.*\(2, 7\)"):
                wrap(Echo(), 2, 2, 2, 2)(*[torch.zeros(8, 3)] * count, short=short)
        module = Echo()
        wrap(module, 2, 2, 2, 2)(*[torch.zeros(8, 3)] * 3, short=Whole(short))
        assert [kwargs["short"].shape for _, kwargs in module.calls] == [(2, 7)] * 4

    @pytest.mark.parametrize(
        "kind", [Record, lambda **fields: collections.UserDict(fields)], ids=["record", "encoding"]
    )
    def test_records_and_encodings_were_not_cut(self, kind):
        """Each GPU got the whole batch, so outputs were right but repeated, and there was no speedup."""
        module = Echo()
        wrap(module, 1, 3)(kind(codes=torch.zeros(4, 2), labels=torch.zeros(4)))
        received = [args[0] for args, _ in module.calls]
        parts = [part.codes if isinstance(part, Record) else part["codes"] for part in received]
        assert [len(part) for part in parts] == [1, 3]

    def test_a_number_in_a_tensor_could_not_be_scattered(self):
        module = Echo()
        wrap(module, 1, 3)(torch.zeros(4, 2), scale=torch.tensor(2.0))
        assert [kwargs["scale"].item() for _, kwargs in module.calls] == [2.0, 2.0]

    def test_texts_came_back_as_a_map_object(self, run):
        assert joined(lambda x: {"x": x, "name": "bert"}, 1, 3, run=run)["name"] == "bert"

    @pytest.mark.parametrize(
        ("make", "value"),
        [
            (lambda x: Record(x, x), lambda out: out.codes),
            (lambda x: collections.UserDict(codes=x), lambda out: out["codes"]),
            (lambda x: (x, 0.5), lambda out: out[0]),
        ],
        ids=["record", "encoding", "float"],
    )
    def test_records_encodings_and_floats_could_not_be_gathered(self, make, value, run):
        outputs = joined(make, 1, 3, run=run)
        assert type(outputs) is type(make(torch.zeros(1)))
        assert value(outputs).flatten().tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_losses_came_back_as_a_vector_and_a_warning(self, run):
        """It returned one number per GPU, and scripts averaged them. The wrapper returns one number."""
        assert joined(lambda x: x.mean(), 1, 3, run=run).shape == ()

    @pytest.mark.parametrize(
        ("function", "what"),
        [
            (lambda x: {"a": x} if len(x) == 1 else {"a": x, "b": x}, "keys"),
            (lambda x: x.expand(-1, len(x)), "shapes"),
        ],
        ids=["dicts of other lengths", "padded to other lengths"],
    )
    def test_outputs_that_do_not_fit_each_other_are_named(self, function, what, run):
        with raises(WorkloadError, str(what)):
            joined(function, 1, 3, run=run)

    def test_wrapping_a_compiled_module_emptied_it(self):
        """Replication moved its parameters to the inner module, and the compiled module lost them."""
        module = nn.Linear(2, 2)
        values = [parameter.clone() for parameter in module.parameters()]
        with raises(InputError):
            old_call(2, torch.compile(module, backend="eager"), 2)(torch.zeros(8, 2))
        assert all(torch.equal(one, other) for one, other in zip(module.parameters(), values, strict=True))
        assert len(values) == 2

    def test_a_module_compiled_in_place_ran_with_the_first_gpus_weights(self):
        """The compiled call is bound to the original module, and every replica used that call."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module.compile(backend="eager")
        with raises(InputError):
            old_call(2, module, 2)

    @pytest.mark.parametrize("compiled_in_place", [True, False])
    def test_a_compiled_part_is_as_bad_as_a_compiled_whole(self, compiled_in_place):
        """Replication copies every submodule, so a compiled submodule loses its parameters, too."""
        part = nn.Linear(2, 2)
        if compiled_in_place:
            part.compile(backend="eager")
            module = nn.Sequential(part, nn.Linear(2, 2))
        else:
            module = nn.Sequential(torch.compile(part, backend="eager"), nn.Linear(2, 2))
        with raises(InputError):
            old_call(2, module, 2)
        assert len(list(part.parameters())) == 2

    def test_parameters_of_the_wrapper_are_those_of_the_module(self, run):
        """Inside a replica there are no parameters, which is known. The wrapper's parameters are unchanged."""
        module = nn.Linear(2, 2)
        wrapped = old_call(2, module, 3)
        with run():
            loss_of(wrapped(torch.randn(8, 2))).backward()
        assert [id(one) for one in wrapped.parameters()] == [id(one) for one in module.parameters()]
        assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        before = module.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(module.weight, before)

    def test_a_replica_has_no_parameters_of_its_own_but_has_its_weights(self):
        """`next(self.parameters()).device` in a forward fails in a replica, as in torch's replicas."""
        seen = []

        class Asks(nn.Linear):
            def forward(self, x):
                seen.append((len(list(self.parameters())), self.weight.device, x.device))
                return super().forward(x)

        with tracked():
            wrap(Asks(2, 2), 4, 6, 6)(torch.randn(16, 2))
        assert seen == [(0, torch.device("cpu"), torch.device("cpu"))] * 3

    def test_without_a_gpu_it_lost_its_arguments(self):
        """On a CPU nn.DataParallel drops ids and dim, and its functional form raises; scripts read them anyway."""
        wrapped = BalancedDataParallel(2, nn.Linear(5, 3), dim=1)
        assert (wrapped.dim, wrapped.gpu0_bsz) == (1, 2)
        module, inputs = nn.Linear(5, 3), torch.randn(4, 5)
        torch.testing.assert_close(data_parallel(module, inputs, 1, ["cpu", "cpu"]), module(inputs))
        assert old_call(1, module, 2).device_ids == [torch.device("cpu")] * 2

    def test_unlike_gpus_are_no_reason_to_warn(self, monkeypatch):
        """nn.DataParallel advises against GPUs with different memory. autosplit supports them."""
        cards = [SimpleNamespace(total_memory=80, multi_processor_count=100), SimpleNamespace(total_memory=24)]
        cards[1].multi_processor_count = 40
        properties: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=0: cards[torch.device("cuda", device).index],
        }
        for name, function in properties.items():
            monkeypatch.setattr(torch.cuda, name, function)
        with pytest.warns(UserWarning, match="imbalance between your GPUs"):
            nn.DataParallel(nn.Linear(2, 2), [0, 1])
        wrapped = BalancedDataParallel(3, nn.Linear(2, 2), [0, 1])  # a warning would be an error here
        assert wrapped.split_of(4) == (3, 1)

    def test_modes_of_the_caller_stopped_at_the_replicas(self, run):
        """Its threads ran in float16 under bfloat16 autocast, and outside of inference mode."""
        seen = []

        class Asks(nn.Linear):
            def forward(self, x):
                seen.append((torch.is_inference_mode_enabled(), torch.get_autocast_dtype("cpu")))
                return super().forward(x)

        with run(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            wrap(Asks(2, 2), 1, 2, 3)(torch.randn(6, 2))
        assert seen == [(True, torch.float16)] * 3


def _tensors(tree):
    """Return the tensors of a call, found without the package's own code."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, tuple, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)
