"""Fit the kernel rates in ``autosplit/sim/kernel_rates.json`` to published step times.

    python benchmarks/fit_cards.py [--cache DIR] [--seed 0] [--write]

The data are timm's models on an RTX 3090 in ``published.csv``. The seed draws half of them for the fit. The other half
tests it. Each class of kernels has a few figures, and models have none. The fit minimises squared logarithms of
predicted / measured. Errors beyond 30% count as absolute values. Figures with little data stay near their start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from published import HELD_OUT, Row, fitted_models, kept_at, rows, trace
from scipy.optimize import least_squares

from autosplit.devices.catalog import GpuSpec, find_card
from autosplit.sim.kernel_time import KernelRates, host_seconds, kernel_rates, kernel_seconds, work_codes
from autosplit.sim.op_cost import Work

RATES = Path(__file__).parents[1] / "autosplit" / "sim" / "kernel_rates.json"
RESULTS = Path(__file__).parent / "results" / "fit_cards.json"

PRIOR = 0.7
"""Distance of a figure from its start, as a logarithm, that costs as much as one model with an error of SCALE."""
SCALE = 0.3

RECURRENT = "sequencer"
"""Models with LSTMs. cuDNN runs a layer as one call, but a trace has an op for each time step."""

MEMORY_BOUND = (
    "batch_norm",
    "batch_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "softmax",
    "pooling",
    "reduction",
    "index",
    "copy",
    "layout",
    "depthwise",
    "depthwise_weight",
    "batch_norm_channels",
    "batch_norm_backward_channels",
    "pooling_channels",
    "depthwise_channels",
    "depthwise_weight_channels",
)
ARITHMETIC = (
    "batched",
    "pointwise",
    "pointwise_weight",
    "convolution",
    "convolution_weight",
    "unaligned",
    "unaligned_weight",
    "packed",
    "grouped",
    "grouped_weight",
    "depthwise",
    "depthwise_weight",
    "grouped_channels",
    "grouped_weight_channels",
    "depthwise_channels",
    "depthwise_weight_channels",
)


@dataclass(eq=False)
class Step:
    """A published step and its kernels."""

    row: Row
    numbers: Any
    codes: Any

    @classmethod
    def of(cls, row: Row, cache: Path | None) -> Step:
        """Trace a step."""
        traced = trace(row, row.batch, cache)
        updates = traced.update if row.family == "timm" else ()
        works = [event for event in (*traced.micro, *updates) if isinstance(event, Work)]
        numbers = np.hstack([work.numbers for work in works])
        return cls(row, numbers, work_codes([label for work in works for label in work.labels]))

    def seconds(self, spec: GpuSpec, rates: KernelRates) -> float:
        """Return the time on one GPU, with host and device overlapped."""
        kernels = kernel_seconds(self.numbers, self.codes, spec, rates)
        started = np.cumsum(host_seconds(self.numbers, self.codes, spec, rates=rates))
        left = np.cumsum(kernels[::-1])[::-1]
        return float((started + left).max())


def names() -> list[tuple[str, ...]]:
    """Return the names of the fitted figures."""
    found: list[tuple[str, ...]] = [("kinds", kind, "passes") for kind in MEMORY_BOUND]
    found += [("kinds", kind, "reached") for kind in ARITHMETIC]
    return [*found, ("start_s",), ("group_exponent",)]


def host_names() -> list[tuple[str, ...]]:
    """Return the names of the figures that are fitted last, from small batches."""
    return [("winograd",), ("host", "forward"), ("host", "backward")]


def with_figures(rates: KernelRates, logs: Any, paths: list[tuple[str, ...]]) -> KernelRates:
    """Return rates with figures multiplied by the exponentials of the numbers."""
    table = msgspec.to_builtins(rates)
    for path, log in zip(paths, logs, strict=True):
        place = table
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] *= float(np.exp(log))
    return msgspec.convert(table, type=KernelRates)


def cards_of(steps: list[Step]) -> list[tuple[str, str]]:
    """Return the GPUs and precisions whose sustained share is also fitted, because no other table has it."""
    found = {(step.row.card, "float16" if step.row.precision == "fp16" else "float32") for step in steps}
    return sorted(found - {("V100-PCIe-16GB", "float32")})


def specs_of(steps: list[Step], logs: Any) -> dict[tuple[str, str], GpuSpec]:
    """Return each GPU in its precision, with its sustained share multiplied by the exponential of a number."""
    found = {(step.row.card, step.row.precision): find_card(step.row.card) for step in steps}
    for (card, rate), log in zip(cards_of(steps), logs, strict=True):
        precision = "fp16" if rate == "float16" else "fp32"
        spec = found[card, precision]
        times = float(np.exp(log))
        shares = {name: share * (times if name == rate else 1.0) for name, share in spec.sustained.items()}
        found[card, precision] = replace(spec, sustained=shares)
    return found


def fit(
    steps: list[Step], start: KernelRates, paths: list[tuple[str, ...]]
) -> tuple[KernelRates, dict[tuple[str, str], float]]:
    """Return rates with the named figures fitted to the steps, and the GPUs' sustained shares."""
    count = len(paths)

    def residuals(logs: Any) -> Any:
        rates, specs = with_figures(start, logs[:count], paths), specs_of(steps, logs[count:])
        off = [step.seconds(specs[step.row.card, step.row.precision], rates) / step.row.step_s for step in steps]
        return np.concatenate([np.log(off) / SCALE, logs / PRIOR])

    at = np.zeros(count + len(cards_of(steps)))
    found = least_squares(residuals, at, loss="soft_l1", diff_step=1e-3, max_nfev=15).x
    specs = specs_of(steps, found[count:])
    shares = {(c, r): specs[c, "fp16" if r == "float16" else "fp32"].sustained[r] for c, r in cards_of(steps)}
    return with_figures(start, found[:count], paths), shares


def errors(steps: list[Step], rates: KernelRates, spec: GpuSpec) -> dict[str, float]:
    """Return the relative errors of the steps."""
    ratios = [step.seconds(spec, rates) / step.row.step_s for step in steps]
    off = np.abs(np.array(ratios) - 1)
    return {
        "steps": len(steps),
        "bias": round(float(np.median(ratios)), 3),
        "median": round(float(np.median(off)), 3),
        "p90": round(float(np.quantile(off, 0.9)), 3),
        "worst": round(float(off.max()), 3),
    }


def main() -> None:
    """Fit, and return the errors of both halves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worst", type=int, default=0, help="print so many models that are furthest off")
    parser.add_argument("--cached-only", action="store_true", help="leave out what is not in the cache")
    options = parser.parse_args()
    steps = traced(options.cache, cached_only=options.cached_only)
    fitted = {model for model in fitted_models(options.seed) if not model.startswith(RECURRENT)}
    ours = [step for step in steps if step.row.model in fitted and step.row.card not in HELD_OUT]
    before = kernel_rates()
    rates, shares = fit([step for step in ours if step.row.family == "timm"], before, names())
    old, of_old = fit([step for step in ours if step.row.family == "torchvision"], rates, host_names())
    shares |= of_old
    rates = msgspec.structs.replace(rates, winograd=old.winograd)
    print("host of old torch", old.host)
    found = table_of(steps, ours, rates, old, shares)
    print(shares)
    print({"/".join(path[:2]): round(_at(rates, path), 3) for path in names()})
    if options.worst:
        of_timm = [step for step in steps if step.row.family == "timm"]
        spec = replace(find_card("RTX3090"), sustained=dict.fromkeys(("float16", "float32"), 1.0))
        spec = replace(spec, sustained={**spec.sustained, "float16": shares["RTX3090", "float16"]})
        ratios = sorted((step.seconds(spec, rates) / step.row.step_s, step.row.model) for step in of_timm)
        for ratio, model in ratios[: options.worst] + ratios[-options.worst :]:
            print(model, round(ratio, 2))
    if options.write:
        when = datetime.now(timezone.utc).date().isoformat()
        said = f"{when}: {len(ours)} steps of published.csv, half of the models, by benchmarks/fit_cards.py"
        table = msgspec.to_builtins(msgspec.structs.replace(rates, fitted=said))
        RATES.write_text(json.dumps(_rounded(table), indent=1) + "\n")
        sustained = {f"{card} {rate}": round(share, 3) for (card, rate), share in shares.items()}
        report = {
            "date": when,
            "torch": str(torch.__version__),
            "seed": options.seed,
            "sustained": sustained,
            "host of torch 1.4": msgspec.to_builtins(old.host),
        }
        RESULTS.write_text(json.dumps({**report, "errors": found}, indent=1) + "\n")


def table_of(
    steps: list[Step],
    ours: list[Step],
    rates: KernelRates,
    old: KernelRates,
    shares: Mapping[tuple[str, str], float],
) -> dict[str, dict[str, float]]:
    """Return and print the errors by GPU and precision, for fitted and other steps.

    Args:
        old: The rates for torchvision's models, which ran with an old torch.
    """
    found = {}
    for card, precision, layout in sorted({(step.row.card, step.row.precision, step.row.layout) for step in steps}):
        spec = find_card(card)
        rate = "float16" if precision == "fp16" else "float32"
        spec = replace(spec, sustained={**spec.sustained, rate: shares.get((card, rate), spec.sustained[rate])})
        of_card = [
            step for step in steps if (step.row.card, step.row.precision, step.row.layout) == (card, precision, layout)
        ]
        for said, group in (
            ("fitted", [step for step in of_card if step in ours]),
            ("held out", [step for step in of_card if step not in ours]),
        ):
            if group:
                name = f"{card} {precision} {layout} {said}"
                used = old if group[0].row.family == "torchvision" else rates
                found[name] = errors(group, used, spec)
                print(name, found[name])
    return found


def traced(cache: Path | None, *, cached_only: bool) -> list[Step]:
    """Trace the published steps of one GPU. Steps that cannot be traced are reported and left out."""
    steps = []
    for row in rows():
        if row.cards > 1 or (cached_only and not kept_at(row, row.batch, cache).exists()):
            continue
        try:
            steps.append(Step.of(row, cache))
        except Exception as error:  # noqa: BLE001 # the model or its package may be missing
            print(f"left out: {row.model}: {type(error).__name__}: {error}")
    return steps


def _at(rates: KernelRates, path: tuple[str, ...]) -> float:
    place = msgspec.to_builtins(rates)
    for name in path:
        place = place[name]
    return float(place)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
