"""Ranks that disagree about a call find out before it starts, all of them, with the odd one named.

Before payload moves, the ranks compare a digest of what they are about to do: operation, size, dtype, order, algorithm.
Inside a node they compare in shared memory, in a microsecond or a few; then one rank of each node compares with those of the
others, and tells its node, in shared memory again. A rank whose arguments are wrong takes part too, so that its error
reaches everyone instead of leaving the others to wait for it.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np
from mpi4py import MPI

from hpczero.collectives.slots import FAILED, slot_bytes
from hpczero.collectives.transport import Transport
from hpczero.errors import MismatchError, gather_texts, raise_together


def fingerprint(call: str) -> int:
    """A number that stands for a description of a call; the same in every process, and never `FAILED` or a barrier's."""
    return int.from_bytes(blake2b(call.encode(), digest_size=8).digest(), "little", signed=True) | 2


class LeftError(MismatchError):
    """All ranks are in the same call, of which one has been in part of before."""


def agree(transport: Transport, call: str, error: Exception | None = None, mark: int | None = None) -> None:
    """Every rank passes the same `call`, a description such as "all_reduce of 1000 float32", and no error.

    `mark` is the fingerprint of the call, where the caller has it.

    Raises on every rank: the error, if any rank passes one; else MismatchError, if the descriptions differ.
    """
    mine = FAILED if error is not None else mark or fingerprint(call)
    if not same(transport, mine, call) or error is not None:
        explain(transport, call, error)


def same(transport: Transport, mark: int, call: str) -> bool:
    """Whether all ranks came with the same mark: `FAILED`, or the fingerprint of what they are about to do."""
    alike, topology = transport.meet(mark, call), transport.topology
    if topology.num_nodes == 1:
        return alike
    tag, verdict = transport.next_tag(), mark
    if topology.is_leader:
        verdict, _ = compared(transport, mark if alike else FAILED, tag, call)
    return alike and transport.meet(verdict, call) and verdict == mark


def compared(transport: Transport, mark: int, tag: int, call: str,
             luggage: np.ndarray | None = None) -> tuple[int, np.ndarray]:
    """(the mark, if the first ranks of all nodes pass it, else `FAILED`; the other's luggage). Called by those ranks.

    ceil(lg nodes) rounds, by dissemination. Between two nodes, bytes may travel with the mark: `luggage`, up to what fits
    into the slots of the larger node. What comes back is valid until the next comparison.
    """
    topology = transport.topology
    leaders, here = [ranks[0] for ranks in topology.map.nodes], topology.node_index
    length = 8 if luggage is None else 8 + luggage.size
    # Whatever the other node is in, its message finds room.
    most = 8 + slot_bytes(max(map(len, topology.map.nodes))) if len(leaders) == 2 else 8
    arriving, leaving = transport.scratch("mark that arrives", most), transport.scratch("mark that leaves", length)
    mine, theirs = leaving[:8].view(np.int64), arriving[:8].view(np.int64)
    mine[0] = mark
    if luggage is not None:
        leaving[8:] = luggage
    distance = 1
    while distance < len(leaders):
        source, target = leaders[here - distance], leaders[(here + distance) % len(leaders)]
        transport.wait([topology.world.Irecv([arriving, MPI.BYTE], source, tag),
                        topology.world.Isend([leaving, MPI.BYTE], target, tag)], call)
        if theirs[0] != mine[0]:
            mine[0] = FAILED
        distance *= 2
    return int(mine[0]), arriving[8:]


def explain(transport: Transport, call: str, error: Exception | None) -> None:
    """Raises what `agree` promises. Called by every rank, after fingerprints differed or somebody had an error."""
    world = transport.topology.world
    raise_together(world, error, transport.timeout_s)
    calls = gather_texts(world, call, transport.timeout_s)
    usual = Counter(calls).most_common(1)[0][0]
    odd = [rank for rank, other in enumerate(calls) if other != usual]
    if not odd:
        raise LeftError(f"{call}: a rank left such a call with an exception before it was complete, and has come to it "
                        "again; the next one works")
    raise MismatchError(f"rank {odd[0]} of {world.size} calls {calls[odd[0]]}; {world.size - len(odd)} other "
                        f"rank{'s' if world.size - len(odd) > 1 else ''}: {usual}"
                        + (f" (ranks that differ from it: {odd})" if len(odd) > 1 else ""))
