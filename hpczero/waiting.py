"""Waiting for other ranks: polling, giving way, and never for ever.

Every wait for a message ends here. A blocking MPI call would spin on the core that the awaited rank may need, and never
notice that nobody will come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT_S = 600.0


def completed(requests: Sequence[MPI.Request], timeout_s: float, *, shares_cores: bool = True) -> bool:
    """Waits until all requests are complete, at most `timeout_s` seconds; whether they are.

    `shares_cores` says that ranks outnumber cores: another one then needs this core to get here.
    """
    from mpi4py import MPI

    if not requests or MPI.Request.Testall(requests):
        return True
    start, polls = time.monotonic(), 0
    while not MPI.Request.Testall(requests):
        polls += 1
        if shares_cores:
            # Yielding alone lets a spinning neighbour have the core back.
            os.sched_yield() if polls < 20 else time.sleep(50e-6)
        elif polls > 2000:
            time.sleep(100e-6)
        if polls % 16 == 0 and time.monotonic() - start > timeout_s:
            return False
    return True
