"""Hide differences between torch versions. Each difference has one function, which names the versions it is for.

The rest of the package calls these functions and does not check torch's version. docs/private-names.md lists every
private name of torch that the package uses. If torch has dropped a name that has no fallback, importing this module
raises ImportError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "is_wrapper_subclass", "unset_fake_temporarily"]


def _unknown(name: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, which autosplit needs here. Install a torch version that autosplit "
        "was tested with (docs/private-names.md)."
    )


try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass
except ImportError as error:
    raise ImportError(_unknown("torch._subclasses.fake_tensor or torch.utils._python_dispatch as expected")) from error


DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operators that need the values of a fake tensor."""

_NEEDED: Sequence[tuple[Any, str]] = (
    (torch._C, "_current_autograd_node _current_graph_task_id"),
    (torch._C._autograd, "_get_sequence_nr"),
    (torch.autograd.Variable, "_execution_engine"),
    (Tensor, "_backward_hooks _indices _is_view _post_accumulate_grad_hooks _values _version"),
    (nn.Module(), "_buffers _modules _parameters _replicate_for_data_parallel"),
)
"""Objects and their private names without a fallback."""


def check_private_names(needed: Sequence[tuple[Any, str]] = _NEEDED) -> None:
    """Raise ImportError if torch lacks a private name that has no fallback."""
    for owner, names in needed:
        for name in names.split():
            if not hasattr(owner, name):
                raise ImportError(_unknown(name))


check_private_names()


def private(owner: object, name: str) -> Any:
    """Return a private attribute of an instance. Raise RuntimeError if this torch does not have it."""
    if not hasattr(owner, name):
        raise RuntimeError(_unknown(f"{type(owner).__name__}.{name}"))
    return getattr(owner, name)


# ----------------------------------------------------------------------------------------------------------- devices


def available_accelerator() -> torch.device | None:
    """Return the accelerator that this process can use. torch < 2.7 does not have the argument `check_available`."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def built_accelerator() -> torch.device | None:
    """Return the accelerator that torch was built for, present or not. torch 2.6 raises an error if there is none."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def accelerator_index(index: int) -> AbstractContextManager[Any]:
    """Make an accelerator the current device within a context. In torch < 2.8, each back end has its own function."""
    if hasattr(torch.accelerator, "device_index"):
        return torch.accelerator.device_index(index)
    there = available_accelerator()
    assert there is not None, "the caller has seen an accelerator"
    module: Any = torch.get_device_module(there.type)
    context: AbstractContextManager[Any] = module.device(index)
    return context


def default_device() -> torch.device:
    """Return the device of tensors that are made without a `device` argument.

    torch 2.6 and 2.7 do not report the device of `with torch.device(...)`. torch 2.6 to 2.8 raise AttributeError after
    `set_default_device(None)`. In these versions, return the device of a new tensor.
    """
    if torch.__version__ >= "2.8":
        with suppress(AttributeError):
            return torch.get_default_device()
    return torch.empty(0).device


# ----------------------------------------------------------------------------------------------------------- autograd

_WILL_RUN = getattr(torch._C, "_will_engine_execute_node", None)


def knows_nodes_to_run() -> bool:
    """Return whether `will_run` works. If it does not, replicas do not persist from one micro-step to the next."""
    return _WILL_RUN is not None


def will_run(node: Any) -> bool:
    """Return whether the running backward will run a node that adds to the gradient of a leaf.

    `torch.autograd.grad` runs no such node. torch raises RuntimeError if the leaf is one of the inputs. Without torch's
    function, return True. Then only traces have persistent replicas, and their steps always run a backward.
    """
    if _WILL_RUN is None:
        return True
    try:
        return bool(_WILL_RUN(node))
    except RuntimeError:
        return False


def run_early(node: Any) -> None:
    """Make a backward run this node as soon as its gradient is complete. By default newer nodes run first.

    Without torch's function the order is unchanged, and gradients that wait for this node take memory.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(2**62)  # torch runs the node with the largest number first


# ----------------------------------------------------------------------------------------------------------- tensors


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage as long as it exists.

    A torch without `_cdata` has one Python object for each storage, so use Python's `id`.
    """
    key: int = getattr(storage, "_cdata", id(storage))
    return key


def new_fake(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, mode: FakeTensorMode
) -> Tensor:
    """Make a fake tensor. FakeTensorMode's own `empty_strided` takes 0.2 ms longer."""
    with unset_fake_temporarily():
        memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, memory, device)


_UNSAFE = getattr(torch._C, "_set_warn_deprecated_on_mutable_data_ptr", None)
_SAFE = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)


def another_fake(memory: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """Make a fake tensor from a meta tensor and the attributes of a similar fake tensor.

    FakeTensor's constructor does the same in 35 us instead of 7 us. It is used if torch lacks one of its functions.
    """
    mode, device = attributes["fake_mode"], attributes.get("_fake_device", attributes.get("fake_device"))
    protect = _UNSAFE if getattr(mode, "_allow_unsafe_data_ptr_access", True) else _SAFE
    make = getattr(Tensor, "_make_subclass", None)
    if make is None or protect is None:
        return FakeTensor(mode, memory, device)
    fake: Tensor = make(FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device)
    protect(fake)
    vars(fake).update(attributes)
    return fake


def without_torch_functions() -> AbstractContextManager[Any]:
    """Skip modes of torch functions, which take as long as an operator's dispatch. Without torch's class, skip none."""
    context: AbstractContextManager[Any] = getattr(torch._C, "DisableTorchFunction", nullcontext)()
    return context


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set tensors' version counters, which autograd compares to detect in-place changes.

    torch >= 2.8 takes tuples, torch 2.6 and 2.7 one tensor at a time. Without the function the counters are unchanged.
    Then a backward of a graph that was recorded earlier raises torch's error about an in-place change.
    """
    setter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if setter is None or not tensors:
        return
    try:
        setter(tuple(tensors), tuple(versions))
    except TypeError:
        for tensor, version in zip(tensors, versions, strict=True):
            setter(tensor, version)


def buckets(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Group dense tensors of one dtype and device into lists of at most `most_bytes`. Larger tensors are separate."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind, nbytes = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if sizes.get(kind) and sizes[kind] + nbytes > most_bytes:
            yield filling.pop(kind)
            sizes[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + nbytes
    yield from filling.values()


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target: in one call, or one after the other if torch has no `_foreach_copy_`."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by a number, in place: in one call, or one by one if torch has no `_foreach_mul_`."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


BATCH_NORMS: tuple[type[nn.Module], ...] = (
    getattr(nn.modules.batchnorm, "_BatchNorm", nn.SyncBatchNorm),
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
"""Classes of BatchNorm layers. With torch's private base class, users' subclasses of it also count."""

NORMS: tuple[type[nn.Module], ...] = (
    getattr(nn.modules.batchnorm, "_NormBase", nn.SyncBatchNorm),
    *BATCH_NORMS,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Classes of BatchNorm and InstanceNorm layers."""


def aten_ops(names: str) -> frozenset[Any]:
    """Return torch's operators of these names. Names that this torch does not have are left out."""
    return frozenset(getattr(torch.ops.aten, name) for name in names.split() if hasattr(torch.ops.aten, name))


# ------------------------------------------------------------------------------------------------- CUDA's operators


NN_FUNCTIONS: Any = getattr(torch._C, "_nn", nn.functional)
"""The C++ functions that `torch.nn.functional` calls."""


def has_autocast(name: str) -> bool:
    """Return whether CUDA's autocast has a rule for an operator. torch < 2.13 has none for `rms_norm`."""
    asks = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if asks is None:
        return torch.__version__ >= "2.13"
    return hasattr(torch.ops.aten, name) and bool(asks(f"aten::{name}", "AutocastCUDA"))


@dataclass(frozen=True)
class CudnnAttention:
    """Rules of a torch version for running attention with cuDNN.

    Attributes:
        is_preferred: Whether torch tries cuDNN first on compute capability 9 and 10.
        takes_any_dropout: If False, dropout must be a multiple of 1/16.
        head_size: The largest head size on compute capability 9.0.
    """

    is_preferred: bool
    takes_any_dropout: bool
    head_size: int


def cudnn_attention_rules(version: str = torch.__version__) -> CudnnAttention:
    """Return a torch version's rules for attention with cuDNN (native/transformers/cuda/sdp_utils.cpp).

    The rules reproduce torch's choices in benchmarks/results/kernels/attention.json.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return CudnnAttention((major, minor) >= (2, 11), (major, minor) < (2, 12), 256)


def cublas_workspace_bytes(capability: int) -> int:
    """Return the bytes of cuBLAS's workspace on a GPU, see `parseChosenWorkspaceSize` in CublasHandlePool.cpp.

    torch <= 2.11 gives 32 MiB to Hopper only. torch >= 2.12 gives 32 MiB to Blackwell, too.

    Args:
        capability: Compute capability times ten.
    """
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if config:
        return sum(int(kib) * 1024 * int(count) for kib, count in config)
    is_large = capability == 90 or (capability >= 100 and torch.__version__ >= "2.12")
    return 32 * 2**20 if is_large else 2 * 4096 * 1024 + 8 * 16 * 1024


def cublaslt_workspace_bytes() -> int:
    """Return the bytes of cuBLASLt's separate workspace. 0 in torch >= 2.12, where cuBLASLt uses cuBLAS's workspace."""
    return 0 if torch.__version__ >= "2.12" else 2**20


# --------------------------------------------------------------------------------------------------------------- DDP


def use_module_alone(wrapped: Any) -> None:
    """Make the forward of a DistributedDataParallel call only its module, without its reducer.

    torch 2.6 also needs `_force_to_disable_cpp_reducer`. torch >= 2.8 has no such attribute.
    """
    private(wrapped, "_use_python_reducer")  # raises if this torch has no such switch
    wrapped._use_python_reducer = True
    if hasattr(wrapped, "_force_to_disable_cpp_reducer"):
        wrapped._force_to_disable_cpp_reducer = True


# ------------------------------------------------------------------------------------------------------------- FSDP2


def fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module that was passed to `fully_shard`.

    torch 2.13 stores a list of groups. torch 2.6 to 2.11 store one group, or None for a module without parameters.

    Raises:
        RuntimeError: This torch stores the groups elsewhere.
    """
    return _groups_of(private(module, "_get_fsdp_state")())


def reset_fsdp(root: Any) -> None:
    """Clear the state that an exception left in FSDP2. Do nothing if `root` is not the root module.

    torch 2.13 has `reset_iter_state` for this. On torch 2.6 to 2.11 this function does the same: it waits for
    unfinished collectives, reshards all parameters and clears FSDP2's records of the step.
    """
    state = private(root, "_get_fsdp_state")()
    if not private(state, "_is_root"):  # None before the first forward, which makes a module the root
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    shared, streams = state._state_ctx, state._comm_ctx
    current = state._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        running = getattr(streams, name)
        if running is not None and running.event is not None:
            current.wait_event(running.event)
        setattr(streams, name, None)
    for part in shared.all_states:
        part._modules_to_run_forward.clear()
        part._training_state = type(part._training_state).IDLE
        for group in _groups_of(part):
            group.finalize_backward()  # waits, and clears the all-gather that it waited for
            group._partial_reduce_output = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    streams.post_forward_order.clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise RuntimeError(_unknown("FSDPState._fsdp_param_groups"))
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
