"""Chunks run on their devices. An out-of-memory error names the device and its memory."""

from __future__ import annotations

import pytest
import torch
from raised import raises
from torch import nn

from autosplit.errors import DeviceError, InputError, WorkloadError
from autosplit.oom import OutOfMemoryError
from autosplit.parallel import parallel_apply as running
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.parallel_apply import run_in_sequence, run_on_gpus
from autosplit.workload.tree import Whole

CARDS = tuple(torch.device("cuda", index) for index in (2, 0, 3))
ALLOCATOR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 23.69 GiB"
REPLICA = f"Caught OutOfMemoryError in replica {{}} on device 7.\nOriginal Traceback\n{ALLOCATOR.format(5)}"


class TestOutOfMemory:
    """Find the GPU without memory: a replica's thread knows its position, the allocator the GPU's number."""

    @staticmethod
    def failing(monkeypatch, message):
        def fails(*_):
            raise torch.OutOfMemoryError(message)

        monkeypatch.setattr(running, "_outputs_of_gpus", fails)

    @pytest.mark.parametrize(
        ("message", "active", "index", "samples"),
        [
            (REPLICA.format(0), [0, 1, 2], 0, 3),
            (REPLICA.format(1), [0, 1, 2], 1, 4),
            (REPLICA.format(0), [1, 2], 1, 3),  # the first device has no samples, so the replicas begin with the second
            (ALLOCATOR.format(3), [0, 1, 2], 2, 5),
            (ALLOCATOR.format(2), [0], 0, 3),
            (ALLOCATOR.format(2), [1, 2], 0, 0),  # it gathers, without samples
        ],
    )
    def test_is_named(self, monkeypatch, message, active, index, samples):
        self.failing(monkeypatch, message)
        chunks = [((torch.zeros(3 + position, 2), Whole(torch.zeros(9))), {}) for position in range(len(active))]
        with pytest.raises(
            OutOfMemoryError, match=f"^{CARDS[index]} is out of memory with {samples} samples"
        ) as caught:
            run_on_gpus(nn.Identity(), CARDS, active, chunks, None, range(3, 3 + len(active)))
        assert (caught.value.device, caught.value.device_index) == (str(CARDS[index]), index)
        assert caught.value.__context__ is None  # a traceback would pin the replica's tensors

    def test_of_who_knows_what_passes_with_its_words(self, monkeypatch):
        self.failing(monkeypatch, "cuBLAS could not allocate")
        with pytest.raises(OutOfMemoryError, match="cuBLAS could not allocate") as caught:
            run_on_gpus(nn.Identity(), CARDS, [0], [((torch.zeros(2),), {})], None, [2])
        assert caught.value.device is None


class Counting(nn.Module):
    """Its output depends on a buffer that its forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return x + self.seen


class TestInTurn:
    def test_each_chunk_begins_with_the_buffers_of_before(self):
        """The second chunk saw the changes of the first. On GPUs it has a copy of the old buffers."""
        module = Counting()
        outputs = run_in_sequence(module, [((torch.zeros(n, 1),), {}) for n in (2, 3, 4)])
        assert [output[0].item() for output in outputs] == [2.0, 3.0, 4.0]
        assert module.seen == 2


class TestPartsOfDataParallel:
    """Code that calls nn.DataParallel's parts itself, and the arguments of its constructor."""

    def test_scatter_cuts_as_forward_does(self):
        wrapped = BalancedDataParallel(None, nn.Identity(), ["cpu"] * 3, split=(4, 0, 2))
        args, named = wrapped.scatter((torch.arange(6.0),), {"flag": True, "x": torch.zeros(6, 2)}, [0, 1, 2])
        assert [arg[0].tolist() for arg in args] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
        assert [(kwargs["flag"], len(kwargs["x"])) for kwargs in named] == [(True, 4), (True, 2)]

    @pytest.mark.parametrize("place", [0, "cuda:0"])
    def test_an_output_device_of_another_kind(self, place):
        with raises(DeviceError, "cpu"):
            BalancedDataParallel(1, nn.Identity(), ["cpu", "cpu"], place)

    def test_the_host_as_nn_dataparallel_writes_it(self):
        assert BalancedDataParallel(1, nn.Identity(), ["cpu", "cpu"], -1).output_device == torch.device("cpu")

    def test_out_of_memory_where_outputs_are_gathered_is_named(self, monkeypatch):
        def fails(*_):
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch, "cat", fails)
        wrapped = BalancedDataParallel(1, nn.Identity(), ["cpu", "cpu"])
        with pytest.raises(
            OutOfMemoryError, match=r"^cpu is out of memory, because it gathers the outputs of all 4"
        ) as caught:
            wrapped(torch.zeros(4, 2))
        assert caught.value.device == "cpu"
        assert caught.value.__context__ is None


class TestArguments:
    """Common first attempts. Each gets a one-line answer."""

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: BalancedDataParallel(nn.Identity(), 4), r"Write BalancedDataParallel\(None, module, device_ids\)"),
            (lambda: BalancedDataParallel(2, torch.sin), "Expected an nn.Module"),
            (lambda: BalancedDataParallel(nn.Identity(), device_ids=[0, 1]), "and then the module"),
            (lambda: BalancedDataParallel(None, ["cpu"], nn.Identity()), r"\(gpu0_bsz, module, device_ids\)"),
            (
                lambda: BalancedDataParallel(2, nn.Identity(), ["cpu"], split=4),
                "split is 4. Expected one whole number .* list",
            ),
        ],
    )
    def test_are_refused_by_name(self, make, said):
        with pytest.raises(InputError, match=said) as caught:
            make()
        assert "\n" not in str(caught.value)

    def test_numbers_may_be_numpys(self):
        numpy = pytest.importorskip("numpy", reason="needs numpy")
        wrapped = BalancedDataParallel(numpy.int64(2), nn.Identity(), ["cpu"] * 2, split=numpy.array([2, 3]))
        assert (wrapped.gpu0_bsz, wrapped.split) == (2, (2, 3))

    def test_a_packed_sequence(self):
        """A packed sequence of one sample was split along its time steps."""
        packed = nn.utils.rnn.pack_sequence([torch.randn(5, 2)])
        with raises(WorkloadError):
            BalancedDataParallel(1, nn.Identity(), ["cpu"] * 2)(packed)


def test_ceilings_bound_what_trains():
    """A validation batch was rejected by the ceilings of training.

    These count graphs, and were searched only up to the effective batch.
    """
    wrapped = BalancedDataParallel(None, nn.Linear(2, 2), ["cpu"] * 2, split=(2, 4), ceilings=(3, 5))
    with raises(InputError, "8"):
        wrapped(torch.zeros(60, 2))
    with torch.no_grad():
        assert wrapped(torch.zeros(60, 2)).shape == (60, 2)


def test_a_compiled_forward_is_refused():
    """Each replica would run the first device's forward."""
    module = nn.Linear(2, 2)
    module.forward = torch.compile(module.forward, backend="eager")
    with raises(InputError, "Linear"):
        BalancedDataParallel(1, module, ["cpu"] * 2)
