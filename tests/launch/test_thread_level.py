"""MPI as the host program or the site has set it up: with less threads than we like, and with small eager limits.

Both are decided when MPI starts, so each case is a run of its own.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
from launcher import ahead, mpirun, mpirun_path

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")

FUNNELED = """
import os

import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
import numpy as np
import hpczero

comm = MPI.COMM_WORLD
names = [(MPI.THREAD_SINGLE, "single"), (MPI.THREAD_FUNNELED, "funneled"), (MPI.THREAD_SERIALIZED, "serialized")]
said = ["level " + dict(names).get(MPI.Query_thread(), "multiple")]
with hpczero.Topology(comm) as one_node, hpczero.Topology(comm, list(range(comm.size))) as spread:
    for topology in (one_node, spread):
        for count in (5, 30000):
            # Without a name the library first measures, for each of the five anew, which takes seconds.
            name = {"algorithm": "hierarchical"}
            shard = hpczero.reduce_scatter(np.ones(count), topology, **name)
            good = (hpczero.all_reduce(np.ones(count), topology, **name) == comm.size).all() and (shard == comm.size).all()
            whole = hpczero.all_gather(shard.copy(), topology, out=np.empty(count), **name)
            good = good and (whole == comm.size).all()
            good = good and (hpczero.broadcast(np.full(count, comm.rank), topology, root=1, **name) == 1).all()
            back = hpczero.reduce(np.ones(count), topology, root=1, **name)
            said.append("right" if good and (back is None or (back == comm.size).all()) else "wrong")
        for call in (hpczero.all_reduce, hpczero.reduce_scatter, hpczero.all_gather, hpczero.broadcast, hpczero.reduce):
            try:
                call(np.ones(5), topology, blocking=False)
                said.append("no error")
            except hpczero.ConfigError as error:
                said.append(f"refused: {error}")
    said.append("right" if (hpczero.all_reduce(np.ones(30000), one_node) == comm.size).all() else "wrong")
    weights = {"w": np.ones(1000, np.float32)}
    with hpczero.ZeroOptimizer(weights, hpczero.SGD(lr=0.5), one_node) as zero:
        for _ in range(3):
            zero.accumulate({"w": np.full(1000, 0.5 * comm.rank, np.float32)})
            report = zero.step()
        mean = 0.5 * (comm.size - 1) / 2
        good = report.applied and np.allclose(zero.params["w"], 1 - 3 * 0.5 * mean)
        said.append("trained" if good else f"not trained: {zero.params['w'][:3]}")
os.write(1, "".join(f"{line}\\n" for line in said).encode())
"""

WITH_EAGER_LIMITS = """
import os
import time

from mpi4py import MPI
import numpy as np
from hpczero import Topology, all_gather, all_reduce, broadcast, reduce, reduce_scatter
from hpczero.collectives import selection
from hpczero.collectives.api import shard_slice

comm = MPI.COMM_WORLD
# Whether a message of 2 KiB leaves before anybody asks for it.
if comm.rank == 0:
    request = comm.Isend(np.zeros(256), 1)
    end = time.monotonic() + 0.3
    while not (left := request.Test()) and time.monotonic() < end:
        pass
    comm.Barrier()
    request.Wait()
    os.write(1, b"eager\\n" if left else b"rendezvous\\n")
else:
    comm.Barrier()
    if comm.rank == 1:
        comm.Recv(np.zeros(256), 0)

calls = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "broadcast": broadcast,
         "reduce": reduce}
wrong = []
for nodes in (list(range(comm.size)), [rank % 2 for rank in range(comm.size)]):
    with Topology(comm, nodes) as topology:
        for operation, call in calls.items():
            for name in selection.candidates(selection.Call(operation, 0, topology.map, "any")):
                for count in (256, 2**18):      # 1 MiB of float32
                    shard = shard_slice(count, comm.rank, comm.size)
                    back = call(np.full(count, comm.rank + 1, np.float32), topology, algorithm=name)
                    value = {"broadcast": 1}.get(operation, comm.size * (comm.size + 1) // 2)
                    if operation == "all_gather":
                        right = all((back[shard_slice(count, rank, comm.size)] == rank + 1).all() for rank in range(comm.size))
                    else:
                        right = back is None or (back == value).all()
                    wrong += [] if right else [f"{operation} {name} {count}"]
        ring = all_reduce(np.ones(2**18, np.float32), topology, algorithm="ring", blocking=False).wait()
        wrong += [] if (ring == comm.size).all() else ["ring with a handle"]
os.write(1, f"wrong: {wrong}\\n".encode())
"""
# Longer messages wait until they are asked for. MPICH decides that in its own shared memory, or leaves it to UCX beneath.
NO_EAGER = {
    "MPIR_CVAR_CH4_IPC_CMA_P2P_THRESHOLD": "256",
    "UCX_RNDV_THRESH": "256",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl_sm_eager_limit": "256",
    "OMPI_MCA_btl_vader_eager_limit": "256",
}


@pytest.fixture(scope="module")
def done_with(tmp_path_factory):
    """How the program of that name ended."""
    folder = tmp_path_factory.mktemp("programs")
    for name, text in (("funneled", FUNNELED), ("eager", WITH_EAGER_LIMITS)):
        (folder / name).write_text(text)
    jobs = {
        "funneled": partial(mpirun, 2, [sys.executable, folder / "funneled"], timeout=120),
        "eager": partial(mpirun, 3, [sys.executable, folder / "eager"], timeout=120, env=NO_EAGER),
    }
    with ahead(jobs) as done:
        yield done


def test_a_host_program_with_one_thread_for_mpi_trains_and_communicates_and_handles_are_refused_in_words(done_with):
    done = done_with("funneled")
    assert done.status == 0, done
    lines = done.stdout.splitlines()
    if "level multiple" in lines:
        pytest.skip("this MPI library gives all threads, whatever is asked for")
    assert lines.count("level funneled") == 2, done
    assert lines.count("right") == 2 * 5 and "wrong" not in lines, done
    assert lines.count("trained") == 2, done
    refused = [line for line in lines if line.startswith("refused: ")]
    assert len(refused) == 2 * 2 * 5, done
    assert all("MPI_THREAD_MULTIPLE" in line and "started as funneled" in line for line in refused), done


def test_nothing_waits_for_a_message_to_leave_before_it_asks_for_its_own(done_with):
    done = done_with("eager")
    assert done.status == 0, done
    assert done.stdout.count("wrong: []") == 3, done
    if "rendezvous" not in done.stdout:
        pytest.skip("this MPI library sends 2 KiB eagerly, whatever limit is set: this has shown nothing")
