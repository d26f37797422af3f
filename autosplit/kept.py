"""Replicas that stay for a whole optimizer step: parameters are copied to the devices once, gradients come home once.

nn.DataParallel broadcasts and reduces in every micro-step, because its replicas' parameters are outputs of one
autograd node. Here they are leaves: each micro-step's backward adds to the gradients where they are, and what is
elsewhere is added to the module's own at the end of the backward that says so. Buffers are copied at each forward,
as nn.DataParallel does: a BatchNorm's first device moves them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autosplit.copies import Copies
from autosplit.errors import InputError
from autosplit.replicas import here, replica_of, unique

__all__ = ["KeptReplicas"]


@dataclass
class _Master:
    """A parameter (or a buffer that takes part in the gradient) on the first device, and its leaves elsewhere.

    Attributes:
        tensor: The module's own.
        leaves: By device, the copies that replicas compute with.
        stamp: Which values the leaves have.
        noted: The module's own gradient when the last backward was over, and its version; None with none waiting.
    """

    tensor: Tensor
    leaves: dict[int, Tensor] = field(default_factory=dict)
    stamp: tuple[int, int] | None = None
    noted: tuple[Tensor, int] | None = None

    @property
    def waiting(self) -> bool:
        """Whether a leaf has a gradient that has not come home."""
        return any(leaf.grad is not None for leaf in self.leaves.values())

    def drop_gradients(self) -> None:
        """Forget the leaves' gradients."""
        self.noted = None
        for leaf in self.leaves.values():
            leaf.grad = None


class KeptReplicas:
    """Replicas of one module that outlive a micro-step.

    Args:
        copies: How tensors travel.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._masters: dict[int, _Master] = {}
        self._num_micro_steps = 0
        self._has_graph = False  # a forward ran whose backward may be still to come

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier micro-steps wait on other devices."""
        return any(master.waiting for master in self._masters.values())

    def replicas(self, module: nn.Module, devices: Sequence[int]) -> list[nn.Module]:
        """Return a replica of the module for each device, the first device's on the module's own parameters.

        Values are copied anew unless gradients wait, or a backward may be to come: these belong to what is there.

        Args:
            module: On the first device.
            devices: Positions of the devices that have samples.
        """
        tensors = unique((*module.parameters(), *module.buffers()))
        kept = [tensor for tensor in tensors if _can_be_kept(tensor)]
        self._follow(kept)
        self._drop_unfinished()
        for device in devices:
            if device != 0:
                self._copy_values(kept, device)
        for tensor in kept:
            self._masters[id(tensor)].stamp = _stamp(tensor)
        self._has_graph = True
        return [replica_of(module, self._table(tensors, device)) for device in devices]

    def hold(self, module: nn.Module, devices: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        """Let gradients of zeros wait, as if a micro-step had been before: for whoever follows just one of many.

        Args:
            module: On the first device.
            devices: Positions of the devices that have samples.
            parameters: Those that have a gradient.
        """
        self.replicas(module, devices)
        for parameter in parameters:
            master = self._masters.get(id(parameter))
            for leaf in master.leaves.values() if master is not None else ():
                leaf.grad = torch.zeros_like(leaf)
        self.note()

    def watch(self, outputs: Iterable[Tensor], *, last: bool) -> None:
        """Act when a backward through these outputs is over.

        Args:
            outputs: Of a forward of the replicas.
            last: Bring the gradients home then; otherwise note what waits.
        """
        act = self.bring_home if last else self.note
        self._num_micro_steps += not last

        def queue(_grad: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(act)

        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(queue)

    def bring_home(self) -> None:
        """Add all gradients that wait to the module's own.

        Raises:
            InputError: A backward made gradients that have a graph themselves (``create_graph=True``).
        """
        self._has_graph = False
        with torch.no_grad():
            for master in self._masters.values():
                for device, leaf in master.leaves.items():
                    _refuse_graph(leaf.grad)
                    if leaf.grad is not None:
                        _add_to(master.tensor, self._copies.bring(leaf.grad, device))
                        leaf.grad = None  # not before: running out of memory on the way must not lose it
                master.noted = None
        self._num_micro_steps = 0

    def note(self) -> None:
        """Remember how the module's own gradients are while others wait, to see it when they are cleared."""
        self._has_graph = False
        for master in self._masters.values():
            for leaf in master.leaves.values():
                _refuse_graph(leaf.grad)
            if not master.waiting:
                continue
            if master.tensor.grad is None:
                master.tensor.grad = self._zeros_for(master)
            master.noted = master.tensor.grad, master.tensor.grad._version
        _guard(self)

    def drop_cleared(self) -> None:
        """Forget what waits for parameters whose own gradient was cleared meanwhile: `optimizer.zero_grad()`."""
        for master in self._masters.values():
            if master.noted is None:
                continue
            grad, version = master.noted
            zeroed = grad._version != version and not bool(_dense(grad).any())
            if master.tensor.grad is not grad or zeroed:
                master.drop_gradients()
        if not self.waiting:
            self._num_micro_steps = 0

    def _drop_unfinished(self) -> None:
        """Forget what a backward left that broke off: one that ended has noted what waits."""
        for master in self._masters.values():
            if master.noted is None:
                master.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients that wait."""
        for master in self._masters.values():
            master.drop_gradients()
        self._num_micro_steps = 0

    def refuse_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an update of parameters whose gradients are not complete.

        Raises:
            InputError: Gradients of this optimizer's parameters wait.
        """
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        places = {
            device
            for master in self._masters.values()
            if id(master.tensor) in ours
            for device, leaf in master.leaves.items()
            if leaf.grad is not None
        }
        if places:
            names = ", ".join(self._copies.name_of(device) for device in sorted(places))
            raise InputError(
                f"the optimizer steps while gradients of {self._num_micro_steps} micro-steps wait on {names}; expected "
                "the last micro-step's forward and backward outside of no_sync(), which brings them home; leave "
                "no_sync() for it, or call synchronize() on the wrapper first"
            )

    def _follow(self, kept: list[Tensor]) -> None:
        """Have a master for each tensor, and none for what the module no longer has."""
        self._masters = {id(tensor): self._masters.get(id(tensor)) or _Master(tensor) for tensor in kept}
        self.drop_cleared()

    def _copy_values(self, kept: list[Tensor], device: int) -> None:
        stays = self.waiting or self._has_graph
        for tensor in kept:
            master = self._masters[id(tensor)]
            leaf = master.leaves.get(device)
            if leaf is None or leaf.shape != tensor.shape or leaf.dtype != tensor.dtype:
                leaf = master.leaves[device] = self._copies.copy(tensor.detach(), device, "parameter")
            elif not stays or master.stamp != _stamp(tensor):
                with torch.no_grad():
                    self._copies.copy_into(leaf.detach(), tensor, device)
            leaf.requires_grad_(tensor.requires_grad)

    def _table(self, tensors: list[Tensor], device: int) -> dict[int, Tensor]:
        """Map the module's tensors to those that a device computes with."""
        table: dict[int, Tensor] = {}
        for tensor in tensors:
            master = self._masters.get(id(tensor))
            if device == 0:
                table[id(tensor)] = here(tensor)
            elif master is not None:
                table[id(tensor)] = master.leaves[device]
            else:  # what a forward makes of parameters and keeps as a buffer has a graph, and no leaf
                whole = tensor if tensor.requires_grad else tensor.detach()
                table[id(tensor)] = self._copies.copy(whole, device, "buffer")
        return table

    def _zeros_for(self, master: _Master) -> Tensor:
        """Make the gradient that waiting ones will be added to, of their layout, on the first device."""
        device, grad = next((device, leaf.grad) for device, leaf in master.leaves.items() if leaf.grad is not None)
        if grad.layout != torch.strided:
            return self._copies.bring(torch.zeros_like(grad), device)  # without a value in it
        return torch.zeros_like(master.tensor)


def _can_be_kept(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Tell a tensor's values from others it had: its storage, and how often that was changed in place."""
    return tensor.untyped_storage()._cdata, 0 if tensor.is_inference() else tensor._version


def _refuse_graph(grad: Tensor | None) -> None:
    if grad is not None and grad.requires_grad:
        raise InputError(
            "a backward with create_graph=True ran on replicas that are kept within no_sync(); expected gradients "
            "without a graph, because a kept replica's parameters are leaves; run such a step outside of no_sync()"
        )


def _add_to(tensor: Tensor, grad: Tensor) -> None:
    """Add to a tensor's gradient as autograd's accumulation does: in place, and a sparse one turns dense."""
    if tensor.grad is None:
        tensor.grad = grad
    elif tensor.grad.is_sparse and not grad.is_sparse:
        tensor.grad = grad + tensor.grad
    else:
        tensor.grad += grad


def _dense(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


_guarded: weakref.WeakSet[KeptReplicas] = weakref.WeakSet()
"""Whose gradients wait, or did."""


def _guard(kept: KeptReplicas) -> None:
    """Look at every optimizer's step from now on: one that has these parameters must not run on half a gradient."""
    if not _guard_hooks:
        # Once and for good: torch walks through its hooks while it runs them, so none may come or go meanwhile.
        _guard_hooks.append(register_optimizer_step_pre_hook(_before_update))
    _guarded.add(kept)


_guard_hooks: list[Any] = []


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for kept in list(_guarded):
        kept.drop_cleared()
        kept.refuse_update(optimizer)
        if not kept.waiting:
            _guarded.discard(kept)
