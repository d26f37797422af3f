"""Call a model with a batch, and compute its loss. Refuse a loss that trains parameters outside of the model."""

from __future__ import annotations

import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosplit.autograd_graph import graph_leaves
from autosplit.devices.transfer import HOST, active_placement
from autosplit.errors import WorkloadError, advise
from autosplit.notes import Note
from autosplit.text import counted_text
from autosplit.workload.batch import COLLATED, is_list_of_samples, placed_on
from autosplit.workload.batch_layout import BatchLayout
from autosplit.workload.models import Models
from autosplit.workload.tree import Node, map_tensors, tensors_of, unmarked
from autosplit.workload.workload import Workload, modules_of


def call_model(model: Any, inputs: Any) -> Any:
    """Call a model with a tensor, with the items of a mapping as keywords, or with the items of a tuple or list.

    A wrapper gets the `Whole` markers. For a plain module, remove them.
    """
    if not isinstance(model, nn.DataParallel):
        inputs = unmarked(inputs)
    if isinstance(inputs, (Mapping, UserDict)):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def needed_inputs(model: Any) -> list[str]:
    """Return the names of the arguments that the model's forward needs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    module = model.module if isinstance(model, nn.DataParallel) else model
    parameters = inspect.signature(module.forward).parameters.values() if isinstance(module, nn.Module) else ()
    return [one.name for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]


LossRule = Literal["attribute", "item", "first", "scalar", "mean"]
"""Where the loss is in a model's outputs: ``outputs.loss``, ``outputs["loss"]``, ``outputs[0]``, or the output itself.

``"mean"``: the outputs have no loss, and the mean of the outputs is used.
"""


def loss_rule(outputs: Any) -> LossRule:
    """Return where the loss is in a model's outputs."""
    if isinstance(getattr(outputs, "loss", None), Tensor):
        return "attribute"
    if isinstance(outputs, (Mapping, UserDict)) and isinstance(outputs.get("loss"), Tensor):
        return "item"
    if isinstance(outputs, (tuple, list)) and outputs and _is_loss(outputs[0]):
        return "first"
    return "scalar" if isinstance(outputs, Tensor) and outputs.dim() == 0 else "mean"


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def loss_of(outputs: Any) -> Tensor:
    """Return the loss of outputs, see `loss_rule`. The mean is over all floating-point outputs with a gradient.

    Raises:
        WorkloadError: The outputs have no loss and no floating-point tensor with a gradient.
    """
    found: dict[LossRule, Callable[[], Tensor]] = {
        "attribute": lambda: outputs.loss,
        "item": lambda: outputs["loss"],
        "first": lambda: outputs[0],
        "scalar": lambda: outputs,
    }
    rule = loss_rule(outputs)
    if rule in found:
        return found[rule]()
    floating = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point() and tensor.requires_grad]
    if not floating:
        raise WorkloadError(
            f"The model returned a {type(outputs).__name__} without a loss or a floating-point tensor that has a "
            "gradient. Expected one of them. Pass loss_fn=(outputs, targets) -> loss, "
            "or compute_loss=(model, batch) -> loss.",
        )
    first, *others = (tensor.float().mean() for tensor in floating)
    return sum(others, first) / len(floating)


def on_device_of(outputs: Any, targets: Any) -> Any:
    """Move the targets to the device of the outputs, and remove `Whole` markers for the user's loss function."""
    targets = unmarked(targets)
    first, placement = next(tensors_of(outputs), None), active_placement()
    if first is not None and placement is None:
        return map_tensors(lambda tensor: tensor.to(first.device), targets)
    home = HOST if first is None or placement is None else placement.device_of(first)
    return targets if home == HOST else placed_on(home, targets)


def on_first_device(batch: Any, models: Models) -> Any:
    """Move the batch to the first device of a step, and remove `Whole` markers for the user's code."""
    batch = unmarked(batch)
    if active_placement() is not None:
        return placed_on(0, batch)
    parameter = models.first_parameter
    return batch if parameter is None else map_tensors(lambda tensor: tensor.to(parameter.device), batch)


def training_loss(workload: Workload, model: Any, batch: Any) -> Tensor:
    """Run the model, or a wrapper around it, on a batch and return the scalar loss. See `Workload` for the rules.

    Raises:
        WorkloadError: The loss is no tensor, does not have exactly one element, or does not depend on a trainable
            parameter.
    """
    try:
        loss = _loss(workload, model, batch)
    except (TypeError, RuntimeError, LookupError) as error:
        if isinstance(error, (RuntimeError, IndexError)):
            root = Node.of(workload.sample_batch, "sample_batch")
            BatchLayout(root, workload.sample_batch_size, workload.batch_dim).advise(error)
        parameter, first = Models.of(model).first_parameter, next(tensors_of(batch), None)
        if parameter is not None and first is not None and parameter.device.type != first.device.type:
            device = parameter.device
            advise(
                error,
                f"the batch is on {first.device}, but the model is on {device}. Pass "
                f"autosplit.to_device(batch, {str(device)!r})",
            )
        if is_list_of_samples(workload.sample_batch) and not isinstance(error, torch.OutOfMemoryError):
            advise(error, f"if the sample batch is a list of samples, pass {COLLATED}")
        raise
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"The loss is a {type(loss).__name__}. Expected a tensor. Return the tensor itself.")
    if not loss.requires_grad:
        raise WorkloadError(
            "The loss depends on no trainable parameter. Check requires_grad, and compute the loss outside of "
            "torch.no_grad().",
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"The loss is of shape {tuple(loss.shape)}. Expected a tensor of one number. "
            "Return its mean, with reduction='mean' or loss.mean().",
        )
    return loss.reshape(())


def _loss(workload: Workload, model: Any, batch: Any) -> Any:
    if workload.compute_loss is not None:
        return _computed_loss(workload, workload.compute_loss, model, batch)
    if workload.loss_fn is None:
        try:
            return loss_of(call_model(model, batch))
        except TypeError as error:
            _refuse_unlike_arguments(workload)
            if called_with(workload) == "keywords" and "argument" in str(error):
                advise(
                    error,
                    "a mapping is passed as keywords. If the model takes only part of it, pass "
                    'compute_loss=lambda model, batch: loss_fn(model(batch["inputs"]), batch["targets"])',
                )
            raise
    inputs, targets = batch
    try:
        outputs = call_model(model, inputs)
    except TypeError as error:
        _advise_on_inputs(error, workload, model, inputs)
        raise
    try:
        return workload.loss_fn(outputs, on_device_of(outputs, targets))
    except (TypeError, AttributeError) as error:
        if "positional argument" in str(error):
            advise(error, "loss_fn is called as loss_fn(outputs, targets), once for each forward")
        elif not isinstance(outputs, Tensor):
            advise(
                error,
                f"loss_fn gets the whole {type(outputs).__name__} that the model returns. Pass "
                "compute_loss=(model, batch) -> loss, which takes the part that the loss needs",
            )
        raise


def _advise_on_inputs(error: TypeError, workload: Workload, model: Any, inputs: Any) -> None:
    """Attach advice to the error of a model that got other inputs than its forward needs."""
    needed = needed_inputs(model)
    if isinstance(inputs, Tensor) and len(needed) > 1:
        names = ", ".join(needed)
        advise(
            error,
            f"forward() needs {names}, but the batch has one input before the targets. Pass a batch "
            f"(({names}), targets), or compute_loss=(model, batch) -> loss, which calls the model itself",
        )
    if called_with(workload) == "keywords" and "argument" in str(error):
        advise(
            error,
            "a mapping is passed as keywords. If the model takes it as one argument, pass "
            "compute_loss=lambda model, batch: loss_fn(model(batch[0]), batch[1])",
        )


def _computed_loss(workload: Workload, compute_loss: Callable[..., Any], model: Any, batch: Any) -> Any:
    try:
        return compute_loss(model, on_first_device(batch, Models.of(model)))
    except TypeError as error:
        if not is_list_of_samples(workload.sample_batch):
            advise(error, "compute_loss is called as compute_loss(model, batch). Pass a loss of outputs as loss_fn=.")
        raise


def _refuse_unlike_arguments(workload: Workload) -> None:
    """Raise WorkloadError if the model's forward takes fewer inputs than the batch has parts, such as targets."""
    if not isinstance(workload.model, nn.Module) or not isinstance(workload.sample_batch, (tuple, list)):
        return
    name, count = type(workload.model).__name__, len(workload.sample_batch)
    try:
        inspect.signature(workload.model.forward).bind(*range(count))
    except TypeError as error:
        raise WorkloadError(
            f"The sample batch is a {type(workload.sample_batch).__name__} of {count}, and {name}.forward can't be "
            f"called with it ({error}). If the last part is the targets, pass loss_fn=. Or pass a batch of the "
            f"inputs alone. If it is a list of samples, pass {COLLATED}.",
        ) from None
    except ValueError:  # the function has no signature
        return


def called_with(workload: Workload) -> Literal["tensor", "arguments", "keywords"]:
    """Return how the model is called with its inputs. See `call_model`."""
    inputs = workload.sample_batch if workload.loss_fn is None else workload.sample_batch[0]
    if isinstance(inputs, (Mapping, UserDict)):
        return "keywords"
    return "arguments" if isinstance(inputs, (tuple, list)) else "tensor"


def takes_loss_itself(workload: Workload) -> bool:
    """Return whether the loss is taken from the outputs, because no function was given."""
    return workload.loss_fn is None and workload.compute_loss is None and workload.step is None


def assumptions(workload: Workload, rule: LossRule | None = None) -> tuple[Note, ...]:
    """Return a note for each argument that is missing and was assumed. `rule`: where the loss is in the outputs."""
    notes = [Note("assumed", text) for text in workload.assumed]
    if rule == "mean":
        text = "No loss is given: the mean of the model's floating-point outputs is used. Pass loss_fn=."
        notes.append(Note("loss-assumed", text))
    if workload.optimizer is None and workload.step is None:
        text = "No optimizer is given: AdamW is assumed, with its two states per parameter. Pass optimizer=."
        notes.append(Note("optimizer-assumed", text))
    return tuple(notes)


# Losses with parameters of their own, such as the class weights of ArcFace

INTO_THE_MODEL = (
    "Make the loss a part of the model: a module whose forward(inputs, targets) returns self.loss(self.net(inputs), "
    "targets), with compute_loss=lambda model, batch: model(*batch)"
)
"""How a loss with trained parameters is planned and trained."""


@dataclass
class OutsideParameters:
    """Look for trained tensors outside of the model in the first two steps, and not in later steps.

    autosplit would count neither their gradients nor their optimizer state. BalancedDataParallel would not replicate
    them, and DDP would not synchronise them.

    A leaf tensor that is not a Parameter counts if both steps have it. A loss may also make new leaves in each step, as
    a gradient penalty does.
    """

    _steps: int = 0
    _before: list[tuple[weakref.ref[Tensor], Tensor | None]] = field(default_factory=list)

    def refuse(self, loss: Tensor, workload: Workload, modules: tuple[nn.Module, ...], batch: Any) -> None:
        """Raise WorkloadError if the loss depends on a trained tensor outside of the modules and the batch."""
        if self._steps == 2:
            return
        self._steps += 1
        live = modules_of(workload)  # autosplit trains a copy, and a penalty may use the caller's own model
        known = {id(tensor) for module in (*modules, *live) for tensor in (*module.parameters(), *module.buffers())}
        known.update(map(id, tensors_of(batch)))
        outside = [leaf for leaf in graph_leaves(loss) if id(leaf) not in known]
        earlier = [ref() for ref, _ in self._before]
        found = [leaf for leaf in outside if isinstance(leaf, nn.Parameter) or any(leaf is one for one in earlier)]
        if not found:
            self._before = [(weakref.ref(leaf), leaf.grad) for leaf in outside]
            return
        for ref, gradient in self._before:
            if (leaf := ref()) is not None:
                leaf.grad = gradient
        raise WorkloadError(
            f"The loss trains {counted_text(len(found), 'tensor')} outside of the model, the first of shape "
            f"{tuple(found[0].shape)}. Expected all trained parameters in the model. {INTO_THE_MODEL}. If it is not "
            "trained, call requires_grad_(False) on it.",
        )
