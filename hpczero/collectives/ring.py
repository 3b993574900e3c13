"""Ring: every rank passes blocks to its right neighbour. The fewest bytes, the most rounds.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69 (2009). Reduce-scatter and all-gather take size - 1 rounds and (size - 1) / size of the vector each; works for every
size. The order of additions starts at another rank for each block, so bits depend on how a vector is cut, except with two
ranks.

Blocks that leave in the reduce-scatter among 3:

             rank 0  rank 1  rank 2
    round 0  1:2     2:0     0:1
    round 1  1:1     2:2     0:0
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives.schedule import Step, exchange


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Rank r ends with block r summed over all ranks; its other blocks hold partial sums."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield exchange(right, [(rank - 1 - k) % size], left, [(rank - 2 - k) % size], add=True)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield exchange(right, [(rank - k) % size], left, [(rank - 1 - k) % size])


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce-scatter, then all-gather: 2 (size - 1) rounds, 2 (size - 1) / size of the vector."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)
