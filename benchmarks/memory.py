"""All-reduce in shared memory beside what the memory can carry: a triad on all ranks at once.

    mpirun -n 2 python benchmarks/memory.py [--size 64MiB] [--rounds 15] [--json FILE]

On one node. Bytes of an all-reduce of n bytes on each of L ranks, on arrays of `topology.empty` (docstring of
`hpczero.collectives.window`): L n read and n written to add, 2 (L - 1) n to copy what the others have added. The triad
a = b + s c moves 3 n per rank, counted as in STREAM, and its arrays are as large, written before (pages that never were
would all be the one page of zeros), and lie at odd distances. Both take turns; medians over the rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("OMPI_MCA_osc", "^ucx")      # silences Open MPI about shared windows; only a program may set it

import numba
import numpy as np
from mpi4py import MPI

import hpczero
from hpczero.settings import Size


@numba.njit(nogil=True, error_model="numpy")
def triad(a, b, c, s):
    for i in range(a.size):
        a[i] = b[i] + s * c[i]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="64MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    comm, count = MPI.COMM_WORLD, Size.parse(options.size).count // 4
    with hpczero.Topology(comm) as topology:
        if topology.num_nodes > 1:
            raise SystemExit("one node is needed: the window of several is not what this measures")
        window = topology.empty(count, np.float32)
        a, b, c = (np.full(count + 80 * place, 1.0, np.float32)[80 * place:] for place in range(3))
        calls = {"triad": lambda: triad(a, b, c, np.float32(3)),
                 "window": lambda: hpczero.all_reduce(window, topology, algorithm="window")}
        seconds = np.empty((options.rounds, len(calls)))
        for index in range(-2, options.rounds):
            for column, call in enumerate(calls.values()):
                comm.Barrier()
                start = time.perf_counter()
                call()
                seconds[max(index, 0), column] = time.perf_counter() - start
        slowest = np.empty((comm.size, *seconds.shape))
        comm.Allgather(seconds, slowest)
        times = dict(zip(calls, np.median(slowest.max(axis=0), axis=0).tolist(), strict=True))
    ranks, nbytes = comm.size, 4 * count
    moved = {"triad": 3 * ranks * nbytes, "window": (ranks + 1 + 2 * (ranks - 1)) * nbytes}
    rates = {name: moved[name] / times[name] for name in calls}
    if comm.rank == 0:
        print(f"# {ranks} ranks, {nbytes} B, hpczero {hpczero.__version__}, {MPI.Get_library_version().split(chr(10))[0]}")
        for name in calls:
            print(f"{name:>8} {times[name] * 1e3:9.3f} ms   {moved[name] / 2**20:9.1f} MiB   {rates[name] / 1e9:6.2f} GB/s")
        print(f"the window reaches {rates['window'] / rates['triad']:.2f} of the triad's bandwidth")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"ranks": ranks, "bytes": nbytes, "seconds": times, "bytes_per_second": rates}, file, indent=1)


if __name__ == "__main__":
    main()
