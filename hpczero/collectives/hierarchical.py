"""Two levels: inside the nodes first, between the nodes only what is left.

Every node's card carries 2 (m - 1) / m of the vector for m nodes, the bound for any all-reduce, and all ranks of a node
take part: Cho et al., "BlueConnect", MLSys 2019. Here for nodes of unequal size and any placement of ranks, in terms of
who answers for what:

- block r belongs to rank r;
- on every node one rank, the owner's *deputy* there, answers for that block (`NodeMap.deputy`).

Reduce-scatter: inside each node, every rank sends each block to its deputy, which adds the node's contributions; then the
deputies send the node's sums to the owner, which adds them. All-gather runs backwards. Both levels exchange pairwise and
add in the canonical order, for every number of ranks and any node map.

Where a node's memory is shared, only the `across_` halves send anything; see `window`.

All-gather among 3, node map 0 0 1:

             rank 0  rank 1  rank 2
    round 0  2:0     2:1     0:2
    round 1  1:0,2   0:1     -
"""

from __future__ import annotations

from collections.abc import Iterator

from hpczero.collectives.order import balanced
from hpczero.collectives.schedule import Message, Step
from hpczero.topology import NodeMap


def reduce_scatter(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Rank r ends with block r summed over all ranks; its other blocks hold partial sums."""
    yield from inside_reduce_scatter(rank, nodes)
    yield from across_reduce_scatter(rank, nodes)


def all_gather(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Rank r starts with block r; every rank ends with all blocks."""
    yield from across_all_gather(rank, nodes)
    yield from inside_all_gather(rank, nodes)


def all_reduce(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, nodes)
    yield from all_gather(rank, nodes)


def deputised(rank: int, nodes: NodeMap) -> list[int]:
    """The blocks `rank` answers for on its node: its own, and those of ranks elsewhere whose deputy it is."""
    node = nodes.node_of[rank]
    return [block for block in range(nodes.size) if nodes.deputy(block, node) == rank]


def inside_reduce_scatter(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Each block is summed over the node, at its deputy there."""
    ranks = nodes.nodes[nodes.node_of[rank]]
    peers = [peer for peer in ranks if peer != rank]
    if peers:
        mine = deputised(rank, nodes)
        yield Step(
            send=tuple(Message(peer, deputised(peer, nodes)) for peer in peers),
            recv=tuple(Message(peer, mine) for peer in peers),
            fold=balanced(ranks),
        )


def across_reduce_scatter(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """The node's sums go from the deputies to each block's owner, which adds them in the order of the nodes."""
    home = nodes.node_of[rank]
    if len(nodes.nodes) > 1:
        deputies = [nodes.deputy(rank, node) for node in range(len(nodes.nodes))]
        yield Step(
            send=tuple(Message(block, [block]) for block in deputised(rank, nodes) if nodes.node_of[block] != home),
            recv=tuple(Message(deputy, [rank]) for deputy in deputies if deputy != rank),
            fold=balanced(deputies),
        )


def across_all_gather(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Each owner sends its block to its deputies on the other nodes."""
    home = nodes.node_of[rank]
    if len(nodes.nodes) > 1:
        deputies = [nodes.deputy(rank, node) for node in range(len(nodes.nodes))]
        yield Step(
            send=tuple(Message(deputy, [rank]) for deputy in deputies if deputy != rank),
            recv=tuple(Message(block, [block]) for block in deputised(rank, nodes) if nodes.node_of[block] != home),
        )


def inside_all_gather(rank: int, nodes: NodeMap) -> Iterator[Step]:
    """Each deputy sends its blocks to the ranks of its node."""
    peers = [peer for peer in nodes.nodes[nodes.node_of[rank]] if peer != rank]
    mine = deputised(rank, nodes)
    if peers:
        yield Step(
            send=tuple(Message(peer, mine) for peer in peers),
            recv=tuple(Message(peer, deputised(peer, nodes)) for peer in peers),
        )
