"""The soak tests of tests/mpi under mpirun: whole matrices and hundreds of draws, on 1 to 8 ranks; minutes to an hour each.

`pytest -m soak` runs them; `pytest -m soak tests/test_soak.py -k "ranks-3"` those on 3 ranks.
"""

from __future__ import annotations

import mpi_runs
import pytest

LIMIT_S = 3 * 3600.0


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", range(1, 9), ids=lambda num_ranks: f"ranks-{num_ranks}")
def test_soak_tests_of_mpi(num_ranks, tmp_path, subtests, monkeypatch):
    monkeypatch.setattr(mpi_runs, "LIMIT_S", LIMIT_S)
    mpi_runs.show(mpi_runs.run_tests(num_ranks, tmp_path, "tests/mpi", "-m", "soak"), subtests)
