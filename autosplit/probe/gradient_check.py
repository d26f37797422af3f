"""Check whether splitting a batch changes the training.

Compare three gradients: of the whole sample batch, of BalancedDataParallel with an uneven split over two devices, and
of two uneven micro-batches with `plan.steps`. A mean loss is weighted by samples: rank r of W, with n of N samples, has
the weight n·W/N. If the gradients differ, find the unit that the loss is a mean over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosplit.devices.host_memory import available_host_bytes
from autosplit.devices.spec import parse_devices
from autosplit.errors import NotFiniteError, WorkloadError, ends_tracebacks, one_line, users_errors
from autosplit.notes import NOT_FINITE, Note
from autosplit.probe.check_result import Check
from autosplit.probe.gradient_comparison import LEAST_SAMPLES, Comparison, begin
from autosplit.probe.gradient_runs import TooDearError
from autosplit.rng import preserved_rng
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import build, workload_source
from autosplit.text import size_text
from autosplit.torch_versions import FakeTensor
from autosplit.workload.batch_layout import read_batch
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload, made_batch, modules_of

_log = logging.getLogger(__name__)

MADE_SAMPLES = 8
"""Number of samples to request from `make_batch` if the sample batch has too few."""

PASS_S = 0.5
"""Time limit in seconds for one forward and backward during a tuning. A check has about three to ten of them."""

COLD_S = 5.0
"""Time limit in seconds for the first forward with the smallest number of samples, which also warms up the process."""

WARM_S = 1.0
"""Time limit in seconds for the second forward with the smallest number of samples, if the first one was slow."""

KEPT_GRADIENTS = 6
"""Number of gradient-sized tensors in memory at a time: the copy, its gradient, and the gradients to compare."""


@ends_tracebacks
def check(workload: Any) -> tuple[Check, ...]:
    """Check which parts of a training change when the batch is split.

    The gradient of the whole sample batch is compared with two others: of the batch split unevenly over two devices,
    and of two accumulated micro-batches of different sizes. DDP ranks have the same weights as these micro-batches. A
    copy runs on the CPU, in float64 if the model can, without dropout and autocast. The workload is not changed.

    Args:
        workload: A `Workload`, or a function that returns a `Workload`.

    Returns:
        The check of the whole gradient first (with `step=`, one for each optimizer), then BatchNorms and the loss.

    Raises:
        WorkloadError: The sample batch has fewer than 4 samples, and there is no `make_batch`. Or the gradient is not
            finite. Or gradients need more memory than this machine has.
        UserCodeError: The workload's own code raised on its sample batch.
    """
    source = workload_source(workload, None, {})
    if not isinstance(source, Workload):
        _refuse_too_large(_made_without_memory(source))
    with preserved_rng():
        built = _with_model(build(source, parse_devices("cpu")).workload)
        _refuse_too_large(modules_of(built))
        with untouched(built):
            found = Comparison(built, _batch_of(built)).checks()
    for one in found:
        _log.info("%s", one)
    return found


NOT_FINITE_TEXT = (
    "The loss of the sample batch, or its gradient, is NaN or infinite. Expected finite numbers. Train a few steps in "
    "float32 without autosplit, and look at the loss."
)


def checks_for(
    workload: Workload, rebuild: Callable[[], Workload] | None = None
) -> tuple[tuple[Check, ...], tuple[Note, ...]]:
    """Check a workload before it is tuned, if the check is cheap. Errors do not end the tuning.

    Use as many samples as one pass can process in about `PASS_S` seconds.

    Args:
        rebuild: Function that builds the workload again with real tensors. It is called if the workload has no
            real tensors and few enough parameters.

    Returns:
        The checks, and a note with the reason if there are none.
    """
    with preserved_rng():
        try:
            has_memory = _refuse_unaffordable(workload, rebuild is not None)
            built = _with_model(workload if has_memory or rebuild is None else rebuild())
            batch = _batch_of(built)
            size = _affordable_samples(built, batch)
            layout = read_batch(batch, built.batch_dim)
            total = layout.size
            remark = "" if size == total else f"Checked with the first {size} of {total} samples."
            part = layout.cut((size, total - size))[0] if size < total else batch
            return tuple(map(_without_rounding, Comparison(built, part, remark).checks())), ()
        except TooDearError as error:
            why = str(error) or f"a forward of {LEAST_SAMPLES} samples on the CPU took over {WARM_S:g} s"
        except NotFiniteError:
            return (), (Note(NOT_FINITE, NOT_FINITE_TEXT),)
        except Exception as error:  # noqa: BLE001  # the tuning reports errors of the workload
            why = one_line(error)
    return (), (not_checked(why),)


def not_checked(why: object) -> Note:
    """Return the note of a plan whose gradients were not checked. The profile stores the note."""
    reason = str(why).rstrip(".")
    text = f"The gradient check was not run: {reason}. Run it with autosplit check FILE (autosplit.check(workload))."
    return Note("not-checked", text)


def _without_rounding(found: Check) -> Check:
    """Set errors within rounding to 0. Otherwise equal plans would differ in their rounding."""
    errors = ("split_error", "accumulation_error")
    rounded: dict[str, Any] = {name: 0.0 for name in errors if not found.depends and getattr(found, name) is not None}
    return replace(found, **rounded)


def _with_model(workload: Workload) -> Workload:
    if modules_of(workload):
        return workload
    model: Any = workload.model
    with users_errors("the model factory"):
        made = model()
    return replace(workload, model=made) if isinstance(made, nn.Module) else workload


def _batch_of(workload: Workload) -> Any:
    size = workload.sample_batch_size
    if size >= LEAST_SAMPLES:
        return workload.sample_batch
    if workload.make_batch is None:
        raise WorkloadError(
            f"The sample batch has {size} sample{'' if size == 1 else 's'}. The check splits the batch, so it "
            f"needs {LEAST_SAMPLES} or more different samples. Pass a larger sample batch, or make_batch=.",
        )
    return made_batch(workload, MADE_SAMPLES)


def _gradients_bytes(modules: Sequence[nn.Module]) -> int:
    return KEPT_GRADIENTS * 8 * sum(t.numel() for module in modules for t in (*module.parameters(), *module.buffers()))


def _refuse_too_large(modules: Sequence[nn.Module]) -> None:
    needed_bytes, available_bytes = _gradients_bytes(modules), available_host_bytes()
    if needed_bytes > available_bytes:
        raise WorkloadError(
            f"Gradients in float64 take {needed_bytes / 2**30:.1f} GiB. Expected at most the "
            f"{available_bytes / 2**30:.1f} GiB that this machine has available. Check the same model with fewer "
            "layers.",
        )


def _refuse_unaffordable(workload: Workload, can_be_rebuilt: bool) -> bool:
    """Raise TooDearError if the model can't be checked in real memory. Return whether it has real memory."""
    model: Any = workload.model
    is_made = bool(modules_of(workload))
    modules = modules_of(workload) if is_made else _made_without_memory(model)
    tensors = [t for module in modules_of(workload) for t in (*module.parameters(), *module.buffers())]
    has_no_memory = any(t.is_meta or isinstance(t, FakeTensor) for t in (*tensors, *tensors_of(workload.sample_batch)))
    if has_no_memory and not can_be_rebuilt:
        raise TooDearError("the workload was built on the meta device or under fake tensors, so it has no values")
    needed_bytes = _gradients_bytes(modules)
    room_bytes = available_host_bytes() // 4
    if needed_bytes > room_bytes:
        raise TooDearError(
            f"the model's gradients in float64 take {needed_bytes / 2**30:.1f} GiB, "
            f"over a quarter of this machine's available memory ({room_bytes / 2**30:.1f} GiB)"
        )
    return not has_no_memory


def _made_without_memory(make: Callable[[], Any]) -> Sequence[nn.Module]:
    """Return the modules that a function makes on the meta device, or nothing if it fails there."""
    try:
        with preserved_rng(), torch.device("meta"):
            made = make()
    except Exception as error:  # noqa: BLE001  # it is made with memory below
        _log.info("the model's size is unknown before it is made: %s", one_line(error))
        return ()
    if isinstance(made, nn.Module):
        return (made,)
    return modules_of(made) if isinstance(made, Workload) else ()


def _affordable_samples(workload: Workload, batch: Any) -> int:
    """Run a few samples, and return how many samples fit into the time and the memory for one pass."""
    layout = read_batch(batch, workload.batch_dim)
    total, few = layout.size, min(layout.size, LEAST_SAMPLES)
    part = layout.cut((few, total - few))[0] if few < total else batch
    with ExitStack() as closing:
        copy = begin(workload, part, closing, limit_s=COLD_S).copy
        if copy.seconds * total > PASS_S * few:  # a busy machine, or a cold start
            copy.whole(limit_s=WARM_S)
    # Gradients may take another quarter (`_refuse_unaffordable`), and `saved_bytes` has only what autograd saves.
    room_bytes = available_host_bytes() / 4
    by_time, by_memory = PASS_S / max(copy.seconds, 1e-9), room_bytes / max(copy.saved_bytes, 1)
    affordable = int(few * min(by_time, by_memory))
    if affordable >= total:
        return total
    if by_memory < 1:
        raise TooDearError(f"{few} samples take {size_text(copy.saved_bytes)} between forward and backward")
    return max(few, affordable)
