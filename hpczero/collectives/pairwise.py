"""Pairwise exchange: everyone sends everyone the block that is theirs, in one round.

The owner of a block holds all contributions to it at once and adds them in whatever order it likes: here in the order
of a tree it is given, at every size; by default in that of all ranks. Each value is rounded once. (p - 1) / p of the
vector each way, in one round of p - 1 messages: alpha + (p - 1) / p n beta + (p - 1) / p n gamma where messages of one
round are in flight together, (p - 1) alpha where they are not; all-reduce and reduce take two such rounds. The price is
room for the contributions of all ranks to one block.

Used where the order of additions must not depend on the algorithm; see Demmel and Nguyen, "Parallel reproducible
summation", IEEE Trans. Computers 64 (2015), on why that is worth a price.

Among 3:

             rank 0   rank 1   rank 2
    round 0  1:1 2:2  0:0 2:2  0:0 1:1
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives.order import Tree, balanced
from hpczero.collectives.schedule import Message, Step


def reduce_scatter(rank: int, size: int, tree: Tree | None = None) -> Iterator[Step]:
    """Rank r ends with block r summed in the order of `tree` (over the ranks); its other blocks are untouched."""
    if size > 1:
        others = [other for other in range(size) if other != rank]
        yield Step(
            send=tuple(Message(other, [other]) for other in others),
            recv=tuple(Message(other, [rank]) for other in others),
            fold=balanced(range(size)) if tree is None else tree,
        )


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    if size > 1:
        others = [other for other in range(size) if other != rank]
        yield Step(
            send=tuple(Message(other, [rank]) for other in others),
            recv=tuple(Message(other, [other]) for other in others),
        )


def all_reduce(rank: int, size: int, tree: Tree | None = None) -> Iterator[Step]:
    """Reduce-scatter in the order of `tree`, then all-gather."""
    yield from reduce_scatter(rank, size, tree)
    yield from all_gather(rank, size)


def reduce(rank: int, size: int, root: int = 0, tree: Tree | None = None) -> Iterator[Step]:
    """Reduce-scatter in the order of `tree`, then every rank sends its block to the root, which ends with all blocks."""
    yield from reduce_scatter(rank, size, tree)
    if rank != root:
        yield Step(send=(Message(root, [rank]),))
    elif size > 1:
        yield Step(recv=tuple(Message(other, [other]) for other in range(size) if other != root))
