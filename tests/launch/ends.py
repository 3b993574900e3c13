"""A program that runs one of the commands below under `hpczero.cli.abort`, for test_abort.py: `python ends.py NAME`.

Each command ends in its own way on rank 1, or on all ranks, while the other ranks wait in a barrier or work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from hpczero.cli import abort, launch
from hpczero.errors import ConfigError, StallError, raise_together

FOREVER_S = 120.0


def all_well(comm):
    time.sleep(0.2 * comm.rank)
    return 0


def exception(comm):
    if comm.rank == 1:
        raise ZeroDivisionError("only here")
    comm.Barrier()


def exception_while_others_compute(comm):
    if comm.rank == 1:
        raise ZeroDivisionError("only here")
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        pass


def exception_everywhere(comm):
    raise ZeroDivisionError("everywhere")


def exception_that_others_hear_of(comm):
    raise_together(comm, ZeroDivisionError("only here") if comm.rank == 1 else None)


def exception_after_the_others_are_done(comm):
    comm.Barrier()
    if comm.rank == 1:
        raise ZeroDivisionError("too late")
    return 0


def exit_5(comm):
    if comm.rank == 1:
        sys.exit(5)
    comm.Barrier()


def exit_0(comm):
    if comm.rank == 1:
        sys.exit()
    comm.Barrier()


def exit_0_everywhere(comm):
    sys.exit()


def exit_with_words_everywhere(comm):
    sys.exit("some words")


def interrupt(comm):
    if comm.rank == 1:
        raise KeyboardInterrupt
    comm.Barrier()


def signal_to_a_rank_inside_mpi(comm):
    if comm.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        comm.Barrier()
    time.sleep(FOREVER_S)


def work(comm):
    os.write(1, b"ready\n")  # in one piece: print writes twice where output is not buffered, and lines of two ranks mix
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        comm.allreduce(1)


def our_error(comm):
    if comm.rank == 1:
        raise StallError("nobody came")
    comm.Barrier()


def our_error_everywhere(comm):
    raise ConfigError("first line\nsecond line")


def finalize(comm):
    from mpi4py import MPI

    if comm.rank == 1:
        MPI.Finalize()
    comm.Barrier()


def finalize_everywhere(comm):
    from mpi4py import MPI

    MPI.Finalize()


def killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


if __name__ == "__main__":
    started = launch.read(os.environ)
    launch.before_mpi(os.environ, started)
    sys.exit(abort.run(globals()[sys.argv[1]], started))
