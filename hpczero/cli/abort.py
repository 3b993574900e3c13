"""How a command ends: well on all ranks, or with a failure of any rank on all of them.

A rank that raises, calls `sys.exit` or is interrupted leaves the others inside a collective that will never complete.
So every rank, however it ends, comes to a meeting: a non-blocking all-gather of one byte on a communicator of its own.
If the meeting is full, the story of what failed is told once, and all ranks exit with the status of the lowest rank
that failed. If it is not full after GRACE_S, the others cannot come: the rank tells its own story and calls MPI_Abort.

    all ranks raise the same HpczeroError    one message from rank 0, no traceback, status 2
    one rank raises, the others wait         its traceback (or message) and host, MPI_Abort, status 1 (or 2)
    one rank calls sys.exit(5)               a line that says so, MPI_Abort, status 5 (1 if it was sys.exit(0))

Only `run` installs any of this, and only `python -m hpczero` calls it. For the meeting to be reached, nothing
collective may happen while an exception travels upwards: commands close what they opened at their good end, not in
`finally`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from hpczero.cli.launch import OPENMPI, Launch, check_launcher
from hpczero.errors import HpczeroError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

GRACE_S = 3.0
"""How long a rank that failed waits for the others to fail too; well below the 10 s in which all must have ended."""

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class End:
    """How this rank's command ended: its exit status, and what there is to say about it."""

    status: int
    story: str = ""
    early: bool = False
    """It left before its end, so the others may be waiting for it."""


def run(command: Callable[[MPI.Comm], int], started: Launch) -> int:
    """Start MPI, call `command` with a duplicate of COMM_WORLD, and return the exit status, the same on every rank."""
    if (started.size or 1) > 1:
        # Under MPICH a rank that leaves before MPI has started lets the others wait for it in MPI_Init for ever. So
        # Ctrl-C has its effect a little later.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        MPI = _start_mpi(started)
    except HpczeroError as error:
        return _refuse_alone(str(error), started)
    meeting = _Meeting(MPI)
    comm = MPI.COMM_WORLD.Dup()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        end = End(command(comm))
    except BaseException as error:  # noqa: BLE001 - a rank that ends without the meeting would hang all others
        end = _tell(error)
    status = meeting.attend(end)
    comm.Free()
    meeting.close()
    return status


def _start_mpi(started: Launch) -> ModuleType:
    """Import mpi4py.MPI, which starts MPI.

    HpczeroError if there is no library, or if the launcher of another one started us.
    """
    import mpi4py

    under_openmpi = started.name == OPENMPI
    if under_openmpi:
        # Others than Open MPI end the process while they start here, so whose library it is must be asked before.
        mpi4py.rc(initialize=False, finalize=True)
    # What it suspects is checked below, and said once instead of on every rank.
    warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HpczeroError(
            f"no MPI library can be loaded ({str(error).splitlines()[0]}). pip install 'hpczero[mpich]' brings one, "
            "with its mpirun, into this environment; on a cluster load its MPI module instead."
        ) from None
    name, version = MPI.get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    if under_openmpi:
        check_launcher(started, name not in ("MPICH", "Intel MPI", "MVAPICH", "MVAPICH2"), library)
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    check_launcher(started, MPI.COMM_WORLD.size > 1, library)
    return MPI


class _Meeting:
    """Where the ranks learn how the others ended. Made and closed by every rank; each calls `attend` once.

    While it is open, it also watches for two ways of ending that raise nothing where it could be caught: Ctrl-C on a
    rank that is blocked inside MPI, and MPI_Finalize.
    """

    def __init__(self, MPI: ModuleType):
        self._MPI = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._ended = threading.Event()
        # MPI_Finalize begins by deleting the attributes of COMM_SELF, while everything else still works.
        self._key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: self._finalized_early())
        MPI.COMM_SELF.Set_attr(self._key, True)
        self._watch_for_interrupts()

    def attend(self, end: End) -> int:
        """Tell how this rank ended; returns the status that all ranks exit with, or does not return."""
        self._ended.set()
        sys.stdout.flush()
        try:
            found = self._gather(end)
        except KeyboardInterrupt:
            found, end = None, End(INTERRUPTED, "interrupted (Ctrl-C) while waiting for the other ranks to end")
        except self._MPI.Exception as error:  # MPI itself is what failed
            found, end = None, End(end.status, end.story or f"the ranks cannot reach each other: {error}")
        if found is None:
            self._abort(end)
        failed = [rank for rank in range(self.size) if found[rank]]
        # Where a rank raised something unforeseen, the HpczeroErrors of the others are its echo, by `raise_together`.
        failed = [rank for rank in failed if found[rank] != REFUSED] or failed
        stories = self._comm.gather(end.story, root=0)
        if self.rank == 0 and any(stories[rank] for rank in failed):
            _say(_join({rank: stories[rank] for rank in failed if stories[rank]}, self.size))
        # Rank 0 must have spoken before the launcher sees anyone leave with a status and ends the rest.
        self._comm.Barrier()
        return found[failed[0]] if failed else 0

    def close(self) -> None:
        """Called by every rank after `attend`."""
        self._MPI.COMM_SELF.Delete_attr(self._key)
        self._MPI.Comm.Free_keyval(self._key)
        self._comm.Free()

    def _gather(self, end: End) -> bytearray | None:
        """Every rank's status, or None when this rank has failed and others did not come within GRACE_S."""
        mine, found = bytearray([end.status]), bytearray(self.size)
        request = self._comm.Iallgather([mine, self._MPI.BYTE], [found, self._MPI.BYTE])
        begin = time.monotonic()
        while not request.Test():
            if end.early and time.monotonic() - begin > GRACE_S:
                return None
            time.sleep(0.001)  # not a spin: the others may still be working on this core
        return found

    def _abort(self, end: End) -> NoReturn:
        _say(f"rank {self.rank} of {self.size} on {socket.gethostname()}: {end.story}")
        self._end_all(end.status or FAILED)

    def _end_all(self, status: int) -> NoReturn:
        self._MPI.COMM_WORLD.Abort(status)
        os._exit(status)  # MPICH's Abort returns, and this process would go on until it is killed

    def _finalized_early(self) -> None:
        if self._ended.is_set():
            return
        package = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
        caller = next((f for f in reversed(traceback.extract_stack()) if not f.filename.startswith(package)), None)
        where = f" in {caller.filename}, line {caller.lineno}," if caller else ""
        self.attend(
            End(
                REFUSED,
                f"MPI.Finalize() was called{where} while hpczero still uses MPI; close() what hpczero opened first, or "
                "leave it to mpi4py, which finalizes MPI when Python exits",
                early=True,
            )
        )
        self._end_all(REFUSED)  # there is no way back into the program from here

    def _watch_for_interrupts(self) -> None:
        """Python raises KeyboardInterrupt between two of its own steps, which a rank blocked in MPI never reaches."""
        if self._MPI.Query_thread() < self._MPI.THREAD_MULTIPLE:
            return  # aborting from a second thread is not allowed
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def watch() -> None:
            while os.read(read, 1)[0] != signal.SIGINT:
                pass
            if not self._ended.wait(GRACE_S):
                stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))
                self._abort(End(INTERRUPTED, f"interrupted (Ctrl-C) in\n{stack.rstrip()}", early=True))

        threading.Thread(target=watch, name="hpczero-interrupts", daemon=True).start()


def _tell(error: BaseException) -> End:
    """The end and the story of a command that did not return."""
    if isinstance(error, HpczeroError):
        return End(REFUSED, str(error).replace("\n", "\n         "), early=True)  # under "hpczero: "
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return End(0, "called sys.exit() before the other ranks", early=True)
        status = error.code & 0xFF if isinstance(error.code, int) else FAILED
        return End(status or FAILED, f"called sys.exit({error.code!r})", early=True)
    # The frames above the command are the same every time and explain nothing.
    error.__traceback__ = error.__traceback__.tb_next
    text = "".join(traceback.format_exception(error)).rstrip()
    return End(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED, text, early=True)


def _join(stories: dict[int, str], size: int) -> str:
    """What rank 0 prints: each different story once, with the ranks it comes from unless it comes from all of them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, story in stories.items():
        ranks_of.setdefault(story, []).append(rank)
    return "\n".join(
        story
        if len(ranks) == size
        else f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}: {story}"
        for story, ranks in ranks_of.items()
    )


def _say(text: str) -> None:
    # One write, so that the lines of two ranks do not mix.
    sys.stderr.write(f"hpczero: {text}\n")
    sys.stderr.flush()


def _refuse_alone(message: str, started: Launch) -> int:
    """A refusal before the ranks can talk: the launcher's first rank speaks, the others give it time to.

    mpirun ends all ranks as soon as one has left with a status other than 0.
    """
    if started.rank in (None, 0):
        _say(message)
    else:
        time.sleep(1.0)
    return REFUSED
