"""The decorator of accelerate's name: smaller batches until one runs, and errors that are no lack of memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from error_types import InputError
from raised import raises

import autosplit


def failing_above(most: int, error: BaseException, tried: list[int]):
    def train(batch_size: int, model: str = "", *, rate: float = 0.0) -> tuple[int, str, float]:
        """Train."""
        tried.append(batch_size)
        if batch_size > most:
            raise error
        return batch_size, model, rate

    return train


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_it_shrinks_until_it_runs_and_begins_there_next_time():
    tried: list[int] = []
    train = autosplit.find_executable_batch_size(failing_above(20, OOM, tried), starting_batch_size=32)
    assert train("model", rate=0.5) == (19, "model", 0.5)
    assert tried == [32, 28, 25, 22, 19]
    assert train() == (19, "", 0.0)
    assert tried == [32, 28, 25, 22, 19, 19]
    assert train.__doc__ == "Train."


@pytest.mark.parametrize(
    "error",
    [
        OOM,
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true"),
    ],
)
def test_what_a_smaller_batch_may_mend(error):
    tried: list[int] = []
    decorated = autosplit.find_executable_batch_size(starting_batch_size=8)(failing_above(7, error, tried))
    assert decorated()[0] == 7


def test_its_own_rule_of_what_comes_next():
    sizes = iter([16, 3])
    tried: list[int] = []
    train = autosplit.find_executable_batch_size(
        failing_above(5, OOM, tried), starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes)
    )
    assert train()[0] == 3
    assert tried == [100, 16, 3]


def test_other_errors_are_raised_as_they_are():
    tried: list[int] = []
    error = ValueError("shapes differ")
    with pytest.raises(ValueError, match="shapes differ") as raised:
        autosplit.find_executable_batch_size(failing_above(0, error, tried))()
    assert raised.value is error
    assert tried == [128]


def test_nothing_runs():
    tried: list[int] = []
    train = autosplit.find_executable_batch_size(failing_above(0, OOM, tried), starting_batch_size=3)
    with pytest.raises(autosplit.OutOfMemoryError, match="a batch of 1 ran out of memory"):
        train()
    assert tried == [3, 2, 1]


def test_a_rule_that_does_not_shrink_ends_with_an_error_and_not_never():
    train = autosplit.find_executable_batch_size(
        failing_above(0, OOM, []), starting_batch_size=4, reduce_batch_size_fn=lambda: 4
    )
    with raises(InputError, "executable-reduce", "4"):
        train()


def test_the_failed_call_is_freed_before_the_next():
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @autosplit.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        alive.extend(ref() is not None for ref in held)
        activations = torch.zeros(batch_size)
        held.append(weakref.ref(activations))
        if batch_size == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    train()
    assert alive == [False]


@pytest.mark.parametrize(("args", "kwargs"), [((1, "model"), {}), ((), {"batch_size": 4}), ((), {"unknown": 4})])
def test_arguments_that_the_function_does_not_take(args, kwargs):
    train = autosplit.find_executable_batch_size(failing_above(9, OOM, []), starting_batch_size=4)
    with raises(InputError, "executable-arguments"):
        train(*args, **kwargs)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
def test_a_size_that_is_none(size):
    with pytest.raises(InputError, match="starting_batch_size"):
        autosplit.find_executable_batch_size(lambda batch_size: None, starting_batch_size=size)
