"""A thread that speaks for its rank where the others cannot hear it: inside the MPI library, or outside of hpczero.

- Calls that block inside the MPI library, where no wait of ours can end: all ranks have agreed on the call before any of
  them enters it, so a rank that stays there has lost another one in it. The call cannot be left: it is reported once, and
  at the limit the whole job is ended with a message that names it.
- A rank that others wait for and that does not come: asked by a neighbour through the slots of its node, it shows the
  stacks of its threads.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from mpi4py import MPI

LOOK_S = 0.5
"""How often the thread looks; reports and ends come so much later at most."""
_log = logging.getLogger("hpczero.collectives")


class Watchdog:
    """The thread, started at once.

    Parameters
    ----------
    limits : function returning (report_s, timeout_s)
        When a call is reported, and when the job is ended; asked at each look.
    asked : function returning bool
        Whether somebody has asked for this rank; true once for each time.
    world : MPI.Intracomm
        Whose ranks are ended, in the end.
    """

    def __init__(self, limits: Callable[[], tuple[float, float]], asked: Callable[[], bool], world: MPI.Intracomm):
        self._limits, self._asked, self._world = limits, asked, world
        self._where = f"rank {world.rank} of {world.size}"
        self._may_call_mpi = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._watched: tuple[str, float, int] | None = None      # the call, when it began, in which thread
        self._closed = threading.Event()
        # What it looks at is freed when MPI ends, which deletes this attribute first.
        self._keyval = MPI.Comm.Create_keyval(delete_fn=_ends(weakref.ref(self)))
        MPI.COMM_SELF.Set_attr(self._keyval, None)
        self._thread = threading.Thread(target=self._run, name="hpczero watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> None:
        """This thread goes into the MPI library."""
        self._watched = what, time.monotonic(), threading.get_ident()

    def end(self) -> None:
        """It is out again."""
        self._watched = None

    def close(self) -> None:
        if not MPI.Is_finalized():
            MPI.COMM_SELF.Delete_attr(self._keyval)
            self._keyval = MPI.Comm.Free_keyval(self._keyval)
        self.stop()

    def stop(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        reported = None
        while not self._closed.wait(LOOK_S) and not MPI.Is_finalized():
            if self._asked():
                _log.warning("%s: others wait for it, and it is here:\n%s", self._where, self._stacks())
            if (watched := self._watched) is None:
                continue
            what, begin, thread = watched
            report_s, timeout_s = self._limits()
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                self._end_job(what, waited_s)
            elif waited_s > report_s and watched is not reported:
                reported = watched
                frame = sys._current_frames().get(thread)      # it may have come out, and ended, just now
                place = "".join(traceback.format_stack(frame)[-12:]) if frame else ""
                _log.warning("%s, and the job ends at %.0f s\n%s", self._told(what, waited_s), timeout_s, place)

    def _stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "".join(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)[-12:])
                       for ident, frame in sys._current_frames().items() if ident != threading.get_ident())

    def _told(self, what: str, waited_s: float) -> str:
        return (f"{self._where} has been inside the MPI library for {waited_s:.0f} s: {what}. All ranks had come to this "
                "call: one has died or was stopped in it, or the library hangs (then name another algorithm than 'system')")

    def _end_job(self, what: str, waited_s: float) -> None:
        _log.error("%s; ending the job", self._told(what, waited_s))
        if self._may_call_mpi:
            self._world.Abort(1)
        os._exit(1)      # the launcher ends the others


def _ends(watchdog: weakref.ref[Watchdog]) -> Callable[..., None]:
    def end(comm: MPI.Comm, keyval: int, value: object) -> None:
        if (found := watchdog()) is not None:
            found.stop()

    return end
