"""Compare predicted scaling over nodes with published steps, and predicted all-reduces with measured ones.

    python benchmarks/published_scaling.py [--output FILE]

The tables are `published_scaling.csv` and `published_all_reduce.csv`. Each row names its source. Efficiency is
samples/s per node, divided by samples/s per node at the fewest published nodes. One number is fitted, to the rows of
FSDP: `cluster_prediction.WAITS`, the median of their losses per doubling of the nodes. The rows of DDP are held out.

"buckets" are steps of DistributedDataParallel: torch's in pytorch/examples, and apex's with buckets of 40 MB in
NVIDIA's script. "one message" are steps whose script reduces all gradients after the backward: apex with messages of
250 million elements, more than BERT has. Its fp16 gradients have two bytes (opt_level "O2" in run_pretraining.py of
github.com/NVIDIA/DeepLearningExamples). "fsdp" are steps of FSDP, which autosplit does not
predict. They check the model of the network: the compute time is the published step at the fewest nodes without its
exposed traffic. FSDP moves 3 x 2 bytes per parameter in bfloat16 (two all-gathers and a reduce-scatter), as much as an
all-reduce of 3 bytes per parameter.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from autosplit.sim.cluster import Cluster, parse_cluster
from autosplit.sim.cluster_kinds import RankKind, buckets_of, even_arrivals, measured_kinds
from autosplit.sim.cluster_prediction import ClusterScaling, scaled, step_of
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.solve.step_time import TimeCurve
from autosplit.workload.workload import Workload

TABLE = Path(__file__).with_name("published_scaling.csv")
ALL_REDUCES = Path(__file__).with_name("published_all_reduce.csv")
RESULTS = Path(__file__).parent / "results" / "published_scaling.json"

STABLE_DIFFUSION = {2: 0.99, 4: 0.947, 8: 0.89, 16: 0.789, 32: 0.63}
"""Published efficiency of Stable Diffusion 2 by nodes, each with 8 A100-40GB (github:mosaicml/diffusion-benchmark).

The effective batch size is always 2,048, in micro-batches of 4 per GPU. One node has 128.2 images/s. The U-Net has 866
million parameters. The network is not stated, so no row counts in the summary.
"""

NOT_COMPARED = (
    "Stable Diffusion 2 on 16 to 256 A100 (github:mosaicml/diffusion-benchmark): the network is not stated",
    "BERT on 4 to 32 GPUs (github:yifding/hetseq): GPU and network are not stated",
    "GPT 1.3B on 4 nodes, 3.9 times one node (simonwillison.net/2022/Sep/24/linden-li): the GPU is not stated",
    "MPT on H100 (github:mosaicml/llm-foundry): the network is not stated",
)

LARGE = "sim:256x(8xA100-80GB)+192x(8xL40S)+128x(4xL4)@8x100Gbps"
"""A cluster of 4,096 GPUs of three kinds, to time a prediction."""


@dataclass(frozen=True)
class Row:
    """A published throughput. `batch` is per GPU."""

    source: str
    model: str
    gpu: str
    gpus_per_node: int
    network: str
    batch: int
    precision: str
    reduced: str
    parameters: int
    nodes: int
    samples_per_s: float

    def cluster(self) -> Cluster:
        """Return the cluster of the row."""
        return parse_cluster(f"sim:{self.nodes}x({self.gpus_per_node}x{self.gpu})@{self.network}")

    @property
    def group(self) -> tuple[Any, ...]:
        """Key of the rows that differ only in the number of nodes."""
        return self.source, self.model, self.batch, self.precision


def rows() -> list[Row]:
    """Read the table."""
    numbers = {"gpus_per_node": int, "batch": int, "parameters": int, "nodes": int, "samples_per_s": float}
    with TABLE.open(encoding="utf-8") as file:
        return [
            Row(**{**row, **{name: convert(row[name] or 0) for name, convert in numbers.items()}})
            for row in csv.DictReader(file)
        ]


def workload(row: Row) -> Workload:
    """Build the training step of a row, without memory."""
    if row.model == "resnet50":

        def model() -> torch.nn.Module:
            return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))

        batch: dict[str, Tensor] = {
            "pixel_values": torch.zeros(2, 3, 224, 224),
            "labels": torch.zeros(2, dtype=torch.long),
        }
        optimizer: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    else:

        def model() -> torch.nn.Module:
            return transformers.BertForPreTraining(transformers.BertConfig(vocab_size=30528))

        tokens = torch.zeros(2, 128, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens, "next_sentence_label": torch.zeros(2, dtype=torch.long)}
        optimizer = partial(torch.optim.AdamW, fused=True)
    return Workload(built_without_memory(model, fake_mode()), batch, optimizer=optimizer, precision=row.precision)


def kind_of(first: Row) -> RankKind:
    """Measure the GPU of the rows of a group. `first` has the fewest nodes."""
    (device,) = first.cluster().kinds
    if first.reduced == "fsdp":
        buckets = buckets_of(even_arrivals(3 * first.parameters))
        published_s = first.batch * first.gpus_per_node * first.nodes / first.samples_per_s
        curve = TimeCurve(((first.batch, published_s),))
        kind = RankKind(device.name, first.batch, curve, 0.0, buckets)
        _, _, exposed_s, waits_s = step_of(first.cluster(), {device: kind}, [first.batch])
        own_s = (published_s - exposed_s) / (1 + waits_s / published_s)
        return replace(kind, curve=TimeCurve(((first.batch, own_s),)))
    kind = measured_kinds(workload(first), None, [device])[0][device]
    if first.reduced == "one message":
        nbytes = sum(nbytes for _, nbytes in kind.buckets) // (2 if first.precision == "fp16" else 1)
        kind = replace(kind, buckets=((1.0, nbytes),))
    return kind


def compared(group: list[Row]) -> Iterator[dict[str, Any]]:
    """Yield the published and the predicted efficiency of each number of nodes but the fewest."""
    first, *others = sorted(group, key=lambda row: row.nodes)
    kind = kind_of(first)

    def predicted_rate(row: Row) -> float:
        cluster = row.cluster()
        step_s = step_of(cluster, dict.fromkeys(cluster.kinds, kind), [row.batch])[0]
        return cluster.ranks * row.batch / step_s

    for row in others:
        times = row.nodes / first.nodes
        published = row.samples_per_s / first.samples_per_s / times
        predicted = predicted_rate(row) / predicted_rate(first) / times
        yield {
            "model": f"{row.model}, batch {row.batch}, {row.precision}",
            "gpus": f"{row.gpus_per_node} x {row.gpu} per node, {row.network}",
            "reduced": row.reduced,
            "nodes": f"{first.nodes} to {row.nodes}",
            "published": round(published, 3),
            "predicted": round(predicted, 3),
            "loss per doubling": round((1 - published) / math.log2(times), 4),
            "points off": round(100 * (predicted - published), 1),
            "samples/s, predicted / published": round(predicted_rate(row) / row.samples_per_s, 3),
            "source": row.source,
        }


def all_reduces() -> list[dict[str, Any]]:
    """Compare the seconds of all-reduces."""
    found = []
    with ALL_REDUCES.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cluster, nbytes = parse_cluster(row["cluster"]), int(row["bytes"])
            share = 2 * (cluster.ranks - 1) / cluster.ranks
            published_s = share * nbytes / (float(row["bus_gb_per_s"]) * 1e9)
            ratio = cluster.all_reduce_s(nbytes) / published_s
            found.append({"cluster": cluster.spec, "MiB": nbytes / 2**20, "time ratio": round(ratio, 2)})
    return found


def stable_diffusion() -> list[dict[str, Any]]:
    """Predict the efficiency of Stable Diffusion 2 for several networks, because the network is not stated."""
    found = []
    for rate in (50, 100, 200, 400, 1600):
        whole = parse_cluster(f"sim:32x(8xA100-40GB)@{rate}Gbps")
        curve = TimeCurve(((4, 4 * 8 / 128.2),))
        kinds = dict.fromkeys(
            whole.kinds, RankKind("A100-40GB", 4, curve, 0.0, buckets_of(even_arrivals(866_000_000 * 4)))
        )

        def rate_of(nodes: int, whole: Cluster = whole, kinds: Any = kinds) -> float:
            return 2048 / step_of(whole.first(nodes), kinds, [4], 2048 // (4 * 8 * nodes))[0]

        predicted = {nodes: round(rate_of(nodes) / rate_of(1) / nodes, 3) for nodes in STABLE_DIFFUSION}
        off = max(100 * abs(predicted[nodes] - published) for nodes, published in STABLE_DIFFUSION.items())
        found.append({"network": f"{rate}Gbps", "predicted": predicted, "largest points off": round(off, 1)})
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the errors, also of the prediction that every added node brings as much as the first."""
    off = [abs(row["points off"]) for row in found]
    none = [100 * (1 - row["published"]) for row in found]
    return {
        "rows": len(found),
        "within 10 points": sum(one <= 10 for one in off),
        "median points off": round(statistics.median(off), 1),
        "largest points off": max(off),
        "largest points off of perfect scaling": round(max(none), 1),
        "within 10 points of perfect scaling": sum(one <= 10 for one in none),
    }


def large() -> dict[str, Any]:
    """Time the prediction of BERT on 4,096 GPUs of three kinds."""
    cluster, begin_s = parse_cluster(LARGE), time.monotonic()
    step = workload(next(row for row in rows() if row.model == "bert-base"))
    kinds, limits, _ = measured_kinds(step, None, tuple(cluster.kinds))
    measured_s = time.monotonic() - begin_s
    found: ClusterScaling = scaled(cluster, kinds, effective_batch_size=2**18, **limits)
    return {
        "cluster": cluster.spec,
        "ranks": cluster.ranks,
        "entries solved": len(found.whole.shares),
        "s to trace and time three GPUs": round(measured_s, 1),
        "s to solve all numbers of nodes": round(time.monotonic() - begin_s - measured_s, 2),
        "summary": found.summary,
    }


def main() -> None:
    """Compare all rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    groups = itertools.groupby(rows(), key=lambda row: row.group)
    found = [one for _, group in groups for one in compared(list(group))]
    ways = {way: [row for row in found if row["reduced"] == way] for way in ("buckets", "one message", "fsdp")}
    ways["ddp"] = ways["buckets"] + ways["one message"]
    report = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
        "summary": {"all": summary(found), **{way: summary(some) for way, some in ways.items()}},
        "median loss per doubling, fsdp": round(statistics.median(row["loss per doubling"] for row in ways["fsdp"]), 4),
        "compared": found,
        "all-reduces": all_reduces(),
        "stable diffusion 2": {"published": STABLE_DIFFUSION, "by network": stable_diffusion()},
        "4,096 ranks": large(),
        "not compared": list(NOT_COMPARED),
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
