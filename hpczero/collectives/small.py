"""Small vectors in host memory: through the slots of a node, agreed on in the very meeting in which they are exchanged.

Inside one node that is all. Over several, an all-reduce, hierarchical or by leaders, takes two meetings: one in which
every rank leaves its vector, and one in which it finds the result. Between them the first rank of each node adds what was
left, and sums it with the others of its kind: with one other in the message in which the two agree on the call. Nothing is
written to the caller's array before all ranks are known to be in the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpczero.arrays import Array
from hpczero.collectives import reduction
from hpczero.collectives.guard import compared
from hpczero.collectives.order import balanced
from hpczero.collectives.selection import Call
from hpczero.collectives.slots import FAILED, slot_bytes

if TYPE_CHECKING:
    from hpczero.collectives.call import Decision, Invocation
    from hpczero.collectives.transport import Transport


def goes_over_nodes(facts: Call, algorithm: str) -> bool:
    """Whether this algorithm serves this call here, on several nodes."""
    most = slot_bytes(max(map(len, facts.nodes.nodes)))
    return (facts.operation == "all_reduce" and algorithm in ("hierarchical", "leader") and len(facts.nodes.nodes) > 1
            and not facts.on_device and facts.nbytes <= most)


def _all_reduce(call: Invocation, flat: Array) -> bool:
    return _reduce(call, flat) if call.topology.num_nodes == 1 else over_nodes(call.transport, call.decision, call.op, flat)


def over_nodes(transport: Transport, decision: Decision, op: str, flat: Array) -> bool:
    """`flat` becomes the reduction over the ranks of all nodes; False, with `flat` as it was, if they were in other calls."""
    topology, slots, count = transport.topology, transport.slots, flat.size
    slots.next_rows(flat.dtype)[slots.me, :count] = flat
    alike = transport.meet(decision.mark, decision.what)
    tag, verdict = transport.next_tag(), decision.mark
    if topology.is_leader:
        total = slots.next_rows(flat.dtype)[slots.me, :count]
        if alike:
            verdict = _total(transport, decision, op, total, tag)
        else:
            verdict, _ = compared(transport, FAILED, tag, decision.what)
    if not (alike and transport.meet(verdict, decision.what) and verdict == decision.mark):
        return False
    if topology.num_nodes > 2 and not topology.is_leader:
        transport.next_tag()      # as the first rank of the node did
    flat[:] = slots.last_rows(flat.dtype)[0, :count]
    transport.bytes_sent["window"] += 0 if topology.is_leader else flat.nbytes
    return True


def _total(transport: Transport, decision: Decision, op: str, total: Array, tag: int) -> int:
    """On the first rank of each node: `total` becomes the reduction of what all have left in the slots; the verdict."""
    topology, mark, what = transport.topology, decision.mark, decision.what
    ranks = topology.map.nodes[topology.node_index]
    reduction.fold(transport.slots.last_rows(total.dtype), {rank: row for row, rank in enumerate(ranks)}, balanced(ranks),
                   op, 0, total)
    transport.bytes_sent["window"] += (len(ranks) - 1) * total.nbytes
    if topology.num_nodes == 2:
        verdict, arrived = compared(transport, mark, tag, what, total.view(np.uint8))
        if verdict == mark:
            transport.bytes_sent["network"] += total.nbytes
            other = arrived[:total.nbytes].view(total.dtype)
            # In the order of the nodes on both: of two NaN the first is kept.
            first, second = (total, other) if topology.node_index == 0 else (other, total)
            reduction.combine(first, second, op)
            if first is other:
                total[:] = other
        return verdict
    verdict, _ = compared(transport, mark, tag, what)
    if verdict == mark:
        transport.play(decision.rounds, total, op, what)
    return verdict


def _reduce(call: Invocation, flat: Array) -> bool:
    transport, mark = call.transport, call.decision.mark
    add = transport.slots.adder(flat.dtype, reduction.code(call.op), mark, flat.nbytes)
    return transport.reduce_in_node(flat, add, mark, call.what)


def _all_gather(call: Invocation, flat: Array) -> bool:
    rows, me = call.transport.slots.next_rows(flat.dtype), call.topology.local_rank
    shards = [slice(*call.shards[rank:rank + 2]) for rank in range(call.topology.size)]
    rows[me, shards[me]] = flat[shards[me]]
    if not call.transport.meet(call.decision.mark, call.what):
        return False
    for rank, shard in enumerate(shards):
        flat[shard] = rows[rank, shard]
    call.transport.bytes_sent["window"] += flat.nbytes - flat[shards[me]].nbytes
    return True


def _broadcast(call: Invocation, flat: Array) -> bool:
    rows = call.transport.slots.next_rows(flat.dtype)
    at_root = call.topology.rank == call.root
    if at_root:
        rows[call.root, :flat.size] = flat
    if not call.transport.meet(call.decision.mark, call.what):
        return False
    if not at_root:
        flat[:] = rows[call.root, :flat.size]
        call.transport.bytes_sent["window"] += flat.nbytes
    return True


WAYS: dict[str, Callable[[Invocation, Array], bool]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
}
"""They return whether all ranks were in the same call."""
