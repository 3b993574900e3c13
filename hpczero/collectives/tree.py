"""Binomial tree: in round k, ranks 2^k apart meet. The fewest rounds for a reduction to, or a broadcast from, one rank.

Classic; see Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005), section 5. ceil(lg size) rounds, each with the whole vector. With root 0 every rank adds its children's sums in the
order of its canonical subtree, for every size: the sum is the canonical one.

Broadcast from 0 among 5 (all blocks in each message):

             rank 0  rank 1  rank 2  rank 3  rank 4
    round 0  4:0-4   -       -       -       -
    round 1  2:0-4           3:0-4
    round 2  1:0-4
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives.schedule import Message, Step


def reduce(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """The root ends with every block summed over all ranks; the blocks of the others hold partial sums."""
    place, blocks = (rank - root) % size, range(size)
    distance = 1
    while distance < size:
        if place & distance:
            yield Step(send=(Message((place - distance + root) % size, blocks),))
            return
        if place + distance < size:
            yield Step(recv=(Message((place + distance + root) % size, blocks),), add=True)
        distance *= 2


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Every rank ends with the root's blocks."""
    place, blocks = (rank - root) % size, range(size)
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        yield Step(recv=(Message((place - distance + root) % size, blocks),))
    while distance > 1:
        distance //= 2
        if place + distance < size:
            yield Step(send=(Message((place + distance + root) % size, blocks),))


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast: 2 ceil(lg size) rounds with the whole vector. For few ranks and small vectors."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)
