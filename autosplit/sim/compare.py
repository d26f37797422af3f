"""Compare machines by tuning the same workload for each, with throughput and cost."""

from __future__ import annotations

import inspect
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import DeviceError, InputError, ends_tracebacks, one_line, shown
from autosplit.plan.plan import Plan
from autosplit.probe.request import checked_request
from autosplit.sim.cluster import Cluster, check_options, is_cluster, parse_cluster
from autosplit.sim.comparison_types import SCHEMA_VERSION, Compared, Compute, Misfit
from autosplit.solve.split import whole_number
from autosplit.text import rate_text
from autosplit.tuning.progress import Progress, part_of, progress_listener

if TYPE_CHECKING:
    from autosplit.plan.layout import Seat
    from autosplit.sim.cluster_prediction import ClusterScaling

LARGEST_PRICE = 1e15
"""Largest price per hour in any currency. A larger number is a typing error."""


@dataclass(frozen=True)
class ComparedMachine:
    """A machine with its plan and its price.

    Attributes:
        devices: The device spec that the user passed.
        plan: None if the workload does not fit, and for a cluster.
        predicted: Whether samples/s are predicted instead of measured: the GPUs are simulated, or the DDP plan was
            computed and not run.
        price_per_hour: In the user's currency.
        cluster: The predictions for a cluster. None for other machines.
        compute: The time of the whole training. None without a number of samples, or if the workload does not fit.
    """

    devices: str
    plan: Plan | None
    misfit: Misfit | None
    predicted: bool
    price_per_hour: float | None = None
    cluster: ClusterScaling | None = None
    compute: Compute | None = None

    @property
    def samples_per_s(self) -> float | None:
        """The throughput of the plan or of the whole cluster, or None if the workload does not fit."""
        if self.cluster is not None:
            return self.cluster.whole.samples_per_s
        return None if self.plan is None else self.plan.samples_per_s

    @property
    def cost_per_million_samples(self) -> float | None:
        """The price of training on a million samples, or None without a price or if the workload does not fit."""
        if self.samples_per_s is None or self.price_per_hour is None:
            return None
        return _cost_per_million(self.price_per_hour, self.samples_per_s)

    def compute_for(self, samples: int) -> Compute | None:
        """Return the hours, the device-hours and the cost of training on these samples, or None without a plan."""
        rate, price = self.samples_per_s, self.price_per_hour
        if rate is None:
            return None
        hours = samples / rate / 3600
        devices = len(self.plan.devices) if self.plan is not None else 0
        if self.cluster is not None:
            devices = self.cluster.whole.ranks
        return Compute(hours, hours * devices, None if price is None else hours * price)

    @property
    def headroom_bytes(self) -> int | None:
        """The smallest free memory that the plan leaves on a device, or None without a plan."""
        return None if self.plan is None else min(map(_headroom, self.plan.main.seats))

    @property
    def headroom_device(self) -> str | None:
        """The device with the smallest free memory, as ``"sim:0"``, or None without a plan."""
        return None if self.plan is None else min(self.plan.main.seats, key=_headroom).device.label

    @property
    def complete(self) -> bool:
        """Whether the search was completed."""
        return self.plan is None or self.plan.complete

    @property
    def ddp_samples_per_s(self) -> float | None:
        """The throughput of DDP, or None if it is unknown."""
        return self.plan.ddp.samples_per_s if self.plan is not None and self.plan.ddp is not None else None

    def __str__(self) -> str:
        how = "predicted" if self.predicted else "measured"
        if self.cluster is not None:
            whole = self.cluster.whole
            return f"{self.devices}: {whole.ranks} ranks, {rate_text(whole.samples_per_s)} ({how})"
        if self.plan is None:
            return f"{self.devices}: {self.misfit.reason if self.misfit else 'no plan'} ({how})"
        cost = self.cost_per_million_samples
        costs = "" if cost is None else f", {cost:.4g} per million samples"
        return f"{self.devices}: split {self.plan.split}, {rate_text(self.plan.samples_per_s)}{costs} ({how})"


def _cost_per_million(price_per_hour: float, samples_per_s: float) -> float:
    return price_per_hour / 3600 * (1e6 / samples_per_s)


def _headroom(seat: Seat) -> int:
    return seat.device.capacity_bytes - seat.peak_bytes


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison of several machines.

    Attributes:
        machines: The best machine first. With prices, sorted by cost, followed by machines without a price. Without
            prices, sorted by samples/s. Machines that the workload does not fit are last.
        not_compared: Machines that were left out because of Ctrl-C.
        samples: Samples of the whole training, for its hours and cost. None if not given.
    """

    machines: tuple[ComparedMachine, ...]
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    samples: int | None = None
    schema_version: ClassVar[int] = SCHEMA_VERSION

    @property
    def best(self) -> ComparedMachine | None:
        """The first machine. None if the workload fits no machine."""
        return next((machine for machine in self.machines if machine.samples_per_s is not None), None)

    @property
    def sorted_by(self) -> str:
        """``"cost_per_million_samples"`` or ``"samples_per_s"``."""
        priced = any(machine.price_per_hour is not None for machine in self.machines)
        return "cost_per_million_samples" if priced else "samples_per_s"

    @property
    def complete(self) -> bool:
        """Whether tuning was completed for every machine."""
        return not self.not_compared and all(one.complete for one in self.machines)

    def for_samples(self, samples: int | None) -> Comparison:
        """Return the comparison with the hours and the cost of training on these samples."""
        if samples is None:
            return self
        machines = tuple(replace(one, compute=one.compute_for(samples)) for one in self.machines)
        return replace(self, samples=samples, machines=machines)

    def for_json(self) -> Compared:
        """Return the value that ``autosplit compare --json`` prints."""
        return msgspec.convert(self, Compared, from_attributes=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings, as printed by ``autosplit compare --json``."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.for_json()))
        return plain

    def __str__(self) -> str:
        return "\n".join([*map(str, self.machines), *self.notes])


class ComparisonInterrupted(KeyboardInterrupt):
    """The comparison was interrupted by Ctrl-C.

    Attributes:
        comparison: The completed machines. None if there are none.
    """

    def __init__(self, comparison: Comparison | None) -> None:
        super().__init__(comparison)
        self.comparison = comparison

    def __str__(self) -> str:
        return "comparing was interrupted"


@dataclass(frozen=True)
class AskedMachine:
    """A machine to compare. Its `name` is the spec, or the devices' labels if the spec is not a string.

    For a cluster, `spec` is a `Cluster`, and `devices` has one device of each kind.
    """

    name: str
    spec: Any
    devices: tuple[Device, ...]
    price_per_hour: float | None = None


def asked_machines(
    devices: Iterable[Any],
    prices: Mapping[str, float] | Iterable[tuple[str, float]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[AskedMachine, ...]:
    """Check the machines, their prices and the options of `tune` before anything runs. Prices may omit ``sim:``."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise InputError(
            f"devices is {shown(devices)}. Expected a list with a spec for each machine. Write devices=['sim:2xL4', "
            "'sim:A100-40GB'], or call tune() for one machine."
        )
    known = inspect.signature(checked_request).parameters.keys() - {"devices"}
    checked = {name: value for name, value in (options or {}).items() if name in known}
    machines: list[AskedMachine] = []
    for given in devices:
        spec = parse_cluster(given) if is_cluster(given) else given
        if isinstance(spec, Cluster):
            checked_request(devices=tuple(spec.kinds), **checked)
            check_options(spec, options or {})
            machine = AskedMachine(spec.spec, spec, tuple(spec.kinds))
            _refuse_twin(machine, [one for one in machines if one.name == machine.name])
            machines.append(machine)
            continue
        found = parse_devices(spec)
        checked_request(devices=found, **checked)
        name = " ".join(spec.split()) if isinstance(spec, str) else ", ".join(device.label for device in found)
        machine = AskedMachine(name, spec, found)
        known_ones = [one for one in machines if not isinstance(one.spec, Cluster)]
        _refuse_twin(machine, [one for one in known_ones if _identity(one.devices) == _identity(found)])
        machines.append(machine)
    if not machines:
        raise InputError(
            "You named no devices to compare. Name each machine, as in --devices sim:2xL4 --devices sim:A100-40GB."
        )
    for name, value in prices.items() if isinstance(prices, Mapping) else prices or ():
        place, price = _place_of(name, machines), _price(name, value)
        other = machines[place].price_per_hour
        if other is not None:
            raise InputError(
                f"{machines[place].name} has two prices, {other:g} and {price:g}. Expected one price per machine. "
                "Leave one out."
            )
        machines[place] = replace(machines[place], price_per_hour=price)
    return tuple(machines)


def _refuse_twin(machine: AskedMachine, twins: Sequence[AskedMachine]) -> None:
    if twins:
        raise InputError(
            f"devices {shown(machine.name)} and {shown(twins[0].name)} are the same machine. Expected each machine "
            "once. Leave one out."
        )


def _identity(devices: Sequence[Device]) -> tuple[Any, ...]:
    """Return a key that is equal for equal machines: ``sim:L4+L4`` is ``sim:2xL4``. Free memory does not count."""
    return tuple((d.kind, d.index, d.name, d.capacity_bytes if d.budgeted else None) for d in devices)


def _place_of(name: object, machines: Sequence[AskedMachine]) -> int:
    identities = []
    for spec in (f"sim:{name.strip()}", name.strip()) if isinstance(name, str) else ():
        with suppress(DeviceError):
            identities.append(_identity(parse_devices(spec)))
    names = [str(name).strip(), f"sim:{str(name).strip()}"]
    for place, machine in enumerate(machines):
        alike = not isinstance(machine.spec, Cluster) and _identity(machine.devices) in identities[:1]
        if machine.name in names or alike:
            return place
    named = ", ".join(repr(machine.name) for machine in machines)
    raise InputError(
        f"You gave a price for {shown(name)}, but this machine is not compared. Expected one of {named}. Name one "
        "of these, or add the machine to devices."
    )


def _price(name: str, value: object) -> float:
    price: Any = value  # mypy does not know that Real is ordered
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= price <= LARGEST_PRICE:
        return float(price)
    raise InputError(
        f"The price for {shown(name)} is {shown(value)}. Expected a price per hour: a number from 0 to "
        f"{LARGEST_PRICE:g}, without a currency. Correct it, or leave it out."
    )


@ends_tracebacks
def compare(
    model_or_workload: Any,
    sample_batch: Any = None,
    *,
    devices: Iterable[Any],
    prices: Mapping[str, float] | None = None,
    samples: int | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Comparison:
    """Tune a workload for several machines in turn, and compare the plans.

    Each plan is saved as a profile, as by `tune`. So a second comparison returns at once, and `tune` with one of the
    devices returns the full plan.

    Args:
        model_or_workload: As for `tune`.
        devices: A device spec for each machine: ``["sim:2xL4", "sim:A100-40GB", "cuda"]``. Simulated machines are
            predicted, real machines are measured. ``"sim:4x(8xA100-80GB)@100Gbps"`` is a cluster, whose DDP steps are
            predicted for 1, 2, 4, ... nodes.
        prices: Price per hour of each machine in one currency, such as ``{"2xL4": 1.2}``. The keys are specs, with or
            without ``sim:``.
        samples: Samples of the whole training. `ComparedMachine.compute_for` and the JSON have its hours and cost.
        time_limit_s: Time limit for all machines together. Each machine gets a part of the remaining time.
        progress: Function that is called with a `Progress` from time to time. Default: as for `tune`.
        options: Any other keyword of `tune`.

    Returns:
        The sorted machines. If the workload does not fit a machine, the machine's `misfit` has the reason.

    Raises:
        InputError: An argument is invalid. See also `tune`.
        UserCodeError: The workload's own code raised on its own sample.
        ComparisonInterrupted: Ctrl-C was pressed. The exception contains the completed machines.
    """
    from autosplit.tuning import tune as tuning

    machines = asked_machines(devices, prices, {**options, "time_limit_s": time_limit_s})
    wanted = None if samples is None else whole_number("samples", samples, minimum=1)

    def tune_one(machine: AskedMachine, timed: Mapping[str, Any]) -> Plan | ClusterScaling:
        if isinstance(machine.spec, Cluster):
            from autosplit.sim.cluster_prediction import predict_cluster

            return predict_cluster(model_or_workload, sample_batch, cluster=machine.spec, **{**options, **timed})
        return tuning.tune(model_or_workload, sample_batch, devices=machine.spec, **options, **timed)

    with progress_listener(progress) as listener:
        found = compared(machines, tune_one, time_limit_s=time_limit_s, progress=listener)
    return found.for_samples(wanted)


def compared(
    machines: Sequence[AskedMachine],
    tune_one: Callable[[AskedMachine, Mapping[str, Any]], Plan | ClusterScaling],
    *,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Tune for several machines in turn with `tune_one(machine, timed)`. `timed` contains keywords of `tune`.

    For a cluster, `tune_one` returns predictions instead of a plan.
    """
    from autosplit.oom import DoesNotFitError
    from autosplit.sim.prepare import traced_once

    ends_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    done: list[ComparedMachine] = []
    with traced_once():
        for number, machine in enumerate(machines):
            part = None if progress is None else part_of(progress, number, len(machines), machine.name)
            timed: dict[str, Any] = {"progress": part}
            if ends_s is not None:
                timed["time_limit_s"] = max(1e-3, (ends_s - time.monotonic()) / (len(machines) - number))
            try:
                done.append(_planned(machine, tune_one(machine, timed)))
            except DoesNotFitError as error:
                reason = " ".join(str(error).split()) or one_line(error)
                misfit = Misfit(reason, error.device, error.requested_bytes, error.capacity_bytes)
                done.append(
                    ComparedMachine(
                        machine.name, None, misfit, machine.devices[0].kind == "sim", machine.price_per_hour
                    )
                )
            except KeyboardInterrupt as interrupt:
                best: Plan | None = getattr(interrupt, "plan", None)
                if best is not None:
                    # The plan may be complete for the precisions tuned so far, but not for the whole request.
                    done.append(_planned(machine, replace(best, complete=False)))
                left = [one.name for one in machines[len(done) :]]
                raise ComparisonInterrupted(_comparison(done, machines, left) if done else None) from None
    return _comparison(done, machines, [])


def _planned(machine: AskedMachine, plan: Plan | ClusterScaling) -> ComparedMachine:
    if not isinstance(plan, Plan):
        return ComparedMachine(machine.name, None, None, True, machine.price_per_hour, plan)
    is_predicted = plan.simulated or not plan.main.measured
    return ComparedMachine(machine.name, plan, None, is_predicted, machine.price_per_hour)


def _comparison(done: Sequence[ComparedMachine], asked: Sequence[AskedMachine], left: Sequence[str]) -> Comparison:
    simulated = any(one.devices[0].kind == "sim" and one.name not in left for one in asked)
    notes = (*(SIMULATED_ERRORS if simulated else ()), *_of_clusters(done), *_remarks(done))

    def order(machine: ComparedMachine) -> tuple[bool, bool, float, float]:
        cost = machine.cost_per_million_samples
        return machine.samples_per_s is None, cost is None, cost or 0.0, -(machine.samples_per_s or 0.0)

    return Comparison(tuple(sorted(done, key=order)), notes, tuple(left))


def _of_clusters(machines: Sequence[ComparedMachine]) -> Iterator[str]:
    clusters = [(machine.devices, machine.cluster) for machine in machines if machine.cluster is not None]
    if clusters:
        from autosplit.sim.cluster_prediction import SCALING_ERRORS

        yield SCALING_ERRORS
        yield from (f"{devices}: {cluster.summary}" for devices, cluster in clusters)


def _remarks(machines: Sequence[ComparedMachine]) -> Iterator[str]:
    plans = [(machine.devices, machine.plan) for machine in machines if machine.plan is not None]
    if len({plan.effective_batch_size for _, plan in plans}) > 1:
        yield (
            "The effective batch sizes differ, because each machine uses its fastest size. Set --effective-batch-size "
            "N (effective_batch_size=N) to use one size on all machines."
        )
    faster = []
    for machine in machines:
        if machine.plan is not None and machine.plan.ddp is not None and machine.plan.fastest == "ddp":
            rate = machine.plan.ddp.samples_per_s
            cost = "" if machine.price_per_hour is None else f", {_cost_per_million(machine.price_per_hour, rate):.3g}"
            faster.append(f"{machine.devices} ({rate_text(rate)}{cost and f'{cost} for 1M samples'})")
    if faster:
        yield (
            f"DDP would be faster (predicted): {', '.join(faster)}. The table does not include DDP. To tune for DDP "
            "and sort by it, use --strategy ddp (strategy='ddp')."
        )
    interrupted = [name for name, plan in plans if not plan.complete]
    if interrupted:
        yield f"The search for {', '.join(interrupted)} was interrupted. The best result so far is shown."
