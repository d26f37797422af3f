from __future__ import annotations

import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._utils import ExceptionWrapper

from autosplit.errors import OWN_FOLDER, UserCodeError, from_user_code, is_installed, users_errors, warn_user


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (pytest.__file__, True),
        (f"{sysconfig.get_path('purelib')}/own/module.py", True),
        # From an environment below this one: `python -m venv --system-site-packages`, or a .pth file.
        ("/srv/env/lib/python3.11/site-packages/transformers/utils/hub.py", True),
        ("/home/me/train.py", False),
        ("/home/me/site-packages.py", False),
        (__file__, False),
    ],
)
def test_code_that_is_installed_is_told_from_the_users(path, installed):
    assert is_installed(path) is installed


@pytest.mark.parametrize("path", [f"{OWN_FOLDER}tuning/tune.py", nn.__file__])
def test_a_warning_shows_the_users_line(path):
    """tune_sharded calls tune, and the warnings of tune showed a line of tune_sharded."""
    inner = {"warn_user": warn_user}
    exec(compile("def call():\n    warn_user('careful')", path, "exec"), inner)
    outer = {"inner": inner["call"]}
    exec(compile("def call():\n    inner()", path, "exec"), outer)
    with pytest.warns(UserWarning, match="careful") as caught:
        outer["call"]()
    assert caught[0].filename == __file__


def test_a_warning_without_a_line_of_the_users_shows_its_own():
    here = {"warn_user": warn_user}
    exec(compile("def call():\n    warn_user('careful')", f"{OWN_FOLDER}tuning/tune.py", "exec"), here)
    with pytest.warns(UserWarning, match="careful") as caught, ThreadPoolExecutor() as threads:
        threads.submit(here["call"]).result()
    assert caught[0].filename == f"{OWN_FOLDER}tuning/tune.py"


def test_a_layer_without_a_frame_of_the_users_is_named():
    """For a model of nn.Sequential only, no message named the Linear that was too narrow."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(9, 2)))
    with pytest.raises(RuntimeError) as caught:
        net(torch.zeros(3, 4))
    said = str(from_user_code(caught.value, "the workload"))
    assert said.endswith("(3x8 and 9x2) (in layer 2.0, a Linear); fix it and run again")
    assert "in layer" not in str(from_user_code(ValueError("plain"), "the workload"))


class Foreign(nn.Module):
    def forward(self, samples):
        raise RuntimeError("Expected all tensors to be on the same device, but found two\nsecond line")


def test_an_error_in_a_replica_has_its_own_message():
    """On several GPUs, the message was only "Caught RuntimeError in replica 1 on device 1."."""
    caught = None
    try:
        Foreign()(torch.zeros(1))
    except RuntimeError:
        caught = ExceptionWrapper(where="in replica 1 on device 1")
    with pytest.raises(RuntimeError) as raised:
        caught.reraise()
    said = str(from_user_code(raised.value, "the workload"))
    assert "raised RuntimeError: in replica 1 on device 1: Expected all tensors to be on the same device, but" in said
    assert "second line" not in said
    assert "strategy='ddp'" in said


def test_a_loss_of_torchs_own_is_named():
    """It has no frame of the user's code, so the message did not show where it came from."""
    with pytest.raises(RuntimeError) as caught:
        nn.NLLLoss()(torch.zeros(3, 4), torch.zeros(3, 4))
    assert str(from_user_code(caught.value, "the workload")).endswith(" (in a NLLLoss); fix it and run again")


@pytest.mark.parametrize("text", ["Torch not compiled with CUDA enabled", "No CUDA GPUs are available"])
def test_a_call_of_cuda_is_shown_with_the_way_to_do_without(text):
    def forward():
        raise AssertionError(text)

    with (
        pytest.raises(UserCodeError, match=r"test_errors.py:\d+ in forward calls CUDA .*device=x.device"),
        users_errors("the model"),
    ):
        forward()
