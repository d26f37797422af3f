"""Store a plan as plain numbers, validate them, and convert them to and from JSON."""

from __future__ import annotations

import contextlib
import copy
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from autosplit.errors import PlanError
from autosplit.files import profile_with_key, read_bounded, replace_file, what_stands_at
from autosplit.notes import Note
from autosplit.plan.explanation import BINDING_SHARE, WhatIf
from autosplit.plan.layout import Layout, PlanDevice, Strategy
from autosplit.plan.loader_settings import LoaderSettings
from autosplit.plan.validation import PRECISIONS, control_character, unfit_number, unsound_part
from autosplit.probe.check_result import Check, is_count_expression
from autosplit.solve.length_plan import LengthPlan
from autosplit.solve.trial import Trial
from autosplit.text import counted_text, listed, printable

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 3
"""Version of the JSON format. `load` rejects files of unknown versions."""

MAX_FILE_BYTES = 16 * 2**20
"""Largest plan file that `load` reads, 16 MiB. A plan has tens of KiB."""


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """Layouts for training a workload on some devices, and how they were found.

    Attributes:
        layouts: The layouts, one for each strategy that can train the workload, the recommended one first.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``.
        trials: The trials of the search.
        why_no_ddp: Why DDP is not possible. None if there is a layout for it.
        effective_batch_sizes: The requested range of samples per optimizer step. None for one forward of any size.
        max_batch_size: The requested limit of samples per forward. None for no limit.
        accumulates: Whether an optimizer step may have several forwards.
        sample_batch_size: Samples of the workload's sample batch. None if unknown.
        checks: Checks of whether splitting changes the training. Empty, with a note, if no check was made.
        batch_dim: The batch dimension.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines samples. Scalar outputs of the replicas are
            combined in the same way.
        called_with: How the model takes its inputs: as one ``"tensor"``, as ``"arguments"`` or as ``"keywords"``.
        loss_rule: Where the loss is: ``"attribute"`` (``outputs.loss``), ``"item"`` (``outputs["loss"]``), ``"first"``
            (``outputs[0]``), ``"scalar"`` (the output) or ``"mean"`` (nowhere). None if a function computes the loss.
        complete: Whether the search was finished. If it was interrupted, this is the best plan so far.
        machine: The kind of machine that the plan is for.
        workload: The fingerprint of the workload that the plan is for.
        request: Arguments of `tune` that affect the plan, and its ``name``. Empty in older files.
        notes: Assumptions, and tasks that could not be done. Each `Note` has a `kind` and a `text`.
        real_steps: Number of real training steps that were run to find the plan.
        real_ooms: Number of these steps that ran out of memory.
        what_ifs: Simulated throughput of machines that differ in one property. None if they were not simulated.
        loader_settings: The fastest settings of the data loader. None if `tune` got no loader.
        loader_samples_per_s: Throughput of the data loader over all processes. None if `tune` got no loader.
        lengths: The plan for samples of different lengths. None if `tune` got no lengths.
        checkpointed: Names of the layers that `Plan.wrap` and `autosplit.ddp` checkpoint.
        schema_version: Version of the JSON.
    """

    layouts: Annotated[tuple[Layout, ...], Meta(min_length=1, max_length=2)]
    precision: str
    trials: tuple[Trial, ...] = ()
    why_no_ddp: str | None = None
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
    what_ifs: tuple[WhatIf, ...] | None = None
    loader_settings: LoaderSettings | None = None
    loader_samples_per_s: Annotated[float, Meta(gt=0)] | None = None
    lengths: LengthPlan | None = None
    checkpointed: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        strategies = {one.strategy for one in self.layouts}
        labels = {tuple(device.label for device in one.devices) for one in self.layouts}
        once = len(strategies) == len(self.layouts) and len(labels) == 1
        self._require(once, "layouts", "one or two layouts of different strategies for the same devices")
        self._require(self.loss_reduction in ("mean", "sum"), "loss_reduction", "'mean' or 'sum'")
        self._require(self.precision in PRECISIONS, "precision", f"one of {PRECISIONS}")
        if self.effective_batch_sizes is not None:
            least, most = self.effective_batch_sizes
            in_range = 1 <= least <= self.effective_batch_size <= most
            self._require(in_range, "effective_batch_size", f"{least} to {most}, as requested")
        self._require(self.lengths is None or self.lengths.is_sound, "lengths", "points of falling length")
        unfit = unfit_number(self)
        if unfit is not None:
            raise PlanError(f"{unfit}. Expected a number from 0 to less than 2^62. Tune again.")
        self._require(self.schema_version == SCHEMA_VERSION, "schema_version", str(SCHEMA_VERSION))

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise PlanError(f"{name} is {getattr(self, name)!r:.200}. Expected {expected}. Tune again.")

    # Layouts

    @property
    def recommended(self) -> Layout:
        """The recommended layout: the faster one. If both are equally fast, BalancedDataParallel's."""
        return self.layouts[0]

    @property
    def balanced(self) -> Layout | None:
        """BalancedDataParallel's layout. None if the plan is for DDP only (``strategy="ddp"``)."""
        return self._layout_of("balanced")

    @property
    def ddp(self) -> Layout | None:
        """DDP's layout, with a seat for each rank. None if DDP is not possible, see `why_no_ddp`."""
        return self._layout_of("ddp")

    def _layout_of(self, strategy: Strategy) -> Layout | None:
        return next((one for one in self.layouts if one.strategy == strategy), None)

    @property
    def main(self) -> Layout:
        """BalancedDataParallel's layout. If the plan is for DDP only, DDP's layout."""
        return self.balanced or self.layouts[0]

    @property
    def split(self) -> tuple[int, ...]:
        """Samples per device in one forward of BalancedDataParallel. If the plan is for DDP only, samples per rank."""
        return self.main.split

    @property
    def gpu0_bsz(self) -> int:
        """Samples on device 0: `split[0]`."""
        return self.main.split[0]

    @property
    def batch_size(self) -> int:
        """Samples per forward: `sum(split)`."""
        return self.main.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Forwards per optimizer step."""
        return self.main.accumulation_steps

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step. The last micro-step may be shorter."""
        return self.main.effective_batch_size

    @property
    def samples_per_s(self) -> float:
        """Throughput of whole optimizer steps, measured or simulated."""
        return self.main.samples_per_s

    @property
    def even_samples_per_s(self) -> float | None:
        """Throughput of an even split, see `Layout.even_samples_per_s`."""
        return self.main.even_samples_per_s

    @property
    def ceilings(self) -> tuple[int, ...]:
        """Samples per device that fit at the same time. Any split within the ceilings fits."""
        return self.main.ceilings

    @property
    def devices(self) -> tuple[PlanDevice, ...]:
        """The devices, in the order of the split."""
        return self.main.devices

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated. Such a plan can't be used for training."""
        return any(device.kind == "sim" for device in self.devices)

    @property
    def fastest(self) -> Strategy | None:
        """The strategy with more samples/s, which may be a prediction.

        None if only one strategy is possible. Also None if the devices share a CPU, because splitting brings no gain
        there.
        """
        if len(self.devices) == 1 or self.main.shares_processor or len(self.layouts) == 1:
            return None
        return max(self.layouts, key=lambda one: (one.samples_per_s, one.strategy == "balanced")).strategy

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
            if not 1 <= version <= SCHEMA_VERSION:
                raise PlanError(
                    f"{source} has schema_version {version}, but this version reads 1 to {SCHEMA_VERSION}. Tune again.",
                )
            if version < SCHEMA_VERSION:
                from autosplit.plan.older_files import upgraded  # most files are of this version

                text = upgraded(text, version)
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
        return plan if version == SCHEMA_VERSION else with_layouts(plan, *plan.layouts)


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


def with_layouts(plan: P, *layouts: Layout) -> P:
    """Return the plan with other layouts, in the recommended order.

    The faster layout comes first. If both are equally fast, the simpler wrapper does. A caller who passed
    ``strategy="balanced"`` has decided.
    """
    ddp = next((one for one in layouts if one.strategy == "ddp"), None)
    others = [one for one in layouts if one is not ddp]
    if ddp is None or not others:
        return replaced(plan, layouts=layouts)
    no_choice = len(ddp.seats) == 1 or ddp.shares_processor or plan.request.get("strategy") == "balanced"
    is_faster = ddp.samples_per_s > others[0].samples_per_s * (1 + BINDING_SHARE)
    return replaced(plan, layouts=(ddp, *others) if is_faster and not no_choice else (*others, ddp))


def with_layout(plan: P, layout: Layout) -> P:
    """Return the plan with this layout instead of its layout of the same strategy."""
    return with_layouts(plan, *(layout if one.strategy == layout.strategy else one for one in plan.layouts))


def with_devices(plan: P, change: Callable[[int, PlanDevice], PlanDevice]) -> P:
    """Return the plan with every device changed by a function of its position."""

    def changed(layout: Layout) -> Layout:
        seats = enumerate(layout.seats)
        return replace(layout, seats=tuple(replace(seat, device=change(i, seat.device)) for i, seat in seats))

    return replaced(plan, layouts=tuple(map(changed, plan.layouts)))


def without_notes(plan: P) -> P:
    """Return the plan without its notes. All other fields are equal on all ranks."""
    return replace(plan, notes=())


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
