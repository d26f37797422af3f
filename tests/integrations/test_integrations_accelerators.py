"""Each tool trains with one process per accelerator, unequal splits and a checkpoint, and gets one process's weights.

accelerate and transformers know accelerators by name. So emulated devices use the name ``npu``, a back end that torch
can load (`emulated.called_npu`). Lightning accepts a registered accelerator.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import emulated
import shared_training as shared
import test_integrations_accelerate as with_accelerate
import test_integrations_lightning as with_lightning
import test_integrations_transformers as with_transformers
import torch
from gpus import COUNT, KIND
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from ranks import found_by, run_ranks
from torch import distributed as dist

from autosplit.accelerators import backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two cards")]

LIMIT_S = 280
JOB = ("gpt", (7, 1), 20)
"""Model, split, and samples per optimizer step: 3 forwards. At an epoch's end, one rank has no samples."""


class Cards(Accelerator):
    """The description of its devices that another vendor's back end gives Lightning."""

    def setup_device(self, device):
        backend(KIND).set_device(device)

    def teardown(self):
        backend(KIND).empty_cache()

    @staticmethod
    def parse_devices(devices):
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(KIND, index) for index in devices]

    @staticmethod
    def auto_device_count():
        return COUNT

    @staticmethod
    def is_available():
        return COUNT > 0

    @staticmethod
    def name():
        return KIND

    def get_device_stats(self, device):
        return backend(KIND).memory_stats(device)


class CardsDDP(DDPStrategy):
    """DDP for other back ends. With device ids, Lightning 2.6.6 opens a CUDA stream (strategies/ddp.py)."""

    def determine_ddp_device_ids(self):
        return None


def place_of_lightning() -> dict[str, str]:
    if KIND == "cuda":
        return {"accelerator": "cuda", "strategy": "ddp"}
    AcceleratorRegistry.register(KIND, Cards)
    StrategyRegistry.register(f"ddp_{KIND}", CardsDDP)
    return {"accelerator": KIND, "strategy": f"ddp_{KIND}"}


def trained(tool: Any, **options: Any) -> dict[str, Any]:
    """Train with a tool, and return the device."""
    found = tool.trained(*JOB, resumes=True, plan_of=shared.shares_of_cards, **options)
    known = emulated.contexts().get(os.getpid()) if emulated.wanted() else None  # a real driver prints nothing
    return {**found, "kind": KIND, "contexts": known, "backend": dist.is_initialized() and dist.get_backend()}


def trained_by_lightning() -> dict[str, Any]:
    return trained(with_lightning, **place_of_lightning())


TOOLS = {
    "accelerate": partial(trained, with_accelerate),
    "transformers": partial(trained, with_transformers, name="cards"),
    "lightning": trained_by_lightning,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with emulated.called_npu() if KIND == "emu" else contextlib.nullcontext():
        return run_ranks(__name__, "TOOLS", 2, tmp_path_factory.mktemp("ranks"), limit_s=LIMIT_S, spawned=True)


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("tool", TOOLS)
def test_twenty_steps_on_two_cards_are_those_of_one_process(tool, ranks):
    bound = with_transformers.BOUNDS["gpt"] if tool == "transformers" else 1e-9
    found = found_by(ranks, tool)
    shared.check_trained(found, JOB, bound)
    shared.check_resumed(found, JOB, bound)
    for rank, one in enumerate(found):
        assert one["kind"] == ("npu" if KIND == "emu" else KIND)
        assert one["contexts"] in (None, (rank,)), "a context on another rank's card"
