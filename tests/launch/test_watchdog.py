"""A rank that stops inside the MPI library's own collective: the others report it, and end the job at the limit."""

from __future__ import annotations

import sys

import pytest
from launcher import mpirun, mpirun_path

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")

STOPS = """
import logging, time
import numpy as np
from mpi4py import MPI
import hpczero
from hpczero.collectives import system
from hpczero.collectives.transport import Transport

logging.basicConfig(format="%(message)s")
comm = MPI.COMM_WORLD
topology = hpczero.Topology(comm)
topology.is_oversubscribed = False      # as with a core for each rank
transport = Transport.of(topology)
transport.report_s, transport.timeout_s = 0.5, 2.0
for _ in range(3):
    hpczero.all_reduce(np.ones(300000), topology, algorithm="system")
if comm.rank == 1:
    system._call = lambda *_: time.sleep(600)
print("all ranks go in", flush=True)
hpczero.all_reduce(np.ones(300000), topology, algorithm="system")
print("and out again", flush=True)
"""


def test_a_rank_that_stops_in_the_librarys_collective_is_reported_and_the_job_ends():
    done = mpirun(2, [sys.executable, "-c", STOPS], timeout=60)
    assert done.status not in (0, None), done
    assert done.seconds < 40, done
    assert done.stdout.count("all ranks go in") == 2 and "out again" not in done.stdout, done
    said = [line for line in done.stderr.splitlines() if "inside the MPI library for" in line]
    assert said[0].startswith("rank 0 of 2") and "all_reduce of 300000 elements" in said[0], done
    assert any("ending the job" in line for line in said[1:]), done
    assert "Allreduce" in done.stderr or "_call" in done.stderr, done      # the stack of the rank that waits
