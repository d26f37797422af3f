"""Describe a cluster of simulated machines, and compute the time of an all-reduce between its GPUs.

``sim:4x(8xA100-80GB)+2x(4xL40S)@8x100Gbps`` has four nodes with 8 GPUs, and two nodes with 4 GPUs. The network connects
each node at 8 x 100 Gbit/s. Identical GPUs are one entry, so the number of nodes costs nothing.

Note [All-reduce]
~~~~~~~~~~~~~~~~~
NCCL reduces a message over a ring or over a double binary tree, and takes the faster one. With n GPUs in N nodes of g
GPUs, S bytes per message, and B bytes/s over the slowest link::

    ring   start + 2 (N - 1) (hop + (g - 1) step) + 2 (n - 1) / n * S / B       Patarasuk and Yuan 2009
    tree   start + 2 ceil(log2 N) hop             + 2 S / (0.9 B)               Sanders, Speck and Traff 2009

Each of NCCL's rings enters and leaves each node once. So a node's whole network bandwidth, which its GPUs share, counts
as one link. The ring is as fast as a reduction inside the nodes, then between them, then back (hierarchical). NCCL
chooses between them with these hops, steps and the factor 0.9 (github.com/NVIDIA/nccl, src/graph/tuning.cc).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosplit.devices.device import Device
from autosplit.devices.spec import sim_item
from autosplit.errors import DeviceError, InputError, shown

MOST_RANKS = 2**20
"""Maximum number of GPUs of a cluster. A larger number is a typing error."""

START_S = 1.1e-4
"""Fixed time of an all-reduce in one node: its whole time, minus the time of its bytes at the rate of long messages.

For 32 MiB it is 0.17 ms on 8 A100, 0.09 ms on 8 H200, and 0.11 ms on 8 B200 (github.com/stas00/ml-engineering,
network/README.md).
"""

NETWORK_SHARE = 0.95
"""Fraction of a network's rate that long messages reach.

4 nodes with 8 B200 reach 382 of 400 GB/s (github.com/stas00/ml-engineering, network/README.md).
"""

TREE_SHARE = 0.9
"""Fraction of a link's rate that a tree reaches (NCCL, src/graph/tuning.cc)."""

PCIE_BYTES_PER_S = 63e9
"""Rate of PCI Express 5.0 x16. Faster links between GPUs are NVLink or similar."""

_REFUSED = ("checkpointing", "lengths", "loader")
"""Options of `tune` that predictions for clusters can't use."""

_EXPECTED = "Expected a spec such as sim:4x(8xA100-80GB)+2x(4xL40S)@100Gbps."

_GROUP = r"\s*(?:([0-9]{1,7})\s*[xX*])?\s*\(([^()]*)\)\s*"

_NETWORKS = {"QDR": 32.0, "FDR": 54.0, "EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}
"""Data rates of InfiniBand with four lanes, in Gbit/s (InfiniBand Trade Association, roadmap)."""


@dataclass(frozen=True)
class NodeGroup:
    """Identical nodes.

    Attributes:
        nodes: Number of nodes.
        gpus: The GPUs of one node, as pairs of a number and a GPU.
    """

    nodes: int
    gpus: tuple[tuple[int, Device], ...]

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs in one node."""
        return sum(count for count, _ in self.gpus)


@dataclass(frozen=True)
class _Hops:
    """Time in seconds that a ring or a tree needs between two nodes, and a ring between two GPUs of a node."""

    ring_s: float
    tree_s: float
    step_s: float


_NVLINK_HOPS, _PCIE_HOPS = _Hops(4.0e-6, 8.5e-6, 1.9e-6), _Hops(9.6e-6, 50e-6, 5.7e-6)
"""Latencies of NCCL's protocols LL128, which needs NVLink, and Simple (NCCL, src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of simulated GPUs and the network between them.

    Attributes:
        network_bytes_per_s: Line rate between a node and the network in one direction. None for a single node.
    """

    spec: str
    groups: tuple[NodeGroup, ...]
    network_bytes_per_s: float | None

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(group.nodes for group in self.groups)

    @property
    def ranks(self) -> int:
        """Number of GPUs, each with one rank."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[Device, int]:
        """The number of ranks of each kind of GPU, in the order of the spec."""
        found: Counter[Device] = Counter()
        for group in self.groups:
            for count, device in group.gpus:
                found[device] += group.nodes * count
        return dict(found)

    def first(self, nodes: int) -> Cluster:
        """Return the cluster of the first nodes, in the order of the spec."""
        groups = []
        for group in self.groups:
            taken = min(nodes, group.nodes)
            nodes -= taken
            groups += [replace(group, nodes=taken)] if taken else []
        return replace(self, groups=tuple(groups))

    @property
    def slowest_link(self) -> str:
        """The link that limits long messages: ``"network"``, or the GPU behind the slowest link inside a node."""
        return min(self._links_bytes_per_s().items(), key=lambda link: link[1])[0]

    def all_reduce_s(self, nbytes: int) -> float:
        """Return the time of one all-reduce of `nbytes` over all ranks, in seconds. See Note [All-reduce]."""
        nodes, ranks = self.nodes, self.ranks
        if ranks == 1:
            return 0.0
        rate = min(self._links_bytes_per_s().values())
        links = [device.spec.link_bytes_per_s for device in self.kinds if device.spec is not None]
        hops = _NVLINK_HOPS if min(links) > PCIE_BYTES_PER_S else _PCIE_HOPS
        width = max(group.gpus_per_node for group in self.groups)
        ring_s = 2 * (nodes - 1) * (hops.ring_s + (width - 1) * hops.step_s) + 2 * (ranks - 1) / ranks * nbytes / rate
        tree_s = 2 * math.ceil(math.log2(nodes)) * hops.tree_s + 2 * nbytes / (TREE_SHARE * rate)
        return START_S + min(ring_s, tree_s)

    def _links_bytes_per_s(self) -> dict[str, float]:
        links = {} if self.network_bytes_per_s is None else {"network": NETWORK_SHARE * self.network_bytes_per_s}
        if self.nodes == 1:
            links = {}
        for group in self.groups:
            for _, device in group.gpus if group.gpus_per_node > 1 else ():
                assert device.spec is not None, "a cluster has simulated GPUs"
                links[device.name] = device.spec.link_bytes_per_s
        return links


def is_cluster(spec: Any) -> bool:
    """Return whether a device spec is a cluster."""
    return isinstance(spec, Cluster) or (isinstance(spec, str) and "(" in spec)


def parse_cluster(spec: str | Cluster) -> Cluster:
    """Parse a cluster, such as ``sim:4x(8xA100-80GB)+2x(4xL40S)@100Gbps``.

    Args:
        spec: Node groups, joined by ``+``. The parentheses contain the GPUs of a node, as in other ``sim:`` specs. The
            rate between a node and the network follows ``@``: ``100Gbps``, ``8x400Gbps`` (eight ports), or an
            InfiniBand generation, as in ``8xNDR``. A single node needs no rate.

    Raises:
        DeviceError: The spec cannot be parsed, has an unknown GPU, no rate between its nodes, or too many GPUs.
    """
    if isinstance(spec, Cluster):
        return spec
    name = " ".join(spec.split())
    kind, _, text = name.partition(":")
    body, close, rest = text.rpartition(")")
    body += close
    if kind.strip().lower() != "sim" or not re.fullmatch(rf"{_GROUP}(?:\+{_GROUP})*", body):
        raise DeviceError(f"Device spec {shown(name)} is not a cluster of simulated GPUs. {_EXPECTED} Correct it.")
    groups = []
    for count, node in re.findall(_GROUP, body):
        gpus = tuple(sim_item(item.strip(), name) for item in node.split("+"))
        groups.append(NodeGroup(int(count or 1), gpus))
    cluster = Cluster(name, tuple(groups), _network(rest.strip(), name))
    _check_counts(cluster)
    return cluster


def _check_counts(cluster: Cluster) -> None:
    if not all(group.nodes for group in cluster.groups) or cluster.ranks > MOST_RANKS:
        raise DeviceError(
            f"Cluster {shown(cluster.spec)} has {cluster.ranks} GPUs. Expected at least one node in each group, and at "
            f"most {MOST_RANKS} GPUs. Correct the counts."
        )
    if cluster.nodes > 1 and cluster.network_bytes_per_s is None:
        raise DeviceError(
            f"Cluster {shown(cluster.spec)} has {cluster.nodes} nodes, and no rate of the network between them. Add "
            "the rate of one node, such as @100Gbps, @8x400Gbps or @8xNDR."
        )


def _network(text: str, spec: str) -> float | None:
    if not text:
        return None
    found = re.fullmatch(r"@\s*(?:([0-9]{1,3})\s*[xX]\s*)?(?:([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*Gbps|([A-Z]{3}))", text)
    gbps = 0.0 if found is None else float(found[2] or _NETWORKS.get(found[3], 0.0)) * int(found[1] or 1)
    if not gbps:
        raise DeviceError(
            f"The network {shown(text)} in {shown(spec)} is not a rate. Expected Gbit/s of one node, such as @100Gbps "
            f"or @8x400Gbps, or one of {', '.join(_NETWORKS)}, such as @8xNDR. Correct it."
        )
    return gbps * 1e9 / 8


def check_options(cluster: Cluster, options: Mapping[str, Any]) -> None:
    """Raise InputError for options of `tune` that predictions for clusters can't use."""
    for name, value in options.items():
        several = isinstance(value, (tuple, list)) or (isinstance(value, str) and ("," in value or ":" in value))
        refused = name in _REFUSED or (several and name in ("precision", "effective_batch_size"))
        if value is not None and (refused or (name, value) == ("strategy", "balanced")):
            raise InputError(
                f"{name} is {shown(value)}, but {cluster.spec} is a cluster. Clusters train with DDP, one precision "
                "and one effective batch size. Leave that option out, or compare without clusters."
            )


@dataclass(frozen=True)
class RankShare:
    """The batch sizes of all ranks of one kind.

    Attributes:
        gpu: Name of the GPU.
        ranks: Number of ranks.
        samples: Samples per forward of all these ranks together.
        ceiling: Largest batch size that fits on one rank.
    """

    gpu: str
    ranks: int
    samples: int
    ceiling: int

    @property
    def batch_size(self) -> int:
        """Largest batch size of these ranks. The smallest is at most one sample less."""
        return -(-self.samples // self.ranks)


@dataclass(frozen=True)
class ClusterPrediction:
    """A predicted optimizer step of DDP on a cluster.

    Attributes:
        nodes: Number of nodes.
        ranks: Number of GPUs.
        shares: The batch sizes of each kind of GPU. A later micro-step of a step may have one sample less in total.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step, exact.
        step_s: Time of an optimizer step, in seconds.
        all_reduce_s: Time of all buckets' all-reduces, in seconds.
        exposed_s: Time of the all-reduces that the backward does not hide, in seconds.
        waits_s: Time in seconds during which ranks wait for the slowest rank.
        efficiency: samples/s, relative to GPUs that never wait and have their fastest batch size.
        limited_by: ``"compute"``, ``"batch size"`` (too few samples per rank, and the optimizer), ``"slowest rank"``,
            or the link that limits the all-reduce: ``"network"``, or the name of a GPU with slow links in its node.
        samples_per_s: Throughput of whole optimizer steps.
    """

    nodes: int
    ranks: int
    shares: tuple[RankShare, ...]
    accumulation_steps: int
    effective_batch_size: int
    step_s: float
    all_reduce_s: float
    exposed_s: float
    waits_s: float
    efficiency: float
    limited_by: str
    samples_per_s: float
