"""The two exchanges that ZeRO is made of, on buffers that it laid out itself, in the canonical order.

The buffer decides the way: rows of a node-shared window are reduced in place (`window`), a single copy per node is
completed across the nodes, and device memory goes by messages alone (`hierarchical`). All three add in the same order, so
a run on GPUs and one on CPUs differ by arithmetic only. Sizes were agreed on when the buffers were laid out; nothing is
checked here per call.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpczero.arrays import Array
from hpczero.collectives import hierarchical, tree, window
from hpczero.collectives.schedule import within
from hpczero.collectives.transport import Transport
from hpczero.memory import NodeRows

Buffer = NodeRows | Array
"""Node-shared rows, or a private array on a device."""


def flat_of(buffer: Buffer) -> Array:
    """The vector that this rank reads and writes."""
    return buffer.mine if isinstance(buffer, NodeRows) else buffer


def reduce_scatter(buffer: Buffer, cuts: Sequence[Sequence[int]], transport: Transport, what: str) -> None:
    """Of every bucket, block r becomes the sum over all ranks, on rank r.

    `cuts` holds size + 1 offsets per bucket: block r of a bucket with offsets c is elements c[r] to c[r + 1]. Rows of a
    window may be written again only after the next barrier of the node.
    """
    topology = transport.topology
    if isinstance(buffer, NodeRows):
        transport.node_barrier(what)        # every contribution is written
        for offsets in cuts:
            window.reduce_scatter(buffer, offsets, transport, "sum", what)
    else:
        for offsets in cuts:
            transport.execute(hierarchical.reduce_scatter(topology.rank, topology.map), buffer, offsets, "sum", what)


def all_gather(buffer: Buffer, cuts: Sequence[Sequence[int]], transport: Transport, what: str) -> None:
    """Of every bucket, block r goes from rank r to all. A single copy is whole after the next barrier of the node.

    Of a single copy, rank r has written its blocks into its node's; otherwise into its own buffer.
    """
    topology = transport.topology
    if not isinstance(buffer, NodeRows):
        for offsets in cuts:
            transport.execute(hierarchical.all_gather(topology.rank, topology.map), buffer, offsets, what=what)
        return
    for offsets in cuts:
        transport.execute(hierarchical.across_all_gather(topology.rank, topology.map), buffer.mine, offsets, what=what)
    if not buffer.is_single:
        transport.node_barrier(what)        # every block is in a row of this node
        for offsets in cuts:
            window.gather_rows(buffer, offsets, transport, buffer.mine)


def broadcast(buffer: Buffer, transport: Transport, what: str) -> None:
    """Rank 0's whole vector goes to all ranks; of single copies, to the first rank of each node, for its node."""
    topology = transport.topology
    flat = flat_of(buffer)
    single = isinstance(buffer, NodeRows) and buffer.is_single
    ranks = [node[0] for node in topology.map.nodes] if single else list(range(topology.size))
    steps = ()
    if topology.rank in ranks:
        whole = [[0]] + [[]] * (len(ranks) - 1)       # the vector is one block here, whatever the number of ranks
        steps = within(tree.broadcast(ranks.index(topology.rank), len(ranks)), ranks, whole)
    # Also on ranks that have no part in it: every rank counts the calls, by which their messages are told apart.
    transport.execute(steps, flat, [0, flat.size], what=what)
    transport.node_barrier(what)
