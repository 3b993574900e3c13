"""A host program that finalises MPI too early is told so, instead of being aborted inside MPI without a word."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from launcher import ahead, mpirun

PROGRAM = """
import os
import time

import numpy as np
from mpi4py import MPI

import hpczero

zero = hpczero.{what}
MPI.Finalize()
time.sleep(1.2)      # threads of ours that still looked at MPI's memory would crash now
try:
    zero.close()
except hpczero.HpczeroError as error:
    os.write(1, f"said: {{error}}\\n".encode())
"""


NUM_RANKS = [1, 2]
WHAT = [
    "Topology(MPI.COMM_WORLD)",
    "ZeroOptimizer({'w': np.zeros(40)}, hpczero.AdamW(), MPI.COMM_WORLD)",
    "Zero3Engine([], {}, hpczero.AdamW(), MPI.COMM_WORLD)",
]


@pytest.fixture(scope="module")
def done_with(tmp_path_factory):
    """How the program that closes this, on so many ranks, ended."""
    jobs = {}
    for what in WHAT:
        program = tmp_path_factory.mktemp("finalize") / "program.py"
        program.write_text(PROGRAM.format(what=what))
        for num_ranks in NUM_RANKS:
            jobs[what, num_ranks] = partial(mpirun, num_ranks, [sys.executable, program], timeout=60)
    with ahead(jobs) as done:
        yield done


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("what", WHAT)
def test_closing_after_mpi_was_finalised_is_an_error_that_says_what_to_do(what, num_ranks, done_with):
    done = done_with((what, num_ranks))
    assert done.status == 0, done
    assert done.stdout.count("said: MPI was finalised before close()") == num_ranks, done
