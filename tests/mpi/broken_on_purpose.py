"""What tests/test_under_mpi.py runs to see failures reported; not collected with the others, as it is no test_*.py."""

from __future__ import annotations

import os
import time

import pytest
from agreement import check_everywhere


def test_that_is_wrong_on_rank_1(comm):
    check_everywhere(comm, comm.rank != 1, "forty-two was expected")


def test_that_raises_on_rank_1(comm):
    if comm.rank == 1:
        raise KeyError("only here")
    comm.Barrier()


@pytest.mark.time_limit(2)
def test_that_hangs(comm):
    wait_on_rank_0() if comm.rank == 0 else wait_on_rank_1()


def test_that_dies_on_rank_1(comm):
    if comm.rank == 1:
        os.abort()
    comm.Barrier()


def test_that_is_right(comm):
    check_everywhere(comm, True, "never said")


def wait_on_rank_0():
    time.sleep(60)


def wait_on_rank_1():
    while True:
        pass
