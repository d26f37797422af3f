"""Copy a workload for training, so that the live model and optimizer stay unchanged.

A copy on the live model's own GPU uses the live model's memory, whose values are restored. If a model cannot be copied,
it is borrowed: the model itself runs, and all its state is restored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autosplit.accelerators import is_accelerator
from autosplit.errors import WorkloadError
from autosplit.parallel.checkpointed import checkpoint_layer
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.trainee import CPU, LOSS_SCALE, Trainee, state_tensors
from autosplit.text import counted_text
from autosplit.torch_versions import FakeTensor, set_versions, storage_key
from autosplit.workload.compiled import eager_of, scripted_part, with_eager_parts
from autosplit.workload.model_call import INTO_THE_MODEL
from autosplit.workload.models import Models, Several
from autosplit.workload.workload import Workload, models_of, modules_of, optimizers_of


def training_copy(workload: Workload, *, device: torch.device | None = None) -> Trainee:
    """Copy a workload's model and optimizer so that they can be trained.

    On the live model's own accelerator, the copy trains the live tensors' memory until `Trainee.restore`. A model that
    cannot be deep-copied runs itself until then.

    Args:
        workload: Its model may be a factory, which is called here.
        device: The device of the copy. None keeps the copy on the model's device.

    Raises:
        WorkloadError: The model is TorchScript, is on the meta device, or has uninitialised lazy parameters. Or an
            optimizer belongs to no model.
        UserCodeError: The model factory raised.
    """
    memo: dict[int, Any] = {}
    given = models_of(workload)
    models = models_to_copy(workload, lambda build: build())
    _refuse_meta(models)
    restore: Callable[[], None] = _nothing
    if given is not None:
        models, restore = _copied_or_borrowed(models, memo, device)
    restore = _checkpointed(workload, models, restore)
    try:
        if device is not None:
            models = models.map(lambda module: module.to(device))
        optimizers = optimizers_for(workload, models, memo)
        scaler = None
        if workload.precision == "fp16" and workload.step is None:
            scaler = torch.amp.GradScaler(models.device_type, init_scale=LOSS_SCALE)
        return Trainee(workload, models, optimizers, scaler=scaler, restore=restore, device=device or CPU)
    except BaseException:
        restore()
        raise


def models_to_copy(workload: Workload, made: Callable[[Callable[[], Any]], Any]) -> Models:
    """Return the workload's models without their compiled wrappers, or the model that its factory makes.

    Args:
        made: Calls the factory.
    """
    models = models_of(workload)
    if models is not None:
        models = models.map(eager_of)
    else:
        build: Any = workload.model
        model = made(build)
        if not isinstance(model, nn.Module):
            raise WorkloadError(
                f"The model factory returned a {type(model).__name__}. Expected an nn.Module. Return the model itself.",
            )
        models = Models.of(model)
    _refuse_unready(models)
    return models


def checkpoint_layers(workload: Workload, models: Models) -> list[Callable[[], None]]:
    """Checkpoint the layers that the workload names. Return functions that undo it."""
    if workload.checkpointing is None:
        return []
    (module,) = models.modules
    return [checkpoint_layer(module.get_submodule(name)) for name in workload.checkpointing.names_in(module)]


def optimizers_for(
    workload: Workload,
    models: Models,
    memo: dict[int, Any],
    making: AbstractContextManager[Any] | None = None,
) -> Several[torch.optim.Optimizer]:
    """Prepare copied models for training, and make or copy their optimizers.

    Args:
        memo: Maps the id of each live tensor to its copy.
        making: Context in which an optimizer makes its state.
    """
    for module in models.modules:
        module.zero_grad(set_to_none=True)  # deepcopy also copies gradients
        if not module.training:  # the user may train with parts in evaluation mode
            module.train()
    return _copied_optimizers(workload, models, memo, making or nullcontext())


def _nothing() -> None:
    """Restore nothing, because a copy changes nothing."""


def _checkpointed(workload: Workload, models: Models, restore: Callable[[], None]) -> Callable[[], None]:
    undone = checkpoint_layers(workload, models)

    def put_back() -> None:
        for undo in undone:
            undo()
        restore()

    return _nothing if restore is _nothing else put_back


def _copied_or_borrowed(
    models: Models, memo: dict[int, Any], device: torch.device | None
) -> tuple[Models, Callable[[], None]]:
    restore = _nothing if device is None else _shared_or_moved(models, memo, device)
    try:
        return copy.deepcopy(models, memo).map(with_eager_parts), restore
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  # a `__deepcopy__` method or an attribute that cannot be copied may raise
        memo.clear()
        memo.update({id(p): p for module in models.modules for p in module.parameters()})
        return models, _borrow(models, device, restore)


def _shared_or_moved(models: Models, memo: dict[int, Any], device: torch.device) -> Callable[[], None]:
    """Put tensors on accelerators into deepcopy's memo, so that no accelerator holds the model twice.

    The copy uses live tensors' memory on `device`. Return a function that restores their values from the host.
    """
    saved: dict[int, tuple[Tensor, Tensor]] = {}
    for tensor in {id(t): t for module in models.modules for t in (*module.parameters(), *module.buffers())}.values():
        if not _is_plain_on_accelerator(tensor):
            continue
        data = tensor.data.to(device)
        storage = data.untyped_storage()
        if tensor.device == device and storage_key(storage) not in saved:
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            saved[storage_key(storage)] = whole, whole.cpu()
        memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data

    def restore() -> None:
        with held_interrupts():  # a second Ctrl-C would leave trained values in the live model
            for whole, values in saved.values():
                whole.copy_(values)

    return restore if saved else _nothing


def _is_plain_on_accelerator(tensor: Tensor) -> bool:
    """Return whether a copy may use the memory of a tensor, or values in another memory."""
    trains = tensor.requires_grad and not isinstance(tensor, nn.Parameter)  # deepcopy may refuse such a buffer
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_accelerator(tensor.device.type) and plain and not trains and not tensor.is_inference()


def _borrow(models: Models, device: torch.device | None, restore_values: Callable[[], None]) -> Callable[[], None]:
    """Let a live model train copies of its data, or its own memory on `device`. Return a function that restores it."""
    parts = [part for module in models.modules for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    slots = [(part, dict(part._buffers)) for part in parts]
    tensors = {id(t): t for module in models.modules for t in (*module.parameters(), *module.buffers())}
    # A tensor's version counts its in-place writes. A tensor made in inference mode has no version.
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors.values()]
    saved = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors.values()]
    for tensor, data, _, _ in saved:
        shares = tensor.device == device and _is_plain_on_accelerator(tensor)
        tensor.data, tensor.grad = data if shares else data.clone(), None

    def restore() -> None:
        restore_values()
        for part, buffers in slots:
            part._buffers.clear()  # a forward may have registered additional buffers
            part._buffers.update(buffers)
        for (tensor, data, grad, requires_grad), version in zip(saved, versions, strict=True):
            tensor.data, tensor.grad = data, grad
            tensor.requires_grad_(requires_grad)
            # A later backward checks the versions of its saved tensors. Their data is unchanged, so reset the version.
            if version is not None:
                set_versions((tensor,), (version,))
        for part, training in modes:
            part.training = training

    return restore


def _refuse_unready(models: Models) -> None:
    for module in models.modules:
        scripted = scripted_part(module)
        if scripted is not None:
            raise WorkloadError(
                f"autosplit can't copy the model, because {scripted}. Expected Python modules. Pass the module "
                "before you script or trace it.",
            )
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise WorkloadError(
                    f"Parameter {name} has no shape yet, because its layer is lazy. Expected a model with all its "
                    "parameters. Run it once on the sample batch.",
                )


def _refuse_meta(models: Models) -> None:
    for module in models.modules:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise WorkloadError(
                    f"Parameter {name} is on the meta device, so it has no memory. Expected a parameter on a real "
                    "device. Tune for simulated GPUs (--devices sim:...), or allocate the model with .to_empty().",
                )


def live_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    """Return the optimizer objects that the workload has."""
    return [item for item in optimizers_of(workload).items if isinstance(item, torch.optim.Optimizer)]


def _copied_optimizers(
    workload: Workload, models: Models, memo: dict[int, Any], making: AbstractContextManager[Any]
) -> Several[torch.optim.Optimizer]:
    given = optimizers_of(workload)
    count = len(given.items)
    made = [_optimizer(item, _parameters(models.modules, i, count), memo, making) for i, item in enumerate(given.items)]
    for optimizer in made if workload.step is None else ():
        _refuse_closure(optimizer)
    return given.like(tuple(made))


def _parameters(modules: tuple[nn.Module, ...], position: int, count: int) -> list[nn.Parameter]:
    """Return the parameters that the optimizer at a position trains.

    If there is one optimizer per model, each trains one model. Otherwise each optimizer trains all models.
    """
    owners = [modules[position]] if count == len(modules) else modules
    unique = {id(p): p for module in owners for p in module.parameters() if p.requires_grad}
    return list(unique.values())


def _optimizer(
    given: Any, parameters: list[nn.Parameter], memo: dict[int, Any], making: AbstractContextManager[Any]
) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return _twin(given, memo)
    if not callable(given):
        raise WorkloadError(
            f"optimizer is {given!r:.80}. Expected a class, a factory or an optimizer. Pass torch.optim.AdamW, say.",
        )
    if not parameters:
        raise WorkloadError(
            "The model has no trainable parameter. Expected at least one. Check requires_grad.",
        )
    with making:  # state that the constructor creates is then fake, with known step counts
        made = given(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            f"The optimizer factory returned a {type(made).__name__}. Expected a torch.optim.Optimizer. Return one.",
        )
    given_ids = set(map(id, parameters))
    used = {id(p): p for group in made.param_groups for p in group["params"]}
    foreign = [p for key, p in used.items() if key not in given_ids]
    if foreign and given_ids <= used.keys():
        raise WorkloadError(
            f"The optimizer factory added {counted_text(len(foreign), 'parameter')} outside of the model, the first of "
            f"shape {tuple(foreign[0].shape)}. If they belong to the loss: {INTO_THE_MODEL}.",
        )
    if foreign:
        raise WorkloadError(
            "The optimizer factory did not use the parameters in its argument. autosplit passes the parameters of "
            "a copy of the model. Use them: lambda parameters: torch.optim.AdamW(parameters).",
        )
    return made


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Copy a live optimizer onto the copied parameters.

    Copy attributes, because its constructor may need any arguments. Skip hooks and a scheduler's `step` attribute,
    which refer to the live optimizer.
    """
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in memo]
    if foreign:
        raise WorkloadError(
            f"The optimizer has {len(foreign)} parameters that are not in the model. The first has the shape "
            f"{tuple(foreign[0].shape)}. Create the optimizer with model.parameters(). If they belong "
            f"to the loss: {INTO_THE_MODEL}.",
        )
    twin = object.__new__(type(optimizer))
    saved = {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }
    twin.__setstate__(copy.deepcopy(saved, memo))
    # Optimizer state moves to its parameter's device. Step counts on the host stay there.
    for parameter, state in twin.state.items():
        for name, value in state.items() if isinstance(parameter, Tensor) else ():
            if isinstance(value, Tensor) and (
                value.dim() > 0 or is_accelerator(value.device.type) or (name != "step" and parameter.dim() == 0)
            ):
                state[name] = value.to(parameter.device)
    return twin


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"The optimizer {type(optimizer).__name__} needs a closure that runs the model again. Expected an "
            "optimizer whose step() takes no argument. Pass step=(model, optimizer, batch) that provides the closure.",
        )


def bytes_held_twice(workload: Workload, *, isolated: bool) -> dict[torch.device, int]:
    """Return the bytes of live optimizer states on each accelerator, and of the model if another process runs steps."""
    tensors = [t for optimizer in live_optimizers(workload) for t in state_tensors(optimizer)]
    if isolated:
        tensors += [t for module in modules_of(workload) for t in (*module.parameters(), *module.buffers())]
    held = {storage_key(t.untyped_storage()): t for t in tensors if t.layout is torch.strided}
    found: dict[torch.device, int] = {}
    for tensor in held.values():
        if is_accelerator(tensor.device.type) and not isinstance(tensor, FakeTensor):
            found[tensor.device] = found.get(tensor.device, 0) + tensor.untyped_storage().nbytes()
    return found
