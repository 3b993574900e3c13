"""A host program that finalises MPI too early is told so, instead of being aborted inside MPI without a word."""

from __future__ import annotations

import sys

import pytest
from launcher import mpirun

PROGRAM = """
import os

import numpy as np
from mpi4py import MPI

import hpczero

zero = hpczero.{what}
MPI.Finalize()
try:
    zero.close()
except hpczero.HpczeroError as error:
    os.write(1, f"said: {{error}}\\n".encode())
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("what", [
    "Topology(MPI.COMM_WORLD)",
    "ZeroOptimizer({'w': np.zeros(40)}, hpczero.AdamW(), MPI.COMM_WORLD)",
    "Zero3Engine([], {}, hpczero.AdamW(), MPI.COMM_WORLD)",
])
def test_closing_after_mpi_was_finalised_is_an_error_that_says_what_to_do(what, num_ranks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(what=what))
    done = mpirun(num_ranks, [sys.executable, "program.py"], timeout=60, cwd=tmp_path)
    assert done.stdout.count("said: MPI was finalised before close()") == num_ranks, done
