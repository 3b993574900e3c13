"""What the aggregator decides before anything is sent: settings, buckets, words for a difference; a world of one."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from hpczero import ConfigError, HierarchicalAggregator, HierarchicalConfig, HpczeroError, NoCommunicatorError
from hpczero.collectives.aggregator_agreement import describe, differences
from hpczero.collectives.aggregator_buckets import Bucket, Entry, in_buckets
from hpczero.collectives.aggregator_stats import Meter, recommend
from hpczero.collectives.groups import groups
from hpczero.collectives.selection import Call, choose
from hpczero.settings import Size
from hpczero.topology import NodeMap


def entry(name, *shape, dtype=np.float32, on_device=False):
    return Entry(name, shape, np.dtype(dtype), on_device)


def names(buckets):
    return [bucket.names for bucket in buckets]


def test_buckets_follow_the_names_and_hold_at_most_their_size():
    entries = [entry("d", 2), entry("a", 2), entry("c", 3), entry("b", 2)]
    assert names(in_buckets(entries, Size(16))) == [("a", "b"), ("c",), ("d",)]
    assert names(in_buckets(entries, Size(20))) == [("a", "b"), ("c", "d")]
    assert names(in_buckets(entries, Size(5, "elements"))) == [("a", "b"), ("c", "d")]


def test_the_order_in_which_gradients_come_changes_nothing():
    entries = [entry(str(index), index) for index in range(1, 12)]
    assert in_buckets(entries, Size(64)) == in_buckets(reversed(entries), Size(64))


def test_a_gradient_larger_than_a_bucket_is_one_alone_and_one_without_elements_is_in_none():
    assert names(in_buckets([entry("a"), entry("big", 100), entry("none", 0, 7), entry("z")], Size(8))) == [
        ("a",), ("big",), ("z",)]


def test_dtypes_and_memories_are_never_mixed_in_a_bucket():
    entries = [entry("a", 4), entry("b", 4, dtype=np.float64), entry("c", 4), entry("d", 4, on_device=True),
               entry("e", 4, dtype=ml_dtypes.bfloat16), entry("f", 4, dtype=np.float16)]
    buckets = in_buckets(entries, Size(2**20))
    assert names(buckets) == [("a", "c"), ("b",), ("d",), ("e",), ("f",)]
    assert [bucket.nbytes for bucket in buckets] == [32, 32, 16, 8, 8]


def test_gradients_lie_behind_each_other_in_their_bucket():
    bucket = Bucket((entry("a", 2, 3), entry("b"), entry("c", 4)))
    assert [(one.name, where.start, where.stop) for one, where in bucket.places] == [
        ("a", 0, 6), ("b", 6, 7), ("c", 7, 11)]


def test_what_differs_is_named_with_its_ranks_and_shapes():
    usual = [entry("b", 4), entry("w", 3, 4)]
    odd = [entry("b", 4), entry("w", 4, 3)]
    found = differences([describe("c", usual), describe("c", usual), describe("c", odd), describe("c", usual)])
    assert found == '"w" is float32 (4, 3) on the host on rank 2; float32 (3, 4) on the host on the 3 other ranks'


def test_a_name_that_is_missing_and_one_that_is_there_alone_are_both_named():
    found = differences([describe("c", [entry("a"), entry("x")]), describe("c", [entry("a", dtype=np.int32)])])
    assert '"a" is int32 () on the host on rank 1; float32 () on the host on rank 0' in found
    assert '"x" is missing on rank 1; float32 () on the host on rank 0' in found


def test_names_with_line_breaks_tabs_and_quotes_are_compared_as_they_are():
    found = differences([describe("c", [entry('a\n"b"\tc', 1)]), describe("c", [entry('a\n"b"\tc', 2)])])
    assert "(1,)" in found and "(2,)" in found and "missing" not in found


def test_a_rank_in_another_call_is_told_as_such():
    found = differences([describe("mean", []), "all_reduce of 3 elements", describe("mean", [])])
    assert found == "ranks are in different calls: all_reduce of 3 elements on rank 1; mean on the 2 other ranks"


def test_of_many_differences_the_first_are_told_and_the_rest_is_counted():
    here, there = ([entry(f"p{index:02}", size) for index in range(20)] for size in (1, 2))
    found = differences([describe("c", here), describe("c", there)])
    assert '"p04"' in found and '"p05"' not in found and "and 15 more" in found


def test_without_any_setting_there_is_one_rank():
    config = HierarchicalConfig()
    assert (config.world_size, config.is_master, config.is_node_master) == (1, True, True)
    assert (config.strategy, config.op, config.bucket_size.count) == ("adaptive", "sum", 25 * 2**20)


def test_ranks_are_counted_node_after_node():
    config = HierarchicalConfig(num_nodes=2, devices_per_node=4, node_rank=1, local_rank=2)
    assert config.world_size == 8 and not config.is_master and not config.is_node_master
    assert HierarchicalAggregator(config).groups == groups(6, NodeMap((0, 0, 0, 0, 1, 1, 1, 1)))
    first = HierarchicalConfig(num_nodes=2, devices_per_node=4, global_rank=4)
    assert first.is_node_master and not first.is_master


def test_nodes_may_be_of_unequal_size():
    config = HierarchicalConfig(devices_per_node=(2, 1, 2), global_rank=2)
    assert config.world_size == 5 and config.is_node_master
    assert HierarchicalAggregator(config).groups == groups(2, NodeMap((0, 0, 1, 2, 2)))


@pytest.mark.parametrize(("settings", "word"), [
    ({"num_nodes": 2, "devices_per_node": 2, "global_rank": 4}, "global_rank=4"),
    ({"num_nodes": 2, "node_rank": 2}, "node_rank=2"),
    ({"devices_per_node": 2, "local_rank": 2}, "local_rank=2"),
    ({"num_nodes": 3, "devices_per_node": (2, 1)}, "num_nodes=3"),
    ({"devices_per_node": (2, 0)}, "one rank or more"),
    ({"devices_per_node": ()}, "one rank or more"),
    ({"num_nodes": 0}, "num_nodes"),
    ({"num_nodes": True}, "num_nodes"),
    ({"strategy": "rign"}, "did you mean ring"),
    ({"op": "max"}, "one of sum, mean"),
    ({"bucket_size": 0}, "bucket_size"),
    ({"comm_timeout_ms": 0}, "comm_timeout_ms"),
    ({"world_size": 4}, "world_size"),
])
def test_settings_that_cannot_be_are_refused(settings, word):
    with pytest.raises(ConfigError, match=word):
        HierarchicalConfig(**settings)


def test_a_rank_that_is_elsewhere_cannot_be_planned_for():
    striped = HierarchicalConfig(num_nodes=2, devices_per_node=2, node_rank=0, local_rank=1, global_rank=2)
    with pytest.raises(ConfigError, match="global_rank=2 is not node_rank=0, local_rank=1"):
        _ = HierarchicalAggregator(striped).groups


def test_several_ranks_are_planned_for_but_not_served_without_a_communicator():
    aggregator = HierarchicalAggregator(HierarchicalConfig(num_nodes=2, devices_per_node=2, bucket_size="1MiB"))
    gradients = {"w": np.ones((1024, 512), np.float32), "b": np.ones(3)}
    small, large = (choose(Call("all_reduce", nbytes, NodeMap((0, 0, 1, 1)), "any")) for nbytes in (24, 2**21))
    assert [(bucket.names, algorithm) for bucket, algorithm in aggregator.plan(gradients)] == [
        (("b",), small), (("w",), large)]
    with pytest.raises(NoCommunicatorError, match="4 ranks needs a communicator"):
        aggregator.all_reduce(gradients)
    assert not aggregator.has_communicator and aggregator.stats.failures == 1 and aggregator.stats.operations == 0


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_world_of_one_keeps_what_it_has(op):
    with HierarchicalAggregator(HierarchicalConfig(op=op)) as aggregator:
        gradients = {"w": np.arange(6.0).reshape(2, 3).T, "b": np.array(2.0)}
        assert aggregator.all_reduce(gradients) is gradients
        assert np.array_equal(gradients["w"], np.arange(6.0).reshape(2, 3).T) and gradients["b"] == 2
        assert aggregator.stats.operations == 1 and aggregator.recommend() == ()
    with pytest.raises(HpczeroError, match="was closed"):
        aggregator.all_reduce(gradients)


@pytest.mark.parametrize(("gradients", "word"), [
    ([np.ones(2)], "dict"),
    ({1: np.ones(2)}, "named by text"),
    ({"a": 3.0}, 'gradient "a"'),
    ({"a": np.broadcast_to(1.0, 3)}, "read-only"),
    ({"a": np.ones(2, np.complex64)}, 'gradient "a"'),
    ({"a": np.ones(2, np.int16)}, "int16"),
    ({"a": np.ones(2, np.int32)}, "mean"),
])
def test_what_cannot_be_reduced_is_refused_by_name(gradients, word):
    with pytest.raises(ConfigError, match=word):
        HierarchicalAggregator(HierarchicalConfig(op="mean")).all_reduce(gradients)


def test_memory_that_comes_under_two_names_is_refused_and_interleaved_memory_is_not():
    tied = np.ones(4)
    with pytest.raises(ConfigError, match='"a" and "b" lie in the same memory'):
        HierarchicalAggregator().all_reduce({"b": tied, "a": tied, "c": np.ones(2)})
    HierarchicalAggregator().all_reduce({"even": tied[::2], "odd": tied[1::2]})


def test_only_settings_are_taken_as_settings():
    with pytest.raises(ConfigError, match="HierarchicalConfig, not dict"):
        HierarchicalAggregator({"op": "sum"})


def test_where_one_algorithm_was_measured_the_rule_speaks_and_where_several_were_the_clock():
    meter, nodes = Meter(), NodeMap((0, 0, 1))
    small, large = Bucket((entry("a", 10),)), Bucket((entry("b", 2**20),))
    meter.reduced(small, "ring", 2e-3)
    meter.reduced(large, "ring", 5e-3)
    meter.reduced(large, "ring", 1e-3)
    meter.reduced(large, "hierarchical", 2e-3)
    first, second = recommend(meter.read().history, nodes)
    rule = choose(Call("all_reduce", 40, nodes, "any"))
    assert (first.nbytes, first.strategy) == (40, rule) and "only ring 2 ms" in str(first)
    assert second.strategy == "ring" and "ring 1 ms at best of 2, hierarchical 2 ms at best of 1" in str(second)


def test_history_says_how_often_and_how_long_each_algorithm_ran_for_each_size():
    meter = Meter()
    for seconds in (3e-3, 1e-3):
        meter.reduced(Bucket((entry("a", 10),)), "tree", seconds)
    meter.moved({"node": 5}, {"node": 25, "network": 3})
    (use,) = meter.read().history
    assert (use.nbytes, use.dtype, use.algorithm, use.calls) == (40, "float32", "tree", 2)
    assert use.mean_s == pytest.approx(2e-3) and use.best_s == 1e-3
    assert meter.read().bytes_sent == {"window": 0, "node": 20, "network": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        meter.read().operations = 7
