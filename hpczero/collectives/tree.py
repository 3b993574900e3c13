"""Trees: the binomial one for few rounds, and two binary ones at once for full bandwidth.

**Binomial.** In round k, groups of 2^k ranks meet in pairs. Classic; see Thakur, Rabenseifner and Gropp, "Optimization
of collective communication operations in MPICH", IJHPCA 19 (2005), section 5. `reduce`, `broadcast`: ceil(lg p) rounds
with the whole vector, ceil(lg p) (alpha + n beta); `gather`, `scatter`: as many rounds, (p - 1) / p of the vector at
the root. The groups are the parts of the canonical tree over all ranks, whatever the root is, so the sum is that tree's
for every size and root (another root than 0 adds what stands on its left to its own, which is the same number).

Broadcast from 0 among 5, all 5 blocks in each message:

             rank 0  rank 1  rank 2  rank 3  rank 4
    round 0  4:0-4   -       -       -       -
    round 1  2:0-4
    round 2  1:0-4           3:0-4

**Double binary.** Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). Two in-order binary trees over all ranks but the root, which stands above both; the
interior ranks of one are leaves of the other, so nobody sends or receives more than the vector. Each tree carries half
of it, in segments that follow each other: with s segments per tree, blocks 0 to s - 1 go through the first and s to 2 s
- 1 through the second. `double_reduce`, `double_broadcast`: ceil(lg p) + s - 1 rounds; `double_all_reduce`: both, so 2
ceil(lg p) + k - 2 rounds for k = 2 s blocks. A round takes alpha + (n / s) beta, so the best s costs an all-reduce 2
(lg p alpha + n beta) + 4 sqrt(lg p alpha n beta). The sum of a block is taken along its tree: all ranks get the same
bits, which depend on how the vector is cut, except with two ranks.

Double-tree broadcast from 0 among 5, 2 segments per tree:

             rank 0   rank 1  rank 2   rank 3   rank 4
    round 0  4:0 1:2  -       -        -        -
    round 1  4:1 1:3  3:2     -        -        2:0
    round 2  -        3:3     1:0 3:0  4:2 2:2  2:1
    round 3  -        -       1:1 3:1  4:3 2:3  -
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpczero.collectives.schedule import Message, Step, merged

LATENCY_BYTES = 64 * 2**10
"""About how much passes in the time that one message costs: it balances the number of segments against their size."""
SMALLEST_SEGMENT_BYTES = 16 * 2**10


def reduce(rank: int, size: int, root: int = 0, *, blocks: Sequence[int] | None = None) -> Iterator[Step]:
    """The root ends with every block summed over all ranks; the blocks of the others hold partial sums.

    Of `blocks`, or of one block per rank. `root` is among the ranks of 0 to size - 1 here and below.
    """
    blocks = range(size) if blocks is None else blocks
    for stays, goes, _ in _meetings(rank, size, root):
        yield Step(send=(Message(stays, blocks),)) if rank == goes else Step(recv=(Message(goes, blocks),), add=True)


def broadcast(rank: int, size: int, root: int = 0, *, blocks: Sequence[int] | None = None) -> Iterator[Step]:
    """Every rank ends with the root's blocks: all of `blocks`, or of one block per rank."""
    blocks = range(size) if blocks is None else blocks
    for stays, goes, _ in reversed(list(_meetings(rank, size, root))):
        yield Step(send=(Message(goes, blocks),)) if rank == stays else Step(recv=(Message(stays, blocks),))


def gather(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Rank r starts with block r; the root ends with all blocks."""
    for stays, goes, behind in _meetings(rank, size, root):
        yield Step(send=(Message(stays, behind),)) if rank == goes else Step(recv=(Message(goes, behind),))


def scatter(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Rank r ends with the root's block r."""
    for stays, goes, behind in reversed(list(_meetings(rank, size, root))):
        yield Step(send=(Message(goes, behind),)) if rank == stays else Step(recv=(Message(stays, behind),))


def all_reduce(rank: int, size: int, *, blocks: Sequence[int] | None = None) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast: 2 ceil(lg size) rounds with the whole vector. For small vectors."""
    yield from reduce(rank, size, blocks=blocks)
    yield from broadcast(rank, size, blocks=blocks)


def double_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Step]:
    """The root ends with all 2 * segments blocks summed over all ranks; the blocks of the others hold partial sums."""
    height, places = _height(size), _places(rank, size, root)
    for now in range(height + segments - 1 if size > 1 else 0):
        turns = []
        for number, place in enumerate(places):
            # The deepest ranks send segment 0 in round 0; a rank at depth d sends it when all below have done so.
            leaving = _segment(now - (height - place.depth), number, segments)
            arriving = _segment(now - (height - place.depth - 1), number, segments)
            turns.append(Step(_messages(place.above, leaving), _messages(place.children, arriving), add=True))
        yield merged(turns)


def double_broadcast(rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Step]:
    """Every rank ends with the root's 2 * segments blocks."""
    height, places = _height(size), _places(rank, size, root)
    for now in range(height + segments - 1 if size > 1 else 0):
        turns = []
        for number, place in enumerate(places):
            leaving = _segment(now - place.depth, number, segments)
            arriving = _segment(now - (place.depth - 1), number, segments)
            turns.append(Step(_messages(place.children, leaving), _messages(place.above, arriving)))
        yield merged(turns)


def double_all_reduce(rank: int, size: int, segments: int = 1) -> Iterator[Step]:
    """Reduce to rank 0 along both trees, then broadcast along both: every rank ends with all blocks summed."""
    yield from double_reduce(rank, size, 0, segments)
    yield from double_broadcast(rank, size, 0, segments)


def num_segments(size: int, nbytes: int) -> int:
    """Segments per tree for a vector of `nbytes`: sqrt(lg p n beta / alpha), the minimum of the cost above."""
    best = math.isqrt(_height(size) * nbytes // LATENCY_BYTES)
    return max(1, min(best, nbytes // (2 * SMALLEST_SEGMENT_BYTES)))


def _meetings(rank: int, size: int, root: int) -> Iterator[tuple[int, int, range]]:
    """Where this rank's groups meet another, from the smallest up: (who goes on, who hands over, the ranks behind it).

    The groups are 0-1 2-3 4-5 ..., 0-3 4-7 ...: the parts of the canonical tree. For each one rank speaks: the root if
    it is in there, else the first.
    """
    distance = 1
    while distance < size:
        first = rank - rank % (2 * distance)
        middle, last = first + distance, min(first + 2 * distance, size)
        if middle < size:
            left, right = range(first, middle), range(middle, last)
            if root in right:
                stays, goes, behind = root, first, left
            else:
                stays, goes, behind = (root if root in left else first), middle, right
            yield stays, goes, behind
            if rank == goes:
                return
        distance *= 2


class _Place:
    """Where one rank stands in one of the two trees: its depth below the root, whom it has above and below."""

    __slots__ = ("above", "children", "depth")

    def __init__(self, rank: int, size: int, root: int, second: bool):
        # The tree is over labels 1 to `last`, of which the odd ones are leaves. The first tree numbers the ranks behind
        # the root so; the second one backwards, or shifted by one where that makes the first's interior ranks odd.
        last = size - 1

        def rank_of(label: int) -> int:
            if second and label:
                label = (label - 2) % last + 1 if last % 2 else last + 1 - label
            return (label + root) % size

        label = (rank - root) % size
        if second and label:
            label = label % last + 1 if last % 2 else last + 1 - label
        self.children = [rank_of(child) for child in _children(label, last)]
        self.above = [rank_of(_parent(label, last))] if label else []
        self.depth = 0
        while label:
            label = _parent(label, last)
            self.depth += 1


def _places(rank: int, size: int, root: int) -> list[_Place]:
    return [_Place(rank, size, root, second) for second in (False, True)]


def _height(size: int) -> int:
    return (size - 1).bit_length()


def _parent(label: int, last: int) -> int:
    """The parent in the in-order tree over labels 1 to `last`; 0, which stands for the root, above its top."""
    bit = label & -label
    while True:
        label = label - bit | 2 * bit
        bit = label & -label
        if label <= last:
            return label
        if bit > last:
            return 0


def _children(label: int, last: int) -> list[int]:
    if label == 0:
        return [1 << last.bit_length() - 1] if last else []
    half = (label & -label) // 2
    if not half:
        return []
    right = half
    while right and label + right > last:
        right //= 2
    return [label - half, *([label + right] if right else [])]


def _messages(peers: Sequence[int], blocks: Sequence[int]) -> tuple[Message, ...]:
    return tuple(Message(peer, blocks) for peer in peers) if blocks else ()


def _segment(index: int, tree: int, segments: int) -> range:
    """The block that carries a tree's segment `index`, or none where there is no such segment."""
    return range(tree * segments + index, tree * segments + index + 1) if 0 <= index < segments else range(0)
