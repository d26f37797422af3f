"""Detect gradients that differ between the ranks, because nothing synchronises them.

DDP synchronises the parameters that had `requires_grad` when it wrapped the model, if the wrapper ran the forward. It
leaves out a loss with parameters, layers that were unfrozen or added later, and a forward of `wrapper.module`. Each
rank then trains a different model.

So the ranks compare a checksum of their gradients after the last backward of an epoch's first optimizer step. They
compare again when other parameters have a gradient, or when other wrappers ran. The other steps compare nothing:

    step                      0      1      2      3 (the backbone is unfrozen)   4
    gradients of              head   head   head   head, backbone                 head, backbone
    compared over the ranks   yes    no     no     yes                            no

Parameters outside of the models are those in the first loss's graph, and those of the optimizers that step in the loop.
Other leaves of the graph are inputs with `requires_grad`, as for a gradient penalty. Each rank has its own.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosplit.autograd_graph import graph_leaves
from autosplit.ddp.device import exchange_device, gathered, gathered_objects
from autosplit.ddp.rank_models import RankModels
from autosplit.errors import InputError
from autosplit.parallel.awaited_update import optimizers_since, updates_by_optimizer
from autosplit.parallel.step_listener import StepListener

_CHUNK = 2**22
"""Elements that are summed at a time, because torch copies them to int64."""

Place = Literal["unwrapped", "late", "outside", "unused", "wrapped"]
"""A parameter's place: no model is wrapped, unfrozen or added after wrapping, outside of the wrapped models, in a
wrapped model of which another parameter had no gradient, or wrapped."""

_PLACES: tuple[Place, ...] = ("unwrapped", "late", "outside", "unused", "wrapped")
"""The first place is the most likely cause, because a replaced parameter has no gradient any more."""

Described = tuple[str, Place]
"""A parameter's name for messages, and its place."""


class GradientComparison:
    """Compare the ranks' gradients once for each set of parameters that have one.

    Args:
        advice: What to do about a gradient that differs, by the parameter's place.
    """

    def __init__(self, advice: Mapping[Place, str]) -> None:
        self._advice = advice
        self._compared: set[int] = set()

    def compare(
        self,
        parameters: Iterable[Tensor],
        describe: Callable[[list[Tensor]], list[Described | None]],
        step: str,
        device: torch.device,
        callers: tuple[bool, ...] = (),
    ) -> None:
        """Compare the gradients, unless the same parameters had one in an earlier comparison. All ranks call this.

        Args:
            describe: Returns each parameter's name and place, or None to leave it out. Called only if the gradients are
                compared.
            step: The optimizer step, for the message.
            device: The device of this rank.
            callers: Whether each wrapped model ran in the step. If others ran before, the gradients are compared again.

        Raises:
            InputError: A parameter's gradient differs between the ranks, or some ranks have none.
        """
        found = [one for one in parameters if one.grad is not None]
        key = hash((callers, *map(id, found)))
        if key in self._compared:
            return
        self._compared.add(key)
        found = [one for one in found if not _is_shard(one)]
        described = zip(describe(found), found, strict=True)
        rows = [(*name_and_place, _checksum(one.grad)) for name_and_place, one in described if name_and_place]
        digest = int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:8], "big", signed=True)
        digests = gathered(torch.tensor([digest], device=exchange_device(device)))
        if any(int(other) != digest for other in digests):
            self._refuse(gathered_objects(rows), step)

    def forget(self) -> None:
        """Compare each set of parameters once more."""
        self._compared.clear()

    def _refuse(self, everyones: list[list[tuple[str, Place, int]]], step: str) -> None:
        by_name = [{name: checksum for name, _, checksum in rows} for rows in everyones]
        union = {name: place for rows in everyones for name, place, _ in rows}
        differs = [name for name in union if len({one.get(name) for one in by_name}) > 1]
        differs.sort(key=lambda name: _PLACES.index(union[name]))
        others = f" (the first of {len(differs)})" if len(differs) > 1 else ""
        raise InputError(
            f"The gradient of {differs[0]}{others} differs between the ranks in {step}, so each rank would train a "
            f"different model. {self._advice[union[differs[0]]]}",
        )


class EqualGradients(StepListener):
    """Compare the ranks' gradients in `Context.steps`."""

    def __init__(self, models: RankModels, device: torch.device) -> None:
        self._models, self._device = models, device
        self._comparison = GradientComparison(_ADVICE)
        self._optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._updates: Counter[int] | None = None
        self._parameters: dict[Tensor, None] = {}
        self._is_first = True
        self._index = 0
        self._calls: list[int] = []

    def begin_loop(self) -> None:
        """Look for parameters again in the next step, because layers may be new, and compare them again."""
        self._is_first, self._updates = True, None
        self._parameters = {}
        self._comparison.forget()

    def begin_step(self, index: int) -> None:
        """Begin optimizer step `index`. Find the optimizers that stepped once since the last backward.

        An optimizer with more steps trains something else, for example a probe on one rank.
        """
        self._index = index
        self._calls = [model.calls[0] for model in self._models.wrapped]
        new = [] if self._updates is None else optimizers_since(self._updates)
        self._updates = None
        if self._is_first or any(one not in self._optimizers for one in new):
            self._optimizers.update(dict.fromkeys(new))
            self._parameters |= dict.fromkeys(_parameters_of(self._optimizers))

    def begin_backward(self, loss: Tensor) -> None:
        """Find the parameters in the graph of the loss, in the first step of a loop."""
        if self._is_first:
            self._parameters |= dict.fromkeys(leaf for leaf in graph_leaves(loss) if isinstance(leaf, nn.Parameter))

    def finish(self, count: float) -> None:  # noqa: ARG002
        """Compare the gradients after the last backward."""
        if self._is_first:
            self._is_first = False
            inside = dict.fromkeys(one for model in self._models.wrapped for one in model.module.parameters())
            self._parameters = inside | self._parameters
        step = f"optimizer step {self._index}"
        calls = zip(self._models.wrapped, self._calls, strict=False)
        callers = tuple(model.calls[0] > before for model, before in calls)
        self._comparison.compare(self._parameters, self._describe, step, self._device, callers)
        self._updates = updates_by_optimizer()

    def _describe(self, parameters: list[Tensor]) -> list[Described | None]:
        found: dict[int, Described | None] = {}
        for number, model in enumerate(self._models.wrapped):
            found |= described_in(model, model.trained, f"model {number}: " if number else "")
        place: Place = "outside" if self._models.wrapped or self._models.sharded else "unwrapped"
        return described(parameters, found, place)


UNUSED = (
    "Another parameter of its model had no gradient, or the model was not called through the wrapper. DDP waits for "
    "the gradients of all parameters, unless it looks for unused parameters."
)
"""The cause if a gradient differs whose place is ``"unused"``."""

_ADVICE: dict[Place, str] = {
    "unwrapped": "No model was wrapped. Call model = ctx.wrap(model) before the loop, and train what it returns.",
    "outside": "DDP does not synchronise it. Make it a part of the model before ctx.wrap, or wrap its module as well: "
    "loss_fn = ctx.wrap(loss_fn).",
    "late": "It was frozen or missing when ctx.wrap wrapped the model. Wrap the model again after unfreezing, adding "
    "or replacing layers: model = ctx.wrap(net).",
    "unused": f"{UNUSED} Pass find_unused_parameters=True to ctx.wrap.",
    "wrapped": "Its model was changed after ctx.wrap, or not called through the wrapper. Call the wrapper that "
    "ctx.wrap returned, not wrapper.module or its methods. Call such a method from the model's forward.",
}


def _parameters_of(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the parameters of optimizers. The order is equal on all ranks.

    ZeroRedundancyOptimizer has an optimizer for this rank's parameters inside, which has fewer parameters.
    """
    lists = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
    for parameters in sorted(lists, key=len, reverse=True):
        yield from parameters


def described_in(model: nn.Module, trained: Collection[int], prefix: str = "") -> dict[int, Described | None]:
    """Describe the parameters of a DistributedDataParallel by their ids. None if the user told DDP to ignore one.

    Args:
        trained: The ids of the parameters that DDP synchronises.
    """
    ignored = getattr(model, "parameters_to_ignore", ())
    finds = getattr(model, "find_unused_parameters", True) or getattr(model, "static_graph", False)
    is_complete = finds or all(one.grad is not None for one in model.parameters() if id(one) in trained)
    usual: Place = "wrapped" if is_complete else "unused"
    found: dict[int, Described | None] = {}
    for name, one in model.named_parameters():
        inner = name.removeprefix("module.")
        place = usual if id(one) in trained else "late"
        found[id(one)] = None if inner in ignored else (f"{prefix}{inner}", place)
    return found


def described(
    parameters: Iterable[Tensor], known: Mapping[int, Described | None], elsewhere: Place
) -> list[Described | None]:
    """Describe parameters by `known`. The others have no name, and the place `elsewhere`."""
    numbers = itertools.count()
    return [
        known[id(one)]
        if id(one) in known
        else (f"tensor {next(numbers)} of shape {tuple(one.shape)} outside of the wrapped models", elsewhere)
        for one in parameters
    ]


def _is_shard(parameter: Tensor) -> bool:
    """Return whether each rank has another part of a parameter: a DTensor, or a parameter of FSDP1."""
    return any(hasattr(parameter, name) for name in ("device_mesh", "_fsdp_flattened", "_is_flat_param"))


def _checksum(gradient: Tensor | None) -> int:
    """Return the sum of a gradient's bits as integers, which does not depend on the order of the sum."""
    assert gradient is not None, "`compare` selects parameters with a gradient"
    values = gradient.detach().resolve_conj().resolve_neg()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    parts = values.reshape(-1).view(bits).split(_CHUNK)
    return int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()) if values.numel() else 0
