"""Ranks that disagree about a call find out before it starts, all of them, with the odd one named.

Before payload moves, the ranks compare a digest of what they are about to do: operation, size, dtype, order, algorithm,
and how many calls they have made. Inside one node they compare in shared memory, in a microsecond or a few; over nodes it is a
small all-gather. A rank whose arguments are wrong takes part too, so that its error reaches everyone instead of leaving the
others to wait for it.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np

from hpczero.collectives.transport import Transport
from hpczero.errors import MismatchError, gather_texts, raise_together

FAILED = 0


def fingerprint(call: str) -> int:
    """A number that stands for a description of a call; the same in every process, and never `FAILED` or a barrier's."""
    return int.from_bytes(blake2b(call.encode(), digest_size=8).digest(), "little", signed=True) | 2


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
    if transport.topology.num_nodes == 1:
        return transport.meet(mark, call)
    return bool((transport.all_gather_small(np.array([mark]), call) == mark).all())


def explain(transport: Transport, call: str, error: Exception | None) -> None:
    """Raises what `agree` promises. Called by every rank, after fingerprints differed or somebody had an error."""
    world = transport.topology.world
    raise_together(world, error, transport.timeout_s)
    calls = gather_texts(world, call, transport.timeout_s)
    usual = Counter(calls).most_common(1)[0][0]
    odd = [rank for rank, other in enumerate(calls) if other != usual]
    raise MismatchError(f"rank {odd[0]} of {world.size} calls {calls[odd[0]]}; {world.size - len(odd)} other "
                        f"rank{'s' if world.size - len(odd) > 1 else ''}: {usual}"
                        + (f" (ranks that differ from it: {odd})" if len(odd) > 1 else ""))
