"""Predict DDP on a cluster: solve for unequal batch sizes, and extrapolate to more nodes.

Note [Identical ranks]
~~~~~~~~~~~~~~~~~~~~~~
All ranks of one kind of GPU are one entry of the solver. 512 A100s with s samples finish when the fullest of them has
computed ``ceil(s / 512)`` samples. So 4,096 ranks of three kinds are a problem of three devices, and the exact solver
(`fastest_split`) finds the same finish time as for 4,096 devices.

Note [Overlap with the backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
DDP collects gradients in buckets in the order of their arrival, and reduces a bucket when its last gradient has arrived
on all ranks (torch, csrc/distributed/c10d/reducer.cpp). Buckets are reduced one after the other::

    backward     ------1--------2--------3--------4|
    all-reduce          [--1--]  [--2--]  [--3--]  [--4--]
                                                   |exposed|

The last bucket can start only when the backward ends, so at least its all-reduce is exposed.

Note [Waits]
~~~~~~~~~~~~
No two ranks take exactly the same time, and each all-reduce waits for the slowest rank. With more nodes, the slowest of
them is slower. The time of the forward and backward grows by `WAITS` with each doubling of the nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autosplit.devices.device import Device
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError
from autosplit.sim.cluster import Cluster, ClusterPrediction, RankShare, check_options
from autosplit.sim.cluster_kinds import RankKind, measured_kinds
from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.solver import geometric
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import TimeCurve
from autosplit.solve.trial import KNEE_SHARE, LEAST_DIFFERENCE
from autosplit.text import counted_text

WAITS = 0.017
"""Fraction of the forward and backward that ranks wait for the slowest rank, for each doubling of the nodes.

The median over published FSDP steps on 16 to 128 GPUs, in which all communication overlaps with computation
(benchmarks/results/published_scaling.json).
"""

PAYS = 0.5
"""Scaling pays as long as each added GPU brings at least this fraction of the samples/s of an earlier GPU."""

LIMITED = 0.9
"""With at least this efficiency, the GPUs' compute time limits the step."""

MORE_STEPS = 4
"""How many numbers of accumulation steps to try beyond the fewest."""

SCALING_ERRORS = (
    "Errors of predicted scaling: for 14 published DDP steps on 2 and 4 nodes with 8 V100, the median error of the "
    "efficiency is 2 points, and the largest is 6 points. Their predicted samples/s are 1.06 to 1.35 times the "
    "published ones, so predicted hours may be 26% too low."
)
"""The measured errors of predictions for clusters, from benchmarks/results/published_scaling.json."""

_OF_SEARCH = ("n_trials", "sampler", "isolate", "profile", "name", "seed", "progress", "strategy")
"""Options of `tune` that change no prediction, because no trial runs."""


@dataclass(frozen=True)
class ClusterScaling:
    """Predictions for 1, 2, 4, ... nodes of a cluster, and for all nodes.

    Attributes:
        predictions: One prediction for each number of nodes, the whole cluster last.
    """

    cluster: Cluster
    predictions: tuple[ClusterPrediction, ...]
    notes: tuple[Note, ...] = ()

    @property
    def whole(self) -> ClusterPrediction:
        """The prediction for all nodes."""
        return self.predictions[-1]

    @property
    def pays_up_to(self) -> ClusterPrediction:
        """The prediction for the largest number of nodes at which adding GPUs still pays, see `PAYS`."""
        best = self.predictions[0]
        for one in self.predictions[1:]:
            gain = one.samples_per_s / best.samples_per_s - 1
            if gain < PAYS * (one.ranks / best.ranks - 1):
                return best
            best = one
        return best

    @property
    def summary(self) -> str:
        """Where scaling stops paying, and what limits it, as a sentence."""
        best = self.pays_up_to
        after = next((one for one in self.predictions if one.nodes > best.nodes), None)
        if after is None:
            size = counted_text(best.nodes, "node")
            return f"Scaling pays up to the whole cluster of {size}. There, {_named(best.limited_by)} limits the step."
        gain, size = after.samples_per_s / best.samples_per_s, counted_text(best.nodes, "node")
        return (
            f"Scaling pays up to {size}. {after.nodes} nodes have {gain:.2f}x the samples/s, "
            f"and {_named(after.limited_by)} limits the step."
        )

    @property
    def pays_up_to_nodes(self) -> int:
        """The largest number of nodes at which adding GPUs still pays."""
        return self.pays_up_to.nodes


def _named(limit: str) -> str:
    texts = {"compute": "the compute time", "batch size": "the batch size per GPU"}
    texts |= {"network": "the network", "slowest rank": "the slowest rank"}
    return texts.get(limit, f"the link between the {limit} of a node")


@dataclass(frozen=True)
class _Ranks:
    """The time of all ranks of one kind, for the solver. See Note [Identical ranks]."""

    curve: TimeCurve
    count: int

    def __call__(self, samples: int) -> float:
        return self.curve(-(-samples // self.count))

    def most_within(self, seconds: float, least: int, most: int) -> int:
        each = self.curve.most_within(seconds, -(-least // self.count), -(-most // self.count))
        return max(least, min(most, each * self.count))


def step_of(
    cluster: Cluster, kinds: Mapping[Device, RankKind], batch_sizes: Sequence[int], steps: int = 1
) -> tuple[float, float, float, float]:
    """Predict an optimizer step. See Note [Overlap with the backward] and Note [Waits].

    Args:
        batch_sizes: Batch size of a rank of each kind of the cluster.
        steps: Forwards per optimizer step. Only the last one's backward reduces gradients.

    Returns:
        Times in seconds: of the step, of all all-reduces, of the part of the all-reduces that the backward does not
        hide, and of waits for the slowest rank.
    """
    found = [kinds[device] for device in cluster.kinds]
    slower = 1 + WAITS * math.log2(cluster.nodes)
    seconds = [slower * kind.curve(size) for kind, size in zip(found, batch_sizes, strict=True)]
    computed_s = steps * max(seconds)
    reduced_s = all_s = 0.0
    for ready in zip(*(kind.buckets for kind in found), strict=False) if cluster.ranks > 1 else ():
        took_s = cluster.all_reduce_s(ready[0][1])
        ready_s = max((steps - 1 + at) * each for (at, _), each in zip(ready, seconds, strict=True))
        reduced_s, all_s = max(reduced_s, ready_s) + took_s, all_s + took_s
    exposed_s = max(0.0, reduced_s - computed_s)
    step_s = computed_s + exposed_s + max(kind.update_s for kind in found)
    return step_s, all_s, exposed_s, computed_s * (1 - 1 / slower)


def predicted(
    cluster: Cluster,
    kinds: Mapping[Device, RankKind],
    *,
    effective_batch_size: int | None = None,
    max_batch_size: int | None = None,
    least_batch: int = 1,
    accumulates: bool = True,
) -> ClusterPrediction | None:
    """Find the batch sizes with which all ranks finish together, and predict the step.

    Without an effective batch size, take the smallest batch with at least 97% of the highest samples/s, as `tune` does.

    Returns:
        The fastest prediction, or None if the samples are too few or too many for the ranks.
    """
    counts = cluster.kinds
    caps = [count * kinds[device].ceiling for device, count in counts.items()]
    floors = [count * least_batch for count in counts.values()]
    most = min(sum(caps), max_batch_size or sum(caps))
    if min(kinds[device].ceiling for device in counts) < least_batch or most < sum(floors):
        return None
    found = []
    for size, steps, effective in _sizes(effective_batch_size, sum(floors), most, accumulates=accumulates):
        times = [_Ranks(kinds[device].curve, count) for device, count in counts.items()]
        split = fastest_split(size, times, [min(cap, size) for cap in caps], floors)
        shares = tuple(
            RankShare(device.name, count, samples, kinds[device].ceiling)
            for (device, count), samples in zip(counts.items(), split, strict=True)
        )
        found.append(_prediction(cluster, kinds, shares, steps, effective))
    if not found:
        return None
    top = max(one.samples_per_s for one in found)
    enough = (KNEE_SHARE if effective_batch_size is None else 1 - LEAST_DIFFERENCE) * top
    return min(
        (one for one in found if one.samples_per_s >= enough),
        key=lambda one: (one.accumulation_steps, one.effective_batch_size),
    )


def _sizes(effective: int | None, least: int, most: int, *, accumulates: bool) -> Iterator[tuple[int, int, int]]:
    """Yield samples per forward, forwards, and samples per step. Forwards of one step differ by at most one sample."""
    if effective is None:
        yield from ((size, 1, size) for size in sorted({least, *geometric(most)}) if size >= least)
        return
    fewest = accumulation_steps(effective, most)
    for steps in range(fewest, fewest + MORE_STEPS + 1 if accumulates else 2):
        if effective // steps >= least:
            yield -(-effective // steps), steps, effective


def _prediction(
    cluster: Cluster, kinds: Mapping[Device, RankKind], shares: tuple[RankShare, ...], steps: int, effective: int
) -> ClusterPrediction:
    step_s, all_reduce_s, exposed_s, waits_s = step_of(cluster, kinds, [share.batch_size for share in shares], steps)
    ideal_s = effective / sum(count * kinds[device].samples_per_s for device, count in cluster.kinds.items())
    losses = {"batch size": step_s - exposed_s - waits_s - ideal_s, "slowest rank": waits_s}
    losses |= {cluster.slowest_link: exposed_s} if exposed_s else {}
    limited_by = max(losses, key=lambda name: losses[name]) if ideal_s < LIMITED * step_s else "compute"
    return ClusterPrediction(
        cluster.nodes,
        cluster.ranks,
        shares,
        steps,
        effective,
        step_s,
        all_reduce_s,
        exposed_s,
        waits_s,
        min(1.0, ideal_s / step_s),
        limited_by,
        effective / step_s,
    )


def scaled(
    cluster: Cluster, kinds: Mapping[Device, RankKind], notes: tuple[Note, ...] = (), **request: Any
) -> ClusterScaling:
    """Predict 1, 2, 4, ... nodes and the whole cluster. Nodes are taken in the order of the spec.

    Args:
        request: Other keywords of `predicted`.

    Raises:
        DoesNotFitError: The whole cluster can't train with these batch sizes.
    """
    doubled = itertools.takewhile(lambda nodes: nodes < cluster.nodes, (2**power for power in itertools.count()))
    counts = [*doubled, cluster.nodes]
    found = [predicted(cluster.first(nodes), kinds, **request) for nodes in counts]
    if found[-1] is None:
        wanted = request.get("effective_batch_size") or request.get("max_batch_size")
        ceilings = ", ".join(f"{kind.name} {kind.ceiling}" for kind in kinds.values())
        raise DoesNotFitError(
            f"{cluster.spec} can't train steps of {wanted or 'any number of'} samples. Its {cluster.ranks} ranks need "
            f"at least {request.get('least_batch', 1)} each, and fit at most: {ceilings}. Use a different number of "
            "samples, or other GPUs.",
        )
    return ClusterScaling(cluster, tuple(one for one in found if one is not None), notes)


def predict_cluster(
    model_or_workload: Any,
    sample_batch: Any = None,
    *,
    cluster: Cluster,
    effective_batch_size: int | None = None,
    max_batch_size: int | None = None,
    **options: Any,
) -> ClusterScaling:
    """Predict DDP on a cluster and on its first nodes. The arguments are those of `tune`.

    Raises:
        InputError: An argument is invalid, or predictions for clusters can't use it.
        DoesNotFitError: The workload does not fit.
    """
    check_options(cluster, {**options, "effective_batch_size": effective_batch_size})
    used = {name: value for name, value in options.items() if name not in _OF_SEARCH}
    kinds, limits, notes = measured_kinds(
        model_or_workload, sample_batch, tuple(cluster.kinds), progress=options.get("progress"), **used
    )
    limits |= {"effective_batch_size": effective_batch_size, "max_batch_size": max_batch_size}
    return scaled(cluster, kinds, notes, **limits)
