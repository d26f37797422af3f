"""Predictions of DDP on clusters: batch sizes, overlap with the backward, scaling, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from folders import BENCHMARKS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosplit
from autosplit.cli.main import main
from autosplit.errors import InputError
from autosplit.oom import DoesNotFitError
from autosplit.sim import cluster_prediction
from autosplit.sim.cluster import parse_cluster
from autosplit.sim.cluster_kinds import RankKind, buckets_of, even_arrivals, measured_kinds
from autosplit.sim.cluster_prediction import (
    SCALING_ERRORS,
    WAITS,
    ClusterScaling,
    _Ranks,
    predicted,
    scaled,
    step_of,
)
from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.step_time import TimeCurve

THREE = "sim:256x(8xA100-80GB)+192x(8xL40S)+128x(4xL4)@8x100Gbps"


def kind(name: str, sample_s: float, ceiling: int = 64, *, start_s: float = 0.01, nbytes: int = 2**28) -> RankKind:
    curve = TimeCurve(((1, start_s + sample_s), (ceiling, start_s + ceiling * sample_s)))
    return RankKind(name, ceiling, curve, 0.001, buckets_of(even_arrivals(nbytes)))


def kinds_of(cluster, *sample_s: float, **changes):
    return {device: kind(device.name, s, **changes) for device, s in zip(cluster.kinds, sample_s, strict=True)}


# Batch sizes


def test_thousands_of_ranks_of_three_kinds_are_solved_as_three_entries(monkeypatch):
    solved = []

    def counted(size, times, caps, floors):
        solved.append(len(times))
        return fastest_split(size, times, caps, floors)

    monkeypatch.setattr(cluster_prediction, "fastest_split", counted)
    cluster = parse_cluster(THREE)
    found = predicted(cluster, kinds_of(cluster, 0.001, 0.002, 0.004), effective_batch_size=100_003)
    assert cluster.ranks == 4096
    assert set(solved) == {3}
    assert found.effective_batch_size == 100_003
    assert sum(share.samples for share in found.shares) == 100_003
    assert [share.batch_size for share in found.shares] == [35, 17, 8]
    assert all(share.batch_size <= share.ceiling for share in found.shares)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=4), st.data())
def test_identical_ranks_finish_as_if_each_rank_was_solved_alone(kinds, data):
    """Each tuple has the number of ranks, the ceiling and the time of a sample."""
    curves = [TimeCurve(((1, float(sample_s)), (2, 2.0 * sample_s))) for _, _, sample_s in kinds]
    counts = [count for count, _, _ in kinds]
    batch = data.draw(st.integers(sum(counts), sum(count * ceiling for count, ceiling, _ in kinds)))
    times = [_Ranks(curve, count) for curve, count in zip(curves, counts, strict=True)]
    split = fastest_split(batch, times, [count * ceiling for count, ceiling, _ in kinds], counts)
    each = [(curve, ceiling) for curve, (count, ceiling, _) in zip(curves, kinds, strict=True) for _ in range(count)]
    alone = fastest_split(batch, [curve for curve, _ in each], [ceiling for _, ceiling in each], [1] * len(each))
    assert sum(split) == batch
    together_s = max(time(samples) for time, samples in zip(times, split, strict=True))
    assert together_s == pytest.approx(max(curve(n) for (curve, _), n in zip(each, alone, strict=True)))


def test_a_batch_above_the_ceilings_accumulates_in_equal_forwards():
    cluster = parse_cluster("sim:2x(4xA100-80GB)@EDR")
    found = predicted(cluster, kinds_of(cluster, 0.001), effective_batch_size=1500)
    assert (found.accumulation_steps, found.shares[0].samples) == (3, 500)
    assert predicted(cluster, kinds_of(cluster, 0.001), effective_batch_size=1500, accumulates=False) is None


def test_without_an_effective_batch_the_batch_grows_with_the_ranks():
    cluster = parse_cluster("sim:64x(8xA100-80GB)@8xNDR")
    found = scaled(cluster, kinds_of(cluster, 0.001, ceiling=4096)).predictions
    assert [one.nodes for one in found] == [1, 2, 4, 8, 16, 32, 64]
    assert found[-1].effective_batch_size > 32 * found[0].effective_batch_size
    assert all(one.efficiency > 0.85 for one in found)


def test_max_batch_size_limits_a_forward():
    cluster = parse_cluster("sim:(4xA100-80GB)")
    assert predicted(cluster, kinds_of(cluster, 0.001), max_batch_size=100).shares[0].samples <= 100
    found = predicted(cluster, kinds_of(cluster, 0.001), effective_batch_size=200, max_batch_size=100)
    assert found.accumulation_steps == 2


def test_fewer_samples_than_ranks_do_not_fit():
    cluster = parse_cluster("sim:4x(8xA100-80GB)@EDR")
    with pytest.raises(DoesNotFitError):
        scaled(cluster, kinds_of(cluster, 0.001), effective_batch_size=31)
    with pytest.raises(DoesNotFitError):
        scaled(cluster, kinds_of(cluster, 0.001), effective_batch_size=63, least_batch=2)


# The step


def test_the_backward_hides_all_buckets_but_the_last():
    cluster = parse_cluster("sim:2x(8xA100-80GB)@EDR")
    curve = TimeCurve(((8, 1.0),))
    two = RankKind("A100-80GB", 8, curve, 0.25, ((0.5, 2**28), (1.0, 2**26)))
    first_s, last_s, waits_s = cluster.all_reduce_s(2**28), cluster.all_reduce_s(2**26), WAITS
    assert first_s < 0.5
    assert step_of(cluster, dict.fromkeys(cluster.kinds, two), [8]) == pytest.approx(
        (1.25 + waits_s + last_s, first_s + last_s, last_s, waits_s)
    )
    late = replace(two, buckets=((0.99, 2**28), (1.0, 2**26)))
    assert step_of(cluster, dict.fromkeys(cluster.kinds, late), [8])[2] == pytest.approx(
        first_s + last_s - 0.01 * (1 + waits_s)
    )
    # With three forwards, only the last backward reduces.
    assert step_of(cluster, dict.fromkeys(cluster.kinds, two), [8], 3)[0] == pytest.approx(3.25 + 3 * waits_s + last_s)


@pytest.mark.parametrize(
    ("network", "sample_s", "effective", "limit"),
    [
        ("8xNDR", 0.01, 64 * 32, "compute"),
        ("1Gbps", 0.001, 64 * 32, "network"),
        ("8xNDR", 0.001, 32, "batch size"),
        ("8xNDR", 1.0, 2**18, "slowest rank"),
    ],
)
def test_the_largest_loss_limits_the_step(network, sample_s, effective, limit):
    cluster = parse_cluster(f"sim:{512 if limit == 'slowest rank' else 4}x(8xA100-80GB)@{network}")
    assert predicted(cluster, kinds_of(cluster, sample_s), effective_batch_size=effective).limited_by == limit


def test_scaling_stops_paying_where_added_gpus_bring_less_than_half():
    cluster = parse_cluster("sim:64x(8xA100-80GB)@25Gbps")
    found = scaled(cluster, kinds_of(cluster, 0.001, ceiling=512), effective_batch_size=8192)
    best = found.pays_up_to
    rates = {one.nodes: one.samples_per_s for one in found.predictions}
    assert 1 < best.nodes < 64
    assert rates[2 * best.nodes] < 1.5 * rates[best.nodes]
    assert all(rates[2 * nodes] >= 1.5 * rates[nodes] for nodes in rates if nodes < best.nodes)
    assert f"up to {best.nodes} nodes" in found.summary
    assert "the network limits" in found.summary
    fast = replace(cluster, network_bytes_per_s=400e9)
    assert "the whole cluster of 64 nodes" in scaled(fast, kinds_of(cluster, 0.1), effective_batch_size=32768).summary


# Measured kinds


def made_workload(width: int = 2048, **options):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return autosplit.Workload(
        model, torch.zeros(4, 64), compute_loss=lambda net, batch: net(batch).square().mean(), **options
    )


@pytest.fixture(scope="module")
def measured():
    workload = made_workload()
    devices = tuple(parse_cluster("sim:2x(A100-80GB)+2x(L4)@EDR").kinds)
    return workload, devices, measured_kinds(workload, None, devices)


def test_a_rank_has_the_time_and_the_ceiling_of_a_plan_for_ddp(measured):
    workload, devices, (kinds, _, _) = measured
    plan = autosplit.tune(workload, devices="sim:A100-80GB+L4", strategy="ddp", profile="off")
    for device, rank in zip(devices, plan.ddp.seats, strict=True):
        assert kinds[device].ceiling == rank.ceiling.batch_size
    step = autosplit.measure(workload, devices="sim:2xL4", strategy="ddp", split=(256, 256))
    assert kinds[devices[1]].curve(256) + kinds[devices[1]].update_s == pytest.approx(step.step_s, rel=0.2)


# compare


def test_compare_takes_clusters_next_to_machines():
    cluster = "sim:4x(8xA100-80GB)@EDR"
    found = autosplit.compare(
        made_workload(64),
        devices=["sim:A100-80GB", cluster],
        prices={"4x(8xA100-80GB)@EDR": 64.0, "A100-80GB": 2.0},
        effective_batch_size=4096,
        samples=10**9,
        profile="off",
    )
    machine = next(one for one in found.machines if one.cluster is not None)
    assert isinstance(machine.cluster, ClusterScaling)
    assert machine.plan is None
    assert machine.samples_per_s == machine.cluster.whole.samples_per_s
    request = machine.compute_for(10**9)
    assert request.hours == pytest.approx(10**9 / machine.samples_per_s / 3600)
    assert request.device_hours == pytest.approx(32 * request.hours)
    assert request.cost == pytest.approx(64 * request.hours)
    assert SCALING_ERRORS in found.notes
    assert {one["compute"]["hours"] > 0 for one in found.to_dict()["machines"]} == {True}


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "balanced"},
        {"precision": "none,bf16"},
        {"effective_batch_size": (64, 128)},
        {"checkpointing": "auto"},
        {"max_batch_size": -1},
        {"samples": 0},
    ],
)
def test_options_that_clusters_cannot_use_are_refused_before_anything_runs(options):
    (name,) = options
    with pytest.raises(InputError, match=name):
        autosplit.compare(None, devices=["sim:2x(L4)@EDR"], **options)


def test_the_command_prints_the_scaling_and_the_hours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch, autosplit\n"
        "workload = autosplit.Workload(torch.nn.Linear(8, 1), torch.ones(4, 8),\n"
        "    compute_loss=lambda net, batch: net(batch).mean())\n"
    )
    words = ["compare", "train.py", "--devices", "sim:2x(2xL4)+1x(T4)@EDR", "--samples", "3600", "--quiet"]
    assert main([*words, "--price", "2x(2xL4)+1x(T4)@EDR=5"]) == 0
    printed = capsys.readouterr().out
    assert "scaling of sim:2x(2xL4)+1x(T4)@EDR" in printed
    assert "3,600 samples on sim:2x(2xL4)+1x(T4)@EDR" in printed
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["nodes"] for one in answer["machines"][0]["cluster"]["predictions"]] == [1, 2, 3]
    assert answer["machines"][0]["compute"]["hours"] > 0
    assert main(["compare", "train.py", "--devices", "sim:2x(2xL4)@EDR", "--effective-batch-size", "3"]) == 3
    assert "cluster" not in capsys.readouterr().err
    assert main(["compare", "--models", "any.txt", "--devices", "sim:2x(2xL4)@EDR"]) == 2
    assert "--models can't be combined with clusters" in capsys.readouterr().err


# The benchmark


def test_the_note_has_the_measured_errors():
    found = json.loads((BENCHMARKS / "results" / "published_scaling.json").read_text(encoding="utf-8"))
    ddp = found["summary"]["ddp"]
    assert found["median loss per doubling, fsdp"] == pytest.approx(WAITS, abs=5e-4)
    rates = [one["samples/s, predicted / published"] for one in found["compared"] if one["reduced"] != "fsdp"]
    assert f"{ddp['rows']} published DDP steps" in SCALING_ERRORS
    assert (
        f"is {ddp['median points off']:.0f} points, and the largest is {ddp['largest points off']:.0f}"
        in SCALING_ERRORS
    )
    assert f"{min(rates):.2f} to {max(rates):.2f} times" in SCALING_ERRORS
    assert f"{1 - 1 / max(rates):.0%} too low" in SCALING_ERRORS
