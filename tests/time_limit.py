"""A time limit for one test inside an MPI run: a hang ends all ranks, and each shows where it stood.

Two timers, neither of which needs the interpreter's lock, as the rank that hangs may hold it. At the limit a signal
makes faulthandler write the stacks of all threads, and the rank goes on waiting, so that the other ranks, whose limits
end at about the same time, write theirs too. GRACE_S later the process ends with status 1, and mpirun ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal

GRACE_S = 3.0


class TimeLimit:
    """One per rank process. `stacks` is the descriptor of an open file, where the stacks are written at the limit."""

    def __init__(self, stacks: int):
        faulthandler.register(signal.SIGALRM, file=stacks, all_threads=True, chain=False)
        self._nowhere = os.open(os.devnull, os.O_WRONLY)     # the second timer only ends the process: the same stacks

    def start(self, seconds: float) -> None:
        """Begins, or begins anew: a limit that was running is forgotten."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=self._nowhere)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
