"""Find the micro-batches of a reinforcement-learning trainer, for training and for computing log-probabilities.

Trainers such as verl and slime run both passes on the same GPUs, and need a number of tokens per GPU for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autosplit.errors import InputError, WorkloadError
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.solve.memory import Ceiling
from autosplit.workload.tree import tensors_of
from autosplit.workload.workload import Workload


@dataclass(frozen=True)
class TokenBudgets:
    """The largest micro-batches of both passes on one GPU.

    Attributes:
        tokens_per_sample: Tokens of a sample of the workload's batch, with padding.
        train: The ceiling of a training step.
        log_prob: The ceiling of the pass without gradients, next to the optimizer state.
    """

    tokens_per_sample: int
    train: Ceiling
    log_prob: Ceiling

    @property
    def train_micro_batch_size(self) -> int:
        """Samples per training micro-batch."""
        return self.train.batch_size

    @property
    def log_prob_micro_batch_size(self) -> int:
        """Samples per micro-batch of the log-probabilities."""
        return self.log_prob.batch_size

    @property
    def max_tokens_per_gpu(self) -> int:
        """Tokens per training micro-batch. slime's ``--max-tokens-per-gpu``, verl's ``ppo_max_token_len_per_gpu``."""
        return self.train.batch_size * self.tokens_per_sample

    @property
    def log_prob_max_tokens_per_gpu(self) -> int:
        """Tokens per micro-batch of the log-probabilities. slime's ``--log-probs-max-tokens-per-gpu``."""
        return self.log_prob.batch_size * self.tokens_per_sample

    @property
    def basis(self) -> str:
        """``"steps"`` if real steps of exactly these sizes ran, and ``"traces"`` if the sizes are predicted."""
        return "steps" if self.train.confirmed and self.log_prob.confirmed else "traces"


def token_budgets(
    workload: Workload | Callable[[], Workload],
    compute_log_probs: Callable[[Any, Any], Any],
    *,
    device: Any,
    tokens_per_sample: int | None = None,
    **options: Any,
) -> TokenBudgets:
    """Find the micro-batches of the training pass and of the log-probability pass on one GPU.

    For equal GPUs, one call is enough. For different GPUs, call it for each GPU and pass the trainer the smallest
    number. Shorter sequences with the same number of tokens need no more memory, because only attention grows faster
    than the number of tokens.

    Args:
        workload: The training step, with sequences of the greatest length.
        compute_log_probs: ``compute_log_probs(model, batch) -> Tensor``. It runs in evaluation mode without gradients.
        device: One device, as in `find_ceiling`.
        tokens_per_sample: Tokens of a sample. Default: the elements per sample of the batch's first integer tensor.
        **options: Other arguments of `find_ceiling`, such as `reserve` and `max_batch_size`.

    Raises:
        InputError: An argument is invalid, or the batch has no integer tensor and `tokens_per_sample` is missing.
        WorkloadError: The workload already has `evaluate=`.
        DoesNotFitError: Not even one sample fits.
    """
    built = workload if isinstance(workload, Workload) else workload()
    if built.evaluate is not None:
        raise WorkloadError(
            "The workload has evaluate=. Expected a workload without it, because compute_log_probs takes its place. "
            "Leave evaluate= out.",
        )
    tokens = tokens_per_sample or _tokens_per_sample(built)
    train = find_ceiling(workload, device, role="rank", **options)

    def with_log_probs() -> Workload:
        found = workload if isinstance(workload, Workload) else workload()
        return replace(found, evaluate=compute_log_probs, held=("eval",))

    # Call a function again: for simulated GPUs, it builds its model without allocating memory.
    passed = with_log_probs() if isinstance(workload, Workload) else with_log_probs
    return TokenBudgets(tokens, train, find_ceiling(passed, device, role="eval", **options))


def _tokens_per_sample(workload: Workload) -> int:
    for tensor in tensors_of(workload.sample_batch):
        if not tensor.is_floating_point() and tensor.dim() > 1:
            return tensor.numel() // workload.sample_batch_size
    raise InputError(
        "The sample batch has no integer tensor with two dimensions. Expected token ids. Pass tokens_per_sample.",
    )
