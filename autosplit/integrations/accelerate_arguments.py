"""Put a plan's numbers into the arguments of accelerate's Accelerator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from autosplit.errors import InputError
from autosplit.integrations.process_share import Share


def set_arguments(share: Share, kwargs: dict[str, Any]) -> bool:
    """Put a plan's numbers into an Accelerator's arguments; tell whether it was given accumulation steps."""
    # As a plugin: of the number alone, accelerate takes what its launcher left in the environment instead.
    plugin = kwargs.get("gradient_accumulation_plugin") or GradientAccumulationPlugin()
    if not plugin.sync_with_dataloader:
        raise InputError(
            "the gradient_accumulation_plugin has sync_with_dataloader=False; expected True, because an epoch's last "
            "optimizer step ends with the epoch; leave it out"
        )
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")  # by `accelerate launch`
    given = int(launched) if launched.isdecimal() else 1, kwargs.pop("gradient_accumulation_steps", 1), plugin.num_steps
    kwargs["gradient_accumulation_plugin"] = replace(plugin, num_steps=share.accumulation_steps)
    if share.device.type == "cpu":
        kwargs["cpu"] = True  # or each process trains alone, where there is no GPU
    handlers = list(kwargs.get("kwargs_handlers") or [])
    if share.num_processes > 1 and not any(isinstance(one, DistributedDataParallelKwargs) for one in handlers):
        # The plan's batch sizes fit a step that was run with these.
        kwargs["kwargs_handlers"] = [*handlers, DistributedDataParallelKwargs(**share.plan.ddp.options.keywords())]
    return max(steps or 1 for steps in given) > 1
