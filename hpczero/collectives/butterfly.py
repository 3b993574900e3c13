"""Butterflies: in round k every rank exchanges with the one whose number differs in bit k.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005),
section 4. Two forms:

- recursive doubling (`all_reduce`): the whole vector in each of lg p rounds, lg p (alpha + n beta + n gamma); for small
  vectors.
- recursive halving + doubling (`halving_all_reduce`): half of what is left in each round, then back; 2 lg p rounds and
  2 (p - 1) / p of the vector, 2 lg p alpha + 2 (p - 1) / p n beta + (p - 1) / p n gamma. Near neighbours exchange
  first, while messages are largest: ranks of one node are near, and the additions form the canonical tree.

A size that is no power of two is folded: each rank beyond the largest power of two hands its vector to its left
neighbour before, and gets the result (its shard of it, or all) after: two rounds more. Both forms add in the canonical
order over all ranks at powers of two, and in an order of their own, the same for every element, at other sizes. The two
ranks of an exchange add the same two numbers, each its own first.

Halving reduce-scatter among 4:

             rank 0  rank 1  rank 2  rank 3
    round 0  1:1,3   0:0,2   3:1,3   2:0,2
    round 1  2:2     3:3     0:0     1:1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpczero.collectives.schedule import Message, Step, exchange


def num_halves(size: int) -> int:
    """Into how many blocks `halving_all_reduce` cuts the vector: the largest power of two up to `size`."""
    return 1 << size.bit_length() - 1


def all_reduce(rank: int, size: int, *, blocks: Sequence[int] | None = None) -> Iterator[Step]:
    """Recursive doubling: every rank ends with all of `blocks` summed, or with one block per rank."""
    blocks = range(size) if blocks is None else blocks
    fold = _Fold(size)
    yield from fold.enter(rank, blocks)
    if not fold.is_extra(rank):
        place = fold.place(rank)
        for distance in _doubling(fold.num_active):
            peer = fold.rank(place ^ distance)
            yield exchange(peer, blocks, peer, blocks, add=True)
    yield from fold.leave(rank, blocks)


def halving_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Recursive halving, then doubling, over `num_halves(size)` blocks; every rank ends with all of them summed."""
    fold = _Fold(size)
    active = fold.num_active
    yield from fold.enter(rank, range(active))
    if not fold.is_extra(rank):
        place, low, high = fold.place(rank), 0, active
        path = []
        for distance in _doubling(active):
            middle = (low + high) // 2
            kept, given = ((low, middle), (middle, high))[:: -1 if place & distance else 1]
            peer = fold.rank(place ^ distance)
            yield exchange(peer, range(*given), peer, range(*kept), add=True)
            path.append((peer, kept, given))
            low, high = kept
        for peer, kept, given in reversed(path):
            yield exchange(peer, range(*kept), peer, range(*given))
    yield from fold.leave(rank, range(active))


def halving_reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Rank r ends with block r summed; blocks are kept by the bits of their owner, so messages may be scattered."""
    fold = _Fold(size)
    yield from fold.enter(rank, range(size))
    if fold.is_extra(rank):
        yield Step(recv=(Message(rank - 1, [rank]),))
        return
    place = fold.place(rank)
    for distance in _doubling(fold.num_active):
        other = place ^ distance
        peer = fold.rank(other)
        given, kept = fold.blocks_like(other, 2 * distance), fold.blocks_like(place, 2 * distance)
        yield exchange(peer, given, peer, kept, add=True)
    if fold.is_extra(rank + 1):
        yield Step(send=(Message(rank + 1, [rank + 1]),))


def doubling_all_gather(rank: int, size: int) -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    fold = _Fold(size)
    if fold.is_extra(rank):
        yield Step(send=(Message(rank - 1, [rank]),))
        yield Step(recv=(Message(rank - 1, range(size)),))
        return
    if fold.is_extra(rank + 1):
        yield Step(recv=(Message(rank + 1, [rank + 1]),))
    place = fold.place(rank)
    for distance in _doubling(fold.num_active):
        other = place ^ distance
        peer = fold.rank(other)
        yield exchange(peer, fold.blocks_near(place, distance), peer, fold.blocks_near(other, distance))
    if fold.is_extra(rank + 1):
        yield Step(send=(Message(rank + 1, range(size)),))


def _doubling(active: int) -> Iterator[int]:
    distance = 1
    while distance < active:
        yield distance
        distance *= 2


@dataclass(frozen=True, slots=True)
class _Fold:
    """The ranks that take part, a power of two: of the first 2 * extra ranks, each odd one stands behind its left one."""

    size: int

    @property
    def num_active(self) -> int:
        return num_halves(self.size)

    @property
    def num_extra(self) -> int:
        return self.size - self.num_active

    def is_extra(self, rank: int) -> bool:
        return rank < 2 * self.num_extra and rank % 2 == 1

    def place(self, rank: int) -> int:
        """The number of an active rank among the active ones."""
        return rank // 2 if rank < 2 * self.num_extra else rank - self.num_extra

    def rank(self, place: int) -> int:
        return 2 * place if place < self.num_extra else place + self.num_extra

    def blocks_of(self, place: int) -> list[int]:
        """The blocks an active rank answers for: its own, and that of the rank behind it."""
        rank = self.rank(place)
        return [rank, rank + 1] if self.is_extra(rank + 1) else [rank]

    def blocks_like(self, place: int, modulus: int) -> list[int]:
        """The blocks of all active ranks whose number agrees with `place` in the bits below `modulus`."""
        return [block for other in range(place % modulus, self.num_active, modulus) for block in self.blocks_of(other)]

    def blocks_near(self, place: int, width: int) -> list[int]:
        """The blocks of the `width` active ranks that share `place`'s higher bits."""
        first = place - place % width
        return [block for other in range(first, first + width) for block in self.blocks_of(other)]

    def enter(self, rank: int, blocks: Sequence[int]) -> Iterator[Step]:
        if self.is_extra(rank):
            yield Step(send=(Message(rank - 1, blocks),))
        elif self.is_extra(rank + 1):
            yield Step(recv=(Message(rank + 1, blocks),), add=True)

    def leave(self, rank: int, blocks: Sequence[int]) -> Iterator[Step]:
        if self.is_extra(rank):
            yield Step(recv=(Message(rank - 1, blocks),))
        elif self.is_extra(rank + 1):
            yield Step(send=(Message(rank + 1, blocks),))
