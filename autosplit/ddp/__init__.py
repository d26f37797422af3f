"""Train with DistributedDataParallel under a plan, with different batch sizes per rank and exact gradients."""

from __future__ import annotations

from autosplit.ddp.batchnorms import BatchNormWarning
from autosplit.ddp.context import Context
from autosplit.ddp.loader_steps import LeftOverWarning
from autosplit.ddp.rank_gather import Gathered
from autosplit.ddp.setup import setup
from autosplit.errors import RankFailedError, SlowRankWarning
from autosplit.parallel.epoch_steps import EffectiveBatchWarning
from autosplit.plan.other_model import OtherModelWarning

__all__ = [
    "BatchNormWarning",
    "Context",
    "EffectiveBatchWarning",
    "Gathered",
    "LeftOverWarning",
    "OtherModelWarning",
    "RankFailedError",
    "SlowRankWarning",
    "setup",
]
