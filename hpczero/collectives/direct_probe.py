"""The program of a child process that hands device memory to MPI, so that nobody else need try (`direct.py`).

`python direct_probe.py cupy 0 SEED` sends arrays of GPU 0 to itself in an MPI of its own, one rank in all, and writes a
digest of what arrived. If MPI cannot read device memory the program crashes, which is what it is for. Point-to-point
messages are all that schedules need; collectives of MPI have been seen to fail where these work.

It imports nothing of hpczero, since it has a few seconds for its import, a CUDA context and the start of MPI.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable

import numpy as np

COUNTS = (1, 4096, 2**20 + 3)
"""Bytes of the messages: MPI libraries send small and large ones by different means."""
OFFSET = 7
"""The arrays begin inside an allocation: what MPI remembers of memory may hold for whole allocations only."""


def main(module: str, index: int, seed: str) -> None:
    xp = importlib.import_module(module)
    xp.cuda.Device(index).use()
    from mpi4py import MPI

    arrived = []
    for count in COUNTS:
        source, target = (xp.zeros(count + OFFSET, np.uint8)[OFFSET:] for _ in range(2))
        source.set(pattern(seed, count))
        xp.cuda.get_current_stream().synchronize()
        receive = MPI.COMM_SELF.Irecv([target, count, MPI.BYTE], 0)
        send = MPI.COMM_SELF.Isend([source, count, MPI.BYTE], 0)
        MPI.Request.Waitall([receive, send])
        arrived.append(target.get())
    sys.stdout.write(digest(arrived))


def pattern(seed: str, count: int) -> np.ndarray:
    """(count,) uint8 that nobody has by accident."""
    return np.random.default_rng(int(seed, 16)).integers(0, 256, count, np.uint8)


def digest(arrays: Iterable[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
