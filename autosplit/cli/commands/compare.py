"""``autosplit compare``: the same workload on several machines, side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from autosplit.cli.comparison_table import print_comparison
from autosplit.cli.exit_code import end_with_parent
from autosplit.cli.json_types import Compared
from autosplit.cli.options import price_given
from autosplit.cli.output import EXIT_INTERRUPTED, Manner, failed, print_answer, progress
from autosplit.cli.terminal import stdout_kept_clean
from autosplit.cli.workload_arguments import isolates, one_of_several, sendable, users_errors
from autosplit.errors import InputError

if TYPE_CHECKING:
    from autosplit.plan.plan import Plan

__all__ = ["compare"]

EXIT_MISFIT = 3


def compare(
    manner: Manner,
    *,
    spec: str,
    devices: Sequence[str] = (),
    price: Sequence[str] = (),
    model_options: Mapping[str, Any],
    **keywords: Any,
) -> int:
    """Tune for one machine after the other, and print them in one table.

    Args:
        price: Of a machine, for an hour, each as it was typed.
        keywords: For `tune`; the time limit is for all machines together.
        model_options: Those of a model that is named, as `load_workload` takes them.
    """
    from autosplit.tuning import compare as comparing

    prices = [price_given(text) for text in price]
    end_with_parent()
    if one_of_several():
        raise InputError(
            "autosplit compare in one of several processes: expected one, machines come one after the other; leave "
            "torchrun out"
        )
    machines = comparing.asked_machines(devices, prices, keywords)
    limits = {keyword: value for keyword, value in keywords.items() if keyword == "time_limit_s"}
    called = {keyword: value for keyword, value in keywords.items() if keyword not in limits}
    interrupted = False
    with stdout_kept_clean(), progress(manner) as tell:
        tune_one = _tuner(spec, model_options, called)
        try:
            comparison = comparing.compared(machines, tune_one, **limits, progress=tell)
        except comparing.ComparisonInterrupted as interrupt:
            if interrupt.comparison is None:
                raise
            comparison, interrupted = interrupt.comparison, True
    if interrupted:
        failed("interrupted: the machines that are done are shown; run it again for all of them", EXIT_INTERRUPTED)
    answer = msgspec.convert(comparison.to_dict(), Compared)
    print_answer(answer, manner, lambda console: print_comparison(comparison, console))
    if interrupted:
        return EXIT_INTERRUPTED
    if comparison.best is None:
        return failed(f"the workload fits none of {len(machines)} machines; see above what each lacks", EXIT_MISFIT)
    return 0


def _tuner(
    spec: str, model_options: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Callable[[Any, Mapping[str, Any]], Plan]:
    """Load a workload, and return what tunes it for a machine as the command `tune` does."""
    from autosplit.tuning import tune as tuning
    from autosplit.workload.from_file import load_workload

    workload: Any = load_workload(spec, **model_options)

    def tune_one(devices: str, timed: Mapping[str, Any]) -> Plan:
        isolated = isolates(keywords.get("isolate"), devices)
        called: dict[str, Any] = {**keywords, **timed, "isolate": isolated}
        with users_errors(spec), warnings.catch_warnings():
            warnings.simplefilter("ignore", tuning.ChangedTrainingWarning)
            return tuning.tune(sendable(spec, workload) if isolated else workload, devices=devices, **called)

    return tune_one
