"""Store a plan as plain numbers, validate them, and convert them to and from JSON."""

from __future__ import annotations

import contextlib
import copy
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from autosplit.errors import PlanError
from autosplit.files import profile_with_key, read_bounded, replace_file, what_stands_at
from autosplit.notes import Note
from autosplit.plan.explanation import Change, Explained
from autosplit.plan.loader_settings import LoaderSettings
from autosplit.plan.validation import PRECISIONS, control_character, fits_devices, unfit_number, unsound_part
from autosplit.probe.check_result import Check, is_count_expression
from autosplit.solve.length_plan import LengthPlan
from autosplit.solve.memory import Ceiling, MemoryParts, Region
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Fit
from autosplit.solve.trial import Trial
from autosplit.text import counted_text, listed, printable

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 2
"""Version of the JSON format. `load` rejects files of unknown versions."""

MOST_DEVICES = 4096
"""Largest number of devices in a plan, over all machines of a job."""

MOST_FORWARDS = 2**20
"""Largest number of forwards per optimizer step."""

MAX_FILE_BYTES = 16 * 2**20
"""Largest plan file that `load` reads, 16 MiB. A plan has tens of KiB."""


@dataclass(frozen=True)
class PlanDevice:
    """A device of the plan.

    Attributes:
        label: ``"cuda:0"``, ``"cpu:1"`` or ``"sim:2"``.
        kind: ``"cpu"``, ``"sim"``, or torch's name of an accelerator, such as ``"cuda"``.
        index: Position among the devices for cpu and sim. Logical index for an accelerator.
        name: Model name of the device.
        memory_bytes: Memory of the device, or its budget.
        capacity_bytes: Memory that the plan may use, without the reserve.
        budgeted: Whether autosplit enforces the capacity.
        share: Samples per forward on this device: its entry of the split.
        peak_bytes: Peak memory in a step of the plan. Predicted for simulated GPUs.
        busy_s: Compute time of a full micro-step, from the fitted curve.
        ceiling: The largest batch that fits on the device, and how it was found.
        uuid: UUID of a GPU. None for other devices.
        driver: Version of the GPU's driver. None for other devices.
        memory: Parts of `peak_bytes`. None if they are unknown.
        rates: Source of a simulated GPU's speed, ``"published"`` or ``"measured on ..."``. None for other devices.
        attention: The back ends that torch chooses for `scaled_dot_product_attention`. Empty if the model calls no
            attention, and for devices other than NVIDIA GPUs.
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
    """The settings of one DDP rank.

    Attributes:
        rank: Number of the rank.
        device: Label of the rank's device.
        batch_size: Samples per forward on this rank.
        accumulation_steps: Forwards per optimizer step, equal on all ranks.
        ceiling: The largest batch that fits on this rank.
        peak_bytes: Predicted peak memory at this batch size.
    """

    rank: int
    device: str
    batch_size: int
    accumulation_steps: Annotated[int, Meta(ge=1)]
    ceiling: Ceiling
    peak_bytes: int


@dataclass(frozen=True)
class DdpOptions:
    """The options of DistributedDataParallel, which `autosplit.ddp` sets.

    Attributes:
        gradient_as_bucket_view: Whether gradients are views into DDP's buckets, which saves one copy.
        find_unused_parameters: Whether a trainable parameter got no gradient in a step. Without this option, DDP would
            wait for its gradient.
        static_graph: Whether the graph is the same in every step. autosplit never sets it, because a few steps can't
            prove it.
    """

    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False

    def keywords(self) -> dict[str, bool]:
        """Return the options as keyword arguments."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class DdpPlan:
    """The settings for DistributedDataParallel. They are solved from the plan's own measurements.

    Attributes:
        ranks: One entry for each device. Empty if DDP is not possible, see `reason`.
        samples_per_s: Throughput of whole optimizer steps, predicted unless `measured`. 0 if there are no ranks.
        reason: Why there are no ranks. None if there are ranks.
        effective_batch_size: Samples per optimizer step. 0 if there are no ranks.
        measured: Whether the throughput was measured or simulated. A single rank's throughput is from the search.
        options: Options of DistributedDataParallel.
        least_batch: Smallest number of samples per rank: 2 if a BatchNorm layer gets one value per sample, else 1.
        even_samples_per_s: Predicted throughput of ranks with equal batches, for the same samples per optimizer step.
            None if it is unknown or meaningless (a single rank, or ranks that share a CPU).
        shard_size: Ranks per shard group of FSDP2 (`tune_sharded`). None if each rank has the whole model.
        fit: The time model of the ranks. None if it is unknown, or if `PlanRecord.fit` is the ranks' own.
    """

    ranks: tuple[RankSettings, ...]
    samples_per_s: float
    reason: str | None = None
    effective_batch_size: int = 0
    measured: bool = False
    options: DdpOptions = DdpOptions()
    least_batch: int = 1
    even_samples_per_s: Annotated[float, Meta(gt=0)] | None = None
    shard_size: Annotated[int, Meta(ge=2)] | None = None
    fit: Fit | None = None


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """Split, batch size and accumulation steps for training a workload on some devices.

    Attributes:
        split: Samples per device in one forward.
        gpu0_bsz: Samples on device 0: `split[0]`.
        batch_size: Samples per forward: `sum(split)`.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Requested samples per optimizer step. The last micro-step may be shorter.
        samples_per_s: Throughput of whole optimizer steps, measured or simulated.
        even_samples_per_s: Throughput of the same batch split evenly. None if it does not fit, was not run, or is
            meaningless (one device, or devices that share a CPU).
        ceilings: Samples per device that fit at the same time. Any split within the ceilings fits.
        devices: The devices, with the plan's values for each.
        region: The splits that fit: device 0's memory by its samples and the whole batch, and the other devices'
            ceilings. None if no batch is split (`strategy="ddp"`).
        fit: The fitted time model, with its residuals. None if the plan has no fit.
        effective_batch_sizes: The requested range of samples per optimizer step. None for one forward of any size.
        max_batch_size: The requested limit of samples per forward. None for no limit.
        accumulates: Whether an optimizer step may have several forwards.
        sample_batch_size: Samples of the workload's sample batch. None if unknown.
        trials: The trials of the search.
        checks: Checks of whether splitting changes the training. Empty, with a note, if no check was made.
        ddp: The settings for DistributedDataParallel.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``.
        batch_dim: The batch dimension.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines samples. Scalar outputs of the replicas are
            combined in the same way.
        called_with: How the model takes its inputs: as one ``"tensor"``, as ``"arguments"`` or as ``"keywords"``.
        loss_rule: Where the loss is: ``"attribute"`` (``outputs.loss``), ``"item"`` (``outputs["loss"]``), ``"first"``
            (``outputs[0]``), ``"scalar"`` (the output) or ``"mean"`` (nowhere). None if a function computes the loss.
        simulated: Whether the devices are simulated. Such a plan can't be used for training.
        complete: Whether the search was finished. If it was interrupted, this is the best plan so far.
        machine: The kind of machine that the plan is for.
        workload: The fingerprint of the workload that the plan is for.
        request: Arguments of `tune` that affect the plan, and its ``name``. Empty in older files.
        notes: Assumptions, and tasks that could not be done. Each `Note` has a `kind` and a `text`.
        real_steps: Number of real training steps that were run to find the plan.
        real_ooms: Number of these steps that ran out of memory.
        changes: Simulated throughput of machines that differ in one property. None if they were not simulated.
        loader_settings: The fastest settings of the data loader. None if `tune` got no loader.
        loader_samples_per_s: Throughput of the data loader over all processes. None if `tune` got no loader.
        lengths: The plan for samples of different lengths. None if `tune` got no lengths.
        checkpointed: Names of the layers that `Plan.wrap` and `autosplit.ddp` checkpoint.
        explained: The stored explanation, or None. Comparisons of plans ignore it.
        schema_version: Version of the JSON.
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
    loss_rule: Literal["attribute", "item", "first", "scalar", "mean"] | None = None
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
    checkpointed: tuple[str, ...] = ()
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
        self._require(within, "split", f"a split within the ceilings {self.ceilings}")
        self._require(self.samples_per_s > 0, "samples_per_s", "more than 0")
        simulated = any(device.kind == "sim" for device in self.devices)
        self._require(self.simulated == simulated, "simulated", f"{simulated}, because of its devices")
        self._require(self.loss_reduction in ("mean", "sum"), "loss_reduction", "'mean' or 'sum'")
        self._require(self.precision in PRECISIONS, "precision", f"one of {PRECISIONS}")
        ranks = [settings.rank for settings in self.ddp.ranks]
        self._require(ranks in ([], list(range(len(self.split)))), "ddp", "a rank for each device in order, or none")
        if self.effective_batch_sizes is not None:
            least, most = self.effective_batch_sizes
            in_range = 1 <= least <= self.effective_batch_size <= most
            self._require(in_range, "effective_batch_size", f"{least} to {most}, as requested")
        others = 0 if self.region is None else 1 + len(self.region.replica_ceilings)
        self._require(others in (0, len(self.split)), "region", f"ceilings for {len(self.split) - 1} other devices")
        self._require(fits_devices(self.fit, len(self.split)), "fit", f"{len(self.split)} curves of measured times")
        self._require(self.lengths is None or self.lengths.is_sound, "lengths", "points of falling length")
        unfit = unfit_number(self)
        if unfit is not None:
            raise PlanError(f"{unfit}. Expected a number from 0 to less than 2^62. Tune again.")
        self._require(self.schema_version == SCHEMA_VERSION, "schema_version", str(SCHEMA_VERSION))

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise PlanError(f"{name} is {getattr(self, name)!r:.200}. Expected {expected}. Tune again.")

    def __repr__(self) -> str:
        devices = listed([f"{device.label} {printable(device.name)}" for device in self.devices], 4)
        return f"<Plan for {devices}:\n {self}>"

    def __str__(self) -> str:
        forwards = counted_text(self.accumulation_steps, "forward")
        return (
            f"split {self.split} = {self.batch_size} samples per forward, {forwards} "
            f"per optimizer step of {self.effective_batch_size}, {self.samples_per_s:,.0f} samples/s"
            f"{' (simulated)' if self.simulated else ''}"
            f"{'. Splitting changes the training, see plan.checks' if any(c.depends for c in self.checks) else ''}"
        )

    @property
    def fastest(self) -> Literal["balanced", "ddp"] | None:
        """Whether the plan's own split (``"balanced"``) or `ddp` has more `samples_per_s`, which may be a prediction.

        None if only one of them is possible. Also None if the devices share a CPU, because splitting brings no gain
        there.
        """
        if len(self.devices) == 1 or shares_processor(self) or self.region is None or not self.ddp.ranks:
            return None
        return "ddp" if self.ddp.samples_per_s > self.samples_per_s else "balanced"

    @property
    def path(self) -> Path | None:
        """The file that the plan was read from or stored in, or None. The JSON does not contain it."""
        return self.__dict__.get("_path")

    # JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, numbers and strings."""
        # Convert to JSON first, because `msgspec.to_builtins` keeps tuples.
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Replace the file atomically.

        Args:
            path: The file. A missing folder is created. If the path is a symbolic link, its target is replaced.

        Raises:
            PlanError: The file can't be written.
        """
        target = Path(path)
        try:
            target = target.resolve() if target.is_symlink() else target
            stands = what_stands_at(target)
            if stands is not None:
                raise OSError(f"{stands} is there")
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, self.to_json() + "\n", mode=0o666)  # the usual mode, because plans are shared
        except (OSError, ValueError) as error:  # a name with a null character raises ValueError
            reason = getattr(error, "strerror", None) or error
            raise PlanError(f"the plan can't be written to {target} ({reason}). Choose another path.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote. Instead of a path, the first digits of a profile's key are accepted.

        Raises:
            PlanError: The file does not exist, or is not a plan that this version can read.
        """
        try:
            path = path if Path(path).exists() else profile_with_key(os.fspath(path)) or path
            text = read_bounded(path, MAX_FILE_BYTES)
        except (OSError, ValueError) as error:  # a name with a null character raises ValueError
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"the plan {os.fspath(path)} can't be read ({reason}). Check the path, or pass "
                "a key that autosplit profiles lists.",
            ) from error
        return with_path(cls.from_json(text, source=os.fspath(path)), Path(path))

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Self:
        """Read a plan from untrusted JSON. Types, ranges, sums and fixed values are checked.

        A text with control characters is refused. Notes and other sentences may have tabs and line ends.

        Args:
            text: The JSON.
            source: Name of the JSON's source in errors.

        Raises:
            PlanError: The text is not a plan that this version can read.
        """
        try:
            version = msgspec.json.decode(text, type=_Versioned).schema_version
            if version == 1:
                text = _from_version_1(text)
            elif version != SCHEMA_VERSION:
                raise PlanError(
                    f"{source} has schema_version {version}, but this version reads {SCHEMA_VERSION}. Tune again.",
                )
            unsound = control_character(msgspec.json.decode(text))
            plan = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PlanError(
                f"{source} is not a plan ({printable(error, longest=300)}). Expected a file that "
                "Plan.save wrote. Pass such a file, or tune again.",
            ) from None
        unsound = unsound or unsound_part(plan)
        if unsound is not None:
            raise PlanError(
                f"{source} is not a valid plan: {printable(unsound, longest=300)}. Expected a file that Plan.save "
                "wrote. Tune again.",
            )
        return plan


P = TypeVar("P", bound=PlanRecord)


def with_path(plan: P, path: Path | None) -> P:
    """Return a copy of the plan with this `path`."""
    found = copy.copy(plan)  # `replace` would check the values again
    object.__setattr__(found, "_path", path)
    return found


def replaced(plan: P, **changes: Any) -> P:
    """Return `dataclasses.replace(plan, **changes)` with the plan's `path`, which `replace` drops."""
    return with_path(replace(plan, **changes), plan.path)


def with_notes(plan: P, *first: Note, last: Iterable[Note] = ()) -> P:
    """Return the plan with notes added before (`first`) and after (`last`) its own notes."""
    return replaced(plan, notes=(*first, *plan.notes, *last))


def without_notes(plan: P) -> P:
    """Return the plan without its notes and its explanation. All other fields are equal on all ranks."""
    return replace(plan, notes=(), explained=None)


def add_note_to_file(plan: PlanRecord, note: Note) -> None:
    """Add a note to the plan's file. Do nothing if the plan has no writable file."""
    if plan.path is not None:
        with contextlib.suppress(PlanError, OSError):
            saved = type(plan).load(plan.path)
            if note not in saved.notes:
                mode = stat.S_IMODE(plan.path.stat().st_mode)
                replace_file(plan.path, with_notes(saved, last=[note]).to_json() + "\n", mode=mode)


def count_of(plan: PlanRecord) -> str:
    """Return a Python expression for the divisor of a batch's loss, or "" for the number of samples."""
    counts = (check.count for check in plan.checks if check.subject == "loss")
    return next((count for count in counts if count and is_count_expression(count)), "")


def reduce_of(plan: PlanRecord) -> Literal["samples", "tokens", "next tokens", "sum"] | None:
    """Return how scalar outputs of the devices are combined, as the checks detected it. None if unknown."""
    if plan.loss_reduction == "sum":
        return "sum"
    return next((check.reduce for check in plan.checks if check.reduce is not None), None)


def shares_processor(plan: PlanRecord) -> bool:
    """Return whether the devices are parts of one CPU, so that splitting brings no gain."""
    return len(plan.devices) > 1 and all(device.kind == "cpu" for device in plan.devices)


def least_share(plan: PlanRecord) -> int:
    """Return the smallest number of samples on which a device of BalancedDataParallel trains."""
    return 1 if plan.region is None else plan.region.least_share


def loader_keywords(plan: PlanRecord) -> dict[str, Any]:
    """Return the settings found for the data loader, as keyword arguments of a DataLoader."""
    return {} if plan.loader_settings is None else plan.loader_settings.to_dict()


def required_lengths(plan: PlanRecord) -> LengthPlan:
    """Return the plan for samples of different lengths. Raise PlanError if there is none."""
    if plan.lengths is None:
        raise PlanError(
            "the plan was not tuned for samples of different lengths. Tune with lengths=[len(sample) for sample in "
            "dataset].",
        )
    return plan.lengths


@dataclass(frozen=True)
class _Versioned:
    """The only key that every version of the JSON has."""

    schema_version: int


def _from_version_1(text: str | bytes) -> bytes:
    """Convert JSON of version 1 to version 2: notes were strings, and now have a kind."""

    def upgraded(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: upgraded(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [upgraded(item, key) for item in value]
        return {"kind": "note", "text": value} if key == "notes" and isinstance(value, str) else value

    return msgspec.json.encode({**upgraded(msgspec.json.decode(text)), "schema_version": SCHEMA_VERSION})
