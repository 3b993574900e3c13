"""Run by test_cluster.py on several nodes: every collective, by every algorithm, with whole numbers."""

from __future__ import annotations

import os
import sys

import numpy as np
from mpi4py import MPI

from hpczero.collectives import api
from hpczero.collectives.selection import ALGORITHMS, Call, candidates
from hpczero.collectives.transport import Transport
from hpczero.topology import Topology

expected_nodes = tuple(map(int, sys.argv[1].split("+")))
with Topology(MPI.COMM_WORLD) as topology:
    assert topology.ranks_per_node == expected_nodes, topology
    size, rank, wrong = topology.size, topology.rank, []
    for operation in ALGORITHMS:
        for count in (0, 5, 300007):
            for name in (*candidates(Call(operation, 8 * count, topology.map, "any")), "adaptive"):
                mine = np.arange(count, dtype=np.float64) % 11 + rank
                total = size * (np.arange(count) % 11) + size * (size - 1) // 2
                shard = api.shard_slice(count, rank, size)
                if operation == "all_gather":
                    total = np.arange(count, dtype=np.float64)
                    mine = np.where((total >= shard.start) & (total < shard.stop), total, -1)
                found = getattr(api, operation)(mine, topology, algorithm=name)
                if operation == "broadcast":
                    right = np.array_equal(found, np.arange(count) % 11)
                elif operation == "reduce_scatter":
                    right = np.array_equal(found, total[shard])
                else:
                    right = found is None if operation == "reduce" and rank else np.array_equal(found, total)
                if not right:
                    wrong.append(f"{operation} {name} {count}")
    array = np.ones(12 * 4000, np.float32)
    transport = Transport.of(topology)
    before = transport.bytes_sent["network"]
    api.all_reduce(array, topology, algorithm="hierarchical")
    by_card = topology.node.allreduce(transport.bytes_sent["network"] - before)
    bound = 2 * (topology.num_nodes - 1) * array.nbytes // topology.num_nodes
    wrong += [f"{by_card} bytes by this node's card, {bound} at best"] if by_card != bound else []
    everyone = [text for texts in topology.world.allgather(wrong) for text in texts]
    if rank == 0:
        os.write(1, ("\n".join(everyone) or f"all right on {topology.ranks_per_node}").encode() + b"\n")
sys.exit(bool(everyone))
