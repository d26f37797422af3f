"""Cluster specs, and the time of an all-reduce between their GPUs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.devices.spec import parse_devices
from autosplit.errors import DeviceError
from autosplit.sim.cluster import NETWORK_SHARE, START_S, parse_cluster

MIXED = "sim:4x(8xA100-80GB)+2x(4xL40S@40GiB+2xL4)@8x100Gbps"


def test_a_spec_has_groups_of_nodes_and_a_rate():
    cluster = parse_cluster(MIXED)
    assert (cluster.nodes, cluster.ranks) == (6, 44)
    kinds = {device.name: (count, device.capacity_bytes / 2**30) for device, count in cluster.kinds.items()}
    assert {name: count for name, (count, _) in kinds.items()} == {"A100-80GB": 32, "L40S": 8, "L4": 4}
    assert kinds["L40S"][1] == 40
    assert cluster.network_bytes_per_s == 100e9


def test_a_group_of_identical_gpus_is_one_entry_however_many_nodes_there_are():
    cluster = parse_cluster("sim:131072x(8xH100-80GB)@8xNDR")
    assert len(cluster.groups) == len(cluster.kinds) == 1
    assert cluster.ranks == 2**20


@pytest.mark.parametrize(("rate", "gbps"), [("@8xNDR", 3200), ("@ 2.5Gbps", 2.5), ("@8x400Gbps", 3200)])
def test_rates(rate, gbps):
    assert parse_cluster(f"sim:2x(L4){rate}").network_bytes_per_s == gbps * 1e9 / 8


@pytest.mark.parametrize(
    "spec",
    [
        "cuda:4x(8xA100-80GB)@EDR",
        "sim:4x(8xA100-80GB",
        "sim:4x(8xA100-80GB)@100",
        "sim:4x(8xA100-80GB)@ABC",
        "sim:4x(8xA100-80GB)",
        "sim:0x(8xA100-80GB)@EDR",
        "sim:2x(8xA100-8GB)@EDR",
        "sim:2x()@EDR",
    ],
)
def test_a_wrong_spec_is_refused(spec):
    with pytest.raises(DeviceError):
        parse_cluster(spec)


def test_other_commands_refuse_a_cluster():
    with pytest.raises(DeviceError, match="cluster"):
        parse_devices("sim:4x(8xA100-80GB)@100Gbps")


def test_the_first_nodes_are_those_of_the_first_groups():
    cluster = parse_cluster(MIXED)
    assert [group.nodes for group in cluster.first(5).groups] == [4, 1]
    assert cluster.first(1).ranks == 8
    assert cluster.first(6) == cluster


def test_a_long_message_takes_the_slowest_links_time():
    """All GPUs of a node share its network, so more GPUs per node do not make it faster or slower."""
    nbytes = 100 * 2**30
    alone_s, together_s = (parse_cluster(f"sim:16x({count}xA100-80GB)@EDR").all_reduce_s(nbytes) for count in (1, 8))
    assert alone_s == pytest.approx(2 * 15 / 16 * nbytes / (NETWORK_SHARE * 12.5e9), rel=1e-3)
    assert together_s == pytest.approx(alone_s, rel=0.07)


def test_the_link_inside_a_node_may_be_the_slowest():
    cluster = parse_cluster("sim:2x(8xRTX4090)+2x(8xA100-80GB)@8xNDR")
    assert cluster.slowest_link == "RTX4090"
    assert cluster.all_reduce_s(2**30) > parse_cluster("sim:4x(8xA100-80GB)@8xNDR").all_reduce_s(2**30)
    assert parse_cluster("sim:2x(8xA100-80GB)@EDR").slowest_link == "network"
    assert parse_cluster("sim:2x(RTX4090)@8xNDR").slowest_link == "network"  # one GPU per node uses no other link


def test_a_short_message_over_many_nodes_takes_a_tree():
    times = [parse_cluster(f"sim:{nodes}x(8xA100-80GB)@8xNDR").all_reduce_s(1024) - START_S for nodes in (256, 512)]
    assert times[1] / times[0] == pytest.approx(math.log2(512) / math.log2(256), rel=1e-3)


@given(st.integers(1, 2**34), st.integers(1, 2**34), st.integers(1, 4096), st.integers(1, 4096))
def test_more_bytes_and_more_nodes_never_take_less(nbytes, other_bytes, nodes, other_nodes):
    (few, many), (small, large) = sorted((nodes, other_nodes)), sorted((nbytes, other_bytes))
    fewer, more = (parse_cluster(f"sim:{count}x(8xA100-80GB)@EDR") for count in (few, many))
    assert fewer.all_reduce_s(small) <= fewer.all_reduce_s(large)
    assert fewer.all_reduce_s(small) <= more.all_reduce_s(small) * (1 + 1e-12)
