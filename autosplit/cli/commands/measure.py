"""``autosplit measure``: an optimizer step of one configuration, run or simulated, and shown."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from autosplit.cli.exit_code import end_with_parent
from autosplit.cli.output import Manner, print_json, progress, speaks
from autosplit.cli.terminal import stdout_kept_clean
from autosplit.cli.workload_arguments import (
    as_rank,
    check_before_running,
    flags_of,
    isolates,
    ranks_to_start,
    sendable,
    users_errors,
)

__all__ = ["measure"]


def measure(manner: Manner, *, spec: str, model_options: Mapping[str, Any], **keywords: Any) -> int:
    """Measure a configuration, and print what was found."""
    end_with_parent()
    check_before_running(keywords, None)
    together, keywords = as_rank(keywords)
    if not together and keywords.get("strategy") == "ddp":
        count = ranks_to_start(keywords.get("devices"))
        if count > 1:
            from autosplit.cli.torchrun_job import run_together

            return run_together(["measure", spec, *flags_of({**keywords, **model_options}), *manner.flags()], count)
    from autosplit.tuning import measure as measuring
    from autosplit.workload.from_file import load_workload, loaded_workload

    with stdout_kept_clean(), progress(manner) as tell:
        # In a job it is loaded where all ranks hear of it if one can't.
        load = loaded_workload if together else load_workload
        workload: Any = functools.partial(load, spec, **model_options)
        workload = workload if together else workload()
        isolate = isolates(keywords.get("isolate"), keywords.get("devices"), together=together)
        source = sendable(spec, workload) if isolate and not together else workload
        with users_errors(spec):
            found = measuring.measure(source, **{**keywords, "isolate": isolate}, progress=tell)
    if together and not speaks():
        return 0
    if manner.as_json:
        print_json(found)
    else:
        from autosplit.cli.measured_table import print_measured
        from autosplit.cli.terminal import console_for

        print_measured(found, console_for(sys.stdout))
    return 0
