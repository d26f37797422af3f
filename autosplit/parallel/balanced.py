"""`BalancedDataParallel`: nn.DataParallel with a batch size for each device. The wrapper does not tune."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

import torch
from torch import nn

from autosplit.accelerators import moved
from autosplit.devices.peer_copy_check import check_links
from autosplit.devices.transfer import active_placement
from autosplit.errors import DeviceError, InputError, WorkloadError, advise, warn_user
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.parallel.accumulation import current_accumulation
from autosplit.parallel.arguments import (
    devices_from,
    output_device_from,
    refuse_compiled,
    refuse_wrong_order,
)
from autosplit.parallel.calls import CallReader
from autosplit.parallel.gather import AmbiguousBatchWarning, Gathering, Link, PlacedLink, SeenOutputs
from autosplit.parallel.loss_weights import Reduce, checked_reduce, weights_of
from autosplit.parallel.parallel_apply import run_in_sequence, run_on_gpus, run_placed
from autosplit.parallel.persistent_replicas import PersistentReplicas
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
from autosplit.workload.batch_layout import BatchLayout
from autosplit.workload.tree import map_tensors, tensors_of, unmarked


class BalancedDataParallel(nn.DataParallel[nn.Module]):
    """Run a module data-parallel in one process, with a chosen number of samples on each device.

    A batch of ``sum(split)`` samples is split exactly into `split`. Other batches are split in proportion to it, by
    largest remainder. If only `gpu0_bsz` is given, device 0 gets ``min(gpu0_bsz, batch)`` samples. The rest is split
    evenly. A device with 0 samples is not called.

    Tensors in the output are concatenated on the output device. Scalar outputs (losses) are combined by `reduce`, and
    integers (counts) are summed. A tensor of shape (1,) from each device is a loss, too. If every device has one
    sample, earlier batches decide whether it is a loss. Without earlier batches, it is an output per sample.

    Tensors in the arguments are cut if they have as many rows as the batch has samples. A tensor whose rows did not
    change with the batch size goes whole to every device. So does anything marked with `autosplit.Whole`.

    To migrate from nn.DataParallel, replace ``nn.DataParallel(model, ids)`` with ``BalancedDataParallel(None, model,
    ids)``. Calls of the older class with this name work unchanged.

    * `gpu0_bsz` counts samples per forward. ``gpu0_bsz // acc_grad`` is right only if the loader yields ``batch //
      acc_grad`` samples. Example: 3 devices, 16 samples in 2 micro-steps, 4 of them on device 0. A loader of 8 gives
      (2, 3, 3) twice, a loader of 16 gives (2, 7, 7). ``1 // 2`` leaves device 0 without samples.
    * Scalar losses are returned as one number, weighted by `reduce`. nn.DataParallel returns one per device.
    * Use `no_sync` for all micro-steps but the last. There is then one broadcast and one reduce per optimizer step.
    * `autosplit.matching_state_dict` converts state dicts between plain, wrapped and compiled modules. Compile the
      wrapper, not the module.

    Args:
        gpu0_bsz: Samples per forward on device 0. None uses `split[0]`, or splits evenly if there is no `split`.
        module: The module. Its parameters must be on device 0 at the first forward.
        device_ids: GPUs, or ``["cpu", "cpu"]`` to try the wrapper without GPUs. Default: every visible GPU. If there is
            none, the wrapper calls the module directly.
        output_device: The device on which outputs are gathered. Default: device 0.
        dim: The batch dimension.
        split: Samples per device in one forward.
        ceilings: The largest number of samples of each device in one forward with gradients.
        reduce: The rule to combine scalar outputs. `Plan.wrap` passes the rule that the plan's checks found.
            ``"samples"`` weights by samples. ``"tokens"`` weights by the `labels` that are not -100. ``"next tokens"``
            does the same without the first label of each sequence, for causal language models. ``"sum"`` adds the
            outputs up. A callable gets a replica's ``(args, kwargs)`` and returns an amount, such as its number of
            tokens. None, the default, weights by samples, and warns once if labels contain -100.

    Raises:
        InputError: The numbers contradict each other, or the module is compiled. Moving the module to its only device
            replaced parameters that an optimizer has.
        DeviceError: The devices cannot be used together.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        module: nn.Module = None,  # type: ignore[assignment]  # if it is missing, an InputError explains the order
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        split: Sequence[int] | None = None,
        ceilings: Sequence[int] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        refuse_wrong_order(gpu0_bsz, module)
        # Do not call nn.DataParallel.__init__, which warns of different GPUs and ignores its arguments without a GPU.
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
                moved(self.module, devices[0])  # nn.DataParallel also moves the module, but only for a single device
        self.reduce = checked_reduce(reduce)
        self.ceilings = self._checked_sizes("ceilings", ceilings)
        self._split: tuple[int, ...] | None = None
        self._gpu0_bsz: int | None = None
        self._set_shares(gpu0_bsz, split)
        self._checked = False
        self._syncs = True
        self._replicas: PersistentReplicas | None = None
        self._calls = CallReader(dim)
        self._seen = {True: SeenOutputs(), False: SeenOutputs()}

    @property
    def split(self) -> tuple[int, ...] | None:
        """Samples per device in one full forward. None if no split was given."""
        return self._split

    @split.setter
    def split(self, value: Sequence[int] | None) -> None:
        self._set_shares(None if value is not None else self._gpu0_bsz, value)

    @property
    def gpu0_bsz(self) -> int | None:
        """Samples per forward on device 0. Setting it removes `split`."""
        return self._gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int) -> None:
        self._set_shares(value, None)

    def _set_shares(self, gpu0_bsz: int | None, split: Sequence[int] | None) -> None:
        gpu0_bsz = None if gpu0_bsz is None else whole_number("gpu0_bsz", gpu0_bsz)
        sizes = self._checked_sizes("split", split)
        if sizes is not None and not any(sizes):
            raise InputError(f"split is {sizes}. Expected at least one sample on one device.")
        if sizes is not None and gpu0_bsz is not None and sizes and sizes[0] != gpu0_bsz:
            raise InputError(
                f"gpu0_bsz is {gpu0_bsz} and split[0] is {sizes[0]}. Expected equal numbers. Leave one of them out.",
            )
        if sizes is not None and self.ceilings is not None:
            for index, (size, ceiling) in enumerate(zip(sizes, self.ceilings, strict=True)):
                if size > ceiling:
                    raise InputError(
                        f"split[{index}] is {size}, above that device's ceiling of {ceiling}. Reduce it, or raise "
                        "the ceiling if the batch does fit on the device.",
                    )
        self._split = sizes
        self._gpu0_bsz = sizes[0] if sizes else gpu0_bsz

    def _checked_sizes(self, name: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(limits_of(name, sizes, len(self.devices) or length_hint(sizes)))

    def split_of(self, batch_size: int, *, bounded: bool = True) -> tuple[int, ...]:
        """Return the number of samples of a batch that each device gets.

        In a loop over a `TokenBatchSampler`, the sampler's split of the current micro-batch applies, unless the batch
        is larger.

        Args:
            bounded: Whether to respect the ceilings. Forwards without gradients need less memory.

        Raises:
            InputError: The batch is larger than the sum of the ceilings.
        """
        accumulation = current_accumulation()
        own = None if accumulation is None else accumulation.split
        if own is not None and batch_size <= sum(own):  # a cut micro-batch has fewer samples
            return proportional_split(batch_size, own, own)
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

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of this wrapper, whose names begin with `module.`, as `nn.DataParallel` does."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            call = "model.load_state_dict(autosplit.matching_state_dict(model, state))"
            advise(error, f"to load the state dict of a plain model, call {call}")
            raise

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the batch, split over the devices. Return the gathered outputs.

        Raises:
            WorkloadError: The arguments differ in their batch size, or the outputs cannot be joined.
            DeviceError: The module is not on device 0, or copies between GPUs do not arrive.
            OutOfMemoryError: A device ran out of memory. The error names the device and its number of samples.

        Warns:
            AmbiguousBatchWarning: A tensor may be a table with as many rows as the batch by coincidence. Cut to single
                rows, the table would broadcast without an error.
        """
        if not self.devices:
            args, named = unmarked((inputs, kwargs))
            return self.module(*args, **named)
        self._check_module()
        layout, sizes = self._read(inputs, kwargs)
        active, shares = [*sizes], tuple(sizes.values())
        chunks = layout.cut(shares)
        if len(active) > 1 and max(shares) == 1 and (doubt := layout.doubt()):
            warn_user(f"The batch is cut to single rows. {doubt}", AmbiguousBatchWarning)
        weights = weights_of(self.reduce, self.module, chunks, shares)
        replicas, last = self._replicas_now()
        try:
            outputs, link = self._run(active, chunks, replicas, shares)
        except (RuntimeError, IndexError) as error:
            if len(active) > 1:  # a single device gets the call uncut
                layout.advise(error)
            raise
        gathering = Gathering(layout, weights, link, shares, self._seen[self.module.training])
        joined = self._joined(gathering, outputs)
        if replicas is not None:  # gradients stay on the devices until the backward of the last micro-step
            replicas.watch(tensors_of(joined), last=last)
        return joined

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the replicas and their gradients from one micro-step to the next.

        Within this context, parameters are copied to the other devices once, and gradients stay on their devices. The
        backward of the first forward outside adds them to the module's gradients. So run the last micro-step of each
        optimizer step outside. `plan.steps` does this automatically.

            *others, (last_inputs, last_targets) = micro_batches
            with model.no_sync():
                for inputs, targets in others:
                    (loss_fn(model(inputs), targets.to(model.output_device)) * (len(inputs) / total)).backward()
            last = loss_fn(model(last_inputs), last_targets.to(model.output_device))
            (last * (len(last_inputs) / total)).backward()
            optimizer.step()

        As with DDP, run both forward and backward inside. `torch.autograd.grad` of parameters returns the gradient
        of the whole batch, even with ``create_graph=True``. A backward with ``create_graph=True`` raises InputError.
        `optimizer.zero_grad()` also clears the gradients on other devices. While other devices have gradients, clipping
        or scaling a gradient and `optimizer.step()` raise InputError. Within `plan.budgets()`, clipping by operations
        on lists of tensors is not detected, because torch counts no versions there.

        Replicas do not persist if parameters have hooks, because hooks expect whole gradients. Devices called ``"cpu"``
        have replicas only within `plan.budgets()`.
        """
        outer, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outer

    def synchronize(self) -> None:
        """Reduce the gradients that `no_sync` left on other devices, without a backward.

        Raises:
            InputError: The gradients have a graph (``create_graph=True``).
        """
        if self._replicas is not None:
            self._replicas.reduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients on all devices.

        Args:
            set_to_none: Whether to set gradients to None instead of zeros.
        """
        if self._replicas is not None:
            self._replicas.drop_gradients()
        super().zero_grad(set_to_none)

    def hold_gradients(self, split: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        """Create zero gradients on the devices of a placement, as after a micro-step within `no_sync`."""
        self._replicas = PersistentReplicas(Copies())
        self._replicas.hold(self.module, [index for index, samples in enumerate(split) if samples], parameters)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()  # the copy has no replicas, so gradients on other devices would be lost
        return {**self.__dict__, "_replicas": None, "_checked": False}

    def _read(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[BatchLayout, dict[int, int]]:
        """Return the layout of a call, and the samples of each device that runs, by its index."""
        full = sum(self._split) if self._split else None
        try:
            layout = self._calls.read(inputs, kwargs, full)
        except WorkloadError:
            lone = self._lone_device()
            if lone is None:
                raise
            # A single device gets the call uncut, so the samples need not be countable.
            return BatchLayout.of((inputs, kwargs), full or 1, self.dim), {lone: full or 1}
        if not layout.size:  # device 0 runs an empty batch, as in nn.DataParallel, and a call without tensors to cut
            return layout, {0: 0}
        sizes = self.split_of(layout.size, bounded=torch.is_grad_enabled())
        return layout, {index: size for index, size in enumerate(sizes) if size}

    def _lone_device(self) -> int | None:
        accumulation = current_accumulation()
        split = self._split if accumulation is None or accumulation.split is None else accumulation.split
        active = [index for index, size in enumerate(split or ()) if size]
        return 0 if len(self.devices) == 1 else active[0] if len(active) == 1 else None

    def _joined(self, gathering: Gathering, outputs: list[Any]) -> Any:
        try:
            return gathering.join(outputs)
        except RuntimeError as error:
            if isinstance(error, OutOfMemoryError) or not is_oom(error):
                raise
            message = str(error)
        # Raise outside the except block, because the first error's traceback would keep the outputs in memory.
        place = torch.device(self.output_device)
        raise OutOfMemoryError(
            f"{place} is out of memory, because it gathers the outputs of all {gathering.layout.size} samples. "
            "Compute the loss inside the module, so that only the loss is gathered, or use a smaller batch. "
            f"{message}",
            device=str(place),
            device_index=self.devices.index(place) if place in self.devices else None,
        )

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Any = None,  # noqa: ARG002
    ) -> tuple[list[Any], list[Any]]:
        """Cut a call as `forward` does, for code that calls the methods of nn.DataParallel directly.

        Args:
            device_ids: Ignored. The call is split over the wrapper's devices.

        Returns:
            A list of positional arguments and a list of keyword arguments, with an entry per device that has samples.
        """
        layout, sizes = self._read(inputs, kwargs or {})
        moved = [
            map_tensors(lambda tensor, to=self.devices[index]: tensor.to(to), part)  # type: ignore[misc]
            for index, part in zip(sizes, layout.cut(tuple(sizes.values())), strict=True)
        ]
        return [args for args, _ in moved], [named for _, named in moved]

    def _check_module(self) -> None:
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        home = self.devices[0]
        for name, tensor in itertools.islice(named, 1) if self._checked else named:
            if tensor.device != home:
                raise DeviceError(
                    f"{name} is on {tensor.device}. Expected the first device, {home}. Call .to('{home}') on the "
                    "model.",
                )
        if not self._checked:
            refuse_compiled(self.module)  # the module may have been compiled after the wrapper was created
            if active_placement() is None:  # in a placement all devices are the CPU, so there are no links to check
                check_links(self.devices)
                check_links((torch.device(self.output_device), *self.devices))
            self._checked = True

    def _replicas_now(self) -> tuple[PersistentReplicas | None, bool]:
        """Return the persistent replicas, if there are any, and whether this is the last micro-step."""
        accumulation = current_accumulation()
        last = self._syncs and (accumulation is None or accumulation.is_last)
        if self._replicas is not None and accumulation is None and last and not self._replicas.needed:
            self._replicas = None  # gradients are no longer accumulated, so free the replicas' memory
        if not torch.is_grad_enabled():
            return None, last
        if self._replicas is not None and not self._replicas.needed and self._has_hooks():
            self._replicas = None  # the gradients of replicas would not run the hooks, which are new
        placed = active_placement() is not None
        may_persist = not last and (placed or self.devices[0].type != "cpu") and knows_nodes_to_run()
        if self._replicas is None and may_persist and not self._has_hooks():
            # On CPU devices outside a placement, all chunks run through the same module, without replicas.
            self._replicas = PersistentReplicas(Copies() if placed else GpuCopies(self.devices))
        if self._replicas is not None and accumulation is not None:
            accumulation.join(self)
        return self._replicas, last

    def _has_hooks(self) -> bool:
        return any(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self.parameters()
        )

    def _run(
        self, active: list[int], chunks: list[Any], replicas: PersistentReplicas | None, shares: Sequence[int]
    ) -> tuple[list[Any], Link | PlacedLink]:
        placement = active_placement()
        link = Link(torch.device(self.output_device))
        if placement is None and self.devices[0].type != "cpu":
            return run_on_gpus(self.module, self.devices, active, chunks, replicas, shares), link
        if placement is not None:
            return run_placed(self.module, placement, active, chunks, replicas), PlacedLink(tuple(active))
        return run_in_sequence(self.module, chunks), link


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
    """Run a module once on a batch, split over the devices. See `BalancedDataParallel`.

    Args:
        inputs: A tensor, a tuple of positional arguments, or None for no positional argument.

    Returns:
        The module's outputs, gathered on the output device.
    """
    wrapper = BalancedDataParallel(
        gpu0_bsz, module, device_ids, output_device, dim, split=split, ceilings=ceilings, reduce=reduce
    )
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return wrapper(*args, **(module_kwargs or {}))
