"""Reject unknown keywords of `tune` and `measure`, and suggest the keyword that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from autosplit.errors import ArgumentError
from autosplit.workload.workload import Workload

P = ParamSpec("P")
T = TypeVar("T")

_BATCH = "effective_batch_size (samples per optimizer step) or max_batch_size (samples per forward)"

_MEANT = {
    **dict.fromkeys(("batch_size", "bs", "train_batch_size", "per_device_train_batch_size"), _BATCH),
    **dict.fromkeys(("total_batch_size", "global_batch_size", "target_batch_size"), "effective_batch_size"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps", "grad_accum"), "effective_batch_size"),
    **dict.fromkeys(("criterion", "loss", "loss_function"), "loss_fn"),
    **dict.fromkeys(("gpu", "gpus", "device", "device_ids"), "devices"),
    **dict.fromkeys(("optim", "optimiser"), "optimizer"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision", "fp16", "bf16"), "precision"),
    **dict.fromkeys(("trials", "num_trials"), "n_trials"),
    **dict.fromkeys(("timeout", "timeout_s", "time_limit"), "time_limit_s"),
    **dict.fromkeys(("batch", "data", "sample"), "sample_batch"),
    **dict.fromkeys(("loader", "dataloader", "train_loader"), "autosplit.fit_to_loader(plan, loader) with the plan"),
    "lengths": "autosplit.tune_lengths(model, sample_batch, lengths=...)",
    "checkpointing": "autosplit.tune_best(model, sample_batch, checkpointing=...)",
    "fits": "autosplit.find_ceiling(workload, role='resume'), 'save' or 'eval'",
    "storage": "plan.trials, which has every trial",
}
"""Replacements for keywords of other tools and of older versions."""


def suggests_keywords(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function, so that an unknown keyword raises ArgumentError with the keyword that was meant."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_unknown(call, kwargs)
        return call(*args, **kwargs)

    return checked


def refuse_unknown(call: Callable[..., Any], given: Iterable[str], *forwarded: Callable[..., Any]) -> None:
    """Raise ArgumentError for the first unknown keyword of a function, and suggest a replacement.

    Args:
        forwarded: Functions that get the other keywords of `call`.
    """
    parameters = {
        name: one for taker in (call, *forwarded) for name, one in inspect.signature(taker).parameters.items()
    }
    known = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, 1)
        if name in _MEANT and _MEANT[name] != name:
            advice = f"Use {_MEANT[name]}"
        elif name in (field.name for field in fields(Workload) if field.init):
            advice = f"It describes the workload: pass Workload(model, sample_batch, {name}=...)"
        else:
            advice = f"Use {close[0]}" if close else f"It has {', '.join(known)}"
        raise ArgumentError(f"{name}= is not an argument of {call.__name__}(). {advice}.")
