"""Describe a machine, a workload and a request, and hash the descriptions into the key of a profile."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from autosplit.accelerators import backend, is_accelerator
from autosplit.plan.other_model import parameters_in
from autosplit.plan.record import SCHEMA_VERSION
from autosplit.workload.fingerprint import Describer, digest_of, qualified_name, tensors_in, text_of
from autosplit.workload.workload import modules_of

if TYPE_CHECKING:
    from autosplit.devices.device import Device
    from autosplit.plan.plan import Plan
    from autosplit.workload.workload import Workload

_GIB = 2**30

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Environment variables of torch's allocator for GPUs. They change how much memory a step reserves."""


def machine_of(devices: Sequence[Device]) -> dict[str, Any]:
    """Describe the kind of machine that a plan is for. Machines with equal devices have equal descriptions.

    Free memory, UUIDs and drivers are compared later, when a saved plan is found.

    Returns:
        Plain JSON values: ``devices`` (runs of equal devices, with ``count``), ``torch``, ``cuda``, ``autosplit``. If
        the settings of the allocator for GPUs are not the default, they are ``allocator``.
    """
    from importlib.metadata import PackageNotFoundError, version

    import torch

    kinds = [_kind_of(device) for device in devices]
    runs = [{**kind, "count": len(list(group))} for kind, group in itertools.groupby(kinds)]
    try:
        own = version("autosplit")
    except PackageNotFoundError:  # a checkout without installation
        own = "not installed"
    found = {"devices": runs, "torch": str(torch.__version__), "cuda": torch.version.cuda, "autosplit": own}
    settings = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)}
    has_gpus = any(device.kind != "cpu" for device in devices)
    return {**found, "allocator": settings} if settings and has_gpus else found


def _kind_of(device: Device) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": device.kind, "name": device.name}
    if is_accelerator(device.kind):
        # Drivers report sizes that differ by some MiB, so round to GiB.
        return {**kind, "memory_gib": round((_total_bytes(device) or device.capacity_bytes) / _GIB)}
    if device.budgeted:
        kind["capacity_bytes"] = device.capacity_bytes
    if device.kind == "cpu":
        kind |= {"processors": os.cpu_count(), "architecture": platform.machine()}
    if device.spec is not None:
        kind["card"] = digest_of(astuple(device.spec))
    return kind


def _total_bytes(device: Device) -> int | None:
    try:
        return int(backend(device.kind).get_device_properties(device.index).total_memory)
    except (RuntimeError, AssertionError):  # torch asserts that it was built for CUDA, and that the index exists
        return None


def workload_of(workload: Workload) -> dict[str, Any]:
    """Describe a workload as plain JSON: its name and size, and digests of its parts.

    Equal workloads have equal descriptions in every process. Nothing is run. For a function that makes the model, its
    code and the values that the code refers to are hashed.
    """
    models: Any = workload.model
    parts = modules_of(workload) or (models,)
    modules = [part for part in parts if hasattr(part, "named_modules") and not isinstance(part, type)]
    counts = [parameters_in(module) for module in modules]
    described = {
        "model": ", ".join(
            qualified_name(type(getattr(part, "named_by", part)) if part in modules else part) for part in parts
        ),
        "parameters": None if not counts or None in counts else sum(filter(None, counts)),
        "model_tree": digest_of([Describer().tree(module) for module in modules]),
        "model_tensors": digest_of([tensors_in(module) for module in modules]),
        "model_text": digest_of([text_of(module) for module in modules]),
        "model_factory": None if modules else digest_of(Describer().of(models)),
        "sample_batch": digest_of(Describer().of(workload.sample_batch)),
        "sample_batch_size": workload.sample_batch_size,
        "optimizer": digest_of(_optimizer(workload.optimizer)),
    }
    for name in ("loss_fn", "compute_loss", "step", "make_batch"):
        value = getattr(workload, name)
        described[name] = None if value is None else digest_of(Describer().of(value))
    plain = ("precision", "loss_reduction", "loss_scope", "batch_dim")
    if workload.checkpointing is not None:
        described["checkpointing"] = str(workload.checkpointing)
    return {**described, **{name: getattr(workload, name) for name in plain}}


def _optimizer(optimizer: Any) -> Any:
    """Describe an optimizer: an object by its options, without the learning rate, which does not affect speed."""
    if isinstance(optimizer, (tuple, list)):
        return [_optimizer(one) for one in optimizer]
    if isinstance(optimizer, Mapping):
        return {str(name): _optimizer(one) for name, one in optimizer.items()}
    groups = None if isinstance(optimizer, type) else getattr(optimizer, "param_groups", None)
    if groups is None:
        return Describer().of(optimizer)
    rates = {"lr", "initial_lr", "params", "param_names"}
    options = [{name: value for name, value in group.items() if name not in rates} for group in groups]
    sizes = [[str(tuple(parameter.shape)) for parameter in group["params"]] for group in groups]
    return [Describer().of(type(optimizer)), Describer().of(options), sizes]


@dataclass(frozen=True)
class ProfileKey:
    """The three parts of a profile's key: from `machine_of`, `workload_of` and `Request.facts` (with the name)."""

    machine: dict[str, Any]
    workload: dict[str, Any]
    request: dict[str, Any]

    @property
    def digest(self) -> str:
        """The profile's key, 32 hexadecimal digits. The name distinguishes plans that are equal otherwise."""
        facts = {fact: value for fact, value in self.request.items() if fact != "name"}
        parts = {"machine": self.machine, "workload": self.workload, "request": facts}
        return digest_of({"schema": SCHEMA_VERSION, **parts, "name": self.request.get("name")})

    def differences(self, plan: Plan) -> dict[str, list[str]]:
        """Return the facts in which a saved plan differs, by part: ``{"machine": ["torch"]}``."""
        found: dict[str, list[str]] = {}
        for part in ("machine", "workload", "request"):
            saved, wanted = getattr(plan, part), getattr(self, part)
            names = [name for name in {*saved, *wanted} if _text(saved, name) != _text(wanted, name)]
            if names:
                found[part] = sorted(names)
        return found


def _text(facts: Mapping[str, Any], name: str) -> str | None:
    """Return a fact as JSON, or None if there is none or if its value is nested too deeply or too long."""
    try:
        return json.dumps(facts[name], sort_keys=True)
    except (KeyError, RecursionError, ValueError):
        return None
