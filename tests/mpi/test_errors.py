"""`raise_together` over real ranks: whoever finds the error, everyone raises it."""

from __future__ import annotations

import socket

import pytest
from agreement import check_everywhere

from hpczero.errors import (
    ConfigError,
    DataError,
    DeviceError,
    HpczeroError,
    MismatchError,
    RoomError,
    StallError,
    raise_together,
)

KINDS = [HpczeroError, ConfigError, DataError, DeviceError, MismatchError, RoomError, StallError]


def raised(comm, error):
    try:
        raise_together(comm, error)
    except (HpczeroError, ZeroDivisionError) as caught:
        return caught
    return None


def test_nothing_is_raised_where_nobody_found_an_error(comm):
    check_everywhere(comm, raised(comm, None) is None, "raised something")


@pytest.mark.parametrize("kind", KINDS)
def test_whichever_rank_finds_an_error_all_raise_its_type_and_text(comm, kind):
    for finder in range(comm.size):
        caught = raised(comm, kind("the file is empty") if comm.rank == finder else None)
        host = comm.bcast(socket.gethostname(), root=finder)
        prefix = f"rank {finder} of {comm.size} on {host}: " if comm.size > 1 else ""
        ok = type(caught) is kind and str(caught) == f"{prefix}the file is empty"
        check_everywhere(comm, ok, f"rank {finder} found an error, here came {caught!r}")


@pytest.mark.mpi(min_size=3)
def test_the_lowest_failing_rank_speaks_with_its_type_and_the_others_are_counted(comm):
    mine = None
    if comm.rank > 0:
        mine = (DataError if comm.rank == 1 else ConfigError)(f"file {comm.rank} is missing")
    caught = raised(comm, mine)
    text = str(caught)
    ok = text.startswith(f"rank 1 of {comm.size} on ") and f"file 1 is missing (and {comm.size - 2} more" in text
    check_everywhere(comm, type(caught) is DataError and ok, f"raised {caught!r}")


def test_an_error_that_all_ranks_found_alike_names_no_rank(comm):
    caught = raised(comm, ConfigError("stage must be 0, 1, 2 or 3"))
    check_everywhere(comm, str(caught) == "stage must be 0, 1, 2 or 3", f"raised {caught!r}")


def test_a_foreign_exception_stays_itself_on_its_rank_and_reaches_the_others(comm):
    last = comm.size - 1
    mine = ZeroDivisionError("division by zero") if comm.rank == last else None
    caught = raised(comm, mine)
    if comm.rank == last:
        ok = caught is mine
    else:
        ok = type(caught) is HpczeroError and f"rank {last} of" in str(caught) and "ZeroDivisionError" in str(caught)
    check_everywhere(comm, ok, f"raised {caught!r}")


def test_the_communicator_works_after_an_error(comm):
    raised(comm, DataError("gone") if comm.rank == 0 else None)
    check_everywhere(comm, comm.allreduce(1) == comm.size, "the next collective is off")


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_last_one_never_comes_give_up_after_the_time_limit(comm):
    stalled = True
    apart = comm.Dup()
    if comm.rank < comm.size - 1:
        try:
            raise_together(apart, None, timeout_s=0.3)
            stalled = False
        except StallError as caught:
            stalled = "within 0.3 s" in str(caught)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        raise_together(apart, None)      # completes what the others began, so that the communicator can be freed
    check_everywhere(comm, stalled, "did not give up")
    comm.Barrier()
    apart.Free()
