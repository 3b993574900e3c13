"""A rank that leaves a library program with an exception does not leave the others waiting."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from launcher import ahead, mpirun

PROGRAM = """
import os

import numpy as np
from mpi4py import MPI

import hpczero


class Layer:
    shapes = {{"w": (40,)}}

    def forward(self, params, x):
        return x, None

    def backward(self, params, saved, dy):
        return dy, {{"w": np.ones(40)}}


comm = MPI.COMM_WORLD
values = {{"layer.w": np.zeros(40)}}
config = hpczero.ZeroConfig(stage={stage})
if {stage} == 3:
    made = hpczero.Zero3Engine([("layer", Layer())], values, hpczero.AdamW(), comm, config)
else:
    made = hpczero.ZeroOptimizer(values, hpczero.AdamW(), comm, config)
try:
    with made as zero:
        for step in range(5):
            if step == 2 and comm.rank == 1:
                {leave}
            if {stage} == 3:
                zero.forward(None)
                zero.backward(None)
            else:
                zero.accumulate({{"layer.w": np.ones(40)}})
            zero.step()
except BaseException as error:
    os.write(1, f"rank {{comm.rank}}: {{type(error).__name__}}: {{error}}\\n".encode())
"""


STAGES = [1, 2, 3]
LEAVE = ["raise KeyError('only here')", "raise SystemExit(3)"]


@pytest.fixture(scope="module")
def done_with(tmp_path_factory):
    """How the program with that stage and that way to leave ended on three ranks."""
    jobs = {}
    for stage in STAGES:
        for leave in LEAVE:
            program = tmp_path_factory.mktemp("leaving") / "program.py"
            program.write_text(PROGRAM.format(stage=stage, leave=leave))
            jobs[stage, leave] = partial(mpirun, 3, [sys.executable, program], timeout=60, cwd=program.parent)
    with ahead(jobs) as done:
        yield done


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("stage", STAGES)
def test_the_others_hear_of_it_at_their_next_call(stage, leave, done_with):
    done = done_with((stage, leave))
    assert done.stdout.count("HpczeroError: rank 1 of 3 left its `with` block with an exception") == 2, done
    assert f"rank 1: {'KeyError' if 'KeyError' in leave else 'SystemExit'}" in done.stdout, done
