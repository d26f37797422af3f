"""How a process ends if its wrapped model outlives the block of `autosplit.ddp.setup`, as in the tools."""

from __future__ import annotations

import subprocess
import sys

import pytest
from marks import for_release, slow

SCRIPT = """
import atexit
import contextlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gloo_threads():
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while this reads its name
            found += "gloo" in (task / "comm").read_text()
    return found


def tell():
    while not dist.is_initialized() and gloo_threads():  # a joined thread stays in /proc for a moment
        time.sleep(0.01)
    print("gloo threads:", gloo_threads(), "group:", dist.is_initialized())


atexit.register(tell)  # runs after what is registered later

import autosplit.ddp.rendezvous
from autosplit.ddp.group_end import release_group_last

dist.init_process_group("BACKEND", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
for _ in range(2):
    release_group_last(model)
    model(torch.ones(4, 3)).sum().backward()
"""


ENDS = {
    "": "gloo threads: 0 group: False",  # the Trainer, which keeps its model
    "model = model.module": "gloo threads: 0 group: False",  # Lightning, which unwraps it
    "dist.destroy_process_group()": "gloo threads: 0 group: False",  # accelerate's end_training
    "raise ValueError('an own error')": "group: True",  # other ranks see connections close
}


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        ("cpu:gloo", ""),
        *(slow("cpu:gloo", end) for end in ENDS if end),
        *((for_release if end else slow)("gloo", end) for end in ENDS),
    ],
)
def test_the_group_ends_with_the_script(backend: str, end: str) -> None:
    """Every eighth job of a tool died at its very end: "terminate called without an active exception".

    A thread of gloo still held a Python gradient when the interpreter was gone.
    """
    script = SCRIPT.replace("BACKEND", backend) + end
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ENDS[end] in done.stdout, done.stderr
    assert (done.returncode != 0) == ("raise" in end)


GATHERS = """
import torch
import torch.distributed as dist

from autosplit.ddp.group_end import keep_backend

for _ in range(60):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    keep_backend(dist.group.WORLD)
    for _ in range(4):
        everyones = [None]
        dist.all_gather_object(everyones, "one")
        parts = [torch.empty(20_000)]
        dist.all_gather(parts, torch.ones(20_000))
    del parts
    dist.destroy_process_group()
print("ended")
"""


def test_a_group_ends_while_gloo_frees_the_last_tensors() -> None:
    """Two of three jobs with a gather as their last line hung at the end of the block (torch 2.6).

    The group's destructor held the GIL and joined the thread of gloo, which waited for the GIL.
    """
    done = subprocess.run([sys.executable, "-c", GATHERS], capture_output=True, text=True, timeout=200, check=False)
    assert "ended" in done.stdout, done.stderr
