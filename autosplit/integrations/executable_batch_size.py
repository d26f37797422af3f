"""Runs a training function again with a smaller batch, as often as it runs out of memory: accelerate's decorator.

`autosplit.tune` and `autosplit.find_ceiling` predict where the wall is, in place of running into it.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from autosplit.accelerators import accelerator_in_use
from autosplit.errors import InputError
from autosplit.oom import OutOfMemoryError, is_kernel_limit, is_oom
from autosplit.solve.split import whole_number


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with the largest batch size that it runs with, tried from above.

        @autosplit.find_executable_batch_size(starting_batch_size=128)
        def train(batch_size, model): ...

        train(model)

    It has the signature of accelerate's. What is lack of memory is autosplit's own table of messages; kernels that take
    no batch so large count, too. What a failed call held is freed before the next one, its traceback included. The size
    that was found is where the next call begins. It is for one process: the ranks of a job would have to agree.

    Args:
        function: Takes the batch size as its first argument. Without it, a decorator is returned.
        starting_batch_size: Samples to begin with, 1 or more.
        reduce_batch_size_fn: Returns the next size to try, below the one that failed; 0 to give up. Default: nine
            tenths of it, rounded down.

    Returns:
        The function, without its first argument.

    Raises:
        InputError: `starting_batch_size` is no whole number of 1 or more, or the next size is not below the last; the
            latter when it is called.
        OutOfMemoryError: No size runs; when it is called.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = whole_number("starting_batch_size", starting_batch_size, minimum=1)

    @functools.wraps(function)
    def executed(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _refuse_own_batch_size(function, args, kwargs)
        while True:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not (is_oom(error) or is_kernel_limit(error)):
                    raise
                said = " ".join(str(error).split())[:200]
            # Out of the except block: the traceback holds the tensors of the failed call.
            gc.collect()
            if (accelerator := accelerator_in_use()) is not None:
                accelerator.empty_cache()
            smaller = batch_size * 9 // 10 if reduce_batch_size_fn is None else reduce_batch_size_fn()
            if whole_number("the next batch size", smaller) >= batch_size:
                raise InputError(
                    f"reduce_batch_size_fn returned {smaller}, and {batch_size} ran out of memory; expected a smaller "
                    "one, or 0 to give up; let it keep count, it is called once for each size that failed",
                    code="executable-reduce",
                )
            if not smaller:
                raise OutOfMemoryError(
                    f"a batch of {batch_size} ran out of memory ({said}), and no smaller one is left to try; expected "
                    "one that fits; make the model or the samples smaller, or see autosplit probe"
                )
            batch_size = smaller

    return executed


def _refuse_own_batch_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(function, "__name__", "the function")
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{name} was called with {len(args)} arguments and the keywords {sorted(kwargs)} ({error}); expected all "
            "that it takes but the first, the batch size, which is passed for you; leave that out",
            code="executable-arguments",
        ) from None
