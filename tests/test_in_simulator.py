"""Runs tests/mpi/simulator under mpirun, in processes where Numba simulates a GPU; each test is a subtest here."""

from __future__ import annotations

from functools import partial

import pytest
from launcher import ahead
from mpi_runs import run_tests, show

FOLDER = "tests/mpi/simulator"
OVER_RANKS = (f"{FOLDER}/test_device_path.py", f"{FOLDER}/test_device_training.py", f"{FOLDER}/test_device_aggregator.py")
# What is staged or read directly is the same on any number of ranks; what neighbours leave for each other is not.
WHAT = {3: (*OVER_RANKS, "-k", "ipc or training or aggregator"), 2: OVER_RANKS, 1: (FOLDER,)}


@pytest.fixture(scope="module")
def run_on(tmp_path_factory):
    """What `WHAT` says, on a number of ranks."""
    jobs = {
        num_ranks: partial(run_tests, num_ranks, tmp_path_factory.mktemp("reports"), *what, NUMBA_ENABLE_CUDASIM="1")
        for num_ranks, what in WHAT.items()
    }
    with ahead(jobs) as run:
        yield run


@pytest.mark.parametrize("num_ranks", WHAT)
def test_what_is_in_tests_mpi_simulator_holds_on_this_number_of_ranks(num_ranks, run_on, subtests):
    show(run_on(num_ranks), subtests)
