"""Ranks of several nodes agree on a call, and sum small vectors, through the slots of their nodes and one rank of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives import messages, slots
from hpczero.collectives.api import all_gather, all_reduce
from hpczero.collectives.slots import slot_bytes
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, MismatchError
from hpczero.topology import Topology


def node_maps(size):
    return [
        list(range(size)),
        [rank * 2 // size for rank in range(size)],
        [rank % 2 for rank in range(size)],
        [min(rank, 2) for rank in range(size)],
    ]


@pytest.mark.eight_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["leader", "hierarchical"])
def test_what_fits_into_the_slots_needs_no_message_inside_a_node_and_one_card_per_node(comm, algorithm):
    for node_map, count in itertools.product(node_maps(comm.size), (1, 7, 1000)):
        with Topology(comm, node_map) as topology:
            transport = Transport.of(topology)
            for turn in range(3):
                array = np.arange(count, dtype=np.float64) * (comm.rank + 1) + turn
                before = dict(transport.bytes_sent)
                all_reduce(array, topology, algorithm=algorithm)
                sent = {link: transport.bytes_sent[link] - before[link] for link in before}
                expected = np.arange(count) * sum(range(1, comm.size + 1)) + turn * comm.size
                check_everywhere(comm, np.array_equal(array, expected), f"{node_map} {count}: {array[:5]}")
                check_everywhere(comm, sent["node"] == 0, f"{node_map} {count}: {sent}")
                card, m = topology.world.allreduce(sent["network"]), topology.num_nodes
                check_everywhere(comm, card == 2 * (m - 1) * array.nbytes, f"{node_map} {count}: {card} of all cards")


@pytest.mark.mpi(min_size=2)
def test_small_and_large_ways_give_the_same_bits(comm, monkeypatch):
    rng = np.random.default_rng(comm.rank)
    values = rng.standard_normal(3001).astype(np.float32) * 10.0 ** rng.integers(-3, 4, 3001)
    for node_map in node_maps(comm.size):
        results = []
        for rows_bytes in (slots.ROWS_BYTES, 0):      # the second leaves room for 16 numbers
            monkeypatch.setattr(slots, "ROWS_BYTES", rows_bytes)
            with Topology(comm, node_map) as topology:
                results += [all_reduce(values.copy(), topology, algorithm=algorithm, order="canonical")
                            for algorithm in ("leader", "hierarchical")]
        ok = all(np.array_equal(result.view(np.uint32), results[0].view(np.uint32)) for result in results)
        check_everywhere(comm, ok, f"{node_map}: {[result[:3] for result in results]}")


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_between_nodes_is_raised_on_all_and_changes_nothing(comm):
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            for algorithm, odd in itertools.product(("leader", "ring"), (0, comm.size - 1)):
                for shape in (50, 60, 20000):
                    all_reduce(np.ones(shape), topology, algorithm=algorithm)      # known, to all ranks
                for usual, other in ((50, 60), (60, 20000), (20000, 50), (50, 70), (80, 50)):      # 70 and 80 are new
                    array = np.full(other if comm.rank == odd else usual, 3.0)
                    with pytest.raises(MismatchError, match=f"rank {odd}.* calls|rank {1 - odd} of 2 calls"):
                        all_reduce(array, topology, algorithm=algorithm)
                    check_everywhere(comm, (array == 3).all(), f"{node_map} {algorithm}: {array[:3]}")
                    again = all_reduce(np.ones(usual), topology, algorithm=algorithm)
                    check_everywhere(comm, (again == comm.size).all(), f"{node_map} {algorithm}: {again[:3]}")


@pytest.mark.mpi(min_size=2)
def test_an_error_on_one_rank_reaches_all_nodes_and_on_all_ranks_too(comm):
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            for wrong in ({0}, {comm.size - 1}, set(range(comm.size))):
                for known in (False, True):
                    if known:
                        all_reduce(np.ones(5), topology, algorithm="leader")
                    op = "median" if comm.rank in wrong else "sum"
                    with pytest.raises(ConfigError, match="median"):
                        all_reduce(np.ones(5), topology, op=op, algorithm="leader")
            check_everywhere(comm, (all_reduce(np.ones(5), topology) == comm.size).all(), "the next call")


@pytest.mark.mpi(min_size=2)
def test_different_operations_on_different_nodes_are_a_mismatch(comm):
    with Topology(comm, [rank * 2 // comm.size for rank in range(comm.size)]) as topology:
        all_reduce(np.ones(6 * comm.size), topology, algorithm="leader")
        all_gather(np.ones(6 * comm.size), topology)
        with pytest.raises(MismatchError, match="all_gather"):
            if topology.node_index == 0:
                all_reduce(np.ones(6 * comm.size), topology, algorithm="leader")
            else:
                all_gather(np.ones(6 * comm.size), topology)
        check_everywhere(comm, (all_reduce(np.ones(5), topology) == comm.size).all(), "the next call")


@pytest.mark.mpi(min_size=2)
def test_more_segments_than_may_be_on_their_way_arrive_in_order(comm, monkeypatch):
    for name in ("SEGMENT_BYTES", "WHOLE_BYTES"):
        monkeypatch.setattr(messages, name, {"node": 256, "network": 64})
    monkeypatch.setattr(slots, "ROWS_BYTES", 0)
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            for algorithm in ("pairwise", "circulant", "butterfly", "hierarchical", "hierarchical:ring"):
                count = 2_001
                array = np.arange(count, dtype=np.int64) % 1001 + comm.rank
                all_reduce(array, topology, algorithm=algorithm)
                expected = comm.size * (np.arange(count) % 1001) + sum(range(comm.size))
                check_everywhere(comm, np.array_equal(array, expected), f"{node_map} {algorithm}")


@pytest.mark.mpi(min_size=2)
def test_a_vector_of_just_what_a_slot_holds_goes_through_it_and_one_element_more_does_not(comm):
    with Topology(comm, [rank * 2 // comm.size for rank in range(comm.size)]) as topology:
        most = slot_bytes(max(map(len, topology.map.nodes))) // 8
        for count, small in ((most, True), (most + 1, False)):
            array = np.ones(count)
            all_reduce(array, topology, algorithm="hierarchical")
            decision = list(Transport.of(topology).decisions.values())[-1]
            check_everywhere(comm, (array == comm.size).all() and decision.small == small, f"{count}: {decision.what}")
