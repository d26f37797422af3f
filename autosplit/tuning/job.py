"""The processes that tune together, as one of them sees them; a process that tunes alone is a job of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from autosplit.accelerators import is_accelerator
from autosplit.devices.device import Device
from autosplit.errors import InputError, WorkloadError
from autosplit.probe.request import Request
from autosplit.tuning.peers import Interrupts, Peers
from autosplit.workload.fingerprint import digest_of
from autosplit.workload.workload import Workload

if TYPE_CHECKING:  # a torch without torch.distributed tunes alone
    from autosplit.ddp.rendezvous import Place

T = TypeVar("T")

_CODE = ("model_tree", "model_factory", "loss_fn", "compute_loss", "step", "make_batch")
"""Parts of a workload's description that are digests of code and of what that holds."""


@dataclass(frozen=True)
class Job:
    """The processes that tune together, as one of them sees them.

    Attributes:
        place: None for a process that tunes alone.
        own: The request with this rank's device alone.
        whole: The request with every rank's device, in the ranks' order.
        machine: Of the whole job, by `key.machine_of`; with ``ranks_per_machine`` where there are several.
        backend: Of the group in which gradients meet.
    """

    place: Place | None
    peers: Peers
    own: Request
    whole: Request
    machine: dict[str, Any]
    backend: str = "gloo"

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.peers.world_size > 1

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch_device(self.own.devices[0])

    @property
    def is_first_of_machine(self) -> bool:
        """Whether this rank is the one to write what its machine keeps."""
        return self.place is None or not self.place.local_rank

    def with_more_time(self, seconds: float) -> Job:
        """Return the same job with a later deadline, for time that was not its own."""
        return replace(self, own=self.own.with_more_time(seconds), whole=self.whole.with_more_time(seconds))

    def told(self, run: Callable[[], T]) -> T:
        """Return what rank 0 makes of something, on every rank."""
        return self.peers.all_run(lambda: run() if self.peers.rank == 0 else None)[0]  # type: ignore[return-value]

    def agreed(self, what: str, described: dict[str, Any]) -> dict[str, Any]:
        """Return a description that is the same on all ranks; raise InputError where one differs.

        Code may hold what is a rank's own (its number, its part of the data): where only that differs, a digest of all
        of them stands for it.
        """
        everyones = self.peers.gathered(described)

        def compare() -> dict[str, Any]:
            agreed = dict(described)
            for name in described:
                values = [one.get(name) for one in everyones]
                if name in _CODE and None not in values and any(value != values[0] for value in values):
                    agreed[name] = digest_of(values)
                else:
                    refuse_differing(f"{what}'s {name}", values)
            return agreed

        return self.peers.each_run(compare)


def alone(request: Request, machine: dict[str, Any]) -> Job:
    """Return the job of a process that tunes all devices by itself."""
    return Job(None, Peers(0, 1, None, Interrupts()), request, request, machine)


def refuse_waiting(workload: Workload) -> None:
    """Refuse a model that waits for other ranks in its forward: each rank measures its device by itself."""
    for part in (part for one in workload.modules for part in one.modules()):
        if isinstance(part, nn.SyncBatchNorm) or type(part).__name__.startswith("FSDP"):
            raise WorkloadError(
                f"the model has a {type(part).__name__}, which waits for all ranks in every forward, and each rank "
                "measures its device by itself; expected a plain model; tune that, and convert or shard it in training "
                "(ctx.wrap(model, sync_batchnorm=True), ctx.shard(model))",
                code="model-synchronises",
            )


def torch_device(device: Device) -> torch.device:
    """Return a device in torch's terms."""
    return torch.device(device.kind, device.index) if is_accelerator(device.kind) else torch.device("cpu")


def refuse_differing(name: str, values: Sequence[Any]) -> None:
    """Refuse what is not the same on all ranks."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise InputError(
            f"{name} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}; expected the same on all; start "
            "all ranks with one command line and one installation",
            code="ranks-disagree",
        )
