"""A copy of a workload that may be trained: the live model and optimizer are never touched.

Real copies run on the CPU and on GPUs. Fake copies (torch's fake tensors) have shapes and no numbers, so that a
model larger than this machine can be followed step by step. Where a model can't be copied it runs itself, and
everything it was is put back.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from autosplit.accelerators import accelerator_kind, is_accelerator
from autosplit.devices.transfer import Placement, adopt_module
from autosplit.errors import OWN_FOLDER, WorkloadError
from autosplit.parallel.accumulation import Accumulation
from autosplit.rng import ExtremeDraws
from autosplit.runtime.build_small import settings_kept_on_failure
from autosplit.workload.batch import Whole, map_leaves, map_tensors, resize, tensors_of
from autosplit.workload.compiled import compiled_like, eager_of, is_compiled, scripted_part, with_eager_parts
from autosplit.workload.workload import Workload, call_model, modules_of, on_first_device

__all__ = ["Trainee", "bytes_on_accelerators", "fake_mode", "holds_fakes", "ran_a_step", "training_copy"]

CPU = torch.device("cpu")

LOSS_SCALE = 1.0
"""Of fp16: takes the same memory and kernels as a larger one, which overflows in the first steps of most trainings. The
scaler then leaves out the optimizer, whose state would not be there to be measured."""


@dataclass
class Trainee:
    """Models and optimizers that a training step may change.

    Attributes:
        workload: What they are a copy of.
        models: One module, or several as the workload has them.
        optimizers: One optimizer, or several as the workload has them.
        fake_mode: The mode their tensors live in; None for real ones.
        device: Where fake tensors say that they are.
        scaler: The GradScaler of ``fp16``, real copies only.
        restore: Puts back what had to be borrowed from the live model; nothing for a copy.
        left: What the last step left on the first device, whoever keeps it: the next begins with it.
        grown_bytes: By how much that was more than what the last step had found there.
        peak_bytes: The most that the first device held in the last step.
        draws: What its steps draw to decide by.
    """

    workload: Workload
    models: Any
    optimizers: Any
    fake_mode: FakeTensorMode | None = None
    scaler: torch.amp.GradScaler | None = None
    restore: Callable[[], None] = lambda: None
    left: Sequence[weakref.ref[torch.UntypedStorage]] = ()
    grown_bytes: int = 0
    peak_bytes: int = 0
    device: torch.device = CPU
    draws: ExtremeDraws = field(default_factory=ExtremeDraws)
    _updated: bool = False

    def batch(self, n: int) -> Any:
        """Make a batch of `n` samples, fake for a fake trainee; what the sample batch shares is marked as `Whole`."""
        workload, mode = self.workload, self.fake_mode
        sample = workload.sample_batch
        if mode is not None and workload.make_batch is None:
            sample = map_leaves(lambda leaf: _fake_leaf(leaf, mode, self.device), sample)
        with mode or nullcontext():
            if workload.make_batch is not None:
                made = workload.made_batch(n)
                return made if mode is None else map_tensors(lambda tensor: tensor.to(self.device), made)
            return resize(sample, n, workload.batch_dim, mark=True)

    def parameters(self) -> list[nn.Parameter]:
        """Return the models' parameters, tied ones once."""
        return list({id(p): p for module in modules_of(self.models) for p in module.parameters()}.values())

    def wrapped(self, wrap: Callable[[nn.Module], nn.Module]) -> Any:
        """Return the models, each in a wrapper."""
        return _map_modules(wrap, self.models)

    def compiled(self) -> Any:
        """Return the models, compiled as the workload's own are."""
        given: Any = self.workload.model
        if isinstance(given, nn.Module):
            return compiled_like(given, self.models) if is_compiled(given) else self.models
        return self.models

    def adopt_on(self, placement: Placement, *, with_state: bool = True) -> None:
        """Charge parameters, buffers and, `with_state`, the optimizers' state to the first device of a step."""
        for module in modules_of(self.models):
            adopt_module(placement, module, 0)
        for optimizer in listed(self.optimizers) if with_state else ():
            for value in _state_tensors(optimizer):
                if value.dim() > 0:
                    placement.adopt(value, 0)

    def held(self) -> dict[Literal["parameters", "gradients", "optimizer"], list[Tensor]]:
        """Return what there is of the models and the optimizers, by what it is for; buffers go with the parameters."""
        parameters = self.parameters()
        buffers = [buffer for module in modules_of(self.models) for buffer in module.buffers()]
        return {
            "parameters": [*parameters, *buffers],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": [value for optimizer in listed(self.optimizers) for value in _state_tensors(optimizer)],
        }

    def step(
        self,
        models: Any,
        batches: Sequence[Any],
        sizes: Sequence[int],
        mark: Callable[[str], None] = lambda _phase: None,
        *,
        updates: int = 1,
        num_samples: int | None = None,
    ) -> None:
        """Run one optimizer step.

        Args:
            models: The models, or wrappers around them.
            batches: One micro-batch for each accumulation step.
            sizes: Samples in each; a mean loss counts by its share of them.
            mark: Told when a phase begins: ``"micro"`` for each micro-step, ``"update"`` for the optimizer; before it
                ``"state"``, where it runs twice.
            updates: How often the optimizer runs: 0, 1, or 2 for its state to appear in the first of them.
            num_samples: Samples of the whole step, where these are not all of its micro-batches.
        """
        workload = self.workload
        device_type = _device_type(self.models)
        if workload.step is not None:
            assert len(batches) == 1, "a custom step can't be accumulated"
            mark("micro")
            with workload.autocast(device_type):
                workload.step(models, self.optimizers, on_first_device(batches[0], models))
            mark("update")
        else:
            # `loss` is held from one micro-step to the next, as the variable of a training loop holds it.
            accumulation = Accumulation(len(batches))
            total = num_samples or sum(sizes)
            for position, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
                mark("micro")
                with accumulation.running(is_last=position == len(batches) - 1):
                    with workload.autocast(device_type):
                        loss = workload.loss(models, batch)
                    if workload.loss_reduction == "mean" and size < total:
                        loss = loss * (size / total)
                    self._scaled(loss).backward()
            accumulation.finish()
            if updates > 1:
                mark("state")
                self._update()
            mark("update")
            if updates:
                self._update()
        for optimizer in listed(self.optimizers):
            optimizer.zero_grad(set_to_none=True)

    def _scaled(self, loss: Tensor) -> Tensor:
        if self.workload.precision != "fp16":
            return loss
        # Fake tensors have no infinities to look for: the scaler's arithmetic without its decision.
        return loss * LOSS_SCALE if self.scaler is None else self.scaler.scale(loss)

    def _update(self) -> None:
        for optimizer in listed(self.optimizers):
            if self.scaler is not None:
                self.scaler.step(optimizer)
                if not self._updated and not optimizer.state:
                    optimizer.step()  # it may have been left out, for a loss that is infinite at any scale
                continue
            if self.workload.precision == "fp16":
                grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, 1.0 / LOSS_SCALE)
            optimizer.step()
        self._updated = True
        if self.scaler is not None:
            self.scaler.update()

    def outputs(self) -> Any:
        """Return what the model returns for the sample batch."""
        return call_model(self.models, self.batch(self.workload.sample_batch_size))

    def evaluate(self, models: Any, batch: Any) -> Any:
        """Run one forward in evaluation mode without gradients, and return its outputs.

        Raises:
            WorkloadError: The workload has a `step` of its own, of which nobody knows what a forward is.
        """
        if self.workload.step is not None:
            raise WorkloadError(
                "the workload has step=, which is a whole optimizer step; expected one model and a loss to evaluate; "
                "pass a Workload of the model alone"
            )
        modes = [(module, module.training) for model in modules_of(self.models) for module in model.modules()]
        inputs = batch[0] if self.workload.loss_fn is not None else batch
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad(), self.workload.autocast(_device_type(self.models)):
                if self.workload.compute_loss is not None:  # only it knows how the model is called
                    return self.workload.compute_loss(models, on_first_device(batch, models))
                return call_model(models, inputs)
        finally:
            for module, training in modes:
                module.training = training


def bytes_on_accelerators(workload: Workload) -> dict[torch.device, int]:
    """Return what a live model and its live optimizers hold of each accelerator."""
    given: Any = workload.model
    models = modules_of(given) if isinstance(given, (nn.Module, tuple, list, Mapping)) else []
    tensors = [t for model in models for p in (*model.parameters(), *model.buffers()) for t in (p, p.grad)]
    tensors += [t for optimizer in _live_optimizers(workload) for t in _state_tensors(optimizer)]
    held = {t.untyped_storage()._cdata: t for t in tensors if t is not None and t.layout is torch.strided}
    found: dict[torch.device, int] = {}
    for tensor in held.values():
        if is_accelerator(tensor.device.type) and not isinstance(tensor, FakeTensor):
            found[tensor.device] = found.get(tensor.device, 0) + tensor.untyped_storage().nbytes()
    return found


def ran_a_step(trace: TracebackType | None) -> bool:
    """Tell whether an exception came out of the workload's own code while it was being trained.

    Args:
        trace: Where the exception went.
    """
    stepped, innermost = False, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = code.co_filename
        stepped = stepped or code in _STEPPING
        trace = trace.tb_next
    return stepped and not innermost.startswith(OWN_FOLDER)


_STEPPING = {Trainee.step.__code__, Trainee.evaluate.__code__, Trainee.outputs.__code__, Trainee.batch.__code__}


def listed(values: Any) -> list[Any]:
    """Return one or several optimizers as a list."""
    if isinstance(values, Mapping):
        return list(values.values())
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _map_modules(function: Callable[[nn.Module], Any], models: Any) -> Any:
    if isinstance(models, nn.Module):
        return function(models)
    if isinstance(models, Mapping):
        return {name: function(model) for name, model in models.items()}
    return type(models)(function(model) for model in models)


def _device_type(models: Any) -> str:
    parameter = next((p for module in modules_of(models) for p in module.parameters()), None)
    return "cpu" if parameter is None else parameter.device.type


def fake_mode() -> FakeTensorMode:
    """Return a new mode for a fake trainee; real tensors that a model holds on the side are let in as fakes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def built_without_memory(build: Callable[[], Any], mode: FakeTensorMode) -> Any:
    """Call a function so that the tensors it makes take no memory.

    Under fake tensors first. What these can't do (torch can't convert a fake module's dtype in place: `model.half()`)
    is tried on the meta device, which in turn can't be copied from.

    Args:
        build: Makes a model or a workload.
        mode: The fake tensors' mode.

    Returns:
        What `build` returns.

    Raises:
        Exception: What it raised under fake tensors, where it raised on the meta device, too.
    """
    try:
        with settings_kept_on_failure(), mode:
            return build()
    except Exception as error:  # noqa: BLE001  # whatever fake tensors can't do, and whatever the user's code does wrong
        failure = error
    try:
        with settings_kept_on_failure(), torch.device("meta"):
            return build()
    except Exception:  # noqa: BLE001  # the first failure is the one to tell of
        raise failure from None


def mode_of(workload: Workload) -> FakeTensorMode | None:
    """Return the mode that a workload was built under; None where its tensors are real."""
    models = workload.model
    modules = modules_of(models) if isinstance(models, (nn.Module, tuple, list, Mapping)) else []
    tensors = [*(p for module in modules for p in module.parameters()), *tensors_of(workload.sample_batch)]
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


def holds_fakes(device: torch.device) -> bool:
    """Tell whether fake tensors on a device can be trained: not every build, nor every back end, has what it takes."""
    if accelerator_kind() != device.type:  # autograd ends the process where torch was built without the device
        return False
    try:
        with fake_mode():
            weight = torch.empty(2, 2, device=device, requires_grad=True)
            (weight @ weight).sum().backward()
    except Exception:  # noqa: BLE001  # whatever a back end lacks
        return False
    return True


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make the fake of a tensor on a device, wherever the tensor is."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device == device:
        return tensor
    if tensor.layout != torch.strided:
        return _fake_sparse(tensor, mode, device)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _fake_sparse(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make the fake of a sparse tensor, with as many values, which are what it takes: torch's own fakes have none."""
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(f"a tensor of {tensor.layout} can't be faked with its values")
    indices, values = (
        _fake_like(part, mode, device) for part in (tensor.detach()._indices(), tensor.detach()._values())
    )
    with mode:
        return torch.sparse_coo_tensor(
            indices, values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
        )


def _fake_scalar(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Make a fake that knows its number: optimizers read their step counts, and rates, back from tensors."""
    number = tensor.item()
    with mode:
        return torch.tensor(number, dtype=tensor.dtype)


def _fake_leaf(leaf: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if isinstance(leaf, Whole):
        return Whole(map_tensors(lambda tensor: _fake_like(tensor, mode, device), leaf.value))
    return _fake_like(leaf, mode, device) if isinstance(leaf, Tensor) else leaf


def training_copy(
    workload: Workload,
    *,
    device: torch.device | None = None,
    mode: FakeTensorMode | None = None,
    gpu_variants: bool = False,
) -> Trainee:
    """Copy a workload's model and optimizer so that they can be trained.

    A model whose deepcopy refuses runs itself, on copies of its tensors, until `Trainee.restore`.

    Args:
        workload: Its model may be a factory, which is called here.
        device: Where the copy goes; None leaves a real one where the model is, and a fake one on the processor.
        mode: Makes the copy fake.
        gpu_variants: Let the optimizer run the multi-tensor variant that it would choose on a GPU.

    Returns:
        The copy, in training mode unless the model mixes modes.

    Raises:
        WorkloadError: A model of TorchScript or with parameters that have no shape yet, one on the meta device where a
            real copy was asked for, or an optimizer that fits no model.
        UserCodeError: The model factory raised.
        Exception: Whatever a fake copy raises in the model's own code.
    """
    memo: dict[int, Any] = {}
    models, is_fresh = _given_models(workload, mode)
    _refuse_unready(models)
    restore: Callable[[], None] = _nothing
    if mode is not None:
        _fake_into(memo, models, workload, mode, device or CPU)
        models = _map_modules(with_eager_parts, copy.deepcopy(models, memo))
    else:
        _refuse_meta(models)
        if not is_fresh:
            models, restore = _copied_or_borrowed(models, memo)
    try:
        return _ready(workload, models, memo, restore, device=device, mode=mode, gpu_variants=gpu_variants)
    except BaseException:
        restore()
        raise


def _ready(
    workload: Workload,
    models: Any,
    memo: dict[int, Any],
    restore: Callable[[], None],
    *,
    device: torch.device | None,
    mode: FakeTensorMode | None,
    gpu_variants: bool,
) -> Trainee:
    """Put copied models where they train, and give them their optimizers."""
    if mode is None and device is not None:
        models = _map_modules(lambda module: module.to(device), models)
    for module in modules_of(models):
        _prepare(module)
    optimizers = _copied_optimizers(workload, models, memo, mode)
    if workload.step is None:
        _refuse_closures(optimizers)
    if gpu_variants:
        _choose_gpu_variants(optimizers)
    scaler = None
    if workload.precision == "fp16" and mode is None and workload.step is None:
        scaler = torch.amp.GradScaler(_device_type(models), init_scale=LOSS_SCALE)
    return Trainee(workload, models, optimizers, mode, scaler, restore, device=device or CPU)


def _nothing() -> None:
    """Restore nothing: a copy leaves nothing behind."""


def _given_models(workload: Workload, mode: FakeTensorMode | None) -> tuple[Any, bool]:
    """Return the workload's model or models, and whether a factory made them just now."""
    models: Any = workload.model
    if isinstance(models, (nn.Module, tuple, list, Mapping)):
        return _map_modules(eager_of, models), False
    made = models() if mode is None else built_without_memory(models, mode)
    if not isinstance(made, nn.Module):
        raise WorkloadError(
            f"the model factory returned a {type(made).__name__}; expected an nn.Module; return the model itself"
        )
    return made, True


def _copied_or_borrowed(models: Any, memo: dict[int, Any]) -> tuple[Any, Callable[[], None]]:
    try:
        return _map_modules(with_eager_parts, copy.deepcopy(models, memo)), _nothing
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  # whatever a module's own __deepcopy__ or an uncopyable attribute raises
        memo.clear()
        restore = _borrow(models)
        # The optimizer's twin then trains the very parameters, which hold copies of their data for now.
        memo.update({id(p): p for module in modules_of(models) for p in module.parameters()})
        return models, restore


def _version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for one made in inference mode, which does not count it."""
    return None if tensor.is_inference() else tensor._version


def _borrow(models: Any) -> Callable[[], None]:
    """Give a live model copies of its data to train on, and return what puts everything back."""
    parts = [part for module in modules_of(models) for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    slots = [(part, dict(part._buffers)) for part in parts]
    tensors = {id(t): t for module in modules_of(models) for t in (*module.parameters(), *module.buffers())}
    kept = [
        (tensor, tensor.data, tensor.grad, tensor.requires_grad, _version_of(tensor)) for tensor in tensors.values()
    ]
    for tensor, data, _, _, _ in kept:
        tensor.data, tensor.grad = data.clone(), None

    def restore() -> None:
        for part, buffers in slots:
            part._buffers.clear()  # a forward may have registered more
            part._buffers.update(buffers)
        for tensor, data, grad, requires_grad, version in kept:
            tensor.data, tensor.grad = data, grad
            tensor.requires_grad_(requires_grad)
            # A backward that is still to come looks whether what it saved was written to: its data was not.
            if version is not None:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for part, training in modes:
            part.training = training

    return restore


def _fake_into(
    memo: dict[int, Any], models: Any, workload: Workload, mode: FakeTensorMode, device: torch.device
) -> None:
    """Put the fakes of all tensors that will be deep-copied where deepcopy looks for copies it has made."""
    tensors = [t for module in modules_of(models) for t in (*module.parameters(), *module.buffers())]
    # Numbers that a model keeps on the side may be asked for; an average of its weights is not.
    tensors += [t for t in _tensors_aside(models) if t.is_floating_point() and t.numel() != 1]
    for optimizer in _live_optimizers(workload):
        tensors += _state_tensors(optimizer)
    for tensor in tensors:
        memo[id(tensor)] = _fake_like(tensor, mode, device)
    for optimizer in _live_optimizers(workload):
        settings = [value for group in optimizer.param_groups for value in group.values() if isinstance(value, Tensor)]
        for tensor in (*_state_tensors(optimizer), *settings):
            if tensor.dim() == 0 and not tensor.is_meta and not isinstance(tensor, FakeTensor):
                memo[id(tensor)] = _fake_scalar(tensor, mode)


def _tensors_aside(models: Any) -> Iterator[Tensor]:
    """Yield what modules hold in attributes, lists, dicts and hidden modules: deepcopy goes the same ways."""
    todo: list[Any] = [part for module in modules_of(models) for part in module.modules()]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            todo += value
        elif not isinstance(value, (type, ModuleType, FunctionType)):
            todo += getattr(value, "__dict__", {}).values()


def _refuse_unready(models: Any) -> None:
    for module in modules_of(models):
        scripted = scripted_part(module)
        if scripted is not None:
            raise WorkloadError(
                f"of the model, {scripted}; expected Python modules, whose copies can be trained and followed; pass "
                "the module that was scripted or traced"
            )
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise WorkloadError(
                    f"parameter {name} has no shape yet: its layer is a lazy one; expected a model with all its "
                    "parameters; run it once on the sample batch"
                )


def _refuse_meta(models: Any) -> None:
    for module in modules_of(models):
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise WorkloadError(
                    f"parameter {name} is on the meta device; expected a model with memory; "
                    "plan it for simulated GPUs (--devices sim:...), or build it with .to_empty()"
                )


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in tensors_of(state)]


def _prepare(module: nn.Module) -> None:
    """Drop gradients that were copied along; train, unless the user trains with parts of it in evaluation mode."""
    module.zero_grad(set_to_none=True)
    if not module.training:
        module.train()


def _live_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    return [item for item in listed(workload.optimizer) if isinstance(item, torch.optim.Optimizer)]


def _copied_optimizers(workload: Workload, models: Any, memo: dict[int, Any], mode: FakeTensorMode | None) -> Any:
    given = workload.optimizer
    if given is None:
        given = torch.optim.AdamW if workload.step is None else ()
    modules = modules_of(models)
    if isinstance(given, Mapping):
        return {
            name: _optimizer(item, _parameters(modules, i, len(given)), memo, mode)
            for i, (name, item) in enumerate(given.items())
        }
    if isinstance(given, (tuple, list)):
        return type(given)(
            _optimizer(item, _parameters(modules, i, len(given)), memo, mode) for i, item in enumerate(given)
        )
    return _optimizer(given, _parameters(modules, 0, 1), memo, mode)


def _parameters(modules: list[nn.Module], position: int, count: int) -> list[nn.Parameter]:
    """Return what the optimizer at a position trains: its own model's parameters, or those of all models."""
    owners = [modules[position]] if count == len(modules) else modules
    unique = {id(p): p for module in owners for p in module.parameters() if p.requires_grad}
    return list(unique.values())


def _optimizer(
    given: Any, parameters: list[nn.Parameter], memo: dict[int, Any], mode: FakeTensorMode | None
) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return _twin(given, memo)
    if not callable(given):
        raise WorkloadError(
            f"optimizer is {given!r:.80}; expected a class, a factory or an optimizer; pass torch.optim.AdamW, say"
        )
    if not parameters:
        raise WorkloadError("the model has no trainable parameter; expected at least one; check requires_grad")
    with mode or nullcontext():  # what makes its state at once makes it fake, with step counts that know their number
        made = given(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            f"the optimizer factory returned a {type(made).__name__}; expected a torch.optim.Optimizer; return one"
        )
    return made


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Copy a live optimizer onto the copied parameters.

    Its attributes are copied, not its constructor called, because that may take anything. Left out: hooks, and
    what a scheduler hangs on the instance (`step`), which would reach the live optimizer.
    """
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in memo]
    if foreign:
        raise WorkloadError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}; expected the model's own; build it from model.parameters()"
        )
    twin = object.__new__(type(optimizer))
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }
    twin.__setstate__(copy.deepcopy(kept, memo))
    _follow_parameters(twin)
    return twin


def _follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state to where its parameters were moved; scalars (step counts) stay on the host."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(parameter, Tensor) else ():
            if isinstance(value, Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)


def _refuse_closures(optimizers: Any) -> None:
    for optimizer in listed(optimizers):
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise WorkloadError(
                f"the optimizer {type(optimizer).__name__} needs a closure that runs the model again; "
                "expected one whose step() takes nothing; pass step=(model, optimizer, batch) that gives it one"
            )


def _choose_gpu_variants(optimizers: Any) -> None:
    """Let each optimizer run the multi-tensor variant that torch chooses by default on CUDA."""
    for optimizer in listed(optimizers):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
