"""Tests in this folder run kernels in Numba's CUDA simulator, a mode of the process that Numba reads at its import.

tests/test_in_simulator.py starts them so. By hand:
`NUMBA_ENABLE_CUDASIM=1 mpirun -n 2 python -m pytest --with-mpi tests/mpi/simulator`.
"""

from __future__ import annotations

import os

import devicedouble
import pytest

collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def memory_is_shown_only_when_nothing_is_queued():
    """Fails a test in which MPI was given device memory before a synchronize."""
    devicedouble.queue.reset()
    yield
    assert devicedouble.queue.violations == []
