"""Learn facts about a workload from small real steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autosplit.errors import AutosplitError, WorkloadError, one_line, users_errors
from autosplit.parallel.checkpointed import checkpointed_in
from autosplit.rng import preserved_rng
from autosplit.runtime.protocol import Facts, StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.runtime.trainee import Trainee
from autosplit.torch_versions import NORMS
from autosplit.workload.model_call import loss_rule, takes_loss_itself
from autosplit.workload.workload import Workload, sample_text

_log = logging.getLogger(__name__)


@dataclass
class GradientsSeen:
    """Note which parameters get a gradient.

    Attributes:
        any_trained: Whether a parameter got a gradient in a step.
        any_unused: Whether a trainable parameter got none in a step. DDP then has to search for unused parameters.
    """

    any_trained: bool = False
    any_unused: bool = False

    def note(self, trainee: Trainee) -> None:
        """Look at the gradients of a step, before its update."""
        for parameter in trainee.parameters():
            self.any_trained |= parameter.grad is not None
            self.any_unused |= parameter.grad is None and parameter.requires_grad


def small_step(workload: Workload, samples: int) -> StepShape:
    """Return a step of a few samples on one device: a training step, or a forward if the model is not trained."""
    return StepShape(((samples,),), "eval" if "forward" in workload.held else "rank")


def least_batch_of(trainee: Trainee, run: Callable[[int], object]) -> int:
    """Return the smallest batch to train on: 2 if the model has a BatchNorm and a step of one sample fails."""
    if not any(isinstance(part, NORMS) for module in trainee.models.modules for part in module.modules()):
        return 1
    try:
        run(1)
    except Exception:  # noqa: BLE001  # torch's ValueError, or an error that a larger batch repeats
        return 2
    return 1


def few_samples(workload: Workload, few: int, run: Callable[[int], object]) -> int:
    """Run a step of few samples, or of the sample batch if that fails. Return its number of samples.

    Raises:
        UserCodeError: The workload's own code raised on its sample batch.
    """
    own = workload.sample_batch_size
    if few != own:
        try:
            run(few)
        except AutosplitError:
            raise
        except Exception as error:  # noqa: BLE001  # the sample batch runs, or raises the error to report
            _log.info("a step of %d samples failed: %s", few, one_line(error))
        else:
            return few
    with users_errors(sample_text(workload)):
        run(own)
    return own


def facts_of(trainee: Trainee, gradients: GradientsSeen, *, least_batch: int, samples: int) -> Facts:
    """Return the facts of a workload after its first steps.

    Args:
        samples: A number of samples that runs.

    Raises:
        WorkloadError: No parameter of the model got a gradient.
    """
    workload, found = trainee.workload, None
    if workload.step is None and "forward" not in workload.held and not gradients.any_trained:
        raise WorkloadError(
            "No parameter of the model gets a gradient, so the loss does not come from the model's outputs. "
            "In compute_loss, call the model that is passed, not one from outside.",
        )
    if takes_loss_itself(workload):
        with preserved_rng(), torch.no_grad():
            found = loss_rule(trainee.outputs(samples))
    return Facts(
        least_batch=least_batch,
        leaves_unused=gradients.any_unused and workload.step is None,
        loss_rule=found,
        gradient_bytes=bucket_bytes(trainee),
        checkpointed=checkpointed_names(trainee),
    )


def checkpointed_names(trainee: Trainee) -> tuple[str, ...]:
    """Return the names of the workload's checkpointed layers."""
    if trainee.workload.checkpointing is None:
        return ()
    (model,) = trainee.models.modules
    return checkpointed_in(getattr(model, "named_by", model))  # skip a wrapper around the trained model
