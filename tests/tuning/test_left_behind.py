"""A probe or tuning leaves everything unchanged to the bit, even if it fails or is interrupted.

`Watch` records everything that could change: a model in the middle of its training, its optimizer, and the process. The
workload's code fails on purpose at every place where it is called.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BUDGETS, FROM_TRANSFORMERS, OPTIMIZERS
from marks import for_release, slow
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from workloads import net, net_batch

from autosplit.devices.transfer import active_placement
from autosplit.errors import UserCodeError
from autosplit.oom import DoesNotFitError
from autosplit.parallel.accumulation import current_accumulation
from autosplit.plan.plan import Plan
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.runtime import cpu
from autosplit.runtime.memory_tracker import Tracker
from autosplit.solve.memory import Ceiling
from autosplit.torch_versions import default_device
from autosplit.tuning.progress import Progress
from autosplit.tuning.tune import TuningInterrupted, tune
from autosplit.workload.model_call import training_loss
from autosplit.workload.workload import Workload, modules_of

tracing = pytest.importorskip("autosplit.sim.tracer")  # absent in tests of the core alone
from autosplit.sim.fake_copy import fake_mode  # noqa: E402
from autosplit.sim.trace_tracker import TraceTracker  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    """Load modules that torch and Optuna load late, because loading changes the process once."""
    fake_mode()
    importlib.import_module("optuna")
    before = torch_as_it_is()
    tune(small(), devices="sim:2xRTX3090", effective_batch_size=64, max_batch_size=16, n_trials=2, profile="off")
    find_ceiling(small(), "cpu:64KiB", max_batch_size=4)
    after = torch_as_it_is()
    # The wrapper hooks every optimizer's step at its first accumulation, permanently.
    assert {name for name in before if before[name] != after[name]} <= {"optimizers' global hooks"}
    gc.collect()
    gc.freeze()


def small(**options: Any) -> Workload:
    return Workload(net(), net_batch(), **{"loss_fn": F.cross_entropy, "optimizer": torch.optim.AdamW, **options})


# ------------------------------------------------------------------------------------------ what must not change


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def bits(tensor: Tensor) -> str:
    """Return all bits of a tensor as a short text, including those of NaN."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def as_it_is(value: Any) -> Any:
    """Return a comparable value. For a tensor: its identity, device, version and bits."""
    if isinstance(value, Tensor):
        memory = (value.data_ptr(), value.untyped_storage().data_ptr(), value.stride(), value._version)
        kind = (type(value).__name__, tuple(value.shape), str(value.dtype), str(value.device), value.requires_grad)
        return id(value), kind, memory, bits(value), as_it_is(value.grad) if value.is_leaf else None
    if isinstance(value, dict):
        return [(as_it_is(key) if not isinstance(key, Tensor) else id(key), as_it_is(v)) for key, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [as_it_is(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)


def model_as_it_is(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"tensor {name}"] = as_it_is(tensor)
        hooks = (tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {})
        found[f"hooks of {name}"] = as_it_is(hooks)
    for name, part in model.named_modules():
        found[f"mode of {name}"] = (id(part), part.training)
        found[f"hooks of {name}"] = [as_it_is(getattr(part, hooks)) for hooks in HOOKS]
        found[f"attributes of {name}"] = sorted(vars(part))
        found[f"slots of {name}"] = [
            [(key, id(value)) for key, value in slots.items()]
            for slots in (part._parameters, part._buffers, part._modules)
        ]
    return found


def optimizer_as_it_is(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    return {
        "optimizer's state": [(id(p), as_it_is(state)) for p, state in optimizer.state.items()],
        "optimizer's groups": as_it_is(groups),
        "optimizer's attributes": sorted(vars(optimizer)),
        "optimizer's hooks": [
            as_it_is(dict(value)) for name, value in sorted(vars(optimizer).items()) if name.endswith("_hooks")
        ],
        "optimizer's step": id(vars(optimizer).get("step")),
    }


def torch_as_it_is() -> dict[str, Any]:
    backends, module = torch.backends, importlib.import_module("torch.nn.modules.module")
    optim = importlib.import_module("torch.optim.optimizer")
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "defaults": (torch.get_default_dtype(), default_device()),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "mkldnn": (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "attention": (
            backends.mha.get_fastpath_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
        ),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": torch.get_float32_matmul_precision(),
        "optimizers' global hooks": [
            list(hooks) for hooks in (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)
        ],
        "modules' global hooks": {
            name: list(value) for name, value in vars(module).items() if name.endswith("_hooks") and value is not None
        },
    }


def children() -> list[int]:
    """Return the running child processes of this process."""
    listed = [process.pid for process in multiprocessing.active_children()]
    for file in Path("/proc/self/task").glob("*/children"):
        listed += [int(pid) for pid in file.read_text().split()]
    return sorted(set(listed))


def process_as_it_is() -> dict[str, Any]:
    return {
        "torch's generator": bits(torch.get_rng_state()),
        "python's generator": random.getstate(),
        "numpy's generator": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state()  # noqa: NPY002 # the generator with global state
        ],
        "warnings": list(warnings.filters),
        "placement": active_placement(),
        "accumulation": current_accumulation(),
        "threads": sorted(thread.ident or 0 for thread in threading.enumerate()),
        "processes": children(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "logging": (
            logging.root.manager.disable,
            logging.getLogger("torch._subclasses.fake_tensor").disabled,
            logging.getLogger("optuna").getEffectiveLevel(),
        ),
        "interrupts": signal.getsignal(signal.SIGINT),
        "environment": (dict(os.environ), Path.cwd()),
    }


# --------------------------------------------------------------------------------------------------- live training


def ignore(*_: Any) -> None:
    """A hook that does nothing."""


class Live:
    """A model in the middle of its training, with everything that a copy could lose or leave changed.

    Two steps have changed BatchNorm's statistics and the optimizer's state. Gradients of a third step wait. One part is
    in evaluation mode, one parameter is frozen, every part has hooks, and a scheduler uses the optimizer.
    """

    def __init__(self, workload: Workload, make_optimizer: Any) -> None:
        (model,) = modules_of(workload)
        self.model = model
        self.optimizer = make_optimizer(model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        for _ in range(2):
            self.optimizer.zero_grad()
            training_loss(workload, model, workload.sample_batch).backward()
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        training_loss(workload, model, workload.sample_batch).backward()
        self._hang_hooks()
        self.workload = replace(workload, optimizer=self.optimizer)
        self.watch = Watch(self)

    def _hang_hooks(self) -> None:
        last = [part for part in self.model.modules() if isinstance(part, (nn.Linear, nn.Conv2d))][-1]
        last.eval()
        if last.bias is not None:
            last.bias.requires_grad_(False)
        last.register_forward_hook(ignore)
        last.register_forward_pre_hook(ignore)
        last.register_full_backward_hook(ignore)
        last.register_state_dict_pre_hook(ignore)
        first = next(self.model.parameters())
        first.register_hook(ignore)
        first.register_post_accumulate_grad_hook(ignore)
        self.optimizer.register_step_pre_hook(ignore)

    def as_it_is(self) -> dict[str, Any]:
        return {
            **model_as_it_is(self.model),
            **optimizer_as_it_is(self.optimizer),
            "scheduler": as_it_is({k: v for k, v in vars(self.scheduler).items() if k != "optimizer"}),
            "sample batch": as_it_is(self.workload.sample_batch),
        }


class Watch:
    """A record of a live training and its process, for comparison."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        return {**process_as_it_is(), **torch_as_it_is(), **self.live.as_it_is()}

    def check(self) -> None:
        after = self.now()
        names = dict.fromkeys([*self.before, *after])
        assert [name for name in names if self.before.get(name, ...) != after.get(name, ...)] == []


class Books(Tracker):
    """A tracker that continues to count after it is closed, to find tensors that outlive their step."""

    opened: list[Books]

    def __enter__(self) -> Tracker:
        self.opened.append(self)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        held, self._held = self._held, {}
        super().__exit__(*exc)
        self._held = held

    def close(self) -> None:
        """Drop the references that the base class would have dropped."""
        self._held.clear()


class TracedBooks(Books, TraceTracker):
    """The same for traces."""


@pytest.fixture(autouse=True)
def books(monkeypatch):
    """Every tracker of the test. At the end none has a byte left, because all traced models were copies."""
    opened: list[Books] = []
    monkeypatch.setattr(Books, "opened", opened, raising=False)
    monkeypatch.setattr(cpu, "Tracker", Books)
    monkeypatch.setattr(tracing, "TraceTracker", TracedBooks)
    yield opened
    gc.collect()
    left = [tracker.live_bytes for tracker in opened if any(tracker.live_bytes)]
    for tracker in opened:
        tracker.close()
    assert left == []


def check_books(books: list[Books]) -> None:
    """Check that the memory of all traces is free."""
    gc.collect()
    assert books
    assert [tracker.live_bytes for tracker in books if any(tracker.live_bytes)] == []
    books.clear()


# ---------------------------------------------------------------------------------- every architecture and optimizer


QUICK = (("halting", "momentum"),)
"""Here a probe takes about a second, because it is also traced with real tensors."""


IN_TURN = {name: list(OPTIMIZERS)[index % len(OPTIMIZERS)] for index, name in enumerate(ARCHITECTURES)}
"""One optimizer for each architecture. Every optimizer is used at least four times."""


def crossed(*quick: tuple[str, str]) -> list[Any]:
    """Return every architecture with every optimizer. One pair of each architecture is in the gate."""

    def marked(name: str, optimizer: str) -> Any:
        if (name, optimizer) in quick:
            return name, optimizer
        return slow(name, optimizer) if IN_TURN[name] == optimizer else for_release(name, optimizer)

    return [marked(name, optimizer) for name in ARCHITECTURES for optimizer in OPTIMIZERS]


def spread(quick: tuple[str, str]) -> list[Any]:
    """Return every architecture with one optimizer and with budgeted and simulated devices.

    A tuning takes ten times as long as a ceiling, so the gate takes one kind of devices for each architecture, in turn.
    """
    kinds = ("cpu:{0},cpu:{0}", "sim:2xRTX3090@{0}")

    def marked(index: int, name: str, devices: str) -> Any:
        if name == quick[0]:
            return (*quick, devices) if devices == kinds[0] else slow(*quick, devices)
        return (slow if devices == kinds[index % 2] else for_release)(name, IN_TURN[name], devices)

    return [marked(index, name, devices) for index, name in enumerate(ARCHITECTURES) for devices in kinds]


def architecture(name: str, optimizer: str) -> Live:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    return Live(ARCHITECTURES[name](None), OPTIMIZERS[optimizer])


def memory_of(name: str) -> str:
    """Return enough memory for some samples with any optimizer."""
    return f"{BUDGETS[name][0] * 2}MiB"


def a_plan(workload: Any, devices: str, **options: Any) -> Plan:
    return tune(workload, devices=devices, **{"profile": "off", "n_trials": 2, **options})


class TestEveryArchitecture:
    @pytest.mark.parametrize(("name", "optimizer"), crossed(*QUICK))
    def test_a_ceiling(self, name, optimizer, books):
        live = architecture(name, optimizer)
        found = find_ceiling(live.workload, f"cpu:{memory_of(name)}", exact=True, max_batch_size=24)
        assert found.confirmed
        live.watch.check()
        check_books(books)

    @pytest.mark.parametrize(("name", "optimizer", "devices"), spread(QUICK[0]))
    def test_a_tuning(self, name, optimizer, devices, books):
        live = architecture(name, optimizer)
        a_plan(live.workload, devices.format(memory_of(name)), effective_batch_size=6, max_batch_size=4, n_trials=1)
        live.watch.check()
        check_books(books)


# -------------------------------------------------------------------------------- failing and interrupted, anywhere


@dataclass(frozen=True)
class Event:
    """A call of the workload's own code.

    Attributes:
        point: The called code.
        fake: Whether it got fake tensors.
        stage: The last reported stage of the tuning.
    """

    point: str
    fake: bool
    stage: str


@dataclass(frozen=True)
class Phase:
    """The call that fails: the first, middle or last of some calls.

    Attributes:
        point: The called code.
        of: ``"trace"`` or ``"step"`` if fake and real tensors differ. A borrowed model has no fake tensors.
        which: ``"first"``, ``"middle"`` or ``"last"``.
        stage: Stage of the tuning. Empty for any stage.
    """

    point: str
    of: str = ""
    which: str = "first"
    stage: str = ""

    def holds(self, event: Event, *, borrowed: bool) -> bool:
        followed = not self.of or borrowed or event.fake == (self.of == "trace")
        return event.point == self.point and followed and self.stage in ("", event.stage)

    def number(self, count: int) -> int:
        return {"first": 1, "middle": (count + 1) // 2, "last": count}[self.which]


class Trap:
    """Called by all code of a workload. Raises at one call. Copies of the model share it.

    Attributes:
        events: The calls so far.
        borrowed: Copying the trap fails, and so does copying the model.
        stage: The last reported stage of the tuning.
    """

    def __init__(self, *, borrowed: bool = False) -> None:
        self.events: list[Event] = []
        self.borrowed, self.stage = borrowed, ""
        self._phase: Phase | None = None
        self._number, self._seen = 0, 0
        self._kind: type[BaseException] = ZeroDivisionError

    def arm(self, phase: Phase, count: int, kind: type[BaseException]) -> None:
        self._phase, self._number, self._kind, self._seen = phase, phase.number(count), kind, 0

    def disarm(self) -> None:
        self._phase, self.stage = None, ""
        self.events.clear()

    def count(self, phase: Phase) -> int:
        return sum(phase.holds(event, borrowed=self.borrowed) for event in self.events)

    def spring(self, point: str, tensor: Tensor | None = None) -> None:
        event = Event(point, isinstance(tensor, FakeTensor), self.stage)
        self.events.append(event)
        if self._phase is None or not self._phase.holds(event, borrowed=self.borrowed):
            return
        self._seen += 1
        # An error is permanent, or it would look like a limit of fake tensors. Ctrl-C is pressed once.
        if self._seen == self._number or (self._seen > self._number and self._kind is not KeyboardInterrupt):
            raise self._kind("on purpose")

    def watch(self, progress: Progress) -> None:
        self.stage = progress.stage
        self.spring("progress")

    def __deepcopy__(self, memo: Any) -> Trap:
        if self.borrowed:
            raise RuntimeError("this model can't be copied")
        self.spring("copy the model")
        return self

    def batch(self, n: int) -> Any:
        batch = net_batch(n)
        self.spring("batch", batch[0])
        return batch

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.spring("loss", outputs)
        loss: Tensor = Sprung.apply(F.cross_entropy(outputs, targets), self)
        return loss


class Sprung(torch.autograd.Function):
    """An identity function whose backward calls a trap."""

    @staticmethod
    def forward(ctx, loss, trap):
        ctx.trap = trap
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.trap.spring("backward", grad)
        return grad, None


class Trapped(nn.Module):
    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.trap.spring("forward", x)
        y: Tensor = self.body(x)
        return y


class Wire:
    """Calls a trap when it is copied."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def __deepcopy__(self, memo: Any) -> Wire:
        self.trap.spring("copy the optimizer")
        return self


class TrappedAdamW(torch.optim.AdamW):
    def __init__(self, parameters: Any, trap: Trap) -> None:
        super().__init__(parameters)
        self.wire = Wire(trap)

    def step(self, closure: Any = None) -> Any:
        self.wire.trap.spring("update", self.param_groups[0]["params"][0])
        return super().step(closure)


class Case:
    """A trapped workload in the middle of its training, with a source that reports when it is built."""

    def __init__(self, kind: str) -> None:
        self.trap = Trap(borrowed=kind == "borrowed")
        model: Any = Trapped(self.trap)
        workload = Workload(model, net_batch(), loss_fn=self.trap.loss, make_batch=self.trap.batch)
        self.live = Live(workload, functools.partial(TrappedAdamW, trap=self.trap))
        self.trap.disarm()

    def source(self) -> Workload:
        self.trap.spring("build")
        return self.live.workload

    def ceiling(self) -> Ceiling:
        return find_ceiling(self.source, "cpu:64KiB", exact=True)

    def plan(self, devices: str) -> Plan:
        return a_plan(self.source, devices, progress=self.trap.watch, effective_batch_size=48, max_batch_size=32)


def outcome(run: Any) -> type[BaseException] | None:
    """Return how a call ended, without references to its result or traceback."""
    try:
        run()
    except (UserCodeError, ZeroDivisionError, KeyboardInterrupt) as error:
        return type(error)
    return None


@functools.cache
def calls_of(kind: str, devices: str) -> tuple[tuple[Event, ...], int]:
    """Return the calls of an undisturbed run, and the ceiling."""
    case = Case(kind)
    found = case.ceiling()
    assert found.confirmed
    assert found.ooms >= 1
    if devices:
        case.trap.disarm()
        case.plan(devices)
    return tuple(case.trap.events), found.batch_size


PHASES = {
    "building": Phase("build"),
    "copying the model": Phase("copy the model"),
    "copying the model again": Phase("copy the model", which="last"),
    "copying the optimizer": Phase("copy the optimizer"),
    "copying the optimizer again": Phase("copy the optimizer", which="last"),
    "the first forward": Phase("forward"),
    "making a batch": Phase("batch", "step", "middle"),
    "a forward": Phase("forward", "step", "middle"),
    "a loss": Phase("loss", "step", "middle"),
    "a backward": Phase("backward", "step", "middle"),
    "an update": Phase("update", "step", "middle"),
    "the confirming step": Phase("backward", "step", "last"),
    "the confirming step's update": Phase("update", "step", "last"),
}
"""Phases of a probe, in order."""

TRACED = {
    "a later trace": Phase("forward", "trace", "middle"),
    "a traced loss": Phase("loss", "trace", "middle"),
    "a traced backward": Phase("backward", "trace", "middle"),
    "a traced update": Phase("update", "trace", "middle"),
}
"""Phases of a tuning for simulated GPUs."""

TUNED = {
    "between two probes": Phase("progress", which="middle", stage="ceilings"),
    "in the second ceiling": Phase("backward", which="last", stage="ceilings"),
    "between two times": Phase("progress", stage="times"),
    "in a timed step": Phase("update", stage="times"),
    "before the trials": Phase("progress", stage="search"),
    "in a trial": Phase("backward", stage="search"),
    "in a trial's update": Phase("update", stage="search"),
    "at the end": Phase("progress", stage="done"),
}
"""Further phases of a tuning."""

ERRORS = (ZeroDivisionError, KeyboardInterrupt)
BUDGETED, SIMULATED = "cpu:64KiB,cpu:48KiB", "sim:2xRTX3090@64KiB"


def check_phase(kind: str, phase: Phase, error: type[BaseException], devices: str, books: list[Books]) -> None:
    """Cause one failure, check that everything is unchanged, and probe again."""
    events, ceiling = calls_of(kind, devices)
    books.clear()
    case = Case(kind)
    count = sum(phase.holds(e, borrowed=case.trap.borrowed) for e in events)
    assert count, "there is such a call"
    case.trap.arm(phase, count, error)
    ended = outcome(functools.partial(case.plan, devices) if devices else case.ceiling)
    if error is KeyboardInterrupt:
        assert ended is (TuningInterrupted if devices else KeyboardInterrupt)
    elif phase.point == "copy the model":
        assert ended is None  # the model itself then runs
    elif phase in TRACED.values():
        assert ended in (None, UserCodeError)  # after the trace that predicts the others failed, each step is traced
    else:
        assert ended in (UserCodeError, ZeroDivisionError)
    case.live.watch.check()
    gc.collect()
    assert [tracker.live_bytes for tracker in books if any(tracker.live_bytes)] == []
    case.trap.disarm()
    assert case.ceiling().batch_size == ceiling
    case.live.watch.check()


def phases_of(kind: str, *quick: str) -> list[Any]:
    """Return all phases with both errors. Both are quick for `quick`; of the others, the gate takes one error in turn.

    If the gate takes one error for a copied model, it takes the other error for a borrowed model. A borrowed model
    cannot be copied, so it has no phase of copying.
    """
    left_out, first = (("copy the model",), 1) if kind == "borrowed" else ((), 0)

    def marks_of(name: str, number: int) -> list[Any]:
        if name in quick:
            return []
        return [pytest.mark.slow] if number % 2 == 0 else [pytest.mark.slow, pytest.mark.release]

    return [
        pytest.param(phase, error, id=f"{name}-{error.__name__}", marks=marks_of(name, first + index + number))
        for index, (name, phase) in enumerate(PHASES.items())
        for number, error in enumerate(ERRORS)
        if phase.point not in left_out
    ]


def half_of_all(quick: dict[str, tuple[str, ...]]) -> list[Any]:
    """Return half of all disturbed tunings: every phase, with all pairs of values of kind, devices and error.

    Args:
        quick: For each kind of model, the phases that are not slow.
    """
    return [
        pytest.param(
            kind,
            phase,
            error,
            devices,
            id=f"{kind}-{name}-{devices}-{error.__name__}",
            marks=[] if name in quick[kind] else pytest.mark.slow,
        )
        for index, (name, phase) in enumerate(TUNED.items())
        for i, kind in enumerate(quick)
        for j, devices in enumerate((BUDGETED, SIMULATED))
        for k, error in enumerate(ERRORS)
        if (index + i + j + k) % 2 == 0
        # Simulated steps are predicted, not traced. If a trace for the prediction fails, each size is traced, so one
        # failure does not end the tuning.
        if devices != SIMULATED or name not in ("in a timed step", "in a trial", "in a trial's update")
        if (name, devices, error) != ("in the second ceiling", SIMULATED, ZeroDivisionError)
    ]


class TestDisturbedProbes:
    @pytest.mark.parametrize(("phase", "error"), phases_of("copied", "the first forward", "a backward", "an update"))
    def test_of_a_copy(self, phase, error, books):
        check_phase("copied", phase, error, "", books)

    @pytest.mark.parametrize(("phase", "error"), phases_of("borrowed", "copying the optimizer", "a backward"))
    def test_of_a_model_that_cannot_be_copied(self, phase, error, books):
        check_phase("borrowed", phase, error, "", books)


@pytest.mark.parametrize(
    ("kind", "phase", "error", "devices"),
    half_of_all({"copied": ("in a trial's update",), "borrowed": ("in the second ceiling",)}),
)
def test_disturbed_tunings(kind, phase, error, devices, books):
    check_phase(kind, phase, error, devices, books)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("phase", TRACED.values(), ids=TRACED)
def test_disturbed_traces(phase, error, books):
    check_phase("copied", phase, error, SIMULATED, books)


@pytest.mark.parametrize("kind", ["copied", slow("borrowed")])
def test_a_remembered_plan_leaves_nothing_behind_either(kind):
    case = Case(kind)
    for _ in range(2):
        case.trap.disarm()
        plan = tune(case.source, devices=SIMULATED, effective_batch_size=48, max_batch_size=32, n_trials=2)
        case.live.watch.check()
    assert plan.notes[0].kind == "from-profile"


@pytest.mark.parametrize("kind", ["copied", "borrowed"])
@pytest.mark.parametrize("devices", ["", slow(BUDGETED), slow(SIMULATED)])
def test_a_backward_that_is_still_to_come_finds_what_it_saved(kind, devices):
    """A loss computed before a tuning has the same gradients afterwards, because nothing that it saved was changed."""
    case = Case(kind)
    inputs, targets = net_batch()
    model = case.live.model.body

    def gradients(between: Any) -> list[str]:
        model.zero_grad()
        torch.manual_seed(0)
        loss = F.cross_entropy(model(inputs), targets)
        between()
        loss.backward()
        return [bits(p.grad) for p in model.parameters() if p.grad is not None]

    model.eval()  # statistics would change between forwards
    undisturbed = gradients(lambda: None)
    assert undisturbed
    assert gradients(lambda: case.plan(devices) if devices else case.ceiling()) == undisturbed


FIRST = """
import gc, sys, weakref
import torch
from torch import nn
import autosplit

def train(devices):
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    autosplit.tune(model, torch.randn(4, 4), devices=devices, max_batch_size=8, n_trials=2, profile="off")
    return weakref.ref(model)

gone = train(sys.argv[1])
gc.collect()
kinds = {type(o).__name__ for o in gc.get_objects()}
print(gone() is None, sorted(kinds & {"Trainee", "Run", "Search", "Limits", "Tracer", "Prober", "Workload"}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["sim:2xRTX3090", "cpu:64KiB"])
def test_the_first_tuning_of_a_process_holds_nothing_either(devices):
    """Optuna kept an error of its import, which kept all frames below it: the model and all its copies."""
    ran = subprocess.run([sys.executable, "-c", FIRST, devices], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True []"


# ---------------------------------------------------------------------------------------------------- repeated use


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def native_threads() -> int:
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.exists() else threading.active_count()


def resident_bytes() -> int:
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if file.exists() else 0


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def counts() -> dict[str, int]:
    gc.collect()
    hooks = importlib.import_module("torch.optim.optimizer")
    return {
        "tensors": live_tensors(),
        "finalizers": len(weakref.finalize._registry),
        "threads": native_threads(),
        "processes": len(children()),
        "files": open_files(),
        "optimizer hooks": len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks),
    }


def tune_again(case: Case, number: int) -> None:
    """Run one of ten tunings: two kinds of devices, complete, failing or interrupted, and two that do not fit."""
    devices = (BUDGETED, SIMULATED)[number % 2]
    way = number // 2 % 5
    case.trap.disarm()
    if way == 1:
        case.trap.arm(Phase("backward", stage="ceilings"), 1, ZeroDivisionError)
    elif way == 2:
        case.trap.arm(Phase("progress", stage="search"), 1, KeyboardInterrupt)
    elif way == 3:
        devices = ("cpu:4KiB,cpu:4KiB", "sim:2xRTX3090@4KiB")[number % 2]
    try:
        ended = outcome(lambda: case.plan(devices))
    except DoesNotFitError:
        ended = DoesNotFitError
    assert ended is {2: TuningInterrupted, 3: DoesNotFitError}.get(way, ended)
    assert (ended is None) == (way in (0, 4)), (way, ended)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("whole_collections")
@pytest.mark.parametrize("kind", [slow("copied"), for_release("borrowed")])
def test_ten_tunings_leave_no_more_than_six(kind, monkeypatch):
    monkeypatch.setattr(cpu, "Tracker", Tracker)
    monkeypatch.setattr(tracing, "TraceTracker", TraceTracker)
    case = Case(kind)
    for number in range(6):  # torch's caches of shapes are full by then
        tune_again(case, number)
    before, resident = counts(), resident_bytes()
    for number in range(10):
        tune_again(case, number)
    case.trap.disarm()
    case.live.watch.check()
    deadline_s = time.monotonic() + 60
    while native_threads() > before["threads"] and time.monotonic() < deadline_s:  # a joined thread leaves /proc late
        time.sleep(0.01)
    assert counts() == before
    # The allocator's own memory varies by some MiB. Ten copies of anything important are more.
    assert resident_bytes() - resident < 6 * MIB
