"""Watches over calls that block inside the MPI library, where no wait of ours can end.

All ranks have agreed on the call before any of them enters it, so a rank that stays there has lost another one in it. The
call cannot be left: it is reported once, and at the limit the whole job is ended with a message that names it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from mpi4py import MPI

LOOK_S = 0.25
"""How often the thread looks; reports and ends come so much later at most."""
_log = logging.getLogger("hpczero.collectives")


class Watchdog:
    """One thread, started with the first call it watches over.

    Parameters
    ----------
    limits : function returning (report_s, timeout_s)
        When a call is reported, and when the job is ended; asked at each look.
    rank, size : int
        Of this process, for the messages.
    """

    def __init__(self, limits: Callable[[], tuple[float, float]], rank: int, size: int):
        self._limits, self._where = limits, f"rank {rank} of {size}"
        self._may_call_mpi = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._watched: tuple[str, float, int] | None = None      # the call, when it began, in which thread
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def begin(self, what: str) -> None:
        """This thread goes into the MPI library."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpczero watchdog", daemon=True)
            self._thread.start()
        self._watched = what, time.monotonic(), threading.get_ident()

    def end(self) -> None:
        """It is out again."""
        self._watched = None

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        reported = None
        while not self._closed.wait(LOOK_S):
            watched = self._watched
            if watched is None:
                continue
            what, begin, thread = watched
            report_s, timeout_s = self._limits()
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                self._end_job(what, waited_s)
            elif waited_s > report_s and watched is not reported:
                reported = watched
                place = "".join(traceback.format_stack(sys._current_frames()[thread])[-12:])
                _log.warning("%s, and the job ends at %.0f s\n%s", self._told(what, waited_s), timeout_s, place)

    def _told(self, what: str, waited_s: float) -> str:
        return (f"{self._where} has been inside the MPI library for {waited_s:.0f} s: {what}. All ranks had come to this "
                "call: one has died or was stopped in it, or the library hangs (then name another algorithm than 'system')")

    def _end_job(self, what: str, waited_s: float) -> None:
        print(f"hpczero: {self._told(what, waited_s)}; ending the job", file=sys.stderr, flush=True)
        if self._may_call_mpi:
            MPI.COMM_WORLD.Abort(1)
        os._exit(1)      # the launcher ends the others
