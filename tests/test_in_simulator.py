"""Runs tests/mpi/simulator under mpirun, in processes where Numba simulates a GPU; each test is a subtest here."""

from __future__ import annotations

import pytest
from mpi_runs import run_tests, show

FOLDER = "tests/mpi/simulator"
OVER_RANKS = (f"{FOLDER}/test_device_path.py", f"{FOLDER}/test_device_training.py")


@pytest.mark.parametrize(("num_ranks", "what"), [(1, [FOLDER]), (2, OVER_RANKS), (3, OVER_RANKS)], ids=[1, 2, 3])
def test_what_is_in_tests_mpi_simulator_holds_on_this_number_of_ranks(num_ranks, what, tmp_path, subtests, monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    show(run_tests(num_ranks, tmp_path, *what), subtests)
