"""Ranks that disagree about a call find out before it starts, all of them, with the odd one named.

Before payload moves, the ranks compare a 16-byte digest of what they are about to do: operation, size, dtype, order,
algorithm. A rank whose arguments are wrong takes part too, so that its error reaches everyone instead of leaving the
others to wait for it.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np

from hpczero.collectives.transport import Transport
from hpczero.errors import MismatchError, gather_texts, raise_together

_FAILED = bytes(16)


def agree(transport: Transport, call: str, error: Exception | None = None) -> None:
    """Every rank passes the same `call`, a description such as "all_reduce of 1000 float32", and no error.

    Raises on every rank: the error, if any rank passes one; else MismatchError, if the descriptions differ.
    """
    digest = _FAILED if error is not None else blake2b(call.encode(), digest_size=16).digest()
    seen = transport.all_gather_small(np.frombuffer(digest, np.uint8), call)
    if error is None and (seen == seen[0]).all():
        return
    world = transport.topology.world
    raise_together(world, error, transport.timeout_s)
    calls = gather_texts(world, call, transport.timeout_s)
    usual = Counter(calls).most_common(1)[0][0]
    odd = [rank for rank, other in enumerate(calls) if other != usual]
    raise MismatchError(f"rank {odd[0]} of {world.size} calls {calls[odd[0]]}; {world.size - len(odd)} other "
                        f"rank{'s' if world.size - len(odd) > 1 else ''}: {usual}"
                        + (f" (ranks that differ from it: {odd})" if len(odd) > 1 else ""))
