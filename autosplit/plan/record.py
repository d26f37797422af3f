"""The answer as a value: plain numbers, checked, and JSON in and out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from autosplit.errors import PlanError
from autosplit.files import read_bounded, replace_file, what_stands_at
from autosplit.notes import Note
from autosplit.plan.explanation import Change, Explained, TunedWay
from autosplit.plan.validation import fits_devices, unfit_number, unsound_part
from autosplit.probe.check_result import Check
from autosplit.probe.loader_result import LoaderSettings
from autosplit.solve.memory import Ceiling, Fits, MemoryParts, Region
from autosplit.solve.padded_length import LengthPlan
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Fit
from autosplit.solve.trial import Trial
from autosplit.text import counted_text, listed, printable

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 2
"""Of the JSON; a file of another version is refused."""

MOST_DEVICES = 4096
"""Of a plan: over all machines of a job."""

MOST_FORWARDS = 2**20
"""Of an optimizer step."""

MAX_FILE_BYTES = 16 * 2**20
"""A plan is some dozens of KiB: what is larger than this is none, and is not read."""


@dataclass(frozen=True)
class PlanDevice:
    """A device of the plan.

    Attributes:
        label: ``"cuda:0"``, ``"cpu:1"``, ``"sim:2"``.
        kind: ``"cpu"``, ``"sim"``, or torch's name of an accelerator, ``"cuda"``.
        index: Its position among the devices for cpu and sim, its logical index for an accelerator.
        name: What the maker calls it.
        memory_bytes: What it has, or its budget.
        capacity_bytes: What the plan may use: memory less the reserve.
        budgeted: Whether the capacity is enforced by the tracker.
        share: Samples per forward: its entry of the split.
        peak_bytes: The most it holds in a step of the plan; predicted for simulated cards.
        busy_s: Time it computes in a full micro-step, by its fitted curve.
        ceiling: The largest share it runs, and how that was found.
        uuid: Of a GPU; None for others.
        driver: Its driver's version; None for others.
        memory: What `peak_bytes` is made of; None where that is not known.
        rates: Of a simulated card: ``"published"``, or on what its figures were measured; None of others.
        attention: The back ends that torch chooses for `scaled_dot_product_attention` on the device. Empty if the model
            calls no attention, and for devices other than NVIDIA's GPUs.
    """

    label: str
    kind: str
    index: int
    name: str
    memory_bytes: int
    capacity_bytes: int
    budgeted: bool
    share: int
    peak_bytes: int
    busy_s: float
    ceiling: Ceiling
    uuid: str | None = None
    driver: str | None = None
    memory: MemoryParts | None = None
    rates: str | None = None
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankSettings:
    """The settings that one DDP rank loads for itself.

    Attributes:
        rank: Its number.
        device: The device's label.
        batch_size: Samples per forward on this rank.
        accumulation_steps: Forwards per optimizer step, equal on all ranks.
        ceiling: The largest batch this rank runs.
        peak_bytes: The most the rank holds at its batch size, as predicted.
    """

    rank: int
    device: str
    batch_size: int
    accumulation_steps: Annotated[int, Meta(ge=1)]
    ceiling: Ceiling
    peak_bytes: int


@dataclass(frozen=True)
class DdpOptions:
    """The options of DistributedDataParallel; `autosplit.ddp` passes them on.

    Attributes:
        gradient_as_bucket_view: Gradients live in the buckets that are sent, which saves as much memory as they take.
        find_unused_parameters: Some trainable parameter gets no gradient, as was seen in a step: without this, DDP
            would wait for it.
        static_graph: The graph is the same in every step; never found out, since a look at a few steps can't tell.
    """

    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False

    def keywords(self) -> dict[str, bool]:
        """Return them as keyword arguments."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class DdpPlan:
    """The answer for DistributedDataParallel: solved from the same measurements, where there are several ranks.

    Attributes:
        ranks: One for each device; empty where there is no answer, which `reason` explains.
        samples_per_s: Throughput of whole optimizer steps: predicted, unless `measured`; 0 where there are no ranks.
        reason: Why there are no ranks; None where there are.
        effective_batch_size: Samples per optimizer step; 0 where there are no ranks.
        measured: The throughput is that of steps that ran, or were simulated: a single rank's is the search's own.
        options: For DistributedDataParallel.
        least_batch: The fewest samples that a rank trains on: 2 where a BatchNorm sees one value per sample.
    """

    ranks: tuple[RankSettings, ...]
    samples_per_s: float
    reason: str | None = None
    effective_batch_size: int = 0
    measured: bool = False
    options: DdpOptions = DdpOptions()
    least_batch: int = 1


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """How much of the batch goes on which device, how big it may be, and how many accumulation steps.

    Attributes:
        split: Samples per device in one forward.
        gpu0_bsz: `split[0]`.
        batch_size: `sum(split)`.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step, as asked for; the last micro-step is smaller where
            `batch_size` does not divide it.
        samples_per_s: Throughput of whole optimizer steps, measured (or simulated).
        even_samples_per_s: That of the same batch split evenly; None where it does not fit, was not run, or would
            say nothing (one device, or devices that share a processor).
        ceilings: Samples per device that still fit, all at once: a split within them fits.
        devices: The devices, with what the plan does to each.
        region: Which splits fit: device 0's bytes over its share and the whole batch, and the others' ceilings. None
            where nothing was split (`strategy="ddp"`).
        fit: The cost of a step as it was fitted, with its residuals; None where a plan holds none.
        effective_batch_sizes: The least and the most samples per optimizer step that were asked for; None where it was
            one forward of whatever is best.
        max_batch_size: The most samples per forward that were asked for; None for no bound.
        accumulates: Whether an optimizer step may have several forwards.
        sample_batch_size: Samples of the batch that the workload came with; None where that is unknown.
        trials: What the search tried.
        checks: What was looked at for whether splitting changes the training, with figures and advice; empty where
            it was not checked, which the notes say.
        ddp: The answer for DistributedDataParallel.
        precision: Of the workload.
        batch_dim: The batch dimension.
        loss_reduction: Of the workload: how scalar outputs of the replicas are combined.
        called_with: How the model takes its inputs: as one ``"tensor"``, as ``"arguments"`` or as ``"keywords"``.
        simulated: The devices are not there: the plan can't be used on this machine, only read.
        complete: False where the search was interrupted and this is the best so far.
        machine: The kind of machine it holds for.
        workload: The fingerprint of the workload it holds for.
        request: What was asked for, as far as it makes another plan, with the ``name`` it is kept apart by; empty in
            older files.
        notes: What was assumed or could not be done. Each `Note` has a `kind` and a `text`.
        real_steps: Training steps that were run to find it.
        real_ooms: How many of them ran out of memory.
        changes: What simulated cards would do were one thing different; None where that was not simulated.
        loader_settings: With which the loader that `tune` was given loads the most; None where it was given none.
        loader_samples_per_s: Samples per second that it loads with them, for all processes; None as well.
        lengths: What was found for samples that differ in length; None where `tune` was given no lengths.
        fits: The room that it leaves for other things than its training steps; None where nothing was asked for.
        checkpointed: The layers whose activations are computed again in the backward, by their names in the model;
            `Plan.wrap` and `autosplit.ddp` see to it.
        ways: Of several precisions or choices of checkpointed layers, what each gave, the plan's own first; empty
            where one was tuned for.
        explained: What `explain` says, once it was asked and is kept; it is no part of what plans are compared by.
        schema_version: Of the JSON.
    """

    split: tuple[int, ...]
    gpu0_bsz: int
    batch_size: int
    accumulation_steps: Annotated[int, Meta(le=MOST_FORWARDS)]
    effective_batch_size: int
    samples_per_s: float
    even_samples_per_s: Annotated[float, Meta(gt=0)] | None
    ceilings: tuple[int, ...]
    devices: Annotated[tuple[PlanDevice, ...], Meta(max_length=MOST_DEVICES)]
    trials: tuple[Trial, ...]
    ddp: DdpPlan
    precision: str
    simulated: bool
    region: Region | None = None
    fit: Fit | None = None
    effective_batch_sizes: tuple[int, int] | None = None
    max_batch_size: int | None = None
    accumulates: bool = True
    sample_batch_size: int | None = None
    checks: tuple[Check, ...] = ()
    batch_dim: Annotated[int, Meta(lt=64)] = 0  # torch has no tensor of more dimensions
    loss_reduction: str = "mean"
    called_with: Literal["tensor", "arguments", "keywords"] = "tensor"
    complete: bool = True
    machine: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    real_steps: int = 0
    real_ooms: int = 0
    changes: tuple[Change, ...] | None = None
    loader_settings: LoaderSettings | None = None
    loader_samples_per_s: Annotated[float, Meta(gt=0)] | None = None
    lengths: LengthPlan | None = None
    fits: Fits | None = None
    checkpointed: tuple[str, ...] = ()
    ways: tuple[TunedWay, ...] = ()
    explained: Explained | None = field(default=None, compare=False, repr=False)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        self._require(bool(self.split) and min(self.split) >= 0 and sum(self.split) > 0, "split", "shares of 0 or more")
        self._require(self.gpu0_bsz == self.split[0], "gpu0_bsz", f"split[0], {self.split[0]}")
        self._require(self.batch_size == sum(self.split), "batch_size", f"the split's sum, {sum(self.split)}")
        self._require(self.effective_batch_size >= 1, "effective_batch_size", "1 or more")
        steps = accumulation_steps(self.effective_batch_size, self.batch_size)
        self._require(self.accumulation_steps == steps, "accumulation_steps", f"ceil(effective / batch), {steps}")
        self._require(len(self.devices) == len(self.split), "devices", f"one for each of {len(self.split)} shares")
        self._require(len(self.ceilings) == len(self.split), "ceilings", f"one for each of {len(self.split)} shares")
        within = all(share <= ceiling for share, ceiling in zip(self.split, self.ceilings, strict=False))
        self._require(within, "split", f"shares within the ceilings {self.ceilings}")
        self._require(self.samples_per_s > 0, "samples_per_s", "more than 0")
        simulated = any(device.kind == "sim" for device in self.devices)
        self._require(self.simulated == simulated, "simulated", f"{simulated}, as its devices are")
        self._require(self.loss_reduction in ("mean", "sum"), "loss_reduction", "'mean' or 'sum'")
        ranks = [settings.rank for settings in self.ddp.ranks]
        self._require(ranks in ([], list(range(len(self.split)))), "ddp", "a rank for each device in order, or none")
        if self.effective_batch_sizes is not None:
            least, most = self.effective_batch_sizes
            asked = 1 <= least <= self.effective_batch_size <= most
            self._require(asked, "effective_batch_size", f"{least} to {most}, as asked for")
        others = 0 if self.region is None else 1 + len(self.region.replica_ceilings)
        self._require(others in (0, len(self.split)), "region", f"ceilings for {len(self.split) - 1} other devices")
        self._require(fits_devices(self.fit, len(self.split)), "fit", f"{len(self.split)} curves of measured times")
        self._require(self.lengths is None or self.lengths.is_sound, "lengths", "points of falling length")
        evaluation = 0 if self.fits is None else len(self.fits.evaluation)
        self._require(evaluation in (0, len(self.split)), "fits", f"an evaluation on each of {len(self.split)} devices")
        unfit = unfit_number(self)
        if unfit is not None:
            raise PlanError(
                f"{unfit}; expected a number from 0 to less than 2^62; tune again", code="plan-number-range"
            )
        self._require(self.schema_version == SCHEMA_VERSION, "schema_version", str(SCHEMA_VERSION))

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise PlanError(
                f"{name} is {getattr(self, name)!r:.200}; expected {expected}; tune again", code="plan-value"
            )

    def __repr__(self) -> str:
        """Return the devices and the plan, in two lines."""
        devices = listed([f"{device.label} {printable(device.name)}" for device in self.devices], 4)
        return f"<Plan for {devices}:\n {self}>"

    def __str__(self) -> str:
        """Return the plan in one line; `autosplit show` prints all of it."""
        forwards = counted_text(self.accumulation_steps, "forward")
        return (
            f"split {self.split} = {self.batch_size} samples per forward, {forwards} "
            f"per optimizer step of {self.effective_batch_size}, {self.samples_per_s:,.0f} samples/s"
            f"{' (simulated)' if self.simulated else ''}"
            f"{'; splitting changes the training: see plan.checks' if any(c.depends for c in self.checks) else ''}"
        )

    @property
    def fastest(self) -> Literal["balanced", "ddp"] | None:
        """The answer with more `samples_per_s`: the plan's own split, or `ddp`, which is predicted where not measured.

        None where there is only one answer, and on devices that share a processor, where no gain is claimed.
        """
        if len(self.devices) == 1 or self.shares_processor or self.region is None or not self.ddp.ranks:
            return None
        return "ddp" if self.ddp.samples_per_s > self.samples_per_s else "balanced"

    @property
    def shares_processor(self) -> bool:
        """Whether its devices are parts of one processor, on which no gain is claimed."""
        return len(self.devices) > 1 and all(device.kind == "cpu" for device in self.devices)

    @property
    def path(self) -> Path | None:
        """The file that the plan was read from, or remembered in; None where it is in none. No part of the JSON."""
        return self.__dict__.get("_path")

    def kept_at(self, path: Path | None) -> Self:
        """Return the plan with the file that it is kept in; `dataclasses.replace` makes another plan, without one."""
        kept = replace(self)
        object.__setattr__(kept, "_path", path)
        return kept

    def with_notes(self, *first: Note, last: Iterable[Note] = ()) -> Self:
        """Return the plan with more notes, before and after its own."""
        return replace(self, notes=(*first, *self.notes, *last)).kept_at(self.path)

    def note(self, note: Note) -> None:
        """Add a note to the plan's file, if there is one that can be written."""
        if self.path is not None:
            with contextlib.suppress(PlanError, OSError):
                plan = type(self).load(self.path)
                if note not in plan.notes:
                    mode = stat.S_IMODE(self.path.stat().st_mode)
                    replace_file(self.path, plan.with_notes(last=[note]).to_json() + "\n", mode=mode)

    @property
    def loader_keywords(self) -> dict[str, Any]:
        """The settings found for the loader, as keyword arguments of a DataLoader; empty where there are none."""
        return {} if self.loader_settings is None else self.loader_settings.to_dict()

    @property
    def takes_samples_per_s(self) -> float:
        """Samples per second that the devices take of a loader: of samples that differ in length, of those."""
        return self.samples_per_s if self.lengths is None else self.lengths.samples_per_s

    def required_lengths(self) -> LengthPlan:
        """Return what was found for samples that differ in length; raise PlanError where nothing was."""
        if self.lengths is None:
            raise PlanError(
                "the plan was tuned for samples of one length; expected one that knows theirs; tune with "
                "lengths=[len(sample) for sample in dataset]",
                code="plan-without-lengths",
            )
        return self.lengths

    def bare(self) -> Self:
        """Return the plan without what tells how this process came by it, and why: what is left, ranks agree on."""
        return replace(self, notes=(), explained=None)

    @property
    def attention(self) -> dict[str, tuple[str, ...]]:
        """The back ends of attention, each with the labels of its devices."""
        names = {name for device in self.devices for name in device.attention}
        return {name: tuple(one.label for one in self.devices if name in one.attention) for name in sorted(names)}

    def repeated(self) -> dict[str, Any]:
        """Return the numbers that an explanation repeats, by its names."""
        rates = ("samples_per_s", "loader_samples_per_s", "fastest")
        names = (*rates, "simulated", "shares_processor", "ways", "lengths", "fits", "attention")
        ddp = {"ddp_samples_per_s": self.ddp.samples_per_s, "ddp_measured": self.ddp.measured}
        return {name: getattr(self, name) for name in names} | ddp

    def digest(self) -> str:
        """Return 64 hexadecimal digits, the same in every process for equal numbers that an explanation is of."""
        cards = [replace(device, uuid=None, driver=None) for device in self.devices]
        return hashlib.sha256(msgspec.json.encode([cards, *(getattr(self, name) for name in _EXPLAINED)])).hexdigest()

    # JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, numbers and strings, keyed by the attributes' names."""
        # By way of JSON: `msgspec.to_builtins` leaves tuples as they are.
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, by atomic replacement.

        Args:
            path: The file; its folder is made where it is missing, and a link leads to the file that is written.

        Raises:
            PlanError: It can't be written there.
        """
        target = Path(path)
        try:
            target = target.resolve() if target.is_symlink() else target
            stands = what_stands_at(target)
            if stands is not None:
                raise OSError(f"{stands} is there")
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, self.to_json() + "\n", mode=0o666)  # as any file: plans are handed to others
        except (OSError, ValueError) as error:  # a name with a null character is no OSError
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"the plan can't be written to {target} ({reason}); expected a file that may be "
                "written; choose another path",
                code="plan-not-written",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: There is none, or it is not a plan that this version can read.
        """
        try:
            text = read_bounded(path, MAX_FILE_BYTES)
        except (OSError, ValueError) as error:  # a name with a null character is no OSError
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"the plan {os.fspath(path)} can't be read ({reason}); expected a file that Plan.save wrote; "
                "check the path",
                code="plan-unreadable",
            ) from error
        return cls.from_json(text, source=os.fspath(path)).kept_at(Path(path))

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Self:
        """Read a plan from JSON, as hostile input: types, ranges and sums are checked.

        Args:
            source: What to call it in an error.

        Raises:
            PlanError: It is not a plan that this version can read.
        """
        try:
            version = msgspec.json.decode(text, type=_Versioned).schema_version
            if version == 1:
                text = _from_version_1(text)
            elif version != SCHEMA_VERSION:
                raise PlanError(
                    f"{source} has schema_version {version}; expected {SCHEMA_VERSION}; tune again with this version",
                    code="plan-version",
                )
            plan = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PlanError(
                f"{source} is not a plan ({printable(error, longest=300)}); expected one that Plan.save wrote; "
                "tune again",
                code="plan-not-a-plan",
            ) from None
        unsound = unsound_part(plan)
        if unsound is not None:
            raise PlanError(
                f"{source} is not a sound plan: {printable(unsound, longest=300)}; tune again", code="plan-unsound"
            )
        return plan


_EXPLAINED = (
    *("split", "effective_batch_size", "samples_per_s", "even_samples_per_s", "region", "fit", "trials", "ddp"),
    *("effective_batch_sizes", "max_batch_size", "accumulates", "sample_batch_size", "simulated", "changes"),
    *("loader_samples_per_s", "ways", "lengths", "fits"),
)
"""What an explanation is of, beside the devices."""


@dataclass(frozen=True)
class _Versioned:
    """The one key that every version of the JSON has."""

    schema_version: int


def _from_version_1(text: str | bytes) -> bytes:
    """Return JSON of version 1 as version 2, in which a note has a kind. A note of version 1 was a string."""

    def upgraded(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: upgraded(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [upgraded(item, key) for item in value]
        return {"kind": "note", "text": value} if key == "notes" and isinstance(value, str) else value

    return msgspec.json.encode({**upgraded(msgspec.json.decode(text)), "schema_version": SCHEMA_VERSION})
