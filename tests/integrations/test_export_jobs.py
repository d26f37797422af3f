"""Job files for Slurm, Kubeflow Trainer and SkyPilot: their text, their schema, and runs in an emulated environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade import on_devices
from raised import raises
from ranks import free_port
from test_export import even_plan

from autosplit.errors import PlanError
from autosplit.integrations.export_jobs import yaml_text
from autosplit.plan.plan import Plan

yaml = pytest.importorskip("yaml")

A100, L40S = "NVIDIA A100-SXM4-40GB", "NVIDIA L40S"


def plan_of(*machines: tuple[int, str], kind: str = "cuda") -> Plan:
    """Return a plan for machines that each have a number of equal devices."""
    names = [name for count, name in machines for _ in range(count)]
    plan = even_plan(kind=kind, count=len(names))
    plan = on_devices(plan, *map(lambda device, name: replace(device, name=name), plan.devices, names))
    return replace(plan, machine={"ranks_per_machine": [count for count, _ in machines]})


# ------------------------------------------------------------------------------------------------------------- Slurm


def test_slurm_asks_for_equal_nodes():
    found = plan_of((4, A100), (4, A100)).export("slurm", path="/shared/plan.json")
    lines = found.text.split("\n")
    assert lines[0] == "#!/bin/bash"
    assert f"#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4  # {A100}" in lines
    assert "export AUTOSPLIT_PROFILE=/shared/plan.json" in lines
    assert lines[-1] == "srun --kill-on-bad-exit=1 python train.py"
    assert "scontrol" not in found.text, "it is missing in many containers"
    assert found.settings == {"machines": [{"first": 0, "count": 2, "ranks": 4, "gpu": A100}]}


def test_slurm_asks_for_nodes_of_two_kinds():
    found = plan_of((4, A100), (4, A100), (2, L40S)).export("slurm", path="/shared/plan.json")
    lines = found.text.split("\n")
    at = lines.index("#SBATCH hetjob")
    assert lines[at - 1] == f"#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4  # {A100}"
    assert lines[at + 1] == f"#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=2  # {L40S}"
    assert "export MASTER_PORT=29500 RANKS=4,4,2" in lines
    assert "srun --het-group=0,1 " in found.text


def test_a_machine_with_two_kinds_is_refused():
    plan = plan_of((2, A100))
    mixed = on_devices(plan, plan.devices[0], replace(plan.devices[1], name=L40S))
    with raises(PlanError, f"{A100} and {L40S}"):
        mixed.export("slurm")


SRUN = '''
"""Start tasks as srun does: SLURM_* variables, in the order of the nodes."""
import os, subprocess, sys

flags = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(flags):]
nodes = [int(number) for number in os.environ["TASKS"].split(",")]
total, rank, tasks = sum(nodes), 0, []
for node, count in enumerate(nodes):
    for local in range(count):
        places = {"PROCID": rank, "LOCALID": local, "NODEID": node, "STEP_NUM_TASKS": total, "STEP_ID": 0,
                  "STEP_NUM_NODES": len(nodes), "STEP_TASKS_PER_NODE": os.environ["TASKS"], "JOB_ID": os.getppid()}
        variables = {f"SLURM_{name}": str(value) for name, value in places.items()}
        tasks.append(subprocess.Popen(command, env={**os.environ, **variables}))
        rank += 1
sys.exit(max(task.wait() for task in tasks))
'''

TRAIN = """
import autosplit
with autosplit.ddp.setup() as ctx:
    with open(f"rank{ctx.rank}", "w") as file:
        file.write(f"{ctx.world_size} {ctx.plan.ddp.split[ctx.rank]}")
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder with a training script, and with programs named srun, torchrun, python and hostname."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "srun.py").write_text(SRUN)
    (tmp_path / "train.py").write_text(TRAIN)
    interpreter = f'exec "{sys.executable}"'
    for name, line in {
        "srun": f'{interpreter} "{tmp_path}/srun.py" "$@"',
        "torchrun": f'{interpreter} -m torch.distributed.run "$@"',
        "python": f'{interpreter} "$@"',
        "hostname": "echo 127.0.0.1",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def _run(cluster: Path, text: str, **variables: str) -> dict[str, str]:
    """Run a job file with bash, and return what each rank wrote."""
    (cluster / "job.sh").write_text(text.replace("29500", str(free_port())))
    packages = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    path = f"{cluster / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": path, "PYTHONPATH": packages}
    ran = subprocess.run(
        ["bash", "job.sh"], cwd=cluster, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {file.name: file.read_text() for file in sorted(cluster.glob("rank*"))}


@pytest.mark.slow
@pytest.mark.parametrize("machines", [(2,), (2, 1)], ids=["equal", "heterogeneous"])
def test_a_slurm_job_trains_with_the_ranks_of_the_plan(cluster: Path, machines: tuple[int, ...]) -> None:
    plan = plan_of(*((count, "cpu") for count in machines), kind="cpu")
    path = cluster / "a plan.json"
    plan.save(path)
    text = plan.export("slurm", path=path).text
    tasks = ",".join(map(str, machines)) if len(machines) == 1 else ",".join("1" * len(machines))
    wrote = _run(cluster, text, TASKS=tasks)
    count = sum(machines)
    assert wrote == {f"rank{rank}": f"{count} 50" for rank in range(count)}


# --------------------------------------------------------------------------------------------------- Kubeflow Trainer


@pytest.mark.parametrize("machines", [((4, A100), (4, A100)), ((4, A100), (2, L40S), (2, L40S)), ((2, "cpu"),)])
def test_a_trainjob_satisfies_kubeflows_schema(machines: Any) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    plan = plan_of(*machines, kind="cpu" if machines[0][1] == "cpu" else "cuda")
    found = plan.export("trainjob")
    manifests = [*yaml.safe_load_all(found.text)]
    assert manifests == found.settings["manifests"]
    assert Plan.from_json(manifests[0]["data"]["plan.json"]).split == plan.split
    for manifest in manifests[1:]:
        kind = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
        # The models ignore unknown keys, so compare what they read.
        assert _without_none(kind.from_dict(manifest).to_dict()) == manifest


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def test_a_runtime_numbers_its_machines_in_the_plans_order():
    runtime = plan_of((4, A100), (2, L40S), (2, L40S)).export("trainjob").settings["manifests"][1]
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    commands = [pod["containers"][0]["command"][-1] for pod in pods]
    assert [job["template"]["spec"]["completions"] for job in jobs] == [1, 2]
    assert "--nproc-per-node=4 --node-rank=$((0 + JOB_COMPLETION_INDEX))" in commands[0]
    assert "--nproc-per-node=2 --node-rank=$((1 + JOB_COMPLETION_INDEX))" in commands[1]
    assert all("--nnodes=3" in one and "--master-addr=autosplit-machines-0-0-0.autosplit" in one for one in commands)
    assert [pod["nodeSelector"]["nvidia.com/gpu.product"] for pod in pods] == ["NVIDIA-A100-SXM4-40GB", "NVIDIA-L40S"]


# ---------------------------------------------------------------------------------------------------------- SkyPilot

TASK_KEYS = {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"}
"""Keys of SkyPilot's task schema that are used here (skypilot 0.14.1, sky/utils/schemas.py)."""


def test_a_task_of_skypilot():
    found = plan_of((4, A100), (4, A100)).export("skypilot", path="/plans/plan.json")
    task = yaml.safe_load(found.text)
    assert task == found.settings
    assert set(task) == TASK_KEYS
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": {"A100": 4}})
    assert task["file_mounts"] == {"~/autosplit-plan.json": "/plans/plan.json"}
    assert task["setup"] == "pip install -r requirements.txt\n"
    assert "requirements.txt for the list of its packages" in found.notes[0]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA New 9", "New-9")],
)
def test_skypilots_names_of_gpus(gpu, name):
    task = plan_of((1, gpu)).export("skypilot").settings
    assert task["resources"] == {"accelerators": {name: 1}}


def test_skypilot_starts_equal_machines_only():
    with raises(PlanError, "(4, 2)"):
        plan_of((4, A100), (2, L40S)).export("skypilot")


@pytest.mark.slow
def test_a_skypilot_task_trains_with_the_ranks_of_the_plan(cluster: Path) -> None:
    plan = plan_of((2, "cpu"), kind="cpu")
    plan.save(cluster / "autosplit-plan.json")
    run = plan.export("skypilot").settings["run"]
    places = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    wrote = _run(cluster, run, HOME=str(cluster), **places)
    assert wrote == {"rank0": "2 50", "rank1": "2 50"}


# -------------------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": "yes", "c": None, "d": True, "e": [], "f": {}, "g": "two\nlines", "h": 'a "quote": # x'},
        [{"a": [1, {"b": [2]}], "c": {"d": {"e": "f"}}}, "- text", ["x", ["y"]], "ü "],
        {"text": "  first\n\nlast\n", "next": 1},
    ],
)
def test_yaml_is_read_as_it_was_given(value):
    assert yaml.safe_load(yaml_text(value)) == value
