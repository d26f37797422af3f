"""Write the job file of a plan for Slurm, Kubeflow Trainer or SkyPilot.

The ranks of a plan are numbered by machine, so every file starts the machines in the plan's order. If a machine lacks
the planned GPUs, `autosplit.ddp.setup` raises DeviceError on it.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.devices.catalog import find_card
from autosplit.errors import DeviceError, PlanError
from autosplit.plan.record import PlanRecord
from autosplit.plan.torchrun import PLAN_VARIABLE, trainable_ranks
from autosplit.text import printable, tuple_text

NAME = "autosplit"

SCRIPT = "train.py"
"""Placeholder for the user's script in command lines."""

REQUIREMENTS = "requirements.txt"
"""Placeholder for the list of packages that the user's script needs."""

PORT = 29500
"""Port at which rank 0 listens: torchrun's default."""

_MOUNT = "/etc/autosplit"
_GPU_RESOURCES = {"cuda": "nvidia.com/gpu", "xpu": "gpu.intel.com/i915", "npu": "huawei.com/Ascend910"}
"""GPU resource names in Kubernetes, by device kind. The vendors' device plugins define them."""


@dataclass(frozen=True)
class Machines:
    """Consecutive machines of a plan with equal devices.

    Attributes:
        gpu: Name of the machine's GPUs, as the driver reports it. None on CPUs.
    """

    first: int
    count: int
    ranks: int
    gpu: str | None


def machines_of(plan: PlanRecord, counts: Sequence[int]) -> tuple[Machines, ...]:
    """Group the machines of a plan by their devices.

    Args:
        counts: Ranks of each machine.

    Raises:
        DeviceError, PlanError: The plan is for simulated GPUs, has no ranks, or mixes GPUs on one machine.
    """
    trainable_ranks(plan)
    devices = iter(plan.devices)
    found: list[tuple[int, str | None]] = []
    for count in counts:
        names = {device.name for device in itertools.islice(devices, count)}
        on_cpu = plan.devices[0].kind == "cpu"
        if len(names) > 1 and not on_cpu:
            raise PlanError(
                f"a machine of the plan has {' and '.join(sorted(names))}. Cluster managers ask for GPUs of one kind "
                "on each machine. Start the job with autosplit launch on the machine itself.",
            )
        found.append((count, None if on_cpu else names.pop()))
    groups, first = [], 0
    for (ranks, gpu), same in itertools.groupby(found):
        number = len(list(same))
        groups.append(Machines(first, number, ranks, gpu))
        first += number
    return tuple(groups)


# ------------------------------------------------------------------------------------------------------------- Slurm


def sbatch_file(machines: Sequence[Machines], plan_file: Path) -> str:
    """Return a batch script for Slurm. Machines of several kinds become a heterogeneous job.

    Equal machines run one task for each rank. In a heterogeneous job, each machine runs torchrun. Its ``SLURM_NODEID``
    counts the nodes of all components, so the machines keep the plan's order. The batch script runs on the first node
    of the first component. So `hostname` is the address of rank 0, and ``scontrol`` is not needed.
    """
    mixed = len(machines) > 1
    lines = ["#!/bin/bash", f"#SBATCH --job-name={NAME}"]
    for at, group in enumerate(machines):
        gpus = "" if group.gpu is None else f" --gpus-per-node={group.ranks}"
        of = "" if group.gpu is None else f"  # {printable(group.gpu)}"
        lines += ["#SBATCH hetjob"] if at else []
        lines.append(f"#SBATCH --nodes={group.count} --ntasks-per-node={1 if mixed else group.ranks}{gpus}{of}")
    lines += [f"export {PLAN_VARIABLE}={shlex.quote(str(plan_file))}", "export MASTER_ADDR=$(hostname)"]
    if not mixed:
        return "\n".join([*lines, f"srun --kill-on-bad-exit=1 python {SCRIPT}"])
    counts = ",".join(str(group.ranks) for group in machines for _ in range(group.count))
    groups = ",".join(map(str, range(len(machines))))
    return "\n".join(
        [
            *lines,
            f"export MASTER_PORT={PORT} RANKS={counts}",
            f"srun --het-group={groups} --kill-on-bad-exit=1 bash -c '",
            '  IFS=, read -ra ranks <<< "$RANKS"',
            f"  exec torchrun --nnodes={counts.count(',') + 1} --node-rank=$SLURM_NODEID \\",
            '    --nproc-per-node="${ranks[$SLURM_NODEID]}" \\',
            f'    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" {SCRIPT}\'',
        ]
    )


# --------------------------------------------------------------------------------------------------- Kubeflow Trainer


def trainjob_manifests(machines: Sequence[Machines], plan: Mapping[str, Any], kind: str) -> list[Any]:
    """Return the manifests of a ``TrainJob`` of Kubeflow Trainer v2 (2.2 or later), with the plan as a ``ConfigMap``.

    Equal machines use the runtime ``torch-distributed``, which sets torchrun's variables. Machines of several kinds
    need a separate runtime with a replicated job for each kind. Kubeflow's worker groups may replace that runtime
    (github.com/kubeflow/trainer, issue 4064).
    """
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-plan"},
        "data": {"plan.json": json.dumps(plan, indent=1)},
    }
    runtime = "torch-distributed" if len(machines) == 1 else f"{NAME}-runtime"
    spec: dict[str, Any] = {
        "runtimeRef": {"name": runtime, "kind": "ClusterTrainingRuntime" if len(machines) == 1 else "TrainingRuntime"}
    }
    job = {"apiVersion": _TRAINER, "kind": "TrainJob", "metadata": {"name": NAME}, "spec": spec}
    if len(machines) > 1:
        return [config, _runtime(machines, kind), job]
    (group,) = machines
    spec["trainer"] = {
        "image": IMAGE,
        "numNodes": group.count,
        "numProcPerNode": group.ranks,
        "command": ["torchrun", SCRIPT],
        "env": [_PLAN_ENV],
        **({} if group.gpu is None else {"resourcesPerNode": _resources(group, kind)}),
    }
    pod = {"containers": [{"name": "node", "volumeMounts": [_VOLUME_MOUNT]}], "volumes": [_VOLUME], **_selector(group)}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    spec["runtimePatches"] = [{"manager": NAME, "trainingRuntimeSpec": {"template": {"spec": patch}}}]
    return [config, job]


IMAGE = "IMAGE"
"""Placeholder for the user's container image."""

_TRAINER = "trainer.kubeflow.org/v1alpha1"
_PLAN_ENV = {"name": PLAN_VARIABLE, "value": f"{_MOUNT}/plan.json"}
_VOLUME = {"name": "plan", "configMap": {"name": f"{NAME}-plan"}}
_VOLUME_MOUNT = {"name": "plan", "mountPath": _MOUNT, "readOnly": True}


def _runtime(machines: Sequence[Machines], kind: str) -> dict[str, Any]:
    """Return a runtime with a replicated job for each kind of machine. The first pod of the first job is rank 0."""
    nodes = sum(group.count for group in machines)
    jobs = []
    for at, group in enumerate(machines):
        command = (
            f"exec torchrun --nnodes={nodes} --nproc-per-node={group.ranks} "
            f"--node-rank=$(({group.first} + JOB_COMPLETION_INDEX)) --master-addr={NAME}-machines-0-0-0.{NAME} "
            f"--master-port={PORT} {SCRIPT}"
        )
        container = {
            "name": "node",
            "image": IMAGE,
            "command": ["bash", "-c", command],
            "env": [_PLAN_ENV],
            "volumeMounts": [_VOLUME_MOUNT],
            **({} if group.gpu is None else {"resources": _resources(group, kind)}),
        }
        pod = {"containers": [container], "volumes": [_VOLUME], "restartPolicy": "Never", **_selector(group)}
        shape = {"completionMode": "Indexed", "completions": group.count, "parallelism": group.count}
        jobs.append(
            {
                "name": f"machines-{at}",
                "replicas": 1,
                "template": {"spec": {**shape, "backoffLimit": 0, "template": {"spec": pod}}},
            }
        )
    spec = {"template": {"spec": {"network": {"enableDNSHostnames": True}, "replicatedJobs": jobs}}}
    return {"apiVersion": _TRAINER, "kind": "TrainingRuntime", "metadata": {"name": f"{NAME}-runtime"}, "spec": spec}


def _resources(group: Machines, kind: str) -> dict[str, Any]:
    return {"limits": {_GPU_RESOURCES.get(kind, f"{kind}/gpu"): str(group.ranks)}}


def _selector(group: Machines) -> dict[str, Any]:
    """Select nodes by the label of NVIDIA's GPU feature discovery: the driver's GPU name, with hyphens."""
    return {} if group.gpu is None else {"nodeSelector": {"nvidia.com/gpu.product": group.gpu.replace(" ", "-")}}


# ---------------------------------------------------------------------------------------------------------- SkyPilot


def skypilot_task(machines: Sequence[Machines], plan_file: Path) -> dict[str, Any]:
    """Return a task for SkyPilot, which starts the same command on equal machines.

    Raises:
        PlanError: The machines differ.
    """
    if len(machines) > 1:
        counts = tuple(group.ranks for group in machines for _ in range(group.count))
        raise PlanError(
            f"the plan's machines differ ({tuple_text(counts)} ranks of {', '.join(_names(machines))}), but SkyPilot "
            "starts identical machines. Export to slurm or trainjob, or tune for machines of one kind.",
        )
    (group,) = machines
    run = (
        f"torchrun --nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK --nproc-per-node={group.ranks} "
        f'--master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) --master-port={PORT} {SCRIPT}\n'
    )
    return {
        "name": NAME,
        "workdir": ".",
        "setup": f"pip install -r {REQUIREMENTS}\n",
        "run": f'export {PLAN_VARIABLE}="$HOME/autosplit-plan.json"\n{run}',
        "num_nodes": group.count,
        **({} if group.gpu is None else {"resources": {"accelerators": {_accelerator(group.gpu): group.ranks}}}),
        "file_mounts": {"~/autosplit-plan.json": str(plan_file)},
    }


def _names(machines: Sequence[Machines]) -> list[str]:
    return sorted({group.gpu or "CPU" for group in machines})


_ACCELERATORS = {"H100-80GB": "H100", "A100-40GB": "A100", "V100-16GB": "V100", "GH200-96GB": "GH200"}
"""SkyPilot's GPU names, by the catalogue's name, if the two differ."""


def _accelerator(gpu: str) -> str:
    try:
        name = find_card(gpu).name
    except DeviceError:
        return gpu.removeprefix("NVIDIA ").replace(" ", "-")
    return _ACCELERATORS.get(name, name)


# -------------------------------------------------------------------------------------------------------------- YAML


def yaml_text(value: Any) -> str:
    """Return a mapping or list as YAML in block style. Strings and unusual keys are quoted.

    A string of whole printable lines without indentation becomes a block, because it is easier to read.
    """
    return "\n".join(_yaml_lines(value))


def _yaml_lines(value: Any) -> Iterator[str]:
    if isinstance(value, str) and re.fullmatch(r"(\S.*\n)+", value) and value.replace("\n", "").isprintable():
        yield "|"
        yield from (f"  {line}" for line in value[:-1].split("\n"))
    elif isinstance(value, Mapping) and value:
        for key, one in value.items():
            plain = _PLAIN_KEY.fullmatch(key) and key.lower() not in _YAML_WORDS
            yield from _joined(f"{key if plain else _yaml_string(key)}:", one, indented=isinstance(one, Mapping))
    elif isinstance(value, (list, tuple)) and value:
        for one in value:
            first, *others = _yaml_lines(one)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _yaml_string(value) if isinstance(value, str) else json.dumps(value)


_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 reads as a boolean or null."""


def _yaml_string(text: str) -> str:
    r"""Quote a string with YAML's double quotes: as JSON does, but with ``\U0001f600`` instead of surrogate pairs."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _joined(key: str, value: Any, *, indented: bool) -> Iterator[str]:
    first, *others = _yaml_lines(value)
    if isinstance(value, (Mapping, list, tuple)) and value:
        yield key
        yield from (f"  {line}" if indented else line for line in (first, *others))
    else:
        yield f"{key} {first}"
        yield from others
