"""Typical mistakes of a new user. Each answer names the next step, and its traceback ends at the call."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from raised import raises
from torch import nn

import autosplit
from autosplit.devices.spec import parse_devices
from autosplit.errors import (
    ArgumentError,
    AutosplitError,
    DeviceError,
    InputError,
    PlanError,
    UserCodeError,
    WorkloadError,
)
from autosplit.profiles.key import machine_of
from autosplit.profiles.store import store

BATCH = torch.randn(8, 16), torch.randint(0, 4, (8,))
LOSS = nn.CrossEntropyLoss()
SMALL: dict[str, Any] = {"devices": "sim:1xRTX3090", "profile": "off", "n_trials": 1, "max_batch_size": 8}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def of_outputs(outputs: Any, targets: Any) -> Any:
    """A loss_fn, passed as compute_loss."""
    return LOSS(outputs, targets)


MISTAKES: dict[str, tuple[Callable[[], object], type[AutosplitError], str, str]] = {
    "batch_size": (
        lambda: autosplit.tune(net(), BATCH, LOSS, batch_size=8, **SMALL),
        ArgumentError,
        "effective_batch_size",
    ),
    "one sample": (
        lambda: autosplit.tune(net(), (BATCH[0][0], BATCH[1][0]), LOSS, **SMALL),
        WorkloadError,
        "unsqueeze(0)",
    ),
    "a class": (
        lambda: autosplit.tune(nn.Transformer, BATCH, LOSS, **SMALL),
        UserCodeError,
        "Transformer(), an instance of the class",
    ),
    "a loss of outputs": (
        lambda: autosplit.tune(net(), BATCH, compute_loss=of_outputs, **SMALL),
        UserCodeError,
        "compute_loss(model, batch)",
    ),
    "a number of devices": (
        lambda: autosplit.tune(net(), BATCH, LOSS, **{**SMALL, "devices": 2}),
        DeviceError,
        "'cuda:0,1'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_names_the_next_step(name: str) -> None:
    run, kind, words = MISTAKES[name]
    with raises(kind, words):
        run()


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_traceback_ends_at_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user saw 10 to 71 frames of autosplit and torch above the message."""
    monkeypatch.delenv("AUTOSPLIT_DEBUG", raising=False)
    run = MISTAKES[name][0]
    with pytest.raises(AutosplitError) as caught:
        run()
    own = str(Path(autosplit.__file__).parent)
    inside = [path for path in files_of(caught.value) if path.startswith(own)]
    assert inside == [str(Path(own) / "errors.py")]
    cause = caught.value.__cause__
    assert cause is None or not [
        path for path in files_of(cause) if path.startswith((own, str(Path(torch.__file__).parent)))
    ]


def chained(model: nn.Module, batch: Any) -> Any:
    """A loss that raises an error with a cause."""
    try:
        return {}["label"]
    except KeyError as error:
        raise ValueError("no labels") from error


def test_the_causes_of_the_users_error_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSPLIT_DEBUG", raising=False)
    with pytest.raises(UserCodeError) as caught:
        autosplit.tune(net(), BATCH, compute_loss=chained, **SMALL)
    own, first = caught.value.__cause__, caught.value.__cause__.__cause__  # type: ignore[union-attr]
    assert isinstance(own, ValueError)
    assert isinstance(first, KeyError)
    assert set(files_of(own)) == set(files_of(first)) == {__file__}


def test_a_developer_sees_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPLIT_DEBUG", "1")
    with pytest.raises(AutosplitError) as caught:
        MISTAKES["batch_size"][0]()
    assert len(files_of(caught.value)) > 3


def test_precisions_have_the_names_of_torch() -> None:
    for given, name in ((torch.bfloat16, "bf16"), ("bfloat16", "bf16"), ("float16", "fp16"), (torch.float32, "none")):
        assert autosplit.Workload(net(), BATCH, LOSS, precision=given).precision == name
        assert autosplit.tune(net(), BATCH, LOSS, precision=given, **SMALL).precision == name


def test_a_plan_with_a_nan_loss_is_not_saved() -> None:
    """The plan repeated the warning after the user had fixed the data."""
    saves = {**SMALL, "profile": "auto"}
    inputs, targets = BATCH
    model = net()
    with pytest.warns(UserWarning, match="NaN or infinite"):
        plan = autosplit.tune(model, (inputs * float("nan"), targets), LOSS, **saves)
    assert plan.path is None
    assert "plan-not-saved" in {note.kind for note in plan.notes}
    plan = autosplit.tune(model, BATCH, LOSS, **saves)
    assert plan.path is not None
    assert "gradient-not-finite" not in {note.kind for note in plan.notes}


def test_a_ddp_script_without_launch_is_told_of_launch() -> None:
    devices = parse_devices("cpu:1GiB,cpu:2GiB")
    store("ab", make_plan((4, 4), machine=machine_of(devices), workload={"model": "Net"}))
    with raises(PlanError, "launch-missing") as caught:
        autosplit.ddp.setup().__enter__()
    assert "autosplit launch SCRIPT" in str(caught.value)


def test_a_loss_of_nan_warns() -> None:
    with pytest.warns(UserWarning, match="NaN or infinite"):
        plan = autosplit.tune(net(), BATCH, lambda outputs, targets: LOSS(outputs, targets) * float("nan"), **SMALL)
    assert "gradient-not-finite" in [note.kind for note in plan.notes]


def test_an_idle_device_is_named() -> None:
    options = {**SMALL, "devices": "sim:2xRTX3090"}
    plan = autosplit.tune(net(), BATCH, LOSS, effective_batch_size=1, **options)
    (note,) = [note for note in plan.notes if note.kind == "device-idle"]
    assert "sim:1 gets no samples" in note.text
    assert "effective_batch_size" in note.text


def test_a_plan_is_loaded_by_its_key_and_cuts_a_dataset() -> None:
    plan = autosplit.tune(net(), BATCH, LOSS, **{**SMALL, "profile": "auto", "effective_batch_size": 16})
    assert plan.path is not None
    loaded = autosplit.Plan.load(plan.path.stem[:12])
    assert loaded.split == plan.split
    dataset = torch.utils.data.TensorDataset(torch.zeros(48, 16))
    assert len(loaded.batch_sampler(dataset)) == len(loaded.batch_sampler(48)) > 0
    with raises(PlanError, "ffffffffffff", "autosplit profiles"):
        autosplit.Plan.load("ffffffffffff")


def test_a_loader_without_a_step_is_refused() -> None:
    """The epoch silently had no step."""
    plan = autosplit.tune(net(), BATCH, LOSS, effective_batch_size=64, **SMALL)
    with raises(InputError, "10", "64"):
        plan.batch_sampler(10, drop_last=True)
