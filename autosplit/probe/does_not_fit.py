"""Explain why not even one sample fits on a device."""

from __future__ import annotations

from autosplit.oom import DoesNotFitError
from autosplit.probe.step_runner import StepRunner
from autosplit.runtime.model_copy import bytes_on_accelerators
from autosplit.runtime.protocol import StepShape
from autosplit.text import size_text


def does_not_fit(prober: StepRunner, index: int) -> DoesNotFitError:
    """Return the error for a workload that does not fit at one sample.

    It has the bytes that are needed and available.
    """
    device, capacity_bytes = prober.runtime.devices[index], prober.runtime.capacities_bytes[index]
    least = prober.least_batch()
    held = bytes_on_accelerators(prober.tracer.workload)
    own_bytes = sum(held[place] for place in held if (place.type, place.index) == (device.kind, device.index))
    needed_bytes = own_bytes
    if own_bytes:
        message = (
            f"A copy of the model does not fit {device.label} ({device.name}) at batch {least}. The model is "
            f"there already and takes {own_bytes} of the {capacity_bytes} bytes allowed. Tune it on the CPU "
            "(model.cpu()), and move it afterwards."
        )
    elif prober.max_batch_size < least:
        return DoesNotFitError(
            f"A batch of {prober.max_batch_size} is the largest allowed, but BatchNorm trains on at least {least}. "
            f"Expected at least {least}. Raise effective_batch_size or max_batch_size.",
            code="batchnorm-least-samples",
        )
    else:
        needed_bytes = prober.traced(StepShape(((least,),)))[0] if prober.has_traces else 0
        message = _why_not(prober, index, needed_bytes)
    return DoesNotFitError(
        message,
        device=device.label,
        device_index=index,
        requested_bytes=needed_bytes,
        capacity_bytes=capacity_bytes,
    )


def _why_not(prober: StepRunner, index: int, needed_bytes: int) -> str:
    """Return the reason why the smallest step did not run. `needed_bytes` is the prediction of its trace."""
    device, capacity_bytes = prober.runtime.devices[index], prober.runtime.capacities_bytes[index]
    where = f"{device.label} ({device.name})"
    fits = needed_bytes <= capacity_bytes
    lost = [note.text for note in getattr(prober.runtime, "notes", ())]  # only an isolated runtime has notes
    if fits and (lost or prober.out_of_time):
        return (
            f"No step of the workload finished on {where}: {'; '.join(lost).rstrip('.') or 'the time limit was over'}. "
            f"By its trace the smallest step takes {needed_bytes} bytes, and {capacity_bytes} are allowed. "
            f"{'Run one step by itself to see why.' if lost else 'Raise time_limit_s.'}"
        )
    needs = f"it needs {needed_bytes} bytes ({size_text(needed_bytes)})"
    if fits:
        needs = f"a real step needs more than the {needed_bytes} bytes of its trace,"
    return (
        f"The workload does not fit {where} at batch {prober.least_batch()}: {needs} and may hold {capacity_bytes} "
        f"({size_text(capacity_bytes)}). Use a smaller model, a lower precision, or a larger device."
    )
