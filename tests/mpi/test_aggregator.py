"""Dicts of gradients are added by name, whatever their order, shapes, dtypes and layout; a difference is named."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import arrays
from hpczero.collectives import aggregator
from hpczero.collectives.aggregator import HierarchicalAggregator
from hpczero.collectives.aggregator_config import HierarchicalConfig
from hpczero.collectives.groups import groups
from hpczero.collectives.selection import ALGORITHMS, Call, why_not
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError, MismatchError, StallError, WorldSizeMismatchError
from hpczero.topology import Topology

UNEQUAL = {1: (0,), 2: (0, 1), 3: (0, 0, 1), 4: (0, 1, 1, 1), 5: (0, 1, 0, 1, 2)}


def node_maps(size):
    """One node; and nodes that differ in size or placement."""
    return sorted({(0,) * size, UNEQUAL.get(size, tuple(rank % 3 for rank in range(size)))})


@pytest.fixture
def topologies(comm):
    made = [Topology(comm, node_map) for node_map in node_maps(comm.size)]
    yield made
    for topology in made:
        topology.close()


@pytest.fixture
def topology(comm):
    with Topology(comm) as made:
        yield made


def gradients(rank):
    """Of every kind; whole numbers, so that sums are exact."""
    def numbers(*shape, dtype=np.float32, start=0):
        count = int(np.prod(shape))
        return ((np.arange(start, start + count) * 7 + rank * 3) % 11).astype(dtype).reshape(shape)

    return {
        "scalar": numbers(dtype=np.float64), "empty": numbers(0, dtype=np.float64), "no rows": numbers(0, 3),
        "matrix": numbers(7, 5), "one": numbers(1), "large": numbers(40, 50), "transposed": numbers(6, 9).T,
        "every other": numbers(20)[::2], "backwards": numbers(12)[::-1], "large and strided": numbers(60, 40).T[::2],
        "half": numbers(33, dtype=np.float16), "brain": numbers(4, 9, dtype=ml_dtypes.bfloat16),
        "whole": numbers(17, dtype=np.int64), "bytes": numbers(5, dtype=np.uint8),
        "double": numbers(3, 3, dtype=np.float64),
    }


def summed(size):
    every = [gradients(rank) for rank in range(size)]
    return {name: sum(of[name].astype(np.float64) for of in every) for name in every[0]}


def wrong(found, expected):
    return [name for name in expected if not np.array_equal(found[name].astype(np.float64), expected[name])]


def can(strategy, topology, dtype):
    return why_not(Call("all_reduce", 0, topology.map, "any", is_half=arrays.is_half(dtype)), strategy) is None


def raised(kind, call):
    """What `call` says as it raises `kind`; or what else it did."""
    try:
        call()
    except kind as error:
        return str(error)
    except HpczeroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.time_limit(180)
def test_every_gradient_becomes_its_sum_by_every_strategy_on_any_nodes_in_buckets_of_any_size(comm, topologies):
    expected, found = summed(comm.size), []
    for topology, size in itertools.product(topologies, ["64B", "4KiB", "25MiB"]):
        with HierarchicalAggregator(HierarchicalConfig(bucket_size=size), topology) as sums:
            for strategy in ("adaptive", *ALGORITHMS["all_reduce"]):
                mine = {name: array for name, array in gradients(comm.rank).items()
                        if strategy == "adaptive" or can(strategy, topology, array.dtype)}
                returned = sums.all_reduce(mine, strategy=strategy)
                expects = {name: expected[name] for name in mine}
                found += [f"{topology} {size} {strategy}: {name}" for name in wrong(mine, expects)]
                found += [] if returned is mine else ["another dict came back"]
    check_everywhere(comm, not found, "; ".join(found[:5]))


def test_ranks_may_fill_their_dicts_in_different_orders(comm, topologies):
    expected = summed(comm.size)
    for topology in topologies:
        with HierarchicalAggregator(HierarchicalConfig(bucket_size="256B"), topology) as sums:
            mine = gradients(comm.rank)
            order = np.random.default_rng(comm.rank).permutation(list(mine))
            shuffled = {str(name): mine[str(name)] for name in order}
            sums.all_reduce(shuffled)
            check_everywhere(comm, not wrong(shuffled, expected), f"{topology} {wrong(shuffled, expected)}")


def test_a_mean_is_the_sum_by_the_number_of_ranks_and_of_whole_numbers_it_is_refused_everywhere(comm, topology):
    with HierarchicalAggregator(HierarchicalConfig(op="mean"), topology) as means:
        mine = {"w": np.full((3, 4), comm.rank + 1.0), "b": np.full(2, comm.rank, np.float32)}
        means.all_reduce(mine)
        fine = (mine["w"] == (comm.size + 1) / 2).all() and (mine["b"] == np.float32((comm.size - 1) / 2)).all()
        check_everywhere(comm, fine, str(mine))
        text = raised(ConfigError, lambda: means.all_reduce({"n": np.ones(2, np.int64)}))
        check_everywhere(comm, "mean" in text, text)


def test_all_ranks_get_the_same_bits_and_get_them_again(comm, topologies):
    for topology in topologies:
        with HierarchicalAggregator(HierarchicalConfig(bucket_size="4KiB"), topology) as sums:
            bits = []
            for _ in range(3):
                random = np.random.default_rng(comm.rank)
                mine = {str(index): random.standard_normal(index * 37).astype(np.float32) for index in range(1, 20)}
                sums.all_reduce(mine)
                bits.append(b"".join(mine[name].tobytes() for name in sorted(mine)))
            others = comm.allgather(bits[0])
            check_everywhere(comm, len({*bits, *others}) == 1, f"{topology}: bits differ")


@pytest.mark.parametrize(("change", "word"), [
    ({"w": np.zeros((4, 3), np.float32)}, '"w" is float32 (4, 3)'),
    ({"w": np.zeros((3, 4), np.float64)}, '"w" is float64 (3, 4)'),
    ({"extra": np.zeros(2)}, '"extra" is float64 (2,)'),
    ({"w": None}, '"w" is missing'),
])
def test_a_name_shape_or_dtype_that_differs_on_one_rank_is_named_on_all_and_nothing_is_changed(
        comm, topologies, change, word):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    odd = comm.size - 1
    for topology, before in itertools.product(topologies, [0, 2]):
        with HierarchicalAggregator(comm=topology) as sums:
            usual = {"w": np.ones((3, 4), np.float32), "b": np.ones(3)}
            for _ in range(before):      # agreed on already: the difference comes later
                sums.all_reduce({name: array.copy() for name, array in usual.items()})
            mine = usual | change if comm.rank == odd else usual
            mine = {name: array for name, array in mine.items() if array is not None}
            text = raised(MismatchError, lambda mine=mine, sums=sums: sums.all_reduce(mine))
            check_everywhere(comm, f"{word}" in text and f"on rank {odd}" in text, text)
            check_everywhere(comm, (usual["b"] == 1).all() and (usual["w"] == 1).all(), "a gradient was changed")
            again = {"w": np.ones((3, 4), np.float32)}
            sums.all_reduce(again)
            check_everywhere(comm, (again["w"] == comm.size).all(), "the call after the failure")
            check_everywhere(comm, sums.stats.failures == 1, str(sums.stats))


def test_a_strategy_that_differs_on_one_rank_is_named_on_all(comm, topology):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with HierarchicalAggregator(comm=topology) as sums:
        name = "ring" if comm.rank == 0 else "tree"
        text = raised(MismatchError, lambda: sums.all_reduce({"w": np.ones(3)}, strategy=name))
        check_everywhere(comm, "strategy=ring" in text and "on rank 0" in text and "different calls" in text, text)


def test_settings_that_differ_on_one_rank_are_refused_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    config = HierarchicalConfig(bucket_size="1MiB" if comm.rank == 0 else "2MiB")
    text = raised(MismatchError, lambda: HierarchicalAggregator(config, comm))
    check_everywhere(comm, "bucket_size=1048576" in text and "bucket_size=2097152" in text, text)


def test_sizes_written_differently_that_are_the_same_agree(comm):
    config = HierarchicalConfig(bucket_size="1MiB" if comm.rank == 0 else 2**20)
    with HierarchicalAggregator(config, comm) as sums:
        mine = {"w": np.ones(3)}
        sums.all_reduce(mine)
        check_everywhere(comm, (mine["w"] == comm.size).all(), str(mine))


@pytest.mark.parametrize(("bad", "word"), [
    (np.broadcast_to(1.0, 3), "read-only"), ([1.0, 2.0, 3.0], 'gradient "w"'), (np.ones(3, np.int16), "int16"),
    (np.ones(3, object), 'gradient "w"'),
])
def test_what_one_rank_cannot_reduce_is_an_error_on_all(comm, topologies, bad, word):
    for topology in topologies:
        with HierarchicalAggregator(comm=topology) as sums:
            mine = {"w": bad if comm.rank == comm.size - 1 else np.ones(3)}
            text = raised(ConfigError, lambda mine=mine, sums=sums: sums.all_reduce(mine))
            check_everywhere(comm, word in text, text)


def test_the_communicator_fills_in_the_settings(comm, topologies):
    for topology in topologies:
        with HierarchicalAggregator(comm=topology) as sums:
            config = sums.config
            sizes = topology.ranks_per_node
            fine = (config.num_nodes == topology.num_nodes and config.world_size == comm.size
                    and config.devices_per_node == (sizes[0] if len(set(sizes)) == 1 else sizes)
                    and (config.global_rank, config.node_rank, config.local_rank)
                    == (comm.rank, topology.node_index, topology.local_rank)
                    and config.is_master == (comm.rank == 0) and config.is_node_master == topology.is_leader
                    and sums.groups == groups(comm.rank, topology.map) and sums.has_communicator)
            check_everywhere(comm, fine, f"{topology}: {config}")
            with HierarchicalAggregator(config, topology) as claimed:
                check_everywhere(comm, claimed.config == config, "what was derived is true when it is claimed")


@pytest.mark.parametrize("settings", [{"num_nodes": 9}, {"devices_per_node": 9}, {"devices_per_node": (9, 9)},
                                      {"num_nodes": 3, "devices_per_node": 3}])
def test_a_size_that_contradicts_the_communicator_is_refused_on_all_ranks(comm, settings):
    for only_on_the_last in (False, True):
        config = HierarchicalConfig(**({} if only_on_the_last and comm.rank < comm.size - 1 else settings))
        text = raised(WorldSizeMismatchError, lambda config=config: HierarchicalAggregator(config, comm))
        check_everywhere(comm, f"{comm.size} rank" in text and "=" in text, text)


def test_a_rank_that_contradicts_the_communicator_is_refused_on_all_ranks(comm):
    for key in ("global_rank", "node_rank", "local_rank"):
        config = HierarchicalConfig(**{key: 7} if comm.rank == 0 else {})
        text = raised(ConfigError, lambda config=config: HierarchicalAggregator(config, comm))
        check_everywhere(comm, f"{key}=7" in text, text)


def test_a_strategy_that_these_nodes_do_not_allow_is_refused_when_the_communicator_is_attached(comm):
    if comm.size == 1:
        pytest.skip("one rank is one node")
    with Topology(comm, range(comm.size)) as apart:
        text = raised(ConfigError, lambda: HierarchicalAggregator(HierarchicalConfig(strategy="window"), apart))
        check_everywhere(comm, "inside one node" in text, text)


def test_a_communicator_may_come_later_once(comm):
    sums = HierarchicalAggregator(HierarchicalConfig(comm_timeout_ms=90_000))
    check_everywhere(comm, not sums.has_communicator, "it has one already")
    sums.attach(comm)
    mine = {"w": np.ones(5)}
    sums.all_reduce(mine)
    check_everywhere(comm, sums.has_communicator and (mine["w"] == comm.size).all(), str(mine))
    text = raised(ConfigError, lambda: sums.attach(comm))
    check_everywhere(comm, "already" in text, text)
    sums.close()
    sums.close()
    text = raised(HpczeroError, lambda: sums.all_reduce(mine))
    check_everywhere(comm, "was closed" in text and not sums.has_communicator, text)


def test_a_topology_that_was_passed_stays_open(comm, topology):
    HierarchicalAggregator(comm=topology).close()
    with HierarchicalAggregator(comm=topology) as sums:
        mine = {"w": np.ones(5)}
        sums.all_reduce(mine)
        check_everywhere(comm, (mine["w"] == comm.size).all(), str(mine))


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_settings_say(comm, topology):
    sums = HierarchicalAggregator(HierarchicalConfig(comm_timeout_ms=200), topology)
    if comm.size > 1:
        odd = comm.rank == comm.size - 1
        text = "" if odd else raised(StallError, lambda: sums.all_reduce({"w": np.ones(3)}))
        check_everywhere(comm, odd or f"no word from rank {comm.size - 1}" in text and "0.2 s" in text, text)
        check_everywhere(comm, sums.stats.failures == (not odd), str(sums.stats))
    check_everywhere(comm, Transport.of(topology).timeout_s == 0.2, "the limit is not that of the settings")


def test_half_of_the_ranks_can_have_one_of_their_own(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    with HierarchicalAggregator(comm=half) as sums:
        mine = {"w": np.full(9, comm.rank, np.float32)}
        sums.all_reduce(mine)
        expected = sum(rank for rank in range(comm.size) if rank % 2 == comm.rank % 2)
        check_everywhere(comm, (mine["w"] == expected).all(), str(mine))
    half.Free()


def test_vectors_for_fusing_are_made_once_and_no_larger_than_a_bucket_needs(comm, topology, monkeypatch):
    made = []

    class Recorder:
        @staticmethod
        def empty(size, dtype):
            made.append(np.empty(size, dtype))
            return made[-1]

    monkeypatch.setattr(aggregator, "namespace", lambda array: Recorder)
    with HierarchicalAggregator(HierarchicalConfig(bucket_size="1KiB"), topology) as sums:
        for _ in range(4):
            sums.all_reduce({f"p{index}": np.ones(100, np.float32) for index in range(8)} | {"alone": np.ones(5000)})
        sizes = [array.nbytes for array in made]
        check_everywhere(comm, sizes == [800], str(sizes))


def test_counters_tell_calls_times_bytes_by_link_failures_and_which_strategy_ran_for_which_size(comm, topologies):
    for topology in topologies:
        with HierarchicalAggregator(HierarchicalConfig(bucket_size="4KiB", strategy="ring"), topology) as sums:
            for _ in range(3):
                sums.all_reduce({"a": np.ones(300, np.float32), "b": np.ones(200, np.float32), "c": np.ones(1000)})
            sums.all_reduce({"a": np.ones(300, np.float32), "b": np.ones(200, np.float32)}, strategy="pairwise")
            raised(ConfigError, lambda sums=sums: sums.all_reduce({"a": 1.0}))
            stats = sums.stats
            uses = {(use.nbytes, use.dtype, use.algorithm): use.calls for use in stats.history}
            expected = {(2000, "float32", "pairwise"): 1, (2000, "float32", "ring"): 3, (8000, "float64", "ring"): 3}
            fine = (stats.operations, stats.failures, uses) == (4, 1, expected) and 0 < stats.mean_s < 60
            check_everywhere(comm, fine, str(stats))
            # Every byte of a rank's three rings goes to its right neighbour, 2 (p - 1) / p of the vectors in all.
            sent = np.array(comm.allgather([stats.bytes_sent["node"], stats.bytes_sent["network"]])).sum(0)
            rounds = 2 * (comm.size - 1) * (3 * 10_000 + 2000)
            check_everywhere(comm, sent.sum() == rounds, f"{topology}: {sent} of {rounds}")
            check_everywhere(comm, (sent[1] > 0) == (topology.num_nodes > 1), f"{topology}: {sent}")
            advice = {one.nbytes: one for one in sums.recommend()}
            check_everywhere(comm, "fastest that was measured" in advice[2000].reason
                             and "only ring" in advice[8000].reason, str(advice))
            sums.reset_stats()
            check_everywhere(comm, (sums.stats.operations, sums.stats.failures, sums.stats.history) == (0, 0, ())
                             and not any(sums.stats.bytes_sent.values()), str(sums.stats))


def test_what_was_planned_is_what_runs(comm, topologies):
    for topology in topologies:
        with HierarchicalAggregator(HierarchicalConfig(bucket_size="2KiB"), topology) as sums:
            mine = gradients(comm.rank)
            planned = {(bucket.nbytes, str(bucket.dtype), algorithm) for bucket, algorithm in sums.plan(mine)}
            sums.all_reduce(mine)
            ran = {(use.nbytes, use.dtype, use.algorithm) for use in sums.stats.history}
            check_everywhere(comm, planned == ran, f"{planned} and {ran}")


def test_nothing_and_gradients_without_elements_are_reduced_to_themselves(comm, topology):
    with HierarchicalAggregator(comm=topology) as sums:
        check_everywhere(comm, sums.all_reduce({}) == {}, "{}")
        empty = np.zeros((0, 4))
        sums.all_reduce({"e": empty})
        check_everywhere(comm, sums.stats.operations == 2 and sums.stats.history == (), str(sums.stats))


def test_what_shares_its_memory_in_other_ways_is_reduced_in_place(comm, topology):
    raw = bytearray(np.arange(4.0).tobytes())
    view = memoryview(raw).cast("d")
    with HierarchicalAggregator(comm=topology) as sums:
        sums.all_reduce({"view": view})
    check_everywhere(comm, view.tolist() == [0.0, comm.size, 2.0 * comm.size, 3.0 * comm.size], str(view.tolist()))
