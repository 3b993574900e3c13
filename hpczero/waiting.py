"""Waiting for other ranks: polling, giving way, and never for ever.

Every wait for another rank ends here, but for the blocking calls of `collectives.system`. Other blocking MPI calls would
spin on the core that the awaited rank may need, and never notice that nobody will come.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT_S, REPORT_S = 600.0, 30.0
YIELD_AFTER_S, SLEEP_AFTER_S = 100e-6, 20e-3
_log = logging.getLogger("hpczero.waiting")
LONG_S = 1.0
"""A wait that lasts longer is attended to, ten times a second."""


class Patience:
    """One wait, from its first fruitless look to its limit.

    Parameters
    ----------
    timeout_s : float
    shares_cores : bool
        Whether ranks outnumber cores: another one then needs this core to get here.
    attend : function of the seconds waited, optional
        Called about ten times a second once the wait is long.
    """

    def __init__(self, timeout_s: float, *, shares_cores: bool = True, attend: Callable[[float], None] | None = None):
        self._timeout_s, self._shares_cores, self._attend = timeout_s, shares_cores, attend
        self._start = self._attended = time.monotonic()
        self._looks = 0

    def lasts(self) -> bool:
        """Called after each look that found nothing: gives way for a moment; False once the limit has passed."""
        self._looks += 1
        now = time.monotonic()
        waited_s = now - self._start
        if self._shares_cores:
            # Yielding alone lets a spinning neighbour have the core back.
            os.sched_yield() if self._looks < 20 else time.sleep(50e-6)
        elif waited_s > SLEEP_AFTER_S:
            time.sleep(100e-6)
        elif waited_s > YIELD_AFTER_S:
            os.sched_yield()      # costs nothing where nobody else wants the core
        if self._attend is not None and waited_s > LONG_S and now - self._attended > 0.1:
            self._attended = now
            self._attend(waited_s)
        return waited_s <= self._timeout_s


def abandon(requests: Sequence[MPI.Request]) -> None:
    """Keeps requests that nobody will complete, and so the buffers that MPI may yet write to, until the process ends."""
    _ABANDONED.extend(requests)


_ABANDONED: list[MPI.Request] = []


def completed(requests: Sequence[MPI.Request], patience: Callable[[], Patience],
              meanwhile: Callable[[], object] | None = None) -> bool:
    """Waits until all requests are complete, or the patience ends; whether they are complete.

    `meanwhile` is called between looks: what it does, others may be waiting for.
    """
    from mpi4py import MPI

    if not requests:
        return True

    def done() -> bool:
        if MPI.Request.Testall(requests):
            return True
        if meanwhile is not None:
            meanwhile()
        return False

    return until(done, patience)


def arrive(comm: MPI.Intracomm, what: str) -> None:
    """Returns once every rank of `comm` has come here: before calls of MPI that would wait for ever, and say nothing.

    Warns once at 30 s, and raises StallError at 10 minutes.
    """
    from hpczero.errors import StallError

    told, where = False, f"rank {comm.rank} of {comm.size}"

    def attend(waited_s: float) -> None:
        nonlocal told
        if waited_s > REPORT_S and not told:
            told = True
            _log.warning("%s waits since %.0f s for all ranks to come to: %s", where, waited_s, what)

    request = comm.Ibarrier()
    if not completed([request], lambda: Patience(DEFAULT_TIMEOUT_S, attend=attend)):
        abandon([request])
        raise StallError(f"{where}: not all ranks came within {DEFAULT_TIMEOUT_S:g} s to: {what}")


def until(done: Callable[[], bool], patience: Callable[[], Patience]) -> bool:
    """Looks until `done`, or until the patience ends; whether it is done."""
    if done():
        return True
    left = patience()
    while not done():
        if not left.lasts():
            return False
    return True
