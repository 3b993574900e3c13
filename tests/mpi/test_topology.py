"""Nodes found and forced, communicators freed, memory shared."""

from __future__ import annotations

import os

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import memory
from hpczero.device import Device
from hpczero.errors import ConfigError, RoomError
from hpczero.memory import Arena
from hpczero.topology import Topology


def test_ranks_of_one_machine_are_one_node(comm):
    with Topology(comm) as topology:
        fine = (topology.num_nodes == 1 and topology.ranks_per_node == (comm.size,) and topology.node.size == comm.size
                and topology.cross.size == 1 and topology.local_rank == comm.rank
                and topology.is_leader == (comm.rank == 0))
        check_everywhere(comm, fine, repr(topology))
        check_everywhere(comm, topology.world != comm, "the caller's communicator itself is used")


def test_a_forced_map_makes_nodes_of_unequal_size_numbered_by_their_first_rank(comm):
    node_map = [7 if rank % 3 == 0 else 2 for rank in range(comm.size)]
    with Topology(comm, node_map) as topology:
        mine = [rank for rank in range(comm.size) if node_map[rank] == node_map[comm.rank]]
        fine = (topology.node_index == (0 if comm.rank % 3 == 0 else 1) and topology.node.size == len(mine)
                and topology.local_rank == mine.index(comm.rank) and topology.node.rank == topology.local_rank
                and sum(topology.ranks_per_node) == comm.size)
        check_everywhere(comm, fine, repr(topology))
        same_place = [rank for rank in range(comm.size) if topology.map.local_of[rank] == topology.local_rank]
        check_everywhere(comm, topology.cross.size == len(same_place), "cross")


def test_the_environment_can_force_the_map(comm, monkeypatch):
    monkeypatch.setenv("HPCZERO_NODE_MAP", ",".join(str(rank) for rank in range(comm.size)))
    with Topology(comm) as topology:
        check_everywhere(comm, topology.num_nodes == comm.size, repr(topology))


def test_a_map_that_cannot_be_is_refused_on_every_rank(comm, monkeypatch):
    for wrong, text in [([0] * (comm.size + 1), "names"), ([-1] * comm.size, "whole number"),
                        (["a"] * comm.size, "whole number"), ([comm.rank] * comm.size, "differs")]:
        if text == "differs" and comm.size == 1:
            continue
        try:
            Topology(comm, wrong)
            found = "nothing raised"
        except ConfigError as error:
            found = str(error)
        check_everywhere(comm, text in found, found)
    monkeypatch.setenv("HPCZERO_NODE_MAP", "0,x")
    with pytest.raises(ConfigError, match="HPCZERO_NODE_MAP"):
        Topology(comm)


def test_what_is_no_communicator_is_refused(comm):
    for wrong in (None, "world", 3):
        with pytest.raises(ConfigError, match="communicator"):
            Topology(wrong)


@pytest.mark.time_limit(200)
def test_five_thousand_topologies_leak_no_communicator(comm):
    if comm.size > 3:
        pytest.skip("ranks beyond the cores make this slow, and a leak shows with fewer")
    # MPICH has about 2,000 communicators and stops when they are used up; five leak per topology, if any do.
    for _ in range(5000 if comm.size <= 2 else 500):
        Topology(comm).close()
    check_everywhere(comm, comm.allreduce(1) == comm.size, "")


def test_node_shared_memory_is_seen_by_the_neighbours_and_starts_zeroed(comm):
    for node_map in (None, [rank % 2 for rank in range(comm.size)]):
        with Topology(comm, node_map) as topology:
            for dtype, shape in ((np.float32, (3, 5)), (np.uint8, 7), (np.float64, (0,)), (np.int64, ())):
                array = topology.empty(shape, dtype)
                fine = array.shape == (shape if isinstance(shape, tuple) else (shape,)) and not array.any()
                check_everywhere(comm, fine and array.dtype == dtype, f"{array}")
            rows = memory.node_rows(topology, 1000, np.dtype(np.float32))
            rows.mine[:] = comm.rank
            topology.node.Barrier()
            seen = [float(rows.all[row, 999]) for row in range(topology.node.size)]
            check_everywhere(comm, seen == list(map(float, topology.map.nodes[topology.node_index])), f"{seen}")
            topology.node.Barrier()
            rows.close()


def test_too_little_shared_memory_is_an_error_on_all_ranks_before_anything_is_touched(comm, monkeypatch):
    if comm.size == 1:
        return
    real = os.statvfs

    class Small:
        def __init__(self, folder):
            self.f_bavail, self.f_frsize = 16, real(folder).f_frsize

    monkeypatch.setattr(os, "statvfs", Small)
    with Topology(comm) as topology:
        try:
            topology.empty(10**6)
            found = "nothing raised"
        except RoomError as error:
            found = str(error)
        check_everywhere(comm, "MiB free" in found and "rank 0" in found, found)
        check_everywhere(comm, topology.empty(100).sum() == 0, "what fits is still given")


def test_the_arena_counts_every_byte_by_purpose_and_staggers_its_buffers(comm):
    with Topology(comm) as topology:
        arena = Arena(topology, Device("cpu", 0, "host", np))
        private = [arena.private(4096, np.float32, "optimizer_states") for _ in range(3)]
        rows = arena.rows(4096, np.float32, "gradients")
        single = arena.single(4096, np.float32, "parameters")
        held = arena.bytes_by_purpose
        check_everywhere(comm, held["optimizer_states"] == 3 * 4 * 4096, f"{held}")
        check_everywhere(comm, held["parameters"] == 4 * 4096 / comm.size, f"{held}")
        check_everywhere(comm, 4 * 4096 <= held["gradients"] <= 4 * 4096 + 512, f"{held}")
        starts = [array.ctypes.data % 4096 for array in private]
        check_everywhere(comm, len(set(starts)) == 3 and all(start % 64 == 0 for start in starts), f"{starts}")
        if comm.size > 1:
            distance = rows.all.strides[0] % 4096
            check_everywhere(comm, distance >= 320 and single.all.shape[0] == 1, f"{distance}")
        arena.close()
