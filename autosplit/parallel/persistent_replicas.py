"""Keep replicas for a whole optimizer step, with one broadcast of parameters and one reduction of gradients.

Note [Kept replicas]
~~~~~~~~~~~~~~~~~~~~
nn.DataParallel broadcasts parameters and reduces gradients in every micro-step, because its replicas' parameters are
outputs of one autograd node. Here each device keeps a leaf tensor for each parameter until the optimizer steps:

                  before        micro-step 1     micro-step 2 (last)                    optimizer.step()
    p (device 0)  copied to l   p.grad = a1      p.grad = a1 + a2, then + b1 + b2       updates p, so l is outdated
    l (device 1)  = p           l.grad = b1      l.grad = b1 + b2, then None

Between the micro-steps, p.grad lacks b1: the gradient b1 waits on device 1. Training on p.grad would then be wrong. So
these operations raise InputError: an optimizer step (`refuse_update`), clipping or scaling (`settle`), and a backward
with create_graph=True, because b1 cannot keep a graph. Clearing p.grad also drops b1. Buffers are copied at each
forward, as in nn.DataParallel.

A replica computes with the output of `_Copy`, which has the values of the leaf:

    parameter (device 0) ──┐
                         _Copy ── replica's forward ── loss
    leaf (device 1) ───────┘

A backward gives the gradient to the leaf and copies nothing. `torch.autograd.grad(loss, parameter)` requests the
gradient of the parameter instead. No leaf accumulates then, and `_Copy` copies the gradient to device 0. So VQGAN's
adaptive weight, GradNorm and PCGrad get the gradient of the whole batch.

Small parameters share one `_Copy`, because a call from autograd to Python takes as long as several kernels. A node runs
when all its gradients are there, so groups are small: `torch.autograd.grad` of one parameter also computes the
gradients of its group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autosplit.devices.transfer import transfer_into
from autosplit.errors import InputError
from autosplit.parallel.replicate import here, may_have_gradient, replica_of, unique
from autosplit.parallel.tensor_copies import Copies, GpuCopies
from autosplit.torch_versions import run_early, storage_key, will_run

GROUP_BYTES = 2**17
"""Maximum bytes of the parameters that share one `_Copy`. Their gradients wait for each other during a backward."""

GROUP_TENSORS = 16
"""Maximum number of such parameters. See Note [Kept replicas]."""


@dataclass
class _Master:
    """A parameter (or a buffer that can have a gradient) on device 0, and its copies on other devices.

    Attributes:
        leaves: The copy on each device. Replicas compute with it.
        stamps: The version of the values in each copy.
        noted: The module's gradient after the last backward, and its version. None if no replica has a gradient to add.
    """

    tensor: Tensor
    leaves: dict[int, Tensor] = field(default_factory=dict)
    stamps: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    noted: tuple[Tensor, int] | None = None
    hook: Any = None

    @property
    def waiting(self) -> bool:
        return any(leaf.grad is not None for leaf in self.leaves.values())

    @property
    def is_cleared(self) -> bool:
        """Whether the module's gradient was cleared since `note`, for example by `optimizer.zero_grad()`."""
        if self.noted is None:
            return False
        grad, version = self.noted
        return self.tensor.grad is None or (
            grad._version != version and not bool((grad._values() if grad.is_sparse else grad).any())
        )

    @property
    def is_changed(self) -> bool:
        return self.noted is not None and (
            self.tensor.grad is not self.noted[0] or self.noted[0]._version != self.noted[1]
        )

    def note(self) -> None:
        assert self.tensor.grad is not None
        self.noted = self.tensor.grad, self.tensor.grad._version
        if self.hook is None:
            self.hook = self.tensor.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self)))

    def release(self) -> None:
        self.noted = None
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def drop_gradients(self) -> None:
        self.release()
        for leaf in self.leaves.values():
            leaf.grad = None


def _accumulated(known: weakref.ref[_Master], tensor: Tensor) -> None:
    """Record the gradient again after a backward that did not use the wrapper, such as a weight penalty's.

    torch also calls this hook if the backward of `_Copy` returned no gradient.
    """
    master = known()
    if master is None or master.noted is None or tensor.grad is None or not master.is_changed:
        return
    _refuse_graph(tensor.grad)
    grad, version = master.noted
    if tensor.grad is grad and grad._version != version + 1:
        raise _changed_error()
    if tensor.grad is not grad and not grad.is_sparse:  # the gradient was cleared (None) and then created again
        master.drop_gradients()
    else:
        master.note()


class _Copy(torch.autograd.Function):
    """Connect parameters to their leaves on another device. See Note [Kept replicas]."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], copies: Copies, device: int, *tensors: Tensor) -> Any:
        """Return views of the leaves.

        Args:
            begin: Called when the backward reaches this node.
            tensors: The parameters, then their leaves.
        """
        ctx.begin, ctx.copies, ctx.device = begin, copies, device
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in tensors[len(tensors) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.begin()
        leaf_nodes = [node for node, _ in ctx.next_functions[len(grads) :]]
        kept = [grad if grad is None or will_run(node) else None for grad, node in zip(grads, leaf_nodes, strict=True)]
        brought = [
            ctx.copies.bring(grad, ctx.device) if own is None and grad is not None else None
            for grad, own in zip(grads, kept, strict=True)
        ]
        return (None, None, None, *brought, *kept)


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    small: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > GROUP_BYTES:
            yield [tensor]
            continue
        if len(small) == GROUP_TENSORS or size + tensor.nbytes > GROUP_BYTES:
            yield small
            small, size = [], 0
        small.append(tensor)
        size += tensor.nbytes
    if small:
        yield small


class PersistentReplicas:
    """Keep the replicas of one module for all micro-steps of an optimizer step. See Note [Kept replicas]."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._masters: dict[int, _Master] = {}
        self._last = False
        self._task = _NO_TASK
        self._has_graph = False
        self._round = 0

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier micro-steps wait on other devices. See Note [Kept replicas]."""
        return any(master.waiting for master in self._masters.values())

    @property
    def needed(self) -> bool:
        """Whether gradients are not reduced yet, or a forward ran and its backward may follow."""
        return self._has_graph or self.waiting

    def replicas(self, module: nn.Module, devices: Sequence[int]) -> list[nn.Module]:
        """Return a replica of the module for each device.

        Copy parameters again, unless gradients are not reduced yet, or a backward with the present copies may follow.
        """
        tensors = unique((*module.parameters(), *module.buffers()))
        kept = [t for t in tensors if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf)]
        self._watch(kept)
        if not self.needed:
            self._round += 1  # copy again, because versions miss changes through `.data` or in a memory tracker
        if isinstance(self._copies, GpuCopies):
            for device in devices:
                self._renew(self._copies, kept, device)
        tables: dict[int, dict[int, Tensor]] = {device: {} for device in devices}
        # Copy one tensor to all devices before the next, so no device waits for another's copies.
        for tensor in (*kept, *(tensor for tensor in tensors if id(tensor) not in self._masters)):
            for device, table in tables.items():
                table[id(tensor)] = here(tensor) if device == 0 else self._elsewhere(tensor, device)
        for device, table in tables.items():
            if device != 0:
                self._connect([tensor for tensor in kept if tensor.requires_grad], device, table)
        return [replica_of(module, tables[device]) for device in devices]

    def hold(self, module: nn.Module, devices: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        """Create zero gradients on other devices, as after a micro-step, for a trace of the next."""
        self.replicas(module, devices)
        for parameter in parameters:
            master = self._masters.get(id(parameter))
            for leaf in master.leaves.values() if master is not None else ():
                leaf.grad = torch.zeros_like(leaf)
        self.note()

    def watch(self, outputs: Iterable[Tensor], *, last: bool) -> None:
        """Register hooks that detect the start and end of a backward through these outputs.

        Args:
            last: Whether to reduce the gradients to device 0 after the backward.
        """
        self._last = last
        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_weakly(self.begin_backward))
                self._has_graph = True

    def begin_backward(self) -> None:
        """Drop the waiting gradients of parameters whose gradient was cleared, and queue `end_backward`."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self._adds_gradients():
                self.settle()
                torch.autograd.Variable._execution_engine.queue_callback(_weakly(self.end_backward))

    def _adds_gradients(self) -> bool:
        """Return whether the running backward accumulates into parameters. `torch.autograd.grad` does not."""
        tensors = (tensor for master in self._masters.values() for tensor in (master.tensor, *master.leaves.values()))
        return any(tensor.requires_grad and will_run(get_gradient_edge(tensor).node) for tensor in tensors)

    def end_backward(self) -> None:
        """After the last micro-step, reduce the gradients to device 0. After any other, record them."""
        self._task = _NO_TASK
        if self._last:
            self.reduce_gradients()
        else:
            self.note()

    def reduce_gradients(self) -> None:
        """Add the gradients that are still on the replicas to the gradients of the module's parameters.

        Raises:
            InputError: Such a gradient has a graph (``create_graph=True``).
        """
        self._has_graph = False
        if isinstance(self._copies, GpuCopies):
            for device in {device: None for master in self._masters.values() for device in master.leaves}:
                self._bring_from(self._copies, device)
        for master in self._masters.values():
            self._bring(master)

    def note(self) -> None:
        """Record the module's gradients before the replicas' are added, so `settle` detects that they were cleared."""
        self._has_graph = False
        for master in self._masters.values():
            for leaf in master.leaves.values():
                _refuse_graph(leaf.grad)
            if not master.waiting:
                continue
            if master.tensor.grad is None:
                master.tensor.grad = self._zeros_for(master)
            master.note()
        _guard_updates()  # an optimizer with these parameters must not step on incomplete gradients
        _guarded.add(self)

    def settle(self) -> None:
        """Drop the waiting gradients of parameters whose gradient was cleared.

        Raises:
            InputError: The module's gradient was clipped, scaled or replaced. The waiting gradients were not, so their
                sum would be wrong.
        """
        for master in self._masters.values():
            if master.is_cleared:
                master.drop_gradients()
            elif master.is_changed:
                raise _changed_error()

    def drop_gradients(self) -> None:
        """Delete all waiting gradients."""
        for master in self._masters.values():
            master.drop_gradients()

    def refuse_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError if an optimizer is about to update parameters whose gradients are incomplete."""
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        places: set[int] = set()
        for master in self._masters.values():
            if id(master.tensor) not in ours:
                continue
            if master.is_cleared:
                master.drop_gradients()
            places |= {device for device, leaf in master.leaves.items() if leaf.grad is not None}
        if places:
            names = ", ".join(self._copies.name_of(device) for device in sorted(places))
            raise InputError(
                f"The optimizer steps while {names} still hold gradients of earlier micro-steps. Run the last "
                "micro-step outside of no_sync(), so that it reduces the gradients to the first device. In "
                "plan.steps, this is the step's last batch. Or call synchronize() on the wrapper before the "
                "optimizer steps.",
            )

    def _watch(self, kept: list[Tensor]) -> None:
        before = dict(self._masters)
        self._masters = {
            id(tensor): before.pop(id(tensor)) if id(tensor) in before else _Master(tensor) for tensor in kept
        }
        for gone in before.values():
            self._bring(gone)
        self.settle()
        for master in self._masters.values():
            if master.noted is None:
                master.drop_gradients()  # a failed backward left them: a complete backward records its gradients

    def _renew(self, copies: GpuCopies, kept: list[Tensor], device: int) -> None:
        stale = []
        for tensor in kept:
            master = self._masters[id(tensor)]
            leaf = master.leaves.get(device)
            same = leaf is not None and leaf.shape == tensor.shape and leaf.dtype == tensor.dtype
            if same and master.stamps[device] != (self._round, *_stamp(tensor)):
                stale.append(master)
        with torch.no_grad():
            leaves = [master.leaves[device].detach() for master in stale]
            copies.copy_all_into(leaves, [master.tensor for master in stale], device)
        for master in stale:
            master.stamps[device] = (self._round, *_stamp(master.tensor))

    def _elsewhere(self, tensor: Tensor, device: int) -> Tensor:
        master = self._masters.get(id(tensor))
        if master is None:  # a plain buffer, or a buffer that a forward computed from parameters (not a leaf)
            return self._copies.copy(tensor if tensor.requires_grad else tensor.detach(), device, "buffer")
        leaf, stamp = master.leaves.get(device), (self._round, *_stamp(tensor))
        if leaf is None or leaf.shape != tensor.shape or leaf.dtype != tensor.dtype:
            leaf = master.leaves[device] = self._copies.copy(tensor.detach(), device, "parameter")
            if may_have_gradient(tensor):
                # Do this even if the tensor is frozen, because the backward of an earlier forward may still run.
                leaf.requires_grad_()
        elif master.stamps[device] != stamp:  # only inside a placement. Between GPUs, `_renew` has copied it already
            with torch.no_grad():
                transfer_into(leaf.detach(), tensor.detach(), 0, device, "parameter")
        master.stamps[device] = stamp
        return leaf.detach()

    def _connect(self, tensors: Iterable[Tensor], device: int, table: dict[int, Tensor]) -> None:
        """Give the copies of trained parameters in a table an autograd graph. See Note [Kept replicas]."""
        for group in _groups(tensors):
            leaves = [self._masters[id(tensor)].leaves[device] for tensor in group]
            begin = _weakly(self.begin_backward)
            copied = _Copy.apply(begin, self._copies, device, *group, *leaves)  # type: ignore[no-untyped-call]
            # Autograd runs old nodes last, and this node is older than the forward's nodes. Without `run_early`, all
            # gradients would stay in memory until the end of the backward.
            run_early(copied[0].grad_fn)
            table.update(zip(map(id, group), copied, strict=True))

    def _bring_from(self, copies: GpuCopies, device: int) -> None:
        waiting, grads = [], []
        for master in self._masters.values():
            leaf = master.leaves.get(device)
            if leaf is not None and leaf.grad is not None and leaf.grad.layout == torch.strided:
                _refuse_graph(leaf.grad)
                waiting.append((master, leaf))
                grads.append(leaf.grad)
        with torch.no_grad():
            for position, grad in copies.bring_all(grads, device):
                master, leaf = waiting[position]
                _add_to(master.tensor, grad)
                leaf.grad = None  # only now, for the same reason as in `_bring`

    def _bring(self, master: _Master) -> None:
        with torch.no_grad():
            for device, leaf in master.leaves.items():
                _refuse_graph(leaf.grad)
                if leaf.grad is not None:
                    _add_to(master.tensor, self._copies.bring(leaf.grad, device))
                    leaf.grad = None  # only now, because an out-of-memory error in the copy must not lose the gradient
        master.release()

    def _zeros_for(self, master: _Master) -> Tensor:
        """Return a zero gradient for a parameter of the module, with the layout of its replicas' gradients."""
        device, grad = next((device, leaf.grad) for device, leaf in master.leaves.items() if leaf.grad is not None)
        if grad.layout != torch.strided:
            return self._copies.bring(torch.zeros_like(grad), device)  # sparse, with no values
        return torch.zeros_like(master.tensor)


_NO_TASK = -1
"""torch's graph task id outside of any backward."""


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    known = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        bound = known()
        if bound is not None:
            bound()

    return hook


def _changed_error() -> InputError:
    return InputError(
        "A gradient was changed (clipped, scaled, unscaled or replaced) while other devices still have gradients "
        "of the same parameters. Change gradients only after the last micro-step's backward, or call synchronize() "
        "on the wrapper first.",
    )


def _stamp(tensor: Tensor) -> tuple[int, int]:
    return storage_key(tensor.untyped_storage()), 0 if tensor.is_inference() else tensor._version


def _refuse_graph(grad: Tensor | None) -> None:
    if grad is not None and grad.requires_grad:
        raise InputError(
            "A backward with create_graph=True ran on kept replicas inside no_sync(). Gradients that stay on other "
            "devices have no graph. Use torch.autograd.grad(..., create_graph=True) and a backward without "
            "create_graph, or run the step outside of no_sync().",
        )


def _add_to(tensor: Tensor, grad: Tensor) -> None:
    """Add to a tensor's gradient in place, as autograd does. A sparse plus a dense gradient is dense."""
    if tensor.grad is None:
        tensor.grad = grad
    elif tensor.grad.is_sparse and not grad.is_sparse:
        tensor.grad = grad + tensor.grad
    else:
        tensor.grad += grad


_guarded: weakref.WeakSet[PersistentReplicas] = weakref.WeakSet()
"""Replicas whose gradients wait, or waited at an earlier optimizer step."""


@cache
def _guard_updates() -> None:
    """Check every optimizer step from now on. The hook is never removed, because torch may be iterating over hooks."""
    register_optimizer_step_pre_hook(_before_update)


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for kept in list(_guarded):
        kept.refuse_update(optimizer)
        if not kept.waiting:
            _guarded.discard(kept)
