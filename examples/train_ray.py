"""Tune and train the character-level GPT with Ray Train on two nodes with different devices.

    python examples/train_ray.py

This command starts a local Ray cluster of two nodes, CPUs with 512 MiB and with 256 MiB. On your own cluster, call
``ray.init()`` instead of `local_cluster`, and choose a storage path that all nodes can write to.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import torch
from char_gpt import CharGPT, Snippets, next_character_loss, workload
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from autosplit.integrations import ray as autosplit_ray
from autosplit.integrations.ray import MEMORY_LABEL

STEPS = 20


def train(config: dict[str, Any]) -> None:
    """Train as one worker. If the run was interrupted, continue at the last checkpoint."""
    torch.manual_seed(0)
    with autosplit_ray.setup(config["plan"]) as ctx:
        model = ctx.wrap(CharGPT())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = ctx.loader(Snippets(), shuffle=True)
        parts = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
        autosplit_ray.resume(ctx, **parts)
        for step in ctx.steps(loader, device=ctx.device):
            for inputs, targets in step:
                step.backward(next_character_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.index % 10 == 9:
                autosplit_ray.report(ctx, {"loss": step.loss}, **parts)
            if step.index + 1 == STEPS:
                break


def local_cluster() -> Cluster:
    """Start two Ray nodes on this machine. On a real node: ray start --address=... --labels=autosplit/memory=512MiB."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for memory in ("512MiB", "256MiB"):
        cluster.add_node(num_cpus=1, labels={MEMORY_LABEL: memory})
    return cluster


if __name__ == "__main__":
    cluster = local_cluster()
    ray.init(address=cluster.address)
    storage = tempfile.mkdtemp()
    nodes = ScalingConfig(num_workers=2, label_selector=[{MEMORY_LABEL: "512MiB"}, {MEMORY_LABEL: "256MiB"}])
    size: dict[str, Any] = {"effective_batch_size": 32, "max_batch_size": 32, "n_trials": 2}
    plan = autosplit_ray.tune(workload, scaling_config=nodes, run_config=RunConfig(storage_path=storage), **size)
    print(plan)
    scaling = autosplit_ray.scaling_config(plan)
    run = RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3))
    trainer = TorchTrainer(train, train_loop_config={"plan": plan}, scaling_config=scaling, run_config=run)
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.3f}, the checkpoint is in {result.checkpoint.path}")
    ray.shutdown()
    cluster.shutdown()
