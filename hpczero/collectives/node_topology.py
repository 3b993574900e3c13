"""The machine as a graph of nodes, with measured numbers on its edges: which node reaches which, how fast, how soon.

The leaders of all nodes play ping-pong in pairs (`links.ping_pong`). A round-robin tournament, as chess clubs use it,
gives rounds in which every node meets one other, so no two measurements share a card; every pair meets once, in m - 1
rounds for an even number m of nodes, m for an odd one. Inside each node its first two ranks do the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.collectives.links import SIZES, fit, ping_pong
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from hpczero.topology import Topology


@dataclass(frozen=True, eq=False)
class NodeTopology:
    """Numbers between m nodes, and inside each. The same on every rank; read-only arrays.

    Attributes
    ----------
    adjacency : (m, m) float64
        1 where two different nodes have exchanged messages, else 0.
    bandwidth : (m, m) float64
        MB/s (10^6 bytes per second) of one pair of ranks, one way; 0 on the diagonal.
    latency : (m, m) float64
        Milliseconds that a message of 8 bytes takes one way; 0 on the diagonal.
    node_bandwidth, node_latency : (m,) float64
        The same between two ranks of one node; NaN for a node with a single rank.
    """

    adjacency: np.ndarray
    bandwidth: np.ndarray
    latency: np.ndarray
    node_bandwidth: np.ndarray
    node_latency: np.ndarray

    @property
    def num_nodes(self) -> int:
        return self.adjacency.shape[0]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: lists; a number that was not measured is None."""
        return {
            "adjacency": self.adjacency.tolist(),
            "bandwidth_MB_per_s": self.bandwidth.tolist(),
            "latency_ms": self.latency.tolist(),
            "node_bandwidth_MB_per_s": _plain(self.node_bandwidth),
            "node_latency_ms": _plain(self.node_latency),
        }

    @classmethod
    def measure(cls, topology: Topology, budget_s: float = 1.0) -> NodeTopology:
        """Measures all pairs of nodes, then inside the nodes. Called by every rank, outside other calls.

        Takes about `budget_s` at most, but for links so slow that two messages take longer: each pair gets an equal
        part of the time, and large messages are left out where it is short.
        """
        from hpczero.collectives.transport import Transport

        if not budget_s > 0:
            raise ConfigError(f"budget_s={budget_s!r}: a time above 0 s is needed to measure anything")
        transport = Transport.of(topology)
        what = "measure the topology of nodes"

        def wait(requests: list) -> None:
            transport.wait(requests, what)

        comm, request = topology.world.Idup()
        wait([request])
        nodes, num_nodes = topology.map.nodes, topology.num_nodes
        stages = [[(nodes[a][0], nodes[b][0]) for a, b in pairs] for pairs in rounds(num_nodes)]
        stages.append([(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1])
        # Each rank fills in what it led: MB/s and ms, by pair of nodes.
        mine = np.full((2, num_nodes, num_nodes), np.nan)
        begin = time.monotonic()
        for index, pairs in enumerate(stages):
            wait([comm.Ibarrier()])
            left_s = budget_s - (time.monotonic() - begin)
            pair = next((pair for pair in pairs if topology.rank in pair), None)
            if pair is None:
                continue
            leads = topology.rank == pair[0]
            points = ping_pong(comm, pair[leads], leads, wait, max(0.0, 0.9 * left_s / (len(stages) - index)), SIZES)
            if points:
                place = tuple(topology.map.node_of[rank] for rank in pair)
                mine[(slice(None), *place)] = _bandwidth(points), 1e3 * points[0][1]
        found = np.empty((comm.size, *mine.shape))
        wait([comm.Iallgather(mine, found)])
        comm.Free()
        return cls._of(np.fmax.reduce(found))           # of each number one rank knows it, NaN on all others

    @classmethod
    def _of(cls, found: np.ndarray) -> NodeTopology:
        inside = found[:, np.arange(found.shape[1]), np.arange(found.shape[1])]
        between = np.fmax(found, found.transpose(0, 2, 1))
        between[:, np.arange(found.shape[1]), np.arange(found.shape[1])] = 0.0
        arrays = ((between[1] > 0).astype(np.float64), between[0], between[1], inside[0], inside[1])
        arrays = tuple(np.ascontiguousarray(array) for array in arrays)
        for array in arrays:
            array.flags.writeable = False
        return cls(*arrays)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Disjoint pairs of 0 to count - 1, round by round, such that every pair meets once (the circle method)."""
    places: list[int | None] = [*range(count), *([None] if count % 2 and count > 1 else [])]
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if None not in pair]
        places.insert(1, places.pop())


def _bandwidth(points: list[tuple[int, float]]) -> float:
    """MB/s: of the line through the larger sizes, where there are three of them; else of the largest message."""
    nbytes, seconds = points[-1]
    beta = fit(points[-3:])[1] if len(points) >= 3 else 0.0
    # A line through a few noisy points may rise too slowly to be believed.
    return 1e-6 / max(beta, seconds / nbytes / 2)


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
