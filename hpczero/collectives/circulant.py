"""Circulant: as few rounds as a butterfly and as few bytes as a ring, for every number of ranks.

Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", preprint, doi 10.34726/10760 (2025). The
distances between ranks that exchange start at p and are halved, rounded up, until 1. Rank r looks at its blocks from
its own on: r, r + 1, ..., r - 1 modulo p. In a round whose distance goes from s to s', the blocks at places s' to s - 1
of that list go to the rank s' to the right, where they are the first s - s'. Backwards and without additions this is an
all-gather.

`reduce_scatter`, `all_gather`: ceil(lg p) rounds in which p - 1 blocks of n / p leave and arrive; together 2 ceil(lg p)
alpha + 2 (p - 1) / p n beta + (p - 1) / p n gamma. `reduce`, `broadcast`: one of the two halves, and a binomial gather
or scatter of the blocks: the same rounds and, at the root, the same bytes.

The largest messages go to the farthest ranks: for one level (a node, or a rank per node), not across nodes of several
ranks. The order of additions is the same tree for each block, over ranks that start at its owner: all ranks get the
same bits, which depend on how a vector is cut, except with two ranks.

Blocks that leave in the reduce-scatter among 5:

             rank 0  rank 1  rank 2  rank 3  rank 4
    round 0  3:3-4   4:4,0   0:0-1   1:1-2   2:2-3
    round 1  2:2     3:3     4:4     0:0     1:1
    round 2  1:1     2:2     3:3     4:4     0:0
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives import tree
from hpczero.collectives.schedule import Step, exchange


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Rank r ends with block r summed over all ranks; its other blocks hold partial sums."""
    for far, near in _distances(size):
        yield exchange(
            (rank + near) % size, _blocks(rank + near, far - near, size),
            (rank - near) % size, _blocks(rank, far - near, size),
            add=True,
        )


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    for far, near in reversed(_distances(size)):
        yield exchange(
            (rank - near) % size, _blocks(rank, far - near, size),
            (rank + near) % size, _blocks(rank + near, far - near, size),
        )


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce-scatter, then all-gather: 2 ceil(lg size) rounds, 2 (size - 1) / size of the vector."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def reduce(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Reduce-scatter, then a binomial gather: the root ends with all blocks summed."""
    yield from reduce_scatter(rank, size)
    yield from tree.gather(rank, size, root)


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Binomial scatter, then all-gather: every rank ends with the root's blocks."""
    yield from tree.scatter(rank, size, root)
    yield from all_gather(rank, size)


def _distances(size: int) -> list[tuple[int, int]]:
    """(s, s') of every round of the reduce-scatter."""
    found = []
    while size > 1:
        found.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return found


def _blocks(first: int, count: int, size: int) -> list[int]:
    """`count` consecutive blocks, of which the one after the last is 0."""
    first %= size
    return [*range(first, min(first + count, size)), *range(first + count - size)]
