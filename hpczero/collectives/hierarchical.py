"""Two levels: inside the nodes first, between the nodes only what is left.

Every node's card carries 2 (m - 1) / m of the vector for m nodes, the bound for any all-reduce, and all ranks of a node
take part: Cho et al., "BlueConnect", MLSys 2019. Here for nodes of unequal size and any placement of ranks.

The vector is cut into *columns* (`Cut`), as many as the largest node has ranks. On every node one rank answers for a
column, its member there: column c belongs to local rank c modulo the number of ranks of the node, so that a rank of a
small node is a member of several. Reduce-scatter: inside each node every rank sends each block to the member that
answers for it, which adds the node's contributions; then the members of each column reduce-scatter their blocks among
each other, a block per node. All-gather runs backwards. What one rank does for several columns is one step.

- `owned`: block r is rank r's shard, for reduce-scatter and all-gather. Columns hold fewer blocks where a node lacks a
  rank.
- `even`: m blocks in each column, so that an all-reduce brings every card to the bound whatever the sizes of the nodes.
- `whole`: a block per column, for broadcast and reduce.

Between nodes any flat algorithm can run (`BETWEEN`). Pairwise, the default, adds in the canonical order for every
number of ranks and any node map; halving does where the number of nodes is a power of two, ring and circulant where it
is 1 or 2. Cost with l ranks on every node, alpha and beta inside, alpha' and beta' of a rank between nodes, both ways:
2 (alpha + (l - 1) / l n beta) + T(m, n / l), where T is the flat algorithm's all-reduce, for pairwise 2 (alpha' + (m -
1) / m (n / l) beta'). `broadcast` and `reduce` take a binomial tree over the nodes, in each column: one vector reaches,
or leaves, each node.

Where a node's memory is shared, only the `across_` parts send anything; see `window`.

**Leaders.** One rank speaks for its node: binomial trees inside, and pairwise exchange (all-reduce) or a binomial tree
(broadcast, reduce) between the leaders. The same bytes per card, all from one rank, but only few messages: for small
vectors on nodes of many ranks. 2 ceil(lg l) (alpha + n beta) + 2 (alpha' + (m - 1) / m n beta'). Canonical order, for
every node map and root. In host memory a vector that fits into the slots of a node needs no messages inside (`small`).

All-gather among 3, node map 0 0 1, a shard each:

             rank 0  rank 1  rank 2
    round 0  2:0     2:1     0:2
    round 1  1:0,2   0:1

All-reduce among 5, node map 0 0 1 2 2: two columns, of blocks 0-2 and 3-5; rank 2 is a member of both.

             rank 0   rank 1   rank 2           rank 3   rank 4
    round 0  1:3-5    0:0-2    0:0 3:2 1:3 4:5  4:3-5    3:0-2
    round 1  2:1 3:2  2:4 4:5                   0:0 2:1  1:3 2:4
    round 2  2:0 3:0  2:3 4:3  0:1 3:1 1:4 4:4  0:2 2:2  1:5 2:5
    round 3  1:0-2    0:3-5                     4:0-2    3:3-5

The same by leaders, in 3 blocks:

             rank 0   rank 1  rank 2   rank 3   rank 4
    round 0  -        0:0-2   0:0 3:2  -        3:0-2
    round 1  2:1 3:2  -                0:0 2:1  -
    round 2  2:0 3:0          0:1 3:1  0:2 2:2
    round 3  1:0-2                     4:0-2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hpczero.collectives import butterfly, circulant, pairwise, ring, tree
from hpczero.collectives.order import balanced
from hpczero.collectives.schedule import Message, Schedule, Step, merged, within
from hpczero.topology import NodeMap

BETWEEN: dict[str, tuple[Schedule, Schedule]] = {
    "pairwise": (pairwise.reduce_scatter, pairwise.all_gather),
    "ring": (ring.reduce_scatter, ring.all_gather),
    "circulant": (circulant.reduce_scatter, circulant.all_gather),
    "halving": (butterfly.halving_reduce_scatter, butterfly.doubling_all_gather),
}
"""What can run between the nodes: how blocks, one per node, are reduced and scattered, and gathered."""


@dataclass(frozen=True, slots=True)
class Column:
    """One rank of every node, and the blocks of the column that end up with each of them."""

    members: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cut:
    """How a vector is cut over nodes and ranks."""

    columns: tuple[Column, ...]

    @cached_property
    def num_blocks(self) -> int:
        return len({block for column in self.columns for blocks in column.blocks for block in blocks})

    @cached_property
    def columns_of(self) -> dict[int, tuple[Column, ...]]:
        """The columns that each rank is a member of."""
        found: dict[int, list[Column]] = {}
        for column in self.columns:
            for rank in column.members:
                found.setdefault(rank, []).append(column)
        return {rank: tuple(columns) for rank, columns in found.items()}

    @cached_property
    def blocks_of(self) -> dict[int, tuple[int, ...]]:
        """The blocks that each rank answers for on its node."""
        return {
            rank: tuple(sorted({block for column in columns for blocks in column.blocks for block in blocks}))
            for rank, columns in self.columns_of.items()
        }


@lru_cache(maxsize=16)
def owned(nodes: NodeMap) -> Cut:
    """Block r is rank r's: in the column of its local rank, at its node."""
    return Cut(tuple(
        Column(members, tuple(ranks[column:column + 1] for ranks in nodes.nodes))
        for column, members in enumerate(_members(nodes))
    ))


@lru_cache(maxsize=16)
def even(nodes: NodeMap) -> Cut:
    """As many blocks as nodes in each column, one at each node."""
    num_nodes = len(nodes.nodes)
    return Cut(tuple(
        Column(members, tuple((column * num_nodes + node,) for node in range(num_nodes)))
        for column, members in enumerate(_members(nodes))
    ))


@lru_cache(maxsize=16)
def whole(nodes: NodeMap) -> Cut:
    """One block in each column, at all nodes."""
    return Cut(tuple(
        Column(members, ((column,),) * len(nodes.nodes)) for column, members in enumerate(_members(nodes))
    ))


def num_columns(nodes: NodeMap) -> int:
    """The ranks of the largest node."""
    return max(map(len, nodes.nodes))


def reduce_scatter(rank: int, nodes: NodeMap, between: str = "pairwise") -> Iterator[Step]:
    """Rank r ends with block r summed over all ranks; its other blocks hold partial sums."""
    yield from inside_reduce_scatter(rank, nodes)
    yield from across_reduce_scatter(rank, nodes, between=between)


def all_gather(rank: int, nodes: NodeMap, between: str = "pairwise") -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    yield from across_all_gather(rank, nodes, between=between)
    yield from inside_all_gather(rank, nodes)


def all_reduce(rank: int, nodes: NodeMap, cut: Cut | None = None, between: str = "pairwise") -> Iterator[Step]:
    """Reduce-scatter, then all-gather, over the blocks of `cut`: of `owned` unless it is given."""
    yield from inside_reduce_scatter(rank, nodes, cut)
    yield from across_reduce_scatter(rank, nodes, cut, between)
    yield from across_all_gather(rank, nodes, cut, between)
    yield from inside_all_gather(rank, nodes, cut)


def broadcast(rank: int, nodes: NodeMap, root: int = 0) -> Iterator[Step]:
    """Every rank ends with the root's blocks, those of `whole`: over its node, between the nodes, inside the nodes."""
    cut, home = whole(nodes), nodes.node_of[root]
    peers = _peers(root, nodes)
    if rank == root and peers:
        yield Step(send=tuple(Message(peer, cut.blocks_of[peer]) for peer in peers))
    elif rank in peers:
        yield Step(recv=(Message(root, cut.blocks_of[rank]),))
    yield from _across(rank, nodes, cut, lambda node, size: tree.broadcast(node, size, home, blocks=[0]))
    yield from inside_all_gather(rank, nodes, cut, complete=root)


def reduce(rank: int, nodes: NodeMap, root: int = 0) -> Iterator[Step]:
    """The root ends with the blocks of `whole` summed over all ranks; the blocks of the others hold partial sums."""
    cut, home = whole(nodes), nodes.node_of[root]
    yield from inside_reduce_scatter(rank, nodes, cut)
    yield from _across(rank, nodes, cut, lambda node, size: tree.reduce(node, size, home, blocks=[0]))
    peers = _peers(root, nodes)
    if rank == root and peers:
        yield Step(recv=tuple(Message(peer, cut.blocks_of[peer]) for peer in peers))
    elif rank in peers:
        yield Step(send=(Message(root, cut.blocks_of[rank]),))


def leader_all_reduce(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Every rank ends with all blocks, one per node, summed over all ranks; each node's first rank speaks for it."""
    blocks = range(len(nodes.nodes))
    yield from _inside(rank, nodes, 0, lambda local, size, root: tree.reduce(local, size, root, blocks=blocks))
    yield from among_leaders(rank, nodes)
    yield from _inside(rank, nodes, 0, lambda local, size, root: tree.broadcast(local, size, root, blocks=blocks))


def among_leaders(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """The leaders end with all blocks, one per node, summed over the leaders."""
    yield from _among_leaders(rank, nodes, 0, pairwise.all_reduce)


def leader_broadcast(rank: int, nodes: NodeMap, root: int = 0) -> Iterator[Step]:
    """Every rank ends with the root's vector, which is one block; the root speaks for its node."""
    home = nodes.node_of[root]
    yield from _among_leaders(rank, nodes, root, lambda node, size: tree.broadcast(node, size, home, blocks=[0]))
    yield from _inside(rank, nodes, root, lambda local, size, first: tree.broadcast(local, size, first, blocks=[0]))


def leader_reduce(rank: int, nodes: NodeMap, root: int = 0) -> Iterator[Step]:
    """The root ends with the vector, which is one block, summed over all ranks; the root speaks for its node."""
    home = nodes.node_of[root]
    yield from _inside(rank, nodes, root, lambda local, size, first: tree.reduce(local, size, first, blocks=[0]))
    yield from _among_leaders(rank, nodes, root, lambda node, size: tree.reduce(node, size, home, blocks=[0]))


def deputised(rank: int, nodes: NodeMap) -> list[int]:
    """The blocks of `owned` that `rank` answers for on its node: its own, and those of ranks elsewhere."""
    return list(owned(nodes).blocks_of[rank])


def inside_reduce_scatter(rank: int, nodes: NodeMap, cut: Cut | None = None) -> Iterator[Step]:
    """Each block is summed over the node, in canonical order, at the rank that answers for it there."""
    cut = cut or owned(nodes)
    peers = _peers(rank, nodes)
    if peers:
        yield Step(
            send=tuple(Message(peer, cut.blocks_of[peer]) for peer in peers),
            recv=tuple(Message(peer, cut.blocks_of[rank]) for peer in peers),
            fold=balanced(nodes.nodes[nodes.node_of[rank]]),
        )


def across_reduce_scatter(rank: int, nodes: NodeMap, cut: Cut | None = None,
                          between: str = "pairwise") -> Iterator[Step]:
    """The nodes' sums of each block are added where the block ends up."""
    yield from _across(rank, nodes, cut or owned(nodes), BETWEEN[between][0])


def across_all_gather(rank: int, nodes: NodeMap, cut: Cut | None = None, between: str = "pairwise") -> Iterator[Step]:
    """Each block goes from where it has ended up to the ranks that answer for it on the other nodes."""
    yield from _across(rank, nodes, cut or owned(nodes), BETWEEN[between][1])


def inside_all_gather(rank: int, nodes: NodeMap, cut: Cut | None = None, complete: int | None = None) -> Iterator[Step]:
    """Each rank sends the blocks it answers for to the ranks of its node, but for one that has them all: `complete`."""
    cut = cut or owned(nodes)
    peers = _peers(rank, nodes)
    if peers:
        yield Step(
            send=tuple(Message(peer, cut.blocks_of[rank]) for peer in peers if peer != complete),
            recv=tuple(Message(peer, cut.blocks_of[peer]) for peer in peers if rank != complete),
        )


def _members(nodes: NodeMap) -> Iterator[tuple[int, ...]]:
    """The members of each column, one of every node."""
    for column in range(num_columns(nodes)):
        yield tuple(ranks[column % len(ranks)] for ranks in nodes.nodes)


def _peers(rank: int, nodes: NodeMap) -> list[int]:
    return [peer for peer in nodes.nodes[nodes.node_of[rank]] if peer != rank]


def _across(rank: int, nodes: NodeMap, cut: Cut, schedule: Schedule) -> Iterator[Step]:
    """A schedule over the nodes, played in all of this rank's columns at once."""
    node, num_nodes = nodes.node_of[rank], len(nodes.nodes)
    plays = [within(schedule(node, num_nodes), column.members, column.blocks) for column in cut.columns_of[rank]]
    for steps in zip(*plays, strict=True):
        yield merged(steps)


def _inside(rank: int, nodes: NodeMap, root: int,
            schedule: Callable[[int, int, int], Iterable[Step]]) -> Iterator[Step]:
    """A schedule over the ranks of this node, whose root is the node's leader."""
    node = nodes.node_of[rank]
    ranks = nodes.nodes[node]
    yield from within(schedule(nodes.local_of[rank], len(ranks), ranks.index(_leader(node, nodes, root))), ranks)


def _among_leaders(rank: int, nodes: NodeMap, root: int, schedule: Schedule) -> Iterator[Step]:
    leaders = [_leader(node, nodes, root) for node in range(len(nodes.nodes))]
    if rank in leaders:
        yield from within(schedule(nodes.node_of[rank], len(leaders)), leaders)


def _leader(node: int, nodes: NodeMap, root: int) -> int:
    """The first rank of a node; of the root's node, the root."""
    return root if nodes.node_of[root] == node else nodes.nodes[node][0]
