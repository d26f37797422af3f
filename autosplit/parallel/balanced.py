"""`BalancedDataParallel`: nn.DataParallel with a share of its own for each device.

It takes plain integers and never tunes itself; which part of a batch goes where is decided here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

import torch
from torch import nn

from autosplit.accelerators import moved
from autosplit.devices.peer_copy_check import check_links
from autosplit.devices.transfer import active_placement
from autosplit.errors import DeviceError, InputError, WorkloadError
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.parallel.accumulation import current_accumulation
from autosplit.parallel.arguments import (
    devices_from,
    output_device_from,
    refuse_compiled,
    refuse_wrong_order,
)
from autosplit.parallel.call_cuts import CallCuts, named_call
from autosplit.parallel.gather import AmbiguousBatchWarning, Gathering, Link, PlacedLink, SeenOutputs
from autosplit.parallel.loss_weights import Reduce, checked_reduce, weights_of
from autosplit.parallel.parallel_apply import run_in_turn, run_on_gpus, run_placed
from autosplit.parallel.persistent_replicas import KeptReplicas
from autosplit.parallel.tensor_copies import Copies, GpuCopies
from autosplit.solve.split import (
    cap_split,
    even_split,
    limits_of,
    proportional_split,
    short_split,
    split_from_gpu0,
    whole_number,
)
from autosplit.torch_versions import BATCH_NORMS, knows_nodes_to_run
from autosplit.workload.batch import (
    doubt_of,
    doubting,
    map_tensors,
    tensors_of,
    unmarked,
)

_NORM_NEEDS_TWO = "Expected more than 1 value per channel"
"""What torch says of a BatchNorm that trains on one value (torch nn/functional.py, _verify_batch_size)."""


class BalancedDataParallel(nn.DataParallel[nn.Module]):
    """Data parallelism in one process, with `gpu0_bsz` samples on the first device.

    A batch of ``sum(split)`` samples is split exactly as `split` says, another one in proportion to it, by
    largest remainder. With `gpu0_bsz` alone, the first device takes ``min(gpu0_bsz, batch)`` and the others the
    rest, evenly. A device whose share is 0 is not called. Outputs are concatenated on the output device; a
    scalar output (a loss) is combined by `reduce`, an integer one (a count) is summed. One element from each device
    is a loss, too, which stays one element. With a single sample on each it is what it was at a batch before: an output
    for each sample, if there was none.

    Of the arguments, tensors with as many rows as the batch has samples are cut. What holds no samples goes whole to
    every device: what was seen at another batch size not to grow with it, and what `autosplit.Whole` marks.

    Moving from nn.DataParallel: ``nn.DataParallel(model, ids)`` becomes ``BalancedDataParallel(None, model, ids)``. The
    old class of this name is called as before, also followed by ``.cuda()``.

    * `gpu0_bsz` counts samples per forward. ``gpu0_bsz // acc_grad`` is right only if the loader yields ``batch //
      acc_grad`` samples: 4 of 16 in 2 micro-steps is 2 of 8, (2, 3, 3) twice; a loader of 16 gets (2, 7, 7). It also
      floors: ``1 // 2`` leaves the first device without samples.
    * Scalar losses come back as one number, weighted by `reduce`, not as one per device; ``.mean()`` on it is harmless.
    * `no_sync` around all micro-steps but the last keeps the replicas: one broadcast and one reduce per optimizer step.
    * `autosplit.matching_state_dict` loads states of plain, wrapped and compiled modules into each other. Compile the
      wrapper, not the module.

    Args:
        gpu0_bsz: Samples per forward on the first device; None takes `split[0]`.
        module: The module; its parameters must be on the first device at the first forward.
        device_ids: GPUs, or ``["cpu", "cpu"]`` to try it anywhere. Default: every visible GPU; without
            any, the wrapper passes its inputs through, as its parent does.
        output_device: Where outputs are gathered. Default: the first device.
        dim: The batch dimension.
        split: Samples per device in one forward.
        ceilings: The most samples each device may get in one forward that keeps a graph for its backward.
        reduce: How scalar outputs are combined; `Plan.wrap` passes what the plan's checks found. ``"samples"`` weights
            by samples, which is exact where each is a mean over them; ``"tokens"`` by the `labels` that are not -100,
            ``"next tokens"`` by those without the first of each sequence, as causal language models average;
            ``"sum"`` adds them up; a callable returns from a replica's ``(args, kwargs)`` what it counts for beside
            the others: an amount, such as its tokens. None, the default, weights by samples, and says once where
            labels hold -100.

    Raises:
        InputError: Numbers that disagree with each other, a compiled module, or an optimizer's parameters that
            moving to the only device has replaced.
        DeviceError: Devices that can't be used together.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        module: nn.Module = None,  # type: ignore[assignment]  # left out, it gets an answer that says what goes where
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        split: Sequence[int] | None = None,
        ceilings: Sequence[int] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        refuse_wrong_order(gpu0_bsz, module)
        # Not nn.DataParallel's own: it warns of unlike GPUs, which are what this class is for, and drops its
        # arguments where there is no GPU.
        nn.Module.__init__(self)
        refuse_compiled(module)
        devices = devices_from(device_ids)
        self.module = module
        self.dim = dim
        ids: list[Any] = [device if device.type == "cpu" else device.index for device in devices]
        self.device_ids = ids
        self.devices = devices
        if devices:
            self.output_device = output_device_from(output_device, devices[0])
            self.src_device_obj = devices[0]
            tensors = itertools.chain(self.module.parameters(), self.module.buffers())
            if len(devices) == 1 and devices[0].type != "cpu" and any(one.device != devices[0] for one in tensors):
                moved(self.module, devices[0])  # as nn.DataParallel does, and with one device only
        self.reduce = checked_reduce(reduce)
        self.ceilings = self._checked_sizes("ceilings", ceilings)
        self._split: tuple[int, ...] | None = None
        self._gpu0_bsz: int | None = None
        self._set_shares(gpu0_bsz, split)
        self._checked = False
        self._syncs = True
        self._kept: KeptReplicas | None = None
        self._cuts = CallCuts(dim)
        self._seen = {True: SeenOutputs(), False: SeenOutputs()}

    @property
    def split(self) -> tuple[int, ...] | None:
        """Samples per device in one full forward; None where only `gpu0_bsz` was given."""
        return self._split

    @split.setter
    def split(self, value: Sequence[int] | None) -> None:
        self._set_shares(None if value is not None else self._gpu0_bsz, value)

    @property
    def gpu0_bsz(self) -> int | None:
        """Samples per forward on the first device; set, it takes the place of `split`."""
        return self._gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int) -> None:
        self._set_shares(value, None)

    def _set_shares(self, gpu0_bsz: int | None, split: Sequence[int] | None) -> None:
        gpu0_bsz = None if gpu0_bsz is None else whole_number("gpu0_bsz", gpu0_bsz)
        sizes = self._checked_sizes("split", split)
        if sizes is not None and not any(sizes):
            raise InputError(
                f"split is {sizes}; expected at least one sample on one device; raise one", code="split-empty"
            )
        if sizes is not None and gpu0_bsz is not None and sizes and sizes[0] != gpu0_bsz:
            raise InputError(
                f"gpu0_bsz is {gpu0_bsz} and split[0] is {sizes[0]}; expected the same; leave one out",
                code="gpu0-bsz-differs",
            )
        if sizes is not None and self.ceilings is not None:
            for index, (size, ceiling) in enumerate(zip(sizes, self.ceilings, strict=True)):
                if size > ceiling:
                    raise InputError(
                        f"split[{index}] is {size}, above that device's ceiling of {ceiling}; "
                        "lower the share, or raise the ceiling if the device really holds it",
                        code="split-above-ceiling",
                    )
        self._split = sizes
        self._gpu0_bsz = sizes[0] if sizes else gpu0_bsz

    def _checked_sizes(self, name: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(limits_of(name, sizes, len(self.devices) or length_hint(sizes)))

    def split_of(self, batch_size: int, *, bounded: bool = True) -> tuple[int, ...]:
        """Return the samples each device gets of a batch.

        Args:
            bounded: Hold the ceilings, which are those of training; a forward without gradients needs less. Within a
                loop over a sampler of batches of like length its own split holds.

        Raises:
            InputError: The ceilings do not hold the batch.
        """
        running = current_accumulation()
        if running is not None and running.split is not None and batch_size <= sum(running.split):
            return proportional_split(batch_size, running.split, running.split)  # fewer in a part of a micro-batch
        ceilings = self.ceilings if bounded else None
        if self._split is not None:
            if batch_size < sum(self._split) and any(isinstance(part, BATCH_NORMS) for part in self.module.modules()):
                return short_split(batch_size, self._split)
            return proportional_split(batch_size, self._split, ceilings)
        if self._gpu0_bsz is None:
            sizes = even_split(batch_size, len(self.devices))
        else:
            sizes = split_from_gpu0(batch_size, self._gpu0_bsz, len(self.devices))
        return sizes if ceilings is None else cap_split(sizes, ceilings)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the batch, each device on its share, and return its outputs, gathered on the output device.

        Args:
            *inputs: The module's positional arguments: tensors, or nested containers of them.
            **kwargs: Its keyword arguments, likewise.

        Raises:
            WorkloadError: The arguments disagree on the batch size, or outputs that can't be put together.
            DeviceError: The module is not on the first device, or copies between GPUs do not arrive.
            OutOfMemoryError: A device ran out of memory; it is named, with the samples it held.

        Warns:
            AmbiguousBatchWarning: A tensor may be a table that has as many rows as the batch by accident, and would be
                cut to single rows, which broadcast without an error.
        """
        if not self.devices:
            args, named = unmarked((inputs, kwargs))
            return self.module(*args, **named)
        self._check_module()
        call = (inputs, kwargs)
        sizes, batch_size = self._sizes_of(call)
        active, chunks = self._cuts.cut(call, sizes, batch_size)
        leaves = [*named_call(call)] if len(active) > 1 else []  # nothing is cut for one device
        if max(sizes) == 1 and (doubt := doubt_of(leaves, batch_size, self.dim)):
            warnings.warn(f"the batch is cut to single rows; {doubt}", AmbiguousBatchWarning, stacklevel=2)
        shares = [sizes[index] for index in active]
        weights = weights_of(self.reduce, self.module, chunks, shares)
        kept, last = self._kept_now()
        try:
            with doubting(leaves, batch_size, self.dim):
                outputs, link = self._run(active, chunks, kept, shares)
        except ValueError as error:
            if _NORM_NEEDS_TWO not in str(error):
                raise
            raise WorkloadError(
                f"a share of 1 sample ({_NORM_NEEDS_TWO} when training, says BatchNorm); the batch of {batch_size} is "
                f"split {sizes}; expected 0, or 2 and more, on each device; choose another split, leave out the short "
                "last batch (drop_last=True), or take a norm that does not look at the batch",
                code="batchnorm-single-sample",
            ) from error
        seen = self._seen[self.module.training]
        lists, lengths = self._cuts.cuts_lists, self._cuts.lengths(call)
        gathering = Gathering(self.dim, weights, link, tuple(shares), seen, lists, lengths)
        joined = self._joined(gathering, outputs, batch_size)
        if kept is not None:
            kept.watch(tensors_of(joined), last=last)
        return joined

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the replicas, and the gradients on them, from one micro-step to the next.

        Within this context, parameters are copied to the other devices once, and gradients stay on their devices. The
        backward of the first forward outside adds them to the gradients of the module. So run the last micro-step of
        each optimizer step outside. The gradient is the same, with fewer copies. `plan.steps` does this by itself.

            *others, (last_inputs, last_targets) = micro_batches
            with model.no_sync():
                for inputs, targets in others:
                    (loss_fn(model(inputs), targets.to(model.output_device)) * (len(inputs) / total)).backward()
            last = loss_fn(model(last_inputs), last_targets.to(model.output_device))
            (last * (len(last_inputs) / total)).backward()
            optimizer.step()

        As with DDP, forward and backward both belong inside. `torch.autograd.grad` of parameters returns the gradient
        of the whole batch, also with ``create_graph=True``. A backward with ``create_graph=True`` is refused.
        `optimizer.zero_grad()` also clears the gradients on other devices. While gradients wait there, clipping or
        scaling a gradient and `optimizer.step()` are refused. Within `plan.budgets()` torch counts no versions for
        operations over lists of tensors, so a clip by such operations is not detected.

        No replica is kept if parameters have hooks, because hooks expect whole gradients. On ``"cpu"`` ids none is
        kept either: all chunks run through the one module.
        """
        outer, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outer

    def synchronize(self) -> None:
        """Bring the gradients that `no_sync` left on other devices home now, without another backward.

        Raises:
            InputError: They have a graph (``create_graph=True``).
        """
        if self._kept is not None:
            self._kept.bring_home()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those too that wait on other devices.

        Args:
            set_to_none: Set them to None instead of to zeros.
        """
        if self._kept is not None:
            self._kept.drop_gradients()
        super().zero_grad(set_to_none)

    def hold_gradients(self, split: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        """Let gradients of zeros wait on the devices of a placement, as after a micro-step within `no_sync`."""
        self._kept = KeptReplicas(Copies())
        self._kept.hold(self.module, [index for index, samples in enumerate(split) if samples], parameters)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()  # a copy has no devices' gradients to wait for
        return {**self.__dict__, "_kept": None, "_checked": False}

    def _sizes_of(self, call: Any) -> tuple[tuple[int, ...], int]:
        """Return the samples of a call for each device, and for all of them."""
        full = sum(self._split) if self._split else None
        try:
            batch_size = self._cuts.samples(call, full)
        except WorkloadError:
            lone = self._lone_device()
            if lone is None:
                raise
            # Nothing is cut for one device, so it takes batches whose samples nobody can count.
            sizes = tuple(full or 1 if index == lone else 0 for index in range(len(self.devices)))
            return sizes, sum(sizes)
        if batch_size:
            return self.split_of(batch_size, bounded=torch.is_grad_enabled()), batch_size
        if batch_size is None:  # nothing to split: the first device runs the call as it is
            return (1, *(0 for _ in self.devices[1:])), 1
        return (0,) * len(self.devices), 0  # the first device runs it, as in nn.DataParallel

    def _lone_device(self) -> int | None:
        """Return the only device that gets samples of any batch, if there is one."""
        running = current_accumulation()
        split = self._split if running is None or running.split is None else running.split
        active = [index for index, size in enumerate(split or ()) if size]
        return 0 if len(self.devices) == 1 else active[0] if len(active) == 1 else None

    def _joined(self, gathering: Gathering, outputs: list[Any], batch_size: int) -> Any:
        try:
            return gathering.join(outputs)
        except RuntimeError as error:
            if isinstance(error, OutOfMemoryError) or not is_oom(error):
                raise
            message = str(error)
        # Raised outside the except block: its traceback would pin the outputs.
        place = torch.device(self.output_device)
        raise OutOfMemoryError(
            f"{place} is out of memory with the outputs of all {batch_size} samples gathered there; give the module "
            f"its loss, so that only that is gathered, or make the batch smaller. {message}",
            device=str(place),
            device_index=self.devices.index(place) if place in self.devices else None,
        )

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Any = None,  # noqa: ARG002
    ) -> tuple[list[Any], list[Any]]:
        """Cut a call as `forward` does, for code that drives nn.DataParallel's parts itself.

        Args:
            device_ids: Ignored: the wrapper's own devices have their shares.

        Returns:
            The positional arguments of each device that has samples, and the keyword arguments of each.
        """
        call = (inputs, kwargs or {})
        sizes, batch_size = self._sizes_of(call)
        active, chunks = self._cuts.cut(call, sizes, batch_size)
        moved = [
            map_tensors(lambda tensor, to=self.devices[index]: tensor.to(to), part)  # type: ignore[misc]
            for index, part in zip(active, chunks, strict=True)
        ]
        return [args for args, _ in moved], [named for _, named in moved]

    def _check_module(self) -> None:
        """Check at the first forward what the module is and where; later only where it begins."""
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        home = self.devices[0]
        for name, tensor in itertools.islice(named, 1) if self._checked else named:
            if tensor.device != home:
                raise DeviceError(
                    f"{name} is on {tensor.device}; expected the first device, {home}; call .to('{home}') on the model",
                    code="module-device",
                )
        if not self._checked:
            refuse_compiled(self.module)  # it may have been compiled since
            if active_placement() is None:  # there all devices are one, and nothing is copied between two
                check_links(self.devices)
                check_links((torch.device(self.output_device), *self.devices))
            self._checked = True

    def _kept_now(self) -> tuple[KeptReplicas | None, bool]:
        """Return the replicas that this forward runs on, None for such as last no longer than it; and if it is last."""
        walk = current_accumulation()
        last = self._syncs and (walk is None or walk.is_last)
        if self._kept is not None and walk is None and last and not self._kept.needed:
            self._kept = None  # nothing is accumulated any more: their memory is free
        if not torch.is_grad_enabled():
            return None, last
        placed = active_placement() is not None
        keeps = not last and (placed or self.devices[0].type != "cpu") and knows_nodes_to_run()
        if self._kept is None and keeps and not self._has_hooks():
            # On the CPU alone all chunks run through the one module, and its gradients are where they belong.
            self._kept = KeptReplicas(Copies() if placed else GpuCopies(self.devices))
        if self._kept is not None and walk is not None:
            walk.join(self)
        return self._kept, last

    def _has_hooks(self) -> bool:
        """Tell whether hooks want each parameter's whole gradient: a kept replica's would pass them by."""
        return any(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self.parameters()
        )

    def _run(
        self, active: list[int], chunks: list[Any], kept: KeptReplicas | None, shares: list[int]
    ) -> tuple[list[Any], Link | PlacedLink]:
        placement = active_placement()
        if placement is not None and len(self.devices) > placement.num_devices:
            raise DeviceError(
                f"the wrapper has {len(self.devices)} devices, and the budgets around it are for "
                f"{placement.num_devices}; expected as many; use the plan's own budgets, and one wrapper",
                code="budgets-device-count",
            )
        link = Link(torch.device(self.output_device))
        if placement is None and self.devices[0].type != "cpu":
            return run_on_gpus(self.module, self.devices, active, chunks, kept, shares), link
        if placement is not None:
            return run_placed(self.module, placement, active, chunks, kept), PlacedLink(tuple(active))
        return run_in_turn(self.module, chunks), link


def data_parallel(
    module: nn.Module,
    inputs: Any,
    gpu0_bsz: int | None = None,
    device_ids: Sequence[int | str | torch.device] | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    split: Sequence[int] | None = None,
    ceilings: Sequence[int] | None = None,
    reduce: Reduce | None = None,
) -> Any:
    """Run a module once on a batch, each device on its share: the functional form of `BalancedDataParallel`.

    All arguments that are not listed are the wrapper's.

    Args:
        inputs: A tensor, or a tuple of positional arguments; None for no such argument.
        module_kwargs: Keyword arguments of the module.

    Returns:
        What the module returns, gathered.
    """
    wrapper = BalancedDataParallel(
        gpu0_bsz, module, device_ids, output_device, dim, split=split, ceilings=ceilings, reduce=reduce
    )
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return wrapper(*args, **(module_kwargs or {}))
