"""How fast a message travels between two ranks: what the bandwidths of a benchmark are compared with.

Ping-pong between the first two ranks of the first node that has two, and between the leaders of the first two nodes,
one pair after the other while all other ranks wait; host memory, MPI's own Send and Recv. A link's bandwidth is the
best of some sizes and rounds: no time that was measured is too short. Takes some 10 ms inside a node, and half a second
at 1 Gbit/s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.topology import NodeMap

SIZES_BYTES = (64 * 2**10, 512 * 2**10, 4 * 2**20)
_ROUNDS = 5


def pairs(nodes: NodeMap) -> dict[str, tuple[int, int]]:
    """Kind of link -> the two ranks that measure it; empty where there is one rank."""
    found = {}
    if together := [ranks for ranks in nodes.nodes if len(ranks) > 1]:
        found["in a node"] = (together[0][0], together[0][1])
    if len(nodes.nodes) > 1:
        found["between nodes"] = (nodes.nodes[0][0], nodes.nodes[1][0])
    return found


def measure(comm: MPI.Comm, nodes: NodeMap) -> dict[str, float]:
    """Kind of link -> GB/s in one direction, the same on every rank of `comm`. Called by every rank."""
    return {
        kind: comm.bcast(_ping_pong(comm, *pair) if comm.rank in pair else None, root=pair[0])
        for kind, pair in pairs(nodes).items()
    }


def _ping_pong(comm: MPI.Comm, first: int, second: int) -> float:
    """Called by both ranks; the result counts on the first."""
    fastest = 0.0
    for nbytes in SIZES_BYTES:
        message = np.zeros(nbytes, np.uint8)
        for number in range(1 + _ROUNDS):      # the first round touches memory and sets up the link
            start = time.perf_counter()
            if comm.rank == first:
                comm.Send(message, second)
                comm.Recv(message, second)
            else:
                comm.Recv(message, first)
                comm.Send(message, first)
            if number:
                fastest = max(fastest, nbytes / ((time.perf_counter() - start) / 2) / 1e9)
    return fastest
