"""``autosplit measure``: an optimizer step of one configuration, run or simulated, and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosplit.cli.exit_code import end_with_parent
from autosplit.cli.measured_table import print_measured
from autosplit.cli.output import Manner, print_answer, progress, speaks
from autosplit.cli.terminal import stdout_kept_clean
from autosplit.cli.workload_arguments import (
    as_rank,
    check_before_running,
    flags_of,
    isolates,
    loaded,
    ranks_to_start,
    users_errors,
)

__all__ = ["measure"]


def measure(manner: Manner, *, spec: str, model_options: Mapping[str, Any], **keywords: Any) -> int:
    """Measure a configuration, and print what was found."""
    end_with_parent()
    check_before_running(keywords, None)
    together, keywords = as_rank(keywords)
    if (count := ranks_to_start(keywords, together=together)) > 1:
        from autosplit.cli.torchrun_job import run_together

        return run_together(["measure", spec, *flags_of({**keywords, **model_options}), *manner.flags()], count)
    from autosplit.tuning import measure as measuring

    with stdout_kept_clean(), progress(manner) as tell:
        isolate = isolates(keywords.get("isolate"), keywords.get("devices"), together=together)
        _, source = loaded(spec, model_options, together=together, isolate=isolate)
        with users_errors(spec):
            found = measuring.measure(source, **{**keywords, "isolate": isolate}, progress=tell)
    if together and not speaks():
        return 0
    print_answer(found, manner, lambda console: print_measured(found, console))
    return 0
