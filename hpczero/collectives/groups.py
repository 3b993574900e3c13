"""Who meets whom: the groups of ranks that collectives form, as one rank sees them. Pure.

Nothing here is a formula of its own: every value is read off the steps of the schedules that run (`tree`, `ring`,
`butterfly`, `hierarchical`), so it cannot say anything else than what they do. Ranks are those of the communicator.

Cost: the depth of a tree, and the rounds of a butterfly, need the steps of every rank: a second or two for 4096 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpczero.collectives import butterfly, hierarchical, ring, tree
from hpczero.collectives.schedule import Step
from hpczero.topology import NodeMap


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """Sums climb from the children to the parent; results come down again."""

    parent: int | None
    """None on the root."""
    children: tuple[int, ...]
    """In the order in which their sums are added."""
    depth: int
    """Ranks between this one and the root, the root counted: 0 on the root itself."""
    height: int
    """The depth of the deepest rank of all; the same on every rank."""


@dataclass(frozen=True, slots=True)
class RingGroup:
    """Blocks come from the previous rank and go on to the next. Alone, a rank is its own neighbour."""

    next: int
    previous: int
    size: int


@dataclass(frozen=True, slots=True)
class ButterflyGroup:
    """Recursive doubling, for any number of ranks."""

    partners: tuple[int, ...]
    """Whom this rank meets, in order. A rank may be absent from the first and the last stage, or take part in those two
    only: where the number of ranks is no power of two, some hand their vector to a partner and get the sum back."""
    stages: int
    """Stages in all; the same on every rank."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of one rank."""

    node: tuple[int, ...]
    """The ranks of this rank's node, itself included: among them, sums are formed first."""
    cross: tuple[int, ...]
    """This rank and those of other nodes that it exchanges the nodes' sums with. Where all nodes are equally large, one
    of each: the rank at the same place. A node with fewer ranks meets more of the others."""
    tree: TreeGroup
    ring: RingGroup
    butterfly: ButterflyGroup


def groups(rank: int, nodes: NodeMap) -> Groups:
    """The groups of `rank` among the ranks of `nodes`."""
    inside = [*hierarchical.inside_reduce_scatter(rank, nodes), *hierarchical.inside_all_gather(rank, nodes)]
    across = [*hierarchical.across_reduce_scatter(rank, nodes), *hierarchical.across_all_gather(rank, nodes)]
    return Groups(
        node=tuple(sorted({rank, *_peers(inside)})),
        cross=tuple(sorted({rank, *_peers(across)})),
        tree=tree_group(rank, nodes.size),
        ring=ring_group(rank, nodes.size),
        butterfly=butterfly_group(rank, nodes.size),
    )


def tree_group(rank: int, size: int) -> TreeGroup:
    """The place of `rank` in the reduction to rank 0."""
    parents = {other: _parent(other, size) for other in range(size)}
    depths: dict[int | None, int] = {None: -1}
    for other in range(size):
        path = []
        while other not in depths:
            path.append(other)
            other = parents[other]
        for below in reversed(path):
            depths[below] = depths[parents[below]] + 1
    children = [message.peer for step in tree.reduce(rank, size) for message in step.recv]
    return TreeGroup(parents[rank], tuple(children), depths[rank], max(depths.values()))


def ring_group(rank: int, size: int) -> RingGroup:
    """The neighbours of `rank` in the ring of all ranks."""
    first = next(ring.all_reduce(rank, size), None)
    if first is None:
        return RingGroup(rank, rank, size)
    return RingGroup(first.send[0].peer, first.recv[0].peer, size)


def butterfly_group(rank: int, size: int) -> ButterflyGroup:
    """The partners of `rank` in recursive doubling over all ranks."""
    stages = max(sum(1 for _ in butterfly.all_reduce(other, size)) for other in range(size))
    return ButterflyGroup(tuple(next(_peers([step])) for step in butterfly.all_reduce(rank, size)), stages)


def _parent(rank: int, size: int) -> int | None:
    return next((message.peer for step in tree.reduce(rank, size) for message in step.send), None)


def _peers(steps: Iterable[Step]) -> Iterable[int]:
    for step in steps:
        for message in (*step.send, *step.recv):
            yield message.peer
