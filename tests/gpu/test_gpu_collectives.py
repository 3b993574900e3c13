"""Two ranks that share a real GPU: right sums by each route, and what part of the copy rate the routes reach."""

from __future__ import annotations

import json
import sys

import pytest
from launcher import mpirun

pytestmark = pytest.mark.gpu

# Each rank's program: sums of odd sizes from a stream of its own, after a slow kernel; then the rate at 256 MiB.
PROGRAM = """
import json, statistics, sys, time
import cupy
import numpy as np
from mpi4py import MPI
from hpczero import arrays
from hpczero.collectives import api
from hpczero.collectives.transport import Transport
from hpczero.topology import Topology

comm, count = MPI.COMM_WORLD, 2**26
wrong = []
with Topology(comm) as topology:
    for size in (1, 2**20 + 3, 3 * 2**20):
        with cupy.cuda.Stream(non_blocking=True):
            for make in (cupy.empty, lambda n, dtype: cupy.empty(n + 7, dtype)[7:]):
                x = make(size, np.float32)
                slow = cupy.zeros(2**24, np.float32)
                for _ in range(20):
                    cupy.sin(slow, out=slow)
                x[...] = cupy.arange(size) % 97 + comm.rank + slow[0]
                y = x * 2
                handle = api.all_reduce(y, topology, order="canonical", blocking=False)
                api.all_reduce(x, topology, order="canonical")
                handle.wait()
                y -= 2 * x      # on this stream, which waits for the thread's
                expected = comm.size * (np.arange(size) % 97) + comm.size * (comm.size - 1) / 2
                if not np.array_equal(arrays.to_host(x), expected.astype(np.float32)) or arrays.to_host(y).any():
                    wrong.append(size)
    x, times = cupy.ones(count, np.float32), []
    for _ in range(7):
        arrays.synchronize(x)
        comm.Barrier()
        start = time.perf_counter()
        api.all_reduce(x, topology)
        arrays.synchronize(x)
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    pinned = arrays.pinned(x, x.nbytes).view(np.float32)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(5):
        arrays.copy_async(pinned, x).synchronize()
    copied = comm.allreduce((time.perf_counter() - start) / 5, MPI.MAX)
    routes = [Transport.of(topology).reads(x), Transport.of(topology).bytes_sent["node"] > 0]
if comm.rank == 0:
    print(json.dumps({"wrong": wrong, "all_reduce_GBps": x.nbytes / statistics.median(times[2:]) / 1e9,
                      "pinned_copy_GBps": x.nbytes / copied / 1e9, "routes": routes}))
"""


@pytest.mark.parametrize("route", ["staged", "ipc", "auto"])
def test_two_ranks_that_share_the_gpu_add_up_right(route, tmp_path, record_property):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = mpirun(2, [sys.executable, "program.py"], timeout=180, env={"HPCZERO_DEVICE_TRANSFER": route}, cwd=tmp_path)
    assert done.status == 0, done
    found = json.loads(done.stdout.strip().splitlines()[-1])
    record_property(route, found)      # rates, for whoever runs this with --junit-xml
    assert found["wrong"] == [] and found["routes"][1]
