"""Ring: every rank passes blocks to its right neighbour. The fewest bytes, the most rounds.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69 (2009). Reduce-scatter and all-gather take p - 1 rounds and (p - 1) / p of the vector each, for every size p:
together 2 (p - 1) alpha + 2 (p - 1) / p n beta + (p - 1) / p n gamma. The order of additions starts at another rank for
each block: all ranks get the same bits, which depend on how a vector is cut, except with two ranks.

With s segments each rank's shard is s blocks, which follow each other: s (p - 1) rounds, in each of which a block
leaves that arrived s rounds ago. So the segment that arrived last can be added, or copied to a device, while the next
one is on its way: what it costs in rounds it gains where adding takes about as long as sending.

Blocks that leave in the reduce-scatter among 3:

             rank 0  rank 1  rank 2
    round 0  1:2     2:0     0:1
    round 1  1:1     2:2     0:0

The same in 2 segments per shard:

             rank 0  rank 1  rank 2
    round 0  1:4     2:0     0:2
    round 1  1:5     2:1     0:3
    round 2  1:2     2:4     0:0
    round 3  1:3     2:5     0:1
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives.schedule import Step, exchange

SEGMENT_BYTES = 512 * 2**10
"""What arrives should still be in the cache when it is added; smaller ones cost more in messages than that gains."""
MOST_SEGMENTS = 64


def reduce_scatter(rank: int, size: int, segments: int = 1) -> Iterator[Step]:
    """Rank r ends with shard r summed over all ranks; its other blocks hold partial sums."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        leaving, arriving = (rank - 1 - k) % size * segments, (rank - 2 - k) % size * segments
        for segment in range(segments):
            yield exchange(right, [leaving + segment], left, [arriving + segment], add=True)


def all_gather(rank: int, size: int, segments: int = 1) -> Iterator[Step]:
    """Rank r starts with shard r; every rank ends with all blocks."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        leaving, arriving = (rank - k) % size * segments, (rank - 1 - k) % size * segments
        for segment in range(segments):
            yield exchange(right, [leaving + segment], left, [arriving + segment])


def all_reduce(rank: int, size: int, segments: int = 1) -> Iterator[Step]:
    """Reduce-scatter, then all-gather: 2 (size - 1) rounds for each segment, 2 (size - 1) / size of the vector."""
    yield from reduce_scatter(rank, size, segments)
    yield from all_gather(rank, size, segments)


def num_segments(size: int, nbytes: int) -> int:
    """Segments per shard for a vector of `nbytes`."""
    return max(1, min(MOST_SEGMENTS, nbytes // (size * SEGMENT_BYTES)))
