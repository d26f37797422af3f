"""A job on a local Ray cluster, for tests/integrations/test_integrations_ray.py: python ray_jobs.py FOLDER.

It runs in a separate process, because Ray leaves threads and sockets open. Starting nodes and workers costs seconds, so
one job tunes once, and trains with the plan twice: with as many workers as the plan has, and with one or two. It saves
its results to FOLDER/found.pt. In the folder of a training, every worker appends a line to `log` for each optimizer
step that it has reported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from handmade import changed_plan, on_devices
from marks import FOR_RELEASE
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F

import autosplit
from autosplit.integrations import ray as autosplit_ray
from autosplit.integrations.ray import MEMORY_LABEL
from autosplit.plan.plan import Plan
from autosplit.tools.other_devices import RankDevice, plan_for_devices

NUM_SAMPLES, EFFECTIVE, SIZES = 200, 48, (9, 3)
"""Samples of an epoch (four steps of 48 and one of 8), samples per optimizer step, and per forward on each device."""

EPOCHS, LEAVES_AT, JOINS_AT = 2, 6, 8
"""Epochs, and the optimizer steps after which a node is killed and after which another joins, in the second epoch."""

LARGE, SMALL = "1MiB", "512KiB"
TRAINING = "training"
"""Ray resource of the nodes that train. An elastic job counts nodes without the label, but not without the resource."""

OPTIONS: dict[str, Any] = {
    "effective_batch_size": EFFECTIVE,
    "max_batch_size": sum(SIZES),
    "n_trials": 1,
    "profile": "off",
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).double()


def made_data() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)
    return [(row, row.sum().gt(0).long(), number) for number, row in enumerate(inputs)]


def workload(model: nn.Module | None = None) -> autosplit.Workload:
    inputs, targets, _ = zip(*made_data()[:8], strict=True)
    batch = torch.stack(inputs), torch.stack(targets)
    return autosplit.Workload(model or make_model(), batch, F.cross_entropy, optimizer=torch.optim.AdamW)


def train(config: dict[str, Any]) -> None:
    """Train as in docs/ray.md. In one step, the worker with less memory waits until it is killed.

    In another step, a worker without others waits until Ray stops it to add a worker.
    """
    folder = Path(config["folder"])
    with autosplit_ray.setup(config["plan"]) as ctx:
        model = ctx.wrap(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = ctx.loader(made_data(), shuffle=True, seed=3)
        parts = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
        start = done = autosplit_ray.resume(ctx, **parts).get("done", 0)
        size, memory = ctx.seat.samples, ctx.plan.devices[ctx.rank].memory_bytes
        for epoch in range(loader.batch_sampler.epoch, EPOCHS):
            loader.batch_sampler.set_epoch(epoch)
            for step in ctx.steps(loader):
                ids = []
                for inputs, targets, numbers in step:
                    step.backward(F.cross_entropy(model(inputs), targets))
                    ids += numbers.tolist()
                    if (done == LEAVES_AT and memory < 2**20) or (done == JOINS_AT and ctx.world_size == 1):
                        stops(folder / f"after_{done}")
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                autosplit_ray.report(ctx, {"done": done}, done=done, **parts)
                line = {"start": start, "done": done, "size": size, "ids": ids, "memory": memory}
                with (folder / "log").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
        if ctx.rank == 0:
            torch.save(model.module.state_dict(), folder / "weights.pt")


def stops(marker: Path) -> None:
    """Tell the driver that the step has begun, and wait to be killed. A restarted worker does not wait again."""
    if not marker.exists():
        ray.train.get_all_reported_checkpoints()  # blocks until Ray has registered the last one
        marker.touch()
        time.sleep(600)


def in_one_process() -> dict[str, torch.Tensor]:
    """Return the weights of a single process from whole optimizer steps in the same order."""
    model, data = make_model(), made_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = planned((EFFECTIVE,))
    sampler = plan.batch_sampler(NUM_SAMPLES, shuffle=True, seed=3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in sampler:
            inputs, targets, _ = zip(*(data[number] for number in batch), strict=True)
            F.cross_entropy(model(torch.stack(inputs)), torch.stack(targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def planned(sizes: tuple[int, ...], plan: Plan | None = None) -> Plan:
    """Return a plan with these batch sizes, so that a test does not depend on measured times."""
    from shared_training import shares_plan

    if plan is None:
        return shares_plan(sizes, EFFECTIVE)
    assert plan.ddp is not None
    seats = tuple(replace(seat, samples=size) for seat, size in zip(plan.ddp.seats, sizes, strict=True))
    steps = -(-EFFECTIVE // sum(sizes))
    return replace(plan, layouts=(replace(plan.ddp, seats=seats, accumulation_steps=steps),))


def tuned(make: Any, folder: Path) -> Plan:
    """Tune over both nodes, with one trial."""
    selectors = [{MEMORY_LABEL: LARGE}, {MEMORY_LABEL: SMALL}]
    options = {"scaling_config": ScalingConfig(num_workers=2, label_selector=selectors), **OPTIONS}
    return autosplit_ray.tune(make, run_config=RunConfig(storage_path=str(folder / "runs")), **options)


def trained(plan: Plan, folder: Path, scaling: ScalingConfig) -> None:
    config = {"plan": plan, "folder": str(folder)}
    run = RunConfig(storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=3))
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def add_node(cluster: Cluster, memory: str) -> Any:
    return cluster.add_node(num_cpus=1, resources={TRAINING: 1}, labels={MEMORY_LABEL: memory})


def trained_while_killed(
    cluster: Cluster, node: Any, folder: Path, plan: Plan, scaling: ScalingConfig, *, joins_at: int
) -> Any:
    """Train, and kill a node as soon as its worker waits. After the step `joins_at`, start a node with its label.

    Returns:
        The new node.
    """
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:  # Ray starts nodes only in the main thread
        run = pool.submit(trained, plan, folder, scaling)
        wait_for(folder / f"after_{LEAVES_AT}", run)
        cluster.remove_node(node, allow_graceful=False)
        wait_for(folder / f"after_{joins_at}", run)
        joined = add_node(cluster, SMALL)
        run.result()
    return joined


def wait_for(marker: Path, run: Future[None]) -> None:
    while not marker.exists():
        assert not run.done(), run.result()
        time.sleep(0.1)


def error_of(call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """Return the class and the message of the error that a call raises in the driver."""
    try:
        call(*args, **options)
    except autosplit.AutosplitError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def selectors_of_gpus(plan: Plan) -> list[Any]:
    """Return the label selectors of a plan for two GPUs: by default, with other labels, elastic, and for three."""
    names = ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB")
    gpus = tuple(replace(one, kind="cuda", name=name) for one, name in zip(plan.devices, names, strict=True))
    plan, config = on_devices(plan, *gpus), autosplit_ray.scaling_config
    labels = {names[0]: {"gpu": "a100-40"}}
    found = [config(plan), config(plan, labels=labels), config(plan, (1, 2)), config(plan, 3)]
    assert all(one.use_gpu for one in found)
    return [one.label_selector for one in found]


def refused(plan: Plan) -> list[str]:
    """Return the messages of the errors for a plan without times, a step that does not fit, and a sharded model."""
    cases = (
        (changed_plan(plan, cost=None), 3),
        (replace(plan, accumulates=False, max_batch_size=EFFECTIVE - 1), (1, 2)),
        (changed_plan(plan, shard_size=2), (1, 2)),
    )
    return [error_of(autosplit_ray.scaling_config, *case)[1] for case in cases]


def found_on(cluster: Cluster, node: Any, folder: Path) -> dict[str, Any]:
    """Tune over both nodes, and train with unequal batches while a node is killed and replaced.

    Then train with two workers, with one after a node was killed, and with two after a node has joined.
    """
    plan = tuned(workload, folder)
    unequal = planned(SIZES, plan)
    own = autosplit_ray.scaling_config(unequal)
    if FOR_RELEASE:  # the elastic job is killed at the same step, and gets the same node back later
        node = trained_while_killed(cluster, node, folder / "replaced", unequal, own, joins_at=LEAVES_AT)
    cluster.add_node(num_cpus=1)  # an idle node of other users
    options = {"resources_per_worker": {"CPU": 1, TRAINING: 1}, "elastic_resize_monitor_interval_s": 1}
    any_number = autosplit_ray.scaling_config(unequal, (1, 2), **options)
    trained_while_killed(cluster, node, folder / "elastic", unequal, any_number, joins_at=JOINS_AT)
    large = nn.Sequential(nn.Linear(16, 800), nn.Linear(800, 4)).double()
    return {
        "plan": plan.to_json(),
        "alone": plan_for_devices(unequal, [RankDevice("cpu", "cpu", budget_bytes=2**20)]).split,
        "selectors": selectors_of_gpus(unequal),
        "refused": refused(unequal),
        "errors": [error_of(tuned, lambda: workload(large), folder), error_of(autosplit_ray._budget, "2048MiB")],
        "weights": in_one_process(),
    }


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        add_node(cluster, LARGE)
        node = add_node(cluster, SMALL)
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
        torch.save(found_on(cluster, node, folder), folder / "found.pt")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
