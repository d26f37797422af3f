"""A copy of a workload with fake tensors, whose training steps can be traced without memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.runtime.model_copy import (
    checkpoint_layers,
    live_optimizers,
    models_to_copy,
    optimizers_for,
    training_copy,
)
from autosplit.runtime.trainee import CPU, Trainee
from autosplit.sim.data_dependent import needs_values
from autosplit.sim.fake_copy import built_without_memory, fake_into, fake_like
from autosplit.torch_versions import FakeTensor, FakeTensorMode, new_fake, unset_fake_temporarily
from autosplit.workload.batch import resize
from autosplit.workload.compiled import with_eager_parts
from autosplit.workload.models import Several
from autosplit.workload.tree import map_tensors
from autosplit.workload.workload import Workload, made_batch


@dataclass
class FakeTrainee(Trainee):
    """A copy with fake tensors. Its `making` is the fake mode."""

    def _made(self, n: int) -> Any:
        mode: Any = self.making
        if self.workload.make_batch is not None:
            return self._made_by_the_user(n, mode)
        sample = map_tensors(
            lambda tensor: fake_like(tensor, mode, self.device), self.workload.sample_batch, keeps_marks=True
        )
        with mode:
            return resize(sample, n, self.workload.batch_dim)

    def _made_by_the_user(self, n: int, mode: FakeTensorMode) -> Any:
        try:
            with mode:
                return map_tensors(lambda tensor: tensor.to(self.device), made_batch(self.workload, n))
        except Exception as error:
            if not needs_values(error):
                raise
            with unset_fake_temporarily():
                made = made_batch(self.workload, n)
            return map_tensors(lambda tensor: fake_like(tensor, mode, self.device), made)

    def zero_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like a parameter, without a call of FakeTensorMode."""
        if not isinstance(parameter, FakeTensor) or not parameter.is_contiguous():
            return torch.zeros_like(parameter)
        return new_fake(parameter.shape, parameter.stride(), parameter.dtype, parameter.device, parameter.fake_mode)


def fake_training_copy(workload: Workload, mode: FakeTensorMode) -> FakeTrainee:
    """Copy a workload's model and optimizer with fake tensors, see `training_copy`.

    Raises:
        Exception: Any exception of the model's own code with fake tensors.
    """
    memo: dict[int, Any] = {}
    models = models_to_copy(workload, partial(built_without_memory, mode=mode))
    fake_into(memo, models, live_optimizers(workload), mode, CPU)
    models = copy.deepcopy(models, memo).map(with_eager_parts)
    checkpoint_layers(workload, models)
    return FakeTrainee(workload, models, optimizers_for(workload, models, memo, mode), making=mode)


def traced_copy(workload: Workload, mode: FakeTensorMode | None, *, gpu_variants: bool) -> Trainee:
    """Copy a workload with fake tensors, or with real tensors on the CPU if there is no mode.

    Args:
        gpu_variants: Make the optimizer run the multi-tensor variant that it would choose on a GPU.
    """
    trainee = training_copy(workload, device=CPU) if mode is None else fake_training_copy(workload, mode)
    if gpu_variants:
        _choose_gpu_variants(trainee.optimizers)
    return trainee


def _choose_gpu_variants(optimizers: Several[torch.optim.Optimizer]) -> None:
    """Make each optimizer run the multi-tensor variant that torch chooses by default on CUDA."""
    for optimizer in optimizers.items:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
