"""Collectives with `blocking=False`: the same results, in the program's order, beside what the program does meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import check_everywhere
from mpi4py import MPI

from hpczero.collectives import comm_thread
from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter, shard_slice
from hpczero.errors import ConfigError, MismatchError
from hpczero.topology import Topology


@pytest.mark.parametrize("node_map", [None, "striped"])
def test_every_collective_with_a_handle_gives_what_it_gives_without(comm, node_map):
    nodes = [rank % 2 for rank in range(comm.size)] if node_map else None
    with Topology(comm, nodes) as topology:
        mine = np.arange(30001.0) % 7 + comm.rank
        total = sum(np.arange(30001.0) % 7 + rank for rank in range(comm.size))
        shard = shard_slice(mine.size, comm.rank, comm.size)
        gathered = np.where(np.arange(mine.size) // 1 < 0, 0, -1.0)
        gathered[shard] = comm.rank
        handles = {
            "all_reduce": all_reduce(mine.copy(), topology, blocking=False),
            "reduce_scatter": reduce_scatter(mine.copy(), topology, blocking=False),
            "all_gather": all_gather(gathered, topology, blocking=False),
            "broadcast": broadcast(mine.copy(), topology, root=comm.size - 1, blocking=False),
            "reduce": reduce(mine.copy(), topology, blocking=False),
        }
        found = {name: handle.wait() for name, handle in handles.items()}
        everyone = np.concatenate([
            np.full(shard_slice(mine.size, rank, comm.size).stop - shard_slice(mine.size, rank, comm.size).start, rank)
            for rank in range(comm.size)
        ])
        check_everywhere(comm, np.array_equal(found["all_reduce"], total), "all_reduce")
        check_everywhere(comm, np.array_equal(found["reduce_scatter"], total[shard]), "reduce_scatter")
        check_everywhere(comm, np.array_equal(found["all_gather"], everyone), "all_gather")
        check_everywhere(comm, np.array_equal(found["broadcast"], np.arange(30001.0) % 7 + comm.size - 1), "broadcast")
        right = np.array_equal(found["reduce"], total) if comm.rank == 0 else found["reduce"] is None
        check_everywhere(comm, right and all(handle.test() for handle in handles.values()), "reduce")


def test_many_handles_and_blocking_calls_between_them_keep_one_order(comm):
    with Topology(comm) as topology:
        arrays = [np.full(100 + 997 * index, float(comm.rank + index)) for index in range(20)]
        handles = [all_reduce(array, topology, blocking=False) for array in arrays]
        last = all_reduce(arrays[-1], topology)      # after all of them: of an array that was reduced once already
        handles[0].wait()
        sums = [comm.size * (comm.size - 1) / 2 + index * comm.size for index in range(20)]
        right = [bool((array == value).all()) for array, value in zip(arrays[:-1], sums[:-1], strict=True)]
        check_everywhere(comm, all(right) and bool((last == comm.size * sums[-1]).all()), f"{right}")


def test_what_a_collective_raises_is_raised_by_wait_on_every_rank(comm):
    if comm.size == 1:
        return
    with Topology(comm) as topology:
        handle = all_reduce(np.zeros(10 + comm.rank // (comm.size - 1)), topology, blocking=False)
        with pytest.raises(MismatchError, match=f"rank {comm.size - 1} of {comm.size}" if comm.size > 2 else "rank"):
            handle.wait()
        with pytest.raises(ConfigError, match="op='maximum'"):
            all_reduce(np.zeros(4), topology, op="maximum", blocking=False).wait()
        check_everywhere(comm, all_reduce(np.ones(3), topology)[0] == comm.size, "the topology is of no use any more")


def test_a_topology_that_closes_lets_what_is_on_its_way_come_to_its_end(comm):
    array = np.full(200000, 1.0)
    with Topology(comm) as topology:
        all_reduce(array, topology, blocking=False)
    check_everywhere(comm, bool((array == comm.size).all()), f"{array[:3]}")


def test_a_lower_thread_level_is_refused_by_name(comm, monkeypatch):
    monkeypatch.setattr(comm_thread.MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    with Topology(comm) as topology:
        with pytest.raises(ConfigError, match="started as funneled"):
            all_reduce(np.zeros(4), topology, blocking=False)
        check_everywhere(comm, all_reduce(np.ones(4), topology)[0] == comm.size, "the blocking call does not work")
