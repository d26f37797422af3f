"""Simulate the clocks of GPUs and of the host that starts their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autosplit.devices.catalog import GpuSpec
from autosplit.devices.transfer import HOST
from autosplit.sim.kernel_time import kernel_rates
from autosplit.sim.op_cost import Load, Work, loads_of

_TOGETHER = ("parameter", "gradient")
"""Purposes of NCCL's broadcast and reduce, which use all links at once, for any number of devices."""

_STEADY = 1e-9
"""Maximum relative difference between two repetitions that count as equal."""


@dataclass
class Clocks:
    """Current time of each GPU and of the host, and compute time of each GPU.

    The host runs ahead of a GPU unless the host is slower. An op begins when the host has started it and the GPU has
    finished the previous op. Copies of parameters and gradients overlap with compute, as NCCL's rings do. Every other
    copy occupies both of its devices.

    Attributes:
        free: Purposes of copies that take no time.
        fused_share: See `kernel_time.kernel_seconds`.
    """

    specs: Sequence[GpuSpec]
    free: frozenset[str] = frozenset()
    replicas: int = 1
    fused_share: float = 1.0

    def __post_init__(self) -> None:
        self.now_s = [0.0] * len(self.specs)
        self.busy_s = [0.0] * len(self.specs)
        self._host_s = [0.0] * len(self.specs)
        self._links_s = [0.0] * len(self.specs)  # when each device's link to the first device is free
        self._arrived_s = [0.0] * len(self.specs)  # when each device's copies over the links end
        self._loads: list[dict[Work, Load]] = [{} for _ in self.specs]

    def foresee(self, card: int, works: Iterator[Work]) -> None:
        """Compute the loads of a GPU's ops in one batch before they run."""
        loads = self._loads[card]
        first = next(works, None)
        if first is not None and first not in loads:
            new = [first, *(work for work in works if work not in loads)]
            loads.update(zip(new, self._loads_of(new, card), strict=True))

    def work(self, device: int, work: Work) -> None:
        """Run an op on a GPU after its data has arrived and the host has started it."""
        self.foresee(device, iter([work]))
        load = self._loads[device][work]
        self._wait(device)
        self.now_s[device] = max(self.now_s[device] + load.busy_s, self._host_s[device] + load.end_s)
        self._host_s[device] += load.host_s
        self.busy_s[device] += load.busy_s

    def take_back(self, device: int, work: Work) -> None:
        """Undo an op of the trace that does not run in the real step.

        If the GPU was waiting for the host, subtract the longer of kernel time and launch time, otherwise kernel time.
        """
        load = self._loads_of([work], device)[0]
        is_behind = self.now_s[device] <= self._host_s[device] + load.busy_s
        self.now_s[device] -= max(load.busy_s, load.host_s) if is_behind else load.busy_s
        self.busy_s[device] -= load.busy_s
        self._host_s[device] -= load.host_s

    def _loads_of(self, works: Sequence[Work], card: int) -> list[Load]:
        return loads_of(works, self.specs[card], self.replicas, self.fused_share)

    def move(self, source: int, destination: int, nbytes: int, purpose: str) -> None:
        """Send bytes over a link. Broadcasts and reduces overlap with compute. Other copies wait for both devices."""
        ends = [device for device in (source, destination) if device != HOST]
        is_free = purpose in self.free
        if purpose in _TOGETHER and len(ends) == 2:
            self._move_beside(source, destination, nbytes, is_free=is_free)
            return
        own, other = self.specs[ends[0]], self.specs[ends[-1]]
        link = min(own.link_bytes_per_s, other.link_bytes_per_s) if len(ends) > 1 else own.host_bytes_per_s
        for device in ends:
            self._wait(device)
        takes_s = 0.0 if is_free else max(self.specs[device].launch_s for device in ends) + nbytes / link
        end_s = max(self.now_s[device] for device in ends) + takes_s
        for device in ends:
            self.now_s[device] = end_s
        # One interpreter starts all work, so the host starts the consumer of a copy only after its source.
        self._host_s[ends[-1]] = max(self._host_s[device] for device in ends)

    def _move_beside(self, one: int, other: int, nbytes: int, *, is_free: bool) -> None:
        # NCCL launches once for each parameter of each replica.
        first, second, at = self.specs[one], self.specs[other], max(one, other)
        end_s = max(self.now_s[one], self.now_s[other], self._links_s[at])
        if not is_free:
            launch_s = max(first.launch_s, second.launch_s) * kernel_rates().host.replicated
            host_s = max(self._host_s[one], self._host_s[other]) + launch_s
            self._host_s[one] = self._host_s[other] = host_s
            end_s = max(end_s, host_s) + nbytes / min(first.link_bytes_per_s, second.link_bytes_per_s)
        self._links_s[at] = end_s
        self._arrived_s[one] = max(self._arrived_s[one], end_s)
        self._arrived_s[other] = max(self._arrived_s[other], end_s)

    def _wait(self, device: int) -> None:
        self.now_s[device] = max(self.now_s[device], self._arrived_s[device])

    def await_device(self, device: int) -> None:
        """Make the host wait until a GPU is idle, as `.item()` does."""
        self._host_s[device] = max(self._host_s[device], self.now_s[device])

    def meet(self) -> float:
        """Make all devices wait for the slowest, and return the time at which it is done."""
        end_s = max(*self.now_s, *self._arrived_s)
        self.now_s = [end_s] * len(self.now_s)
        return end_s

    def repeat(self, play: Callable[[], None], times: int) -> None:
        """Replay a step the given number of times. When two repetitions take the same time, extrapolate the rest."""
        before, last = self._read(), None
        for played in range(1, times + 1):
            play()
            after = self._read()
            pace = [end_s - begin_s for begin_s, end_s in zip(before, after, strict=True)]
            if last is not None and self._is_steady(pace, last):
                ends_s = [now_s + (times - played) * each_s for now_s, each_s in zip(after, pace, strict=True)]
                count = len(self.specs)
                parts = (ends_s[start : start + count] for start in range(0, len(ends_s), count))
                self.now_s, self._host_s, self._links_s, self._arrived_s, self.busy_s = parts
                return
            before, last = after, pace

    def _read(self) -> list[float]:
        return [*self.now_s, *self._host_s, *self._links_s, *self._arrived_s, *self.busy_s]

    def _is_steady(self, pace: list[float], last: list[float]) -> bool:
        """Return whether all further repetitions will take the same time as this repetition.

        This requires that every clock advanced as in the last repetition, all GPUs advance equally, and no host is
        slower than its GPU. A slower host that is still ahead would become the bottleneck later.
        """
        count = len(self.specs)
        cards, hosts = (list(filter(None, pace[start : start + count])) for start in (0, count))
        least_s, most_s = min(cards, default=0.0), max(cards, default=0.0)
        error_s = _STEADY * most_s
        alike = all(abs(one_s - other_s) <= error_s for one_s, other_s in zip(pace, last, strict=True))
        are_hosts_alike = max(hosts, default=0.0) - min(hosts, default=0.0) <= error_s
        return alike and most_s - least_s <= error_s and are_hosts_alike and max(hosts, default=0.0) <= most_s + error_s
